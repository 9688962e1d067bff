"""A step as units see it: gather, compute, release, reduce."""
