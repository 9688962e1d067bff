"""FP32-accumulating reduce-scatter, zero-copy gathers, autograd regions and a ledger."""

from .all_gather import all_gather_into
from .buffer_forms import gather, reduce
from .exchange import all_to_all
from .handles import Handle, ReduceHandle
from .lanes import kept_bytes, release_kept
from .ledger import Ledger, Record
from .native import all_reduce_native, reduce_scatter_native
from .ordered import all_reduce_fp32, reduce_scatter_fp32
from .point_to_point import Message, receive_operation, send_operation
from .regions import (
    all_to_all_tokens,
    copy_to,
    gather_from,
    reduce_from,
    reduce_scatter_to,
    scatter_to,
)
from .registration import (
    RegisteredPool,
    RegistrationError,
    register_pool,
    registration_problem,
)
from .rings import RingHandle, ring, send_recv
from .shaped import (
    Pending,
    start_all_gather,
    start_all_reduce,
    start_all_to_all,
    start_reduce_scatter,
)
from .small import all_reduce_small, broadcast, host_device
from .spans import SpanGroups
from .transport import use_messages

__all__ = [
    "Handle",
    "Ledger",
    "Message",
    "Pending",
    "Record",
    "ReduceHandle",
    "RegisteredPool",
    "RegistrationError",
    "RingHandle",
    "SpanGroups",
    "all_gather_into",
    "all_reduce_fp32",
    "all_reduce_native",
    "all_reduce_small",
    "all_to_all",
    "all_to_all_tokens",
    "broadcast",
    "copy_to",
    "gather",
    "gather_from",
    "host_device",
    "kept_bytes",
    "receive_operation",
    "reduce",
    "reduce_from",
    "reduce_scatter_fp32",
    "reduce_scatter_native",
    "reduce_scatter_to",
    "register_pool",
    "registration_problem",
    "release_kept",
    "ring",
    "scatter_to",
    "send_operation",
    "send_recv",
    "start_all_gather",
    "start_all_reduce",
    "start_all_to_all",
    "start_reduce_scatter",
    "use_messages",
]
