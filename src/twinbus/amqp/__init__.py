"""AMQP 1.0 without I/O: types, performatives, connection, sections kept as raw bytes."""
