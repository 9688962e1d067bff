"""Recurrent layers: Mamba-1 and -2, gated delta nets, short convolutions."""

from lamina.models.base.configs.mamba import MambaConfig
from lamina.models.mamba.block import Mamba2, MambaMixer, MambaState
from lamina.models.mamba.delta_net import GatedDeltaNet
from lamina.models.mamba.scan import chunked_scan, scan_step
from lamina.models.mamba.selective import Mamba1
from lamina.models.mamba.short_convolution import ShortConvolution

__all__ = [
    "GatedDeltaNet",
    "Mamba1",
    "Mamba2",
    "MambaConfig",
    "MambaMixer",
    "MambaState",
    "ShortConvolution",
    "chunked_scan",
    "scan_step",
]
