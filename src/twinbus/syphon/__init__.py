"""Moves messages from the backlog queues to the entities they were meant for (Y)."""
