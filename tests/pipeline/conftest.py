"""One Spark session for all tests of a worker: starting one takes seconds."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from twinbus.pipeline.servicebus import ServiceBusDataSource
from twinbus.pipeline.session import session
from twinbus.testing import LocalNamespace

# For small jobs: half the processor time of a JVM that optimizes for long runs.
QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ReservedCodeCacheSize=160m"


NAMED = "TWINBUS_TEST_CONNECTION_STRING"


@pytest.fixture(scope="session")
def named_namespace() -> Iterator[LocalNamespace]:
    """A namespace whose connection string is in the environment variable NAMED, for all processes of Spark."""
    with LocalNamespace() as made:
        os.environ[NAMED] = made.connection_string
        yield made
        del os.environ[NAMED]


@pytest.fixture(scope="session")
def spark(named_namespace: LocalNamespace) -> Iterator[SparkSession]:
    made = session("tests", settings={"spark.driver.defaultJavaOptions": QUICK})
    made.dataSource.register(ServiceBusDataSource)
    yield made
    made.stop()


@pytest.fixture(scope="module")
def namespace() -> Iterator[LocalNamespace]:
    with LocalNamespace() as made:
        yield made
