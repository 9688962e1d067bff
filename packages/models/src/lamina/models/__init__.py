"""Transformer, MoE and Mamba building blocks for PyTorch with TP, SP, PP, CP, EP, recomputation and FP8."""

__all__: list[str] = []
