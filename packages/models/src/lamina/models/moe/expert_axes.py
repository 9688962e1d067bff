"""The axes of a mesh over which experts are spread, and those over which tokens differ."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from lamina.mesh import ParallelMesh
from lamina.mesh.engine import MeshAxis, mesh_axis
from lamina.models.base.mesh_axes import MeshLike, axis_of, data_parallel_axis


@dataclass(frozen=True)
class ExpertAxes:
    """The axes of a mesh that matter to experts. An axis of one rank is None.

    Attributes:
        ep: each rank holds other experts.
        expert_tp: each rank holds a piece of every expert's inner width.
        dispatch: `ep` and `expert_tp` as one axis, over which tokens are sent.
        tp: the tensor-parallel axis of the dense layers.
        cp: each rank holds other parts of the sequences.
        dp: each rank holds other sequences.
        replicated: ranks of `tp` hold the same tokens (no sequence parallelism). Experts are then
            cut over `tp` as dense layers are, and no token is sent.
    """

    ep: MeshAxis | None = None
    expert_tp: MeshAxis | None = None
    dispatch: MeshAxis | None = None
    tp: MeshAxis | None = None
    cp: MeshAxis | None = None
    dp: MeshAxis | None = None
    replicated: bool = False

    @staticmethod
    def of(mesh: MeshLike | ExpertAxes, *, sequence_parallel: bool = False) -> ExpertAxes:
        """Find the axes of a mesh; axes that were found before are returned as they are.

        Dimensions of a DeviceMesh that are called `ep` and `expert_tp` are the experts' axes.
        Without them, and for a bare axis, experts are cut over `tp` like the dense layers. Wrappers
        need the same information: give them `ParallelLayout(expert_tp=tp)` if experts are cut over
        `tp`, and give `fully_shard` a DeviceMesh with `ep` as `expt_device_mesh` too.

        Raises:
            LayoutError: for tp beside expert parallelism without sequence parallelism.
            ValueError: the same on a DeviceMesh.
        """
        if mesh is None or isinstance(mesh, ExpertAxes):
            return mesh or ExpertAxes()
        tp = axis_of(mesh, "tp")
        replicated = tp is not None and not sequence_parallel
        if isinstance(mesh, MeshAxis):
            return ExpertAxes(expert_tp=tp, dispatch=tp, tp=tp, replicated=replicated)
        if isinstance(mesh, ParallelMesh):
            mesh.layout.require_sequence_parallel(sequence_parallel)
        ep, expert_tp = axis_of(mesh, "ep"), axis_of(mesh, "expert_tp")
        if isinstance(mesh, DeviceMesh):
            if not {"ep", "expert_tp"} & set(mesh.mesh_dim_names or ()):
                expert_tp = tp
            elif tp is not None and replicated:
                raise ValueError(
                    f"{mesh} has experts on axes of their own beside tp {tp.size}: that needs "
                    "sequence parallelism, or the ranks of a tp group send the same tokens several "
                    "times; set sequence_parallel=True in TransformerConfig"
                )
        both = ep or expert_tp
        if ep is not None and expert_tp is not None:
            both = mesh_axis(mesh, ("ep", "expert_tp"))
        dp = data_parallel_axis(mesh)
        return ExpertAxes(ep, expert_tp, both, tp, axis_of(mesh, "cp"), dp, replicated)

    @property
    def tokens_tp(self) -> MeshAxis | None:
        """The axis `tp`, if its ranks hold different tokens."""
        return None if self.replicated else self.tp

    @property
    def along_sequence(self) -> tuple[MeshAxis, ...]:
        """Axes whose ranks share a microbatch and hold different tokens of it."""
        return tuple(axis for axis in (self.tokens_tp, self.cp) if axis is not None)

    @property
    def token_axes(self) -> tuple[MeshAxis, ...]:
        """Axes along which tokens differ. Together their ranks hold each token of a step once."""
        return (*self.along_sequence, *(() if self.dp is None else (self.dp,)))
