"""One rank's training step on the virtual GPU: a Llama in plain torch under an engine, as JSON.

    .nox/virtual-gpu/bin/python benchmarks/virtual_gpu.py --engine lamina-3 --size 1b

`python3 noxfile.py -s virtual-gpu -- budgets` starts it. It plays
rank 0 of a world whose other ranks do not exist: NCCL's stand-in takes every message and answers at
once.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake", for the CPU
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

GIB = 1 << 30
bf16, fp32 = torch.bfloat16, torch.float32

# ------------------------------------------------------------------------------------ the model


@dataclass(frozen=True)
class Size:
    """Width, blocks, heads, heads of keys and values, width of the MLP, vocabulary, tokens.

    With experts an MLP is one of them, and `chosen` of them take each token. The router is forced:
    it computes its scores, and every expert takes as many tokens as each other one.
    """

    width: int
    blocks: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int
    tokens: int
    head: int = 128
    experts: int = 0
    chosen: int = 0


SIZES = {
    "tiny": Size(256, 4, 4, 2, 512, 1024, 512, head=64),
    "tiny-moe": Size(256, 4, 4, 2, 128, 1024, 512, head=64, experts=8, chosen=2),
    "1b": Size(2048, 16, 32, 8, 8192, 128256, 8192, head=64),
    "8b": Size(4096, 32, 32, 8, 14336, 128256, 8192),
    "30b-moe": Size(2048, 48, 32, 4, 768, 151936, 8192, experts=128, chosen=8),
    "70b": Size(8192, 80, 64, 8, 28672, 128256, 8192),
    "405b": Size(16384, 126, 128, 8, 53248, 128256, 8192),
}


class _Copied(torch.autograd.Function):
    """What all ranks of tp read: their gradients are added."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Added(torch.autograd.Function):
    """The sum of what the ranks of tp have."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _Joined(torch.autograd.Function):
    """The columns of all ranks of tp, rank 0's first."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        parts = x.new_empty(group.size(), *x.shape)
        dist.all_gather_into_tensor(parts, x, group=group)
        ctx.width = x.shape[-1]
        return parts.movedim(0, -2).flatten(-2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad[..., : ctx.width].contiguous(), None


class Cut:
    """How a model is cut over the ranks of tp, as Megatron cuts it; this process is rank 0."""

    def __init__(self, tp: int = 1, group: dist.ProcessGroup | None = None) -> None:
        self.tp, self.group = tp, group

    def copied(self, x: torch.Tensor) -> torch.Tensor:
        """Give all ranks the input of their columns."""
        return x if self.tp == 1 else _Copied.apply(x, self.group)

    def added(self, x: torch.Tensor) -> torch.Tensor:
        """Add what the ranks' rows give."""
        return x if self.tp == 1 else _Added.apply(x, self.group)

    def joined(self, x: torch.Tensor) -> torch.Tensor:
        """Put the ranks' columns side by side."""
        return x if self.tp == 1 else _Joined.apply(x, self.group)


class RMSNorm(nn.Module):
    """Root mean square normalisation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def reset_parameters(self) -> None:
        """As torch's modules have it: FSDP2 and Megatron-FSDP call it."""
        nn.init.ones_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One forward."""
        return F.rms_norm(x, (x.shape[-1],), self.weight, 1e-5)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn each pair of features by its position's angle."""
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention, causal, with rotary positions."""

    def __init__(self, size: Size, cut: Cut) -> None:
        super().__init__()
        self.size, self.head, self.cut = size, size.head, cut
        inner, kv = (n * self.head // cut.tp for n in (size.heads, size.kv_heads))
        self.query = nn.Linear(size.width, inner, bias=False)
        self.key = nn.Linear(size.width, kv, bias=False)
        self.value = nn.Linear(size.width, kv, bias=False)
        self.out = nn.Linear(inner, size.width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """One forward."""
        x = self.cut.copied(x)
        batch, tokens, _ = x.shape
        heads = (batch, tokens, -1, self.head)
        query, key, value = (
            layer(x).view(heads).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        times = self.size.heads // self.size.kv_heads
        key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.cut.added(self.out(mixed.transpose(1, 2).reshape(batch, tokens, -1)))


class MLP(nn.Module):
    """A gated MLP."""

    def __init__(self, size: Size, cut: Cut) -> None:
        super().__init__()
        self.cut, hidden = cut, size.hidden // cut.tp
        self.gate = nn.Linear(size.width, hidden, bias=False)
        self.up = nn.Linear(size.width, hidden, bias=False)
        self.down = nn.Linear(hidden, size.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One forward."""
        x = self.cut.copied(x)
        return self.cut.added(self.down(F.silu(self.gate(x)) * self.up(x)))


class Experts(nn.Module):
    """Gated MLPs, each of which takes the same number of tokens."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.router = nn.Linear(size.width, size.experts, bias=False)
        inward = (size.experts, size.width, size.hidden)
        self.gate, self.up = (nn.Parameter(torch.empty(inward)) for _ in range(2))
        self.down = nn.Parameter(torch.empty(size.experts, size.hidden, size.width))

    def reset_parameters(self) -> None:
        """As torch's modules have it: FSDP2 and Megatron-FSDP call it."""
        for weight in (self.gate, self.up, self.down):
            nn.init.normal_(weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One forward: token n goes to experts n, n + 1, and so on, whatever the router says."""
        tokens, chosen = x.flatten(0, -2), self.size.chosen
        scores = self.router(tokens).float().softmax(-1)[:, :chosen].to(x.dtype)
        copies = tokens.repeat(chosen, 1).view(self.size.experts, -1, x.shape[-1])
        inner = F.silu(torch.bmm(copies, self.gate)) * torch.bmm(copies, self.up)
        out = torch.bmm(inner, self.down).view(chosen, *tokens.shape)
        return (out * scores.t()[:, :, None]).sum(0).view_as(x)


class Block(nn.Module):
    """What an engine gathers at once."""

    def __init__(self, size: Size, cut: Cut) -> None:
        super().__init__()
        self.norm1, self.attention = RMSNorm(size.width), Attention(size, cut)
        self.norm2 = RMSNorm(size.width)
        self.mlp = Experts(size) if size.experts else MLP(size, cut)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """One forward."""
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    """Tokens to logits; without embedding or head a stage of it, from and to hidden states."""

    def __init__(self, size: Size, cut: Cut | None = None) -> None:
        super().__init__()
        self.head_width, self.cut = size.head, cut or Cut()
        self.tokens: int | None = None  # of a sequence, if hidden states have fewer (by tp)
        vocabulary = size.vocabulary // self.cut.tp
        self.embedding = nn.Embedding(vocabulary, size.width)
        self.blocks = nn.ModuleList([Block(size, self.cut) for _ in range(size.blocks)])
        self.norm = RMSNorm(size.width)
        self.head = nn.Linear(size.width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """One forward."""
        places = torch.arange(self.tokens or ids.shape[1], device=ids.device).float()
        pairs = torch.arange(0, self.head_width, 2, device=ids.device).float()
        angles = torch.outer(places, 5e5 ** (-pairs / self.head_width))
        cos, sin = angles.cos(), angles.sin()
        x = ids if self.embedding is None else self.cut.added(self.embedding(ids))
        for block in self.blocks:
            x = block(x, cos, sin)
        if self.head is None:
            return x
        return self.cut.joined(self.head(self.cut.copied(self.norm(x))))


def cut_by_dtensors(model: Llama, mesh: DeviceMesh) -> None:
    """Cut a whole model over the ranks of tp by DTensors, as torchtitan's recipe does.

    Each rank has some of the tokens between products, and its columns of the logits. Use the model
    inside `loss_parallel()`, backward too.
    """
    narrow = any(type(module).__name__ == "Float8Linear" for module in model.modules())
    columns, rows, tokens = ColwiseParallel, RowwiseParallel, PrepareModuleInput
    if narrow:
        from torchao.float8 import float8_tensor_parallel as float8

        columns, rows = float8.Float8ColwiseParallel, float8.Float8RowwiseParallel
        tokens = float8.PrepareFloat8ModuleInput
    own, all_tokens = Shard(1), Replicate()
    ends = {
        "embedding": RowwiseParallel(input_layouts=all_tokens, output_layouts=own),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(
            input_layouts=own, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    block = {
        "norm1": SequenceParallel(),
        "attention": tokens(
            input_layouts=(own, None, None), desired_input_layouts=(all_tokens, None, None)
        ),
        **{f"attention.{name}": columns() for name in ("query", "key", "value")},
        "attention.out": rows(output_layouts=own),
        "norm2": SequenceParallel(),
        "mlp": tokens(input_layouts=(own,), desired_input_layouts=(all_tokens,)),
        **{f"mlp.{name}": columns() for name in ("gate", "up")},
        "mlp.down": rows(output_layouts=own),
    }
    parallelize_module(model, mesh, {n: how for n, how in ends.items() if getattr(model, n)})
    for each in model.blocks:
        parallelize_module(each, mesh, block)


def recompute(model: Llama, kind: str) -> None:
    """Keep the input of each block alone ("full"), or as torchtitan does ("selective").

    There results of attention and of every second product are kept beside a block's input.
    """
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    product = torch.ops.aten.mm.default
    attention = {
        getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention").default
        for kernel in ("flash", "efficient", "cudnn")
    }

    def contexts() -> Any:
        products = Counter[bool]()

        def choose(of: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
            products[of.is_recompute] += operator is product
            keeps = operator in attention
            if operator is product:
                keeps = products[of.is_recompute] % 2 == 1
            return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(choose)

    how = {"context_fn": contexts} if kind == "selective" else {}
    for number, block in enumerate(model.blocks):
        model.blocks[number] = checkpoint_wrapper(block, preserve_rng_state=False, **how)


def products_in_fp8(model: Llama) -> None:
    """Have blocks multiply in FP8, with a scale for each tensor, and gather FP8: torchtitan's."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(
        model.blocks, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    )


def scales_of_fp8(model: nn.Module) -> None:
    """Find the scales of all weights after a step, in one message."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)


# ---------------------------------------------------------------------------------- the engines

Engine = tuple[nn.Module, torch.optim.Optimizer]


@dataclass(frozen=True)
class Place:
    """How many ranks there are, of which `tp` share a tensor, and how many copies of the shards."""

    world: int
    tp: int = 1
    copies: int = 1

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Ranks along copies, shards and tp."""
        return self.copies, self.world // self.copies // self.tp, self.tp

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The ranks, with a name for each of the sizes."""
        names = ("copies", "dp", "tp")
        return dist.init_device_mesh("cuda", self.sizes, mesh_dim_names=names)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of all rows."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=True)


def fsdp2(model: Llama, place: Place, settings: dict[str, object]) -> Engine:
    """Torch's own, as torchtitan's recipe uses it; or blocks and the root, without `ends`."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = place.mesh
    how = {
        "mesh": mesh["dp"] if place.copies == 1 else mesh["copies", "dp"],
        "mp_policy": MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=fp32),
    }
    ends = settings.get("ends", True)
    if ends:
        fully_shard(model.embedding, **how)
    for block in model.blocks:
        fully_shard(block, **how)
    if ends:
        fully_shard([model.norm, model.head], **how, reshard_after_forward=False)
    fully_shard(model, **how)
    model.to_empty(device="cuda")
    return model, adamw(model)


