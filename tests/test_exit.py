"""When `destroy_process_group()` returns, no thread of gloo is left, whatever the program holds.

Such a thread may drop the last reference to a tensor while the interpreter ends, and then the
process aborts, now and then, on a busy machine. So the threads are counted, and nothing is left to
chance. Each case makes what a program would, keeps everything that it was given, and destroys the
groups. See Note [Nothing of ours holds a group] in lamina.mesh.groups.process_groups.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lamina.buffers import BufferLayout, FlatBuffer, Partial, Shard, TensorSpec
from lamina.checkpoint import CheckpointManager, Preemption
from lamina.collectives import (
    Ledger,
    all_gather_into,
    all_reduce_fp32,
    all_to_all,
    all_to_all_tokens,
    copy_to,
    gather,
    gather_from,
    reduce,
    reduce_from,
    reduce_scatter_fp32,
    reduce_scatter_to,
    scatter_to,
    send_recv,
)
from lamina.collectives.engine import (
    CommonFacts,
    OrderedReduction,
    SmallReduction,
    SpanGroups,
    all_reduce_small,
    broadcast,
    ring,
    start_all_gather,
    start_all_reduce,
    start_all_to_all,
    start_reduce_scatter,
)
from lamina.ddp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    HealthMonitor,
    ReplicaMonitor,
    ShardedOptimizer,
    clip_grad_norm,
    finalize_grads,
)
from lamina.fsdp import (
    TorchFullyShardedDataParallel,
    TorchFullyShardedDataParallelConfig,
    fully_shard,
    shard_module,
)
from lamina.mesh import ParallelLayout, init_distributed
from lamina.models import GPTModel, MoEConfig, TransformerConfig, pipeline

WORLD = 2


def gloo_threads() -> list[str]:
    """Names of the threads of this process that belong to a gloo group."""
    names = [
        task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir()
    ]
    return [name for name in names if "gloo" in name]


def busy_threads() -> list[str]:
    """Threads of Lamina's that do anything but wait for work, and where they are."""
    frames, busy = sys._current_frames(), []
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        if thread.name.startswith("lamina") and frame is not None:
            code = frame.f_code
            if code.co_name != "_run_all":  # the loop of an idle lane, in Python's own queue
                busy.append(f"{thread.name} in {code.co_filename}:{frame.f_lineno}")
    return busy


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.BatchNorm1d(8))


