"""One-line fully_shard for PyTorch: ZeRO 0-3, HSDP and HFSDP on one engine."""

__all__: list[str] = []
