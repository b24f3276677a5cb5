"""The actual cost of the operations in a ledger (L4, M4): its bill, and the facts for a forecast and a comparison.

`bill_facts` has the counts. This module gives them to `twinbus.money`, which computes the costs. Needs no Spark:
`cost_facts.compute_actual_cost` makes an ActualCost on Spark, and `twinbus.answers` from the result tables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

from twinbus.ledger import Stage
from twinbus.money import (
    CostResult,
    LedgerFacts,
    MessageMix,
    Observed,
    ObservedFailover,
    ObservedOutage,
    OutageKind,
    PingKind,
    Prices,
    Scenario,
    SharedStateIn,
    StageSpending,
    SyphonRuns,
    actual_bill,
    cost_result,
)
from twinbus.pipeline.bill_facts import SUBSCRIPTIONS, BillFacts, FactRow, metered_stage, sum_of
from twinbus.pipeline.report_data import WriterClock

_RECEIVERS: Final = ("receive", "receive_deferred")
_SETTLES: Final = frozenset({"abandon", "defer", "release", "dead_letter"})
_SPANS: Final = ("failover_interval", "ping_interval", "backlog_check_interval")
_MANY_REASONS: Final = 3


class ActualCost:
    """The actual cost of the days of some facts.

    `incidents` are those of the same days. `incomplete` has the reasons why the ledger does not have everything.
    `clocks` are the writers whose clocks differ from the broker's; the times of `facts` are corrected by that.
    `long_poll` replaces the length that the syphons recorded.
    """

    def __init__(
        self,
        facts: BillFacts,
        incidents: Sequence[FactRow],
        incomplete: Sequence[str],
        clocks: Sequence[WriterClock],
        *,
        long_poll: timedelta | None = None,
    ) -> None:
        self._options = facts.options()
        poll = long_poll or self._recorded_options()["long_poll"]
        self._stages, self._runs, self._incidents = facts.stages(), facts.syphon_runs(), incidents
        self._copies, self._dead_lettered = facts.copies()
        self._destinations, self._receivers = facts.destinations(), facts.receivers()
        self._meters, self._incomplete, self._clocks = facts.meters(), incomplete, clocks
        self._overview = facts.overview(poll.total_seconds())
        self._months = _by_month(self._stages, self._meters)
        received = {path: count for path, count in self._received().items() if SUBSCRIPTIONS in path}
        self._topics = Counter(path.partition(SUBSCRIPTIONS)[0] for path in received)
        """Number of subscriptions with receives, by topic in lower case."""
        self._received_of = Counter[str]()
        """Messages that were received from all subscriptions of a topic, by topic in lower case."""
        for path, count in received.items():
            self._received_of[path.partition(SUBSCRIPTIONS)[0]] += count

    @property
    def seconds(self) -> float:
        """Time from the first operation to the end of the last one."""
        found = self._overview
        return 0.0 if found.began is None else max((found.ended - found.began) / 1000, 0.0)

    # --- the bill ----------------------------------------------------------------------------------------------------

    def result(
        self, prices: Prices | None, asked: Mapping[str, Any] | None = None, notes: Sequence[str] = ()
    ) -> CostResult:
        """Returns the bill, and the forecast beside it.

        There always is a bill: without operations an empty one, without prices (None) one in units. `asked` has the
        fields of a Scenario that the user gave: they replace what the ledger shows. `notes` are the caller's, and come
        first.
        """
        asked = asked or {}
        wanted = ("tier", "bandwidth", "messaging_units", "other_operations")
        scenario = Scenario(**{name: asked[name] for name in wanted if name in asked})
        seen, assumed = self.scenario()
        told = [*notes, *self._notes(), *assumed] if self._months else [*notes, *self._notes()]
        bill = actual_bill(self._months, self.seconds, prices, scenario, told)
        return cost_result(bill, self.facts(), seen, asked, prices)

    def _notes(self) -> list[str]:
        notes = [] if self._months else ["the ledger has no operation in this window"]
        if missing := sorted(self._incomplete):
            shown = "; ".join(missing[:_MANY_REASONS])
            more = f"; and {len(missing) - _MANY_REASONS:,} more" if len(missing) > _MANY_REASONS else ""
            notes.append(f"the ledger may not hold every operation, so the bill may be too low: {shown}{more}")
        notes += [
            f"the clock of writer {clock.writer} was set while it ran: it was between {clock.least:,.0f} s and "
            f"{clock.most:,.0f} s ahead. Its times are not corrected, so the period may be wrong"
            for clock in self._clocks
            if clock.most is not None
        ]
        return [*notes, *self._meter_notes()]

    def _meter_notes(self) -> Iterator[str]:
        """Yields the stages in which the meters of the namespaces counted other units than the bill has.

        A failed call may have reached the namespace or not. A meter does not know whether a sender or a syphon sends.
        """
        metered, billed, failed = Counter[str](), Counter[str](), Counter[str]()
        for row in self._meters:
            metered[metered_stage(row.operation, backlog=row.backlog)] += row.units
        for used in self._months.values():
            for one in used:
                stage = Stage.SEND_PRIMARY if one.stage == Stage.RETURN_PRIMARY else one.stage
                stage = Stage.SEND_BACKLOG if stage == Stage.RESUBMIT_BACKLOG else stage
                billed[stage] += one.units
                failed[stage] += one.failed_units
        for stage, units in sorted(metered.items()):
            if not billed[stage] - failed[stage] <= units <= billed[stage]:
                # A meter writes once per interval what it counted.
                why = " (a killed namespace loses its last counts)" if units < billed[stage] else ""
                name = stage.replace("_", " ")
                yield f"{name}: the bill has {billed[stage]:,} units, the meters counted {units:,}{why}"

    # --- facts -------------------------------------------------------------------------------------------------------

    def facts(self) -> LedgerFacts:
        """Returns the counts that explain differences from a forecast."""
        settled = [row for row in self._meters if not row.backlog and row.operation in _SETTLES]
        return LedgerFacts(
            sent=self._messages(Stage.SEND_PRIMARY),
            scheduled=self._messages(Stage.SCHEDULE_PRIMARY),
            diverted=self._messages(Stage.SEND_BACKLOG),
            returned=self._messages(Stage.RETURN_PRIMARY),
            resubmitted=self._messages(Stage.RESUBMIT_BACKLOG),
            dead_lettered=self._dead_lettered,
            copies=self._copies,
            short_polls=self._overview.short_polls,
            manage=self._management(),
            deliverable=sum(
                (row.sent + row.scheduled + row.returned) * self._subscriptions(row) for row in self._destinations
            ),
            subscriptions=self._topics.total(),
            settled=max(self._messages(Stage.SETTLE_PRIMARY), sum_of(settled, "count")),
        )

    def _messages(self, stage: str) -> int:
        return sum_of((row for row in self._stages if row.stage == stage), "messages")

    def _management(self) -> dict[str, int]:
        found = Counter[str]()
        for row in self._stages:
            if row.stage == Stage.MANAGE and row.failure is None:
                found[row.role or "program"] += row.messages
        return dict(found)

    def _received(self) -> Counter[str]:
        """Returns how many messages were received from each queue and subscription of the primary.

        A meter counts the receives of all programs, and the ledger those of pairs. The larger number counts.
        """
        metered = Counter[str]()
        for row in self._meters:
            if not row.backlog and row.operation in _RECEIVERS:
                metered[row.entity] += row["count"]
        return metered | Counter(self._receivers)

    def _subscriptions(self, row: FactRow) -> int:
        """Returns how many queues or subscriptions get a message that is sent to the destination of `row`.

        The rules of a subscription are not in the ledger. So the number of subscriptions that get a message follows
        from the messages that were received from all of them.
        """
        topic = row.destination.partition("/")[2]
        sent = row.sent + row.scheduled + row.returned
        often = round(self._received_of[topic] / sent) if sent else self._topics[topic]
        return max(min(often, self._topics[topic]), 1)

    # --- what really happened ----------------------------------------------------------------------------------------

    def scenario(self) -> tuple[dict[str, Any], list[str]]:
        """Returns values for the fields of a Scenario from the ledger, and notes on values that are assumed."""
        found, sent, diverted = self._overview, self._messages(Stage.SEND_PRIMARY), self._messages(Stage.SEND_BACKLOG)
        seconds = max(self.seconds, 1.0)
        outages = self._outages()
        seen: dict[str, Any] = {
            "period": timedelta(seconds=seconds),
            "outages": len(outages),
            "sent": sent,
            "diverted": diverted,
            "rate": (sent + diverted) / seconds,
            "batch": max(1, round((sent + diverted) / max(found.send_calls, 1))),
            "outage_kind": OutageKind.ANSWERING if found.answered else OutageKind.UNREACHABLE,
            "count_interval": timedelta(0),
            **self._recorded_options(),
            **self._syphons(outages),
        }
        for field, count in (("entities", found.entities), ("clients", found.clients)):
            if count:
                seen[field] = count
        if found.queues:
            seen["backlog_queues"] = max(found.queues, seen.get("backlog_queues", 1))
        if outages:
            seen["outage"] = timedelta(seconds=sum(one.seconds for one in outages) / len(outages))
        mixes = (self._mix("sent"), self._mix("diverted"))
        if known := [mix for mix in mixes if mix is not None]:
            seen["message_size"] = sum(mix.bytes for mix in known) // sum(mix.messages for mix in known)
            seen["subscriptions"] = max(self._topics.values(), default=0)
        seen["observed"] = self._observed(outages, *mixes)
        return seen, self._assumed()

    def _assumed(self) -> list[str]:
        notes = []
        if not self._options.pairs:
            notes.append("the ledger has no options of a pair: default intervals are assumed")
        elif any(options != self._options.pairs[0] for options in self._options.pairs):
            notes.append("pairs with different options wrote this ledger: the latest options are used for all")
        if self._runs and not self._options.syphons:
            notes.append("the ledger has no options of a syphon: its long poll is assumed to be 15 minutes")
        return notes

    def _recorded_options(self) -> dict[str, Any]:
        """Returns the options that the latest pair and the latest syphon recorded."""
        found: dict[str, Any] = {"long_poll": Scenario().long_poll}
        for options in self._options.pairs[:1]:
            found |= {name: timedelta(seconds=float(options[name])) for name in _SPANS if name in options}
            found |= {name: int(options[name]) for name in ("backlog_queues", "tries") if name in options}
            if "ping_jitter" in options:
                found["ping_jitter"] = float(options["ping_jitter"])
            if options.get("ping") in ("message", "link"):
                found["ping"] = PingKind(options["ping"])
            if options.get("state") == SharedStateIn.SECONDARY:
                found["state"] = SharedStateIn.SECONDARY
        for options in self._options.syphons[:1]:
            found |= {"long_poll": timedelta(seconds=float(options["poll"]))} if "poll" in options else {}
        return found

    def _syphons(self, outages: Sequence[ObservedOutage]) -> dict[str, Any]:
        """Returns how many syphons there were, and whether they were standing."""
        if not self._runs:
            return {"syphons": 0}
        if self._options.syphons:
            standing = not all(map(_drains, self._options.syphons))
        else:
            first = min((row.restored or self._overview.ended for row in self._incidents), default=0)
            standing = not outages or min(row.began for row in self._runs) < first
        if not standing:
            return {"syphons": 1, "syphon": SyphonRuns.AFTER}
        busy = sum(row.ended - row.began for row in self._runs) / 1000
        return {"syphons": max(1, round(busy / max(self.seconds, 1.0))), "syphon": SyphonRuns.STANDING}

    def _mix(self, name: str) -> MessageMix | None:
        """Returns the messages `sent` or `diverted`: number, units and bytes, of messages and of their copies."""
        sums = [0] * 6
        for row in self._destinations:
            figures = (row[name], row[f"{name}_units"], row[f"{name}_bytes"])
            copies = self._subscriptions(row)
            sums = [
                total + more for total, more in zip(sums, (*figures, *(copies * one for one in figures)), strict=True)
            ]
        return MessageMix(*sums) if sums[0] else None

    def _home_mix(self) -> MessageMix | None:
        """Returns the diverted messages with the sizes that the returned messages of the same entity have."""
        sums = [0] * 6
        for row in self._destinations:
            source, share = ("returned", row.diverted / row.returned) if row.returned else ("diverted", 1.0)
            sizes = (round(row[f"{source}_{kind}"] * share) for kind in ("units", "bytes"))
            figures, copies = (row.diverted, *sizes), self._subscriptions(row)
            sums = [
                total + more for total, more in zip(sums, (*figures, *(copies * one for one in figures)), strict=True)
            ]
        return MessageMix(*sums) if sums[0] else None

    def _observed(
        self, outages: Sequence[ObservedOutage], sent: MessageMix | None, diverted: MessageMix | None
    ) -> Observed:
        runs = sum(row.ended - row.began for row in self._runs) / 1000
        return Observed(
            outages=tuple(outages),
            sent=sent,
            diverted=diverted,
            home=self._home_mix(),
            syphon_seconds=runs if self._runs else None,
            drains=sum(map(_drains, self._options.syphons)) if self._options.syphons else None,
        )

    def _outages(self) -> list[ObservedOutage]:
        """Returns the outages. Failovers that overlap in time are one outage.

        Messages that were diverted outside of every failover are an outage of their own, without failovers.
        """
        newest = self._overview.ended or 0
        groups: list[list[FactRow]] = []
        until = 0
        for row in sorted((row for row in self._incidents if row.began is not None), key=lambda row: row.began):
            if groups and row.began <= until:
                groups[-1].append(row)
            else:
                groups.append([row])
            until = max(until, row.restored or newest)
        found = [_outage(group, newest) for group in groups]
        others = self._messages(Stage.SEND_BACKLOG) - sum(one.diverted for one in found)
        if others > 0:
            found.append(ObservedOutage(seconds=0.0, diverted=others))
        return found


def _drains(options: Mapping[str, str]) -> bool:
    """Returns whether a syphon with these options ends when the backlog is empty."""
    return options.get("drain", "").lower() == "true"


def _outage(incidents: Sequence[FactRow], newest: int) -> ObservedOutage:
    began, ended = min(row.began for row in incidents), max(row.restored or newest for row in incidents)
    drained = max((row.drained or ended for row in incidents), default=ended)
    return ObservedOutage(
        seconds=max(ended - began, 0) / 1000,
        drain_seconds=max(drained - ended, 0) / 1000,
        diverted=sum_of(incidents, "diverted"),
        failovers=tuple(
            ObservedFailover(
                seconds=max((row.restored or newest) - row.began, 0) / 1000,
                processes=row.processes,
                restored=row.restored is not None,
            )
            for row in incidents
        ),
    )


def _by_month(stages: Sequence[FactRow], meters: Sequence[FactRow]) -> dict[str, list[StageSpending]]:
    """Returns the use of each stage by month, without requests that were not sent.

    The meter of a namespace counts the operations of all receivers, the ledger only those of a pair. So for the stages
    of receivers the larger count is used.
    """
    months: dict[str, dict[str, StageSpending]] = {}
    for row in stages:
        one = StageSpending(
            stage=row.stage,
            units=row.units,
            bytes=row.bytes,
            large_units=row.large,
            failed={row.failure: row.failed} if row.failed else {},
            unsent_units=row.unsent,
        )
        _add(months.setdefault(row.month, {}), one)
    metered: dict[str, dict[str, StageSpending]] = {}
    for row in meters:
        stage = metered_stage(row.operation, backlog=row.backlog)
        if not row.backlog and stage not in _SENDERS:
            one = StageSpending(stage=stage, units=row.units, bytes=row.bytes, large_units=row.units - row["count"])
            _add(metered.setdefault(row.month, {}), one)
    for month, found in metered.items():
        own = months.setdefault(month, {})
        for stage, one in found.items():
            if stage not in own or one.units > own[stage].units:
                own[stage] = one
    return {month: list(found.values()) for month, found in months.items() if found}


_SENDERS: Final = frozenset({Stage.SEND_PRIMARY, Stage.SCHEDULE_PRIMARY, Stage.CANCEL_PRIMARY, Stage.PING})
"""Stages of senders. Their operations are in the ledger of the pair; a meter cannot tell a sender from a syphon."""


def _add(found: dict[str, StageSpending], one: StageSpending) -> None:
    found[one.stage] = found[one.stage].plus(one) if one.stage in found else one
