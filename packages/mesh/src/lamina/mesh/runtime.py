"""Starting and ending a process of a distributed job."""

from __future__ import annotations

import os
import threading
import traceback
import warnings
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from lamina.mesh.errors import EnvironmentVariableError
from lamina.mesh.groups.hosts import agree_on_hosts
from lamina.mesh.groups.process_groups import (
    PATIENCE,
    GroupRef,
    current_world,
    default_store,
    fake_store,
    group_ref,
)
from lamina.mesh.launching.doctor import settings_problems
from lamina.mesh.launching.launch import Launch, read_launch
from lamina.mesh.launching.rendezvous import open_store
from lamina.mesh.launching.variables import Environment, environment
from lamina.mesh.watching.watchdog import Watchdog, end_process

DEFAULT_TIMEOUT = timedelta(minutes=10)


class HarmfulSettingWarning(UserWarning):
    """A setting of the environment makes the run slower or breaks a feature."""


@dataclass
class Runtime:
    """A started process. As a context manager, it ends what it started.

    Attributes:
        rank: global rank.
        world_size: ranks in all.
        local_rank: place among the ranks of this machine.
        device: the device of this rank.
        backend: as torch.distributed names it, such as "gloo" or "cpu:gloo,cuda:nccl".
        owns_group: whether `close` destroys the process groups; False if they were there before.
        launcher: "torchrun", "slurm", "none", "fake", or "existing" for a default group that was
            there before.

    Examples:
        >>> with init_distributed() as runtime:
        ...     model = torch.nn.Linear(2, 2).to(runtime.device)
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    backend: str
    owns_group: bool
    launcher: str
    _default_group: GroupRef | None = field(default=None, repr=False)
    _watchdog: Watchdog | None = field(default=None, repr=False)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which speaks for all."""
        return self.rank == 0

    def close(self) -> None:
        """End what `init_distributed` has started. May be called again.

        Saves in the background are waited for as long as they make progress. Then the process
        groups are destroyed, which may wait for other ranks. If that takes longer than the
        groups' timeout (after an error: 8 seconds), the process ends.
        """
        self._close(None)

    def _close(self, error: BaseException | None) -> None:
        if self._watchdog is not None:
            self._watchdog.close()
        ours = None if self._default_group is None else self._default_group.weak()
        still_there = dist.is_initialized() and dist.group.WORLD is ours
        if self.owns_group and still_there:
            world = current_world()
            world.finish_savers(PATIENCE)
            # Without an error, other ranks may be late and well: NCCL's groups end together.
            limit = (world.timeout or DEFAULT_TIMEOUT).total_seconds()
            limit = limit if error is None else min(PATIENCE, limit)
            deadline = threading.Timer(limit, _end_process, (limit, error))
            deadline.daemon = True
            deadline.start()
            try:
                dist.destroy_process_group()
            finally:
                deadline.cancel()
        if self._watchdog is not None:
            self._watchdog.before_end = None  # it outlives the job, whose groups this refers to
        self._default_group = None

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if error is not None and self._watchdog is not None:
            self._watchdog.close(f"it ended with {type(error).__name__}: {error}")
        self._close(error)


def _end_process(limit: float, error: BaseException | None) -> None:
    if error is not None:  # nobody else would show it
        traceback.print_exception(error)
    text = f"lamina.mesh: the process groups did not end within {limit:g} s: the process ends"
    end_process(text)


