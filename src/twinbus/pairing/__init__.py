"""Two namespaces as one: senders that stay available. What is public here is exported by the drivers."""
