"""Prices as data, the forecast of a cost, bills, and the comparison of forecast and actual cost (M1–M4)."""

from twinbus.money.billing import Bill, BillLine, Usage, bill, unit_price
from twinbus.money.forecast import CostPhase, Forecast, IdleReceives, StageUnits, forecast
from twinbus.money.forecast_vs_actual import (
    EMPTY_PRIMARY,
    Comparison,
    DifferencePart,
    StageDifference,
    StageSpending,
    compare,
)
from twinbus.money.prices import Prices, PriceScale, PricesError, Tier, default_price_text
from twinbus.money.scenario import OutageKind, PingKind, Scenario, ScenarioError, SyphonRuns

__all__ = [
    "EMPTY_PRIMARY",
    "Bill",
    "BillLine",
    "Comparison",
    "CostPhase",
    "DifferencePart",
    "Forecast",
    "IdleReceives",
    "OutageKind",
    "PingKind",
    "PriceScale",
    "Prices",
    "PricesError",
    "Scenario",
    "ScenarioError",
    "StageDifference",
    "StageSpending",
    "StageUnits",
    "SyphonRuns",
    "Tier",
    "Usage",
    "bill",
    "compare",
    "default_price_text",
    "forecast",
    "unit_price",
]
