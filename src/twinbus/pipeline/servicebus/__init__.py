"""The Spark data source `servicebus` (D1): `spark.dataSource.register(ServiceBusDataSource)`."""

from twinbus.pipeline.servicebus.source import ServiceBusDataSource

__all__ = ["ServiceBusDataSource"]
