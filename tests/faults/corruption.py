"""One flipped bit in a run: is it caught, by whom, after how many steps, at what cost?

`python tests/faults/corruption.py [--write]` plays each case on forked ranks, and `--write` writes
docs/corruption.md. Each case is a job of its own, beside one of the same setup without a fault.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import socket
import sys
import time
import traceback
import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

sys.path.append(str(Path(__file__).resolve().parents[1]))
from source_trees import commit

from lamina.collectives.reduction.codec import Wire
from lamina.collectives.reduction.ordered import OrderedReduction
from lamina.collectives.reduction.summation import _BlockSum
from lamina.ddp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    HealthMonitor,
    ReplicaMonitor,
    ShardedOptimizer,
    clip_grad_norm,
    full_parameters,
)
from lamina.ddp.engine import groups_of
from lamina.fsdp import fully_shard
from lamina.mesh import ParallelLayout, init_distributed

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "corruption.md"

FAULT_STEP, ROUND, STEPS = 4, 6, 12
VICTIM = 1
LOW_BIT, HIGH_BIT = 16, 30  # of fp32: 1/128 of the value, and the exponent's highest

RANKS = {"DDP": 3, "ZeRO-1": 2, "ZeRO-3": 2, "HSDP of ZeRO-3": 4, "tp with ZeRO-3": 2}
LAYOUTS = {"HSDP of ZeRO-3": {"dp_replicate": 2, "dp_shard": 2}, "tp with ZeRO-3": {"tp": 2}}
ALONE = ("sum", "main weights", "optimizer state")
"""What there is to flip where tp ranks hold copies, and read the same batch."""
PLACES = (
    "send buffer",
    "received buffer",
    "sum",
    "main weights",
    "optimizer state",
    "gathered weights",
    "replica's weights",
)


@dataclass(frozen=True)
class Case:
    """A flipped bit; without a place, a run without one."""

    setup: str
    place: str = ""
    bit: int = LOW_BIT
    reduction: str = "ordered"


@dataclass
class Seen:
    """What became of it.

    Attributes:
        by: what caught it; empty if nothing did.
        steps: optimizer steps with the fault before it was caught.
        message: what was said.
        weights: at the end, if the run reached it.
    """

    by: str = ""
    steps: int = 0
    message: str = ""
    weights: torch.Tensor | None = None


def cases():
    """All of the table."""
    for setup in RANKS:
        for place in PLACES:
            if place == "gathered weights" and "ZeRO-3" not in setup:
                continue
            if setup.startswith("tp") and place not in ALONE:
                continue
            if place == "replica's weights" and setup == "ZeRO-3":
                continue
            wire = place in ("send buffer", "received buffer")
            for reduction in ("ordered", "checked") if wire else ("ordered",):
                yield Case(setup, place, LOW_BIT, reduction)
        yield Case(setup, "main weights", HIGH_BIT)


# ------------------------------------------------------------------------ a rank


def flip(tensor, bit, element=0):
    """Flip a bit of one element, as a fault would: no version counter knows."""
    raw = tensor.detach().data.reshape(-1)[element : element + 1].view(torch.uint8)
    raw[bit // 8] ^= 1 << bit % 8


def flip_on_the_wire(case, armed):
    """Plant the faults of the send buffer, and of the received one."""
    reduce, encode = OrderedReduction._reduce, Wire.encode
    leaf, check = _BlockSum._leaf, Wire.check

    def peers_part(flat, rank, size):
        """An element of what another rank than this one will sum."""
        return flat.numel() // size * ((rank + 1) % size)

    def reduce_flipped(self, task):
        if self.rank == VICTIM and self._wire.plain and armed():
            flip(task.terms, case.bit, peers_part(task.terms, self.rank, self.size))
        return reduce(self, task)

    def encode_flipped(self, values, wire, piece):
        encode(self, values, wire, piece)
        size = RANKS[case.setup]
        if dist.get_rank() == VICTIM and armed():
            flip(wire, case.bit % 8, peers_part(wire, VICTIM, size) + 8 + case.bit // 8)

    def leaf_flipped(self, rank, into, depth):
        found = leaf(self, rank, into, depth)
        if dist.get_rank() == VICTIM and rank != VICTIM and self._wire.plain and armed():
            flip(found, case.bit)
        return found

    def check_flipped(self, wire, sender):
        if dist.get_rank() == VICTIM and sender != VICTIM and armed():
            flip(wire, case.bit % 8, 8 + case.bit // 8)
        check(self, wire, sender)

    if case.place == "send buffer":
        yield mock.patch.object(OrderedReduction, "_reduce", reduce_flipped)
        yield mock.patch.object(Wire, "encode", encode_flipped)
    elif case.place == "received buffer":
        yield mock.patch.object(_BlockSum, "_leaf", leaf_flipped)
        yield mock.patch.object(Wire, "check", check_flipped)


def build(case, width=64):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Linear(width, 16))
    mesh = ParallelLayout(**LAYOUTS.get(case.setup, {})).build("cpu")
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    if case.setup == "DDP":
        config = DistributedDataParallelConfig(reduction=case.reduction)
        model = DistributedDataParallel(module, config, mesh)
        return model, ShardedOptimizer(optimizer, model, mesh), mesh
    strategy = int(case.setup[-1])
    model, optimizer = fully_shard(
        module,
        optimizer,
        device_mesh=mesh,
        fsdp_unit_modules=[nn.Linear],
        zero_dp_strategy=strategy,
        reduction=case.reduction,
    )
    return model, optimizer, mesh


def flip_at_rest(place, bit, model, optimizer):
    """Flip a bit of the victim's state; of the first parameter of which it holds something."""
    for group in groups_of(model):
        for index, main in enumerate(group.main_parameters):
            start, stop = group.spans[index]
            local = group.weights.local.span_view(index)
            if place == "main weights" and start < stop:
                return flip(group.main_weights.data, bit, start)
            if place == "replica's weights" and local.numel():
                # Where main weights are cut, the piece of another rank: a copy and nothing else.
                cut = group.main_weights.data.numel() < group.weights.local.data.numel()
                whole = group.weights.local.data
                behind = group.main_weights.data.numel() * (1 - VICTIM) if cut else start
                return flip(whole, bit, behind)
            if place == "optimizer state" and start < stop:
                held = optimizer.state[main]["exp_avg"]
                return flip(held.to_local() if hasattr(held, "to_local") else held, bit)
            if place == "sum" and start < stop:
                return flip(group.gradients_to_step.data, bit, start)
    raise AssertionError(f"nothing to flip for {place}")


