"""Training steps whose order of streams is recorded: each a function of a `Recording`.

They run within `recorded_order()`, so this process is one rank of a simulated world: rank 0, or
the one that `SEATS` names.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.utils.checkpoint import checkpoint

from lamina.checkpoint.save.staging import Stage
from lamina.collectives import all_gather_into, reduce_scatter_fp32
from lamina.collectives.transport.lanes import lane_of
from lamina.collectives.transport.peer_windows import PeerWindow
from lamina.ddp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    ShardedOptimizer,
    clip_grad_norm,
)
from lamina.fsdp import MixedPrecisionPolicy, fully_shard
from lamina.fsdp.api import build as api
from lamina.fsdp.weights import offloaded
from lamina.mesh import ParallelLayout
from lamina.models import (
    GPTModel,
    MoEConfig,
    RecomputePolicy,
    TransformerBlock,
    TransformerConfig,
    apply_recompute,
    pipeline,
)
from lamina.models.activation_memory import offload
from lamina.models.decoder import gpt as decoder
from lamina_testing.capture import Capture, capturing
from lamina_testing.order import CUDA, Recording, Site, recorded_order
from lamina_testing.toys import Block, OddNet, inputs

ROOT = Path(__file__).resolve().parents[1]
RANKS = 4
STEPS = 2
WAITS = {"wait", "wait_event", "wait_stream", "synchronize", "record_stream"}
Scenario = Callable[[Recording], None]


def there(recording: Recording, thing: Any) -> Any:
    """Return a module or tensor where the scenario runs; its copy is not recorded."""
    with recording.unseen():
        return thing.to(recording.device)


def data(recording: Recording, model: nn.Module, step: int) -> torch.Tensor:
    """A batch for a toy model."""
    batch: torch.Tensor = there(recording, inputs(model, step))
    return batch


def tokens(recording: Recording, rows: int = 2) -> torch.Tensor:
    """A batch of tokens, the same in each run."""
    drawn = torch.randint(0, 64, (rows, 17), generator=torch.Generator().manual_seed(0))
    batch: torch.Tensor = there(recording, drawn)
    return batch


@contextlib.contextmanager
def on_a_cpu(recording: Recording, *patches: Any) -> Iterator[None]:
    """Replace what would take the CPU's tensors for those of a CPU."""
    with contextlib.ExitStack() as stack:
        for patch in () if recording.on_gpu else patches:
            stack.enter_context(patch)
        yield


def train(
    recording: Recording, model: nn.Module, optimizer: Any, mesh: Any, first: nn.Module
) -> None:
    """Two steps of two microbatches, with clipping."""
    for step in range(STEPS):
        batch = data(recording, first, step)
        with model.no_sync():
            model(batch).float().square().mean().backward()
        model(batch).float().square().mean().backward()
        clip_grad_norm(model, 1.0, mesh)
        optimizer.step()
        optimizer.zero_grad()


@contextlib.contextmanager
def stream_of_its_own() -> Iterator[None]:
    """Another stream than the one on which everything was made, as for warming up a graph."""
    before, own = torch.cuda.current_stream(), torch.cuda.Stream()
    own.wait_stream(before)
    with torch.cuda.stream(own):
        yield
    before.wait_stream(own)


def sharded(
    layout: dict[str, int] | None = None,
    net: Callable[[int], nn.Module] = OddNet,
    where: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    **settings: Any,
) -> Scenario:
    """A scenario of `fully_shard` with these settings; steps run `where` a context says."""

    def run(recording: Recording) -> None:
        torch.manual_seed(0)
        model = there(recording, net(11))
        mesh = ParallelLayout(**layout or {}).build(recording.device.type)
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
        wrapped, optimizer = fully_shard(
            model, adamw, device_mesh=mesh, fsdp_unit_modules=[Block], **settings
        )
        with where():
            train(recording, wrapped, optimizer, mesh, model)

    return run


class Branched(OddNet):
    """The second block runs on another stream, beside the third; their results are added."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, 5] to [batch, 3]."""
        main, side = torch.cuda.current_stream(), torch.cuda.Stream()
        x = self.blocks[0](self.enter(x))
        side.wait_stream(main)
        with torch.cuda.stream(side):
            x.record_stream(side)
            beside = self.blocks[1](x)
        x = self.blocks[2](x)
        main.wait_stream(side)
        beside.record_stream(main)
        out: torch.Tensor = self.leave(x + beside) * self.temperature
        return out


