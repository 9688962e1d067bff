"""Initial weights that depend on a seed and a parameter's name, on nothing else.

A parameter that draws from the process's generator gets other numbers whenever the order of
construction changes: a pipeline stage, a unit materialised late, a weight cut over ranks. Here each
parameter has its own generator, seeded from the model's seed and the parameter's full name.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn


def draw_seed() -> int:
    """Draw a model's seed from torch's CPU generator (so ``torch.manual_seed`` decides it)."""
    return int(torch.randint(0, 2**62, (), device="cpu"))


def derive_seed(seed: int, name: str) -> int:
    """Mix a model's seed with a name into a seed of 63 bits, the same in every process."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def assign_seeds(model: nn.Module, seed: int, prefix: str = "") -> None:
    """Give every submodule that initialises itself the seed that belongs to its full name."""
    for name, module in model.named_modules():
        if hasattr(module, "init_seed"):
            module.init_seed = derive_seed(seed, prefix + name)


def full_normal(
    shape: torch.Size | tuple[int, ...], std: float, seed: int | None, device: torch.device
) -> Tensor:
    """Draw a float32 tensor from N(0, std^2), the same numbers for the same seed and device type.

    ``seed=None`` draws from the device's default generator.
    """
    generator = None
    if seed is not None:
        generator = torch.Generator(device=device)
        generator.manual_seed(seed)
    # In float32 whatever the parameter's dtype, so that a bf16 model starts from the rounded
    # weights of the fp32 one.
    return torch.empty(shape, dtype=torch.float32, device=device).normal_(
        0.0, std, generator=generator
    )


@torch.no_grad()
def fill_normal(parameter: Tensor, std: float, seed: int | None) -> None:
    """Fill a whole parameter from N(0, std^2); does nothing on the meta device."""
    if parameter.is_meta:
        return
    parameter.copy_(full_normal(parameter.shape, std, seed, parameter.device))
