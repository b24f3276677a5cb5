"""Prices as data, the forecast of a cost, bills, and the comparison of forecast and actual cost (L4, M1–M4)."""

from twinbus.money.actual_bill import ActualBill, StageSpending, actual_bill
from twinbus.money.billing import Bill, BillLine, Usage, bill
from twinbus.money.facts import SHORT_POLL, CopyFacts, LedgerFacts
from twinbus.money.forecast import STATE_WRITES, CostPhase, Forecast, IdleReceives, StageUnits, forecast
from twinbus.money.forecast_vs_actual import (
    EMPTY_PRIMARY,
    SESSIONS_PRIMARY,
    UNEXPLAINED,
    Comparison,
    CostResult,
    DifferencePart,
    StageDifference,
    compare,
    cost_result,
)
from twinbus.money.observed import MessageMix, Observed, ObservedFailover, ObservedOutage
from twinbus.money.outage_model import OutageModel
from twinbus.money.prices import Prices, PriceScale, PricesError, Tier, default_price_text
from twinbus.money.scenario import OutageKind, PingKind, Scenario, ScenarioError, SharedStateIn, SyphonRuns

__all__ = [
    "EMPTY_PRIMARY",
    "SESSIONS_PRIMARY",
    "SHORT_POLL",
    "STATE_WRITES",
    "UNEXPLAINED",
    "ActualBill",
    "Bill",
    "BillLine",
    "Comparison",
    "CopyFacts",
    "CostPhase",
    "CostResult",
    "DifferencePart",
    "Forecast",
    "IdleReceives",
    "LedgerFacts",
    "MessageMix",
    "Observed",
    "ObservedFailover",
    "ObservedOutage",
    "OutageKind",
    "OutageModel",
    "PingKind",
    "PriceScale",
    "Prices",
    "PricesError",
    "Scenario",
    "ScenarioError",
    "SharedStateIn",
    "StageDifference",
    "StageSpending",
    "StageUnits",
    "SyphonRuns",
    "Tier",
    "Usage",
    "actual_bill",
    "bill",
    "compare",
    "cost_result",
    "default_price_text",
    "forecast",
]
