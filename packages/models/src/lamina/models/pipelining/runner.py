"""The runner that trains a pipeline, with the whole model's names for this rank's stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lamina.collectives.engine import all_reduce_small, broadcast
from lamina.ddp import finalize_grads
from lamina.ddp.engine import HasGroups, ParameterGroup, finalize_plain_gradients, groups_of
from lamina.mesh import ParallelMesh
from lamina.mesh.engine import mesh_axis
from lamina.models.attention.context import same_for_all
from lamina.models.attention.context_parallel import check_pattern
from lamina.models.base.mesh_axes import axis_of
from lamina.models.layers.loss import IGNORED
from lamina.models.layers.zigzag import cut_sequence
from lamina.models.pipelining.cuts import Layout
from lamina.models.pipelining.module import Microbatch, OncePerStep

if TYPE_CHECKING:
    from lamina.models.pipelining.stage import LaminaStage


class PipelineRunner(nn.Module):
    """This rank's stages of a pipeline; made by `pipeline`.

    Parameters, `state_dict()` and groups have the names of the whole model.

    Attributes:
        stages: this rank's stages in order, as `wrap` returned them; `fully_shard_optimizer`,
            `clip_grad_norm` and `memory_plan` take them.
        layout: layers of every stage of the pipeline.
        num_microbatches: the number of pieces that a batch is cut into.
        schedule: torch's, which says what each rank does when.
        losses: of the last `step`, each microbatch's part of the loss on this rank, if it has the
            last stage; else empty.
    """

    def __init__(
        self,
        stages: Sequence[LaminaStage],
        schedule: Any,
        num_microbatches: int,
        mesh: ParallelMesh | DeviceMesh,
        layout: Layout,
        *,
        last: int,
    ) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stage.submod for stage in stages)
        self.layout = layout
        self.num_microbatches = num_microbatches
        self.losses: list[Tensor] = []
        self._drivers = tuple(stages)
        self.schedule = schedule
        self._mesh = mesh
        self._axis = mesh_axis(mesh, "pp")
        self._last = last
        self._cp = axis_of(mesh, "cp")
        self.wrapped = all(isinstance(module, HasGroups) for module in self.stages)
        self.per_token = self.wrapped and self._counts_tokens()

    def _counts_tokens(self) -> bool:
        """Whether gradients are sums. Ranks exchange this, as frozen stages do not show it."""
        scaled = any(
            group.settings.scale is not None
            for group in self.parameter_groups()
            if group.gradients is not None
        )
        device = self._drivers[0].device
        readable = "cpu" if device.type == "meta" else device
        any_scaled = torch.tensor([scaled], dtype=torch.int64, device=readable)
        all_reduce_small([any_scaled], self._axis.sibling("pipeline"), op="max")
        return not int(any_scaled)

    def step(
        self,
        tokens: Tensor,
        labels: Tensor,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        *,
        padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Forward and backward of a batch; gradients are final afterwards.

        Every pipeline rank is given the same batch. All labels have the same weight, however the
        microbatches are cut: gradients are those of the mean over the batch's labels, averaged over
        data-parallel ranks. If stages were wrapped with `calculate_per_token_loss=True`, they are
        those of the mean over the labels of all ranks. This method calls `finalize_grads`.

        Args:
            tokens: int64 `[batch, sequence]`, at least `num_microbatches` sequences.
            labels: int64 `[batch, sequence]`; -100 is left out.
            positions: int64 `[sequence]`, `[1, sequence]` or `[batch, sequence]`.
            document_ids: integers `[batch, sequence]`.
            padding_mask: bool `[batch, sequence]`, True for tokens that go to no expert.

        Returns:
            The batch's mean loss, on every pipeline rank: a scalar without gradient.

        Raises:
            ValueError: for a batch with fewer sequences than microbatches, other shapes, and on a
                CPU ids that the vocabulary does not have; in float16, because gradients would need
                a loss scale, which this method does not have.
        """
        if self._drivers[0].dtype == torch.float16:
            raise ValueError(
                "step in float16: gradients below 6e-8 would be zero without a loss scale, and "
                "step has none; train in torch.bfloat16 or float32 (evaluate() works in float16)"
            )
        batches = self._microbatches(tokens, labels, positions, document_ids, padding_mask)
        loss = self._run(batches, labels, training=True)
        if not self.wrapped:
            if isinstance(self._mesh, ParallelMesh):
                finalize_plain_gradients(list(self.stages), self._mesh)
        else:
            count = (cut_sequence(labels, self._cp) != IGNORED).sum() if self.per_token else None
            finalize_grads(list(self.stages), self._mesh, num_tokens=count)
        self._release()
        return loss

    @torch.no_grad()
    def evaluate(
        self,
        tokens: Tensor,
        labels: Tensor,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        *,
        padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Return the batch's mean loss on every pipeline rank; arguments as of `step`."""
        batches = self._microbatches(tokens, labels, positions, document_ids, padding_mask)
        loss = self._run(batches, labels, training=False)
        self._release()
        return loss

    forward = evaluate

    # -- the whole model's names --------------------------------------------------------------

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters, by the names that they have in the whole model."""
        front = f"{prefix}." if prefix else ""
        for stage in self.stages:
            inner = getattr(stage, "module", stage)  # DistributedDataParallel holds the stage
            for name, parameter in inner.named_parameters("", recurse, remove_duplicate):
                yield front + name, parameter

    def parameter_groups(self) -> Iterator[ParameterGroup]:
        """Yield all groups of all stages, in the same order on every data-parallel rank.

        Raises:
            TypeError: if the stages are bare.
        """
        for stage in self.stages:
            yield from groups_of(stage)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """This rank's part of the whole model's `state_dict()`."""
        state: dict[str, Any] = {}
        for stage in self.stages:
            state.update(stage.state_dict(*args, **kwargs))
        return state

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load this rank's part of the `state_dict()` of the whole model or of these stages.

        Raises:
            RuntimeError: with `strict`, if a tensor of these stages is missing.
            ValueError: for `assign=True`.
        """
        if assign:
            raise ValueError(
                "load_state_dict(assign=True) replaces parameters, and the optimizer and the "
                "wrappers hold these: leave assign out, which copies (for stages on the meta "
                "device, give pipeline() a device)"
            )
        for stage in self.stages:
            wanted = stage.state_dict()
            mine = {name: value for name, value in state_dict.items() if name in wanted}
            stage.load_state_dict(mine, strict=strict)

    def weights_written(self) -> None:
        """The optimizer has stepped (`ShardedOptimizer` calls it)."""
        for stage in self.stages:
            written = getattr(stage, "weights_written", None)
            if written is not None:
                written()

    # -- a step -------------------------------------------------------------------------------

    def _microbatches(
        self, tokens: Tensor, labels: Tensor, *others: Tensor | None
    ) -> list[Microbatch]:
        positions, document_ids, padding_mask = others
        number = self.num_microbatches
        if tokens.ndim != 2 or labels.shape != tokens.shape or tokens.shape[0] < number:
            raise ValueError(
                f"tokens {tuple(tokens.shape)} and labels {tuple(labels.shape)}: both must be "
                f"[batch, sequence], with at least num_microbatches={number} sequences"
            )
        # Every rank checks this, because the others would wait for a stage that raises.
        check = self._drivers[0].stage.check_inputs
        check(tokens, labels, document_ids, positions, padding_mask)
        # Attention without a kernel is found before other stages wait for this one.
        config, dtype = self._drivers[0].stage.config, self._drivers[0].dtype
        dropout = config.attention_dropout if self._drivers[0].stage.training else 0.0
        documents = document_ids is not None
        check_pattern(config, self._cp, tokens.device, dtype, documents, dropout)
        positions = None if positions is None else same_for_all(positions)
        parts = 1 if self._cp is None else self._cp.size
        factor: Tensor | float = 1.0
        if not self.per_token:
            factor = parts / (labels != IGNORED).sum().clamp(min=1).double()
        whole = positions is None or positions.ndim == 1
        batches: list[Microbatch] = []
        for inputs, targets, at, ids, padding in zip(
            tokens.tensor_split(number),
            labels.tensor_split(number),
            _pieces(None if whole else positions, number),
            _pieces(document_ids, number),
            _pieces(padding_mask, number),
            strict=True,
        ):
            at = positions if whole else at
            auxiliary = self._drivers[0].stage.count_labels(targets) * factor
            weights = factor, auxiliary
            batches.append(Microbatch(inputs, targets, at, ids, *weights, padding, len(batches)))
        for each in batches:  # the size of a piece may not fit although that of the batch does
            check(each.tokens, each.labels, each.document_ids)
        return batches

    def _run(self, batches: Sequence[Microbatch], labels: Tensor, *, training: bool) -> Tensor:
        for driver in self._drivers:
            driver.begin(batches)
        losses: list[Tensor] = []
        run = self.schedule.step if training else self.schedule.eval
        # Stages have their microbatches. The schedule passes these numbers to the loss function.
        run(target=torch.arange(len(batches)), losses=losses, return_outputs=False)
        for driver in self._drivers:
            driver.clear_runtime_states()
        if training:
            self.losses = [loss.detach() for loss in losses]
        return self._loss(losses, labels)

    def _loss(self, losses: Sequence[Tensor], labels: Tensor) -> Tensor:
        """The sum of microbatches' losses on all ranks, as a mean over labels."""
        device = self._drivers[0].device
        total = torch.zeros((), dtype=torch.float64, device=device)
        if losses:
            total += torch.stack([loss.detach().double() for loss in losses]).sum()
            if self._cp is not None:
                all_reduce_small([total], self._cp.sibling("reduce"))
                total /= 1 if self.per_token else self._cp.size
            if self.per_token:
                total /= (labels != IGNORED).sum().clamp(min=1)
        broadcast(total, self._axis.sibling("pipeline"), src=self._last)
        return total if self._drivers[0].dtype == torch.float64 else total.float()

    def _release(self) -> None:
        for stage in self.stages:
            if isinstance(stage, OncePerStep):
                stage.release_units()


def _pieces(tensor: Tensor | None, number: int) -> Sequence[Tensor | None]:
    return [None] * number if tensor is None else tensor.tensor_split(number)
