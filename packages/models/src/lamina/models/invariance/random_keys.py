"""Random numbers that follow from a token's place in the training run.

A number is a function of the model's seed, the module's name, the step, the sequence's number in
the global batch, the token's position in it, and the channel. No generator is advanced, so neither
the layout nor a block that is run again changes what is drawn. All of it is arithmetic of int64,
which has the same results on a CPU and on a GPU.

Source: Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, 2014 (SplitMix64);
counters instead of states as in Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lamina.mesh import ParallelMesh
from lamina.mesh.engine import MeshAxis
from lamina.models.base.mesh_axes import data_parallel_axis
from lamina.models.compat import one_graph_break
from lamina.models.invariance.token_sums import TokenCut

_BITS = 24
"""Of a number, which float32 then has exactly."""


def _signed(constant: int) -> int:
    """The int64 with the bits of an unsigned number."""
    return constant - (1 << 64) if constant >> 63 else constant


_STRIDE = _signed(0x9E3779B97F4A7C15)
_FIRST, _SECOND = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


def _mixed(x: Tensor) -> Tensor:
    """SplitMix64's function of 64 bits, int64 `[...]`; products wrap around."""
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """`x >> bits` with zeros from the left, which int64 would fill with its sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _next(key: Tensor, counter: Tensor) -> Tensor:
    """A key for each number of a counter."""
    return _mixed(key + (counter + 1) * _STRIDE)


@dataclass(frozen=True)
class TokenKeys:
    """A number for each of a forward's tokens on this rank, by its place in the run.

    Attributes:
        numbers: int64, `[batch, sequence]`, or under sequence parallelism `[tokens / tp]`: a number
            for each step, sequence and position.
        whole: int64, `[batch, sequence]`: those of whole sequences.
    """

    numbers: Tensor
    whole: Tensor

    def draw(self, seed: int, width: int) -> Tensor:
        """Draw evenly from 0 .. 2^24 - 1 for each token and channel: int64 `[..., width]`.

        Args:
            seed: what the numbers are for, `0 <= seed < 2**63`.
            width: channels, all of which this rank has.
        """
        keys = _mixed(self.numbers ^ seed).unsqueeze(-1)
        return _shifted(_next(keys, torch.arange(width, device=keys.device)), 64 - _BITS)

    def dropout(self, x: Tensor, rate: float, seed: int) -> Tensor:
        """Zero elements of `[tokens of this rank, width]`, in any number of dimensions."""
        dropped = self.draw(seed, x.shape[-1]) < round(rate * 2**_BITS)
        return x.masked_fill(dropped.view(x.shape), 0.0) * (1.0 / (1.0 - rate))

    def uniform(self, x: Tensor, low: float, high: float, seed: int) -> Tensor:
        """Numbers in `[low, high)` of the shape and dtype of `x`, as of `dropout`."""
        drawn = self.draw(seed, x.shape[-1]).view(x.shape).to(x.dtype)
        return drawn * ((high - low) * 2.0**-_BITS) + low


@dataclass(frozen=True)
class PairDraws:
    """Dropout of attention's probabilities, by head, query and key.

    Attributes:
        rate: the probability with which one is dropped, in (0, 1).
        tokens: `TokenKeys.whole` of a forward.
        heads: int64 `[heads]`: a number for each head that is computed here.
    """

    rate: float
    tokens: Tensor
    heads: Tensor

    @staticmethod
    def of(rate: float, keys: TokenKeys, seed: int, first: int, heads: int) -> "PairDraws":
        """The draws of a layer's `heads` from `first` on; `seed` is the layer's."""
        numbers = torch.arange(first, first + heads, device=keys.whole.device)
        return PairDraws(rate, keys.whole, _next(torch.full_like(numbers, seed), numbers))

    def of_rank(self, rank: int, size: int) -> "PairDraws":
        """The draws of the heads that one of `size` ranks gets."""
        return PairDraws(self.rate, self.tokens, self.heads.chunk(size)[rank])

    def factors(self, rows: slice, start: int, queries: slice, keys: slice) -> Tensor:
        """What probabilities are multiplied by: 0, or 1 / (1 - rate).

        Args:
            rows: sequences of the batch.
            start: where their document begins.
            queries: places of queries in the document.
            keys: places of keys in the document.

        Returns:
            float32 `[rows * heads, queries, keys]`.
        """
        tokens = self.tokens[rows, start + queries.start : start + queries.stop]
        of_heads = _mixed(tokens.unsqueeze(1) ^ self.heads.unsqueeze(-1)).unsqueeze(-1)
        places = torch.arange(keys.start, keys.stop, device=tokens.device)
        drawn = _shifted(_next(of_heads, places), 64 - _BITS).flatten(0, 1)
        kept: Tensor = drawn >= round(self.rate * 2**_BITS)
        return kept.float() * (1.0 / (1.0 - self.rate))


class ForwardNumbers(nn.Module):
    """Counts a model's steps, and the forwards of a step that train.

    `lamina.ddp.finalize_grads` ends a step. The buffer `step`, an int64 scalar, is part of
    checkpoints, so a run that goes on draws what it would have drawn.

    Args:
        dp: the axis whose ranks have other sequences; None is one rank.
    """

    step: Tensor

    def __init__(self, dp: MeshAxis | None) -> None:
        super().__init__()
        self.dp, self.forwards = dp, 0
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))

    def reset_parameters(self) -> None:
        """Begin with step 0."""
        nn.init.zeros_(self.step)

    # Not compiled: every number of a forward would be another constant.
    @one_graph_break
    def token_keys(self, tokens: Tensor, cut: TokenCut, forward: int | None = None) -> TokenKeys:
        """Make the keys of a forward's tokens.

        Args:
            tokens: `[batch, sequence]`, whole sequences.
            cut: how the ranks cut them.
            forward: its number in the step; by default forwards are counted here.
        """
        if forward is None:
            forward = self.forwards
        self.forwards = max(self.forwards, forward + 1)
        rows, length = tokens.shape
        rank, size = (0, 1) if self.dp is None else (self.dp.rank, self.dp.size)
        first = (forward * size + rank) * rows
        device = tokens.device
        sequences = torch.arange(first, first + rows, device=device)
        step = _mixed((self.step.to(device) + 1) * _STRIDE)
        keys = _next(step, sequences).unsqueeze(-1)
        whole = _next(keys, torch.arange(length, device=device))
        return TokenKeys(cut.piece(whole), whole)

    @property
    def needs_finalize(self) -> bool:
        """Whether a step has forwards and has not ended."""
        return self.forwards > 0

    def finalize_step(self, mesh: ParallelMesh | DeviceMesh | None) -> None:
        """End a step.

        Raises:
            ValueError: if ranks of the mesh have other sequences and the model was not built on it.
        """
        dp = data_parallel_axis(mesh)
        if dp is not None and self.dp is None:
            raise ValueError(
                f"invariant=True with dropout or jitter, and the {dp.size} ranks of {dp.name} have "
                "drawn the same numbers for other sequences: build GPTModel(config, mesh) with "
                "the mesh that it is trained on"
            )
        self.forwards = 0
        self.step += 1
