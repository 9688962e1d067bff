"""A gated convolution over the last few tokens, in the place of attention (LFM2)."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from lamina.models.attention.context import AttentionContext
from lamina.models.base.config import AttentionVariant, TransformerConfig
from lamina.models.base.mesh_axes import MeshLike, axis_of
from lamina.models.base.weight_link import WeightLink
from lamina.models.layers.linear import from_residual, into_residual
from lamina.models.mamba.convolution import CausalConvolution


@dataclass(frozen=True, kw_only=True)
class ShortConvolution(AttentionVariant):
    """`c * convolution(b * x)`, of three projections of each token (LFM2).

    Give it to some layers: `layers=(LayerSpec(attention=ShortConvolution()), LayerSpec(), ...)`.

    Args:
        taps: tokens that the convolution sees, the token itself among them.

    Examples:
        >>> config = TransformerConfig(vocab_size=256, hidden_size=64, num_layers=2, num_heads=4,
        ...                            attention=ShortConvolution())
    """

    taps: int = 3
    context_parallel = ()
    reads_documents = True

    def make(self, config: TransformerConfig, mesh: MeshLike = None) -> nn.Module:
        """See `AttentionVariant.make`."""
        return ShortConvolutionMixer(config, self.taps, mesh)

    def check(self, config: TransformerConfig) -> None:
        """See `AttentionVariant.check`."""
        super().check(config)
        if self.taps < 1:
            raise ValueError(f"taps is {self.taps}: a convolution sees the token itself at least")
        if config.invariant:
            raise ValueError(
                "invariant=True beside ShortConvolution, whose gradients are sums over tokens in a "
                "kernel's order: leave one of them out"
            )

    def parameters(self, config: TransformerConfig) -> int:
        """See `AttentionVariant.parameters`."""
        return config.hidden_size * (4 * config.hidden_size + self.taps)

    def products_per_pair(self, config: TransformerConfig) -> int:
        """See `AttentionVariant.products_per_pair`."""
        return 0

    def huggingface_links(
        self, config: TransformerConfig, ours: str, theirs: str
    ) -> Iterator[WeightLink]:
        """See `AttentionVariant.huggingface_links`."""
        for part, name in {"input": "in_proj", "conv": "conv", "output": "conv_out_proj"}.items():
            yield WeightLink(f"{ours}.{part}.weight", (f"{theirs}.{name}.weight",))


class ShortConvolutionMixer(nn.Module):
    """The module of `ShortConvolution`. Over tensor-parallel ranks each has a run of the channels.

    Args:
        config: the shape.
        taps: tokens that the convolution sees.
        mesh: has an axis `tp`, or is that axis; None is one process.
    """

    caches = True

    def __init__(self, config: TransformerConfig, taps: int, mesh: MeshLike = None) -> None:
        super().__init__()
        width, axis = config.hidden_size, axis_of(mesh, "tp")
        self.input = from_residual(config, (width,) * 3, axis, bias=False)
        self.conv = CausalConvolution((width,), taps, axis, bias=False, activated=False)
        self.output = into_residual(config, width, axis, bias=False)

    def forward(self, x: Tensor, context: AttentionContext | None = None) -> Tensor:
        """Mix each token with the few before it in its document.

        Args:
            x: `[batch, sequence, hidden]`, or under sequence parallelism `[tokens / tp, hidden]`,
                which needs a context.
            context: has the shape and the documents; by default each row is one document.

        Returns:
            The same shape as `x`.
        """
        shape = x.shape[:2] if context is None else context.shape
        before, after, value = self.input(x).view(*shape, -1).chunk(3, dim=-1)
        mixed = before * value
        cache = None if context is None else context.cache
        if cache is not None and (window := cache.before()) is not None:
            y, window = self.conv.step(mixed[:, 0], window)
            y = y[:, None]
        else:
            y = self.conv(mixed, None if context is None else context.runs)
            window = F.pad(mixed, (0, 0, self.conv.weight.shape[-1] - 1, 0))[:, mixed.shape[1] :]
        if cache is not None:
            cache.keep(window)
        y = after * y
        output: Tensor = self.output(y if x.ndim == 3 else y.flatten(0, 1))
        return output
