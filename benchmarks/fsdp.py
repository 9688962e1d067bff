"""Lamina's fully_shard beside torch FSDP2 and DDP on one GPT: time, copies, wire, memory.

    python benchmarks/fsdp.py [--ranks 4] [--model 110m] [--bf16] [--fused]     # loopback
    python benchmarks/fsdp.py --mbit 2000       # between two network namespaces (needs root)
    python benchmarks/fsdp.py --transport simulated --ranks 8   # one process as rank 0: memory

All systems are built in the same processes and take turns, a few steps each, so that a noisy
machine hits all alike: trust the ratios. Bytes copied are counted by a dispatch mode (law 3's
operators), bytes sent by Lamina's ledger, or from the operators that torch's systems call. Peak
memory is that of storages that operators make, over one step, less what autograd holds of a forward
of the plain model. All three are counted over one step of their own.

Between namespaces messages are forced (`use_messages`), as ranks of one host would otherwise read
each other's memory past the link; "bound" is the longer of the step without communication and the
bytes sent over the link's speed. Over the simulated transport (`simulated_group`) one process plays
rank 0 of several that share no memory, as over NCCL: its memory and copies mean something, and its
times do not. Systems "in backward" step each parameter in a hook on its gradient, and free that.
With `--bf16` weights and gradients travel and compute in bf16, main weights are fp32.
"""

from __future__ import annotations

import argparse
import gc
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils._python_dispatch import TorchDispatchMode

from lamina.collectives import Ledger
from lamina.collectives.engine import use_messages
from lamina.fsdp import MixedPrecisionPolicy, fully_shard
from lamina.mesh import ParallelLayout, ParallelMesh, init_distributed
from lamina.models import GPTModel, TransformerBlock, TransformerConfig

sys.path.insert(0, str(Path(__file__).parent.parent / "testing" / "src"))
from simulated_group import SimulatedNetwork, simulated_world

from lamina_testing import Meter, live_bytes

SIZES = {"34m": (8, 512, 8192), "110m": (12, 768, 16384)}
"""Layers, width, vocabulary."""


