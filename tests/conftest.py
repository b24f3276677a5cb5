"""Hypothesis profiles: `ci` repeats itself exactly, `explore` looks for something new (HYPOTHESIS_PROFILE=explore)."""

import os

from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
