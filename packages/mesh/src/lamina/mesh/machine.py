"""Checks of a machine and of its torch: what makes runs slow or impossible there."""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from lamina.mesh.settings import EnvironmentProblem
from lamina.mesh.variables import Environment

__all__ = ["MACHINE_CHECKS", "TORCH_SUPPORTED", "Machine"]

TORCH_SUPPORTED = ((2, 11), (2, 16))
"""First supported version of torch, and the first one above that isn't tested."""

_GIB = 1 << 30


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
            open_files=_open_files(),
            host_resolves=_host_resolves(),
            interfaces=tuple(name for _, name in socket.if_nameindex()),
            address=_address(),
        )


def _torch_range(machine: Machine, _: Environment) -> EnvironmentProblem | None:
    lowest, beyond = TORCH_SUPPORTED
    numbers = machine.torch_version.split("+")[0].split(".")
    if lowest <= (int(numbers[0]), int(numbers[1])) < beyond:
        return None
    return EnvironmentProblem(
        "torch",
        machine.torch_version,
        "Lamina is tested with torch "
        f">={'.'.join(map(str, lowest))},<{'.'.join(map(str, beyond))} only.",
        "Install a version from that range.",
        "error",
    )


def _gpus(machine: Machine, env: Environment) -> EnvironmentProblem | None:
    if machine.visible_gpus or not machine.gpu_devices:
        return None
    hidden = env.variables.get("CUDA_VISIBLE_DEVICES")
    if machine.cuda_build is None:
        effect = "torch is a CPU build, so runs use the CPU."
        remedy = "Install a CUDA build of the same version (pytorch.org/get-started)."
    elif hidden is not None and hidden.strip() in ("", "-1", "NoDevFiles"):
        effect = f"CUDA_VISIBLE_DEVICES={hidden!r} hides them all, so runs use the CPU."
        remedy = "Unset CUDA_VISIBLE_DEVICES."
    else:
        effect = f"torch's CUDA {machine.cuda_build} can't use them, so runs use the CPU."
        remedy = "See what nvidia-smi says; the driver may be older than this CUDA needs."
    count = f"{machine.gpu_devices} on the machine, 0 visible to torch"
    return EnvironmentProblem("GPU", count, effect, remedy)


def _backend(machine: Machine, _: Environment) -> EnvironmentProblem | None:
    missing = "nccl" if machine.visible_gpus else "gloo"
    if missing in machine.backends:
        return None
    return EnvironmentProblem(
        "torch.distributed",
        f"built with {', '.join(machine.backends) or 'no backend'}",
        f"{missing} is missing, so ranks can't exchange tensors.",
        f"Install a build of torch with {missing}.",
        "error",
    )


def _triton(machine: Machine, env: Environment) -> EnvironmentProblem | None:
    if machine.visible_gpus and machine.triton is None:
        return EnvironmentProblem(
            "Triton",
            "not installed",
            "sums of gradients on a GPU are made by a Triton kernel, and fail without it.",
            "pip install triton (CUDA builds of torch bring the version that fits).",
            "error",
        )
    if machine.visible_gpus and env.triton_interpret:
        return EnvironmentProblem(
            "TRITON_INTERPRET",
            "1",
            "Triton kernels run in Python, thousands of times slower, and round bf16 wrongly.",
            "Unset it outside of tests.",
        )
    return None


