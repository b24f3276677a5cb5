"""Everything that runs on Spark: the only home of pyspark, which comes with the extra `twinbus[spark]`."""
