"""Reads from torchrun's or SLURM's variables which rank of which world this process is."""

import re
from dataclasses import dataclass

from lamina.mesh.errors import EnvironmentVariableError
from lamina.mesh.launching.variables import Environment


@dataclass(frozen=True)
class Launch:
    """What the launcher told this process.

    `launcher` is "torchrun" (or whatever sets its variables), "slurm", or "none". Local ranks are
    those of this machine; `local_world_size` is None if the launcher does not say it. Host and TCP
    port are those of the rendezvous store, None for a world of one that needs none. With
    `store_is_running` the agent of the launcher serves it (torchrun), and rank 0 need not.
    """

    launcher: str
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int | None = 1
    host: str | None = None
    port: int | None = None
    store_is_running: bool = False


def read_launch(env: Environment) -> Launch:
    """What the launcher's variables say.

    torchrun's variables come first, then SLURM's, and those only inside a step of several tasks:
    an interactive allocation or a batch script has them too, and a plain `python train.py` there
    is a world of one.

    EnvironmentVariableError: a variable is missing, malformed or contradicts another.
    """
    if env.variables.get("RANK") or env.variables.get("WORLD_SIZE"):
        return _from_torchrun(env)
    return _from_slurm(env) if _in_slurm_step_of_several(env) else Launch("none")


def _from_torchrun(env: Environment) -> Launch:
    rank = _required(env, "RANK", 0, "WORLD_SIZE is set")
    world_size = _required(env, "WORLD_SIZE", 1, "RANK is set")
    if rank >= world_size:
        raise EnvironmentVariableError(
            f"RANK={rank} is outside WORLD_SIZE={world_size}: ranks run from 0 to {world_size - 1}."
        )
    # Where LOCAL_RANK is absent, ranks are taken to fill machines in order, or one machine.
    local_world_size = env.local_world_size
    local_rank = env.integer("LOCAL_RANK", minimum=0)
    if local_rank is None:
        local_rank = rank % local_world_size if local_world_size else rank
    if local_world_size is not None and local_rank >= local_world_size:
        raise EnvironmentVariableError(
            f"LOCAL_RANK={local_rank} is outside LOCAL_WORLD_SIZE={local_world_size}."
        )
    host, port = env.variables.get("MASTER_ADDR") or None, _port(env)
    if world_size > 1 and (host is None or port is None):
        missing = "MASTER_ADDR" if host is None else "MASTER_PORT"
        raise EnvironmentVariableError(
            f"WORLD_SIZE={world_size} but {missing} is not set: {world_size} ranks need an address "
            "to meet at. torchrun sets both; by hand, set MASTER_ADDR to rank 0's host and "
            "MASTER_PORT to a free port on it, the same for all ranks."
        )
    served = env.variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Launch("torchrun", rank, world_size, local_rank, local_world_size, host, port, served)


def _in_slurm_step_of_several(env: Environment) -> bool:
    # SLURM_STEP_NUM_TASKS exists only in what srun started. A batch script has SLURM_PROCID=0
    # and SLURM_NTASKS=n, but is one process.
    tasks = env.integer("SLURM_STEP_NUM_TASKS", minimum=0) or 0
    return tasks > 1 and bool(env.variables.get("SLURM_PROCID"))


def _from_slurm(env: Environment) -> Launch:
    inside = "SLURM_STEP_NUM_TASKS says that this is a step of several tasks"
    rank = _required(env, "SLURM_PROCID", 0, inside)
    world_size = _required(env, "SLURM_STEP_NUM_TASKS", 1, inside)
    local_rank = _required(env, "SLURM_LOCALID", 0, inside)
    if rank >= world_size:
        raise EnvironmentVariableError(
            f"SLURM_PROCID={rank} is outside SLURM_STEP_NUM_TASKS={world_size}."
        )
    # Without an address given, task 0 is on the first node of the step.
    host = env.variables.get("MASTER_ADDR") or first_host(
        env.variables.get("SLURM_STEP_NODELIST") or env.variables.get("SLURM_JOB_NODELIST") or ""
    )
    if not host:
        raise EnvironmentVariableError(
            "neither MASTER_ADDR nor SLURM_STEP_NODELIST is set, so the ranks of this SLURM step "
            "don't know where to meet: export MASTER_ADDR=<host of task 0> before srun."
        )
    port = _port(env) or _slurm_port(env)
    return Launch("slurm", rank, world_size, local_rank, _tasks_here(env), host, port)


def _slurm_port(env: Environment) -> int:
    # The same on all ranks, and different for jobs and steps that share a node.
    job = env.integer("SLURM_JOB_ID", minimum=0) or 0
    step = env.integer("SLURM_STEP_ID", minimum=0) or 0
    return 20_000 + (job * 61 + step) % 20_000


def _tasks_here(env: Environment) -> int | None:
    """This node's entry in SLURM_STEP_TASKS_PER_NODE, which reads like "4(x2),3"."""
    node = env.integer("SLURM_NODEID", minimum=0)
    counts: list[int] = []
    for part in env.variables.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match:
            counts += [int(match[1])] * int(match[2] or 1)
    return counts[node] if node is not None and node < len(counts) else None


def first_host(nodelist: str) -> str:
    """The first host of a SLURM node list: "gpu[07-09,12],login1" gives "gpu07"."""
    # At the first comma that no bracket encloses.
    head, *_ = re.split(r",(?![^\[]*\])", nodelist.strip())
    # Several bracketed parts are legal ("rack[1-2]node[3-4]"): the first of each.
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", head)


def _required(env: Environment, name: str, minimum: int, because: str) -> int:
    value = env.integer(name, minimum=minimum)
    if value is None:
        raise EnvironmentVariableError(
            f"{name} is not set although {because}. Start the program with torchrun, or set "
            "RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, or none of them for a "
            "world of one."
        )
    return value


def _port(env: Environment) -> int | None:
    port = env.integer("MASTER_PORT", minimum=0)
    if port is not None and port > 65_535:
        raise EnvironmentVariableError(f"MASTER_PORT={port} is above 65535, the last TCP port.")
    return port
