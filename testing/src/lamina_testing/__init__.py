"""Lamina's test bed: multi-rank tests, meters, delay injection and oracles."""
