"""The wrapper, its configuration, and the contract that every wrapper meets."""
