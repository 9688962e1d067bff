"""The virtual GPU: its environment, its tests, and what a step may ask of it."""
