"""Logs: one line for each record, and no secrets in them."""

import io
import json
import logging
from typing import Any

import pytest

from twinbus.namespace.logs import LogFormat, configure_logging
from twinbus.printable import printable

KEY = "c2VjcmV0LWtleQ+/=="
CONNECTION = f"Endpoint=sb://localhost:5672;SharedAccessKeyName=app;SharedAccessKey={KEY};UseDevelopmentEmulator=true;"
TOKEN = "SharedAccessSignature sr=sb%3A%2F%2Flocalhost&sig=abc%2Bdef%3D&se=1&skn=app"


@pytest.fixture
def stream(logging_as_before: None) -> io.StringIO:
    return io.StringIO()


def record(
    stream: io.StringIO, form: LogFormat, text: str, *args: object, keys: tuple[str, ...] = (), **extra: Any
) -> str:
    configure_logging("info", form, keys=keys, stream=stream)
    logging.getLogger("twinbus.namespace").warning(text, *args, extra=extra)
    return stream.getvalue()


def test_a_json_line_carries_time_level_text_and_what_was_said_beside_it(stream: io.StringIO) -> None:
    line = json.loads(record(stream, LogFormat.JSON, "closed %s", "link", entity="orders", depth=3))
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "warning",
        "logger": "twinbus.namespace",
        "message": "closed link",
        "entity": "orders",
        "depth": 3,
    }


def test_a_human_line_stays_one_line(stream: io.StringIO) -> None:
    line = record(stream, LogFormat.HUMAN, "first\nsecond", entity="orders")
    assert line.count("\n") == 1
    assert line.endswith("warning first second entity=orders\n")


@pytest.mark.parametrize("form", LogFormat)
@pytest.mark.parametrize(
    "secret", [CONNECTION, TOKEN, TOKEN.replace("=", "%3D"), "sig=abc%2Bdef%3D", f"sharedaccesskey={KEY}"]
)
def test_keys_and_signatures_never_get_in(stream: io.StringIO, form: LogFormat, secret: str) -> None:
    line = record(stream, form, "opened %s", secret, beside=secret, listed=[secret])
    assert KEY.rstrip("=") not in line
    assert "abc%2Bdef" not in line
    assert line.count("[redacted]") >= 3


def test_an_exception_is_told_without_its_secrets(stream: io.StringIO) -> None:
    configure_logging("info", LogFormat.JSON, stream=stream)
    try:
        raise ValueError(f"cannot open {CONNECTION}")
    except ValueError:
        logging.getLogger("twinbus").exception("broken")
    told = json.loads(stream.getvalue())["exception"]
    assert "ValueError: cannot open Endpoint=sb://localhost:5672" in told
    assert KEY not in told


def test_a_known_key_is_taken_out_wherever_it_stands(stream: io.StringIO) -> None:
    line = record(stream, LogFormat.HUMAN, "the key is hunter2hunter2, really", keys=("hunter2hunter2", ""))
    assert "hunter2" not in line
    assert "the key is [redacted], really" in line


def test_what_is_no_secret_is_left_as_it_is(stream: io.StringIO) -> None:
    text = "SharedAccessKeyName=app on sb://localhost:5672/design?x=1"
    assert text in record(stream, LogFormat.HUMAN, text)


def test_arguments_that_do_not_fit_cost_neither_the_record_nor_a_secret(stream: io.StringIO) -> None:
    line = record(stream, LogFormat.HUMAN, "only %d", CONNECTION)
    assert "only %d" in line
    assert KEY not in line


def test_the_level_holds_for_twinbus_and_other_libraries_only_warn(stream: io.StringIO) -> None:
    configure_logging("debug", LogFormat.HUMAN, stream=stream)
    logging.getLogger("twinbus.x").debug("ours")
    logging.getLogger("other").info("theirs")
    logging.getLogger("other").warning("their warning")
    assert [line.split(maxsplit=2)[2] for line in stream.getvalue().splitlines()] == ["ours", "their warning"]


HOSTILE = "\x1b]0;pwned\x07\x9b31m\u202e\x7f\u2028 é\nforged"


@pytest.mark.parametrize("form", LogFormat)
def test_x3_what_others_said_neither_controls_a_terminal_nor_forges_a_line(
    stream: io.StringIO, form: LogFormat
) -> None:
    configure_logging("info", form, stream=stream)
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        logging.getLogger("twinbus").exception("said %s", HOSTILE, extra={"entity": HOSTILE})
    text = stream.getvalue()
    assert printable(text, newlines=True) == text
    assert "é" in text
    assert "\\u001b]0;pwned" in text
    if form is LogFormat.JSON:
        line = json.loads(text)
        assert (line["message"], line["entity"]) == (f"said {HOSTILE}", HOSTILE)
        assert line["exception"].endswith(f"ValueError: {HOSTILE}")
    else:
        first, second = text.splitlines()[:2]
        assert "entity=\\u001b]0;pwned" in first
        assert second == "Traceback (most recent call last):"
