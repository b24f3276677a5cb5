"""One Spark session for all tests of a worker: starting one takes seconds.

This is a plugin that tests/conftest.py names. If two folders had these fixtures, there would be two namespaces, and
the second would replace the connection string of the first.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from twinbus.testing import LocalNamespace

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# For small jobs: half the processor time of a JVM that optimizes for long runs.
QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ReservedCodeCacheSize=160m"
NAMED = "TWINBUS_TEST_CONNECTION_STRING"
# The variable with the credentials of a proxy. Spark's processes get their environment once, when they start.
NAMED_CREDENTIALS = "TWINBUS_TEST_PROXY_CREDENTIALS"
CREDENTIALS = "twin:sesame"


@pytest.fixture(scope="session")
def named_namespace() -> Iterator[LocalNamespace]:
    """A namespace whose connection string is in the environment variable NAMED, for all processes of Spark."""
    with LocalNamespace() as made:
        os.environ[NAMED] = made.connection_string
        yield made
        del os.environ[NAMED]


@pytest.fixture(scope="session")
def spark(named_namespace: LocalNamespace) -> Iterator[SparkSession]:
    from twinbus.pipeline.servicebus import ServiceBusDataSource  # noqa: PLC0415 - slow
    from twinbus.pipeline.session import session  # noqa: PLC0415 - slow

    os.environ[NAMED_CREDENTIALS] = CREDENTIALS
    made = session("tests", settings={"spark.driver.defaultJavaOptions": QUICK})
    made.dataSource.register(ServiceBusDataSource)
    yield made
    made.stop()
    del os.environ[NAMED_CREDENTIALS]
