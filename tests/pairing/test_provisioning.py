"""The decisions of provisioning for every answer that a secondary can give, without a real secondary."""

from collections.abc import Callable, Iterable, Mapping

import pytest

from twinbus.backlog import FailureKind
from twinbus.pairing.errors import QueueCause
from twinbus.pairing.provisioning import (
    BACKGROUND_PAUSES,
    PROPERTIES,
    CreateQueues,
    GetQueues,
    Pause,
    Provisioned,
    ProvisioningError,
    ProvisioningRequest,
    ProvisioningSteps,
    QueueAnswer,
    QueueFailure,
    background_pause,
    provisioning_again,
    provisioning_steps,
)

A, B, C = (f"contoso/x-servicebus-transfer/{index}" for index in range(3))
LOST = QueueFailure(FailureKind.CONNECTION_LOST, "refused")
DENIED = QueueFailure(FailureKind.UNAUTHORIZED, "Manage claim is required")
Scripted = Mapping[str, Iterable[QueueAnswer | QueueFailure]]


class Secondary:
    """Answers from a script: the answers of each queue in order, then the last one again. Records the requests."""

    def __init__(self, looks: Scripted, creates: Scripted | None = None) -> None:
        self.asked: list[ProvisioningRequest] = []
        self._looks = {path: list(answers) for path, answers in looks.items()}
        self._creates = {path: list(answers) for path, answers in (creates or {}).items()}

    def run(self, steps: ProvisioningSteps) -> Provisioned:
        outcomes = None
        while True:
            try:
                request = steps.send(outcomes)  # type: ignore[arg-type]  # None starts a generator
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]  # typeshed: the value of any generator
            self.asked.append(request)
            outcomes = {} if isinstance(request, Pause) else self._answers(request)

    def count(self, kind: type[ProvisioningRequest], path: str) -> int:
        return sum(1 for request in self.asked if isinstance(request, kind) and path in getattr(request, "paths", ()))

    def _answers(self, request: GetQueues | CreateQueues) -> dict[str, QueueAnswer | QueueFailure]:
        script = self._looks if isinstance(request, GetQueues) else self._creates
        return {path: script[path].pop(0) if len(script[path]) > 1 else script[path][0] for path in request.paths}


def test_p5_a_backlog_queue_has_exactly_these_properties() -> None:
    assert PROPERTIES == {
        "max_size_in_megabytes": 5120,
        "max_delivery_count": 2147483647,
        "default_message_time_to_live": "P10675199DT2H48M5.4775807S",
        "auto_delete_on_idle": "P10675199DT2H48M5.4775807S",
        "lock_duration": "PT1M",
        "dead_lettering_on_message_expiration": True,
        "enable_batched_operations": True,
    }


def test_p6_what_is_found_is_not_created() -> None:
    secondary = Secondary({A: [QueueAnswer.FOUND], B: [QueueAnswer.FOUND]})
    assert secondary.run(provisioning_steps([A, B])) == Provisioned(found=(A, B))
    assert secondary.asked == [GetQueues((A, B))]


def test_p6_only_what_is_missing_is_created() -> None:
    secondary = Secondary({A: [QueueAnswer.FOUND], B: [QueueAnswer.MISSING]}, {B: [QueueAnswer.CREATED]})
    assert secondary.run(provisioning_steps([A, B])) == Provisioned(found=(A, B), created=(B,))
    assert secondary.asked == [GetQueues((A, B)), CreateQueues((B,))]


@pytest.mark.parametrize(
    "failing",
    [
        lambda: Secondary({A: [LOST]}),
        lambda: Secondary({A: [QueueAnswer.MISSING]}, {A: [LOST]}),
    ],
    ids=["looking", "creating"],
)
def test_p7_a_queue_is_tried_three_times_with_pauses(failing: Callable[[], Secondary]) -> None:
    secondary = failing()
    with pytest.raises(ProvisioningError) as raised:
        secondary.run(provisioning_steps([A]))
    assert secondary.count(GetQueues, A) == 3
    pauses = [request.seconds for request in secondary.asked if isinstance(request, Pause)]
    assert pauses == [1.0, 3.0]
    assert raised.value.causes == (QueueCause(A, FailureKind.CONNECTION_LOST, "refused"),)


