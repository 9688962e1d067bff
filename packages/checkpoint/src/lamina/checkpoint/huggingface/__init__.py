"""Hugging Face files: reading, writing, gathering."""
