"""Arithmetic on the virtual GPU: each operator's value is computed by ATen's CPU kernel."""
