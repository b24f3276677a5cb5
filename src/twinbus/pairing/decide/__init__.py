"""The decisions of a pair, without I/O: failover of an entity, rotation of backlog queues, watching the backlog."""
