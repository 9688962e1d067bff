"""Names of optimizer state: the parameter's name in its model, not its place in a list.

An optimizer's own state_dict numbers parameters in the order it was given them. Numbers mean
something else once layers move between pipeline stages or parameter groups are cut differently;
names don't. So state is stored under names and put back under the numbers of the optimizer at hand.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

OPTIMIZER_CLASS = "class"
"""The key of an optimizer's stored tree that names its class."""

Tree = dict[str, Any]


def is_optimizer(value: Any) -> bool:
    """Whether a state entry is an optimizer (torch's, or one with its groups and state)."""
    return isinstance(value, torch.optim.Optimizer) or (
        hasattr(value, "param_groups") and hasattr(value, "state") and hasattr(value, "state_dict")
    )


def class_of(optimizer: Any) -> str:
    """Name the class of an optimizer, beneath wrappers such as `ShardedOptimizer`."""
    while True:
        inner = getattr(optimizer, "optimizers", None) or [getattr(optimizer, "optimizer", None)]
        if not is_optimizer(inner[0]):
            return type(optimizer).__name__
        optimizer = inner[0]


def unwrapped(value: Any) -> Any:
    """Return what torch's own wrappers (DDP, compile) hold: their prefixes are no names."""
    while isinstance(value, torch.nn.Module):
        if isinstance(value, torch.nn.parallel.DistributedDataParallel):
            value = value.module
        elif "_orig_mod" in value._modules:
            value = value._modules["_orig_mod"]
        else:
            break
    return value


def parameters_of(module: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Return a module's parameters with the names that its state_dict has.

    A wrapper whose state_dict is that of the module in it still names parameters `module.x`. A tied
    parameter has several names; two stages on one rank may hold two parameters of one name.
    """
    named = list(module.named_parameters(remove_duplicate=False))
    inner = getattr(module, "module", None)
    if not isinstance(inner, torch.nn.Module) or not named:
        return named
    if not all(name.startswith("module.") for name, _ in named):
        return named
    if not module.state_dict().keys().isdisjoint(name for name, _ in named):
        return named
    return parameters_of(inner)


def parameter_names(
    optimizer: Any, state: Mapping[str, Any], rename: Callable[[str], str] = str
) -> dict[int, str]:
    """Name the parameters of `optimizer`, by id, after the modules in `state`.

    These are names in the module, as `rename` changes them, with the entry's name in front where
    the parameters come from several modules. Empty where a parameter is in none.
    """
    owners: dict[int, tuple[str, str]] = {}
    for entry, value in state.items():
        if isinstance(value, torch.nn.Module):
            for name, parameter in parameters_of(value):
                owners.setdefault(id(parameter), (entry, rename(name)))
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not all(id(p) in owners for p in parameters):
        return {}
    several = len({owners[id(p)][0] for p in parameters}) > 1
    return {id(p): ".".join(owners[id(p)]) if several else owners[id(p)][1] for p in parameters}


class OptimizerNames:
    """The names and the numbers of one optimizer's parameters.

    The modules in `state` have the names, which `rename` turns into those of the whole model.
    `tree` is the state_dict, with the numbers; `parameters` are by name.
    """

    def __init__(
        self, optimizer: Any, state: Mapping[str, Any], rename: Callable[[str], str] = str
    ) -> None:
        names = parameter_names(optimizer, state, rename)
        self.tree: Tree = optimizer.state_dict()
        self._class = class_of(optimizer)
        self.parameters: dict[str, torch.Tensor] = {}
        self._names: dict[Any, str] = {}
        for group, numbered in zip(optimizer.param_groups, self.tree["param_groups"], strict=True):
            for parameter, key in zip(group["params"], numbered["params"], strict=True):
                # An optimizer that knows names itself has those of the module at hand.
                last = key[-1] if isinstance(key, tuple) else key  # of JoinedOptimizers
                own = rename(last) if isinstance(last, str) else str(key)
                name = names.get(id(parameter), own)
                self._names[key] = name
                self.parameters[name] = parameter

    def named(self) -> Tree:
        """Return the state_dict with names in place of numbers."""
        return {
            **self.tree,
            OPTIMIZER_CLASS: self._class,
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
        keys: dict[str, list[Any]] = {}  # two stages of one rank may hold a tied one each
        for key, name in self._names.items():
            keys.setdefault(name, []).append(key)
        state = {
            key: values if key == keys[name][0] else _copied(values)
            for name, values in saved["state"].items()
            for key in keys.get(name, ())
        }
        others = self.tree["state"].keys() - self._names.keys()  # keys that are no parameters
        extra = {n: v for n, v in saved["state"].items() if n in others}
        own = {name: value for name, value in saved.items() if name != OPTIMIZER_CLASS}
        return {**own, "state": {**state, **extra}, "param_groups": groups}


def _copied(values: Any) -> Any:
    """Copy the tensors of a state, at any depth."""
    if isinstance(values, torch.Tensor):
        return values.clone()
    if isinstance(values, Mapping):
        return {key: _copied(value) for key, value in values.items()}
    if isinstance(values, (list, tuple)):
        return type(values)(map(_copied, values))
    return values