def train(case, rank):
    """Train with all guards on; return what was seen on this rank."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    model, optimizer, mesh = build(case)
    health = HealthMonitor(spike="stop", least=2)
    replicas = ReplicaMonitor(model, optimizer, mesh, steps=ROUND)
    now, used = -1, False

    def armed():
        nonlocal used
        fires = now == FAULT_STEP and not used
        used = used or fires
        return fires

    def at_rest(place):
        if case.place == place and rank == VICTIM and armed():
            flip_at_rest(place, case.bit, model, optimizer)

    def flip_gathered(module, _):
        if case.place == "gathered weights" and rank == VICTIM and armed():
            flip(module.weight, case.bit)

    # After the hooks that gather the unit.
    next(m for m in model.modules() if isinstance(m, nn.Linear)).register_forward_pre_hook(
        flip_gathered
    )
    with ExitStack() as planted:
        for patch in flip_on_the_wire(case, armed):
            planted.enter_context(patch)
        for now in range(STEPS):
            at_rest("main weights")
            at_rest("optimizer state")
            data = 0 if case.setup.startswith("tp") else rank
            generator = torch.Generator().manual_seed(100 * now + data)
            loss = model(torch.randn(8, 16, generator=generator)).square().mean()
            at_rest("replica's weights")
            health.note(loss)
            try:
                loss.backward()
                clip_grad_norm(model, 1.0, mesh, health=health, replicas=replicas)
                at_rest("sum")
            except (RuntimeError, FloatingPointError) as error:
                return Seen(type(error).__name__, now - FAULT_STEP, str(error))
            optimizer.step()
            optimizer.zero_grad()
    whole = torch.cat([value.reshape(-1) for value in full_parameters(model).values()])
    return Seen(weights=whole)


def costs(rank):
    """Seconds of a step under DDP: the sum plain and checked, and the digests; the least of 12."""
    torch.set_num_threads(1)
    found = {}
    for reduction in ("ordered", "checked"):
        case = Case("DDP", reduction=reduction)
        torch.manual_seed(0)
        module = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
        mesh = ParallelLayout().build("cpu")
        model = DistributedDataParallel(
            module, DistributedDataParallelConfig(reduction=case.reduction), mesh
        )
        adamw = torch.optim.AdamW(module.parameters(), lr=1e-4)
        optimizer = ShardedOptimizer(adamw, model, mesh)
        replicas, x = ReplicaMonitor(model, optimizer, mesh), torch.randn(64, 1024)
        steps, digests = [], []
        for _ in range(14):
            begun = time.perf_counter()
            model(x).square().mean().backward()
            at = time.perf_counter()
            replicas.message(torch.device("cpu"))
            digests.append(time.perf_counter() - at)
            clip_grad_norm(model, 1.0, mesh)
            optimizer.step()
            optimizer.zero_grad()
            steps.append(time.perf_counter() - begun)
        found[reduction], found["digest"] = min(steps[2:]), sorted(digests[2:])[6]
        found["bytes"] = replicas.nbytes
    return found


# ------------------------------------------------------------------------ all ranks


def main_of_rank(body, rank, ranks, port, results):
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
        try:
            init_distributed("gloo")
            results.send(body(rank))
        except BaseException:
            results.send(Seen("broken", message=traceback.format_exc()))
        time.sleep(1)  # let the peers tell what they know
        os._exit(0)


def run_ranks(body, ranks, limit=60.0):
    """What each rank returned; None of those that had nothing to say once another one had."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    context = multiprocessing.get_context("fork")
    pipes, members = [], []
    for rank in range(ranks):
        mine, its = context.Pipe(duplex=False)
        member = context.Process(target=main_of_rank, args=(body, rank, ranks, port, its))
        member.start()
        pipes.append(mine)
        members.append(member)
    heard: list = [None] * ranks
    end = time.monotonic() + limit
    while None in heard and time.monotonic() < end:
        for rank, pipe in enumerate(pipes):
            if heard[rank] is None and pipe.poll(0.02):
                heard[rank] = pipe.recv()
                if isinstance(heard[rank], Seen) and heard[rank].by:
                    end = min(end, time.monotonic() + 2)
    for member in members:
        member.kill()
        member.join()
    return heard


