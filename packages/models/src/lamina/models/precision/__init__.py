"""Products in FP8."""
