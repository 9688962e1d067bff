"""FP8 products and weights, and the backends that make them."""
