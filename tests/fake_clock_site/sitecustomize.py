"""Mends `time.sleep` in a Python process under libfaketime. Python imports this module when it starts.

`time.sleep` waits for an instant. If this instant has passed when the wait begins, libfaketime 0.9.10 computes a
negative duration and the call fails with EINVAL. Without libfaketime such a sleep returns at once.
"""

import errno
import time

_sleep = time.sleep


def _sleep_or_return(seconds: float) -> None:
    try:
        _sleep(seconds)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise


time.sleep = _sleep_or_return