GUARDS = ("DamagedMessageError", "ReplicaError", "FloatingPointError")


def play(case):
    """What became of a case, over all ranks: the first guard that told."""
    heard = run_ranks(lambda rank: train(case, rank), RANKS[case.setup])
    for guard in GUARDS:
        told = [one for one in heard if one is not None and one.by == guard]
        if told:
            return told[0]
    wrong = [one for one in heard if one is None or one.by]
    if wrong:
        raise RuntimeError(f"{case}: {heard}")
    return heard[VICTIM]


# ------------------------------------------------------------------------ the page

INTRODUCTION = f"""\
# Silent corruption

A bit that flips in memory or on the way makes no error by itself. This page shows what catches it.
In each case one bit of rank 1 flips once, in step {FAULT_STEP} of {STEPS}, in a model in fp32. The
guards that are on are `HealthMonitor`, `ReplicaMonitor(steps={ROUND})`
([ddp](ddp.md#are-copies-still-equal)), and in the rows with "checked" `reduction="checked"`
([collectives](collectives.md#what-travels-codecs)). `steps` is 64 by default, so what takes k of
{ROUND} steps here takes up to 64 there.

"Bit {LOW_BIT}" changes a number by a 128th at most, and "bit {HIGH_BIT}" is the highest of the
exponent. "Left" says how much the last weights differ from those of a run without the fault.
"""

