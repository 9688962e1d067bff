"""One rank of a small job in which something goes wrong: `fault_job.py WRAPPER FAULT PHASE`.

The last rank is the one that misbehaves, in step 2 where the phase is in a step. Every rank writes
one line of JSON at its end: how it ended, and when.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import importlib
import json
import os
import resource
import signal
import socket
import sys
import time
from pathlib import Path

import torch
from torch import nn

STEPS = 4


def model(width=8, order=("first", "second")):
    torch.manual_seed(0)
    made = {name: nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for name in order}
    return nn.ModuleDict({**made, "last": nn.Linear(8, width)})


class Model(nn.Module):
    def __init__(self, **how):
        super().__init__()
        self.parts = model(**how)

    def forward(self, x):
        for name in ("first", "second", "last"):
            x = self.parts[name](x)
        return x


def lamina_world(given):
    from lamina.mesh import ParallelLayout, init_distributed

    runtime = init_distributed(
        timeout=given.timeout, soft_limit=given.soft_limit, verdict_directory=given.directory
    )
    other = given.fault == "mesh" and runtime.rank == runtime.world_size - 1
    if given.fault == "mesh":  # the ranks come one after the other
        mark("differs" if other else "wrap")
        time.sleep(other)
    return runtime, (ParallelLayout(tp=2) if other else ParallelLayout()).build()


def torch_world(given):
    import datetime

    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=given.timeout))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    return contextlib.nullcontext(), mesh


def ddp(module, make, mesh, *, sharded):
    from lamina.ddp import DistributedDataParallel, DistributedDataParallelConfig, ShardedOptimizer

    config = DistributedDataParallelConfig(
        use_distributed_optimizer=sharded, check_for_nan_in_grad=True
    )
    wrapped = DistributedDataParallel(module, config, mesh)
    return wrapped, ShardedOptimizer(make(module.parameters()), wrapped, mesh)


def fully_sharded(module, make, mesh, strategy):
    from lamina.fsdp import fully_shard

    return fully_shard(
        module,
        make(module.parameters()),
        device_mesh=mesh,
        fsdp_unit_modules=[nn.Sequential],
        zero_dp_strategy=strategy,
        report_nan_in_param_grad=True,
    )


def per_module(module, make, mesh):
    from lamina.fsdp import fully_shard_optimizer, shard_module

    for part in (module.parts["first"], module.parts["second"], module):
        shard_module(part, mesh)
    optimizer = make(module.parameters())
    return module, fully_shard_optimizer(optimizer, module)


def torch_fsdp2(module, make, mesh):
    from torch.distributed.fsdp import fully_shard

    for part in (module.parts["first"], module.parts["second"], module):
        fully_shard(part, mesh=mesh)
    return module, make(module.parameters())


WRAPPERS = {
    "ddp": lambda *given: ddp(*given, sharded=False),
    "ddp_sharded": lambda *given: ddp(*given, sharded=True),
    "zero1": lambda *given: fully_sharded(*given, 1),
    "zero3": lambda *given: fully_sharded(*given, 3),
    "shard_module": per_module,
    "torch_fsdp2": torch_fsdp2,
}


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.1)


def other_lr(parameters):
    return torch.optim.SGD(parameters, lr=0.2)


class Faults:
    """What goes wrong, when, and on which rank."""

    def __init__(self, fault, phase, rank, size):
        self.fault, self.phase, self.mine = fault, phase, rank == size - 1
        self.step, self.store = 0, 0

    def here(self, phase):
        late = phase in ("before_wrap", "first_use") or self.step == 2
        if not (self.mine and phase == self.phase and late):
            return
        mark("fault")
        if self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.fault == "exception":
            raise RuntimeError("planted: the batch is broken")
        elif self.fault == "disk":
            unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (2048, unlimited))
        elif self.fault == "exit0":
            os._exit(0)
        elif self.fault == "sleep":
            time.sleep(3600)
        elif self.fault == "dead_store":
            os.kill(self.store, signal.SIGKILL)
            time.sleep(8)  # the others wait for this rank, and cannot ask what it does


def beside(act):
    """Run a function in a process that ends with this one; its number."""
    parent, child = os.getpid(), os.fork()
    if child:
        return child
    act(lambda: os.getppid() == parent)
    os._exit(0)


def serve_store(wanted):
    """Serve the store that the ranks meet at, as torchrun's agent does."""
    from torch.distributed import TCPStore

    port = int(os.environ["MASTER_PORT"])
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    while wanted():
        time.sleep(0.1)
    del store


