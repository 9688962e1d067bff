"""`--dry-run`: what each rank of a run would hold, compute and send.

One process plays rank 0 of a world that is not there (torch's fake process group), and takes one
step on meta tensors, which have shapes and no memory. So the numbers are the engine's own, and a
model of any size takes seconds on a laptop.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

import torch
from build import Shape, compute_dtype, make_model, model_shape, shard_whole, whole_size
from config import Config, check, unused
from data import load_tokenizer
from options import load, refusals
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lamina.collectives import Ledger
from lamina.ddp import finalize_grads, memory_plan
from lamina.fsdp import ShardedModule
from lamina.mesh import LayoutError, ParallelMesh, init_distributed
from lamina.models import training_flops_per_token
from lamina.models.engine import cut_layers

_META = torch.device("meta")


def dry_run(arguments: list[str]) -> None:
    """Print the plan of a run; exit with status 2 if it cannot run, and say why."""
    with refusals():
        config = load(arguments, "cpu")
        with init_distributed("fake", rank=0, world_size=ranks_of(config)) as runtime:
            check(config, runtime.world_size)
            print(*unused(config, "cuda"), *plan(config), sep="\n")


def ranks_of(config: Config) -> int:
    """The ranks that were asked for, or the fewest that fill the mesh."""
    for ranks in range(1, 1 << 20) if config.ranks < 1 else ():
        try:
            config.layout().validate(ranks)
        except LayoutError:
            continue
        return ranks
    return config.ranks


def plan(config: Config) -> list[str]:
    """Lines about mesh, memory and messages of the first rank; products in FP8 count as bf16."""
    if config.train.precision == "fp8":  # which torch has no meta form of
        config = replace(config, train=replace(config.train, precision="bf16"))
    mesh = config.layout().build("cpu")
    train, length = config.train, config.model.sequence_length
    whole = model_shape(config, load_tokenizer(config.data.tokenizer).vocab_size)
    dp, pp = mesh.axis("dp"), mesh.axis("pp").size
    shape = _stage(whole, pp, length)
    sequences = max(len(part.samples) for part in config.parts(dp.size - 1, dp.size))
    ids = torch.zeros(sequences, length, dtype=torch.int64, device=_META)
    batch = shape.arguments(ids, ids)
    saved = _activations(make_model(shape, config, mesh), config, batch)
    model, optimizer = shard_whole(make_model(shape, config, mesh), config, mesh, _META)
    memory = memory_plan(model)
    moments = 2 * memory.main_grads  # AdamW's, in fp32 as main gradients are
    in_flight = min(pp, train.microbatches)  # of the first stage under 1f1b
    held = {
        "optimizer state": moments,
        f"activations of {in_flight} passes": in_flight * saved,
        "all at the peak": memory.peak + moments + in_flight * saved,
    }
    sent = _bytes_sent(model, optimizer, batch, mesh, len(config.parts(0, dp.size)))
    if pp > 1:  # forwards one way and gradients the other
        hidden = sequences * length // mesh.axis("cp").size * shape.language.hidden_size
        element = (compute_dtype(config, _META) or torch.float32).itemsize
        sent["pp"] += 2 * train.microbatches * hidden * element // mesh.axis("tp").size
    sent["all"] = sum(sent.values())
    flops = training_flops_per_token(whole.language, length) / 1e9
    ranks = mesh.layout.world_size
    note = f" with the dearest of {pp} stages, embedding and head" if pp > 1 else ""
    return [
        f"{config.model.name}: {whole_size(whole) / 1e9:.3f} billion parameters, {flops:.2f} GFLOP "
        f"per token, {train.batch_size} sequences of {length} tokens per step",
        f"\n{ranks} ranks, planned by this one process, which plays rank 0 and uses no device"
        f"\n{mesh.describe(max_ranks=8).partition(chr(10))[2]}",
        f"\nmemory of a rank{note}\n{memory}",
        *_rows(held),
        "\nbytes that a rank sends per step",
        *_rows(sent),
    ]


def _rows(sizes: dict[str, int]) -> list[str]:
    return [f"{name:<28}{size / 2**20:12.2f} MiB" for name, size in sizes.items()]


def _stage(shape: Shape, stages: int, length: int) -> Shape:
    """The pipeline stage with the most layers, as a model."""
    language, layers = shape.language, range(shape.language.num_layers)
    if stages > 1:
        layers = max(cut_layers(language, stages, length), key=len)
    changes: dict[str, Any] = {"num_layers": len(layers)}
    if language.layer_pattern is not None:
        changes["layer_pattern"] = "".join(language.layer_pattern[layer] for layer in layers)
    if language.moe is not None:
        # On meta tensors nobody knows which tokens an expert gets: as many as all others do.
        first = max(0, language.moe.first_dense - layers[0])
        changes["moe"] = replace(
            language.moe, first_dense=first, capacity_factor=1.0, pad_to_capacity=True
        )
    return replace(shape, language=replace(language, **changes))


def _activations(model: nn.Module, config: Config, batch: dict[str, Any]) -> int:
    """Bytes that a forward leaves for its backward."""
    model = model.to(compute_dtype(config, _META) or torch.float32)
    with Alive() as alive, FlashAttention():
        loss = model(**batch)  # as long as this is there, so is what backward needs
        # Of now: recomputation empties storages that it keeps.
        held = sum(storage.nbytes() for storage in alive.made.values())
    del loss
    return held


class Alive(TorchDispatchMode):
    """Knows the storages that operators inside have made and that something still refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.made = WeakValueDictionary[int, torch.UntypedStorage]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and note what it makes: not what it was given."""
        output, given = func(*args, **(kwargs or {})), _storages((args, kwargs))
        self.made.update({k: held for k, held in _storages(output).items() if k not in given})
        return output


def _storages(tree: Any) -> dict[int, torch.UntypedStorage]:
    tensors = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    return {held._cdata: held for held in map(torch.Tensor.untyped_storage, tensors)}


class FlashAttention(TorchFunctionMode):
    """Attention as GPUs do it: on meta tensors torch would keep the scores for backward."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace attention without a mask."""
        options = kwargs or {}
        if func is not F.scaled_dot_product_attention or options.get("attn_mask") is not None:
            return func(*args, **options)
        query, key, value = args
        # The operator's meta form wants values as wide as keys, which latent attention's are not.
        wide = F.pad(value, (0, query.shape[-1] - value.shape[-1]))
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, wide, is_causal=True)[0][..., : value.shape[-1]]


def _bytes_sent(
    model: ShardedModule,
    optimizer: torch.optim.Optimizer,
    batch: dict[str, Any],
    mesh: ParallelMesh,
    microbatches: int,
) -> Counter[str]:
    """Bytes by axis: the passes before the last one are alike, so one of them is played."""
    sent: Counter[str] = Counter()
    for last in (False, True) if microbatches > 1 else (True,):
        with Ledger() as ledger, nullcontext() if last else model.no_sync():
            model(**batch).backward()
            if last:
                finalize_grads(model, mesh)
                optimizer.step()
        for record in ledger.records:
            sent[record.axis] += record.bytes * (1 if last else microbatches - 1)
    return sent
