"""Process start-up, parallel layout, device meshes, rank RNG and environment checks."""

from lamina.mesh.errors import AxisError, LayoutError, OverlapError, RendezvousError
from lamina.mesh.groups.hosts import make_host_groups
from lamina.mesh.groups.parallel_mesh import ParallelLayout, ParallelMesh
from lamina.mesh.launching.doctor import check_environment
from lamina.mesh.rng import derive_seed, rng_state, rng_stream, seed_everything, set_rng_state
from lamina.mesh.roles import Role, mark, role_of
from lamina.mesh.runtime import HarmfulSettingWarning, Runtime, init_distributed

__all__ = [
    "AxisError",
    "HarmfulSettingWarning",
    "LayoutError",
    "OverlapError",
    "ParallelLayout",
    "ParallelMesh",
    "RendezvousError",
    "Role",
    "Runtime",
    "check_environment",
    "derive_seed",
    "init_distributed",
    "make_host_groups",
    "mark",
    "rng_state",
    "rng_stream",
    "role_of",
    "seed_everything",
    "set_rng_state",
]