def _threads(machine: Machine, env: Environment) -> EnvironmentProblem | None:
    ranks = env.local_world_size or max(len(machine.visible_gpus), 1)
    share = max(machine.cores // ranks, 1)
    # OpenMP takes a list too, one number per level of nesting.
    outer = env.variables.get("OMP_NUM_THREADS", "").partition(",")[0]
    threads = Environment({"OMP_NUM_THREADS": outer}).integer("OMP_NUM_THREADS", minimum=1)
    each = f"{ranks} rank{'s' if ranks > 1 else ''} on {machine.cores} cores"
    if threads is None:
        if ranks == 1 or machine.visible_gpus:
            return None
        return EnvironmentProblem(
            "OMP_NUM_THREADS",
            "not set",
            f"each of {each} starts {machine.cores} threads, and they take turns.",
            f"Set it to {share}.",
        )
    if threads * ranks > machine.cores:
        return EnvironmentProblem(
            "OMP_NUM_THREADS",
            str(threads),
            f"{each} make {threads * ranks} threads, and they take turns.",
            f"Set it to {share}.",
        )
    if threads == 1 and share >= 4 and not machine.visible_gpus:
        return EnvironmentProblem(
            "OMP_NUM_THREADS",
            "1",
            f"with {each}, {share} threads per rank could compute and one does.",
            f"Set it to {share} (torchrun sets it to 1 where it is unset).",
            "note",
        )
    return None


def _shared_memory(machine: Machine, _: Environment) -> EnvironmentProblem | None:
    if machine.shm_bytes is None or machine.shm_bytes >= _GIB:
        return None
    return EnvironmentProblem(
        "/dev/shm",
        f"{machine.shm_bytes / (1 << 20):.0f} MiB",
        "data loader workers and NCCL share memory through it and fail with a bus error or "
        "'No space left on device' when it is full.",
        "Start the container with --shm-size=8g (or --ipc=host).",
    )


def _files(machine: Machine, _: Environment) -> EnvironmentProblem | None:
    if machine.open_files >= 4096 or machine.open_files < 0:  # negative: unlimited
        return None
    return EnvironmentProblem(
        "open files",
        f"limited to {machine.open_files}",
        "gloo opens a socket for each pair of ranks in each group, and shards of data add to it.",
        "Raise it: ulimit -n 65536.",
        "note",
    )


def _host_name(machine: Machine, env: Environment) -> EnvironmentProblem | None:
    if machine.host_resolves or env.variables.get("GLOO_SOCKET_IFNAME"):
        return None
    return EnvironmentProblem(
        "host name",
        "without an address",
        "gloo falls back to the loopback interface, which other machines can't reach, and ranks of "
        "torchrun wait for each other in vain.",
        "Set GLOO_SOCKET_IFNAME to the interface between the machines (ip -br addr lists them), "
        "and give torchrun --local-addr: on one machine 127.0.0.1.",
        "note",
    )


def _interface(variable: str, machine: Machine, env: Environment) -> EnvironmentProblem | None:
    value = env.variables.get(variable, "").strip()
    # NCCL also takes "^name" (all but) and "=name" (exactly); plain names are prefixes there.
    asked = [part.strip().lstrip("=") for part in value.split(",") if part.strip()]
    if not asked or value.startswith("^") or not machine.interfaces:
        return None
    if any(there.startswith(name) for name in asked for there in machine.interfaces):
        return None
    return EnvironmentProblem(
        variable,
        value,
        f"this machine has no such network interface (it has {', '.join(machine.interfaces)}), so "
        "ranks can't connect.",
        "Name one of those, or unset it.",
        "error",
    )


def _ports(machine: Machine, env: Environment) -> EnvironmentProblem | None:
    named = env.variables.get("MASTER_ADDR", "")
    public = [address for address in (named, machine.address) if address and _is_public(address)]
    if not public:
        return None
    return EnvironmentProblem(
        "MASTER_ADDR" if public[0] == named else "this machine's address",
        f"{public[0]}, an address of the internet",
        "whoever reaches the ports of a job can run code in it, because torchrun and "
        "torch.distributed.checkpoint unpickle what comes from there (docs/threat-model.md).",
        "Let ranks meet at an address of a private network, and close this machine's ports to "
        "others.",
        "warning" if public[0] == named else "note",
    )


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
    if importlib.util.find_spec("triton") is None:
        return None
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("triton")
    except PackageNotFoundError:  # built into another distribution
        return "installed"


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # Linux: containers and launchers narrow it
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _open_files() -> int:
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return -1
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


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
