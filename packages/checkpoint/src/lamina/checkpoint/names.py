"""Names of optimizer state: the parameter's name in its model, not its place in a list.

An optimizer's own state_dict numbers parameters in the order it was given them. Numbers mean
something else once layers move between pipeline stages or parameter groups are cut differently;
names don't. So state is stored under names and put back under the numbers of the optimizer at hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

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


class OptimizerNames:
    """The names and the numbers of one optimizer's parameters.

    Attributes:
        tree: its state_dict, with the numbers.
        parameters: name -> parameter.

    """

    def __init__(self, optimizer: Any, state: Mapping[str, Any]) -> None:
        names = parameter_names(optimizer, state)
        self.tree: Tree = optimizer.state_dict()
        self.parameters: dict[str, torch.Tensor] = {}
        self._names: dict[Any, str] = {}
        for group, numbered in zip(optimizer.param_groups, self.tree["param_groups"], strict=True):
            for parameter, key in zip(group["params"], numbered["params"], strict=True):
                name = names.get(id(parameter), str(key))
                self._names[key] = name
                self.parameters[name] = parameter

    def named(self) -> Tree:
        """Return the state_dict with names in place of numbers."""
        return {
            **self.tree,
            "state": {self._names.get(k, str(k)): v for k, v in self.tree["state"].items()},
            "param_groups": [
                {**group, "params": [self._names[key] for key in group["params"]]}
                for group in self.tree["param_groups"]
            ],
        }

    def groups(self) -> list[set[str]]:
        """Return the names of the parameters of each group."""
        return [{self._names[k] for k in group["params"]} for group in self.tree["param_groups"]]

    def numbered(self, saved: Tree) -> Tree:
        """Return a stored tree with the numbers of the optimizer at hand in place of names.

        Groups keep the hyperparameters that were saved; within a group, order is the optimizer's
        own. Stored state of parameters that this rank does not have is left out.
        """
        groups = [
            {**stored, "params": list(local["params"])}
            for local, stored in zip(self.tree["param_groups"], saved["param_groups"], strict=True)
        ]
        keys = {name: key for key, name in self._names.items()}
        state = {keys[name]: value for name, value in saved["state"].items() if name in keys}
        extra = {n: v for n, v in saved["state"].items() if n in self.tree["state"]}
        return {**saved, "state": {**state, **extra}, "param_groups": groups}
