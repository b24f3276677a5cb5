"""The embedded Service Bus: engine (decides, pure), store (SQLite), front (AMQP, HTTP, TLS), faults."""
