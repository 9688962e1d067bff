"""Planted faults: which of them a layer's tests notice."""
