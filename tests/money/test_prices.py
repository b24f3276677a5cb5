"""M3: prices are data with a date and an origin; a user can replace them; an error names the wrong place of a table."""

import ast
from decimal import Decimal
from pathlib import Path

import pytest

from tests.architecture.source import PACKAGE, sources
from twinbus.money.prices import PriceBand, Prices, PriceScale, PricesError, default_price_text


def changed(before: str, after: str) -> str:
    text = default_price_text()
    assert before in text
    return text.replace(before, after, 1)


def test_m3_the_default_table_says_when_and_where_it_was_read() -> None:
    prices = Prices.default()
    assert prices.date.isoformat() == "2026-11-15"
    assert prices.origin
    assert (prices.currency, prices.region) == ("USD", "US")
    assert set(prices.tiers) == {"basic", "standard", "premium"}
    assert any("Empty receives" in note and "dearer" in note for note in prices.notes)


@pytest.mark.parametrize(
    ("operations", "cost"),
    [
        (0, "0"),
        (13_000_000, "0"),
        (14_000_000, "0.80"),
        (100_000_000, "69.60"),
        (101_000_000, "70.10"),
        (2_500_000_000, "1269.60"),
        (2_501_000_000, "1269.80"),
    ],
)
def test_m3_operations_of_the_standard_tier_are_charged_by_bands(operations: int, cost: str) -> None:
    scale = Prices.default().tier("standard").operations
    assert scale is not None
    assert scale.cost(Decimal(operations)) == Decimal(cost)


def test_m3_every_month_has_its_own_bands() -> None:
    scale = PriceScale(1, (PriceBand(Decimal(10), Decimal(0)), PriceBand(None, Decimal(1))))
    assert scale.cost(Decimal(20)) == 10
    assert scale.cost(Decimal(20), months=Decimal(2)) == 0


def test_m3_a_users_own_table_replaces_ours(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text(changed("bands = [{ price = 0.05 }]", "bands = [{ price = 0.07 }]"))
    scale = Prices.load(own).tier("basic").operations
    assert scale is not None
    assert scale.cost(Decimal(1_000_000)) == Decimal("0.07")


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("date = 2026-11-15", 'date = "yesterday"', "date must be a date"),
        ('origin = "', 'origins = "', "origin is missing"),
        ("largest_message = 262_144", "largest_message = -1", "tiers.basic.largest_message must be a whole number"),
        ("price = 0.80", "price = -0.80", "tiers.standard.operations.bands, band 2.price must be a number"),
        ("price = 0.80", "price = nan", "band 2.price must be a number"),
        ("price = 0.80", "price = true", "band 2.price must be a number"),
        ("{ up_to = 13_000_000, price = 0 }", "{ price = 0 }", "band 1.up_to is missing"),
        ("up_to = 100_000_000,", "up_to = 1_000,", "bands must be bands that each end beyond the one before"),
        ("base_per_month = 10.00", "base_per_moth = 10.00", "tiers.standard.base_per_moth is not known"),
        ("bands = [{ price = 0.05 }]", "bands = []", "tiers.basic.operations.bands must be a list of bands"),
        ("zone_3 = 0.23", 'zone_3 = "dear"', "geo_replication.zone_3 must be a number"),
        ("hours_in_month = 744", "hours_in_month =", "are not TOML"),
    ],
)
def test_m3_a_wrong_price_table_is_refused_with_the_key(before: str, after: str, said: str) -> None:
    with pytest.raises(PricesError, match=r"own\.toml") as refused:
        Prices.parse(changed(before, after), "own.toml")
    assert said in refused.value.text
    assert "twinbus cost prices --write" in refused.value.hint


def test_m3_a_price_table_that_cannot_be_read_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(PricesError, match="No such file"):
        Prices.load(tmp_path / "nowhere.toml")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(PricesError, match="not UTF-8"):
        Prices.load(tmp_path / "binary")


def test_m3_an_unknown_tier_or_zone_is_refused_with_the_known_ones() -> None:
    prices = Prices.default()
    with pytest.raises(PricesError, match="basic, standard, premium"):
        prices.tier("gold")
    with pytest.raises(PricesError, match="inter_region, internet"):
        prices.zone("moon")
    assert prices.zone("none") is None


def test_m3_no_price_is_written_in_code() -> None:
    table = Prices.default()
    scales = [scale for tier in table.tiers.values() for scale in (tier.operations, tier.connections) if scale]
    prices = {band.price for scale in (*scales, *table.bandwidth.values()) for band in scale.bands if band.price}
    prices |= {*table.geo_replication.values(), *(tier.messaging_unit_per_hour for tier in table.tiers.values())} - {0}
    files = [
        *sources(PACKAGE / "money"),
        *(one for one in sources(PACKAGE / "cli") if one.path.stem.startswith("cost")),
    ]
    written = {
        Decimal(str(node.value))
        for source in files
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Constant) and type(node.value) is float
    }
    assert len(prices) > 10
    assert not prices & written
