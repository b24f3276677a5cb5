"""Files of a store as a kill or a clean end leaves them, with single bytes changed, and what must be in them."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.namespace.store.store_model import Engine, Model
from twinbus.namespace.store import SqliteStore

NAME = "namespace.db"
COMMITS = 40


@dataclass(frozen=True)
class Image:
    """A folder with the files of a store, and the state after each of its commits. The last one is acknowledged."""

    folder: Path
    states: tuple[Model, ...]

    @property
    def files(self) -> list[Path]:
        """Database and log."""
        return [path for path in (self.folder / NAME, self.folder / f"{NAME}-wal") if path.exists()]

    def copy_to(self, folder: Path) -> Path:
        """Copy the files as they are. Returns the path of the store."""
        shutil.copytree(self.folder, folder)
        return folder / NAME


def make_image(folder: Path, seed: int, *, killed: bool) -> Image:
    """Write a store with random commits. A killed store has its log, and half of the commits in the file already."""
    rng = Random(seed)
    engine, state = Engine(rng), Model()
    store = SqliteStore(folder / "live" / NAME)
    store.open()
    states = [state]
    for number in range(COMMITS):
        writes, state = engine.commit(state, 6)
        store.commit(writes)
        states.append(state)
        if number == COMMITS // 2:
            while store.tidy():  # the rows of dropped entities
                pass
            store.close()
            store = SqliteStore(folder / "live" / NAME)
            store.open()
    if not killed:
        store.close()
    shutil.copytree(folder / "live", folder / "image", ignore=shutil.ignore_patterns("*-shm", "*.lock"))
    if killed:
        store.close()
    return Image(folder / "image", tuple(states))


def change_byte(path: Path, rng: Random) -> str:
    """Change one byte of a file. Returns where, and what it was changed to."""
    content = bytearray(path.read_bytes())
    at = rng.randrange(len(content))
    change = rng.choice((1 << rng.randrange(8), rng.randrange(1, 256)))
    content[at] ^= change
    path.write_bytes(content)
    return f"{path.name} at {at}, changed by {change:#04x}"
