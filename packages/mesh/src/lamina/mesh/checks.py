"""Settings and machine properties that make a run slow, wrong or impossible."""

from __future__ import annotations

from dataclasses import dataclass

from lamina.mesh.environment import Environment, environment
from lamina.mesh.errors import OverlapError


@dataclass(frozen=True)
class EnvironmentProblem:
    """Something to change.

    Attributes:
        name: the variable or the part of the machine, such as "CUDA_DEVICE_MAX_CONNECTIONS".
        found: what it is now.
        effect: what that does to a run.
        remedy: what to change.
        severity: "error" if runs will fail, "warning" if they suffer.
    """

    name: str
    found: str
    effect: str
    remedy: str
    severity: str = "warning"

    def __str__(self) -> str:
        return f"{self.name} is {self.found}: {self.effect} {self.remedy}"


def settings_problems(env: Environment) -> list[EnvironmentProblem]:
    """Environment variables whose values hurt."""
    problems = []
    if env.single_connection:
        problems.append(
            EnvironmentProblem(
                "CUDA_DEVICE_MAX_CONNECTIONS",
                "1",
                "kernels of all streams share one hardware queue, so communication can't overlap "
                "with compute.",
                "Unset it, or set it to 8 or more.",
            )
        )
    return problems


def require_overlap(asked_by: str, env: Environment | None = None) -> None:
    """Refuse to overlap communication with compute where a setting rules it out.

    Wrappers call it when they are built with overlap on. It refuses on CPU too, where the setting
    does nothing: a rehearsal should fail where the GPU run will.

    Args:
        asked_by: the option as the user wrote it, such as "overlap_grad_reduce=True".
        env: by default the process' own.

    Raises:
        OverlapError: CUDA_DEVICE_MAX_CONNECTIONS is 1.
    """
    if (env or environment()).single_connection:
        raise OverlapError(
            f"{asked_by} and CUDA_DEVICE_MAX_CONNECTIONS=1 exclude each other: with one hardware "
            "queue the collectives wait for the compute they should run beside. Unset "
            "CUDA_DEVICE_MAX_CONNECTIONS (or set it to 8 or more) before the program starts, or "
            "turn the overlap off."
        )