@dataclass
class System:
    """One model under one wrapper."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer | None  # None: parameters are stepped in backward
    seconds: list[float] = field(default_factory=list)
    resident: int = 0
    copied: int = 0
    peak: int = 0
    sent: int = 0

    def step(self, tokens: torch.Tensor) -> None:
        self.model(tokens[:, :-1], labels=tokens[:, 1:]).backward()
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()


def stepped_in_backward(system: System, settings: argparse.Namespace) -> System:
    """The system with an optimizer for each parameter, in a hook that its gradient calls."""
    kind = {"fused": True} if settings.fused else {"foreach": True}
    own = {p: torch.optim.AdamW([p], lr=1e-4, **kind) for p in system.model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        own[parameter].step()
        own[parameter].zero_grad()

    for parameter in own:
        parameter.register_post_accumulate_grad_hook(step)
    return System(f"{system.name}, in backward", system.model, None)


def build(settings: argparse.Namespace) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers, width, vocabulary = SIZES[settings.model]
    model = GPTModel(
        TransformerConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            num_layers=layers,
            num_heads=width // 64,
        )
    )
    kind = {"fused": True} if settings.fused else {"foreach": True}
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, **kind)


def local(settings: argparse.Namespace, mesh: ParallelMesh) -> System:
    return System("no communication", *build(settings))


def ddp(settings: argparse.Namespace, mesh: ParallelMesh) -> System:
    model, optimizer = build(settings)
    wrapped = TorchDDP(model, gradient_as_bucket_view=True)
    if settings.transport == "simulated":
        # A lambda, as torch compares annotations, which are strings in this file.
        wrapped.register_comm_hook(None, lambda _, bucket: summed_bucket(bucket))
    return System("torch DDP", wrapped, optimizer)


def summed_bucket(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """What DDP does by itself: its own hook takes the bucket from the group's future.

    That of the simulated group has none.
    """
    dist.all_reduce(bucket.buffer().div_(dist.get_world_size()))
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def fsdp2(
    reshard: bool, ends: bool = False, in_backward: bool = False
) -> Callable[[argparse.Namespace, ParallelMesh], System]:
    """FSDP2 over blocks and the root; with `ends`, embedding and head are units too."""

    def make(settings: argparse.Namespace, mesh: ParallelMesh) -> System:
        model, _ = build(settings)
        how: dict[str, Any] = {"mesh": mesh["dp_shard"], "reshard_after_forward": reshard}
        if settings.bf16:
            how["mp_policy"] = TorchPolicy(torch.bfloat16, torch.bfloat16)
        for module in model.modules():
            if isinstance(module, TransformerBlock):
                torch_fully_shard(module, **how)
        for name in ("embedding", "head") if ends else ():  # as torchtitan has it
            torch_fully_shard(model.get_submodule(name), **how)
        torch_fully_shard(model, **how)
        kind = {"fused": True} if settings.fused else {"foreach": True}
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **kind)
        more = ("" if reshard else ", no reshard") + (", ends are units" if ends else "")
        system = System("torch FSDP2" + more, model, None if in_backward else optimizer)
        return stepped_in_backward(system, settings) if in_backward else system

    return make


def largest_unit(settings: argparse.Namespace) -> int:
    """Bytes of the gradients of the largest unit."""
    _, width, vocabulary = SIZES[settings.model]
    return max(12 * width * width + 8 * width, vocabulary * width) * (2 if settings.bf16 else 4)


def lamina(
    strategy: int, slots: bool = False, one: bool = False, in_backward: bool = False
) -> Callable[[argparse.Namespace, ParallelMesh], System]:
    def make(settings: argparse.Namespace, mesh: ParallelMesh) -> System:
        model, optimizer = build(settings)
        given = (model,) if in_backward else (model, optimizer)
        fully_shard(
            *given,
            device_mesh=mesh,
            zero_dp_strategy=strategy,
            fsdp_double_buffer=slots,
            reduce_budget=largest_unit(settings) if one else None,
            reduce_message_bytes=int(settings.message_mib * 2**20),
            mixed_precision_policy=MixedPrecisionPolicy(
                param_dtype=torch.bfloat16 if settings.bf16 else None
            ),
        )
        more = (", slots" if slots else "") + (", one in flight" if one else "")
        system = System(f"lamina strategy {strategy}{more}", model, optimizer)
        return stepped_in_backward(system, settings) if in_backward else system

    return make


MAKERS = {
    "local": local,
    "ddp": ddp,
    "fsdp2": fsdp2(True),
    "fsdp2-keep": fsdp2(False),
    "fsdp2-ends": fsdp2(True, ends=True),
    "lamina3": lamina(3),
    "lamina3-slots": lamina(3, slots=True),
    "lamina3-one": lamina(3, one=True),
    "fsdp2-in-backward": fsdp2(True, in_backward=True),
    "lamina3-in-backward": lamina(3, in_backward=True),
    "lamina2": lamina(2),
    "lamina1": lamina(1),
    "lamina0": lamina(0),
}


class Sent(TorchDispatchMode):
    """Bytes that a rank sends in the collectives that torch's own systems call."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count, then run the operator."""
        others = dist.get_world_size() - 1
        name = func._schema.name
        if name == "c10d::_allgather_base_":
            self.bytes += args[1].nbytes * others
        elif name == "c10d::_reduce_scatter_base_":
            self.bytes += args[0].nbytes * others
        elif name == "c10d::allreduce_":
            self.bytes += 2 * sum(t.nbytes for t in args[0]) * others / (others + 1)
        return func(*args, **(kwargs or {}))


def account(system: System, tokens: torch.Tensor, network: SimulatedNetwork | None) -> None:
    """Count one step's copies, wire bytes and peak."""
    before, sent = live_bytes(), 0 if network is None else network.sent
    with Sent() as others, Meter(min_numel=1024) as meter, Ledger() as ledger:
        system.step(tokens)
    system.copied = meter.bytes_copied
    system.peak = meter.peak_live_bytes - before
    system.sent = ledger.bytes() or int(others.bytes)
    if network is not None:  # its operators have tensors without elements
        system.sent = network.sent - sent


def activations(settings: argparse.Namespace, tokens: torch.Tensor) -> int:
    """Bytes that autograd holds of one forward of the plain model."""
    model, _ = build(settings)
    if settings.bf16:
        model.to(torch.bfloat16)
    gc.collect()
    with Meter() as meter:
        before = meter.live_bytes()
        loss = model(tokens[:, :-1], labels=tokens[:, 1:])
        held = meter.live_bytes() - before
    del loss
    return held