def init_distributed(
    backend: str | None = None,
    timeout: timedelta | float | None = None,
    device: torch.device | str | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    ranks_per_host: int | None = None,
    soft_limit: float | None = 30.0,
    verdict_directory: str | os.PathLike[str] | None = None,
) -> Runtime:
    """Start this process as a rank of its job. Collective over all ranks.

    Reads torchrun's variables, or SLURM's inside a step of several tasks, or starts a world of
    one. A default process group that is already there is adopted and left alone at the end.

    Args:
        backend: as for torch.distributed; by default "cpu:gloo,cuda:nccl" with a GPU and "gloo"
            without. "fake" simulates one rank of a world of any size.
        timeout: for start-up and for every collective, in seconds or as timedelta; 10 minutes
            by default.
        device: by default the GPU of this rank's local rank if there is one and the backend can
            use it, else the CPU. It becomes the current device.
        rank: which rank to play in a fake world; 0 by default. Only with backend="fake".
        world_size: size of a fake world. Only with backend="fake".
        ranks_per_host: ranks of each host of a fake world, by default all. Only with
            backend="fake".
        soft_limit: seconds after which a wait for other ranks is reported, with who waits for
            whom, on the first rank's terminal and in a file. None watches over nothing: a rank that
            dies is then noticed by its direct neighbours, and hangs last until `timeout`.
        verdict_directory: where that file goes; by default the directory for temporary files.

    Returns:
        The Runtime; use it in a `with` statement.

    Raises:
        EnvironmentVariableError: variables are missing, malformed or contradict each other.
        RendezvousError: the ranks did not find each other in time.
        ValueError: arguments contradict each other or the group that is already there.
        RuntimeError: a device was asked for that is not there.

    Warns:
        HarmfulSettingWarning: for each setting that hurts, by name, once per machine.

    Examples:
        >>> with init_distributed() as runtime:
        ...     print(f"rank {runtime.rank} of {runtime.world_size}")
        rank 0 of 1
    """
    env = environment()
    limit = _as_timedelta(timeout)
    if backend != "fake" and (rank, world_size, ranks_per_host) != (None, None, None):
        raise ValueError(
            f"rank={rank}, world_size={world_size}, ranks_per_host={ranks_per_host}: only a fake "
            "world is given these as arguments; "
            "a real one takes them from torchrun (torchrun --nproc-per-node=N program.py)."
        )
    adopted = dist.is_initialized()
    if adopted:
        backend, launch = _backend_there(backend), _launch_there(env)
    else:
        launch = _fake_launch(env, rank, world_size) if backend == "fake" else read_launch(env)
    place = _choose_device(launch.local_rank, backend, device)
    if place.type == "cuda":  # so that `cuda` means this rank's GPU
        torch.cuda.set_device(place)
    backend = backend if backend is not None else _default_backend(place)
    rank, world_size, local_rank = launch.rank, launch.world_size, launch.local_rank
    if not adopted:
        # A store of its own for each attempt: torch's would hold what an earlier one has left.
        store = fake_store() if backend == "fake" else open_store(launch, limit)
        # No device_id= here: see Note [No bound device].
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=limit
        )
        current_world().timeout = limit
    started, world = (not adopted, launch.launcher), group_ref(dist.group.WORLD)
    runtime = Runtime(rank, world_size, local_rank, place, backend, *started, world)
    if runtime.backend == "fake":
        current_world().ranks_per_host = _hosts_of_fake(ranks_per_host, world_size)
    else:
        agree_on_hosts()  # before any mesh is built, as its groups depend on it
    if soft_limit is not None and runtime.world_size > 1 and runtime.backend != "fake":
        _watch_over(runtime, soft_limit, verdict_directory)
    for problem in settings_problems(env) if runtime.local_rank == 0 else ():
        if problem.severity != "note":
            warnings.warn(str(problem), HarmfulSettingWarning, stacklevel=2)
    return runtime


def _watch_over(
    runtime: Runtime, soft_limit: float, directory: str | os.PathLike[str] | None
) -> None:
    if not soft_limit > 0:
        raise ValueError(f"soft_limit={soft_limit!r}: give a positive number of seconds, or None.")
    world = current_world()
    # A job has one watchdog, though several runtimes may be opened in it one after the other.
    if world.watchdog is None:
        store = default_store()
        rank, size = runtime.rank, runtime.world_size
        world.watchdog = Watchdog(store, rank, size, soft_limit, directory)
        world.watchdog.before_end = partial(world.finish_savers, PATIENCE)
    runtime._watchdog = world.watchdog


def _backend_there(asked: str | None) -> str:
    """The backend that torch.distributed runs with; ValueError: another one was asked for."""
    there = str(dist.get_backend())
    if there == "undefined":  # torch's name for "chosen by device", as init_device_mesh starts it
        there = str(dist.get_backend_config())
    if asked is not None and asked != there:
        raise ValueError(
            f"backend={asked!r} was asked for, but torch.distributed already runs with "
            f"{there!r}. Call init_distributed before anything else starts it, or leave backend "
            "out to use what is there."
        )
    return there


