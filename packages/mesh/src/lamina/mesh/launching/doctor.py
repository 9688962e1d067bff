"""`python -m lamina.mesh doctor`: looks at a machine and its settings and says what to change.

When something is a problem is said here; the words for it are in `problems.toml`.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import ipaddress
import json
import os
import re
import resource
import shutil
import socket
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from lamina.mesh.errors import EnvironmentVariableError
from lamina.mesh.launching.launch import read_launch
from lamina.mesh.launching.variables import Environment, environment

Severity = Literal["error", "warning", "note"]
_ORDER = {"error": 0, "warning": 1, "note": 2}

TORCH_SUPPORTED = ((2, 11), (2, 16))
"""First supported version of torch, and the first one above that isn't tested."""

_GIB = 1 << 30
_MANY_RANKS = 256  # from here on the sockets of a rank pass the budget of docs/mesh.md


@dataclass(frozen=True)
class EnvironmentProblem:
    """Something to change, or at least to know.

    Attributes:
        name: the variable or the part of the machine, such as "CUDA_DEVICE_MAX_CONNECTIONS".
        value: what it is now.
        effect: what that does to a run.
        remedy: what to change.
        severity: "error": some runs will fail. "warning": every run of the kind suffers.
            "note": as it should be for some runs and not for others.
    """

    name: str
    value: str
    effect: str
    remedy: str
    severity: Severity = "warning"

    def __str__(self) -> str:
        return f"{self.name} is {self.value}: {self.effect} {self.remedy}"


@functools.cache
def _texts() -> dict[str, dict[str, str]]:
    """What `problems.toml` says of each problem."""
    import tomllib  # takes longer than to read the file, and few programs that import this need it

    return tomllib.loads(Path(__file__).with_name("problems.toml").read_text())


def _problem(kind: str, **values: object) -> EnvironmentProblem:
    """A problem in words, with these values in them."""
    texts = {"name": kind, "value": "{value}", **_texts()[kind]}
    texts.pop("hurts", None)
    return EnvironmentProblem(**{part: text.format(**values) for part, text in texts.items()})  # type: ignore[arg-type]


def settings_problems(env: Environment) -> list[EnvironmentProblem]:
    """The variables of `env` whose values hurt, or may."""
    problems = []
    for name, texts in _texts().items():
        value = env.variables.get(name, "").strip()
        if "hurts" in texts and re.fullmatch(texts["hurts"], value, re.IGNORECASE):
            problems.append(_problem(name, value=value))
    size = env.variables.get("WORLD_SIZE", "").strip()
    ranks = int(size) if size.isdecimal() else 1  # what it cannot be is found by `read_launch`
    if ranks >= _MANY_RANKS and env.variables.get("TORCH_GLOO_LAZY_INIT", "").strip() != "1":
        problems.append(_problem("TORCH_GLOO_LAZY_INIT", others=ranks - 1))
    if env.expandable_segments:
        problems.append(_problem("PYTORCH_ALLOC_CONF"))
    return problems


@dataclass(frozen=True)
class Machine:
    """Facts about this machine. `Machine.inspect()` looks; tests write them down.

    Attributes:
        torch_version: such as "2.13.0+cpu".
        cuda_build: version of CUDA that torch was built with; None for a CPU build.
        visible_gpus: names of the GPUs torch sees.
        gpu_devices: GPUs the operating system has (/dev/nvidia0 and so on).
        backends: what torch.distributed was built with.
        triton: version of Triton, None if it isn't installed.
        cores: processor cores this process may run on.
        shm_bytes: size of /dev/shm in bytes; None where there is none.
        open_files: limit of open files of this process; negative if there is none.
        host_resolves: whether the machine's own name has an address.
        interfaces: names of the network interfaces; empty if unknown.
        address: that this machine sends from; None if it has no network.
    """

    torch_version: str
    cuda_build: str | None
    visible_gpus: tuple[str, ...]
    gpu_devices: int
    backends: tuple[str, ...]
    triton: str | None
    cores: int
    shm_bytes: int | None
    open_files: int
    host_resolves: bool
    interfaces: tuple[str, ...]
    address: str | None = None

    @classmethod
    def inspect(cls) -> Machine:
        """Look at the machine this process runs on."""
        shm = Path("/dev/shm")
        return cls(
            torch_version=torch.__version__,
            cuda_build=torch.version.cuda,
            visible_gpus=tuple(
                torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())
            ),
            gpu_devices=len(list(Path("/dev").glob("nvidia[0-9]*"))),
            backends=_backends(),
            triton=_triton_version(),
            cores=_cores(),
            shm_bytes=shutil.disk_usage(shm).total if shm.is_dir() else None,
            open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            host_resolves=_host_resolves(),
            interfaces=tuple(name for _, name in socket.if_nameindex()),
            address=_address(),
        )


