"""FP32-accumulating reduce-scatter, zero-copy gathers, autograd regions and a ledger of every byte sent, for PyTorch."""

__all__: list[str] = []
