"""Problems of an environment, and rules for variables that slow a run down or break it."""

import re
from dataclasses import dataclass, replace
from typing import Literal

from lamina.mesh.errors import OverlapError
from lamina.mesh.variables import Environment, environment

__all__ = ["EnvironmentProblem", "require_overlap", "settings_problems"]

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class EnvironmentProblem:
    """Something to change, or at least to know.

    Attributes:
        name: the variable or the part of the machine, such as "CUDA_DEVICE_MAX_CONNECTIONS".
        found: what it is now.
        effect: what that does to a run.
        remedy: what to change.
        severity: "error": some runs will fail. "warning": every run of the kind suffers.
            "note": as it should be for some runs and not for others.
    """

    name: str
    found: str
    effect: str
    remedy: str
    severity: Severity = "warning"

    def __str__(self) -> str:
        return f"{self.name} is {self.found}: {self.effect} {self.remedy}"


_ON, _ZERO, _SET = "1|true|yes|on|y|t", "0", "(?s:.+)"

# Sources: NCCL's user guide ("Environment Variables"), torch's "ProcessGroupNCCL Environment
# Variables", CUDA's programming guide ("CUDA Environment Variables").
_HURTS = (
    EnvironmentProblem(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "1",
        "kernels of all streams queue up in one hardware queue, so communication can't overlap "
        "with compute; wrappers asked to overlap refuse to start.",
        "Unset it, or set it to 8 or more.",
    ),
    EnvironmentProblem(
        "CUDA_LAUNCH_BLOCKING",
        _ON,
        "every kernel is waited for, so nothing overlaps and launches are slow.",
        "Unset it unless you are looking for the kernel that fails.",
    ),
    EnvironmentProblem(
        "TORCH_NCCL_BLOCKING_WAIT",
        _ON,
        "waiting for a collective blocks the host thread, so it can't queue the next kernels.",
        "Unset it; give init_distributed a timeout instead.",
    ),
    EnvironmentProblem(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        _ZERO,
        "a collective that fails or hangs is never ended, and the job waits for ever.",
        "Unset it (torch's default ends the process).",
    ),
    EnvironmentProblem(
        "NCCL_P2P_DISABLE",
        _ON,
        "GPUs of one machine exchange data through host memory instead of NVLink or PCIe.",
        "Unset it unless the machine's peer access is broken.",
    ),
    EnvironmentProblem(
        "NCCL_SHM_DISABLE",
        _ON,
        "GPUs of one machine without peer access exchange data through sockets.",
        "Unset it; give the container a larger /dev/shm if that was the reason.",
    ),
    EnvironmentProblem(
        "NCCL_IB_DISABLE",
        _ON,
        "machines exchange data through TCP sockets even if they have InfiniBand or RoCE.",
        "Unset it where there is such a network.",
        "note",
    ),
    EnvironmentProblem(
        "NCCL_ALGO",
        _SET,
        "one algorithm is forced on collectives of every size and kind.",
        "Unset it to let NCCL choose by size and topology.",
        "note",
    ),
    EnvironmentProblem(
        "NCCL_PROTO",
        _SET,
        "one protocol is forced on collectives of every size; LL and LL128 limit bandwidth.",
        "Unset it to let NCCL choose by size and topology.",
        "note",
    ),
    EnvironmentProblem(
        "NCCL_NVLS_ENABLE",
        _ZERO,
        "NVLink switches can't reduce and multicast, and symmetric memory loses its purpose.",
        "Unset it on machines with NVSwitch.",
        "note",
    ),
    EnvironmentProblem(
        "NCCL_CUMEM_ENABLE",
        _ZERO,
        "NCCL can't register user buffers (nccl_ub) or symmetric memory.",
        "Unset it where you use those.",
        "note",
    ),
    EnvironmentProblem(
        "NCCL_DEBUG",
        "info|trace",
        "every rank writes long logs; with TRACE collectives become slow.",
        "Set it to WARN, or write to files with NCCL_DEBUG_FILE.",
        "note",
    ),
    EnvironmentProblem(
        "TORCH_DISTRIBUTED_DEBUG",
        "detail",
        "every collective is preceded by another that compares shapes among the ranks.",
        "Unset it when the mismatch is found.",
    ),
    EnvironmentProblem(
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        _SET,
        "every GPU allocation goes to the driver and waits for the device.",
        "Unset it unless you are looking for a memory error.",
    ),
    EnvironmentProblem(
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD",
        "1|true|yes|y",
        "torch.load executes what a file's pickles say, wherever the program does not forbid it "
        "(docs/threat-model.md).",
        "Unset it, and give weights_only=False to the calls that read files you have made.",
    ),
    EnvironmentProblem(
        "NVIDIA_TF32_OVERRIDE",
        _ZERO,
        "float32 matrix products never use tensor cores, whatever the program says.",
        "Unset it and decide in the program (torch.set_float32_matmul_precision).",
        "note",
    ),
)
"""Problems. Their `found` is the pattern of the values that hurt, in place of a value."""

_MANY_RANKS = 256  # from here on the sockets of a rank pass the budget of docs/mesh.md


def settings_problems(env: Environment) -> list[EnvironmentProblem]:
    """The variables of `env` whose values hurt, or may."""
    problems = []
    for hurts in _HURTS:
        value = env.variables.get(hurts.name, "").strip()
        if re.fullmatch(hurts.found, value, re.IGNORECASE):
            problems.append(replace(hurts, found=value))
    size = env.variables.get("WORLD_SIZE", "").strip()
    ranks = int(size) if size.isdecimal() else 1  # what it cannot be is found by `read_launch`
    if ranks >= _MANY_RANKS and env.variables.get("TORCH_GLOO_LAZY_INIT", "").strip() != "1":
        problems.append(
            EnvironmentProblem(
                "TORCH_GLOO_LAZY_INIT",
                "not 1",
                f"each process group connects this rank with the {ranks - 1} others, and a job "
                "has four to a dozen groups.",
                "Set it to 1: pairs then connect when they first talk.",
            )
        )
    if env.expandable_segments:
        problems.append(
            EnvironmentProblem(
                "PYTORCH_ALLOC_CONF",
                "expandable_segments:True",
                "NCCL can't register memory from expandable segments as user buffers (nccl_ub) "
                "or symmetric memory.",
                "Leave expandable_segments out for runs that use those; keep it otherwise.",
                "note",
            )
        )
    return problems


def require_overlap(asked_by: str, env: Environment | None = None) -> None:
    """Refuse to overlap communication with compute where a setting rules it out.

    Wrappers call it when they are built with overlap on. It refuses on CPU too, where the setting
    does nothing: a rehearsal should fail where the GPU run will.

    `asked_by` is the option as the user wrote it, such as "overlap_grad_reduce=True". OverlapError:
    CUDA_DEVICE_MAX_CONNECTIONS is 1.
    """
    if (env or environment()).single_connection:
        raise OverlapError(
            f"{asked_by} and CUDA_DEVICE_MAX_CONNECTIONS=1 exclude each other: with one hardware "
            "queue the collectives wait for the compute they should run beside. Unset "
            "CUDA_DEVICE_MAX_CONNECTIONS (or set it to 8 or more) before the program starts, or "
            "turn the overlap off."
        )
