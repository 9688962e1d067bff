"""FP32-accumulating reduce-scatter, zero-copy gathers, autograd regions and a ledger."""

from .exchange import all_to_all
from .gather import all_gather_into
from .handles import Handle, ReduceHandle
from .reduce import all_reduce_fp32, reduce_scatter_fp32
from .small import all_reduce_small, broadcast

__all__ = [
    "Handle",
    "ReduceHandle",
    "all_gather_into",
    "all_reduce_fp32",
    "all_reduce_small",
    "all_to_all",
    "broadcast",
    "reduce_scatter_fp32",
]
