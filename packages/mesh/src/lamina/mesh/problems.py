"""Problems of an environment that make runs slow, wrong or impossible, and their remedies."""

from dataclasses import dataclass
from typing import Literal

from lamina.mesh.errors import OverlapError
from lamina.mesh.variables import Environment, environment

__all__ = ["EnvironmentProblem", "Severity", "require_overlap"]

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
