"""The end of a step: every reduction that data parallelism does not do."""
