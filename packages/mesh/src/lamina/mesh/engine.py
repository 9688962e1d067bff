"""What the layers above build on: axes of any mesh, environment, roles, random streams, words."""

from lamina.mesh.arguments import check_arguments, check_fields, setting, translates
from lamina.mesh.errors import EnvironmentVariableError, GroupCreationError
from lamina.mesh.groups.axis import MeshAxis, axis_if_there, mesh_axis, named_mesh
from lamina.mesh.groups.hosts import host_groups, host_runs, ranks_per_host, split_over_hosts
from lamina.mesh.groups.parallel_mesh import (
    DENSE_AXES,
    DERIVED_AXES,
    EXPERT_AXES,
    MODEL_AXES,
    aligned,
)
from lamina.mesh.groups.process_groups import (
    GroupRef,
    ends_before_groups,
    ends_with_groups,
    group_ref,
    live_group,
    ranks_of,
    running_watchdog,
)
from lamina.mesh.launching.doctor import EnvironmentProblem, Machine
from lamina.mesh.launching.variables import Environment, environment, require_overlap
from lamina.mesh.rng import Seeded, recompute_contexts, require_stream
from lamina.mesh.roles import copy_role, copy_roles
from lamina.mesh.watching.host_watch import host_words
from lamina.mesh.watching.waits import Activity, Wait

__all__ = [
    "DENSE_AXES",
    "DERIVED_AXES",
    "EXPERT_AXES",
    "MODEL_AXES",
    "Activity",
    "Environment",
    "EnvironmentProblem",
    "EnvironmentVariableError",
    "GroupCreationError",
    "GroupRef",
    "Machine",
    "MeshAxis",
    "Seeded",
    "Wait",
    "aligned",
    "axis_if_there",
    "check_arguments",
    "check_fields",
    "copy_role",
    "copy_roles",
    "ends_before_groups",
    "ends_with_groups",
    "environment",
    "group_ref",
    "host_groups",
    "host_runs",
    "host_words",
    "live_group",
    "mesh_axis",
    "named_mesh",
    "ranks_of",
    "ranks_per_host",
    "recompute_contexts",
    "require_overlap",
    "require_stream",
    "running_watchdog",
    "setting",
    "split_over_hosts",
    "translates",
]
