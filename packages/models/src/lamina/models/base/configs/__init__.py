"""Parts of a model's configuration."""
