"""X2: bytes of database and log are changed in turn, by seed. Nothing is altered, and nothing is gone silently.

Each sample changes one byte of a copy of the files, and opens it. Either the store is refused, or everything in it is
as it was acknowledged, or the read of a message reports it as damaged. With `accept_damage`, every message is there as
it was, or is counted as lost.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from tests.crash.damaged_files import COMMITS, NAME, Image, change_byte, damage_more, make_image
from tests.crash.power_loss import leave_old_counter
from tests.namespace.store.sample_writes import everything
from tests.namespace.store.store_model import Model, assert_shows
from tests.tiers import budget
from twinbus.namespace.engine.storage_protocol import OpenedStore
from twinbus.namespace.store import SqliteStore, StoreDamagedError, StoreError

SAMPLES = budget(12, 200, 2_000)
PER_IMAGE = 50
LOST = re.compile(r"lost: (?P<path>\S+): (?P<lost>\d+) of (?P<all>\d+) messages; ")


@pytest.fixture
def samples(tmp_path: Path) -> Samples:
    return Samples(tmp_path)


class Samples:
    """Copies of images, each with one byte changed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._images: dict[tuple[int, bool], Image] = {}
        self.seen: Counter[str] = Counter()

    def image(self, seed: int, *, killed: bool) -> Image:
        """Return the image of a seed. It is made once."""
        if (seed, killed) not in self._images:
            made = make_image(self._folder / f"made-{seed}-{killed}", seed, killed=killed)
            self._images[seed, killed] = made
        return self._images[seed, killed]

    def damaged(
        self, image: Image, rng: Random, *, file: str = "", how: Callable[[Path, Random], str] = change_byte
    ) -> tuple[Path, str]:
        """Return the path of a store with damage in `file`, or in any, and where. As a rule one byte is changed."""
        shutil.rmtree(self._folder / "copy", ignore_errors=True)
        path = image.copy_to(self._folder / "copy")
        changed = file or rng.choice(image.files).name
        self.seen[changed] += 1
        return path, how(path.with_name(changed), rng)


def opened(store: SqliteStore) -> OpenedStore | None:
    """Open a store. Returns None if it is refused."""
    try:
        return store.open()
    except StoreError as error:
        if not error.hint:
            raise
        return None


