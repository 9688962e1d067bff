"""`invariant=True`: what a wrapper asks of the modules and dtypes that it is given.

A wrapper fixes the order in which gradients are added over microbatches and ranks. Sums within a
module (products, norms, attention) are the module's own. So a module that can fix their order says
whether it does, by an attribute `layout_invariant`, and both have to agree.
"""

from collections.abc import Iterator

import torch
from torch import nn

from lamina.ddp.parameters.dtypes import GroupDtypes


def check_invariance(wrapper: str, module: nn.Module, invariant: bool) -> None:
    """Raise ValueError if a module and its wrapper differ about `invariant=True`.

    Modules without the attribute are not asked: they give what their own operators give.

    `wrapper` is what the user has called, for the message.
    """
    for name, child, fixed in _that_say(module):
        if fixed == invariant:
            continue
        where = f"{name or 'the module'} ({type(child).__name__})"
        if invariant:
            raise ValueError(
                f"{wrapper}(invariant=True): the order of the sums in {where} depends on the "
                "layout: build the model with TransformerConfig(invariant=True), or leave "
                "invariant out and take reproducible=True, which is about numbers of ranks alone"
            )
        raise ValueError(
            f"{wrapper}(invariant=False): {where} adds in an order that no layout changes, and "
            "this wrapper would add its gradients in one that depends on ranks and microbatches: "
            "use fully_shard(invariant=True) or DistributedDataParallelConfig(invariant=True), or "
            "build the model with invariant=False"
        )


def _that_say(module: nn.Module) -> Iterator[tuple[str, nn.Module, bool]]:
    """Names, modules and answers of those that have the attribute."""
    for name, child in module.named_modules():
        fixed = getattr(child, "layout_invariant", None)
        if fixed is not None:
            yield name, child, bool(fixed)


def check_invariant_wire(wrapper: str, remedy: str, name: str, dtypes: GroupDtypes) -> None:
    """Raise ValueError if gradients are rounded before they are added.

    A microbatch's gradient would be rounded by itself, and microbatches are of the layout.

    Args:
        wrapper: what the user called.
        remedy: the setting of it by which gradients travel in float32.
        name: a parameter's.
        dtypes: of its group.
    """
    if dtypes.wire.is_floating_point and torch.finfo(dtypes.wire).bits < 32:
        raise ValueError(
            f"{wrapper}(invariant=True): gradients of {name} travel in {dtypes.wire}, and would "
            f"be rounded once for each microbatch: take torch.float32 there ({remedy})"
        )
