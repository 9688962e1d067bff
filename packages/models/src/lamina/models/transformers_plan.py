"""Tensor parallelism for a live model of transformers, by the plan that it brings along.

The plan (`model.tp_plan`: the config's `base_model_tp_plan`, and the head's) has a style for each
name of a module or a parameter, with `*` for numbers. What a style says of weights becomes their
role; what it says of activations becomes a layer of Lamina, or a pair of hooks. So parameters are
plain tensors with roles, as in Lamina's own models, and wrappers need to know nothing new.
"""

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from lamina.collectives import copy_to, gather_from, reduce_from, scatter_to
from lamina.collectives.engine import all_reduce_small, start_all_gather
from lamina.mesh import Role, mark, role_of
from lamina.mesh.engine import MeshAxis, mesh_axis
from lamina.models.base.initialise import differing_tensors
from lamina.models.base.mesh_axes import cut_weight, join_weight, require_divisible
from lamina.models.decoder.gpt import HOOKS
from lamina.models.layers.linear import ColumnParallelLinear, RowParallelLinear
from lamina.models.layers.loss import check_ids

Arguments: TypeAlias = tuple[Any, ...]
Pretrained: TypeAlias = Any
"""A `PreTrainedModel` of transformers, which need not be installed."""


def axis_of_plan(device_mesh: DeviceMesh) -> MeshAxis:
    """The axis of the mesh that `parallelize_module` was given; ValueError if it has several."""
    names = device_mesh.mesh_dim_names
    if not names or len(names) != 1:
        raise ValueError(f"{device_mesh} must have one dimension with a name: pass mesh['tp']")
    return mesh_axis(device_mesh, names[0])


@dataclass(frozen=True)
class Cut:
    """The dimension along which ranks hold pieces, and how many matrices are fused along it."""

    dim: int
    fused: int = 1

    def blocks(self, length: int) -> tuple[int, ...] | None:
        """Lengths of what is fused, as roles have them; None is one matrix."""
        return None if self.fused == 1 else (length // self.fused,) * self.fused


Rule: TypeAlias = Callable[[int], Cut | None]
"""From a parameter's number of dimensions; None is whole."""


def _by_rows(fused: int = 1) -> Rule:
    # Experts are stacked in front of the rows.
    return lambda ndim: Cut(max(ndim - 2, 0), fused)


def _by_columns(fused: int = 1) -> Rule:
    return lambda ndim: None if ndim == 1 else Cut(ndim - 1, fused)


def _whole(ndim: int) -> None:
    return None


RULES: dict[str, Rule] = {
    "colwise": _by_rows(),
    "colwise_gather_output": _by_rows(),
    "colwise_rep": _by_rows(),
    "packed_colwise": _by_rows(2),
    "rowwise": _by_columns(),
    "rowwise_split_input": _by_columns(),
    "rowwise_rep": _by_columns(),
    "packed_rowwise": _by_columns(2),
    "embedding_rowwise": lambda ndim: Cut(0),
    "embedding_colwise": lambda ndim: Cut(1),
    "grouped_gemm": lambda ndim: Cut(0),
    "ep_dispatch_experts": _whole,
    "moe_tp_experts": _whole,
    "moe_identity_expert": _whole,
    "mla_kv_a_proj": _whole,
    "all_reduce": _whole,
    "replicated_with_grad_allreduce": _whole,
    "local_params": _whole,
    "replicate": _whole,
}
"""How each style cuts the parameters of a module (those that have no style of their own)."""

_LINEAR = ("colwise", "rowwise", "packed_colwise")
_HEADS = ("q_proj", "k_proj", "v_proj")


class CutByOwnPlan(ParallelStyle):
    """Cut a live model of transformers over the ranks of a mesh, in place, by its own plan.

    With `check`, the cut model is compared with the whole one on a few tokens. With
    `expert_parallel`, its plan for experts (`model.ep_plan`) goes before that for all layers: each
    rank has some experts whole. `save_pretrained` of the cut model writes whole weights.

    Raises:
        TypeError: if a style for linear layers is given to a layer of another class.
        ValueError: if the model has no plan, or none for experts that it shall cut, if a style has
            no counterpart, or if tied parameters would be cut differently. Applied: also where the
            ranks do not divide a width or the heads, where ranks hold different models, and where
            the plan makes another model.
    """

    def __init__(
        self, model: nn.Module, *, check: bool = True, expert_parallel: bool = False
    ) -> None:
        super().__init__()
        self.check = check
        self.kind = type(model).__name__
        if any(role_of(parameter).tp_shard_dim is not None for parameter in model.parameters()):
            raise ValueError(f"the {self.kind} is cut already")
        self.styles = dict(_styles(model, expert_parallel=expert_parallel))
        if not self.styles:
            raise ValueError(
                f"{self.kind} has no tensor-parallel plan (its config's base_model_tp_plan), or "
                f"none that names its modules: set model.tp_plan, {_OTHERWISE}"
            )
        self.cuts = dict(_cuts(model, self.styles))
        for name, style in self.styles.items():
            _check_style(model, name, style)
        _check_tied(model, self.cuts)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        axis = axis_of_plan(device_mesh)
        if axis.size == 1:
            return module
        parameters = dict(module.named_parameters(remove_duplicate=False))
        _check_widths(module, self.styles, self.cuts, axis)
        if differing := differing_tensors(parameters, [module.config], axis):
            raise ValueError(
                f"ranks of {axis.name} hold different models ({differing[0]}; {len(differing)} "
                "such in all), and each would keep a piece of its own: call torch.manual_seed with "
                "one seed before building it, or load the same weights"
            )
        checked = self.check and not any(parameter.is_meta for parameter in parameters.values())
        with torch.no_grad():
            expected = _outputs(module) if checked else None
        pieces: dict[nn.Parameter, nn.Parameter] = {}  # tied parameters stay one
        for name, cut in self.cuts.items():
            whole = parameters[name]
            if whole not in pieces:
                pieces[whole] = _piece(whole, cut, axis)
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, pieces[whole])
        wholes = dict(module.named_modules())
        for name, style in self.styles.items():
            if name in wholes:
                _connect(module, name, style, axis)
            elif style == "replicated_with_grad_allreduce":
                mark(module.get_parameter(name), tp_grad="sum")
        if expected is not None:
            _check_parity(module, expected, axis)
        made = {name: pieces[parameters[name]] for name in self.cuts}
        known = {name: (tuple(piece.shape), role_of(piece)) for name, piece in made.items()}
        cast(Pretrained, module).save_pretrained = partial(_save_whole, module, known, axis)
        return module