def test_p7_only_those_that_failed_are_tried_again() -> None:
    secondary = Secondary({A: [QueueAnswer.FOUND], B: [LOST, QueueAnswer.MISSING]}, {B: [QueueAnswer.CREATED]})
    assert secondary.run(provisioning_steps([A, B])) == Provisioned(found=(A, B), created=(B,))
    assert secondary.asked == [GetQueues((A, B)), Pause(1.0), GetQueues((B,)), CreateQueues((B,))]


@pytest.mark.parametrize("kind", [FailureKind.UNAUTHORIZED, FailureKind.AUTHENTICATION])
def test_p7_an_authorization_failure_ends_it_at_once(kind: FailureKind) -> None:
    secondary = Secondary({A: [QueueFailure(kind, "no")], B: [QueueAnswer.MISSING]}, {B: [QueueFailure(kind, "no")]})
    with pytest.raises(ProvisioningError) as raised:
        secondary.run(provisioning_steps([A, B]))
    assert secondary.asked == [GetQueues((A, B)), CreateQueues((B,))]
    assert {cause.queue for cause in raised.value.causes} == {A, B}
    assert "Manage" in raised.value.hint


def test_p7_already_exists_counts_as_found() -> None:
    secondary = Secondary({A: [QueueAnswer.MISSING, QueueAnswer.FOUND]}, {A: [QueueAnswer.EXISTS]})
    assert secondary.run(provisioning_steps([A])) == Provisioned(found=(A,))


def test_p7_already_exists_counts_as_found_even_if_it_cannot_be_seen() -> None:
    secondary = Secondary({A: [QueueAnswer.MISSING, LOST]}, {A: [QueueAnswer.EXISTS]})
    assert secondary.run(provisioning_steps([A])).found == (A,)


def test_p7_a_topic_of_that_name_is_no_backlog_queue() -> None:
    secondary = Secondary({A: [QueueAnswer.MISSING], B: [QueueAnswer.FOUND]}, {A: [QueueAnswer.EXISTS]})
    done = secondary.run(provisioning_steps([A, B]))
    assert done.found == (B,)
    assert [cause.queue for cause in done.failed] == [A]


def test_p7_queues_that_failed_drop_out_with_their_causes() -> None:
    secondary = Secondary({A: [DENIED], B: [QueueAnswer.FOUND], C: [LOST]})
    done = secondary.run(provisioning_steps([A, B, C]))
    assert done.found == (B,)
    assert done.failed == (
        QueueCause(A, FailureKind.UNAUTHORIZED, "Manage claim is required"),
        QueueCause(C, FailureKind.CONNECTION_LOST, "refused"),
    )


def test_p7_the_error_names_every_queue_and_its_cause() -> None:
    secondary = Secondary({A: [DENIED], B: [LOST]})
    with pytest.raises(ProvisioningError) as raised:
        secondary.run(provisioning_steps([A, B]))
    for said in (A, B, "unauthorized", "connection_lost", "Manage claim is required"):
        assert said in str(raised.value)


def test_p8_assume_asks_nobody() -> None:
    secondary = Secondary({})
    assert secondary.run(provisioning_steps([A, B], assume=True)) == Provisioned(found=(A, B))
    assert secondary.asked == []


def test_p8_in_the_background_a_secondary_that_is_away_is_no_error() -> None:
    secondary = Secondary({A: [LOST], B: [LOST]})
    done = secondary.run(provisioning_steps([A, B], background=True))
    assert done.found == ()
    assert [cause.queue for cause in done.failed] == [A, B]
    assert secondary.asked == [GetQueues((A, B))]


def test_p8_in_the_background_a_refused_credential_is_still_an_error() -> None:
    with pytest.raises(ProvisioningError):
        Secondary({A: [DENIED], B: [DENIED]}).run(provisioning_steps([A, B], background=True))


def test_p8_it_goes_on_trying_without_ever_raising() -> None:
    secondary = Secondary({A: [LOST, DENIED, QueueAnswer.MISSING]}, {A: [QueueAnswer.CREATED]})
    rounds = [secondary.run(provisioning_again([A])) for _ in range(3)]
    assert [len(done.found) for done in rounds] == [0, 0, 1]
    assert not any(isinstance(request, Pause) for request in secondary.asked)


def test_p8_pauses_in_the_background_grow_and_then_stay() -> None:
    pauses = [background_pause(tries) for tries in range(1, 10)]
    assert pauses == sorted(pauses)
    assert pauses[0] == BACKGROUND_PAUSES[0]
    assert pauses[-1] == BACKGROUND_PAUSES[-1]
