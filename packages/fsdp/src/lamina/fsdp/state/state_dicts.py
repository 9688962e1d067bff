"""What `state_dict()` of a sharded model and its optimizer hold, for DCP or as plain tensors."""

import contextlib
import inspect
import pickle
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lamina.buffers import ShardedTensor
from lamina.buffers.engine import TensorPart
from lamina.ddp.engine import COUNTERS, ELEMENTWISE_STATE, local_of_state_call
from lamina.fsdp.compat import TorchDispatchMode, tree_map_only
from lamina.fsdp.state.cut_regions import TensorRegions, regions_of

_WHOLE = "_lamina_whole_state"


def give_whole_tensors(module: nn.Module, *, always: bool = True) -> None:
    """Let `module.state_dict()` hold whole plain tensors on every rank (collective).

    Unless `always`, only where `torch.distributed.checkpoint.state_dict` was asked for them.
    `load_state_dict` takes whole tensors under every strategy, and needs nothing.
    """

    def after(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
        """Put whole tensors in a state's place, where they are wanted."""
        if not always and not _asked_for_whole():
            return
        for name, value in state.items():
            if not name.startswith(prefix):  # a model around this one saves into one dictionary
                continue
            if isinstance(value, TensorPart):
                raise NotImplementedError(
                    f"full_state_dict=True: {name} is this rank's part of a tensor that tensor or "
                    "expert parallelism has cut. Use lamina.checkpoint.export_huggingface, or "
                    "save without full_state_dict and load on one rank"
                )
            if isinstance(value, ShardedTensor):
                state[name] = value.full_tensor()

    module.register_state_dict_post_hook(after)  # type: ignore[no-untyped-call]
    module.__dict__[_WHOLE] = always


def _asked_for_whole() -> bool:
    """Whether this state is for a caller of torch's functions who wants full tensors.

    See Note [Options that torch keeps to itself].
    """
    info = local_of_state_call("info")
    return info is not None and bool(info.full_state_dict or info.broadcast_from_rank0)


def prepare_given_optimizers() -> None:
    """If torch's generic functions ask for parameters, prepare the optimizers they were given.

    An optimizer over `shard_module` is made by the user, and nobody tells Lamina of it. These
    functions are given it beside the model, before they ask it for its state.
    """
    # See Note [Options that torch keeps to itself].
    optimizers = local_of_state_call("optims", within=1)
    for optimizer in optimizers or ():
        hooks = optimizer._optimizer_load_state_dict_pre_hooks.values()
        spans = any(isinstance(p, ShardedTensor) for p in _parameters(optimizer))
        if spans and _cut_whole not in hooks:
            model = local_of_state_call("model")
            prepare_optimizer_state(optimizer, whole=False, regions=regions_of(model))


def gives_whole_tensors(module: nn.Module) -> bool:
    """Whether `give_whole_tensors` was called for this module."""
    return bool(module.__dict__.get(_WHOLE, False))


def prepare_optimizer_state(
    optimizer: Optimizer, *, whole: bool, regions: Sequence[TensorRegions] = ()
) -> None:
    """Make `optimizer.state_dict()` ready for DCP, which loads only into tensors that are there.

    A parameter that has not been stepped yet has no state. In the dictionary (not in the optimizer)
    it gets that of a first step with nothing done: the step count 0, and its other state as a zero
    gradient leaves it. `whole` holds plain whole tensors (collective). State of parameters in one
    of the `regions` is cut alike.
    """

    def after(owner: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Complete the state, or make it whole."""
        if whole or _asked_for_whole():
            return {**state, "state": _whole_state(owner, state["state"])}
        if type(owner) not in ELEMENTWISE_STATE:
            _warn_of_missing(owner, state["state"])
            return state
        return {**state, "state": _completed(owner, state["state"])}

    def as_parts(owner: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Show state of a tp rank as its part of the model's."""
        for each in regions:
            state = _mapped(owner, state, each.as_part)
        return state

    def as_tensors(owner: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Take this tp rank's part of state that is loaded."""
        for each in regions:
            state = _mapped(owner, state, each.taken)
        return state

    optimizer.register_state_dict_post_hook(after)
    if regions and not whole:
        optimizer.register_state_dict_post_hook(as_parts)
    # First this rank's region of the model's tensor, then its span of that region.
    optimizer.register_load_state_dict_pre_hook(as_tensors)
    optimizer.register_load_state_dict_pre_hook(_cut_whole)


def _warn_of_missing(optimizer: Optimizer, state: dict[Any, Any]) -> None:
    """Tell that DCP will restore nothing where an optimizer has no state yet."""
    trained = [i for i, p in enumerate(_parameters(optimizer)) if p.requires_grad]
    missing = [index for index in trained if index not in state]
    if missing:
        warnings.warn(
            f"{type(optimizer).__name__}.state_dict() has no state of {len(missing)} of its "
            f"{len(trained)} parameters, which were never stepped, and what a first step makes is "
            "only known of torch's own elementwise classes: torch.distributed.checkpoint.load "
            "would restore none of it. Before loading, step once with zero gradients, lr=0 and no "
            "weight decay",
            stacklevel=4,
        )


def _whole_state(optimizer: Optimizer, state: dict[Any, Any]) -> dict[Any, Any]:
    """Whole copies of the state of all parameters, on every rank (collective).

    Note [State that a single rank keeps]
        An optimizer that looks at whole tensors steps each of them on the rank that has it whole,
        and keeps state there alone. Its state need not have the parameter's shape, so it is not cut
        like the parameter either. So the rank that steps a tensor sends its state to the others.
        After a load all ranks have state of such a tensor, and that rank's is the one in use.
    """
    shared, sent = dict(state), {}
    for index, parameter in enumerate(_parameters(optimizer)):
        if type(optimizer) not in ELEMENTWISE_STATE and isinstance(parameter, ShardedTensor):
            holds = [stop - start == parameter.numel() > 0 for start, stop in parameter.extents()]
            if parameter.spec.is_cut and any(holds):
                values = _sent_by(holds.index(True), parameter, shared.pop(index, {}))
                # A parameter that was never stepped has no state, and no entry.
                sent.update({index: values} if values else {})
    return {**{index: _whole_tree(values) for index, values in shared.items()}, **sent}


def _sent_by(source: int, parameter: ShardedTensor, state: dict[str, Any]) -> dict[str, Any]:
    """The state of a parameter that one rank alone steps, from that rank (collective)."""
    communicator = parameter.spec.reach("the state of an optimizer")
    sends = parameter.to_local().numel() == parameter.numel()

    def receive(flat: torch.Tensor | None, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor of the source, on every rank."""
        if flat is None:
            flat = torch.empty(0, dtype=dtype)
        numels = [numel if rank == source else 0 for rank in range(communicator.size)]
        return communicator.all_gather(flat.to(parameter.device).reshape(-1), numels)

    # First what there is: numbers as they are, and of tensors what makes an empty one alike.
    values, facts = {}, {}
    for name, value in state.items() if sends else ():
        if isinstance(value, ShardedTensor):
            value = value.to_local().view(value.shape)
        values[name] = value
        is_tensor = isinstance(value, torch.Tensor)
        facts[name] = (value.shape, value.dtype, value.device.type) if is_tensor else value
    words = torch.tensor(list(pickle.dumps(facts)), dtype=torch.uint8)
    here = torch.tensor([len(words)], device=parameter.device)
    lengths = communicator.all_gather(here, [1] * communicator.size).tolist()
    received = receive(words if sends else None, lengths[source], torch.uint8)
    facts = pickle.loads(bytes(received.tolist()))
    result = {}
    for name, fact in facts.items():
        result[name] = fact
        if type(fact) is tuple:
            shape, dtype, device = fact
            flat = receive(values.get(name), shape.numel(), dtype)
            result[name] = flat.view(shape).to(device)
    return result


def _whole_tree(tree: Any) -> Any:
    """Whole copies. Parameters that step together share a step count here, and nowhere else."""
    return tree_map_only(
        torch.Tensor,
        lambda t: t.full_tensor() if isinstance(t, ShardedTensor) else t.clone(),
        tree,
    )


def _completed(optimizer: Optimizer, state: dict[Any, Any]) -> dict[Any, Any]:
    result = dict(state)
    pairs = ((group, p) for group in optimizer.param_groups for p in group["params"])
    for index, (group, parameter) in enumerate(pairs):
        if index not in result and parameter.requires_grad:
            result[index] = _unstepped(optimizer, group, parameter)
    return result


def _unstepped(
    optimizer: Optimizer, group: dict[str, Any], parameter: torch.Tensor
) -> dict[str, Any]:
    """State that the optimizer would make for a parameter, as a tiny other one makes it."""
    # The class itself makes it, so that what it keeps is written nowhere else.
    tiny = nn.Parameter(torch.zeros(2, 2, dtype=parameter.dtype, device=parameter.device))
    tiny.grad = torch.zeros_like(tiny)
    # With the group's own settings: they decide what is kept (amsgrad, momentum).
    settings = {key: value for key, value in group.items() if key != "params"}
    other = type(optimizer)([{**settings, "params": [tiny]}], **_constructor(optimizer))
    with contextlib.suppress(_Begun), _FirstWrite():  # type: ignore[no-untyped-call]
        other.step()
    if not other.state[tiny]:  # SGD makes its momentum as it ends; of zero gradients it is zeros
        other.step()
    made: dict[str, Any] = {}
    for name, value in other.state[tiny].items():
        # What has the parameter's shape is equal everywhere, as a zero gradient leaves it.
        if isinstance(value, torch.Tensor) and value.shape == tiny.shape:
            made[name] = torch.full_like(parameter, value[0, 0].item(), dtype=value.dtype)
        else:
            made[name] = value
    return made


class _Begun(Exception):  # noqa: N818
    """A step has made its state, and begins to change it."""


class _FirstWrite(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Ends a step before it changes anything: counts and products (NAdam's) are as made."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket.__name__.endswith("_"):
            raise _Begun
        return func(*args, **(kwargs or {}))


def _constructor(optimizer: Optimizer) -> dict[str, Any]:
    """Defaults that the optimizer's constructor takes: an optimizer may keep more of them."""
    known = inspect.signature(type(optimizer).__init__).parameters
    return {name: value for name, value in optimizer.defaults.items() if name in known}


def _mapped(
    optimizer: Optimizer,
    state: dict[str, Any],
    change: Callable[[torch.Tensor, Any], Any],
) -> dict[str, Any]:
    """A state dictionary with `change(parameter, value)` of all state but numbers like step counts.

    These have the shape of a parameter that is one number, and are not cut as it is.
    """
    # By what the dictionary calls parameters: numbers, or names in torch's generic functions.
    keys = (key for group in state["param_groups"] for key in group["params"])
    parameters = dict(zip(keys, _parameters(optimizer), strict=False))
    mapped = {
        key: {n: v if n in COUNTERS else change(parameters[key], v) for n, v in values.items()}
        if key in parameters
        else values
        for key, values in state["state"].items()
    }
    return {**state, "state": mapped}


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _cut_whole(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Whole tensors of a state dictionary as this rank's part of them."""
    return _mapped(optimizer, state, _cut_like)


def _cut_like(parameter: torch.Tensor, value: Any) -> Any:
    plain = isinstance(value, torch.Tensor) and not isinstance(value, ShardedTensor)
    if not plain or not isinstance(parameter, ShardedTensor) or value.shape != parameter.shape:
        return value
    with torch.no_grad():
        return torch.empty_like(parameter, dtype=value.dtype).copy_(value)
