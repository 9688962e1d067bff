"""Models and modes of `lamina.models` under `fully_shard` on the virtual GPU: what a step does.

`python modes_on_device.py [NAME ...]` prints what came of each mode, as JSON.
"""

from __future__ import annotations

import gc
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from one_of_eight import end, start
from settings_on_device import Settings, adamw
from steady import of_call

from lamina.fsdp import MixedPrecisionPolicy, fully_shard
from lamina.mesh import ParallelLayout
from lamina.models import (
    Float8Codec,
    GPTModel,
    LatentAttention,
    MambaConfig,
    MoEConfig,
    Precision,
    RecomputePolicy,
    TransformerConfig,
    VisionConfig,
    VisionLanguageModel,
    apply_recompute,
    float8_weights,
)
from lamina.models.attention import SparseLatentAttention

LLAMA = TransformerConfig(
    vocab_size=512, hidden_size=256, num_layers=2, num_heads=4, num_kv_heads=2,
    max_sequence_length=512,
)  # fmt: skip
MOE = MoEConfig(num_experts=8, top_k=2, ffn_size=128)
PADDED = replace(MOE, capacity_factor=1.25, pad_to_capacity=True)
LATENT = LatentAttention(
    kv_lora_rank=64, q_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=64
)
CHOSEN = SparseLatentAttention(**vars(LATENT), top_k=64, index_heads=8, index_width=64)
GPT2 = {"activation": "gelu_tanh", "norm": "layernorm", "positions": "learned"}
IMAGE = 511


@dataclass(frozen=True)
class Mode:
    """A model and how it is trained: changes of the config, the layout, the wrapper."""

    config: Settings = field(default_factory=dict)
    layout: Settings = field(default_factory=dict)
    wrapper: Settings = field(default_factory=dict)
    dtype: torch.dtype = torch.bfloat16
    prepare: Callable[[GPTModel], object] = lambda model: None
    documents: bool = False
    codec: bool = False
    vision: bool = False


def fp8(**settings: Any) -> Settings:
    return {"precision": Precision(backend="torch-fp8", **settings)}


def recomputed(kind: str, **more: Any) -> Mode:
    policy = RecomputePolicy(kind=kind, **more)  # type: ignore[arg-type]
    return Mode(prepare=lambda model: apply_recompute(model, policy))


def compiled(model: GPTModel) -> None:
    for block in model.blocks:
        block.compile()


MODES = {
    "llama": Mode(),
    "float16": Mode(dtype=torch.float16),
    "float32": Mode(dtype=torch.float32),
    "gpt2": Mode({**GPT2, "attention_bias": True, "mlp_bias": True, "tie_embeddings": True}),
    "dropout": Mode({"dropout": 0.1, "attention_dropout": 0.1, "qk_norm": True, "post_norm": True}),
    "window": Mode({"sliding_window": 100}),
    # "varlen" asks the device for the longest document, which nothing computes.
    "documents": Mode({"attention_path": "sdpa"}, documents=True),
    "latent attention": Mode({"num_kv_heads": None, "mla": LATENT}),
    "chosen keys": Mode({"num_kv_heads": None, "mla": CHOSEN}),
    "mamba": Mode({"layer_pattern": "M*-", "num_layers": 3, "mamba": MambaConfig(state_size=32)}),
    "experts": Mode({"moe": MOE}),
    "experts, padded": Mode({"moe": PADDED}),
    "experts, balanced by bias": Mode({"moe": replace(PADDED, bias_rate=0.01, global_loss=0.01)}),
    # Rows of any load over ep, and experts one by one, follow counts, which nothing computes.
    "experts over ep": Mode({"moe": PADDED}, {"ep": 2}),
    "experts over ep, gathered": Mode({"moe": replace(MOE, dispatcher="all_gather")}, {"ep": 2}),
    "tp": Mode(layout={"tp": 2}),
    "tp and sp": Mode({"sequence_parallel": True}, {"tp": 2}),
    "tp by the backend's sums": Mode({"tp_reduction": "native"}, {"tp": 2}),
    "cp by a ring": Mode(layout={"cp": 2}),
    "cp by gathers": Mode({"context_parallel": "all_gather"}, {"cp": 2}),
    "cp by heads": Mode({"context_parallel": "ulysses"}, {"cp": 2}),
    "fp8": Mode(fp8()),
    "fp8 by rows": Mode(fp8(scaling="rowwise")),
    "fp8 with a history": Mode(fp8(amax="delayed")),
    "fp8, transposes kept": Mode(fp8(), wrapper={"keep_fp8_transpose_cache": True}),
    "fp8 gathers": Mode(fp8(), codec=True),
    "recompute full": recomputed("full"),
    "recompute selective": recomputed("selective"),
    "recompute offload": recomputed("offload", min_numel=1024),
    "offload of weights": Mode(wrapper={"offload": True}),
    "compiled": Mode(prepare=compiled),
    "vision": Mode(vision=True),
}


def model_of(mode: Mode, mesh: Any) -> torch.nn.Module:
    config = replace(LLAMA, **mode.config)
    if not mode.vision:
        return GPTModel(config, mesh)
    vision = VisionConfig(hidden_size=64, num_layers=2, num_heads=2, patch_size=4, max_grid=8)
    return VisionLanguageModel(vision, config, image_token=IMAGE)


def inputs(mode: Mode) -> Settings:
    """Arguments of the model's forward."""
    length = 512 // mode.layout.get("cp", 1)
    tokens = torch.zeros(2, length, dtype=torch.long, device="cuda")
    more: Settings = {}
    if mode.documents:
        more["document_ids"] = torch.zeros_like(tokens)
    if mode.vision:
        more["images"] = None  # the count of image tokens in the text is computed on the device
    return {"tokens": tokens, "labels": tokens, **more}


def outcome(mode: Mode) -> Settings:
    """What came of a mode: an error, or what two steps ask for."""
    torch.manual_seed(0)
    mesh = ParallelLayout(**mode.layout).build("cuda")
    with torch.device("cuda"):
        model = model_of(mode, mesh)
    mode.prepare(model)  # type: ignore[arg-type]
    codec = {"weight_codec": Float8Codec(), "encoded": float8_weights(model)} if mode.codec else {}
    policy = MixedPrecisionPolicy(param_dtype=mode.dtype, **codec)  # type: ignore[arg-type]
    wrapper = dict(mode.wrapper)
    if wrapper.pop("offload", False):
        wrapper["offload_policy"] = torch.distributed.fsdp.CPUOffloadPolicy()
    wrapped, optimizer = fully_shard(
        model, adamw(model), device_mesh=mesh, mixed_precision_policy=policy, **wrapper
    )
    batch = inputs(mode)

    def step() -> None:
        wrapped(**batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    return {"steps": [of_call(step) for _ in range(2)]}


def main(*only: str) -> list[Settings]:
    """What came of all modes, or of some."""
    start()
    rows = []
    for name, mode in MODES.items():
        if only and name not in only:
            continue
        begun, row = time.monotonic(), {"mode": name}
        try:
            row |= outcome(mode)
        except Exception:
            row["error"] = traceback.format_exc()[-2500:]
        gc.collect()
        row["seconds"] = round(time.monotonic() - begun, 2)
        print(name, row["seconds"], file=sys.stderr, flush=True)  # a crash is the next one's
        rows.append(row)
    return rows


if __name__ == "__main__":
    end(main(*sys.argv[1:]))
