"""A pipeline stage with the interface that torch's schedules call (decision 0640).

torch's own stages support data parallelism by torch's DDP and FSDP2 only. They find shapes by
running the first microbatch, keep a receive buffer for each microbatch, and divide `.grad`.

This stage has the same methods. Shapes follow from the tokens of each microbatch, so microbatches
may differ. Lamina's wrappers accumulate gradients and sum them over ranks when the last gradient of
the stage has been computed. Nothing is divided here, because each microbatch's loss has its weight.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed import ProcessGroup
from torch.distributed.pipelining.stage import _PipelineStageBase

from lamina.collectives.engine import Message, receive_operation, send_operation
from lamina.mesh.engine import group_ref, live_group
from lamina.models.layers.linear import attach_queue
from lamina.models.layers.matmul_products import Late, WeightGradientQueue, deliver
from lamina.models.pipelining.module import GPTStage, Microbatch, SumsGradients

Operation = Callable[..., Message]


class LaminaStage(_PipelineStageBase):
    """A `GPTStage`, wrapped or not, for the schedules of `torch.distributed.pipelining`.

    `module` is the stage's module or the wrapper around it, and `stage` the module. A `group` of
    None is one pipeline rank. Activations between stages, and their gradients, have this dtype.
    With `splits_backward` the schedule computes weights' gradients separately.
    """

    def __init__(
        self,
        module: nn.Module,
        stage: GPTStage,
        index: int,
        num_stages: int,
        device: torch.device,
        group: ProcessGroup | None,
        dtype: torch.dtype,
        *,
        splits_backward: bool = False,
    ) -> None:
        if group is not None:
            super().__init__(module, index, num_stages, device, group)
        self.submod, self.group = module, cast(ProcessGroup, group)
        self.stage_index, self.num_stages, self.device = index, num_stages, device
        self.has_backward = False
        self.stage = stage
        self.dtype = dtype
        self.queue = WeightGradientQueue()
        if splits_backward:
            attach_queue(stage, self.queue)
        # torch's runtime reads these to find skip connections, of which there are none.
        self.args_recv_info = {0: ()}
        self.act_send_info = {}
        self._batches: Sequence[Microbatch] = ()
        self.clear_runtime_states()

    @property
    def group(self) -> ProcessGroup:
        """The pipeline's ranks; None is one rank, although torch's type does not say so."""
        return cast(ProcessGroup, live_group(self._ref))

    @group.setter
    def group(self, group: ProcessGroup) -> None:
        self._ref = group_ref(group)

    def clear_runtime_states(self) -> None:
        """Clear the state of the previous step."""
        self.output_chunks: list[Any] = []
        self._inputs: dict[int, Tensor] = {}
        self._outputs: dict[int, Tensor | GradientEdge] = {}
        self._to_send: dict[int, Tensor] = {}
        self._output_grads: dict[int, Tensor] = {}
        self._input_grads: dict[int, Tensor] = {}
        self._late: dict[int, list[Late]] = {}

    def begin(self, batches: Sequence[Microbatch]) -> None:
        """Take the microbatches of the next step."""
        self._batches = batches
        self.chunks = len(batches)

    # -- what schedules call once -------------------------------------------------------------

    def _prepare_forward_infra(self, *_: Any, **__: Any) -> None:
        return None

    def _prepare_backward_infra(self, *_: Any, **__: Any) -> None:
        return None

    def _create_grad_recv_info(self, *_: Any, **__: Any) -> tuple[Any, ...]:
        return ()

    def _get_init_p2p_neighbors_ops(self) -> list[Message]:
        return []  # `pipeline` has already sent a message over the group

    # -- compute ------------------------------------------------------------------------------

    def forward_one_chunk(
        self,
        chunk: int,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Tensor:
        """Run the stage on a microbatch; the last stage returns the loss."""
        x = None if self.is_first else self._inputs[chunk]
        if x is not None and self.has_backward:
            x.requires_grad_()
        output: Tensor = self.submod(x, self._batches[chunk])
        if not self.is_last:
            output = self._checked(output, chunk)
            if self.stage_index_to_group_rank[self.stage_index + 1] != self.group_rank:
                self._to_send[chunk] = output.detach()
        if not self.has_backward:
            self._inputs.pop(chunk, None)
        elif self.is_last or not output.requires_grad:
            self._outputs[chunk] = output
        else:  # the graph is enough, as only the next stage needs the values
            self._outputs[chunk] = get_gradient_edge(output)
        return output

    def _checked(self, output: Tensor, chunk: int) -> Tensor:
        """Check the shape of the output, and cast it to the dtype between stages."""
        shape = self.stage.activation_shape(self._batches[chunk])
        if tuple(output.shape) != shape:
            raise ValueError(
                f"stage {self.stage_index} returned {tuple(output.shape)} for microbatch {chunk}, "
                f"and stage {self.stage_index + 1} waits for {shape}: blocks must keep the shape "
                "of activations"
            )
        return output.to(self.dtype).contiguous()

    def backward_one_chunk(
        self,
        chunk: int,
        loss: Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Compute the gradients of a microbatch: of the input alone, or of weights too.

        The backward that computes the stage's last gradients starts the wrapper's reductions.
        """
        if not self.has_backward:
            return
        output = self._outputs.pop(chunk)
        x = self._inputs.pop(chunk, None)
        received = None if self.is_last else self._output_grads.pop(chunk)
        with ExitStack() as stack:
            if not (full_backward and last_backward) and isinstance(self.submod, SumsGradients):
                stack.enter_context(self.submod.no_sync())
            if not full_backward:
                self._late[chunk] = stack.enter_context(self.queue.collecting())
            if not isinstance(output, Tensor) or self.is_last or output.requires_grad:
                torch.autograd.backward(output, received)
            # Otherwise all parameters of a first stage are frozen, and its output has no graph.
        if x is not None:
            if x.grad is None:  # the output does not depend on the input, so its gradient is zero
                x.grad = torch.zeros_like(x)
            self._input_grads[chunk] = x.grad
            x.grad = None

    def backward_weight_one_chunk(self, chunk: int, last_backward: bool = False) -> None:
        """Compute the gradients of weights that `backward_one_chunk` has put off."""
        if not self.has_backward:
            return
        sums = self.submod if isinstance(self.submod, SumsGradients) else None
        with nullcontext() if sums is None else sums.late_gradients():
            deliver(self._late.pop(chunk))
        if last_backward and sums is not None:
            sums.start_grad_sync()

    def perform_reduce_grad(self, grad_scale_factor: int = 1) -> None:
        """Do nothing: the last gradient has started reductions, and `finalize_grads` ends them.

        Gradients are not scaled either, because each microbatch's loss is weighted by its tokens.
        """

    scale_grads = perform_reduce_grad

    # -- messages -----------------------------------------------------------------------------

    def get_fwd_recv_ops(self, chunk: int) -> list[Message]:
        """Receive the activations of a microbatch."""
        if self.is_first:
            return []
        self._inputs[chunk] = buffer = self._empty(chunk)
        return [self._message(receive_operation, buffer, self.stage_index - 1, chunk)]

    def get_fwd_send_ops(self, chunk: int) -> list[Message]:
        """Send the activations of a microbatch."""
        if self.is_last:
            return []
        sent = self._to_send.pop(chunk)
        return [self._message(send_operation, sent, self.stage_index + 1, chunk)]

    def get_bwd_recv_ops(self, chunk: int) -> list[Message]:
        """Receive the gradient of a microbatch's output."""
        if self.is_last or not self.has_backward:
            return []
        self._output_grads[chunk] = buffer = self._empty(chunk)
        return [self._message(receive_operation, buffer, self.stage_index + 1, chunk)]

    def get_bwd_send_ops(self, chunk: int) -> list[Message]:
        """Send the gradient of a microbatch's input."""
        if self.is_first or not self.has_backward:
            return []
        gradient = self._input_grads.pop(chunk).contiguous()
        return [self._message(send_operation, gradient, self.stage_index - 1, chunk)]

    def set_local_fwd_input(self, prev_stage_outputs: Any, chunk: int) -> None:
        """Take the input from the stage before, if that is on this rank too."""
        self._inputs[chunk] = prev_stage_outputs.detach()

    def get_local_bwd_output(self, chunk: int) -> tuple[Tensor | None, ...]:
        """The input's gradient, for a stage on this rank."""
        return (self._input_grads.pop(chunk, None),)

    def set_local_bwd_input(
        self, next_stage_bwd_outputs: tuple[Tensor | None, ...], chunk: int
    ) -> None:
        """Take the output's gradient from the stage after, if that is on this rank too."""
        if next_stage_bwd_outputs[0] is not None:
            self._output_grads[chunk] = next_stage_bwd_outputs[0]

    def _empty(self, chunk: int) -> Tensor:
        shape = self.stage.activation_shape(self._batches[chunk])
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def _message(self, make: Operation, tensor: Tensor, other: int, chunk: int) -> Message:
        """A message between this stage and a neighbour.

        Each message of a step has a tag of its own, for gloo to match them. Activations, which
        are sent to the stage behind, and gradients have different ones.
        """
        forward = (other > self.stage_index) == (make is send_operation)
        tag = (chunk * self.num_stages + max(other, self.stage_index)) * 2 + forward
        peer = self.stage_index_to_group_rank[other]
        return make(tensor, self.group, peer, tag=tag)
