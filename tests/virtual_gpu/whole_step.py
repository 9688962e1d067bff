"""Train with a whole step in one CUDA graph beside the same steps without; torchrun runs it.

    torchrun --nproc-per-node=2 tests/virtual_gpu/whole_step.py CASE ...

It ends with the names of the cases in which a loss or a parameter has other bits.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lamina.ddp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    ShardedOptimizer,
    clip_grad_norm,
    finalize_grads,
    full_parameters,
)
from lamina.fsdp import fully_shard
from lamina.mesh import ParallelLayout
from lamina.models import GPTModel, TransformerConfig, apply_recompute

CONFIG = TransformerConfig(
    vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, max_sequence_length=32
)
WARMUP, REPLAYS, AFTER = 2, 3, 1  # steps


@dataclass
class Case:
    """How a model is wrapped and trained."""

    strategy: int | str = 3
    settings: dict[str, Any] = field(default_factory=dict)
    clip: bool = False
    fused: bool = False
    microbatches: int = 1
    recompute: str = "none"
    tp: int = 1
    rate: bool = False
    """The rate is a tensor, and another one in each step."""
    elsewhere: bool = False
    """The model is wrapped on another stream than that of the steps."""


CASES = {
    **{str(strategy): Case(strategy) for strategy in range(4)},
    "ddp": Case("ddp"),
    "ddp, sharded": Case("ddp, sharded"),
    "clipped": Case(clip=True),
    "fused, clipped": Case(clip=True, fused=True),
    "microbatches": Case(microbatches=2),
    "microbatches, 1": Case(1, microbatches=2),
    "full": Case(recompute="full"),
    "selective": Case(recompute="selective"),
    "tp": Case(0, tp=2),
    "a rate in a tensor": Case(rate=True),
    "elsewhere": Case(elsewhere=True),
    "native": Case(settings={"reduction": "native"}),
    "slots": Case(settings={"fsdp_double_buffer": True, "cuda_graph_mode": True}),
}


class Run:
    """A model, its optimizer, and a step over a batch in a tensor that stays."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.case, self.mesh = case, ParallelLayout(tp=case.tp).build("cuda")
        self.rate = torch.tensor(1e-2, device="cuda")
        model = apply_recompute(GPTModel(CONFIG, self.mesh, seed=1).cuda(), case.recompute)
        adamw: Any = torch.optim.AdamW(
            model.parameters(), lr=self.rate if case.rate else 1e-2,
            capturable=True, fused=case.fused or None,
        )  # fmt: skip
        self.model: Any
        if isinstance(case.strategy, str):
            sharded = "sharded" in case.strategy
            settings = DistributedDataParallelConfig(use_distributed_optimizer=sharded)
            self.model = DistributedDataParallel(model, settings, self.mesh)
            self.optimizer = ShardedOptimizer(adamw, self.model, self.mesh) if sharded else adamw
        else:
            self.model, self.optimizer = fully_shard(
                model, adamw, device_mesh=self.mesh, zero_dp_strategy=case.strategy,
                **case.settings,
            )  # fmt: skip
        self.text = torch.zeros(case.microbatches, 2, 17, dtype=torch.long, device="cuda")

    def step(self) -> Tensor:
        case, total = self.case, torch.zeros((), device="cuda")
        for number, tokens in enumerate(self.text):
            last = number == case.microbatches - 1
            with contextlib.nullcontext() if last else self.model.no_sync():
                loss = self.model(tokens[:, :-1], tokens[:, 1:])
                (loss / case.microbatches).backward()
            total = total + loss.detach()
        finalize_grads(self.model, self.mesh)
        if case.clip:
            clip_grad_norm(self.model, 0.1, self.mesh)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def losses(self, *, captured: bool) -> Iterator[float]:
        graph, loss = torch.cuda.CUDAGraph(), torch.zeros(())
        rank = 0 if self.case.tp > 1 else dist.get_rank()
        for number in range(WARMUP + REPLAYS + AFTER):
            draws = torch.Generator().manual_seed(100 * number + rank)
            self.rate.fill_(1e-2 / (1 + number))
            self.text.copy_(torch.randint(0, 64, self.text.shape, generator=draws))
            if captured and WARMUP <= number < WARMUP + REPLAYS:
                if number == WARMUP:
                    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
                        loss = self.step()
                graph.replay()
            else:
                loss = self.step()
            yield loss.item()


def main(names: list[str]) -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_stream(torch.cuda.Stream())  # nothing is captured on the default stream
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    differing = []
    for name in names:
        results = []
        elsewhere = CASES[name].elsewhere
        # Lamina holds the leaves of autograd's graph, with the stream on which a model is wrapped.
        torch.autograd.graph.set_override_stale_capture_stream(elsewhere)
        for captured in (False, True):
            with torch.cuda.stream(torch.cuda.default_stream() if elsewhere else None):
                run = Run(CASES[name])
            losses = list(run.losses(captured=captured))
            results.append((losses, {n: p.cpu() for n, p in full_parameters(run.model).items()}))
        (plain, wanted), (replayed, parameters) = results
        if plain != replayed or not all(torch.equal(wanted[n], p) for n, p in parameters.items()):
            differing.append(name)
    dist.destroy_process_group()
    if os.environ["RANK"] == "0":
        print(json.dumps(differing), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
