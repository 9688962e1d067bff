"""The matrix: layer x backend x world x torch, and whole products of tests' parameters."""
