"""The one reader of environment variables: everything that Lamina's layers take from them.

Layers above never read os.environ. They call `environment()` and read its fields, so what
a run depends on can be listed, and a test can pass a dictionary instead.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from lamina.mesh.errors import EnvironmentVariableError, OverlapError


@dataclass(frozen=True)
class Environment:
    """A snapshot of environment variables with typed access. Make it with `environment()`."""

    variables: Mapping[str, str]

    @property
    def triton_interpret(self) -> bool:
        """Whether Triton kernels run in its interpreter (TRITON_INTERPRET), on CPU tensors."""
        return self.flag("TRITON_INTERPRET")

    @property
    def single_connection(self) -> bool:
        """CUDA_DEVICE_MAX_CONNECTIONS=1: kernels of all streams queue up, nothing overlaps."""
        return self.variables.get("CUDA_DEVICE_MAX_CONNECTIONS", "").strip() == "1"

    @property
    def expandable_segments(self) -> bool:
        """Whether the CUDA allocator uses expandable segments, which NCCL can't register.

        The last word of PYTORCH_ALLOC_CONF, or of its older name PYTORCH_CUDA_ALLOC_CONF, counts.
        """
        names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
        text = next(filter(None, (self.variables.get(name) for name in names)), "")
        pairs = (part.partition(":") for part in text.lower().split(","))
        settings = {key.strip(): value.strip() for key, _, value in pairs}
        return settings.get("expandable_segments") == "true"

    @property
    def local_world_size(self) -> int | None:
        """Ranks of this job on this machine, if the launcher says so."""
        return self.integer("LOCAL_WORLD_SIZE", minimum=1)

    @property
    def ranks_per_host(self) -> int | None:
        """LAMINA_RANKS_PER_HOST: so many consecutive ranks count as a host, wherever they are."""
        return self.integer("LAMINA_RANKS_PER_HOST", minimum=1)

    def flag(self, name: str) -> bool:
        """Whether `name` is set to something that means yes.

        EnvironmentVariableError: it is set to neither yes nor no.
        """
        value = self.variables.get(name, "").strip().lower()
        if value in ("1", "true", "yes", "on"):
            return True
        if value in ("", "0", "false", "no", "off"):
            return False
        raise EnvironmentVariableError(f"{name}={value!r} is neither 1 (on) nor 0 (off).")

    def integer(self, name: str, *, minimum: int) -> int | None:
        """The integer `name`, or None where it is unset or empty.

        EnvironmentVariableError: it is no integer, or below `minimum`.
        """
        # Scripts export empty variables to unset them.
        text = self.variables.get(name, "").strip()
        if not text:
            return None
        try:
            value = int(text)
        except ValueError:
            raise EnvironmentVariableError(
                f"{name}={text!r} is not an integer (at least {minimum} is expected)."
            ) from None
        if value < minimum:
            raise EnvironmentVariableError(f"{name}={value} is below its minimum, {minimum}.")
        return value


def environment(variables: Mapping[str, str] | None = None) -> Environment:
    """A snapshot of this process' environment variables, or of `variables` instead."""
    return Environment(dict(os.environ if variables is None else variables))


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
