"""From autograd's hooks to reductions in one order on all ranks."""
