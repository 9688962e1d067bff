"""What a wrapper holds: parameters, gradients, bytes."""
