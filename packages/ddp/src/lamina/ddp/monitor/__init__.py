"""What watches over training: the health of steps, the pace of ranks, copies that must be equal."""
