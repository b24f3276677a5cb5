"""Memory of a fuzzer: the process may not grow by more than a bound, however many inputs there were (X1)."""

from __future__ import annotations

from pathlib import Path
from typing import Final

KIB_PER_MIB: Final = 1024


def peak_mib() -> int:
    """Return the most memory that this process has had, in MiB.

    `ru_maxrss` is not used: a process inherits it from the process that started it.
    """
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    peak = next(line for line in lines if line.startswith("VmHWM:"))
    return int(peak.split()[1]) // KIB_PER_MIB


class BoundedMemory:
    """Raises AssertionError if the process has grown by more than `most` MiB since this object was made."""

    def __init__(self, most: int) -> None:
        self._before = peak_mib()
        self._most = most

    def check(self) -> int:
        """Return the growth in MiB."""
        grown = peak_mib() - self._before
        if grown > self._most:
            raise AssertionError(f"memory grew by {grown} MiB; {self._most} MiB are the bound")
        return grown
