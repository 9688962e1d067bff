"""Units at work: when weights are gathered and given back, and the hooks that tell when."""
