"""Ranks that differ are told so before a step, by name, under every wrapper (BORDER: C)."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from datetime import timedelta

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lamina.checkpoint import CheckpointManager
from lamina.collectives import DisagreementError
from lamina.collectives.engine import all_reduce_small
from lamina.ddp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    ShardedOptimizer,
    clip_grad_norm,
)
from lamina.fsdp import (
    TorchFullyShardedDataParallel,
    TorchFullyShardedDataParallelConfig,
    fully_shard,
    shard_module,
)
from lamina.mesh import ParallelLayout, mark
from lamina.mesh.errors import LayoutError
from lamina.mesh.groups.parallel_mesh import _require_same
from lamina.mesh.groups.process_groups import current_world


@contextmanager
def told(*patterns):
    """The body raises, within 5 s, one error that names all of `patterns`."""
    begun = time.monotonic()
    with pytest.raises(DisagreementError) as caught:
        yield
    assert time.monotonic() - begun < 5
    for pattern in ("rank 1", "rank 0", *patterns):
        assert pattern in str(caught.value), str(caught.value)


def model(width=4, layers=2, dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers - 1)), nn.Linear(4, width)).to(
        dtype
    )


class Named(nn.Module):
    """Two linear layers registered in an order, under names."""

    def __init__(self, *names):
        super().__init__()
        torch.manual_seed(0)
        for name in names:
            self.add_module(name, nn.Linear(4, 4))

    def forward(self, x):
        for _, layer in sorted(self.named_children()):
            x = layer(x)
        return x


def ddp(module, mesh, optimizer=None, **config):
    wrapped = DistributedDataParallel(module, DistributedDataParallelConfig(**config), mesh)
    return wrapped, optimizer and ShardedOptimizer(optimizer, wrapped, mesh)


def ddp_sharded(module, mesh, optimizer=None):
    return ddp(module, mesh, optimizer, use_distributed_optimizer=True)


def whole(module, mesh, optimizer=None):
    return _fsdp(module, mesh, optimizer, 0)


def sharded(module, mesh, optimizer=None):
    return _fsdp(module, mesh, optimizer, 3)


def _fsdp(module, mesh, optimizer, strategy):
    settings = {"device_mesh": mesh, "zero_dp_strategy": strategy}
    if optimizer is None:
        return fully_shard(module, **settings), None
    return fully_shard(module, optimizer, **settings)


def per_module(module, mesh, optimizer=None):
    made = shard_module(module, mesh)
    return made, None


def torch_fsdp2(module, mesh, optimizer=None):
    return TorchFullyShardedDataParallel(module, TorchFullyShardedDataParallelConfig(), mesh), None


WRAPPERS = [ddp, ddp_sharded, whole, sharded, per_module, torch_fsdp2]
TAKE_OPTIMIZERS = [ddp, ddp_sharded, whole, sharded]


def frozen(module):
    module[0].bias.requires_grad_(False)
    return module


def marked(module):
    mark(module[0].weight, block_rows=2)
    return module


MODELS: dict[str, tuple[Callable, Callable, tuple[str, ...]]] = {
    "width": (lambda: model(4), lambda: model(5), ("1.weight (5, 4)", "1.weight (4, 4)")),
    "layers": (model, lambda: model(layers=3), ("number of parameters is 6", "4")),
    "dtype": (model, lambda: model(dtype=torch.bfloat16), ("torch.bfloat16", "torch.float32")),
    "requires_grad": (model, lambda: frozen(model()), ("0.bias (4,)", "requires_grad=False")),
    "role": (model, lambda: marked(model()), ("0.weight", "block_rows=2")),
    "names": (lambda: Named("a", "b"), lambda: Named("a", "c"), ("b.weight", "c.weight")),
    "order": (lambda: Named("a", "b"), lambda: Named("b", "a"), ("a.weight", "b.weight")),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrap", WRAPPERS)
def test_other_models_are_named_before_anything_is_sent(wrap, ranks):
    mesh = ParallelLayout().build()
    for first, second, patterns in MODELS.values():
        with told(*patterns):
            wrap((first, second)[ranks.rank](), mesh)
    wrap(model(), mesh)  # the group has survived


@pytest.mark.ranks(2)
def test_other_settings_and_wrappers_are_named(ranks):
    mesh = ParallelLayout().build()
    with told("zero_dp_strategy is 2 on rank 1", "3 on rank 0"):
        fully_shard(model(), device_mesh=mesh, zero_dp_strategy=3 - ranks.rank)
    with told("bucket_size is 7 on rank 1", "None on rank 0"):
        ddp(model(), mesh, bucket_size=7 if ranks.rank else None)
    with told("the wrapper is fully_shard on rank 1", "DistributedDataParallel on rank 0"):
        (ddp, sharded)[ranks.rank](model(), mesh)


SGD, ADAM = torch.optim.SGD, torch.optim.AdamW
OPTIMIZERS = {
    "class": (lambda p: SGD(p, 0.1), lambda p: ADAM(p, 0.1), ("class is AdamW", "SGD")),
    "lr": (lambda p: SGD(p, 0.1), lambda p: SGD(p, 0.2), ("lr of its group 0 is 0.2", "0.1")),
    "momentum": (lambda p: SGD(p, 0.1), lambda p: SGD(p, 0.1, 0.9), ("momentum", "0.9")),
    "groups": (
        lambda p: SGD(p, 0.1),
        lambda p: SGD([{"params": p[:1]}, {"params": p[1:]}], 0.1),
        ("number of groups is 2", "1"),
    ),
    "order": (lambda p: SGD(p, 0.1), lambda p: SGD(p[::-1], 0.1), ("parameters of its group 0",)),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrap", TAKE_OPTIMIZERS)
def test_other_optimizers_are_named_before_the_first_step(wrap, ranks):
    mesh = ParallelLayout().build()
    for first, second, patterns in OPTIMIZERS.values():
        module = model()
        optimizer = (first, second)[ranks.rank](list(module.parameters()))
        with told(*patterns):
            wrap(module, mesh, optimizer)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrap", TAKE_OPTIMIZERS)
def test_a_learning_rate_that_changes_on_one_rank_is_named_by_the_next_backward(wrap, ranks):
    mesh = ParallelLayout().build()
    module = model()
    wrapped, optimizer = wrap(module, mesh, SGD(module.parameters(), 0.1))
    for rate in (0.1, 0.05):  # alike on both
        optimizer.param_groups[0]["lr"] = rate
        wrapped(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.param_groups[0]["lr"] = 0.05 + ranks.rank
    with told("lr of its group 0 is 1.05 on rank 1", "0.05 on rank 0"):
        wrapped(torch.ones(2, 4)).sum().backward()


@pytest.mark.ranks(2)
def test_hyperparameters_that_are_written_in_place_on_one_rank_are_named(ranks):
    module = model()
    optimizer = torch.optim.AdamW(module.parameters())
    optimizer.param_groups[0]["betas"] = [0.9, 0.99]
    wrapped, optimizer = ddp(module, ParallelLayout().build(), optimizer)
    wrapped(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.param_groups[0]["betas"][0] = 0.9 - 0.1 * ranks.rank  # the list itself stays
    with told("betas of its group 0 is (0.8, 0.99) on rank 1", "(0.9, 0.99) on rank 0"):
        wrapped(torch.ones(2, 4)).sum().backward()


@pytest.mark.ranks(2)
def test_hyperparameters_are_described_again_only_when_they_have_changed(ranks, monkeypatch):
    described = []
    module = model()
    wrapped, optimizer = ddp(module, ParallelLayout().build(), SGD(module.parameters(), 0.1))
    group = sys.modules["lamina.ddp.group.group"]
    original = group.optimizer_facts
    monkeypatch.setattr(group, "optimizer_facts", lambda *a: described.append(1) or original(*a))
    for rate in (0.1, 0.1, 0.1, 0.05):
        optimizer.param_groups[0]["lr"] = rate
        wrapped(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(described) == 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrap", [ddp, whole, sharded])
def test_a_step_that_one_rank_leaves_out_is_named_by_the_next_backward(wrap, ranks):
    mesh = ParallelLayout().build()
    module = model()
    wrapped, optimizer = wrap(module, mesh, SGD(module.parameters(), 0.1))
    wrapped(torch.ones(2, 4)).sum().backward()
    if ranks.rank == 0:
        optimizer.step()
    optimizer.zero_grad()
    with told("steps of SGD is 0 on rank 1", "1 on rank 0"):
        wrapped(torch.ones(2, 4)).sum().backward()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrap", [ddp, per_module])
def test_a_step_of_an_unknown_optimizer_that_one_rank_leaves_out_is_named(wrap, ranks):
    wrapped, _ = wrap(model(), ParallelLayout().build())
    optimizer = SGD(wrapped.parameters(), 0.1)
    for step in range(3):
        expected = told(
            "optimizer that Lamina does not know is not made on rank 1", "made on rank 0"
        )
        with expected if step == 2 else nullcontext():
            wrapped(torch.ones(2, 4)).sum().backward()
        if (step, ranks.rank) != (1, 1):
            optimizer.step()
        optimizer.zero_grad()


@pytest.mark.ranks(2)
def test_other_meshes_are_named_by_the_rank_that_comes_later(ranks):
    current_world().timeout = timedelta(seconds=30)  # as `init_distributed` does
    common = ParallelLayout().build()
    if ranks.rank == 0:
        _require_same(ParallelLayout(dp_shard=2), 0)
    all_reduce_small([torch.zeros(1)], common.axis("dp").group)
    if ranks.rank == 1:
        with pytest.raises(LayoutError, match=r"mesh number 2 .*tp=2.* rank 1, .*tp=1.* on rank 0"):
            ParallelLayout(tp=2).build()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrap", [ddp_sharded, sharded])
@pytest.mark.parametrize("axis", ["tp", "dp_shard"])
def test_a_learning_rate_that_changes_on_one_rank_is_named_by_the_next_norm(wrap, axis, ranks):
    mesh, module = ParallelLayout(**{"dp_shard": 1, axis: 2}).build("cpu"), model()
    wrapped, optimizer = wrap(module, mesh, SGD(module.parameters(), 0.1))
    for step in range(2):
        wrapped(torch.ones(2, 4)).sum().backward()
        optimizer.param_groups[0]["lr"] += step * ranks.rank  # after the backward's message
        wrong = told(
            f"ranks along {axis}", f"lr of its group 0 is 1.1 on rank 1 ({axis}=1)", f"({axis}=0)"
        )
        with wrong if step else nullcontext():
            clip_grad_norm(wrapped, 1.0, mesh)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.ranks(2)
def test_other_device_meshes_over_the_same_group_are_named(ranks):
    names = (("tp", "dp_shard"), ("cp", "dp_shard"))[ranks.rank]
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=names)
    with told("the mesh is ('cp', 'dp_shard') (1, 2) [[0, 1]] on rank 1", "('tp', 'dp_shard')"):
        ddp(model(), mesh)


@pytest.mark.ranks(4)
def test_the_odd_ones_out_and_their_coordinates_are_named(ranks):
    mesh = ParallelLayout(dp_replicate=2, dp_shard=2).build()
    with pytest.raises(DisagreementError) as caught:
        sharded(model(5 if ranks.rank == 2 else 4), mesh)
    assert "on rank 2 (dp_replicate=1, dp_shard=0)" in str(caught.value)
    assert "(5, 4)" in str(caught.value)
    assert "rank 1" not in str(caught.value)
    with pytest.raises(DisagreementError) as caught:
        sharded(model(5 if ranks.rank == 0 else 4), mesh)
    assert "(5, 4)" in str(caught.value)
    assert "on rank 0 (dp_replicate=0" in str(caught.value)
    assert "on rank 1 (dp_replicate=0, dp_shard=1)" in str(caught.value)


@pytest.mark.ranks(2)
def test_other_directories_and_steps_are_named(ranks, tmp_path):
    with told("directory", "/b", "/a"):
        CheckpointManager(tmp_path / "ab"[ranks.rank])
    with told("async_save is True on rank 1"):
        CheckpointManager(tmp_path / "c", async_save=ranks.rank == 1)
    with CheckpointManager(tmp_path / "c") as manager:
        with told("save", "step is 8 on rank 1", "7 on rank 0"):
            manager.save(7 + ranks.rank, {"x": 1})
        manager.save(7, {"x": 1})
        with told("restore", "step is 7 on rank 1", "None on rank 0"):
            manager.restore({"x": 0}, 7 if ranks.rank else None)


@pytest.mark.ranks(2)
def test_a_wrapper_costs_one_small_collective_and_a_step_none(ranks):
    from lamina.collectives import Ledger

    mesh = ParallelLayout().build()
    module = model()
    with Ledger() as made:
        wrapped, optimizer = sharded(module, mesh, SGD(module.parameters(), 0.1))
    small = [record.bytes for record in made.records if record.op == "all_reduce_small"]
    assert small == [32, 32], made.records  # the model's, and the optimizer's
    counts = []
    for _ in range(3):
        with Ledger() as step:
            wrapped(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        counts.append(len(step.records))
    # A gather and a reduction of the one unit, and the flags that were sent before, too.
    assert len(set(counts)) == 1
    assert counts[0] <= 4, [record.op for record in step.records]


@pytest.mark.ranks(2)
def test_other_schedules_and_configurations_of_a_pipeline_are_named(ranks):
    from lamina.models import GPTModel, TransformerConfig, pipeline

    mesh = ParallelLayout(pp=2).build()
    config = TransformerConfig(hidden_size=16, num_layers=2, num_heads=2, vocab_size=32)
    with told("pipeline", "num_microbatches is 3 on rank 1 (pp=1)", "2 on rank 0 (pp=0)"):
        pipeline(GPTModel(config, mesh), mesh, "1f1b", 2 + ranks.rank)
    with told("schedule is 'gpipe' on rank 1"):
        pipeline(GPTModel(config, mesh), mesh, ("1f1b", "gpipe")[ranks.rank], 2)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrap", [ddp_sharded, sharded])
def test_tensor_parallel_ranks_that_differ_in_hyperparameters_are_told(wrap, ranks):
    mesh = ParallelLayout(tp=2).build("cpu")
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1 + ranks.rank)
    with told(
        "ranks along tp", "lr of its group 0 is 1.1 on rank 1 (tp=1)", "0.1 on rank 0 (tp=0)"
    ):
        wrap(module, mesh, optimizer)


@pytest.mark.ranks(2)
def test_tensor_parallel_ranks_that_differ_in_settings_are_told(ranks):
    mesh = ParallelLayout(tp=2).build("cpu")
    with told("ranks along tp", "num_buckets is 2 on rank 1"):
        ddp(model(), mesh, num_buckets=1 + ranks.rank)