class Captured(OddNet):
    """Captures each block as `torch.cuda.make_graphed_callables` does, in the second step.

    Forward is one graph and backward another. The hooks of the unit run outside of both. `fault`
    makes the block do what a graph cannot hold.
    """

    fault = ""
    recording: Recording | None = None

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.captures: list[Capture] = []
        self.inputs: list[torch.Tensor] = []
        self.calls = 0
        for block in self.blocks:
            block.forward = functools.partial(self.captured, block, block.forward)

    def captured(self, block: nn.Module, run: Callable[..., Any], x: torch.Tensor) -> Any:
        """Run a block, between its unit's hooks."""
        self.calls += 1
        first = 2 * len(self.blocks)  # two microbatches in the step before
        if self.recording is None or not first < self.calls <= first + len(self.blocks):
            return run(x)
        given = x.detach().clone().requires_grad_()
        weights = [given, *block.parameters()]
        with capturing(self.recording) as forward:
            out = run(given)
            side = torch.cuda.Stream()
            if self.fault == "the host reads":
                out.sum().item()
            if self.fault in ("no join", "no fork"):
                if self.fault == "no join":
                    side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    torch.zeros(3)
        with capturing(self.recording, forward) as backward:
            torch.autograd.grad(out, weights, torch.ones_like(out))
        self.captures += [forward, backward]
        self.inputs.append(given)
        return run(x)


def captured_blocks(fault: str = "", **settings: Any) -> tuple[list[str], int]:
    """What is wrong with the graphs of all blocks, and how much of what they use has moved."""

    def net(width: int) -> Captured:
        made.append(Captured(width))
        made[0].fault = fault
        return made[0]

    made: list[Captured] = []
    slots = mock.patch.object(api, "refuse_unavailable")  # refuses a CPU
    with recorded_order(RANKS) as recording, slots:
        with mock.patch.object(Captured, "recording", recording):
            sharded(net=net, **settings)(recording)
        breaks = [what for capture in made[0].captures for what in capture.breaks]
        return sorted(set(breaks)), sum(one.moved(recording) for one in made[0].captures)


