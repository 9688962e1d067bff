"""Where each tensor lies in a buffer: integers only."""