def test_x2_no_message_is_altered_or_silently_gone_whichever_byte_is_changed(samples: Samples) -> None:
    seen = samples.seen
    for number in range(SAMPLES):
        rng = Random(number)
        image = samples.image(number // PER_IMAGE, killed=number % 2 == 0)
        path, where = samples.damaged(image, rng)
        # Every second store is opened as a large one is: its messages are checked when they are read.
        store = SqliteStore(path, most_bytes=rng.choice((0, 1 << 40)))
        try:
            if (found := opened(store)) is None:
                seen["refused"] += 1
            else:
                assert_shows(store, found, image.states[-1])
                seen["intact"] += 1
        except StoreDamagedError:
            seen["damaged when read"] += 1
        except AssertionError as error:
            raise AssertionError(f"sample {number}: {where}") from error
        finally:
            store.close()
    assert seen[NAME] > 0
    assert seen[f"{NAME}-wal"] > 0
    assert seen["refused"] > 0
    assert seen["intact"] > 0
    if SAMPLES >= 200:
        assert seen["damaged when read"] > 0


def test_x2_larger_damage_is_refused_or_changes_nothing_and_can_always_be_accepted(samples: Samples) -> None:
    seen = samples.seen
    for number in range(SAMPLES // 2):
        rng = Random(f"more-{number}")
        image = samples.image(number // PER_IMAGE, killed=number % 2 == 0)
        path, where = samples.damaged(image, rng, how=damage_more)
        store = SqliteStore(path)
        try:
            if (found := opened(store)) is None:
                seen["refused"] += 1
                store = SqliteStore(path, accept_damage=True)
                assert_intact_or_listed(path, store, store.open(), image)
            else:
                assert_shows(store, found, image.states[-1])
        except (AssertionError, StoreError) as error:
            raise AssertionError(f"sample {number}: {where}") from error
        finally:
            store.close()
    assert seen["refused"] > 0


def assert_intact_or_listed(path: Path, store: SqliteStore, found: OpenedStore, image: Image) -> None:
    """Assert that the messages are those of the image, but for what is listed as lost."""
    text, lost = listed(path), lost_messages(path)
    if "commits are missing" in text or "commits in the log are missing" in text or "lost: everything" in text:
        return
    there = {stored.entity.queue for stored in found.entities}
    for queue, entity in image.states[-1].entities.items():
        if queue not in there:
            assert f"the entity {entity.path!r}" in text or "entities in all" in text
            continue
        rows, kept = image.states[-1].rows_of(queue), everything(store, queue)
        assert [row for row in kept if row not in rows] == []
        assert len(rows) - len(kept) <= lost[entity.path], (lost, entity.path)


def test_x2_after_accepting_damage_each_message_is_there_as_it_was_or_is_counted_as_lost(samples: Samples) -> None:
    seen = samples.seen
    for number in range(SAMPLES // 2):
        rng = Random(f"accept-{number}")
        image = samples.image(number // PER_IMAGE, killed=False)
        path, where = samples.damaged(image, rng)
        store = SqliteStore(path, accept_damage=True)
        try:
            found = store.open()
            lost = lost_messages(path)
            there = {stored.entity.queue for stored in found.entities}
            for queue, entity in image.states[-1].entities.items():
                if queue not in there:
                    assert f"the entity {entity.path!r}" in listed(path)
                    continue
                rows, kept = image.states[-1].rows_of(queue), everything(store, queue)
                assert [row for row in kept if row not in rows] == []
                assert len(rows) - len(kept) == lost[entity.path], (lost, entity.path)
            seen["messages lost"] += sum(lost.values())
        except (AssertionError, StoreError) as error:
            raise AssertionError(f"sample {number}: {where}") from error
        finally:
            store.close()
    if SAMPLES >= 200:
        assert seen["messages lost"] > 0


def test_x2_after_accepting_damage_to_the_log_the_store_is_as_it_was_after_an_earlier_commit(samples: Samples) -> None:
    image = samples.image(2, killed=True)
    for number in range(SAMPLES // 4):
        path, where = samples.damaged(image, Random(f"log-{number}"), file=f"{NAME}-wal")
        store = SqliteStore(path, accept_damage=True)
        store.open()
        try:
            rows = {queue: everything(store, queue) for queue in range(1, image.states[-1].highest_queue + 1)}
            states = [{queue: state.rows_of(queue) for queue in rows} for state in image.states]
            assert rows in states, f"sample {number}: {where}"
            if rows != states[-1]:
                assert "commits are missing" in listed(path).replace("commits in the log are", "commits are")
                samples.seen["earlier"] += 1
        finally:
            store.close()
    assert samples.seen["earlier"] > 0


def listed(path: Path) -> str:
    return "".join(found.read_text() for found in path.parent.glob("*.damaged-*.txt"))


def lost_messages(path: Path) -> Counter[str]:
    """Return how many messages of each entity are listed as lost."""
    return Counter({found["path"]: int(found["lost"]) for found in LOST.finditer(listed(path))})


def test_x2_damage_to_the_log_after_a_power_loss_costs_at_most_the_last_two_commits_unnoticed(samples: Samples) -> None:
    """The numbers in the commit counter are not synced: at worst, the power loss leaves that of its creation."""
    image = samples.image(1, killed=True)
    for number in range(SAMPLES // 2):
        rng = Random(f"power-{number}")
        path, where = samples.damaged(image, rng, file=f"{NAME}-wal")
        leave_old_counter(path)
        store = SqliteStore(path)
        try:
            if (found := opened(store)) is None:
                samples.seen["refused"] += 1
                continue
            behind = COMMITS - which_state(store, found, image.states)
            assert behind <= 2, f"sample {number}: {where}: {behind} commits are silently gone"
            samples.seen[f"{behind} commits behind"] += 1
        finally:
            store.close()
    assert samples.seen["refused"] > 0


def test_x2_damage_to_the_counter_and_to_another_file_costs_at_most_the_last_commit_and_is_logged(
    samples: Samples, caplog: pytest.LogCaptureFixture
) -> None:
    """A single byte changes one of the two numbers in the counter. The other one is that of the commit before."""
    image = samples.image(3, killed=True)
    for number in range(SAMPLES):
        rng = Random(f"counter-{number}")
        caplog.clear()
        path, where = samples.damaged(image, rng, file=f"{NAME}.commits")
        if number % 2:
            where += f"; {change_byte(path.with_name(rng.choice(image.files).name), rng)}"
        store = SqliteStore(path)
        try:
            if (found := opened(store)) is None:
                assert number % 2, f"sample {number}: {where}: the counter alone does not refuse a store"
                samples.seen["refused"] += 1
                continue
            behind = COMMITS - which_state(store, found, image.states)
            assert behind <= number % 2, f"sample {number}: {where}: {behind} commits are silently gone"
            if behind:
                assert "one of the two numbers in the commit counter" in caplog.text
            samples.seen["warned"] += "one of the two numbers in the commit counter" in caplog.text
        finally:
            store.close()
    assert samples.seen["refused"] > 0
    assert samples.seen["warned"] > 0


def which_state(store: SqliteStore, found: OpenedStore, states: tuple[Model, ...]) -> int:
    """Return the number of the last commit that the store shows."""
    for number in reversed(range(len(states))):
        try:
            assert_shows(store, found, states[number])
        except AssertionError:
            continue
        return number
    raise AssertionError("the store shows no state that ever was")


def test_x2_a_message_whose_type_became_text_is_reported(samples: Samples) -> None:
    """The bytes of such a message are not UTF-8. Found by sample 465."""
    image = samples.image(465 // PER_IMAGE, killed=False)
    path, _ = samples.damaged(image, Random(465))
    store = SqliteStore(path, most_bytes=0)
    found = opened(store)
    assert found is not None
    with pytest.raises(StoreDamagedError, match="message 39 is damaged"):
        assert_shows(store, found, image.states[-1])
    store.close()
    assert "the structure of the file: non-BLOB value in message.raw" in refusal_of(path)


def test_x2_a_settled_message_in_a_page_from_an_earlier_time_does_not_come_again(samples: Samples) -> None:
    """The page is where the table of messages begins. The index of messages is intact. Found by sample 165."""
    image = samples.image(165 // PER_IMAGE, killed=False)
    path, _ = samples.damaged(image, Random("more-165"), how=damage_more)
    store = SqliteStore(path, accept_damage=True)
    assert_intact_or_listed(path, store, store.open(), image)
    store.close()


def test_x2_a_length_that_no_message_has_does_not_end_the_rebuilding(samples: Samples) -> None:
    """SQLite says that there is not enough memory. Found by sample 387."""
    image = samples.image(387 // PER_IMAGE, killed=False)
    path, _ = samples.damaged(image, Random("more-387"), how=damage_more)
    assert "The store is damaged" in refusal_of(path)
    store = SqliteStore(path, accept_damage=True)
    assert_intact_or_listed(path, store, store.open(), image)
    store.close()


def refusal_of(path: Path) -> str:
    with pytest.raises(StoreDamagedError) as caught:
        SqliteStore(path).open()
    return str(caught.value)