class Recomputed(OddNet):
    """Blocks run again in backward, and one is used twice."""

    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, 5] to [batch, 3]."""
        x = self.enter(x)
        for block in (*self.blocks, self.blocks[0]):
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        out: torch.Tensor = self.leave(x) * self.temperature
        return out


class RecomputedInside(Recomputed):
    """A backward runs inside the backward."""

    reentrant = True


def several_forwards(recording: Recording) -> None:
    """Two forwards before their backwards, as 1F1B has them, then an evaluation."""
    torch.manual_seed(0)
    model = there(recording, OddNet(11))
    mesh = ParallelLayout().build(recording.device.type)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
    wrapped, optimizer = fully_shard(model, adamw, device_mesh=mesh, fsdp_unit_modules=[Block])
    for step in range(STEPS):
        losses = [wrapped(data(recording, model, step + k)).square().mean() for k in range(2)]
        with wrapped.no_sync():
            losses[0].backward()
        losses[1].backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            wrapped(data(recording, model, step))


def backward_elsewhere(recording: Recording) -> None:
    """A forward on a stream of its own, and its backward called from the first stream."""
    torch.manual_seed(0)
    model = there(recording, OddNet(11))
    mesh = ParallelLayout().build(recording.device.type)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
    wrapped, optimizer = fully_shard(model, adamw, device_mesh=mesh, fsdp_unit_modules=[Block])
    for step in range(STEPS):
        with stream_of_its_own():
            loss = wrapped(data(recording, model, step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def ddp(
    net: Callable[[int], nn.Module] = OddNet,
    where: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    **settings: Any,
) -> Scenario:
    """A scenario of `DistributedDataParallel`; steps run `where` a context says."""

    def run(recording: Recording) -> None:
        torch.manual_seed(0)
        model = there(recording, net(11))
        mesh = ParallelLayout().build(recording.device.type)
        config = DistributedDataParallelConfig(bucket_size=400, **settings)
        wrapped = DistributedDataParallel(model, config, mesh)
        optimizer: Any = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
        if config.use_distributed_optimizer:
            optimizer = ShardedOptimizer(optimizer, wrapped, mesh)
        with where():
            train(recording, wrapped, optimizer, mesh, model)

    return run


def dropped(recording: Recording) -> None:
    """Reductions whose handle and tensors nobody keeps."""
    group = ParallelLayout().build(recording.device.type).group("dp")
    for _ in range(3):
        shard = torch.empty(100, device=recording.device)
        whole = torch.ones(RANKS * 100, device=recording.device)
        reduce_scatter_fp32(shard, whole, group, async_op=True)
        del whole
        torch.full((RANKS * 100,), -1.0, device=recording.device)
        shard.add_(1.0)


def offloaded_weights(recording: Recording) -> None:
    """Shards, main grads and the optimizer on the host."""

    class OnDevice(offloaded.SideStream):
        def __init__(self, device: torch.device) -> None:
            super().__init__(CUDA)

    with on_a_cpu(recording, mock.patch.object(offloaded, "SideStream", OnDevice)):
        torch.manual_seed(0)
        model = there(recording, OddNet(11))
        mesh = ParallelLayout().build(recording.device.type)
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
        wrapped, optimizer = fully_shard(
            model, adamw, device_mesh=mesh, fsdp_unit_modules=[Block],
            offload_policy=CPUOffloadPolicy(pin_memory=recording.on_gpu),
        )  # fmt: skip
        for group in wrapped.parameter_groups():
            main = group.gradients.main.data if group.gradients else group.main_weights.data
            recording.on_host(group.main_weights.data, group.weights.local.data, main)
        for step in range(STEPS):
            wrapped(data(recording, model, step)).square().mean().backward()
            with torch.no_grad():
                wrapped(
                    data(recording, model, step)
                )  # its copies to the device may still read the shards
            optimizer.step()
            optimizer.zero_grad()


SMALL = TransformerConfig(
    vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, ffn_size=32, max_sequence_length=32
)
MOE = MoEConfig(num_experts=4, top_k=2, ffn_size=32, shared_ffn_size=32)
PADDED = replace(MOE, capacity_factor=2.0, pad_to_capacity=True)


def gpt(recording: Recording, config: TransformerConfig, mesh: Any = None) -> GPTModel:
    """A model that is made on the host, where its ranks compare their seeds, and moved."""
    compare = decoder.check_same_seed

    def compared(*args: Any, **kwargs: Any) -> None:
        with recording.all_on_host():
            compare(*args, **kwargs)

    with on_a_cpu(recording, mock.patch.object(decoder, "check_same_seed", compared)):
        model: GPTModel = there(recording, GPTModel(config, mesh, seed=0))
    return model


def transformer(layout: dict[str, int], **settings: Any) -> Scenario:
    """A scenario of a GPT over several axes under strategy 3."""

    def run(recording: Recording) -> None:
        mesh = ParallelLayout(**layout).build(recording.device.type)
        model = gpt(recording, replace(SMALL, **settings), mesh)
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
        wrapped, optimizer = fully_shard(
            model, adamw, device_mesh=mesh, fsdp_unit_modules=[TransformerBlock]
        )
        batch = tokens(recording)
        for _ in range(STEPS):
            wrapped(batch[:, :-1], labels=batch[:, 1:]).backward()
            clip_grad_norm(wrapped, 1.0, mesh)
            optimizer.step()
            optimizer.zero_grad()

    return run


def pipelined(schedule: str, pp: int = 2) -> Scenario:
    """A scenario of a pipeline over strategy 3, with four layers and four microbatches."""

    def run(recording: Recording) -> None:
        mesh = ParallelLayout(pp=pp).build(recording.device.type)
        model = gpt(recording, replace(SMALL, num_layers=4), mesh)

        def shard(stage: nn.Module) -> nn.Module:
            return fully_shard(stage, device_mesh=mesh, fsdp_unit_modules=[TransformerBlock])

        runner = pipeline(model, mesh, schedule, 4, wrap=shard, each_microbatch=True)
        adamw = torch.optim.AdamW(runner.parameters(), lr=1e-3)
        batch = tokens(recording, 4)
        for _ in range(STEPS):
            runner.step(batch[:, :-1], batch[:, 1:])
            clip_grad_norm(runner, 1.0, mesh)
            adamw.step()
            adamw.zero_grad()

    return run


def offloaded_activations(recording: Recording) -> None:
    """Saved tensors go to the host and come back, block by block."""
    make = offload.Offloader.__init__
    streams = offload._Streams(CUDA)
    with on_a_cpu(
        recording,
        mock.patch.object(offload.Offloader, "__init__", lambda one, *_: make(one, ("cpu",))),
        mock.patch.object(offload.Offloader, "_streams_of", return_value=streams),
    ):
        model = there(recording, GPTModel(replace(SMALL, num_layers=3), seed=0))
        apply_recompute(model, RecomputePolicy(kind="offload", min_numel=16))
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(STEPS):
            batch = tokens(recording)
            model(batch[:, :-1], labels=batch[:, 1:]).backward()
            sgd.step()
            sgd.zero_grad()
        # A graph that ends while copies are under way that nobody has taken.
        loss = model(batch[:, :-1], labels=batch[:, 1:])
        torch.autograd.grad(loss, list(model.blocks[-1].parameters()))
        del loss
        model(batch[:, :-1], labels=batch[:, 1:]).backward()


def staged_checkpoint(recording: Recording) -> None:
    """Copies for a save are queued, training goes on, and the writer reads them on the host."""
    stage, weights = Stage(), torch.ones(1000, device=recording.device)
    with on_a_cpu(
        recording,
        mock.patch.object(torch.Tensor, "is_cuda", True),
        mock.patch.object(torch.cuda, "is_available", return_value=True),
    ):
        for _ in range(STEPS):
            offer = stage.plan({"weights": weights}, coordinator=True)
            staged = stage.copy(offer, known=False)
            weights.mul_(2.0)
            staged.ready()
            for copy in staged.tensors.values():
                copy.sum()  # as the writer does, on the host


class Peers:
    """The blocks of four ranks, of which one is recorded; the other three do what it does.

    Before a barrier each has filled an area of its own block. After it, each reads this rank's.
    """

    def __init__(self, recording: Recording, block: torch.Tensor) -> None:
        self._recording, self._turn = recording, 0
        with recording.unseen():
            self._blocks = [block, *(torch.zeros_like(block) for _ in range(RANKS - 1))]
        self.buffer_ptrs = [0] * RANKS

    def get_buffer(
        self, rank: int, sizes: Any, dtype: torch.dtype, storage_offset: int = 0
    ) -> torch.Tensor:
        """A part of a rank's block."""
        return self._blocks[rank].view(dtype)[storage_offset : storage_offset + sizes[0]]

    def area(self, rank: int, turn: int, writes: bool) -> Any:
        """The bytes of one of the two areas of a rank's block."""
        return self._recording.access(self._blocks[rank].chunk(2)[turn], writes)

    def areas(self) -> list[Any]:
        """What a sum reads: the area that was filled before the last barrier, of each rank."""
        return [self.area(rank, 1 - self._turn, writes=False) for rank in range(RANKS)]

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        """Streams of all ranks meet. A capture of this rank's stream knows nothing of the peers."""
        history, peers = self._recording.history, [f"peer {rank}" for rank in range(1, RANKS)]
        for rank, peer in enumerate(peers, 1):
            history.run(peer, "fill", [self.area(rank, self._turn, writes=True)])
        streams = [self._recording.current, *peers]
        for event in [history.record(stream) for stream in streams]:
            for stream in streams:
                history.wait(stream, event)
        for peer in peers:
            history.run(peer, "read", [self.area(0, self._turn, writes=False)])
        self._turn = 1 - self._turn