def trained(net: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[object, ...]:
    """Two steps; the loss, whose graph a program may keep."""
    losses = []
    for _ in range(2):
        loss = net(torch.ones(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return net, optimizer, *losses


def collectives(group: dist.ProcessGroup) -> Iterator[object]:
    """Each of them, asynchronous where it can be, and its handle; some are never waited for."""
    shard, whole = torch.ones(4), torch.ones(4 * WORLD)
    handles = [
        reduce_scatter_fp32(shard.clone(), whole, group, async_op=True),
        all_reduce_fp32(whole.clone(), whole, group, async_op=True),
        all_gather_into(whole.clone(), shard, group, async_op=True),
        all_to_all(whole.clone(), whole, group, async_op=True),
        broadcast(whole, group, async_op=True),
        send_recv([shard], group),
        start_all_gather(shard, group),
        start_all_reduce(shard, group),
        start_all_reduce(shard, group, reduction="native"),
        start_reduce_scatter(whole, group),
        start_reduce_scatter(whole, group, reduction="native"),
        start_all_to_all(whole, group),
    ]
    for handle in handles[::2]:
        handle.wait()
    yield handles
    yield list(ring([shard], group))
    reduction = OrderedReduction(shard, whole, group, scatter=True)
    yield reduction, reduction.start(shard, whole)
    small = SmallReduction([shard], group)
    small.reduce([shard])
    all_reduce_small([torch.ones(2, dtype=torch.int64)], group)
    facts = CommonFacts("a test", [group])
    facts.require([("fact", "value")])
    reach = SpanGroups([group])
    reach.all_reduce(shard, "sum")
    yield small, facts, reach
    with Ledger() as ledger:
        all_gather_into(whole, shard, group)
    yield ledger


def regions(group: dist.ProcessGroup) -> Iterator[object]:
    """The autograd regions, with their graphs."""
    for region in (
        lambda x: copy_to(x, group),
        lambda x: reduce_from(x, group),
        lambda x: scatter_to(x, group),
        lambda x: gather_from(x, group, grad="reduce_scatter"),
        lambda x: reduce_scatter_to(x, group),
        lambda x: all_to_all_tokens(x, group),
    ):
        result = region(torch.ones(4, 4, requires_grad=True))
        result.sum().backward()
        yield result


def buffers(group: dist.ProcessGroup) -> Iterator[object]:
    mesh = ParallelLayout().build("cpu")
    layout = BufferLayout.plan([TensorSpec("q", (8, 4))], num_shards=WORLD)
    shard = FlatBuffer(layout, Shard(), mesh=mesh["dp_shard"])
    terms = FlatBuffer(layout, Partial(), mesh=mesh["dp_shard"])
    axis = mesh.axis("dp_shard")
    yield mesh, shard, terms, axis
    yield gather(shard, torch.empty(layout.size), axis.group, async_op=True)
    yield reduce(terms, torch.empty(layout.size), axis.sibling("reduce"), async_op=True)


def on_both_meshes(make: Callable[..., object]) -> Iterator[object]:
    """Once over a mesh of Lamina's, once over one of torch's."""
    for mesh in (
        ParallelLayout().build("cpu"),
        init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp_shard",)),
    ):
        yield mesh, make(mesh)


def ddp(group: dist.ProcessGroup) -> Iterator[object]:
    for sharded in (False, True):
        for reduction in ("ordered", "native"):
            config = DistributedDataParallelConfig(
                use_distributed_optimizer=sharded, overlap_grad_reduce=True, reduction=reduction
            )

            def make(mesh: object, config: DistributedDataParallelConfig = config) -> object:
                net = DistributedDataParallel(model(), config, mesh)
                optimizer = torch.optim.AdamW(net.parameters())
                if config.use_distributed_optimizer:
                    optimizer = ShardedOptimizer(optimizer, net, mesh)
                return trained(net, optimizer), net.state_dict(), optimizer.state_dict()

            yield from on_both_meshes(make)


def strategy(number: int) -> Callable[[dist.ProcessGroup], Iterator[object]]:
    def cases(group: dist.ProcessGroup) -> Iterator[object]:
        def make(mesh: object) -> object:
            net = model()
            sharded = fully_shard(
                net,
                torch.optim.AdamW(net.parameters()),
                device_mesh=mesh,
                fsdp_unit_modules=[nn.Linear],
                zero_dp_strategy=number,
                check_order=number == 3,
            )
            kept = trained(*sharded)
            return kept, sharded[0].state_dict(), sharded[1].state_dict()

        yield from on_both_meshes(make)

    return cases


def by_module(group: dist.ProcessGroup) -> Iterator[object]:
    def make(mesh: object) -> object:
        net = model()
        for part in (net[0], net[2], net):
            shard_module(part, mesh)
        return trained(net, torch.optim.AdamW(net.parameters()))

    yield from on_both_meshes(make)


def of_torch(group: dist.ProcessGroup) -> Iterator[object]:
    def make(mesh: object) -> object:
        net = TorchFullyShardedDataParallel(model(), TorchFullyShardedDataParallelConfig(), mesh)
        return trained(net, torch.optim.AdamW(net.parameters()))

    yield from on_both_meshes(make)


def monitors(group: dist.ProcessGroup) -> Iterator[object]:
    mesh = ParallelLayout().build("cpu")
    net = DistributedDataParallel(model(), mesh=mesh)
    health, replicas = HealthMonitor(), ReplicaMonitor(net, steps=1)
    loss = net(torch.ones(4, 8)).mean()
    health.note(loss)
    loss.backward()
    finalize_grads([net], mesh)
    yield net, mesh, clip_grad_norm(net, 1.0, mesh, health=health, replicas=replicas)
    yield health, replicas


def managers(group: dist.ProcessGroup) -> Iterator[object]:
    folder = Path(os.environ["EXIT_TEST_FOLDER"])
    net = model()
    net, optimizer = fully_shard(net, torch.optim.AdamW(net.parameters()))
    kept = trained(net, optimizer)
    for name, in_background in (("a", False), ("b", True)):
        manager = CheckpointManager(folder / name, async_save=in_background)
        state = {"model": net, "optimizer": optimizer}
        manager.save(1, state)
        yield manager, state, kept
    yield manager.wait(), manager.restore(state)
    manager.save(2, state)  # this one is in flight when the groups end
    preemption = Preemption()
    preemption.requested()
    yield preemption


TINY = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_heads": 2,
    "vocab_size": 32,
    "max_sequence_length": 16,
}


def parallel_models(group: dist.ProcessGroup) -> Iterator[object]:
    tokens = torch.arange(16).view(2, 8)
    for layout, words in (
        (ParallelLayout(tp=2), {}),
        (ParallelLayout(tp=2), {"sequence_parallel": True}),
        (ParallelLayout(cp=2), {}),
        (ParallelLayout(ep=2), {"moe": MoEConfig(num_experts=4, top_k=2)}),
    ):
        mesh = layout.build("cpu")
        net = GPTModel(TransformerConfig(**TINY, **words), mesh)
        loss = net(tokens[:, : 8 // layout.cp], labels=tokens[:, : 8 // layout.cp])
        loss.sum().backward()
        yield mesh, net, loss
    mesh = ParallelLayout(pp=2).build("cpu")
    runner = pipeline(GPTModel(TransformerConfig(**TINY), mesh), mesh, num_microbatches=2)
    yield mesh, runner, runner.step(tokens, tokens)


CASES = {
    "collectives": collectives,
    "regions": regions,
    "buffers": buffers,
    "ddp": ddp,
    **{f"strategy-{number}": strategy(number) for number in range(4)},
    "shard_module": by_module,
    "torch's FSDP2": of_torch,
    "monitors": monitors,
    "managers": managers,
    "models": parallel_models,
}


@pytest.mark.ranks(WORLD, init=False, reuse=False)
@pytest.mark.parametrize("start", ["torch", "lamina"])
@pytest.mark.parametrize("name", CASES)
def test_no_thread_is_left_when_the_groups_are_destroyed(name, start, ranks, tmp_path, monkeypatch):
    monkeypatch.setenv("EXIT_TEST_FOLDER", str(tmp_path))
    kept: list[object] = []
    if start == "torch":
        dist.init_process_group("gloo")
    else:
        kept.append(init_distributed(device="cpu"))
    # What is counted is there. A thread has its name a moment after it has begun.
    deadline = time.monotonic() + 30
    while not gloo_threads():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    kept += CASES[name](dist.group.WORLD)
    dist.destroy_process_group()
    assert (gloo_threads(), busy_threads()) == ([], [])
    assert kept


ROOT = Path(__file__).parents[1]
EXAMPLES = {
    "simple_loop": "simple_loop.py",
    "four_axes": "four_axes.py",
    "custom_stack": "custom_stack/train.py --steps 5",
    "own_layer": "own_layer/train.py --steps 5",
    "huggingface": "huggingface/train.py --steps 3 --output {folder}/{{job}}",
    "mamba": "mamba/train.py --steps 3",
    "moe": "moe/train.py --steps 3",
    "multimodal": "multimodal/train.py --steps 3",
    "main job": "pretrain/train.py --tiny --train.steps 5 --eval.tokens 64 --eval.samples 0 "
    "--log.no-tensorboard --data.path {examples}/pretrain --run.directory {folder}/{{job}}",
}


def ends_with_status_0(jobs: int, busy: int, *program: str) -> None:
    """Run jobs to the end of their interpreters, beside busy loops; see exit_jobs.py."""
    words = [sys.executable, str(ROOT / "tests" / "exit_jobs.py"), str(jobs), str(busy), *program]
    run = subprocess.run(words, capture_output=True, text=True)
    assert run.stdout.startswith(f"{jobs} of {jobs} jobs"), run.stdout + run.stderr[-4000:]


def test_every_example_is_among_the_jobs():
    found = {path.relative_to(ROOT / "examples").as_posix() for path in ROOT.glob("examples/*.py")}
    found |= {f"{path.parent.name}/train.py" for path in ROOT.glob("examples/*/train.py")}
    assert found == {words.split()[0] for words in EXAMPLES.values()}


@pytest.mark.slow
def test_200_jobs_beside_twelve_busy_loops_end_with_status_0():
    ends_with_status_0(200, 12)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_and_the_main_job_end_with_status_0_on_a_busy_machine(name, tmp_path, monkeypatch):
    if name == "huggingface":
        pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    words = EXAMPLES[name].format(examples=ROOT / "examples", folder=tmp_path).split()
    ends_with_status_0(5, 12, str(ROOT / "examples" / words[0]), *words[1:])