def torchtitan(model: Llama, place: Place, settings: dict[str, object]) -> Engine:
    """FSDP2 by the function of torchtitan's own recipe; it takes modules by torchtitan's names."""
    from torchtitan.distributed.fsdp import apply_fsdp_to_decoder

    layers = {str(number): block for number, block in enumerate(model.blocks)}
    names = {"tok_embeddings": model.embedding, "lm_head": model.head, "layers": layers}
    vars(model).update(names, enable_weight_tying=False)  # not registered a second time
    mesh = dist.init_device_mesh("cuda", place.sizes[1:], mesh_dim_names=("dp", "tp"))
    apply_fsdp_to_decoder(model, mesh["dp"], bf16, fp32, pp_enabled=False)
    model.to_empty(device="cuda")
    return model, adamw(model)


def deepspeed(model: Llama, place: Place, settings: dict[str, object]) -> Engine:
    """DeepSpeed's ZeRO-3; its engine has the backward, the clipping and the step."""
    import deepspeed as peer

    model = model.to_empty(device="cuda").to(bf16)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "communication_data_type": "fp32",
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 3, "overlap_comm": True, **settings},
    }
    engine, optimizer, *_ = peer.initialize(model=model, optimizer=adamw(model), config=config)
    return engine, optimizer


def lamina(model: Llama, place: Place, settings: dict[str, object], strategy: int) -> Engine:
    """`lamina.fsdp.fully_shard` with a strategy."""
    from lamina.fsdp import MixedPrecisionPolicy, fully_shard
    from lamina.mesh import ParallelLayout

    policy = MixedPrecisionPolicy(
        param_dtype=bf16, main_params_dtype=fp32, main_grads_dtype=fp32, grad_comm_dtype=fp32
    )
    how = {"zero_dp_strategy": strategy, "mixed_precision_policy": policy, **settings}
    mesh = ParallelLayout(dp_replicate=place.copies, tp=place.tp).build("cuda")
    return fully_shard(model, adamw(model), device_mesh=mesh, **how)


