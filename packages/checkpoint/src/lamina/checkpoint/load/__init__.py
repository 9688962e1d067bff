"""Loading: plan what this rank needs, read it, check it."""
