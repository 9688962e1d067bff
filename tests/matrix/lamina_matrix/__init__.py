"""Matrices of tests: a pairwise cover by default, the whole product with `--full`."""