def lamina_ddp(model: Llama, place: Place, settings: dict[str, object]) -> Engine:
    """`lamina.ddp.DistributedDataParallel` over fp32 weights."""
    from lamina.ddp import DistributedDataParallel, DistributedDataParallelConfig
    from lamina.mesh import ParallelLayout

    model = model.to_empty(device="cuda")
    wrapped = DistributedDataParallel(
        model, DistributedDataParallelConfig(**settings), ParallelLayout().build("cuda")
    )
    return wrapped, adamw(wrapped)


def torch_ddp(model: Llama, place: Place, settings: dict[str, object]) -> Engine:
    """Torch's DistributedDataParallel, for the row above."""
    model = model.to_empty(device="cuda")
    wrapped = nn.parallel.DistributedDataParallel(
        model, device_ids=[0], gradient_as_bucket_view=True
    )
    return wrapped, adamw(wrapped)


def megatron_fsdp(model: Llama, place: Place, settings: dict[str, object]) -> Engine:
    """NVIDIA's Megatron-FSDP from PyPI."""
    import megatron_fsdp.param_and_grad_buffer as buffers
    import megatron_fsdp.uneven_dtensor as uneven
    from megatron_fsdp import fully_shard
    from megatron_fsdp.mixed_precision import MixedPrecisionPolicy

    # It compares what all ranks say of their shards; here one rank's words come back from all.
    buffers.validate_uneven_dtensor = uneven.validate_uneven_dtensor = lambda *_, **__: None
    model = model.to(bf16)
    policy = MixedPrecisionPolicy(
        main_params_dtype=fp32, main_grads_dtype=fp32, grad_comm_dtype=fp32
    )
    return fully_shard(
        model, adamw(model), mixed_precision_policy=policy,
        device_mesh=dist.init_device_mesh("cuda", place.sizes[1:], mesh_dim_names=("dp", "tp")),
        dp_shard_dim="dp", tp_dim="tp", fsdp_unit_modules=[Block], zero_dp_strategy=3,
        init_model_with_meta_device=True, **settings,
    )  # fmt: skip


