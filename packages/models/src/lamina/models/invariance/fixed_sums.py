"""How the layers of a model are told to add in the model's order.

A layer that has sums has a method `fix_sums`, which chooses the layer's arithmetic once, and an
attribute `layout_invariant`, by which wrappers see the choice. `fix_sums` below tells all layers of
a model, and refuses those with parameters that have no such method.
"""

from typing import Protocol, runtime_checkable

from torch import nn

from lamina.models.invariance.token_sums import TokenCut


@runtime_checkable
class HasSums(Protocol):
    """A layer that can add in one order for every layout."""

    @property
    def layout_invariant(self) -> bool:
        """Whether it does."""

    def fix_sums(self, tokens: TokenCut) -> None:
        """Do so from now on; `tokens` is how the ranks cut a batch."""


class FixedSums:
    """What such layers have in common, beside `nn.Module`.

    Attributes:
        tokens: how the ranks cut a batch; None leaves the order of sums to torch's kernels.
    """

    tokens: TokenCut | None = None

    @property
    def layout_invariant(self) -> bool:
        """Whether the layer's sums have one order for every layout."""
        return self.tokens is not None

    def fix_sums(self, tokens: TokenCut) -> None:
        """Add in one order from now on."""
        self.tokens = tokens


def fix_sums(model: nn.Module, tokens: TokenCut) -> None:
    """Have all layers of a model add in its order.

    Layers within others are told after them. Raises NotImplementedError for a module with
    parameters of its own that cannot.
    """
    for name, module in model.named_modules():
        if isinstance(module, HasSums):
            module.fix_sums(tokens)
        elif next(module.parameters(recurse=False), None) is not None:
            raise NotImplementedError(
                f"invariant=True: {name or 'the model'} ({type(module).__name__}) has parameters "
                "and no method fix_sums, so its sums would depend on the layout: give it one "
                "(docs/invariance.md), or leave invariant out"
            )
