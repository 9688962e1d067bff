"""Mamba-2: the mixer, its state, its scans."""

from lamina.models.base.configs.mamba import MambaConfig
from lamina.models.mamba.block import MambaMixer, MambaState
from lamina.models.mamba.scan import chunked_scan, scan_step

__all__ = ["MambaConfig", "MambaMixer", "MambaState", "chunked_scan", "scan_step"]