def _torch_range(machine: Machine, _: Environment) -> EnvironmentProblem | None:
    lowest, beyond = TORCH_SUPPORTED
    numbers = machine.torch_version.split("+")[0].split(".")
    if lowest <= (int(numbers[0]), int(numbers[1])) < beyond:
        return None
    limits = {"lowest": ".".join(map(str, lowest)), "beyond": ".".join(map(str, beyond))}
    return _problem("torch", version=machine.torch_version, **limits)


def _gpus(machine: Machine, env: Environment) -> EnvironmentProblem | None:
    if machine.visible_gpus or not machine.gpu_devices:
        return None
    # The most likely reason first: a build that cannot use a GPU tells nothing of drivers.
    hidden, kind = env.variables.get("CUDA_VISIBLE_DEVICES"), "driver"
    if machine.cuda_build is None:
        kind = "CPU build"
    elif hidden is not None and hidden.strip() in ("", "-1", "NoDevFiles"):
        kind = "hidden"
    known = {"count": machine.gpu_devices, "hidden": hidden, "cuda": machine.cuda_build}
    return _problem(f"GPU, {kind}", **known)


def _backend(machine: Machine, _: Environment) -> EnvironmentProblem | None:
    missing = "nccl" if machine.visible_gpus else "gloo"
    if missing in machine.backends:
        return None
    backends = ", ".join(machine.backends) or "no backend"
    return _problem("torch.distributed", backends=backends, missing=missing)


def _triton(machine: Machine, env: Environment) -> EnvironmentProblem | None:
    if machine.visible_gpus and machine.triton is None:
        return _problem("Triton")
    interpreted = machine.visible_gpus and env.triton_interpret
    return _problem("TRITON_INTERPRET") if interpreted else None


