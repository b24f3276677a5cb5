"""What `twinbus pipeline run` prints about a batch. tests/pipeline/test_pipeline_run.py runs the verb."""

import pytest

from twinbus.cli.pipeline import batch_text
from twinbus.pipeline import CommittedBatch


@pytest.mark.parametrize(
    ("newest", "said"),
    [
        (0, ""),
        (1_790_035_200_999, ", the newest of 2026-09-22 00:00:00Z"),
        (-(2**62), ", the newest of 1970-01-01 00:00:00Z"),
        (2**62, ", the newest of 9999-12-31 23:59:59Z"),
    ],
)
def test_d5_the_line_about_a_batch_has_a_time_whatever_the_entries_say(newest: int, said: str) -> None:
    line = batch_text(CommittedBatch(7, 12_345, 6, newest, 1.26))
    assert line.endswith(f"Z snapshot 7: 12,345 operations, 6 other entries{said}; 1.3 s")
