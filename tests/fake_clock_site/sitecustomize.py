"""Mends `time.sleep` in a Python process under libfaketime. Python imports this module when it starts.

`time.sleep` waits for an instant. If this instant has passed when the wait begins, libfaketime 0.9.10 computes a
negative duration and the call fails with EINVAL. Without libfaketime such a sleep returns at once.
"""

from __future__ import annotations

import errno
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import SupportsIndex

_sleep = time.sleep


def _sleep_or_return(seconds: float | SupportsIndex) -> None:
    try:
        _sleep(seconds)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise


time.sleep = _sleep_or_return
