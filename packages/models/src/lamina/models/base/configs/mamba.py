"""Sizes of Mamba-2 layers, and the letters of the layers of a hybrid stack."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lamina.models.base.configs.field_checks import (
    require_at_least,
    require_choices,
    require_divides,
    require_in_order,
)

MambaPath = Literal["auto", "torch", "fla"]

LETTERS = {
    "M": "a Mamba-2 layer",
    "*": "an attention layer",
    "-": "an MLP layer",
    "E": "a layer of experts",
    "T": "attention, then an MLP: a Transformer block",
}


@dataclass(frozen=True, kw_only=True)
class MambaConfig:
    """Sizes of a Mamba-2 layer (Dao and Gu, 2024), by the paper's names.

    Args:
        state_size: elements of state per element of a head (N).
        head_dim: elements of a head (P).
        num_heads: heads (H); by default `expand * hidden_size / head_dim`.
        expand: inner width over hidden size, where `num_heads` is not given.
        groups: the number of input and output projections of the state (B and C), each of which
            `num_heads / groups` heads share. Over tensor-parallel ranks each holds a run of them.
        conv_kernel: taps of the causal convolution before the scan.
        conv_bias: whether the convolution has a bias.
        bias: whether the two projections have biases.
        chunk_size: tokens that are multiplied as a matrix; results do not depend on it.
        dt_min: the smallest initial step.
        dt_max: the largest initial step; steps are drawn uniformly on a log scale.
        dt_limit: bounds of the step in every forward.
        decay_range: bounds of the initial decay rates (-A), which are drawn uniformly.
        path: `auto` uses the Triton kernels of flash-linear-attention for fp16 and bf16 on CUDA if
            it is installed, and torch otherwise; `torch` and `fla` require one of them.

    Raises:
        ValueError: for sizes below 1, ranges that are empty, or an unknown path.

    Examples:
        >>> mamba = MambaConfig(state_size=16, head_dim=16)
    """

    state_size: int = 128
    head_dim: int = 64
    num_heads: int | None = None
    expand: int = 2
    groups: int = 1
    conv_kernel: int = 4
    conv_bias: bool = True
    bias: bool = False
    chunk_size: int = 128
    dt_min: float = 0.001
    dt_max: float = 0.1
    dt_limit: tuple[float, float] = (0.0, math.inf)
    decay_range: tuple[float, float] = (1.0, 16.0)
    path: MambaPath = "auto"

    def __post_init__(self) -> None:
        sizes = ("state_size", "head_dim", "expand", "groups", "conv_kernel", "chunk_size")
        require_at_least(1, self, *sizes)
        require_at_least(1, self, "num_heads", optional=True)
        require_in_order("dt_min and dt_max", self.dt_min, self.dt_max)
        require_in_order("decay_range", *self.decay_range)
        if not 0.0 <= self.dt_limit[0] < self.dt_limit[1]:
            raise ValueError(f"dt_limit is {self.dt_limit}: it must be in order, from 0 up")
        require_choices(self, MambaConfig)

    def heads(self, hidden_size: int) -> int:
        """Count the heads of a layer in a stream of this width.

        Raises:
            ValueError: if the inner width is not a multiple of `head_dim`, or the heads not of
                `groups`.
        """
        inner = self.expand * hidden_size
        heads = self.num_heads or inner // self.head_dim
        if self.num_heads is None:
            what = f"expand {self.expand} x hidden_size {hidden_size} ="
            remedy = "change one, or give num_heads"
            require_divides(what, inner, "head_dim", self.head_dim, remedy)
        if heads % self.groups:
            raise ValueError(
                f"{heads} heads are not divisible by groups {self.groups} (remainder "
                f"{heads % self.groups}): every group serves the same number of heads"
            )
        return heads


def check_pattern(
    pattern: str | None,
    num_layers: int,
    mamba: MambaConfig | None,
    own: Sequence[str] = (),
    reads_mamba: bool = False,
) -> None:
    """Raise ValueError unless the pattern's letters are known and fit the other fields.

    `own` are the letters of the caller's own layers. `reads_mamba` says that layers of other
    letters have Mamba-2 in the place of attention.
    """
    if pattern is None:
        if mamba is not None and not reads_mamba:
            raise ValueError(
                "mamba is given without layer_pattern: say which layers are Mamba's, such as "
                f"layer_pattern={'M' * num_layers!r}, or attention=Mamba2()"
            )
        return
    unknown = sorted(set(pattern) - {*LETTERS, *own})
    if unknown:
        known = "; ".join(f"{letter!r} is {what}" for letter, what in LETTERS.items())
        raise ValueError(f"layer_pattern {pattern!r} has {unknown}, which mean nothing: {known}")
    if len(pattern) != num_layers:
        raise ValueError(
            f"layer_pattern {pattern!r} has {len(pattern)} letters, num_layers is {num_layers}: "
            "each letter is one layer"
        )
    if not reads_mamba and ("M" in pattern) != (mamba is not None):
        mamba_given = "no mamba is given" if mamba is None else "mamba is given"
        raise ValueError(
            f"layer_pattern {pattern!r} has {pattern.count('M')} Mamba layers (letter 'M'), and "
            f"{mamba_given}: give both or neither"
        )
