"""Files of a store as a kill or a clean end leaves them, with single bytes changed, and what must be in them."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.namespace.store.store_model import Engine, Model
from twinbus.namespace.store import SqliteStore
from twinbus.namespace.store.open_store import PAGE_SIZE

NAME = "namespace.db"
COMMITS = 40
KINDS = ("zeros", "noise", "a page of another place", "two pages exchanged", "cut short", "cells dropped")


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


def damage_more(path: Path, rng: Random) -> str:
    """Damage a file as disks and programs do: more than one byte. Returns what was done, and where."""
    content = bytearray(path.read_bytes())
    before = bytes(content)
    pages = len(content) // PAGE_SIZE
    one, other = (PAGE_SIZE * rng.randrange(pages) for _ in range(2))
    size = rng.choice((512, 4096, PAGE_SIZE))
    sector = rng.randrange(len(content) // size) * size
    what = rng.choice(KINDS)
    match what:
        case "zeros":
            content[sector : sector + size] = bytes(size)
        case "noise":
            content[sector : sector + size] = rng.randbytes(size)
        case "a page of another place":
            content[one : one + PAGE_SIZE] = before[other : other + PAGE_SIZE]
        case "two pages exchanged":
            content[one : one + PAGE_SIZE] = before[other : other + PAGE_SIZE]
            content[other : other + PAGE_SIZE] = before[one : one + PAGE_SIZE]
        case "cut short":
            del content[rng.randrange(len(content)) :]
        case "cells dropped":
            cells = one + 4 + (100 if one == 0 else 0)  # the number of cells in the page
            content[cells] -= min(content[cells], rng.choice((1, 2, 5)))
    path.write_bytes(content)
    return f"{path.name}: {what}, {sector=}, {size=}, {one=}, {other=}"


def change_byte(path: Path, rng: Random) -> str:
    """Change one byte of a file. Returns where, and what it was changed to."""
    content = bytearray(path.read_bytes())
    at = rng.randrange(len(content))
    change = rng.choice((1 << rng.randrange(8), rng.randrange(1, 256)))
    content[at] ^= change
    path.write_bytes(content)
    return f"{path.name} at {at}, changed by {change:#04x}"
