"""Bucketed data parallelism for PyTorch: ZeRO 0-2, sharded optimizer, finalize_grads and true gradient norms."""

__all__: list[str] = []
