"""A fast Service Bus client on our codec: sockets, TLS, SAS tokens, reconnecting."""
