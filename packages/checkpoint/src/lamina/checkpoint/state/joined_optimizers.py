"""Several optimizers as one entry of a state."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch


class JoinedOptimizers:
    """Shows several optimizers as one, so that a state need not say who has which parameters.

    With an optimizer per pipeline stage, `{"optimizer": JoinedOptimizers(optimizers)}` is stored
    as one optimizer over all parameters is, and loads into any other cut of the pipeline, or into
    one optimizer. Every optimizer must have the same groups, in the same order: of those of one
    place the first optimizer's hyperparameters are stored, and all get them back.

    Args:
        optimizers: of one kind; none of them holds a parameter of another.

    Raises:
        ValueError: there is none, they differ in kind or in their number of groups, or two hold one
            parameter.

    Examples:
        >>> first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
        >>> optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (first, second)]
        >>> state = {"optimizer": JoinedOptimizers(optimizers)}
    """

    def __init__(self, optimizers: Sequence[Any]) -> None:
        kinds = {(type(each).__name__, len(each.param_groups)) for each in optimizers}
        if len(kinds) != 1:
            raise ValueError(
                f"optimizers {sorted(kinds)} (kind, number of groups): to be joined there must be "
                "at least one, and all alike"
            )
        self.optimizers = tuple(optimizers)
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        ids = [id(parameter) for group in groups for parameter in group["params"]]
        if len(ids) != len(set(ids)):
            raise ValueError("two of the optimizers hold the same parameter: each needs its own")

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The first optimizer's groups, each with the parameters of all optimizers."""
        return self._joined([optimizer.param_groups for optimizer in self.optimizers])

    @property
    def state(self) -> dict[torch.Tensor, Any]:
        """The state of all parameters."""
        return {p: entry for optimizer in self.optimizers for p, entry in optimizer.state.items()}

    def state_dict(self) -> dict[str, Any]:
        """State of all optimizers; keys of parameters say whose they are: (optimizer, its key)."""
        trees = [optimizer.state_dict() for optimizer in self.optimizers]
        groups = [
            [
                {**group, "params": [(number, key) for key in group["params"]]}
                for group in tree["param_groups"]
            ]
            for number, tree in enumerate(trees)
        ]
        state = {
            (number, key): entry
            for number, tree in enumerate(trees)
            for key, entry in tree["state"].items()
        }
        return {**trees[0], "state": state, "param_groups": self._joined(groups)}

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        """Give each optimizer its own, and all the hyperparameters."""
        for number, optimizer in enumerate(self.optimizers):
            groups = [
                {**group, "params": [key for at, key in group["params"] if at == number]}
                for group in tree["param_groups"]
            ]
            state = {key: entry for (at, key), entry in tree["state"].items() if at == number}
            optimizer.load_state_dict({**tree, "state": state, "param_groups": groups})

    def _joined(self, groups: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
        return [
            {**alike[0], "params": [p for group in alike for p in group["params"]]}
            for alike in zip(*groups, strict=True)
        ]