def _launch_there(env: Environment) -> Launch:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    try:
        launch = read_launch(env)
        # Variables that speak of another world (a test's ranks inherit those of its parent) are
        # not believed; then all ranks are taken to be on this machine.
        believed = (launch.rank, launch.world_size) == (rank, world_size)
    except EnvironmentVariableError:
        believed = False
    return Launch("existing", rank, world_size, launch.local_rank if believed else rank)


def _fake_launch(env: Environment, rank: int | None, world_size: int | None) -> Launch:
    size = world_size if world_size is not None else env.integer("WORLD_SIZE", minimum=1) or 1
    own = rank if rank is not None else env.integer("RANK", minimum=0) or 0
    if size < 1 or not 0 <= own < size:
        raise ValueError(f"rank={own} of a fake world of {size}: ranks run from 0 to {size - 1}.")
    return Launch("fake", own, size)


def _hosts_of_fake(ranks_per_host: int | None, world_size: int) -> int | None:
    """Ranks of each host of a fake world; None is all. ValueError: they do not fill hosts."""
    if ranks_per_host is None or world_size <= ranks_per_host:
        return None
    if ranks_per_host < 1 or world_size % ranks_per_host:
        raise ValueError(
            f"ranks_per_host={ranks_per_host} of a fake world of {world_size}: it must divide the "
            "number of ranks, so that each host has as many."
        )
    return ranks_per_host


def _as_timedelta(timeout: timedelta | float | None) -> timedelta:
    if timeout is None:
        return DEFAULT_TIMEOUT
    limit = timedelta(0)
    if isinstance(timeout, timedelta | int | float):
        limit = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    if limit <= timedelta(0):
        raise ValueError(f"timeout={timeout!r}: give a positive number of seconds or a timedelta.")
    return limit


def _choose_device(
    local_rank: int, backend: str | None, device: torch.device | str | None
) -> torch.device:
    """The device asked for, or by default the GPU of `local_rank` if the backend can use it.

    RuntimeError: a GPU was asked for and is not there, or ranks of NCCL outnumber the GPUs.
    """
    asked = None if device is None else torch.device(device)
    if asked is not None and asked.type != "cuda":
        return asked
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    nccl = backend is not None and "nccl" in backend
    if asked is None and not nccl and (backend is not None or not count):
        return torch.device("cpu")
    if not count:
        who = f"backend={backend!r}" if asked is None else f"device={str(asked)!r}"
        raise RuntimeError(
            f"{who} needs a GPU and torch sees none (torch {torch.__version__}, CUDA "
            f"{torch.version.cuda or 'not built in'}). Use backend='gloo' and device='cpu' for a "
            "CPU run; `python -m lamina.mesh doctor` says what is missing."
        )
    if asked is not None and asked.index is not None:
        if asked.index >= count:
            raise RuntimeError(f"device {asked} was asked for and torch sees {count} GPUs.")
        return asked
    # A launcher that shows each rank its own GPU only (srun --gpus-per-task) numbers it 0.
    if local_rank >= count > 1 and (nccl or backend is None):
        raise RuntimeError(
            f"local rank {local_rank} has no GPU: torch sees {count} on this machine and NCCL "
            f"takes one rank each. Start at most {count} ranks here "
            f"(torchrun --nproc-per-node={count}), or let ranks share GPUs with backend='gloo'."
        )
    return torch.device("cuda", local_rank % count)


def _default_backend(device: torch.device) -> str:
    """`cpu:gloo,cuda:nccl` for a GPU, so that CPU tensors can travel too; `gloo` for the CPU.

    RuntimeError says that this build of torch lacks what the device needs.
    """
    if device.type == "cpu":
        return "gloo"
    if device.type != "cuda":
        raise RuntimeError(
            f"no default backend for {device}: Lamina runs on cpu and cuda. Name the backend."
        )
    if not dist.is_nccl_available():
        raise RuntimeError(
            f"torch {torch.__version__} was built without NCCL. Install a build that has it, or "
            "pass backend='gloo' (slow: tensors travel through host memory)."
        )
    return "cpu:gloo,cuda:nccl"
