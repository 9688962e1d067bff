"""Collectives that move data: gathers, exchanges, rings, point-to-point messages."""
