"""What answers on a namespace's port: AMQP, HTTP and TLS, told apart by the first bytes."""
