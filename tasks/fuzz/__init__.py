"""The task `fuzz`; what it runs is in tests/fuzz/."""
