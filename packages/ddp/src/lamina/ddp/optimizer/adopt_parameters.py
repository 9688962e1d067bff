"""Main parameters in an optimizer's groups, where the module's parameters were."""

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch.optim import Optimizer

from lamina.collectives.engine import software
from lamina.ddp.group.group import ParameterGroup
from lamina.ddp.parameters.facts import common_facts_of, optimizer_facts, require_same_over_tp


def locate_main_parameters(
    groups: Iterable[ParameterGroup],
) -> dict[int, tuple[ParameterGroup, int]]:
    """The group and the index in it of each main parameter, by the parameter's `id`."""
    return {
        id(main): (group, index)
        for group in groups
        for index, main in enumerate(group.main_parameters)
    }


def require_same_optimizer(
    what: str, optimizer: Optimizer, groups: Sequence[ParameterGroup]
) -> None:
    """Compare an optimizer over the data-parallel ranks (one small collective).

    `what` it is given to names it in the DisagreementError, if ranks differ in its class, groups or
    hyperparameters.
    """
    if not groups:
        return
    # Experts have axes of their own, and each rank of the dense ones holds other experts.
    axes = next((g.axes for g in groups if not g.refs[0].role.expert), groups[0].axes)
    alike = [group for group in groups if group.axes == axes]  # of experts other ranks hold others
    names = {id(ref.parameter): ref.name for group in alike for ref in group.refs}
    mains = (
        (main, ref) for g in alike for main, ref in zip(g.main_parameters, g.refs, strict=True)
    )
    names |= {id(main): ref.name for main, ref in mains}
    facts = [*software(), ("the wrapper", what)]
    device = groups[0].device
    common_facts_of(what, axes, device).require([*facts, *optimizer_facts(optimizer, names)])
    # Ranks of tp hold other parameters, so there the hyperparameters alone are compared.
    require_same_over_tp(what, axes, device, [*facts, *optimizer_facts(optimizer, {})])


def adopt_main_parameters(optimizer: Optimizer, groups: Sequence[ParameterGroup]) -> None:
    """Replace the user's parameters in an optimizer by the main parameters that stand for them.

    The optimizer object, its groups and their hyperparameters stay, so schedulers made before
    stay attached. State it already has is cut like the parameters.

    Errors are those of `refuse_optimizer`.
    """
    located = locate_main_parameters(groups)
    mains = {
        id(group.refs[index].parameter): group.main_parameters[index]
        for group, index in located.values()
    }
    apart = {
        id(ref.parameter): ref.name
        for group, index in located.values()
        if group.main_parameters[index] is not (ref := group.refs[index]).parameter
    }
    # All refusals come first: an optimizer that is refused stays as it was.
    invariant = any(group.settings.exact_norm for group in groups)
    refuse_optimizer(optimizer, mains.keys() | located.keys(), apart, invariant=invariant)
    # In place, in the user's own dictionaries: schedulers hold these, too.
    for settings in optimizer.param_groups:
        settings["params"] = [mains.get(id(p), p) for p in settings["params"]]
    # Whoever is stepped by a known optimizer need not be watched for writes of an unknown one.
    stepped = [id(p) for settings in optimizer.param_groups for p in settings["params"]]
    for group in groups:
        group.shown.expect_optimizer(stepped)
    # State was made for whole tensors, before the model was sharded.
    for parameter in [p for p in optimizer.state if id(p) in apart]:
        main = mains[id(parameter)]
        state = optimizer.state.pop(parameter)
        optimizer.state[main] = {
            name: cut_state(value, *located[id(main)]) for name, value in state.items()
        }


def refuse_optimizer(
    optimizer: Optimizer, known: Collection[int], apart: Mapping[int, str], *, invariant: bool
) -> None:
    """Refuse an optimizer that cannot adopt main parameters.

    `known` are `id`s of the parameters of the module, and of main ones that stand for them, and
    `apart` names, by `id`, of those that have (or will have) a main parameter beside them.
    ValueError: it holds none of them, is an LBFGS (which keeps a list of them to itself) and some
    are apart, has state on the meta device, takes no hooks, or is fused on a CPU while the wrapper
    is `invariant`.
    """
    name = type(optimizer).__name__
    try:
        optimizer.register_state_dict_pre_hook(lambda _: None).remove()
    except AttributeError as error:
        # Most of these wrap another optimizer, and inherit torch's class for its name alone.
        raise ValueError(
            f"{name} takes no hooks, as its __init__ never called that of torch.optim.Optimizer: "
            "give Lamina the optimizer that it wraps, and wrap that one afterwards"
        ) from error
    ids = [id(p) for settings in optimizer.param_groups for p in settings["params"]]
    if ids and not any(key in known for key in ids):
        raise ValueError(
            f"{name} holds {len(ids)} parameters and none of them is in the "
            "module: build it with optimizer = ...(model.parameters()) before (or after) sharding "
            "that same model"
        )
    # A meta tensor in the state could be filled only by whoever knows what a first step makes.
    states = (state for state in optimizer.state.values() if isinstance(state, Mapping))
    kept = (value for state in states for value in state.values())
    if any(isinstance(value, torch.Tensor) and value.is_meta for value in kept):
        raise ValueError(
            f"{name} makes its state with the parameters, and they were on the "
            "meta device then, where nothing has values: make the optimizer after sharding "
            "(fully_shard_model, then fully_shard_optimizer)"
        )
    fused = (p for each in optimizer.param_groups if each.get("fused") for p in each["params"])
    if invariant and any(p.device.type == "cpu" for p in fused):
        raise ValueError(
            f"{name}(fused=True) with invariant=True on a CPU: it rounds an "
            "element by its place in memory, which the layout decides. Make the optimizer with "
            "fused=False, which steps in blocks there"
        )
    missed = [apart[key] for key in ids if key in apart]
    if isinstance(optimizer, torch.optim.LBFGS) and missed:
        raise ValueError(
            f"LBFGS keeps its own list of parameters, and {missed[0]} gets a main "
            "parameter beside it (its weights are cut over ranks, or kept in fewer bits), so it "
            "would train nothing: use strategy 0 with fp32 weights, or another optimizer"
        )


def cut_state(value: object, group: ParameterGroup, index: int) -> object:
    """A state tensor of the parameter's size as this rank's part of it; others as they are."""
    spec = group.layout.specs[index]
    if not isinstance(value, torch.Tensor) or value.dim() == 0 or value.numel() != spec.numel:
        return value
    # Flat like the main weights, so that the first step over a run need not copy it.
    flat = torch.zeros_like(group.main_weights.data, dtype=value.dtype)
    start, stop = group.spans[index]
    first, last = group.layout.within(index, *group.main_weights.range)
    flat[start:stop].copy_(value.reshape(-1)[first:last])
    return group.view_like_main(flat, index)
