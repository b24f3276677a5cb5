"""A share of each fuzzer's inputs, by tier (X1). `make soak` runs 1,000,000."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz import amounts, colliding_keys, cpu_cost, ledger_lines, limits, rules

ROOT = Path(__file__).resolve().parents[2]


def test_a_soak_has_a_million_inputs_and_every_fuzzer_gets_its_share() -> None:
    assert amounts.ALL == 1_000_000
    assert amounts.shares(1_000_000) == {part: amount.soak for part, amount in amounts.AMOUNTS.items()}
    assert min(amounts.shares(1).values()) == 1
    assert all(0 <= amount.quick <= amount.full <= amount.soak for amount in amounts.AMOUNTS.values())


def test_x1_random_rules_and_messages_take_bounded_work() -> None:
    inputs = amounts.inputs_of("rules")
    tally = rules.run(inputs, seed=1)
    assert tally.inputs == inputs
    assert tally.refused > 0
    assert tally.errors > inputs // 20
    assert tally.copies > 0


def test_x1_damaged_ledger_lines_are_read_or_reported() -> None:
    inputs = amounts.inputs_of("ledger_lines")
    tally = ledger_lines.run(inputs, seed=1)
    assert tally.inputs == inputs == tally.entries + tally.refused
    assert tally.entries > inputs // 10
    assert tally.segments == inputs // 100


@pytest.mark.thorough
def test_x1_maps_with_colliding_keys_take_time_in_proportion() -> None:
    inputs = amounts.inputs_of("colliding_keys")
    tally = colliding_keys.run(inputs, seed=1)
    assert (tally.inputs, tally.hostile) == (inputs, inputs)
    assert tally.slowest <= cpu_cost.MOST


async def test_x1_peers_without_a_token_harm_no_other() -> None:
    inputs = amounts.inputs_of("limits")
    tally = await limits.run(inputs, seed=1)
    assert tally.inputs == inputs
    assert tally.refused > 0


def test_inputs_are_repeated_by_their_seed() -> None:
    def made() -> tuple[object, ...]:
        chance = random.Random("1/7")
        return limits.hostile_peer(chance), rules.random_rule(chance, 1), rules.random_message(chance)

    assert made() == made()


def test_a_process_that_grows_too_much_is_a_finding() -> None:
    program = (
        "from tests.fuzz.memory import BoundedMemory; memory = BoundedMemory(20); memory.check(); "
        "held = b'x' * (64 << 20); memory.check()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT)
    assert "memory grew by" in done.stderr