Maker = Callable[[Llama, Place, dict[str, object]], Engine]


def strategy(number: int) -> Maker:
    """Return a row of Lamina's `fully_shard`."""
    return lambda model, place, settings: lamina(model, place, settings, number)


ENGINES: dict[str, Maker] = {
    "fsdp2": fsdp2,
    "torchtitan": torchtitan,
    "deepspeed": deepspeed,
    "megatron-fsdp": megatron_fsdp,
    "torch-ddp": torch_ddp,
    "lamina-ddp": lamina_ddp,
    **{f"lamina-{number}": strategy(number) for number in range(4)},
}

# ------------------------------------------------------------------------------ what is measured


@contextmanager
def python_calls(loss_hook: list[Callable[[torch.Tensor], None]]) -> Iterator[Counter[str]]:
    """Count calls of Python functions, also in autograd's thread: a hook of the loss is there."""
    counts: Counter[str] = Counter()

    def note(frame: object, event: str, argument: object) -> None:
        if event == "call":
            counts["calls"] += 1

    loss_hook.append(lambda _: sys.setprofile(note))
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield counts
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        loss_hook.clear()


class Exposed:
    """What a step's compute waits for links until each unit begins, in seconds of virtual time.

    That is how much further it falls behind a run with free links: the set of rates "free" of
    `VGPU_RATES`. What follows the last unit, and clipping and the step, is "the end".
    """

    def __init__(self, model: Llama) -> None:
        self._behind: list[tuple[str, float]] = []
        named = {"embedding": model.embedding, "head": model.head}
        for number, block in enumerate(model.blocks):
            named[f"block {number}"] = block
        for name, module in named.items():
            self._watch(name, module)

    def _watch(self, name: str, module: nn.Module) -> None:
        def on_result(_: nn.Module, __: object, result: torch.Tensor) -> None:
            if result.requires_grad:
                result.register_hook(lambda _: self.note(f"{name}, backward"))

        module.register_forward_pre_hook(lambda *_: self.note(f"{name}, forward"))
        module.register_forward_hook(on_result)

    def begin(self) -> None:
        """Begin a step; the device is idle."""
        self._behind.clear()
        self.note("")

    def note(self, name: str) -> None:
        """A unit begins, or the step has ended."""
        import lamina_virtual_gpu as virtual_gpu

        ends = virtual_gpu.stream_ends(torch.cuda.current_stream().cuda_stream)
        self._behind.append((name, ends["own"] - ends["free"]))

    def by_unit(self) -> list[tuple[str, float]]:
        """Return each unit's share, in the order in which they began."""
        pairs = zip(self._behind, self._behind[1:], strict=False)
        return [(name, behind - before) for (_, before), (name, behind) in pairs]


