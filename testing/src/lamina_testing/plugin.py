"""The pytest plugin (placeholder)."""
