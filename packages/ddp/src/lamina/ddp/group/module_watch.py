"""Whether a wrapped model's modules still hold the parameters that they were wrapped with.

Note [Parameters that are new since wrapping]: PyTorch lets a user put another parameter, or another
submodule, into a model at any time. No buffer has a place for it, so no rank would sum its gradient
and each rank would train its own. A parameter that was replaced would come back at the next
gather. So the outermost module looks before each forward of training, and says which one it is.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection, Iterable

from torch import nn
from torch.optim import Optimizer

from lamina.ddp.group.group import ParameterGroup

__all__ = ["ModuleWatch"]


class ModuleWatch:
    """Looks at a model, of these groups, before its forwards of training.

    `wrapper` is what the user called, for messages, and `left_alone` are `id`s of parameters that
    are in no group, and were to be left out.
    """

    def __init__(
        self, groups: Iterable[ParameterGroup], wrapper: str, left_alone: Collection[int] = ()
    ) -> None:
        self._wrapper = wrapper
        self._left_alone = frozenset(left_alone)
        self._expected: dict[tuple[int, str], tuple[str, int, int]] = {}
        self._mains: dict[int, str] = {}
        self._originals: dict[int, str] = {}
        self._modules: list[weakref.ref[nn.Module]] = []  # whose `id`s are in use while they live
        self._forwards = 0
        for group in groups:
            for ref, main in zip(group.refs, group.main_parameters, strict=True):
                for owner, attribute in ref.owners:
                    if (module := owner()) is not None:
                        self._modules.append(owner)
                        ids = (ref.name, id(ref.parameter), id(main))
                        self._expected[id(module), attribute] = ids
                if group.requires_grad:
                    self._mains[id(main)] = ref.name
                    if main is not ref.parameter:
                        self._originals[id(ref.parameter)] = ref.name

    def look(self, root: nn.Module, *, optimizer_known: bool) -> None:
        """Raise if the model below `root` holds parameters that it was not wrapped with.

        Unless an optimizer was given to the wrapper (`optimizer_known`), the second forward looks
        for one that holds what the model held before. RuntimeError: a parameter is new, gone or
        another one, or an optimizer holds parameters of before the wrapping and none today's.
        """
        expected, left_alone = self._expected, self._left_alone
        # Plain loops over dictionaries: this runs before every forward.
        modules, seen = [root], {id(root)}
        for module in modules:
            place = id(module)
            for name, parameter in module._parameters.items():
                known = expected.get((place, name))
                if known is None:
                    if (
                        parameter is not None
                        and parameter.requires_grad
                        and id(parameter) not in left_alone
                    ):
                        raise RuntimeError(self._new(root, parameter))
                elif id(parameter) not in known:
                    raise RuntimeError(self._replaced(known[0], parameter))
            for child in module._modules.values():
                if child is not None and id(child) not in seen:
                    seen.add(id(child))
                    modules.append(child)
        self._forwards += 1
        if self._forwards == 2 and not optimizer_known:
            self._look_for_optimizers()

    def _new(self, root: nn.Module, parameter: nn.Parameter) -> str:
        name = next((n for n, p in root.named_parameters() if p is parameter), "a parameter")
        return (
            f"{name} was not there when {self._wrapper} was called, so no rank would sum its "
            f"gradient and ranks would diverge. Add parameters before {self._wrapper}, or freeze "
            "this one with requires_grad_(False)"
        )

    def _replaced(self, name: str, parameter: nn.Parameter | None) -> str:
        what = "was removed" if parameter is None else "is another parameter"
        return (
            f"{name} {what} since {self._wrapper} was called, and the buffers hold the one before. "
            "Write values into that one (`with torch.no_grad(): parameter.copy_(value)`), or "
            f"replace, tie and remove parameters before {self._wrapper}"
        )

    def _mixed(self, optimizer: Optimizer, original: int) -> str:
        return (
            f"{type(optimizer).__name__} holds {self._originals[original]} as a forward computes "
            f"with it, which nothing steps, beside parameters to train. It was made before "
            f"{self._wrapper} and not given to it, or after a forward without a backward: give it "
            "to fully_shard_optimizer(optimizer, model), or make it before the first forward"
        )

    def _look_for_optimizers(self) -> None:
        if not self._originals:
            return
        stale: Optimizer | None = None
        for found in gc.get_objects():
            if not issubclass(type(found), Optimizer):  # isinstance would ask proxies
                continue
            held = [id(p) for group in found.param_groups for p in group["params"]]
            computing = [place for place in held if place in self._originals]
            if not self._mains.keys().isdisjoint(held):
                if computing:  # the first one that the optimizer holds: the same on every rank
                    raise RuntimeError(self._mixed(found, computing[0]))
                return
            if computing:
                stale = found
        if stale is not None:
            raise RuntimeError(
                f"{type(stale).__name__} is an optimizer over the parameters that the model had "
                f"before {self._wrapper}, and none is over today's: nothing would train. Give it "
                "to fully_shard(model, optimizer) or fully_shard_optimizer(optimizer, model), or "
                f"make it over model.parameters() after {self._wrapper}"
            )
