"""The driver of `twinbus`: pairs and senders that use threads."""