def windows(recording: Recording) -> None:
    """Sums and gathers of GPUs that read each other's memory, on two streams at once.

    The last gather is captured into a graph, of which its waits must be a part.
    """
    from lamina.collectives.reduction import triton_sum

    group = ParallelLayout().build("cpu").group("dp")
    block = torch.zeros(2 * RANKS * 1024 * 4, dtype=torch.uint8)
    peers = Peers(recording, block)
    window = PeerWindow(block, peers, rank=0)
    window._order = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    lane_of(group).windows[block.device] = window

    def launch(rows: Any, output: torch.Tensor, *_: Any) -> int:
        found = [*peers.areas(), recording.access(output, writes=True)]
        recording.run(recording.current, "sum of windows", found)
        return 1024

    own, shard = torch.ones(2500), torch.empty(2500)
    whole, pieces = torch.empty(RANKS * 2500), torch.ones(RANKS * 2500)
    with mock.patch.object(triton_sum, "_launch", launch):
        for _ in range(STEPS):
            gather = all_gather_into(whole, own, group, async_op=True)
            reduce_scatter_fp32(shard, pieces, group, statistics=False)
            gather.wait()
            whole.mul_(2.0)
            reduction = reduce_scatter_fp32(shard, pieces, group, async_op=True, statistics=False)
            all_gather_into(whole, own, group)
            reduction.wait()
            own.copy_(shard)
    with capturing(recording) as capture:
        all_gather_into(whole, own, group)
    if capture.breaks:
        raise RuntimeError("; ".join(capture.breaks))