_OTHERWISE = "or train the model as it is with lamina.fsdp.fully_shard(model)"


def _styles(model: Pretrained, *, expert_parallel: bool) -> Iterator[tuple[str, str]]:
    """The names of modules and parameters that the plan has a style for."""
    plan: dict[str, str] = dict(model.tp_plan or {})
    if expert_parallel:
        if not (experts := getattr(model, "ep_plan", None)):
            raise ValueError(
                f"{type(model).__name__} has no plan for experts (its config's "
                "base_model_ep_plan): leave expert_parallel out, or set model.ep_plan"
            )
        plan |= experts
    patterns = [
        (re.compile(re.escape(key).replace(r"\*", r"\d+")), style) for key, style in plan.items()
    ]
    names = [name for name, _ in model.named_modules()]
    for name in [*names, *(name for name, _ in model.named_parameters(remove_duplicate=False))]:
        for pattern, style in patterns:
            if pattern.fullmatch(name):
                if style not in RULES:
                    raise ValueError(
                        f"{name} of the {type(model).__name__} has the style {style!r} in its "
                        f"tp_plan, which has no counterpart (known are {', '.join(RULES)}): change "
                        f"model.tp_plan, {_OTHERWISE}"
                    )
                yield name, style


def _cuts(model: nn.Module, styles: Mapping[str, str]) -> Iterator[tuple[str, Cut]]:
    """What is cut: the parameters that have a style, or whose module has one."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        style = styles.get(name) or styles.get(name.rpartition(".")[0], "replicate")
        if cut := RULES[style](parameter.ndim):
            yield name, cut


def _check_style(model: nn.Module, name: str, style: str) -> None:
    """Raise TypeError where a layer is of another class than the style is for."""
    module = dict(model.named_modules()).get(name)
    if module is None:
        return
    if style.startswith(_LINEAR) and type(module) is not nn.Linear:
        wanted = "torch.nn.Linear"
    elif style.startswith(_LINEAR) and any(getattr(module, kind) for kind in HOOKS):
        raise ValueError(
            f"{name} of the {type(model).__name__} has hooks, and cutting makes it anew: register "
            "them after parallelize_module"
        )
    elif style.startswith("embedding") and not isinstance(module, nn.Embedding):
        wanted = "torch.nn.Embedding"
    elif style == "packed_rowwise":
        wanted = "a parameter"
    elif style == "ep_dispatch_experts" and not hasattr(module, "num_experts"):
        wanted = "stacked experts with num_experts"
    else:
        return
    raise TypeError(
        f"{name} of the {type(model).__name__} has the style {style!r} in its tp_plan, which is "
        f"for {wanted}, not for a {type(module).__name__}: change model.tp_plan, {_OTHERWISE}"
    )


def _check_tied(model: nn.Module, cuts: Mapping[str, Cut]) -> None:
    """Raise ValueError if a parameter with two names would be cut under one and not the other."""
    first: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(parameter, name)
        if cuts.get(name) != cuts.get(other):
            raise ValueError(
                f"{other} and {name} are one parameter, and the tp_plan cuts them differently: "
                f"give both their styles in model.tp_plan, {_OTHERWISE}"
            )


def _check_widths(
    model: nn.Module, styles: Mapping[str, str], cuts: Mapping[str, Cut], axis: MeshAxis
) -> None:
    """Raise ValueError if the ranks divide a width that is cut, or the heads, with a remainder."""
    for name, cut in cuts.items():
        length = model.get_parameter(name).shape[cut.dim]
        require_divisible(f"{name}: width", length // cut.fused, axis)
        owner = name.rpartition(".")[0]
        parent, _, leaf = owner.rpartition(".")
        width = getattr(model.get_submodule(parent), "head_dim", None)
        if leaf in _HEADS and styles.get(owner) == "colwise" and isinstance(width, int):
            require_divisible(f"{name}: number of heads", length // width, axis)


def _piece(whole: nn.Parameter, cut: Cut, axis: MeshAxis) -> nn.Parameter:
    blocks = cut.blocks(whole.shape[cut.dim])
    # A copy even if the piece is a view, so that the whole can be freed.
    piece = cut_weight(whole.detach(), cut.dim, axis.rank, axis.size, blocks).clone()
    parameter = nn.Parameter(piece, requires_grad=whole.requires_grad)
    return mark(parameter, tp_shard_dim=cut.dim, tp_blocks=blocks)


# ------------------------------------------------------------------------ the check


def _outputs(model: Pretrained) -> Tensor:
    """Logits, or what else comes first, of a few ids."""
    device = model.get_input_embeddings().weight.device
    ids = torch.arange(1, 17, device=device)[None] % model.config.get_text_config().vocab_size
    modes = [(module, module.training) for module in model.modules()]
    try:
        return cast(Tensor, model.eval()(ids, use_cache=False)[0])
    finally:
        for module, training in modes:
            module.training = training


def _check_parity(model: nn.Module, expected: Tensor, axis: MeshAxis) -> None:
    """Raise ValueError if outputs are others than before, or gradients differ between ranks.

    A parameter that is whole has its whole gradient on each rank, or `tp_grad` says that gradients
    add up. A plan that forgets this changes no output. The bounds are the square root of the
    rounding error: order of summation stays below, and what is forgotten is far above.
    """
    kind = type(model).__name__
    remedy = (
        f"The model is cut now: build it again and change model.tp_plan, {_OTHERWISE}. "
        "tensor_parallel_plan(model, check=False) omits this comparison"
    )
    parameters = dict(model.named_parameters())
    before = {name: parameter.grad for name, parameter in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = None
    try:
        with torch.enable_grad():
            outputs = _outputs(model)
            torch.autograd.backward(outputs.float().square().mean())
    except RuntimeError as error:
        raise ValueError(f"the tp_plan of the {kind} does not run ({error}). {remedy}") from error
    whole = {}
    for name, parameter in parameters.items():
        role = role_of(parameter)
        if parameter.grad is not None and role.tp_shard_dim is None and role.tp_grad is None:
            whole[name] = float(parameter.grad.double().norm())
        parameter.grad = before[name]
    bound = math.sqrt(torch.finfo(outputs.dtype).eps)
    away = float((outputs.detach() - expected).abs().max() / expected.abs().max())
    partial_ones = _unequal(whole, bound, outputs.device, axis)
    if away > bound:
        change = f"changes its outputs by {away:.1e} of the largest"
    elif partial_ones:
        change = (
            f"leaves ranks with other gradients of {partial_ones[0]} (one of {len(partial_ones)}): "
            "the style replicated_with_grad_allreduce of its module would add them"
        )
    else:
        return
    raise ValueError(f"the tp_plan of the {kind} {change}. {remedy}")


def _unequal(
    norms: Mapping[str, float], bound: float, device: torch.device, axis: MeshAxis
) -> list[str]:
    """Name the norms that differ between ranks by more than a part of themselves."""
    if not norms:
        return []
    both = [list(norms.values()), [-norm for norm in norms.values()]]
    maxima = torch.tensor(both, dtype=torch.float64, device=device)
    all_reduce_small([maxima], axis.group, op="max")
    highest, lowest = maxima.tolist()
    pairs = zip(norms, highest, lowest, strict=True)
    return [name for name, high, negative in pairs if high + negative > bound * high]


# ------------------------------------------------------------------------ whole weights


def _save_whole(
    model: Pretrained,
    cut: Mapping[str, tuple[tuple[int, ...], Role]],
    axis: MeshAxis,
    directory: str | os.PathLike[str],
    *,
    state_dict: Mapping[str, Tensor] | None = None,
    **options: Any,
) -> None:
    """`save_pretrained` of whole weights, which all ranks call; the program's first rank writes.

    A model that `fully_shard` has cut as well needs `state_dict=full_parameters(model)`.
    ValueError: a tensor that is cut over tp is not this rank's piece.
    """
    own = model.state_dict()
    buffers = {name: each for name, each in model.named_buffers() if name in own}
    state = own if state_dict is None else buffers | dict(state_dict)
    whole: dict[Any, Tensor] = {}  # tied tensors stay one, as one name of them is written
    for name, tensor in state.items():
        shape, role = cut.get(name, (None, None))
        if type(tensor) not in (Tensor, nn.Parameter) or shape not in (None, tuple(tensor.shape)):
            raise ValueError(
                f"{name} of the {type(model).__name__} is a {type(tensor).__name__} "
                f"{tuple(tensor.shape)}, not the {shape or 'whole tensor'} that rank {axis.rank} "
                f"of {axis.name} has: pass state_dict=lamina.ddp.full_parameters(model)"
            )
        if (place := (tensor.data_ptr(), tensor.shape)) not in whole:
            joined = tensor.detach()
            if role is not None and role.tp_shard_dim is not None:
                pieces = start_all_gather(joined[None], axis.group, async_op=False).wait()
                joined = join_weight(pieces.unbind(0), role.tp_shard_dim, role.tp_blocks)
            whole[place] = joined.cpu()
    written = {name: whole[each.data_ptr(), each.shape] for name, each in state.items()}
    type(model).save_pretrained(model, directory, state_dict=written, **options)


# ------------------------------------------------------------------------ activations


def _connect(model: Pretrained, name: str, style: str, axis: MeshAxis) -> None:
    """Let a module whose weights are cut take and return what the style says."""
    module = model.get_submodule(name)
    if style.startswith(_LINEAR):
        model.set_submodule(name, _linear(module, style, axis))
    elif style == "embedding_rowwise":
        rows = _Rows(module, axis)
        module.register_forward_pre_hook(rows.enter)
        module.register_forward_hook(rows.leave)
    elif style == "embedding_colwise":
        module.register_forward_hook(partial(_leave_gathered, axis))
    elif style == "moe_tp_experts":
        module.register_forward_pre_hook(partial(_enter_experts, axis))
        module.register_forward_hook(partial(_leave_sum, axis))
    elif style == "ep_dispatch_experts":
        module.num_experts //= axis.size
        module._is_expert_parallel = (
            True  # grouped products read this; a loop over experts does not
        )
        module.register_forward_pre_hook(partial(_enter_own_experts, axis))
        module.register_forward_hook(partial(_leave_sum, axis))
    elif style == "all_reduce":
        module.register_forward_hook(partial(_leave_sum, axis))
    elif style == "moe_identity_expert":
        # Every rank returns the same, and the sum over ranks follows.
        module.register_forward_pre_hook(partial(_enter_shares, axis))
    elif style == "mla_kv_a_proj":
        width = model.config.get_text_config().qk_rope_head_dim
        module.register_forward_hook(partial(_leave_latents, axis, width))
    elif style == "replicated_with_grad_allreduce":
        for parameter in module.parameters(recurse=False):
            mark(parameter, tp_grad="sum")


def _linear(linear: nn.Linear, style: str, axis: MeshAxis) -> nn.Module:
    """Lamina's layer of the same sizes, with the parameters that a linear layer has."""
    sizes, bias = (linear.in_features, linear.out_features), linear.bias is not None
    made: nn.Module
    with torch.device("meta"):
        if style.startswith("rowwise"):
            made = RowParallelLinear(*sizes, axis, bias=bias)
        else:
            gather = style in ("colwise_gather_output", "colwise_rep")
            blocks = role_of(linear.weight).tp_blocks
            made = ColumnParallelLinear(
                *sizes, axis, bias=bias, blocks=blocks, gather_output=gather
            )
    for name, parameter in linear.named_parameters():
        made.register_parameter(name, parameter)
    if style in ("rowwise_split_input", "rowwise_rep"):
        made.register_forward_pre_hook(partial(_enter_piece, axis))
    return made.train(linear.training)