def of_step(step: Callable[[], None]) -> dict[str, object]:
    """Run a step and return what it asked of the device."""
    import lamina_virtual_gpu as virtual_gpu

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()
    begun = virtual_gpu.now_at_rates()
    virtual_gpu.reset()
    real = time.process_time()
    with virtual_gpu.host_waits() as waits:
        step()
    real, host = time.process_time() - real, virtual_gpu.now() - begun["own"]
    seen = virtual_gpu.record()
    torch.cuda.synchronize()
    ended = virtual_gpu.now_at_rates()
    stats = torch.cuda.memory_stats()
    messages = seen.collectives
    gathers = {"ncclAllGather", "ncclBroadcast"}
    reductions = {"ncclReduceScatter", "ncclAlltoAll", "ncclReduce"}

    def messages_in(names: set[str]) -> int:
        return sum(times for name, (times, _) in messages.items() if name in names)

    return {
        "launches": seen.launches,
        "gathers": messages_in(gathers),
        "reductions": messages_in(reductions),
        "all_reductions": messages_in({"ncclAllReduce"}),
        "message_mib": round(sum(amount for _, amount in messages.values()) / (1 << 20), 2),
        "event_records": seen.calls.get("cudaEventRecord", 0),
        "event_waits": seen.calls.get("cudaStreamWaitEvent", 0),
        "host_waits": sum(seen.host_waits.values()),
        "copies": {name: [n, int(size)] for name, (n, size) in seen.copies.items()},
        "allocated_gib": round(stats["allocated_bytes.all.peak"] / GIB, 3),
        "reserved_gib": round(stats["reserved_bytes.all.peak"] / GIB, 3),
        "retries": stats["num_alloc_retries"],
        "device_allocations": seen.calls.get("cudaMalloc", 0) + seen.calls.get("cuMemCreate", 0),
        "device_frees": seen.calls.get("cudaFree", 0) + seen.calls.get("cuMemRelease", 0),
        "allocations": stats["allocation.all.allocated"] - before["allocation.all.allocated"],
        "virtual_seconds": round(ended["own"] - begun["own"], 4),
        "seconds_at_rates": {name: ended[name] - begun[name] for name in ended},
        "virtual_host_seconds": round(host, 4),
        "host_processor_seconds": round(real, 3),
        "teraoperations": round(seen.operations / 1e12, 1),
        "not_modelled": seen.not_modelled,
        "waits_at": [[times, *lines] for lines, times in waits.items()],
    }


def captured(step: Callable[[], None]) -> tuple[Callable[[], None], float]:
    """Take two steps, and capture a third into one CUDA graph.

    Returns what replays it, and how many GiB were reserved until then. Afterwards the cache is
    emptied of what only the first two steps needed.
    """
    graph = torch.cuda.CUDAGraph()
    for _ in range(2):
        step()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        step()
    reserved = torch.cuda.max_memory_reserved() / GIB
    torch.cuda.empty_cache()
    graph.replay()
    return graph.replay, round(reserved, 3)


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean loss of `[batch, tokens, vocabulary]`, in float32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels)


