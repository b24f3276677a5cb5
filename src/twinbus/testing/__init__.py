"""Fixtures and fakes that users may import."""
