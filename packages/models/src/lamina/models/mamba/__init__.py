"""Recurrent layers: Mamba-2, gated delta nets, short convolutions."""

from lamina.models.base.configs.mamba import MambaConfig
from lamina.models.mamba.block import MambaMixer, MambaState
from lamina.models.mamba.delta_net import GatedDeltaNet
from lamina.models.mamba.scan import chunked_scan, scan_step
from lamina.models.mamba.short_convolution import ShortConvolution

__all__ = [
    "GatedDeltaNet",
    "MambaConfig",
    "MambaMixer",
    "MambaState",
    "ShortConvolution",
    "chunked_scan",
    "scan_step",
]
