"""Names of optimizer state: the parameter's name in its model, not its place in a list.

An optimizer's own state_dict numbers parameters in the order it was given them. Numbers mean
something else once layers move between pipeline stages or parameter groups are cut differently;
names don't. So state is stored under names and put back under the numbers of the optimizer at hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lamina.checkpoint.errors import CheckpointMismatchError, shortened

Tree = dict[str, Any]


def is_optimizer(value: Any) -> bool:
    """Whether a state entry is an optimizer (torch's, or one with its groups and state)."""
    return isinstance(value, torch.optim.Optimizer) or (
        hasattr(value, "param_groups") and hasattr(value, "state") and hasattr(value, "state_dict")
    )


def parameter_names(optimizer: Any, state: Mapping[str, Any]) -> dict[int, str]:
    """Name the parameters of `optimizer` after the modules in `state`.

    Returns:
        id(parameter) -> its name in its module; with the entry's name in front where the
        optimizer's parameters come from several modules. Empty where a parameter is in none.

    """
    owners: dict[int, tuple[str, str]] = {}
    for entry, value in state.items():
        if isinstance(value, torch.nn.Module):
            for name, parameter in value.named_parameters():
                owners.setdefault(id(parameter), (entry, name))
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not all(id(p) in owners for p in parameters):
        return {}
    several = len({owners[id(p)][0] for p in parameters}) > 1
    return {id(p): ".".join(owners[id(p)]) if several else owners[id(p)][1] for p in parameters}


def _names_by_key(optimizer: Any, tree: Tree, names: Mapping[int, str]) -> dict[Any, str]:
    """Map the keys that `optimizer.state_dict()` uses to stored names."""
    by_key = {}
    for group, saved_group in zip(optimizer.param_groups, tree["param_groups"], strict=True):
        for parameter, key in zip(group["params"], saved_group["params"], strict=True):
            by_key[key] = names.get(id(parameter), str(key))
    return by_key


def with_names(optimizer: Any, tree: Tree, names: Mapping[int, str]) -> Tree:
    """Return an optimizer's state_dict with its parameters' keys replaced by names."""
    by_key = _names_by_key(optimizer, tree, names)
    return {
        **tree,
        "state": {by_key.get(key, str(key)): value for key, value in tree["state"].items()},
        "param_groups": [
            {**group, "params": [by_key[key] for key in group["params"]]}
            for group in tree["param_groups"]
        ],
    }


def parameters_by_name(optimizer: Any, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Map the stored names of an optimizer's parameters to the parameters."""
    names = parameter_names(optimizer, state)
    tree = optimizer.state_dict()
    return {
        names.get(id(parameter), str(key)): parameter
        for group, saved_group in zip(optimizer.param_groups, tree["param_groups"], strict=True)
        for parameter, key in zip(group["params"], saved_group["params"], strict=True)
    }


def with_keys(entry: str, optimizer: Any, saved: Tree, names: Mapping[int, str]) -> Tree:
    """Return a stored tree with names replaced by the keys of the optimizer at hand.

    Groups keep the hyperparameters that were saved; within a group, order is the optimizer's own.

    Raises:
        CheckpointMismatchError: the groups don't hold the same parameters.

    """
    tree = optimizer.state_dict()
    by_key = _names_by_key(optimizer, tree, names)
    local_groups = tree["param_groups"]
    if len(local_groups) != len(saved["param_groups"]):
        raise CheckpointMismatchError(
            f"'{entry}' has {len(local_groups)} parameter groups, the checkpoint has "
            f"{len(saved['param_groups'])}"
        )
    groups = []
    for number, (local, stored) in enumerate(zip(local_groups, saved["param_groups"], strict=True)):
        here, there = {by_key[key] for key in local["params"]}, set(stored["params"])
        if here != there:
            raise CheckpointMismatchError(
                f"parameter group {number} of '{entry}' differs: only here: "
                f"{shortened(sorted(here - there)) or 'none'}; only in the checkpoint: "
                f"{shortened(sorted(there - here)) or 'none'}"
            )
        groups.append({**stored, "params": list(local["params"])})
    keys = {name: key for key, name in by_key.items()}
    state = {keys.get(name, name): value for name, value in saved["state"].items()}
    return {**saved, "state": state, "param_groups": groups}
