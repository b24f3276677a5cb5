"""The Spark data source `servicebus`: `spark.dataSource.register(ServiceBusDataSource)`."""

from twinbus.extras import missing_extra

try:
    from twinbus.pipeline.servicebus.source import ServiceBusDataSource
except ImportError as error:
    raise missing_extra(error, "spark") or error from error

__all__ = ["ServiceBusDataSource"]
