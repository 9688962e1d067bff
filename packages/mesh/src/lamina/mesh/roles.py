"""What a parameter is to the mesh: the only thing layers know about somebody's model."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, TypeVar

import torch
from torch import nn

TpGrad = Literal["sum", "mean"]
_TensorT = TypeVar("_TensorT", bound=torch.Tensor)

_ATTRIBUTE = "_lamina_role"


@dataclass(frozen=True)
class Role:
    """What a parameter is to the mesh. The default is an ordinary dense parameter.

    Attributes:
        tp_shard_dim: dimension along which this rank's tensor is one of tp pieces; None if it is
            whole on every tp rank.
        tp_blocks: lengths, over all tp ranks, of the matrices fused along `tp_shard_dim` (query,
            key, value; gate, up). Each is cut into tp pieces by itself and a rank holds the
            concatenation of its pieces. None: one matrix.
        tp_grad: for a parameter that is whole on every tp rank but sees different tokens or
            heads on each: whether the gradients over tp are summed or averaged. None: they are
            equal already.
        expert: belongs to an expert; its axes are ep, expert_tp and expert_dp.
        tied: a name shared by the parameters that are one across pipeline stages.
        block_rows: rows that a shard boundary may not separate (block-quantised weights).
    """

    tp_shard_dim: int | None = None
    tp_blocks: tuple[int, ...] | None = None
    tp_grad: TpGrad | None = None
    expert: bool = False
    tied: str | None = None
    block_rows: int | None = None


def mark(
    parameter: _TensorT,
    *,
    tp_shard_dim: int | None = None,
    tp_blocks: Sequence[int] | None = None,
    tp_grad: TpGrad | None = None,
    expert: bool = False,
    tied: str | None = None,
    block_rows: int | None = None,
) -> _TensorT:
    """Say what `parameter` is to the mesh. See Role for the fields.

    Marks add up: a linear layer says how its weight is cut, the model that it is tied. Saying
    a field again with another value is an error, not a correction.

    The mark is an attribute of the tensor, which `copy.deepcopy` and `torch.save` of a module keep.
    `to_empty()` on a meta-device module makes new parameters without it: follow it with
    `copy_roles`.

    Args:
        parameter: the tensor as this rank holds it.
        tp_shard_dim: 0 <= dim < parameter.ndim; negative dimensions count from the end.
        tp_blocks: positive lengths whose sum is a multiple of `parameter.shape[tp_shard_dim]`.
        tp_grad: "sum" or "mean"; not together with `tp_shard_dim`.
        expert: whether it belongs to an expert.
        tied: a name.
        block_rows: a positive number of rows.

    Returns:
        `parameter`, so that it can be marked where it is made.

    Raises:
        ValueError: a field is out of range or contradicts another or an earlier mark.

    Examples:
        >>> weight = mark(torch.nn.Parameter(torch.empty(8, 4)), tp_shard_dim=0)
        >>> role_of(weight).tp_shard_dim
        0
    """
    said = Role(
        tp_shard_dim=None if tp_shard_dim is None else _dimension(parameter, tp_shard_dim),
        tp_blocks=None if tp_blocks is None else tuple(tp_blocks),
        tp_grad=tp_grad,
        expert=expert,
        tied=tied,
        block_rows=block_rows,
    )
    # A model marks a parameter that its layer has marked: what both say must agree.
    role = _merged(parameter, role_of(parameter), said)
    _check(parameter, role)
    _set_role(parameter, role)
    return parameter


def role_of(parameter: torch.Tensor) -> Role:
    """What `parameter` was marked as; the default Role if it never was.

    Examples:
        >>> role_of(torch.nn.Parameter(torch.empty(3))).expert
        False
    """
    role = getattr(parameter, _ATTRIBUTE, None)
    return role if isinstance(role, Role) else Role()


def copy_role(source: torch.Tensor, target: torch.Tensor) -> None:
    """Give `target` the role of `source`, replacing its own."""
    _set_role(target, role_of(source))


def _set_role(parameter: torch.Tensor, role: Role) -> None:
    # Note [Copies of parameters with a role]
    # `Parameter.__deepcopy__` makes a parameter without the attributes of the one that it copies,
    # while pickling keeps them. `copy.deepcopy` looks the method up on the object itself, and
    # copies an object where that is None in the way in which it would be pickled. Other classes of
    # tensors copy their attributes.
    setattr(parameter, _ATTRIBUTE, role)
    if type(parameter) is nn.Parameter:
        parameter.__dict__["__deepcopy__"] = None
    else:
        parameter.__dict__.pop("__deepcopy__", None)


def copy_roles(source: nn.Module, target: nn.Module) -> None:
    """Give the parameters of `target` the roles of those of the same name in `source`.

    For after `module.to_empty(...)` and other calls that make new parameters.

    ValueError: the parameters have different names.
    """
    # Under all of their names: what is tied in one module need not be tied in the other yet.
    sources = dict(source.named_parameters(remove_duplicate=False))
    targets = dict(target.named_parameters(remove_duplicate=False))
    if sources.keys() != targets.keys():
        differing = sorted(sources.keys() ^ targets.keys())
        raise ValueError(
            f"roles can't be copied between modules with different parameters: {differing[:5]} "
            f"({len(differing)} in all) are in only one of them."
        )
    for name, parameter in sources.items():
        copy_role(parameter, targets[name])


def _merged(parameter: torch.Tensor, before: Role, said: Role) -> Role:
    # A field with its default value says nothing, so it cannot contradict an earlier mark.
    unsaid = Role()
    news = {
        field.name: getattr(said, field.name)
        for field in fields(Role)
        if getattr(said, field.name) != getattr(unsaid, field.name)
    }
    for name, value in news.items():
        if getattr(before, name) not in (getattr(unsaid, name), value):
            raise ValueError(
                f"{_describe(parameter)} is marked {name}={getattr(before, name)!r} already and "
                f"can't become {name}={value!r}: mark it in one place only."
            )
    return replace(before, **news)


def _dimension(parameter: torch.Tensor, dim: int) -> int:
    if not -parameter.ndim <= dim < parameter.ndim:
        raise ValueError(
            f"tp_shard_dim={dim}: {_describe(parameter)} has dimensions 0..{parameter.ndim - 1}."
        )
    return dim % parameter.ndim


def _check(parameter: torch.Tensor, role: Role) -> None:
    what = _describe(parameter)
    if role.tp_grad not in (None, "sum", "mean"):
        raise ValueError(f"tp_grad={role.tp_grad!r} for {what}: it is 'sum', 'mean' or None.")
    if role.tp_shard_dim is not None and role.tp_grad is not None:
        raise ValueError(
            f"{what} is sharded over tp along dimension {role.tp_shard_dim}, so each rank owns "
            f"its piece's gradient: tp_grad={role.tp_grad!r} is for parameters that are whole on "
            "every tp rank. Give one of the two."
        )
    if role.tied == "":
        raise ValueError(f"tied='' for {what}: give the name that the tied parameters share.")
    if role.block_rows is not None and role.block_rows < 1:
        raise ValueError(f"block_rows={role.block_rows} for {what}: it is a positive number.")
    if role.tp_blocks is not None:
        _check_blocks(parameter, role.tp_blocks, role.tp_shard_dim)


def _check_blocks(parameter: torch.Tensor, blocks: tuple[int, ...], dim: int | None) -> None:
    what = _describe(parameter)
    if dim is None:
        raise ValueError(
            f"tp_blocks={blocks} for {what} says how a sharded dimension is fused: give "
            "tp_shard_dim too."
        )
    if not blocks or any(block < 1 for block in blocks):
        raise ValueError(f"tp_blocks={blocks} for {what}: give the positive length of each block.")
    # The number of tp ranks is not known here, but it follows from the two lengths.
    total, local = sum(blocks), parameter.shape[dim]
    if local == 0 or total % local:
        raise ValueError(
            f"tp_blocks={blocks} for {what}: they sum to {total} over all tp ranks, which is no "
            f"multiple of the {local} that this rank holds of dimension {dim}."
        )
    pieces = total // local
    uneven = [block for block in blocks if block % pieces]
    if uneven:
        raise ValueError(
            f"tp_blocks={blocks} for {what}: {total} / {local} gives {pieces} tp ranks, and "
            f"block {uneven[0]} is not divisible by {pieces}."
        )


def _describe(parameter: torch.Tensor) -> str:
    return f"a parameter of shape {tuple(parameter.shape)} and dtype {parameter.dtype}"
