"""Connection strings: what the official clients take, and errors that say what is wrong without the key."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinbus.connect.connection_string import ConnectionString, ConnectionStringError

KEY = "SharedAccessKeyName=Root;SharedAccessKey=c2VjcmV0=="


@pytest.mark.parametrize(
    ("text", "host", "port", "emulator"),
    [
        (f"Endpoint=sb://localhost:5673;{KEY};UseDevelopmentEmulator=true;", "localhost", 5673, True),
        (f"Endpoint=sb://localhost;{KEY};UseDevelopmentEmulator=true", "localhost", 5672, True),
        (f"Endpoint=sb://contoso.servicebus.windows.net/;{KEY}", "contoso.servicebus.windows.net", 5671, False),
        (f"endpoint=SB://Contoso/;{KEY};UseDevelopmentEmulator=True", "contoso", 5671, False),
        (f"Endpoint=sb://[::1]:99;{KEY}", "::1", 99, False),
        (f"  Endpoint = sb://127.0.0.1:5672 ; {KEY} ; ", "127.0.0.1", 5672, False),
    ],
)
def test_an_endpoint_is_read_with_its_port_or_the_default_of_its_transport(
    text: str, host: str, port: int, emulator: bool
) -> None:
    read = ConnectionString.parse(text)
    assert (read.host, read.port, read.emulator, read.tls) == (host, port, emulator, not emulator)
    assert (read.key_name, read.key) == ("Root", "c2VjcmV0==")


def test_the_entity_path_is_read_and_empty_means_none() -> None:
    assert ConnectionString.parse(f"Endpoint=sb://h;{KEY};EntityPath=orders/new").entity_path == "orders/new"
    assert ConnectionString.parse(f"Endpoint=sb://h;{KEY};EntityPath=").entity_path is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty"),
        (" ; ;", "empty"),
        ("Endpoint", "part 1"),
        (f"Endpoint=sb://h;{KEY};=x", "part 4"),
        (KEY, "Endpoint is missing"),
        (f"Endpoint=;{KEY}", "Endpoint is missing"),
        (f"Endpoint=localhost:5672;{KEY}", "sb://host"),
        (f"Endpoint=ftp://host;{KEY}", "sb://host"),
        (f"Endpoint=sb://;{KEY}", "sb://host"),
        (f"Endpoint=sb://host:port;{KEY}", "not a URL"),
        (f"Endpoint=sb://host:70000;{KEY}", "not a URL"),
        (f"Endpoint=sb://[::1;{KEY}", "not a URL"),
        ("Endpoint=sb://h;SharedAccessKey=k", "SharedAccessKeyName is missing"),
        ("Endpoint=sb://h;SharedAccessKeyName=n", "SharedAccessKey is missing"),
        ("Endpoint=sb://h;SharedAccessSignature=SharedAccessSignature sr=x", "SharedAccessSignature is not supported"),
    ],
)
def test_the_error_names_what_is_wrong(text: str, says: str) -> None:
    with pytest.raises(ConnectionStringError, match=says):
        ConnectionString.parse(text)


def test_neither_an_error_nor_the_representation_shows_the_key() -> None:
    with pytest.raises(ConnectionStringError) as error:
        ConnectionString.parse("Endpoint=sb://h;SharedAccessKeyName=n;SharedAccessKey=se;cret")
    assert "cret" not in str(error.value)
    assert "c2VjcmV0" not in repr(ConnectionString.parse(f"Endpoint=sb://h;{KEY}"))


@pytest.mark.parametrize(
    "endpoint",
    [
        "sb://h,SharedAccessKey=secret",
        "sb://h SharedAccessKey=secret:x",
        "h/SharedAccessKey=secret",
        "sb://twin:secret@h:x",
        "sb://twin:sec/secret@h",
        "sb://twin:[secret@h",
        "sb://twin:secret\N{ACCOUNT OF}@h",
    ],
)
def test_an_error_does_not_show_what_may_be_a_key_after_the_host(endpoint: str) -> None:
    text = f"Endpoint={endpoint};SharedAccessKeyName=n"
    with pytest.raises(ConnectionStringError) as error:
        ConnectionString.parse(text)
    assert "secret" not in str(error.value)


def test_the_resource_of_a_token_names_host_port_and_entity() -> None:
    assert ConnectionString.parse(f"Endpoint=sb://h:1;{KEY}").resource("a/b") == "sb://h:1/a/b"
    assert ConnectionString.parse(f"Endpoint=sb://[::1]:1;{KEY}").resource() == "sb://[::1]:1/"


words = st.text("abcdefghijklmnopqrstuvwxyz0123456789-+/=", min_size=1, max_size=20).filter(
    lambda word: word.strip("/")
)


@given(
    host=st.sampled_from(["localhost", "127.0.0.1", "::1", "a.b.c"]),
    port=st.integers(1, 65535),
    key_name=words,
    key=words,
    entity=st.none() | words.map(lambda word: word.strip("/")),
    emulator=st.booleans(),
)
def test_a_rendered_connection_string_reads_back(
    host: str, port: int, key_name: str, key: str, entity: str | None, emulator: bool
) -> None:
    made = ConnectionString(host, port, key_name, key, entity, emulator)
    assert ConnectionString.parse(made.render()) == made
