"""Initial weights that depend only on the model's seed and the parameter's name.

If parameters drew from the process's generator, their values would change with the order of
construction, which differs between pipeline stages, units that are materialised late, and numbers
of ranks. So each parameter has its own generator, seeded from the model's seed and the parameter's
full name. A rank that holds a piece of a weight draws the whole weight and keeps its piece
(decision 0601).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from lamina.collectives.engine import all_reduce_small, host_device
from lamina.mesh import derive_seed
from lamina.mesh.engine import MeshAxis
from lamina.models.base.mesh_axes import cut_weight

_BYTES_AT_ONCE = 1 << 24

Draw = Callable[..., Tensor]
"""Fills a whole weight in place, given a `generator`, and returns it, or what it makes of it."""


def draw_seed() -> int:
    """Draw a model's seed from torch's CPU generator (so `torch.manual_seed` decides it)."""
    return int(torch.randint(0, 2**62, (), device="cpu"))


def check_same_seed(seed: int, *axes: MeshAxis | None) -> None:
    """Raise ValueError if ranks of an axis have different seeds; None is one rank. Collective."""
    for axis in axes:
        if axis is None:
            continue
        own = seed % 2**63
        ((lowest, highest),) = extremes([own], axis)
        if lowest != highest:
            raise ValueError(
                f"ranks of {axis.name} would draw weights from different seeds (rank {axis.rank} "
                f"of {axis.size}: {own}; in all {lowest} to {highest}), and hold parts of one "
                "model: build GPTModel(config, mesh, seed=...) with one seed on all ranks"
            )


def extremes(values: Sequence[int], axis: MeshAxis) -> list[tuple[int, int]]:
    """The lowest and the highest of each int64 value over the ranks of an axis. Collective."""
    if axis.group is None:
        return [(value, value) for value in values]
    device = host_device([axis.group], "cuda" if torch.cuda.is_available() else "cpu")
    # One maximum gives both: the largest value, and the smallest with its sign changed.
    maxima = torch.tensor([values, [-value for value in values]], dtype=torch.int64, device=device)
    all_reduce_small([maxima], axis.group, op="max")
    highest, lowest = maxima.tolist()
    return [(-low, high) for low, high in zip(lowest, highest, strict=True)]


def agree(values: Sequence[int], axis: MeshAxis) -> list[bool]:
    """Whether each value is the same on all ranks of an axis. Collective."""
    return [lowest == highest for lowest, highest in extremes(values, axis)]


def differing_tensors(
    tensors: Mapping[str, Tensor], settings: Sequence[object], axis: MeshAxis
) -> list[str]:
    """Name the tensors whose bytes differ between ranks of an axis. Collective.

    Where `settings`, dtypes, shapes or devices differ, the one name says so. Tensors on the meta
    device are alike.
    """
    shapes = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
    meta = [tensor.is_meta for tensor in tensors.values()]
    if agree([derive_seed(0, *settings, shapes, meta)], axis) == [False]:
        return ["config, dtypes or devices"]
    same = agree([_sum_of_bytes(tensor) for tensor in tensors.values()], axis)
    return [name for name, equal in zip(tensors, same, strict=True) if not equal]


def _sum_of_bytes(tensor: Tensor) -> int:
    if tensor.is_meta:
        return 0
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    # In pieces, because sum() first casts its input to int64, which is eight times as large.
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    for piece in torch.split(flat, _BYTES_AT_ONCE):
        total += piece.sum(dtype=torch.int64)
    return int(total)


def assign_seeds(model: nn.Module, seed: int) -> None:
    """Set `init_seed` of every submodule that has one to a seed derived from its full name."""
    for name, module in model.named_modules():
        if hasattr(module, "init_seed"):
            module.init_seed = derive_seed(seed, name)


def normal(std: float) -> Draw:
    """Draw from N(0, std^2)."""
    return partial(Tensor.normal_, mean=0.0, std=std)


def uniform(low: float, high: float, then: Callable[[Tensor], Tensor] | None = None) -> Draw:
    """Draw evenly from [low, high), and apply `then` to the whole."""

    def draw(whole: Tensor, *, generator: torch.Generator | None) -> Tensor:
        whole = whole.uniform_(low, high, generator=generator)
        return whole if then is None else then(whole)

    return draw


@torch.no_grad()
def fill_stack(
    parameter: Tensor,
    draw: Draw,
    seeds: Sequence[int],
    axis: MeshAxis | None = None,
    *,
    dim: int = 0,
    blocks: Sequence[int] | None = None,
) -> None:
    """Fill each tensor of a stack `[tensors, ...]` from a seed of its own: see `fill`."""
    if parameter.is_meta:
        return
    elsewhere = hasattr(parameter, "device_mesh")
    stack = parameter
    if elsewhere:
        stack = torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)
    for tensor, seed in zip(stack, seeds, strict=True):
        fill(tensor, draw, seed, axis, dim=dim, blocks=blocks)
    if elsewhere:
        _fill_dtensor(parameter, stack)


@torch.no_grad()
def fill(
    parameter: Tensor,
    draw: Draw,
    seed: int | None,
    axis: MeshAxis | None = None,
    *,
    dim: int = 0,
    blocks: Sequence[int] | None = None,
) -> None:
    """Fill a parameter with a draw, or a rank's piece of one; nothing on the meta device.

    The seed decides the numbers, together with the device's type; None draws from the device's
    default generator. Ranks of the axis hold pieces along `dim`, where `blocks` are the lengths,
    over all ranks, of what is fused.
    """
    if parameter.is_meta:
        return
    generator = None
    if seed is not None:
        generator = torch.Generator(device=parameter.device)
        generator.manual_seed(seed)
    shape = list(parameter.shape)
    shape[dim] *= 1 if axis is None else axis.size
    # In float32 for any dtype of the parameter, so that a bf16 model starts from the rounded
    # weights of the fp32 model.
    whole = torch.empty(shape, dtype=torch.float32, device=parameter.device)
    whole = draw(whole, generator=generator)
    if axis is not None:
        whole = cut_weight(whole, dim, axis.rank, axis.size, blocks)
    if hasattr(parameter, "device_mesh"):
        _fill_dtensor(parameter, whole)
    else:
        parameter.copy_(whole)


def _fill_dtensor(parameter: Tensor, whole: Tensor) -> None:
    """Keep this rank's piece of a DTensor, which torch's FSDP2 or tensor parallelism has made."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(parameter, DTensor):
        raise TypeError(f"cannot initialise a {type(parameter).__name__}")
    # Every rank has drawn the same whole weight, so nothing has to be sent.
    pieces = distribute_tensor(
        whole, parameter.device_mesh, parameter.placements, src_data_rank=None
    )
    parameter.to_local().copy_(pieces.to_local())