def intrude(wanted):
    """Call every socket of the ranks that a stranger can find, and say nothing of sense."""
    called, held = set(), []
    while wanted():
        lines = Path("/proc/net/unix").read_text().split("\n")
        names = {line.split()[-1] for line in lines if "@lamina-" in line} - called
        calls = [(socket.AF_UNIX, socket.SOCK_SEQPACKET, "\0" + name[1:]) for name in names]
        if len(held) < 50:
            port = int(os.environ["MASTER_PORT"])
            calls.append((socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", port)))
        for family, kind, address in calls:
            with contextlib.suppress(OSError):
                held.append(socket.socket(family, kind))
                held[-1].settimeout(1)
                held[-1].connect(address)
                held[-1].send(bytes(range(16)))
        called |= names
        time.sleep(0.002)


def mark(what, **more):
    sys.stdout.write(json.dumps({"what": what, "time": time.time(), **more}) + "\n")
    sys.stdout.flush()


def hooked(wrapped, faults):
    """Phases inside forward and backward: at the second block."""
    inner = next(m for name, m in wrapped.named_modules() if name.endswith("parts.second"))
    inner.register_forward_pre_hook(lambda *_: faults.here("forward"))
    inner.register_full_backward_hook(lambda *_: faults.here("backward"))


def train(given, faults, wrapped, optimizer, saver):
    hooked(wrapped, faults)
    rank = int(os.environ["RANK"])
    for faults.step in range(STEPS):
        faults.here("step")
        batch = torch.ones(4, 8) * (1 + rank)
        if faults.fault == "nan" and faults.mine and faults.step == 2:
            mark("fault")
            batch = batch * float("nan")
        if faults.fault == "skip_unit" and faults.mine and faults.step == 2:
            mark("fault")
            loss = wrapped.parts["first"](batch).sum()
        else:
            loss = wrapped(batch).square().mean()
        loss.backward()
        if faults.fault == "no_step" and faults.mine and faults.step == 2:
            mark("fault")
        else:
            optimizer.step()
        optimizer.zero_grad()
        if faults.fault == "lr_later" and faults.mine and faults.step == 1:
            mark("fault")
            optimizer.param_groups[0]["lr"] *= 3
        if saver is not None:
            faults.here("save")
            saver(faults.step, wrapped, optimizer)
        if faults.fault == "evaluate_alone" and faults.mine and faults.step == 2:
            mark("fault")
            with torch.no_grad():
                wrapped(batch)
        faults.here("evaluation")
        with torch.no_grad():
            wrapped(batch)


def saving(given, faults):
    if given.phase != "save" and given.fault not in ("directory", "save_step"):
        return None
    from lamina.checkpoint import CheckpointManager

    if given.wrapper == "torch_fsdp2":
        return save_by_torch(given)
    name = "other" if given.fault == "directory" and faults.mine else "same"
    manager = CheckpointManager(os.path.join(given.directory, name))

    def save(step, wrapped, optimizer):
        step += 10 if given.fault == "save_step" and faults.mine else 0
        manager.save(step, {"model": wrapped, "optimizer": optimizer})

    return save


def save_by_torch(given):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    def save(step, wrapped, optimizer):
        model, state = get_state_dict(wrapped, optimizer)
        at = os.path.join(given.directory, f"step-{step}")
        dcp.save({"model": model, "optimizer": state}, checkpoint_id=at)

    return save


def run(given, faults):
    world = torch_world if given.wrapper == "torch_fsdp2" else lamina_world
    runtime, mesh = world(given)
    with runtime:
        faults.here("before_wrap")
        odd = given.fault if faults.mine else ""
        how = {"width": 9} if odd == "width" else {}
        if odd == "order":
            how = {"order": ("second", "first")}
        module = Model(**how)
        if odd == "dtype":
            module = module.double()
        if odd == "frozen":
            module.parts["first"].requires_grad_(False)
        if given.phase == "wrap":
            mark("differs")
        mark("wrap")
        make = {"optimizer": adamw, "lr": other_lr}.get(odd, sgd)
        wrapped, optimizer = WRAPPERS[given.wrapper](module, make, mesh)
        faults.here("first_use")
        train(given, faults, wrapped, optimizer, saving(given, faults))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("wrapper", choices=WRAPPERS)
    parser.add_argument("fault")
    parser.add_argument("phase")
    parser.add_argument("--timeout", type=float, default=60)
    parser.add_argument("--soft-limit", type=float, default=3)
    parser.add_argument("--directory", required=True)
    given = parser.parse_args()
    faulthandler.register(
        signal.SIGUSR2, chain=True
    )  # a rank that has to be ended tells its stacks
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    faults = Faults(given.fault, given.phase, rank, size)
    if given.fault == "dead_store":
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        faults.store = beside(serve_store) if faults.mine else 0
    if given.fault == "stranger" and faults.mine:
        mark("fault")
        beside(intrude)
    try:
        run(given, faults)
    except Exception as error:
        mark("error", rank=rank, text=f"{type(error).__name__}: {error}")
        raise
    mark("finished", rank=rank)


def nursery():
    """Import everything once, fork the ranks of each job that is asked for, tell how they ended.

    Returns in the ranks only, with their arguments.
    """
    # What a rank imports between two marks would count as the time of a message.
    for name in PRELOADED:
        importlib.import_module(name)
    # Or else a rank that ends would collect all that was imported: seconds on a busy machine.
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        words, places = json.loads(line)
        started = []
        for place in places:
            process = os.fork()
            if process == 0:
                os.environ.update(place)
                directory = words[words.index("--directory") + 1]
                for kind, descriptor in (("out", 1), ("err", 2)):
                    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
                    os.dup2(os.open(f"{directory}/{kind}-{place['RANK']}", flags), descriptor)
                return words
            started.append(process)
        print(json.dumps(started), flush=True)
        found = dict(os.wait() for _ in started)
        print(json.dumps([os.waitstatus_to_exitcode(found[one]) for one in started]), flush=True)
    sys.exit(0)


PRELOADED = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "lamina.checkpoint",
    "lamina.ddp",
    "lamina.fsdp",
)

if __name__ == "__main__":
    if sys.argv[1:] == ["nursery"]:
        sys.argv[1:] = nursery()
    main()
