"""The syphon as a job of Structured Streaming (D2): the driver waits and plans, lanes on the executors move."""
