"""X3: the names under which a namespace accepts requests, in every spelling."""

import ipaddress
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinbus.namespace.own_names import Authority, OwnNames, is_same_origin, one_spelling, parse_authority

HERE = "192.0.2.7"
NAMES = OwnNames(5672, "127.0.0.1", ["bus.example", "localhost:15672", "BÜS.example"])


@pytest.mark.parametrize(
    "text",
    [
        "localhost:5672",
        "localhost",
        "LocalHost:5672",
        "localhost.:5672",
        "127.0.0.1:5672",
        "127.8.9.1:5672",
        "[::1]:5672",
        "[0:0:0:0:0:0:0:1]",
        "::1",
        "[::ffff:127.0.0.1]:5672",
        "192.0.2.7:5672",
        "[::ffff:192.0.2.7]:5672",
        "bus.example:5672",
        "BUS.example.",
        "büs.example:5672",
        "xn--bs-xka.example:5672",
        "localhost:15672",
    ],
)
def test_x3_a_name_of_the_namespace_is_its_own_in_every_spelling(text: str) -> None:
    assert NAMES.is_own(text, HERE)


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":5672",
        "evil.example:5672",
        "evil.example",
        "localhost:5673",
        "localhost:0",
        "localhost:99999",
        "localhost:",
        "localhost.evil.example",
        "evil.localhost",
        "localhost@evil.example",
        "evil.example#localhost",
        "127.0.0.1.evil.example",
        "127.0.0.1:5673",
        "2130706433",
        "127.1:5672",
        "0x7f.0.0.1",
        "0.0.0.0:5672",
        "[::]:5672",
        "192.0.2.8:5672",
        "10.0.0.1",
        "bus.example:15672",
        "bus.example/x",
        "local host",
        "localhost\n",
        "localhost\x00",
        "[localhost]:5672",
        "[::1:5672",
        "::1:5672",
        "::ffff:192.0.2.9",
        "::1%evil.example",
        "::1%lo",
        "[::1%25lo]:5672",
        "::1%@evil.example",
        '::1%"><evil/>',
        "::1%\r\nX: y",
        "::1%" + "a" * 33,
        "::ffff:127.0.0.1%lo",
        "[127.0.0.1]:5672",
        ".localhost",
        "localhost..",
        "a" * 300,
    ],
)
def test_x3_any_other_name_is_not(text: str) -> None:
    assert not NAMES.is_own(text, HERE)


def test_x3_the_address_of_the_connection_counts_only_on_that_connection() -> None:
    assert NAMES.is_own("192.0.2.7:5672", "192.0.2.7")
    assert not NAMES.is_own("192.0.2.7:5672", "192.0.2.8")
    assert not NAMES.is_own("192.0.2.7:5672", None)


def test_x3_listening_on_every_address_makes_no_name_its_own() -> None:
    for host in ("0.0.0.0", "::", ""):  # noqa: S104 - compared with, never bound
        everywhere = OwnNames(5672, host)
        assert everywhere.is_own("localhost:5672", HERE)
        assert everywhere.is_own(f"{HERE}:5672", HERE)
        assert not everywhere.is_own("0.0.0.0:5672", HERE)
        assert not everywhere.is_own("[::]:5672", HERE)
        assert not everywhere.is_own("machine:5672", HERE)


def test_x3_the_name_that_is_listened_on_is_its_own() -> None:
    assert OwnNames(5672, "bus.internal").is_own("bus.internal:5672", None)
    assert OwnNames(5672, "fe80::1").is_own("[fe80::1]:5672", None)


@pytest.mark.parametrize("text", ["fe80::1%eth0", "[fe80::1%25eth0]:5672", "[FE80:0::1%eth0]:5672", "[fe80::1]:5672"])
def test_x3_an_address_with_a_zone_is_its_own_where_the_address_is(text: str) -> None:
    assert NAMES.is_own(text, "fe80::1%eth0")
    assert NAMES.is_own(text, "fe80::1")
    assert OwnNames(5672, "fe80::1%eth0").is_own(text, None)
    assert not NAMES.is_own(text, "fe80::2")
    assert not NAMES.is_own(text, None)


