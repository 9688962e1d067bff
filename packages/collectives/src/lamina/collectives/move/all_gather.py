"""All-gather straight into the destination."""

from collections.abc import Sequence

import torch
from torch.distributed import ProcessGroup

from lamina.collectives.call.checks import require_agreement
from lamina.collectives.call.collective import Collective, Handle
from lamina.collectives.transport.groups import where
from lamina.collectives.transport.transport import route_for


class AllGather(Collective):
    """A gather of equal pieces, prepared once and started often; arguments as in `all_gather_into`.

    ValueError: sizes, dtypes, devices or strides that do not fit.
    """

    overlap_hint = "only an input that is exactly this rank's own piece of the output may"

    def __init__(
        self, output: torch.Tensor, input: torch.Tensor, group: ProcessGroup | None
    ) -> None:
        super().__init__("all_gather_into", output, input, group)
        piece, total = input.numel(), output.numel()
        if output.dtype != input.dtype:
            raise ValueError(
                f"{self.op} {where(group)}: `output` is {output.dtype} and `input` {input.dtype}; "
                f"they must be equal (cast the input first)"
            )
        if total != self.size * piece:
            raise ValueError(
                f"{self.op} {where(group)}: `output` has {total} elements, but {self.size} pieces "
                f"of {piece} need {self.size * piece}"
            )
        self._sent = (self.size - 1) * input.nbytes
        self._in_place = self.rank * input.nbytes
        # How bytes travel depends on the group, the sizes and the device alone, so it is decided
        # once.
        route = route_for(group, piece, total, self.device)
        self._transfer, self._nbytes, self._run = route.gather, input.nbytes, route.run
        self._only_posts = route.only_posts

    def _leaving(self, near: Sequence[int]) -> int:
        return self._nbytes * (self.size - len(near)) // self._run


def all_gather_into(
    output: torch.Tensor,
    input: torch.Tensor,
    group: ProcessGroup | None,
    *,
    async_op: bool = False,
    check: bool = False,
) -> Handle:
    """Gather equal pieces from all ranks into `output`, in rank order, with no copy in between.

    Args:
        output: flat [N*n] for N ranks.
        input: flat [n], of the same dtype (any); it may be exactly this rank's own piece of
            `output` (in place: then nothing is copied locally).
        group: the ranks, or None for a group of one.
        async_op: return at once.
        check: compare this call over the ranks first (for debugging; on all ranks or on none).

    Raises:
        ValueError: sizes, dtypes, devices, strides or shared memory that don't fit.

    Examples:
        >>> shard, whole = torch.ones(4), torch.empty(4)
        >>> all_gather_into(whole, shard, None, async_op=True).wait()
    """
    gather = AllGather(output, input, group)
    if check:
        facts = {"dtype": input.dtype, "input": input.numel()}
        require_agreement("all_gather_into", group, gather.device, **facts)
    return gather.start(output, input, async_op=async_op)
