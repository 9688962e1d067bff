"""Parameters before they are grouped: axes, strategy, dtypes, keys."""
