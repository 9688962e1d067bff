"""The precision of a model's matrix products: a frozen, validated description."""

from dataclasses import dataclass, fields
from typing import Literal

from lamina.models.base.configs.field_checks import (
    require_at_least,
    require_choices,
    require_one_of,
)

Backend = Literal["torch", "torch-fp8", "transformer_engine"]
Scaling = Literal["tensorwise", "rowwise", "block", "mxfp8", "nvfp4"]
Amax = Literal["current", "delayed"]

_SCALINGS: dict[str, tuple[str, ...]] = {
    "torch": ("tensorwise",),
    "torch-fp8": ("tensorwise", "rowwise"),
    "transformer_engine": ("tensorwise", "block", "mxfp8", "nvfp4"),
}


@dataclass(frozen=True, kw_only=True)
class Precision:
    """How the projections of a model's blocks multiply.

    Everything else (norms, attention's core, embeddings, head, residual stream) keeps the model's
    own dtype: fp32, bf16 or fp16, as `model.to(dtype)` or a wrapper's policy makes it.

    Args:
        backend: `torch` multiplies in the model's own dtype. `torch-fp8` quantises both sides
            of each product (e4m3 forward, e5m2 for gradients; Micikevicius et al., 2022) and
            multiplies by `torch.nn.functional.scaled_mm`. `transformer_engine` puts
            `transformer_engine.pytorch.Linear` in the projections' place.
        scaling: the numbers that share a scale: a tensor, a row of it, or (Transformer Engine only)
            a block, as in its recipes `Float8BlockScaling`, `MXFP8BlockScaling` and
            `NVFP4BlockScaling`.
        amax: the scale of a tensor follows from its largest magnitude. This is that of the tensor
            itself (`current`), or the largest of the last `history` forward-backward passes
            (`delayed`, tensorwise only). Forwards under `torch.no_grad()` are not recorded.
        history: the number of passes in the history of delayed scaling; each microbatch of a step
            is a pass. Only with `amax="delayed"`.
        num_layers_at_start_in_bf16: blocks at the start that keep the model's own dtype.
        num_layers_at_end_in_bf16: the same at the end, where the blocks of
            `TransformerConfig.mtp` are last.
        keep_transpose: `torch-fp8` only: keep the quantised, transposed weight from forward until
            backward, which need not quantise it again. This takes one byte per element.
        quantized_weights: Transformer Engine only: parameters are quantised themselves
            (`quantized_model_init`), with their first values kept in high precision.

    Raises:
        ValueError: for settings that the backend does not have or does not use.

    Examples:
        >>> precision = Precision(backend="torch-fp8", scaling="rowwise")
    """

    backend: Backend = "torch"
    scaling: Scaling = "tensorwise"
    amax: Amax = "current"
    history: int = 16
    num_layers_at_start_in_bf16: int = 0
    num_layers_at_end_in_bf16: int = 0
    keep_transpose: bool = False
    quantized_weights: bool = False

    def __post_init__(self) -> None:
        require_choices(self, Precision)
        scalings = _SCALINGS[self.backend]
        require_one_of(f"scaling of backend {self.backend!r}", self.scaling, scalings)
        if self.amax == "delayed" and self.scaling != "tensorwise":
            raise ValueError(
                f"amax='delayed' with scaling={self.scaling!r}: a history remembers one number per "
                "tensor, and rows are other tokens each time; use scaling='tensorwise' or "
                "amax='current'"
            )
        require_at_least(1, self, "history")
        require_at_least(0, self, "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
        if self.quantized_weights and self.backend != "transformer_engine":
            raise ValueError(
                f"quantized_weights=True with backend={self.backend!r}: only Transformer Engine "
                "has parameters that are quantised themselves; fully_shard with a Float8Codec "
                "keeps and gathers shards in FP8"
            )
        self._refuse_what_is_not_looked_at()

    def _refuse_what_is_not_looked_at(self) -> None:
        changed = [f.name for f in fields(self) if getattr(self, f.name) != f.default]
        if self.backend == "torch" and changed:
            raise ValueError(
                f"{_said(self, changed)} with backend='torch', which multiplies in the model's own "
                "dtype and looks at none of it: name a backend, such as backend='torch-fp8'"
            )
        if self.history != 16 and self.amax != "delayed":
            raise ValueError(
                f"{_said(self, ['history', 'amax'])}: only delayed scaling looks back; set "
                "amax='delayed', or leave history out"
            )
        if self.keep_transpose and self.backend != "torch-fp8":
            raise ValueError(
                f"keep_transpose=True with backend={self.backend!r}: only torch-fp8 is told here "
                "what to keep (Transformer Engine decides by itself)"
            )

    def check_blocks(self, number: int) -> None:
        """Raise ValueError unless blocks in bf16 leave some of `number` for this precision."""
        start, end = self.num_layers_at_start_in_bf16, self.num_layers_at_end_in_bf16
        if self.backend != "torch" and start + end >= number:
            raise ValueError(
                f"num_layers_at_start_in_bf16 {start} + num_layers_at_end_in_bf16 {end} = "
                f"{start + end} of {number} blocks: none is left for {self.backend}; lower them, "
                "or use backend='torch'"
            )


def _said(precision: Precision, names: list[str]) -> str:
    return ", ".join(f"{name}={getattr(precision, name)!r}" for name in names)
