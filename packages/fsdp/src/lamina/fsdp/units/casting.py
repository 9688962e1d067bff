"""What a precision policy says beside the dtypes of groups: buffers, and modules that are kept."""

import fnmatch
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from lamina.ddp.engine import Lent, Loan, ParameterRef, bring_back, lend, map_tensors
from lamina.fsdp.settings.precision import MixedPrecisionPolicy
from lamina.fsdp.settings.sharding_settings import ShardingSettings


def check_patterns(module: nn.Module, settings: ShardingSettings) -> None:
    """Raise ValueError for a pattern that nothing matches, or a parameter without a strategy."""
    policy = settings.precision
    parameters = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    buffers = [name for name, _ in module.named_buffers(remove_duplicate=False)]
    kept: Iterable[str] = policy.keep_full_precision
    wanted = [("MixedPrecisionPolicy(keep_full_precision=[{!r}])", kept, parameters + buffers)]
    if policy.weight_codec is not None:
        wanted += [("MixedPrecisionPolicy(encoded=[{!r}])", policy.encoded, parameters)]
    if isinstance(settings.zero_dp_strategy, Mapping):
        wanted += [("zero_dp_strategy={{{!r}: ...}}", settings.strategies, parameters)]
    each = ((setting, names, pattern) for setting, globs, names in wanted for pattern in globs)
    for setting, names, pattern in each:
        if not fnmatch.filter(names, pattern):
            # A few of the names show how they are written.
            some = ", ".join(names[:3]) or "none"
            raise ValueError(
                f"{setting.format(pattern)} matches nothing in "
                f"{type(module).__name__}, whose names are such as {some}: correct the pattern, or "
                "leave it out"
            )


def cast_buffers(modules: Iterable[tuple[str, nn.Module]], policy: MixedPrecisionPolicy) -> None:
    """Give floating buffers the policy's `buffer_dtype`; one of several modules stays one.

    Those of `keep_full_precision`, which names them with their modules, stay as they are, and so do
    those that a module names in an attribute `full_precision_buffers`.
    """
    if policy.buffer_dtype is None:
        return
    made: dict[int, torch.Tensor] = {}
    for prefix, module in modules:
        full = getattr(module, "full_precision_buffers", ())
        for name, buffer in module._buffers.items():
            path = f"{prefix}.{name}" if prefix else name
            if buffer is None or not buffer.is_floating_point():
                continue
            if name in full or policy.keeps(path):
                continue
            # Assigned past `register_buffer`, which would ask again whether it is persistent.
            module._buffers[name] = made.setdefault(id(buffer), buffer.to(policy.buffer_dtype))


def keep_modules(
    modules: Iterable[nn.Module], refs: Iterable[ParameterRef], policy: MixedPrecisionPolicy
) -> None:
    """Let modules that are wholly kept in full precision take and give the compute dtype.

    Their inputs of `param_dtype` are cast to the dtype of their weights, and then their outputs
    back. Left alone are modules that also hold (or contain) weights of `param_dtype`, and those
    with an attribute `casts_itself = True`, which compute in full precision by themselves. Where a
    module is kept with its children, the outermost casts: what it computes between its children
    may read their weights. `refs` are the parameters before they are sharded.
    """
    narrow = policy.param_dtype
    if narrow is None or not policy.keep_full_precision:
        return
    kept = {id(ref.parameter) for ref in refs if policy.keeps(ref.name)}
    for module in modules:
        if getattr(module, "casts_itself", False):
            continue
        weights = list(module.parameters())
        # One kept and one narrow weight in a module: it has to say itself what it computes in.
        if weights and all(id(parameter) in kept for parameter in weights):
            wide = weights[0].dtype
            if wide.is_floating_point and wide != narrow:
                hooks = _Cast(narrow, wide)
                module.register_forward_pre_hook(hooks.before, with_kwargs=True)
                module.register_forward_hook(hooks.after, always_call=True)  # also if it raises


class _Cast:
    """Hooks that cast inputs from one dtype to another, and outputs back."""

    def __init__(self, narrow: torch.dtype, wide: torch.dtype) -> None:
        self._narrow = narrow
        self._wide = wide
        self._lent: list[Lent] = []
        self._loan = Loan()

    def before(self, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Widen the inputs, in the caller's own containers too, until `after`."""
        self._lent, self._loan = [], Loan()
        args, values = map_tensors((args, tuple(kwargs.values())), self._widen, self._loan)
        return args, dict(zip(kwargs, values, strict=True))

    def after(self, _: nn.Module, __: Any, output: Any) -> Any:
        """Put the caller's tensors back, and narrow the outputs if an input was widened."""
        lent, self._lent = self._lent, []  # tensors are held no longer than the call
        bring_back(lent)
        self._loan.end()
        # Outputs are cast back only where inputs were.
        return map_tensors(output, self._narrowed) if lent else output

    def _widen(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype != self._narrow:
            return tensor
        wide = tensor.to(self._wide)
        self._lent.append(lend(tensor, wide))
        return wide

    def _narrowed(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._narrow) if tensor.dtype == self._wide else tensor
