"""Hypothesis strategies for entries of every kind."""

from hypothesis import strategies as st

from twinbus.ledger.entries import (
    Closed,
    Dropped,
    Ended,
    Entry,
    Gap,
    Intent,
    Metered,
    Move,
    Movement,
    Operation,
    Outcome,
    Role,
    SegmentHeader,
    Stage,
    State,
)

TEXTS = st.text(st.characters(), max_size=20)
NUMBERS = st.integers(0, 2**62)
IDS = st.lists(TEXTS, max_size=3).map(tuple)
# Written in microseconds.
SECONDS = st.integers(0, 10**9).map(lambda millionths: round(millionths / 10**6, 6))
# Without NaN and infinities: JSON cannot express them.
FACTS = st.dictionaries(TEXTS, TEXTS | NUMBERS | st.booleans() | st.floats(allow_nan=False, allow_infinity=False))
OPTIONAL = st.none() | TEXTS
# Every writer makes its own ids, of these characters.
NUMBER = st.from_regex(r"[0-9a-f]{16}-[0-9]{1,6}", fullmatch=True)

_FIRST = {"at": NUMBERS, "id": NUMBER}
_BEGUN = {
    "stage": st.sampled_from(Stage),
    "namespace": TEXTS,
    "entity": TEXTS,
    "ids": IDS,
    "bytes": NUMBERS,
    "units": NUMBERS,
    "destination": OPTIONAL,
    "broker_at": st.none() | NUMBERS,
    "waited": st.lists(NUMBERS, max_size=3).map(tuple),
}
_ENDED = {"seconds": SECONDS, "result": TEXTS | st.sampled_from(["ok", "unknown"]), "cause": OPTIONAL, "failed": IDS}
_SPAN = {"count": NUMBERS, "since": NUMBERS, "until": NUMBERS}

ENTRIES: dict[type, st.SearchStrategy[Entry]] = {
    SegmentHeader: st.builds(
        SegmentHeader,
        **_FIRST,
        writer=TEXTS,
        role=st.sampled_from(Role),
        host=TEXTS,
        pid=NUMBERS,
        version=TEXTS,
        segment=NUMBERS,
        durability=OPTIONAL,
    ),
    Closed: st.builds(Closed, **_FIRST, writer=TEXTS),
    Ended: st.builds(Ended, **_FIRST, writer=TEXTS, by=TEXTS, segment=NUMBERS),
    Intent: st.builds(Intent, **_FIRST, **_BEGUN),
    Outcome: st.builds(Outcome, **_FIRST, **_ENDED),
    Operation: st.builds(Operation, **_FIRST, **_BEGUN, **_ENDED, count=st.none() | NUMBERS),
    State: st.builds(State, **_FIRST, event=TEXTS, pair=TEXTS, facts=FACTS),
    Movement: st.builds(
        Movement,
        **_FIRST,
        move=st.sampled_from(Move),
        ids=IDS,
        source=TEXTS,
        destination=TEXTS,
        reason=OPTIONAL,
        op=OPTIONAL,
    ),
    Metered: st.builds(
        Metered, **_FIRST, **_SPAN, namespace=TEXTS, entity=TEXTS, operation=TEXTS, bytes=NUMBERS, units=NUMBERS
    ),
    Gap: st.builds(Gap, **_FIRST, **_SPAN, reason=TEXTS),
    Dropped: st.builds(Dropped, **_FIRST, **_SPAN, bytes=NUMBERS),
}