RULES = """\
## The rule

- State that other ranks hold too is caught within a round by `ReplicaMonitor`. Three copies name
  the odd one, two name both.
- A gradient that changes between the sender's buffer and the sum is caught at once, if the sum is
  checked. The checksum sees neither a flip before the gradients are encoded, nor one in the sum.
- A sum that is wrong on one replica makes its weights and optimizer state wrong. So
  `ReplicaMonitor` names that replica, one step later at the earliest.
- State that one rank alone holds is not caught (ZeRO-1 to ZeRO-3 without `dp_replicate`). Nor is a
  wrong sum that all ranks then hold alike.
- A copy that is written anew before its share is compared is not caught: compute weights under
  ZeRO-1, gathered weights.
- A high bit of an exponent often makes a spike or a NaN, which `HealthMonitor` tells. In these runs
  a `tanh` hid such a weight under ZeRO-1 and ZeRO-3.

Checksums are off by default, because a checked sum costs a copy and two passes over the gradients.
They need sums on a CPU. On a GPU the host would wait for each sum, so `reduction="checked"` is
refused there. Gathers carry no checksums.
"""


def row(case, seen, clean):
    if seen.by:
        verdict = f"caught by `{seen.by}`"
        after = f"{seen.steps}"
        left = ""
    else:
        difference = float((seen.weights - clean.weights).abs().max())
        verdict, after = "escaped", ""
        left = f"{difference:.1g}" if difference else "nothing"
    message = seen.message.replace("|", "/").replace("`", "'").replace(platform.node(), "HOST")
    message = f"`{message.split('. Restore')[0]}`" if message else ""
    place = case.place + (", checked" if case.reduction == "checked" else "")
    return f"| {place}, bit {case.bit} | {verdict} | {after} | {left} | {message} |"


def page(found, cost, begun):
    lines = [
        INTRODUCTION,
        f"Written by `python tests/faults/corruption.py --write` at {commit()}, {begun}, torch",
        f"{torch.__version__}, Python {platform.python_version()}, gloo, 2 cores.",
        "",
        RULES,
    ]
    for setup, ranks in RANKS.items():
        rows = [row(case, seen, clean) for case, seen, clean in found if case.setup == setup]
        head = ["| flipped | verdict | steps before | left | message |", "| --- " * 5 + "|"]
        lines += [f"## {setup}, {ranks} ranks", "", *head, *rows, ""]
    if cost:
        plain, checked, digest = (cost[name] * 1e3 for name in ("ordered", "checked", "digest"))
        mib = cost["bytes"] / 2**20
        lines += [
            "## What it costs",
            "",
            "DDP with AdamW on 2 ranks of one thread, 8.4 M parameters in fp32, 64 rows per rank.",
            "The least of 12 steps, and the median of 12 digests.",
            "",
            "| | ms | share of a step |",
            "| --- | --- | --- |",
            f"| a step | {plain:.1f} | 1 |",
            f"| digests of 1/64 of {mib:.0f} MiB | {digest:.2f} | {digest / plain:.2%} |",
            f"| a step with checked sums | {checked:.1f} | {checked / plain:.2f} |",
        ]
    return "\n".join(lines).rstrip() + "\n"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true", help="write docs/corruption.md")
    parser.add_argument("-k", default="", help="play cases only that have this in their words")
    given = parser.parse_args()
    found, clean = [], {}
    for case in cases():
        if given.k not in str(case):
            continue
        key = case.setup
        clean[key] = clean.get(key) or play(Case(case.setup))
        seen = play(case)
        found.append((case, seen, clean[key]))
        print(f"{case.setup}: {row(*found[-1])}", flush=True)
    if given.write:
        heard = run_ranks(costs, 2)
        PAGE.write_text(page(found, heard[0], time.strftime("%Y-%m-%d")))


if __name__ == "__main__":
    main()
