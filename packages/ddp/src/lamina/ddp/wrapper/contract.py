"""The contract that every data-parallel wrapper meets."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from lamina.ddp.group.group import ParameterGroup

__all__ = ["DataParallel"]


class DataParallel(nn.Module, ABC):
    """A module whose gradients are summed over data-parallel ranks.

    A training step is `forward`, `backward`, optimizer; the methods below are for loops that
    accumulate, that drive synchronisation themselves, or that change weights by hand.
    """

    @abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's forward."""

    @abstractmethod
    def parameter_groups(self) -> Iterator[ParameterGroup]:
        """All groups of parameters, in the same order on every rank."""

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards inside are not the step's last microbatch."""

    @abstractmethod
    def start_grad_sync(self) -> None:
        """Begin to sum whatever was accumulated and not yet summed over ranks."""

    @abstractmethod
    def finish_grad_sync(self) -> None:
        """Wait until gradients are summed and visible; harmless when they are."""

    @abstractmethod
    def scale_gradients(self, factor: float) -> None:
        """Multiply all gradients, those of microbatches inside `no_sync` included."""

    @abstractmethod
    def zero_grad_buffer(self) -> None:
        """Forget all gradients, those of microbatches inside `no_sync` included."""

    @abstractmethod
    def broadcast_params(self) -> None:
        """Take the first data-parallel rank's weights."""

    @abstractmethod
    def start_param_sync(self) -> None:
        """Begin to bring updated main weights into the module's weights."""
