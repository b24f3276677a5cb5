"""Prices as data, what a scenario will cost, and what was used as a bill (M1–M4)."""

from twinbus.money.billing import Bill, Line, Usage, bill
from twinbus.money.forecast import Forecast, Idle, Passage, Phase, forecast
from twinbus.money.prices import Prices, PricesError
from twinbus.money.scenario import OutageKind, PingKind, Scenario, ScenarioError, SyphonRuns

__all__ = [
    "Bill",
    "Forecast",
    "Idle",
    "Line",
    "OutageKind",
    "Passage",
    "Phase",
    "PingKind",
    "Prices",
    "PricesError",
    "Scenario",
    "ScenarioError",
    "SyphonRuns",
    "Usage",
    "bill",
    "forecast",
]
