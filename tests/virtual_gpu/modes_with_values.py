"""Models whose work follows numbers on the device, on two virtual GPUs; torchrun runs it.

Each trains two steps beside one process on a CPU that has the whole batch, in fp32. It ends with
how far parameters are apart in each mode, or with the mode's error.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from lamina.ddp import full_parameters
from lamina.fsdp import MixedPrecisionPolicy, fully_shard
from lamina.mesh import ParallelLayout
from lamina.models import (
    GPTModel,
    LayerSpec,
    MoEConfig,
    TransformerConfig,
    VisionConfig,
    VisionLanguageModel,
    pipeline,
)
from lamina.models.mamba import GatedDeltaNet, Mamba1

IMAGE = 63
CONFIG = TransformerConfig(
    vocab_size=64, hidden_size=32, num_layers=2, num_heads=2, ffn_size=64, max_sequence_length=32,
    init_std=0.1,
)  # fmt: skip
NET = GatedDeltaNet(key_heads=2, value_heads=4, key_width=8, value_width=8, chunk_size=16)
EXPERTS = MoEConfig(num_experts=4, top_k=2, ffn_size=32)
VISION = VisionConfig(hidden_size=32, num_layers=1, num_heads=2, patch_size=4, max_grid=4)


@dataclass(frozen=True)
class Mode:
    """A model, its layout, and what its batch has."""

    config: dict[str, Any] = field(default_factory=dict)
    layout: dict[str, int] = field(default_factory=dict)
    documents: bool = False
    vision: bool = False
    schedule: str | None = None
    dtype: torch.dtype = torch.float32


MODES = {
    "varlen": Mode({"attention_path": "varlen"}, documents=True, dtype=torch.bfloat16),
    "documents, masked": Mode({"attention_path": "sdpa"}, documents=True),
    "experts of any load over ep": Mode({"moe": EXPERTS}, {"ep": 2}),
    "experts one by one": Mode({"moe": replace(EXPERTS, experts="loop")}, {"ep": 2}),
    "experts with biases": Mode(
        {"moe": replace(EXPERTS, bias=True, router_bias=True), "activation": "swiglu_clamped"},
        {"ep": 2},
    ),
    "experts, gathered": Mode({"moe": replace(EXPERTS, dispatcher="all_gather")}, {"ep": 2}),
    "images in a text": Mode(vision=True),
    "Mamba-1": Mode({"layers": (LayerSpec(attention=Mamba1(state_size=4)), LayerSpec())}),
    "gated delta nets": Mode({"layers": (LayerSpec(attention=NET), LayerSpec())}),
    "1f1b": Mode(layout={"pp": 2, "dp_shard": 1}, schedule="1f1b"),
    "zero bubble": Mode({"num_layers": 4}, {"pp": 2, "dp_shard": 1}, schedule="zbv_zero_bubble"),
}


def model_of(mode: Mode, mesh: Any) -> Any:
    config = replace(CONFIG, **mode.config)
    if mode.vision:
        return VisionLanguageModel(VISION, config, mesh, image_token=IMAGE, seed=1)
    return GPTModel(config, mesh, seed=1)


def batch(mode: Mode, step: int) -> dict[str, torch.Tensor]:
    """The whole batch: four sequences."""
    draws = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 60, (4, 33), generator=draws)
    made = {"tokens": tokens[:, :-1].clone(), "labels": tokens[:, 1:].clone()}
    if mode.documents:
        ends = torch.tensor([5, 11, 17, 32]).roll(step)
        made["document_ids"] = (torch.arange(32) >= ends[:, None]).long()
    if mode.vision:
        made["tokens"][:, 1:5] = IMAGE
        made["images"] = torch.randn(4, 3, 8, 8, generator=draws)
    return made


def on_a_cpu(mode: Mode) -> dict[str, torch.Tensor]:
    model = model_of(replace(mode, config={**mode.config, "attention_path": "auto"}), None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        model(**batch(mode, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in model.named_parameters()}


def on_gpus(mode: Mode) -> dict[str, torch.Tensor]:
    """Parameters after two steps."""
    mesh = ParallelLayout(**mode.layout).build("cuda")
    model = model_of(mode, mesh).cuda()
    step_of: Callable[..., Any]
    if mode.schedule is not None:
        runner = pipeline(model, mesh, mode.schedule, 4)
        optimizer: Any = torch.optim.SGD(runner.parameters(), lr=0.1)
        wrapped: Any = runner
        step_of = lambda tokens, labels: runner.step(tokens, labels)  # noqa: E731
    else:
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        policy = MixedPrecisionPolicy(param_dtype=mode.dtype)
        wrapped, optimizer = fully_shard(
            model, sgd, device_mesh=mesh, mixed_precision_policy=policy
        )
        step_of = lambda **given: wrapped(**given).backward()  # noqa: E731
    rank, ranks = (0, 1) if mode.schedule else (dist.get_rank(), dist.get_world_size())
    for step in range(2):
        mine = {name: x.chunk(ranks)[rank].cuda() for name, x in batch(mode, step).items()}
        step_of(**mine)
        optimizer.step()
        optimizer.zero_grad()
    found = full_parameters(wrapped) if mode.schedule is None else dict(wrapped.named_parameters())
    return {name: value.detach().cpu() for name, value in found.items()}


def main(*only: str) -> None:
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", local))
    rows = []
    for name, mode in MODES.items():
        if only and name not in only:
            continue
        row: dict[str, Any] = {"mode": name}
        try:
            found, wanted = on_gpus(mode), on_a_cpu(mode)
            row["apart"] = max(
                float((value - _piece(wanted[n], value)).abs().max()) for n, value in found.items()
            )
        except Exception:
            row["error"] = traceback.format_exc()[-2500:]
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
        if "error" in row:
            break
    if os.environ["RANK"] == "0":
        print(json.dumps(rows), flush=True)
    dist.destroy_process_group()


def _piece(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A rank's experts, where it has some of them; else the whole."""
    if whole.shape == like.shape:
        return whole
    return whole.chunk(dist.get_world_size())[dist.get_rank()]


if __name__ == "__main__":
    main(*sys.argv[1:])
