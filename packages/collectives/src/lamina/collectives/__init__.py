"""FP32-accumulating reduce-scatter, zero-copy gathers, autograd regions and a ledger."""

from lamina.collectives.autograd_regions import (
    all_to_all_tokens,
    copy_to,
    gather_from,
    reduce_from,
    reduce_scatter_to,
    scatter_to,
)
from lamina.collectives.call.collective import (
    DamagedMessageError,
    Handle,
    PeerLostError,
    ReduceHandle,
)
from lamina.collectives.call.ledger import Ledger, Record
from lamina.collectives.call.registration import RegistrationError, register_pool
from lamina.collectives.move.all_gather import all_gather_into
from lamina.collectives.move.all_to_all import all_to_all
from lamina.collectives.move.buffer_forms import gather, reduce
from lamina.collectives.move.rings import send_recv
from lamina.collectives.move.small import DisagreementError
from lamina.collectives.reduction.reduce import all_reduce_fp32, reduce_scatter_fp32

__all__ = [
    "DamagedMessageError",
    "DisagreementError",
    "Handle",
    "Ledger",
    "PeerLostError",
    "Record",
    "ReduceHandle",
    "RegistrationError",
    "all_gather_into",
    "all_reduce_fp32",
    "all_to_all",
    "all_to_all_tokens",
    "copy_to",
    "gather",
    "gather_from",
    "reduce",
    "reduce_from",
    "reduce_scatter_fp32",
    "reduce_scatter_to",
    "register_pool",
    "scatter_to",
    "send_recv",
]