def _threads(machine: Machine, env: Environment) -> EnvironmentProblem | None:
    ranks = env.local_world_size or max(len(machine.visible_gpus), 1)
    share = max(machine.cores // ranks, 1)
    # OpenMP takes a list too, one number per level of nesting.
    outer = env.variables.get("OMP_NUM_THREADS", "").partition(",")[0]
    threads = Environment({"OMP_NUM_THREADS": outer}).integer("OMP_NUM_THREADS", minimum=1)
    if threads is None:
        kind = None if ranks == 1 or machine.visible_gpus else "not set"
    elif threads * ranks > machine.cores:
        kind = "too many"
    else:
        kind = "one" if threads == 1 and share >= 4 and not machine.visible_gpus else None
    if kind is None:
        return None
    each = f"{_counted(ranks, 'rank')} on {machine.cores} cores"
    counts = {"threads": threads, "all": (threads or 0) * ranks, "cores": machine.cores}
    return _problem(f"threads, {kind}", ranks=each, share=share, **counts)


def _shared_memory(machine: Machine, _: Environment) -> EnvironmentProblem | None:
    if machine.shm_bytes is None or machine.shm_bytes >= _GIB:
        return None
    return _problem("/dev/shm", mib=machine.shm_bytes / (1 << 20))


def _files(machine: Machine, _: Environment) -> EnvironmentProblem | None:
    if machine.open_files >= 4096 or machine.open_files < 0:  # negative: unlimited
        return None
    return _problem("open files", limit=machine.open_files)


def _host_name(machine: Machine, env: Environment) -> EnvironmentProblem | None:
    known = machine.host_resolves or env.variables.get("GLOO_SOCKET_IFNAME")
    return None if known else _problem("host name")


def _interface(variable: str, machine: Machine, env: Environment) -> EnvironmentProblem | None:
    value = env.variables.get(variable, "").strip()
    # NCCL also takes "^name" (all but) and "=name" (exactly); plain names are prefixes there.
    asked = [part.strip().lstrip("=") for part in value.split(",") if part.strip()]
    if not asked or value.startswith("^") or not machine.interfaces:
        return None
    if any(there.startswith(name) for name in asked for there in machine.interfaces):
        return None
    there = ", ".join(machine.interfaces)
    return _problem("interface", variable=variable, value=value, there=there)


def _ports(machine: Machine, env: Environment) -> EnvironmentProblem | None:
    named = env.variables.get("MASTER_ADDR", "")
    for kind, address in (("MASTER_ADDR", named), ("this machine's address", machine.address)):
        if address and _is_public(address):
            return _problem(kind, address=address)
    return None


Check = Callable[[Machine, Environment], EnvironmentProblem | None]

MACHINE_CHECKS: tuple[Check, ...] = (
    _torch_range,
    _gpus,
    _backend,
    _triton,
    _threads,
    _shared_memory,
    _files,
    _host_name,
    _ports,
    partial(_interface, "GLOO_SOCKET_IFNAME"),
    partial(_interface, "NCCL_SOCKET_IFNAME"),
)
"""Each looks at one thing and returns what is wrong with it, or None."""


def _backends() -> tuple[str, ...]:
    if not dist.is_available():
        return ()
    built = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    return tuple(name for name, there in built.items() if there)


def _triton_version() -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("triton")
    except PackageNotFoundError:  # perhaps built into another distribution
        return "installed" if importlib.util.find_spec("triton") else None


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # Linux: containers and launchers narrow it
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _is_public(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_global
    except ValueError:  # a name: where it leads to from other machines is not known here
        return False


def _address() -> str | None:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # sends nothing: the system only chooses a way
            return str(probe.getsockname()[0])
    except OSError:  # no way there, or a machine without IPv4
        return None


def _host_resolves() -> bool:
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        return False
    return True


def check_environment(
    env: Environment | None = None, machine: Machine | None = None
) -> list[EnvironmentProblem]:
    """What should be changed before a run, the worst first.

    Args:
        env: by default this process' variables.
        machine: by default the one this process runs on.

    Examples:
        >>> wrong = [str(each) for each in check_environment() if each.severity == "error"]
    """
    variables = env if env is not None else environment()
    place = machine if machine is not None else Machine.inspect()
    problems = settings_problems(variables)
    checks: list[Callable[[], object]] = [partial(read_launch, variables)]
    # A variable that cannot be read ends one check and not the others.
    for check in checks + [partial(each, place, variables) for each in MACHINE_CHECKS]:
        try:
            problem = check()
        except EnvironmentVariableError as error:
            problem = _problem("a variable", error=error)
        if isinstance(problem, EnvironmentProblem):
            problems.append(problem)
    return sorted(problems, key=lambda problem: _ORDER[problem.severity])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit code: 1 if there is something to change."""
    parser = argparse.ArgumentParser(
        prog="python -m lamina.mesh", description="Tools for whoever starts distributed runs."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser(
        "doctor",
        help="check this machine and its settings and print what to change",
        description="Exit code 0: nothing to change (notes may be printed). 1: errors or "
        "warnings. Run it where the job will run, with the job's environment.",
    )
    doctor.add_argument("--json", action="store_true", help="print JSON for other programs")
    chosen = parser.parse_args(arguments)
    machine = Machine.inspect()
    problems = check_environment(machine=machine)
    if chosen.json:
        state = {"machine": asdict(machine), "problems": [asdict(each) for each in problems]}
        print(json.dumps(state, indent=2))
    else:
        print(report(machine, problems))
    # Notes are no reason to stop a script that asks the doctor first.
    return int(any(problem.severity != "note" for problem in problems))


def report(machine: Machine, problems: Sequence[EnvironmentProblem]) -> str:
    """The machine in a few lines, then each problem with what to change."""
    lines = [*_facts(machine), ""]
    for problem in problems:
        lines.append(f"{problem.severity.upper():<8}{problem.name} is {problem.value}")
        for text, bullet in ((problem.effect, ""), (problem.remedy, "-> ")):
            first, rest = " " * 8 + bullet, " " * (8 + len(bullet))
            lines += textwrap.wrap(text, 92, initial_indent=first, subsequent_indent=rest)
        lines.append("")
    counts = {kind: sum(problem.severity == kind for problem in problems) for kind in _ORDER}
    if counts["error"] or counts["warning"]:
        lines.append(", ".join(_counted(number, kind) for kind, number in counts.items()))
    else:
        notes = f" ({_counted(counts['note'], 'note')})" if counts["note"] else ""
        lines.append(f"Nothing to change{notes}.")
    return "\n".join(lines)


def _hosts() -> str:
    """Ranks of the job per host, as far as variables tell: the job itself compares its hosts."""
    variables = environment()
    try:
        launch, here = read_launch(variables), variables.ranks_per_host
    except EnvironmentVariableError:
        return "unknown"
    if here is not None and launch.world_size > 1 and launch.world_size % here:
        return f"unknown: LAMINA_RANKS_PER_HOST={here} does not divide {launch.world_size} ranks"
    here = min(here or launch.local_world_size or 1, launch.world_size)
    # Sums over hosts begin with the largest power of two that divides the ranks of a host.
    sums = f"; ordered sums begin with {here & -here} of a host" * (here < launch.world_size)
    return f"{here} of {_counted(launch.world_size, 'rank')} on each{sums}"


def _facts(machine: Machine) -> list[str]:
    gpus = ", ".join(dict.fromkeys(machine.visible_gpus)) or "none visible"
    count = f"{len(machine.visible_gpus)} x " if machine.visible_gpus else ""
    shm = "none" if machine.shm_bytes is None else f"{machine.shm_bytes / (1 << 30):.1f} GiB"
    cuda = f"CUDA {machine.cuda_build}" if machine.cuda_build else "CPU build"
    rows = (
        ("torch", f"{machine.torch_version} ({cuda}; {', '.join(machine.backends) or 'none'})"),
        ("triton", machine.triton or "not installed"),
        ("GPUs", f"{count}{gpus}"),
        ("cores", str(machine.cores)),
        ("/dev/shm", shm),
        ("hosts", _hosts()),
    )
    return [f"{name:<10}{value}" for name, value in rows]


def _counted(number: int, kind: str) -> str:
    return f"{number} {kind}{'' if number == 1 else 's'}"
