"""Optimizer steps over flat shards: the sharded optimizer, fused kernels, the gradient scaler."""
