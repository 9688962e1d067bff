"""What the layers above build on: native reductions, small messages, rings, shaped collectives."""

from lamina.collectives.autograd_regions import REGION_STEPS, DualFunction
from lamina.collectives.call.collective import Pending, Span, current_stream, purpose
from lamina.collectives.call.registration import RegisteredPool, registration_problem
from lamina.collectives.compat import group_named, profiling
from lamina.collectives.move.all_gather import AllGather
from lamina.collectives.move.operators import gathered, summed, summed_piece
from lamina.collectives.move.rings import Message, receive_operation, ring, send_operation
from lamina.collectives.move.shaped import (
    SpanGroups,
    start_all_gather,
    start_all_reduce,
    start_all_to_all,
    start_reduce_scatter,
)
from lamina.collectives.move.small import (
    Agreement,
    CommonFacts,
    Fact,
    SmallReduction,
    all_reduce_small,
    broadcast,
    describe,
    host_device,
    software,
)
from lamina.collectives.reduction.codec import (
    Cast,
    Checksums,
    ErrorFeedback,
    GradientCodec,
    Int8Blocks,
)
from lamina.collectives.reduction.ordered import (
    OrderedReduction,
    Reduction,
    SumOp,
    bytes_received,
)
from lamina.collectives.reduction.reduce import ReductionName, reduction_class
from lamina.collectives.transport.groups import cuts_as_gloo, served_by_gloo
from lamina.collectives.transport.lanes import Job, kept_bytes, release_kept
from lamina.collectives.transport.peer_windows import open_window, window_bytes
from lamina.collectives.transport.transport import use_messages

__all__ = [
    "REGION_STEPS",
    "Agreement",
    "AllGather",
    "Cast",
    "Checksums",
    "CommonFacts",
    "DualFunction",
    "ErrorFeedback",
    "Fact",
    "GradientCodec",
    "Int8Blocks",
    "Job",
    "Message",
    "OrderedReduction",
    "Pending",
    "Reduction",
    "ReductionName",
    "RegisteredPool",
    "SmallReduction",
    "Span",
    "SpanGroups",
    "SumOp",
    "all_reduce_small",
    "broadcast",
    "bytes_received",
    "current_stream",
    "cuts_as_gloo",
    "describe",
    "gathered",
    "group_named",
    "host_device",
    "kept_bytes",
    "open_window",
    "profiling",
    "purpose",
    "receive_operation",
    "reduction_class",
    "registration_problem",
    "release_kept",
    "ring",
    "send_operation",
    "served_by_gloo",
    "software",
    "start_all_gather",
    "start_all_reduce",
    "start_all_to_all",
    "start_reduce_scatter",
    "summed",
    "summed_piece",
    "use_messages",
    "window_bytes",
]