class _Rows:
    """An embedding with some rows: the other ids are looked up elsewhere, and ranks add up."""

    def __init__(self, table: nn.Embedding, axis: MeshAxis) -> None:
        self.axis, self.total = axis, table.num_embeddings
        self.elsewhere = torch.empty(0, dtype=torch.bool)
        table.num_embeddings = self.total // axis.size
        self.first = axis.rank * table.num_embeddings
        if table.padding_idx is not None:
            own = table.padding_idx - self.first
            table.padding_idx = own if 0 <= own < table.num_embeddings else None

    def enter(self, module: nn.Embedding, arguments: Arguments) -> Arguments:
        check_ids("tokens", arguments[0], self.total)
        row = arguments[0] - self.first
        self.elsewhere = (row < 0) | (row >= module.num_embeddings)
        return (row.masked_fill(self.elsewhere, 0), *arguments[1:])

    def leave(self, module: nn.Module, arguments: Arguments, vectors: Tensor) -> Tensor:
        # All ranks but one contribute zeros, so the sum is exact in any dtype.
        return reduce_from(vectors.masked_fill(self.elsewhere[..., None], 0), self.axis.group)


def _enter_piece(axis: MeshAxis, module: nn.Module, arguments: Arguments) -> Arguments:
    return (scatter_to(arguments[0], axis.group, dim=-1), *arguments[1:])


