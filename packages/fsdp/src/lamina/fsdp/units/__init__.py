"""Which modules make a unit, and how their parameters come to be."""
