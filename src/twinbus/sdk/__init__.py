"""TODO: introduce this package."""