def _enter_experts(axis: MeshAxis, module: nn.Module, arguments: Arguments) -> Arguments:
    """Hidden states and weights of the router are whole; each rank has a part of each expert."""
    return tuple(
        copy_to(each, axis.group) if isinstance(each, Tensor) and each.is_floating_point() else each
        for each in arguments
    )


def _enter_own_experts(axis: MeshAxis, module: Any, arguments: Arguments) -> Arguments:
    """All tokens are here, and some experts; a token's others have the number after the last."""
    hidden, index, weights, *more = arguments
    own = index - axis.rank * module.num_experts
    elsewhere = (own < 0) | (own >= module.num_experts)
    index = own.masked_fill(elsewhere, module.num_experts)
    weights = copy_to(weights, axis.group).masked_fill(elsewhere, 0.0)
    return (copy_to(hidden, axis.group), index, weights, *more)


def _enter_shares(axis: MeshAxis, module: nn.Module, arguments: Arguments) -> Arguments:
    return (arguments[0] / axis.size, *arguments[1:])


def _leave_sum(axis: MeshAxis, module: nn.Module, arguments: Arguments, partial_sum: Tensor) -> Any:
    return reduce_from(partial_sum, axis.group)


def _leave_gathered(axis: MeshAxis, module: nn.Module, arguments: Arguments, piece: Tensor) -> Any:
    return gather_from(piece, axis.group, dim=-1)


def _leave_latents(
    axis: MeshAxis, width: int, module: nn.Module, arguments: Arguments, latents: Tensor
) -> Tensor:
    """Each rank turns the last `width` elements for its own heads: their gradients add up."""
    passed, turned = torch.split(latents, [latents.shape[-1] - width, width], dim=-1)
    return torch.cat((passed, copy_to(turned, axis.group)), dim=-1)