def measure(
    words: argparse.Namespace, of_step: Callable[[Callable[[], None]], dict[str, object]] = of_step
) -> dict[str, object]:
    """Build the model under its engine and return what `of_step` says of a steady step."""
    size, place = SIZES[words.size], Place(words.world, words.tp, words.copies)
    cut = Cut()
    if words.tp > 1 and not words.dtensors:
        cut = Cut(words.tp, dist.new_group(list(range(words.tp))))
    with torch.device("meta"):
        model = Llama(size, cut)
    if words.fp8:
        products_in_fp8(model)
    if words.dtensors:
        cut_by_dtensors(model, place.mesh["tp"])
    if words.recompute:
        recompute(model, words.recompute)
    if words.compiled:
        for number, block in enumerate(model.blocks):
            model.blocks[number] = torch.compile(block, fullgraph=True)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    engine, optimizer = ENGINES[words.engine](model, place, json.loads(words.settings))
    ids = torch.randint(size.vocabulary, (words.batch, size.tokens + 1), device="cuda")
    loss_hook: list[Callable[[torch.Tensor], None]] = []
    plain = words.engine.endswith("ddp")
    loss_of = torch.compile(cross_entropy) if words.compiled_loss else cross_entropy

    def step() -> None:
        with torch.autocast("cuda", bf16, enabled=plain):
            logits = engine(ids[:, :-1])
        loss = loss_of(logits, ids[:, 1:].reshape(-1))
        del logits
        for hook in loss_hook:
            loss.register_hook(hook)
        if words.engine == "deepspeed":
            engine.backward(loss)
            engine.step()
            return
        loss.backward()
        nn.utils.clip_grad_norm_(engine.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if words.fp8:
            scales_of_fp8(engine)

    more: dict[str, object] = {}
    if words.graph == "elsewhere":
        torch.autograd.graph.set_override_stale_capture_stream(True)
        torch.cuda.set_stream(torch.cuda.Stream())
    if words.graph:
        step, more["reserved_until_captured_gib"] = captured(step)
    else:
        for _ in range(2):
            step()
    exposed = Exposed(model) if words.units else None

    def watched() -> None:
        if exposed:
            exposed.begin()
        step()
        if exposed:
            exposed.note("the end")

    result = of_step(watched)
    if exposed:
        result["exposed_by_unit"] = exposed.by_unit()
    with python_calls(loss_hook) as calls:
        step()
    return {
        "engine": words.engine,
        "size": words.size,
        "world": words.world,
        "tp": words.tp,
        "parameters": parameters,
        **result,
        **more,
        "python_calls": calls["calls"],
    }


def words_of(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Return what `measure` takes, by the words of a command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=ENGINES, required=True)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--world", type=int, default=8)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument(
        "--dtensors", action="store_true", help="tp by DTensors, of fsdp2: tokens and loss too"
    )
    parser.add_argument("--copies", type=int, default=1, help="of the shards: HSDP")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--recompute", nargs="?", const="full", choices=("full", "selective"))
    parser.add_argument("--fp8", action="store_true", help="products of blocks by torchao")
    parser.add_argument("--compiled", action="store_true", help="compile each block")
    parser.add_argument(
        "--graph", nargs="?", const="own", choices=("own", "elsewhere"),
        help="replay a step in one CUDA graph, whose stream wraps the model, or another one",
    )  # fmt: skip
    parser.add_argument("--units", action="store_true", help="exposed seconds of each unit too")
    parser.add_argument("--settings", default="{}", help="further arguments of the engine, as JSON")
    parser.add_argument("--compiled-loss", action="store_true")
    return parser.parse_args(given)


def main() -> None:
    """Play rank 0, and print one line."""
    words = words_of()
    local = {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": words.world,
        "LOCAL_WORLD_SIZE": min(8, words.world),
        # Of more ranks torch has several name the communicator, and the others do not exist.
        "TORCH_NCCL_RANKS_PER_ROOT": words.world,
    }
    os.environ.update({name: str(value) for name, value in local.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29577")
    torch.cuda.set_device(0)
    if words.graph == "own":
        torch.cuda.set_stream(torch.cuda.Stream())  # nothing is captured on the default stream
    backend = "cpu:fake,cuda:nccl"
    # A group that is bound to a device makes others by splitting, and NCCL's stand-in does not know
    # how many ranks a part has.
    bound = torch.device("cuda:0") if words.tp == words.copies == 1 else None
    dist.init_process_group(
        backend, store=dist.HashStore(), rank=0, world_size=words.world, device_id=bound
    )
    try:
        with loss_parallel() if words.dtensors else nullcontext():
            result = measure(words)
    except torch.OutOfMemoryError as error:
        result = {"engine": words.engine, "size": words.size, "out_of_memory": str(error)}
    print(json.dumps(result), flush=True)
    os._exit(0)  # the process group's threads wait for ranks that do not exist
