"""Modules whose parameters keep their roles and ties when torch replaces the parameters."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lamina.mesh.engine import copy_role

ModuleT = TypeVar("ModuleT", bound="KeepsRoles")


class KeepsRoles(nn.Module):
    """A module that copies the roles of its parameters to the parameters that replace them.

    See Note [Roles are attributes of tensors].
    """

    # Note [Roles are attributes of tensors]
    # `lamina.mesh.mark` sets a role as an attribute of the parameter. torch makes new parameters,
    # without the attribute, in two cases: when a module leaves the meta device or changes its
    # dtype (`_apply`), and in `load_state_dict(assign=True)`, also of a module around this one. A
    # parameter that lost its role raises no error: the gradient of a norm is not summed over tp,
    # and a cut weight is taken for a whole one. So both are overridden here and copy the roles.

    def __init__(self) -> None:
        super().__init__()
        self._before_load: dict[str, Tensor] = {}
        self.register_load_state_dict_post_hook(_take_over)  # type: ignore[no-untyped-call]

    def init_weights(self) -> None:
        """Call `reset_parameters` of every submodule that owns parameters."""
        for module in self.modules():
            reset = getattr(module, "reset_parameters", None)
            if reset is not None:
                reset()

    def tie_weights(self) -> None:
        """Make tied parameters one parameter again; overridden by models that tie some."""

    def _apply(self: ModuleT, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ModuleT:
        marked = dict(self.named_parameters(remove_duplicate=False))
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # torch has replaced a tied parameter once for each module that holds it.
        self.tie_weights()
        for name, parameter in self.named_parameters():
            copy_role(marked[name], parameter)
        return self

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *rest: Any
    ) -> None:
        # Modules below this one load after it, and the post hook runs after all of them.
        if local_metadata.get("assign_to_params_buffers"):
            for name, parameter in self.named_parameters(remove_duplicate=False):
                # An empty tensor holds the role, so that the replaced weight can be freed.
                copy_role(parameter, self._before_load.setdefault(name, torch.empty(0)))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


def _take_over(module: nn.Module, _: Any) -> None:
    if isinstance(module, KeepsRoles) and module._before_load:
        before, module._before_load = module._before_load, {}
        module.tie_weights()
        for name, parameter in module.named_parameters():
            copy_role(before[name], parameter)