def facts_by_nccl(recording: Recording) -> None:
    """A job without gloo: facts of the hosts travel between GPUs."""
    recording.facts_on_host = False
    sharded()(recording)


SCHEDULES = (
    "1f1b", "gpipe", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble",
    "zbv_zero_bubble", "dualpipev",
)  # fmt: skip
SCENARIOS: dict[str, Scenario] = {
    **{f"strategy {number}": sharded(zero_dp_strategy=number) for number in range(4)},
    "HSDP": sharded({"dp_replicate": 2}),
    "HFSDP": sharded({"dp_replicate": 2}, outer_dp_sharding_strategy=1),
    "slots": sharded(fsdp_double_buffer=True),
    "bf16": sharded(mixed_precision_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
    "native sums": sharded(reduction="native"),
    "native sums, averaged": sharded(reduction="native", average_in_collective=True),
    "reproducible sums": sharded(reproducible=True),
    "sums in slices": sharded(net=lambda _: OddNet(48), reduce_message_bytes=512),
    "int8 sums": sharded(reduction="int8"),
    "checked sums": sharded(reduction="checked"),
    "no overlap": sharded(overlap_grad_reduce=False, overlap_param_gather=False),
    "budgets": sharded(gather_budget=16_000, reduce_budget=8_000),
    "a stream of its own": sharded(where=stream_of_its_own),
    "strategy 0, a stream of its own": sharded(where=stream_of_its_own, zero_dp_strategy=0),
    "DDP, a branch beside a stream of its own": ddp(net=Branched, where=stream_of_its_own),
    "a backward on another stream": backward_elsewhere,
    "recomputation, a block used twice": sharded(net=Recomputed),
    "reentrant recomputation": sharded(net=RecomputedInside),
    "two forwards before their backwards": several_forwards,
    "DDP": ddp(),
    "DDP, sharded optimizer": ddp(use_distributed_optimizer=True, overlap_param_gather=True),
    "dropped handles": dropped,
    "facts by NCCL": facts_by_nccl,
    "windows": windows,
    "offload": offloaded_weights,
    "offload, one rank": offloaded_weights,
    "tp 2": transformer({"tp": 2}),
    "cp 2": transformer({"cp": 2}),
    "sequence parallelism": transformer({"tp": 2}, sequence_parallel=True),
    "ep 2": transformer({"ep": 2}, moe=MOE),
    "ep 2, padded": transformer(
        {"ep": 2}, moe=replace(MOE, capacity_factor=2.0, pad_to_capacity=True)
    ),
    "offloaded activations": offloaded_activations,
    "staged checkpoint": staged_checkpoint,
    **{f"{schedule}, first stage": pipelined(schedule) for schedule in SCHEDULES},
    **{f"{schedule}, last stage": pipelined(schedule) for schedule in ("1f1b", "zbv_zero_bubble")},
    "1f1b, a stage between": pipelined("1f1b", pp=4),
}
SEATS = {name: 2 for name in SCENARIOS if "last stage" in name} | {"1f1b, a stage between": 1}
"""Which rank records; rank 0 where none is named."""
WORLDS = {"offload, one rank": 1}
"""How many ranks there are; RANKS where none is named."""


def record(name: str, without: Site | None = None, device: str = "cpu") -> Recording:
    """Record a scenario, perhaps without one of its waits, or on a GPU."""
    ranks = WORLDS.get(name, RANKS)
    with recorded_order(ranks, without, SEATS.get(name, 0), device) as recording:
        SCENARIOS[name](recording)
    return recording


def races_without(name: str, site: Site, device: str = "cpu") -> list[str]:
    """Return the races of a scenario from which a wait was deleted.

    What was overwritten too early may also be noticed by the engine itself, which then raises.
    """
    ranks = WORLDS.get(name, RANKS)
    with recorded_order(ranks, site, SEATS.get(name, 0), device) as recording:
        try:
            SCENARIOS[name](recording)
        except Exception as error:
            return [*recording.races, f"{type(error).__name__}: {error}"]
    return recording.races


def measure(
    names: Iterable[str], device: str = "cpu"
) -> tuple[list[list[str]], dict[Site, list[str]]]:
    """Record scenarios, then delete each of their waits; return rows, and who caught each wait."""
    rows, caught = [], {}
    for name in names:
        whole = record(name, device=device)
        found = {site: bool(races_without(name, site, device)) for site in sorted(whole.waits)}
        for site, seen in found.items():
            caught.setdefault(site, []).extend([name] if seen else [])
        numbers = [whole.history.nodes, len(whole.races), sum(whole.waits.values())]
        deleted = f"{sum(found.values())} of {len(found)}"
        rows.append([name, *map(str, numbers), deleted])
        print(*rows[-1], sep=" | ", flush=True)
    return rows, caught


def unvisited(caught: Iterable[Site]) -> dict[str, list[int]]:
    """Return the lines of the packages that wait, by their text, and that no scenario came by."""
    found: dict[str, list[int]] = {}
    seen = {(site.file, site.line) for site in caught}
    for path in sorted(ROOT.glob("packages/*/src/lamina/**/*.py")):
        file = path.relative_to(ROOT).as_posix().partition("/src/lamina/")[2]
        for node in ast.walk(ast.parse(path.read_text())):
            called = node.func if isinstance(node, ast.Call) else None
            if not isinstance(called, ast.Attribute) or called.attr not in WAITS:
                continue
            lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            if not any((file, line) in seen for line in lines):
                found.setdefault(file, []).append(node.lineno)
    return found


def page(rows: list[list[str]], caught: dict[Site, list[str]]) -> Iterator[str]:
    """Yield the record in Markdown."""
    git = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    commit = subprocess.run(git, capture_output=True, text=True, cwd=ROOT).stdout.strip()
    yield "# The order of streams\n"
    yield f"`python3 noxfile.py -s order -- --keep` at `{commit}` on {time.strftime('%Y-%m-%d')},"
    yield f"torch {torch.__version__}, {RANKS} simulated ranks. No GPU took part: the engine's code"
    yield "for CUDA ran on a CPU with streams that only record (`lamina_testing.order`).\n"
    yield "A race is two accesses of the same bytes, one of which writes, that no chain of waits"
    yield "orders. Each line of the packages that waited was then deleted, and the scenario was"
    yield "recorded again: the last column counts the lines whose deletion was seen.\n"
    yield "| scenario | nodes | races | waits | deleted lines seen |"
    yield "| --- | --- | --- | --- | --- |"
    yield from (f"| {' | '.join(row)} |" for row in rows)
    yield "\n| line that waits | scenarios in which its deletion is seen |"
    yield "| --- | --- |"
    for site, names in sorted(caught.items()):
        yield f"| `{site}` | {len(names)}{': ' + names[0] if names else ''} |"
    yield "\nThese lines call `wait` or its like too. No scenario comes by them with work under"
    yield "way. Many of them wait at once for what they have begun, or only pass a wait on.\n"
    for file, lines in unvisited(caught).items():
        yield f"- `{file}`: {', '.join(map(str, sorted(lines)))}"
    yield "\n## What this does not show\n"
    yield "- Another order in which the host queues work, such as that of hooks on another model."
    yield "- Whether autograd's rules for streams, which are written down here, are those of a GPU."
    yield "- Work inside one operator, a Triton kernel or NCCL, and what a captured graph does."
    yield "  `lamina_testing.capture` checks that a block can be captured."
    yield "- Waits of the host for gloo's messages, which move the data of a CPU."
    yield "- What no scenario runs: the lines that stand above."


def main() -> int:
    """Print the table; return 1 for a race, or for a line whose deletion nobody sees.

    With `--cuda` the streams are those of a GPU, or of the virtual one.
    """
    keep, device = "--keep" in sys.argv[1:], "cuda" if "--cuda" in sys.argv[1:] else "cpu"
    words = [word for word in sys.argv[1:] if word not in ("--keep", "--cuda")]
    rows, caught = measure(words or SCENARIOS, device)
    unseen = [site for site, names in caught.items() if not names]
    if keep:
        (ROOT / "docs/records/order.md").write_text("\n".join(page(rows, caught)) + "\n")
    print(f"{len(caught)} lines wait, {len(unseen)} deletions unseen:", *unseen)
    return int(bool(unseen) or any(row[2] != "0" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
