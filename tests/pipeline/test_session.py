"""X3: what Spark's JVM logs on the terminal of a local session holds no control characters."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import SparkSession

from twinbus.printable import printable

HOSTILE = "books\x1b]0;pwned\x07\x1b[2J\x9b31m\x7f\r\x08\u202eb\u2066\u200b\u2028c\U000e0041"


@pytest.fixture
def jvm(spark: SparkSession) -> Any:
    assert spark._jvm is not None
    return spark._jvm


def lines_of(jvm: Any, message: str, failure: Any = None) -> str:
    """What the session's appender writes for an error."""
    logged = jvm.org.apache.logging.log4j
    layout = logged.LogManager.getContext(False).getConfiguration().getAppender("stderr").getLayout()
    event = logged.core.impl.Log4jLogEvent.newBuilder()
    event.setLevel(logged.Level.ERROR).setLoggerName("a.b.Task").setMessage(logged.message.SimpleMessage(message))
    return str(layout.toSerializable(event.setThrown(failure).build()))


def test_x3_a_message_of_the_jvm_shows_no_control_characters(jvm: Any) -> None:
    shown = lines_of(jvm, f"cannot read {HOSTILE}\n\tsecond line é 日本")
    assert printable(shown, newlines=True) == shown
    assert shown.endswith("ERROR Task: cannot read books?]0;pwned??[2J?31m????b???c?\n\tsecond line é 日本\n")


def test_x3_the_jvm_replaces_every_character_that_we_escape_and_no_other(jvm: Any) -> None:
    # Without halves of pairs: the JVM cannot be given one, and cannot write one.
    characters = [chr(code) for code in (*range(0xD800), *range(0xE000, 0xF0000))]
    message = "".join(characters)
    _, _, shown = lines_of(jvm, message).partition("Task: ")
    assert shown == "".join(one if printable(one, newlines=True) == one else "?" for one in characters) + "\n"


def test_x3_the_trace_of_an_exception_of_the_jvm_is_shown_once_and_without_control_characters(
    jvm: Any,
) -> None:
    java = jvm.java.lang
    failure = java.RuntimeException(f"outer {HOSTILE}", java.IllegalStateException(f"inner {HOSTILE}"))
    shown = lines_of(jvm, "failed", failure)
    assert printable(shown, newlines=True) == shown
    assert shown.count("RuntimeException: outer books?]0;pwned") == 1
    assert shown.count("Caused by: java.lang.IllegalStateException: inner books?]0;pwned") == 1
