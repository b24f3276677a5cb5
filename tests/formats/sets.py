"""Finding, packing and unpacking the sets of old data in this folder. A set is only read: tests unpack a copy."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


def sets_with(file: str) -> list[Any]:
    """Parameters for a test: every set that has this file."""
    found = sorted(path.parent for path in HERE.glob(f"set*/{file}"))
    assert found, f"no set has {file}"
    return [pytest.param(path, id=path.name) for path in found]


def unpacked(archive: Path, into: Path) -> Path:
    """Unpack a copy of the folder that `packed` took; returns it."""
    # Not `extractall` with a filter: Python 3.11.2, which Debian 12 has, does not know filters.
    shutil.unpack_archive(archive, into)
    return into / archive.name.removesuffix(".tar.xz")


def packed(folder: Path, archive: Path, *left_out: str) -> None:
    """Put a folder into a new archive, under the archive's own name. `left_out`: names directly in the folder."""
    name = archive.name.removesuffix(".tar.xz")

    def nameless(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if member.name.removeprefix(f"{name}/").partition("/")[0] in left_out:
            return None
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        return member

    with tarfile.open(archive, "x:xz") as tar:
        tar.add(folder, name, filter=nameless)


def expected(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def write_expected(file: Path, contents: Any) -> None:
    with file.open("x", encoding="utf-8") as written:
        json.dump(contents, written, indent=1, ensure_ascii=True)
        written.write("\n")
