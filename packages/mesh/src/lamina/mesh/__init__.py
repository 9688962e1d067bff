"""Process start-up, parallel layout, device meshes, rank RNG and environment checks."""

from lamina.mesh.axis import MeshAxis, axis_if_there, mesh_axis
from lamina.mesh.checks import EnvironmentProblem, require_overlap
from lamina.mesh.doctor import check_environment
from lamina.mesh.errors import (
    AxisError,
    EnvironmentVariableError,
    GroupCreationError,
    LayoutError,
    OverlapError,
    RendezvousError,
)
from lamina.mesh.layout import (
    DENSE_AXES,
    DERIVED_AXES,
    EXPERT_AXES,
    MODEL_AXES,
    ParallelLayout,
)
from lamina.mesh.machine import Machine
from lamina.mesh.parallel_mesh import ParallelMesh
from lamina.mesh.rng import (
    Seeded,
    derive_seed,
    recompute_contexts,
    require_stream,
    rng_state,
    rng_stream,
    seed_everything,
    set_rng_state,
)
from lamina.mesh.roles import Role, copy_role, copy_roles, mark, role_of
from lamina.mesh.runtime import HarmfulSettingWarning, Runtime, init_distributed
from lamina.mesh.variables import Environment, environment

__all__ = [
    "DENSE_AXES",
    "DERIVED_AXES",
    "EXPERT_AXES",
    "MODEL_AXES",
    "AxisError",
    "Environment",
    "EnvironmentProblem",
    "EnvironmentVariableError",
    "GroupCreationError",
    "HarmfulSettingWarning",
    "LayoutError",
    "Machine",
    "MeshAxis",
    "OverlapError",
    "ParallelLayout",
    "ParallelMesh",
    "RendezvousError",
    "Role",
    "Runtime",
    "Seeded",
    "axis_if_there",
    "check_environment",
    "copy_role",
    "copy_roles",
    "derive_seed",
    "environment",
    "init_distributed",
    "mark",
    "mesh_axis",
    "recompute_contexts",
    "require_overlap",
    "require_stream",
    "rng_state",
    "rng_stream",
    "role_of",
    "seed_everything",
    "set_rng_state",
]
