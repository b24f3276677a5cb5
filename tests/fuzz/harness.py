"""What all fuzzers share: their command line, and a finding that names its input."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager


class FindingError(AssertionError):
    """An input that violates a rule of its fuzzer."""


@contextmanager
def named_input(seed: int, inputs: object) -> Iterator[None]:
    """Raise every error of the block as a FindingError that names the seed and the input."""
    try:
        yield
    except Exception as fault:
        raise FindingError(f"seed {seed}, input {inputs}: {type(fault).__name__}: {fault}") from fault


def inputs_and_seed(description: str, inputs: int) -> tuple[int, int]:
    """Return the options `--inputs` and `--seed` of the command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--inputs", type=int, default=inputs)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    return chosen.inputs, chosen.seed
