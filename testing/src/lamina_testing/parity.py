"""What tests of law 1 have in common: models, optimizers, data, the user's loop, the comparison.

The loop is written for wrappers (`no_sync`, whole values through two functions that are handed
in), so that this package needs no part of Lamina.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lamina_testing.oracles import OracleStep, bit_oracle, whole_batch_oracle
from lamina_testing.toys import ConvNet, OddNet, TiedNet, TinyTransformer, inputs

MODELS: dict[str, type[nn.Module]] = {
    "odd": OddNet,
    "tied": TiedNet,
    "conv": ConvNet,
    "transformer": TinyTransformer,
}
OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False),
    "sgd": lambda model: torch.optim.SGD(
        model.parameters(),
        lr=0.01 if isinstance(model, TiedNet) else 0.1,  # it diverges, which amplifies rounding
        momentum=0.9,
        weight_decay=0.01,
        foreach=False,
    ),
}
Step = tuple[dict[str, Tensor], dict[str, Tensor]]
"""Whole gradients before a step, whole parameters after it."""
Data = Callable[[int], Sequence[Sequence[Tensor]]]


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    """A mean over the batch, in fp32 (fp64 for an fp64 model)."""
    if batch.is_floating_point():  # the oracle's bf16 model casts no inputs by itself
        batch = batch.to(next(model.parameters()).dtype)
    out: Tensor = model(batch)
    return out.to(torch.promote_types(out.dtype, torch.float32)).square().mean()


def build(name: str = "odd", dtype: torch.dtype = torch.float32) -> nn.Module:
    """One of `MODELS`, the same values each time."""
    torch.manual_seed(7)
    return MODELS[name]().to(dtype)


def batches(model: nn.Module, world: int, microbatches: int) -> Data:
    """Local batches of every step, `[rank][microbatch]`."""
    return lambda step: [
        [inputs(model, 1000 * step + 10 * rank + m) for m in range(microbatches)]
        for rank in range(world)
    ]


def _one_process(
    name: str, optimizer: str, world: int, microbatches: int, dtype: torch.dtype
) -> tuple[Callable[[], nn.Module], Data, Any, Callable[[nn.Module], Optimizer]]:
    main_dtype = torch.promote_types(dtype, torch.float32)
    data = batches(build(name, dtype), world, microbatches)
    return lambda: build(name, dtype).to(main_dtype), data, loss_fn, OPTIMIZERS[optimizer]


@functools.lru_cache(maxsize=64)
def bits_of_one_process(
    name: str,
    optimizer: str,
    world: int,
    microbatches: int,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> list[OracleStep]:
    """Train a model of `MODELS` on `batches` by `bit_oracle`, which takes the settings.

    The result depends on the arguments alone, and most cases of a product differ in something
    that is none of them. So it is kept: ranks run all tests of a module, and train it once. Do
    not change it.
    """
    return bit_oracle(*_one_process(name, optimizer, world, microbatches, dtype), **settings)


@functools.lru_cache(maxsize=64)
def whole_batch_of_one_process(
    name: str,
    optimizer: str,
    world: int,
    microbatches: int,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> list[OracleStep]:
    """Train on the whole batch by `whole_batch_oracle`; kept like `bits_of_one_process`."""
    one_process = _one_process(name, optimizer, world, microbatches, dtype)
    return whole_batch_oracle(*one_process, **settings)


def train(
    model: Any,
    optimizer: Optimizer,
    mine: Callable[[int], Sequence[Tensor]],
    steps: int,
    gradients_of: Callable[[Any], dict[str, Tensor]],
    parameters_of: Callable[[Any], dict[str, Tensor]],
    clip: Callable[[Any], Tensor] | None = None,
) -> list[Step]:
    """The user's loop: all microbatches of a step but the last inside `no_sync`.

    Args:
        model: wrapped.
        optimizer: its optimizer.
        mine: this rank's microbatches of a step.
        steps: how many.
        gradients_of: whole gradients of the wrapped model by name.
        parameters_of: its whole parameters by name.
        clip: clips the wrapped model's gradients; those that are found are not clipped yet.
    """
    found = []
    for step in range(steps):
        local = mine(step)
        for batch in local[:-1]:
            with model.no_sync():
                _backward(loss_fn(model, batch) / len(local))
        _backward(loss_fn(model, local[-1]) / len(local))
        gradients = gradients_of(model)
        if clip is not None:
            clip(model)
        optimizer.step()
        optimizer.zero_grad()
        found.append((gradients, parameters_of(model)))
    return found


def _backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def assert_bits(found: Sequence[Step], oracle: Sequence[OracleStep]) -> None:
    """Every step's gradients and parameters are the bit oracle's, and no others are there."""
    for (gradients, parameters), wanted in zip(found, oracle, strict=True):
        present = {name: g for name, g in wanted.gradients.items() if g is not None}
        assert_same(gradients, present, "gradient of ")
        assert_same(parameters, wanted.parameters)


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor], what: str = "") -> None:
    """The same names and the same bits."""
    if found.keys() != wanted.keys():
        raise AssertionError(f"{what}names differ: {sorted(found.keys() ^ wanted.keys())}")
    for name, value in wanted.items():
        if not torch.equal(found[name], value):
            raise AssertionError(f"{what}{name} differs")