def run(
    settings: argparse.Namespace, network: SimulatedNetwork | None = None
) -> tuple[list[System], int]:
    """All systems, measured, and the bytes of activations."""
    mesh = ParallelLayout().build("cpu")
    if settings.mbit:
        for purpose in ("gather", "reduce"):
            use_messages(mesh.axis("dp_shard_cp").sibling(purpose))
    generator = torch.Generator().manual_seed(dist.get_rank())
    vocabulary = SIZES[settings.model][2]

    def tokens() -> torch.Tensor:
        return torch.randint(
            vocabulary, (settings.batch, settings.sequence + 1), generator=generator
        )

    held = activations(settings, tokens())
    systems = []
    for name in settings.systems:
        gc.collect()
        before = live_bytes()
        system = MAKERS[name](settings, mesh)
        for _ in range(2):
            system.step(tokens())
        gc.collect()
        system.resident = live_bytes() - before
        account(system, tokens(), network)
        systems.append(system)
    for _ in range(settings.rounds):
        for system in systems:
            for _ in range(settings.steps):
                dist.barrier()
                begin = time.perf_counter()
                system.step(tokens())
                took = torch.tensor(time.perf_counter() - begin)
                dist.all_reduce(took, dist.ReduceOp.MAX)  # the slowest rank's
                system.seconds.append(float(took))
    return systems, held


def report(systems: Sequence[System], held: int, settings: argparse.Namespace) -> None:
    base = next((s for s in systems if s.name == "torch FSDP2"), systems[0])
    size = sum(p.numel() for p in build(settings)[0].parameters())
    where = f"namespaces at {settings.mbit} mbit, messages" if settings.mbit else "loopback"
    where = "simulated" if settings.transport == "simulated" else where
    print(
        f"{size / 1e6:.1f}M parameters, {dist.get_world_size()} ranks, {where}, "
        f"{'bf16' if settings.bf16 else 'fp32'}, AdamW {'fused' if settings.fused else 'foreach'}, "
        f"activations {held / 2**20:.0f} MiB"
    )
    print(
        f"{'system':<34}{'step ms':>9}{'/FSDP2':>8}{'/bound':>8}{'copied MiB':>12}{'sent MiB':>10}"
        f"{'rest MiB':>10}{'peak - act MiB':>16}{'/FSDP2':>8}"
    )
    middle = {s.name: statistics.median(s.seconds) for s in systems}
    most = {s.name: s.resident + s.peak - held for s in systems}
    for s in systems:
        mine, bound = middle[s.name], "-"
        if settings.mbit and s.sent and "no communication" in middle and settings.ranks == 2:
            wire = 8 * s.sent / (settings.mbit * 1e6)
            bound = f"{mine / max(middle['no communication'], wire):.2f}"
        print(
            f"{s.name:<34}{1e3 * mine:>9.0f}{mine / middle[base.name]:>8.2f}{bound:>8}"
            f"{s.copied / 2**20:>12.0f}{s.sent / 2**20:>10.0f}{s.resident / 2**20:>10.0f}"
            f"{most[s.name] / 2**20:>16.0f}{most[s.name] / most[base.name]:>8.2f}"
        )


def launch(settings: argparse.Namespace) -> None:
    """Start this program as every rank, and print what rank 0 says."""
    program = [sys.executable, __file__, *sys.argv[1:]]
    if settings.mbit:
        from lamina_testing.netns import shaped_link

        with shaped_link(bits_per_second=settings.mbit * 10**6) as link:
            outputs = link.run_ranks(program, ranks_per_namespace=settings.ranks // 2, timeout=1800)
        print(outputs[0], end="")
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    common |= {"WORLD_SIZE": str(settings.ranks), "LOCAL_WORLD_SIZE": str(settings.ranks)}
    ranks = [
        subprocess.Popen(
            program, env={**os.environ, **common, "RANK": str(r), "LOCAL_RANK": str(r)}
        )
        for r in range(settings.ranks)
    ]
    codes = [rank.wait() for rank in ranks]
    if any(codes):
        raise SystemExit("a rank failed")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", choices=list(SIZES), default="34m")
    parser.add_argument("--mbit", type=int, default=0)
    parser.add_argument("--transport", choices=["gloo", "simulated"], default="gloo")
    parser.add_argument("--message-mib", type=float, default=32, help="of a sum's slices")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--fused", action="store_true")
    parser.add_argument("--systems", nargs="+", default=None, choices=list(MAKERS))
    settings = parser.parse_args()
    if settings.systems is None:  # torch DDP has no main weights beside bf16 ones
        left_out = {"lamina3-slots", "lamina3-one", *(("local", "ddp") if settings.bf16 else ())}
        settings.systems = [name for name in MAKERS if name not in left_out]
    if settings.transport == "simulated":
        torch.set_num_threads(1)
        with simulated_world(settings.ranks, 1.0, torch.device("cpu")) as network:
            report(*run(settings, network), settings)
        return
    if "RANK" not in os.environ:
        launch(settings)
        return
    torch.set_num_threads(1)
    with init_distributed() as runtime:
        systems, held = run(settings)
        if runtime.is_main:
            report(systems, held, settings)


if __name__ == "__main__":
    main()
