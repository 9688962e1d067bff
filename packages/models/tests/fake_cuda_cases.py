"""Forwards and backwards on fake CUDA tensors; run as a program, as `pretend_cuda` wants it."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lamina_testing.cuda_without_gpu import pretend_cuda

if __name__ == "__main__":
    pretend_cuda(Path(sys.argv[1]))

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lamina.models import (
    GPTModel,
    MambaConfig,
    MoEConfig,
    Precision,
    TransformerConfig,
    apply_precision,
    apply_recompute,
)
from lamina.models.attention.pieced import Block, InPieces, Piece

CONFIG = TransformerConfig(vocab_size=256, hidden_size=128, num_layers=2, num_heads=4)
MOE = MoEConfig(num_experts=8, top_k=2, ffn_size=64, shared_ffn_size=64, switch_loss=0.01)
MAMBA = MambaConfig(head_dim=32, state_size=16, path="torch")


def model(**settings: Any) -> Callable[[], nn.Module]:
    return lambda: GPTModel(replace(CONFIG, **settings), seed=0)


def fp8(**settings: Any) -> Callable[[], nn.Module]:
    return lambda: apply_precision(model()(), Precision(backend="torch-fp8", **settings))


def recomputed(kind: Any) -> Callable[[], nn.Module]:
    return lambda: apply_recompute(model(dropout=0.1)(), kind)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "dense": model(),
    "grouped heads": model(num_kv_heads=2),
    "dropout": model(dropout=0.1, attention_dropout=0.1),
    "learned positions": model(positions="learned"),
    "a padded vocabulary": model(vocab_size=250),
    "experts": model(moe=replace(MOE, bias_rate=0.01, scores="sigmoid", jitter=0.1)),
    "padded experts": model(moe=replace(MOE, capacity_factor=1.25, pad_to_capacity=True)),
    "Mamba": model(layer_pattern="M*", mamba=MAMBA),
    "FP8": fp8(),
    "FP8, a scale per row": fp8(scaling="rowwise"),
    "FP8, delayed scales": fp8(amax="delayed"),
    "recomputed blocks": recomputed("full"),
    "recomputed operations": recomputed("selective"),
}


def on_cuda(made: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The module, made on the meta device, with fake CUDA tensors of its own."""
    for module in made.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                fake = nn.Parameter(torch.empty(parameter.shape, dtype=dtype, device="cuda"))
                fake.__dict__.update(parameter.__dict__)
                module._parameters[name] = fake
        for name, buffer in module._buffers.items():
            if buffer is not None:
                fake_buffer = torch.empty(buffer.shape, dtype=buffer.dtype, device="cuda")
                module._buffers[name] = fake_buffer
    return made


def trained(make: Callable[[], nn.Module], dtype: torch.dtype) -> set[str]:
    with torch.device("meta"):
        made = make()
    with FakeTensorMode():
        module = on_cuda(made, dtype)
        tokens = torch.zeros(2, 32, dtype=torch.int64, device="cuda")
        module(tokens, labels=tokens).backward()
        return {f"{p.grad.device} {p.grad.dtype}" for p in module.parameters()}


def pieced(causal: bool, dtype: torch.dtype) -> set[str]:
    """Attention as context parallelism puts it together, with key heads that queries share."""
    with FakeTensorMode():
        inputs: list[Tensor] = [
            torch.empty(2, 32, heads, 64, dtype=dtype, device="cuda", requires_grad=True)
            for heads in (4, 2, 2)
        ]
        whole = slice(0, 32)
        attention = InPieces((Piece(whole, whole, Block(1.0, causal=causal)),))
        attention(*inputs, scale=1.0, dropout=0.0).sum().backward()
        return {f"{x.grad.device} {x.grad.dtype}" for x in inputs}


RUNS: dict[str, Callable[[torch.dtype], set[str]]] = {
    **{name: partial(trained, make) for name, make in MODELS.items()},
    "causal pieces": partial(pieced, True),
    "pieces": partial(pieced, False),
}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# In fp32 the host reads how many rows each expert has, and fake tensors have no values.
CASES = {
    f"{run}, {dtype}": (run, dtype) for run in RUNS for dtype in DTYPES
    if (run, dtype) != ("experts", "fp32")
}  # fmt: skip


def main() -> None:
    torch.cuda.get_device_capability = lambda *_: (9, 0)  # type: ignore[assignment]
    found = {}
    for case, (run, dtype) in CASES.items():
        try:
            found[case] = sorted(RUNS[run](DTYPES[dtype]))
        except Exception:
            found[case] = [traceback.format_exc()]
    print(json.dumps(found), flush=True)
    os._exit(0)  # the end of a process would ask a device that there is not


if __name__ == "__main__":
    main()
