"""What a state dict holds: tensors, values, optimizers, positions."""
