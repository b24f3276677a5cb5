"""The driver of `twinbus.aio`: pairs and senders that use asyncio."""
