"""Tensors that are spans or regions of a larger one, and what each operation does with them."""