def test_x3_a_loopback_address_with_a_zone_is_its_own_only_where_the_connection_arrived_at_it() -> None:
    assert NAMES.is_own("::1%lo", "::1")
    assert not NAMES.is_own("::1%lo", "127.0.0.1")
    assert not NAMES.is_own("::1%lo", None)


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("LOCALHOST.:5672", "localhost:5672"),
        ("l\u00bacalhost", "localhost"),
        ("0:0::1", "[::1]"),
        ("fe80::1%Eth0", "[fe80::1%25eth0]"),
        ("[fe80::1%25eth0]:5672", "[fe80::1%25eth0]:5672"),
    ],
)
def test_x3_an_authority_is_written_in_one_spelling_that_can_be_read_again(text: str, written: str) -> None:
    assert str(parse_authority(text)) == written
    assert parse_authority(written) == parse_authority(text)


# NFKC, which names outside ASCII are brought into, turns the last two into a parenthesis and an empty label.
@pytest.mark.parametrize("text", [".", "..", "bus..x", ".bus", "[abc]", "\u3220.example", "\u2488.example"])
def test_x3_a_name_with_an_empty_label_or_a_foreign_character_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a host name or an address"):
        parse_authority(text)


@given(st.text(st.sampled_from('0123456789abcdef:.%[]@/"<>-_ lo\u00ba\u3220\u2488'), max_size=40))
def test_x3_what_is_read_as_an_authority_holds_only_characters_of_one(text: str) -> None:
    try:
        authority = parse_authority(text)
    except ValueError:
        return
    assert re.fullmatch(r"[a-z0-9._-]+(:\d+)?|\[[0-9a-f:.]+(%25[a-z0-9._-]+)?\](:\d+)?", str(authority))
    assert parse_authority(str(authority)) == authority


def test_x3_a_refusal_gives_the_foreign_name_the_own_names_and_the_option() -> None:
    text = NAMES.refusal("evil.example:5672", HERE)
    for said in ("'evil.example:5672'", "localhost:5672", "192.0.2.7:5672", "bus.example:5672", "localhost:15672"):
        assert said in text
    assert "--host-name NAME:PORT" in text


def test_x3_a_refusal_repeats_no_control_character_and_not_everything() -> None:
    text = NAMES.refusal("\x1b]0;x\x07\u202e" + "y" * 10_000, None)
    assert text.isprintable()
    assert len(text) < 600


@pytest.mark.parametrize("text", ["", "a b", "a:b", "user@host", "http://host", "host/", "[::1", "a" * 300, "a:70000"])
def test_a_host_name_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a host name|has a port above 65535"):
        OwnNames(5672, names=[text])


@pytest.mark.parametrize(
    ("origin", "host", "same"),
    [
        ("http://localhost:5672", "localhost:5672", True),
        ("https://localhost:5672", "localhost:5672", True),
        ("HTTP://LOCALHOST:5672", "localhost:5672", True),
        ("http://[::1]:5672", "[::1]:5672", True),
        ("http://localhost", "localhost:80", True),
        ("https://bus.example", "bus.example", True),
        ("http://localhost:5673", "localhost:5672", False),
        ("http://localhost", "localhost:5672", False),
        ("http://127.0.0.1:5672", "localhost:5672", False),
        ("http://evil.example:5672", "localhost:5672", False),
        ("http://localhost:5672.evil.example", "localhost:5672", False),
        ("http://evil.example#localhost:5672", "localhost:5672", False),
        ("http://localhost:5672/", "localhost:5672", False),
        ("http://localhost:5672?", "localhost:5672", False),
        ("http://localhost:5672#", "localhost:5672", False),
        ("http://\tlocalhost:5672", "localhost:5672", False),
        ("http://x@localhost:5672", "localhost:5672", False),
        ("file://localhost:5672", "localhost:5672", False),
        ("chrome-extension://localhost:5672", "localhost:5672", False),
        ("null", "localhost:5672", False),
        ("", "localhost:5672", False),
        ("http://[::1", "localhost:5672", False),
    ],
)
def test_x3_an_origin_is_the_namespaces_own_by_scheme_host_and_port(origin: str, host: str, same: bool) -> None:
    assert is_same_origin(origin, parse_authority(host)) is same


@given(st.text(max_size=40), st.one_of(st.none(), st.text(max_size=20)))
def test_x3_no_text_makes_the_check_fail(text: str, arrived_at: str | None) -> None:
    if NAMES.is_own(text, arrived_at):
        assert parse_authority(text).port in (None, 5672, 15672)
    is_same_origin(text, Authority("localhost", 5672))


@given(st.ip_addresses())
def test_an_address_has_one_spelling(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    spelling = one_spelling(str(address))
    assert one_spelling(spelling) == spelling
    long = f"[{address.exploded.upper()}]" if isinstance(address, ipaddress.IPv6Address) else str(address)
    assert one_spelling(long) == spelling
