"""A job by torchtitan's recipe, to be planned: a Llama in plain torch under torch's FSDP2.

Tensor parallelism is DTensor's, and the pipeline is `torch.distributed.pipelining`'s. Settings that
a benchmark of torchtitan does not tell are the defaults of its commit 9dec370.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import virtual_gpu_step
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel
from virtual_gpu_step import Llama

from lamina.mesh import ParallelMesh
from lamina.models import TransformerConfig
from lamina.models.plan import Job, compiled


def by_fsdp2(job: Job, size: str, *, compiled_loss: bool = False) -> Job:
    """The same job by torchtitan's recipe.

    Args:
        job: the model's size, layout, schedule, precision and recomputation.
        size: the name of the model in `virtual_gpu_step.SIZES`.
        compiled_loss: whether the loss is one compiled function.
    """
    loss = compiled(virtual_gpu_step.cross_entropy) if compiled_loss else None

    def make(config: TransformerConfig, mesh: ParallelMesh) -> nn.Module:
        return Llama(replace(virtual_gpu_step.SIZES[size], blocks=config.num_layers))

    def shard(model: nn.Module, played: Job, mesh: ParallelMesh) -> nn.Module:
        # A job of fewer layers is played too, so its stages count, and not those of `job`.
        with_techniques = replace(played, recompute=job.recompute)
        if job.layout.pp > 1:
            return Stages(model, with_techniques, mesh)
        apply_techniques(model, with_techniques, mesh)
        _shard_with_ends(model, mesh)
        with_loss = WithLoss(model, loss or virtual_gpu_step.cross_entropy)
        return with_loss if job.layout.cp == 1 else InContext(with_loss, mesh["cp"])

    return replace(job, recompute="none", make=make, shard=shard)


def apply_techniques(model: Llama, job: Job, mesh: ParallelMesh) -> None:
    """FP8, tensor parallelism, recomputation and compiled blocks, in this order."""
    if job.precision == "fp8":
        virtual_gpu_step.products_in_fp8(model)
    if job.layout.tp > 1:
        virtual_gpu_step.cut_by_dtensors(model, mesh["tp"])
    if job.recompute != "none":
        virtual_gpu_step.recompute(model, str(job.recompute))
    if job.compiled:
        model.blocks = nn.ModuleList(map(compiled, model.blocks))


def _fsdp2(mesh: ParallelMesh) -> dict[str, Any]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return {"mesh": mesh["dp_shard_cp"], "mp_policy": policy}


def _shard_with_ends(model: Llama, mesh: ParallelMesh) -> None:
    """As `virtual_gpu_step.fsdp2`, which makes its own mesh and memory."""
    how = _fsdp2(mesh)
    fully_shard(model.embedding, **how)
    for block in model.blocks:
        fully_shard(block, **how)
    fully_shard([model.norm, model.head], **how, reshard_after_forward=False)
    fully_shard(model, **how)


class WithLoss(nn.Module):
    """The model under its engine, and the loss beside it, as training programs have it."""

    def __init__(self, model: nn.Module, loss: Any) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss."""
        return self.loss(self.model(tokens), labels.flatten())


class InContext(nn.Module):
    """A step of torch's context parallelism, whose attention is around forward and backward."""

    schedule = None

    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        super().__init__()
        self.module, self._mesh = module, mesh

    def step(self, tokens: Tensor, labels: Tensor) -> None:
        """Forward and backward of whole sequences, of which this rank takes its part."""
        buffers = [tokens.clone(), labels.clone()]
        with context_parallel(
            self._mesh, buffers=buffers, buffer_seq_dims=[1, 1], no_restore_buffers=set(buffers)
        ):
            self.module(*buffers).backward()


class Stages(nn.Module):
    """A rank's stages under torch's pipeline schedule.

    Weights stay gathered from a step's first forward to its last backward, as torchtitan has it
    over a pipeline.
    """

    def __init__(self, model: Llama, job: Job, mesh: ParallelMesh) -> None:
        super().__init__()
        self._pp = mesh["pp"]
        numbers = job.stages_of(self._pp.get_local_rank())
        self.stages = nn.ModuleList(stage_of(model, job.stage_sizes, number) for number in numbers)
        for stage in self.stages:
            stage.tokens = job.sequence
            apply_techniques(stage, job, mesh)
            how = {**_fsdp2(mesh), "reshard_after_forward": False}
            for block in stage.blocks:
                fully_shard(block, **how)
            fully_shard(stage, **how)
        pairs = zip(self.stages, numbers, strict=True)
        made = [self._of_torch(stage, number, job, mesh) for stage, number in pairs]
        self._first, self._last = made[0].is_first, made[-1].is_last
        if job.schedule == "1f1b":
            self.schedule: Any = Schedule1F1B(made[0], job.microbatches, loss_fn=_loss)
        else:
            self.schedule = ScheduleInterleaved1F1B(made, job.microbatches, loss_fn=_loss)

    def _of_torch(
        self, stage: nn.Module, number: int, job: Job, mesh: ParallelMesh
    ) -> PipelineStage:
        """A stage of torch's; it is given shapes, as there is nobody to exchange them with."""
        tp, batch, stages = job.layout.tp, job.batch // job.microbatches, len(job.stage_sizes)
        kind: dict[str, Any] = {"device": "meta"}
        hidden = torch.empty(
            batch, job.sequence // tp, job.config.hidden_size, dtype=torch.bfloat16, **kind
        ).requires_grad_()
        given: dict[str, Any] = {"input_args": hidden, "output_args": hidden}
        if number == 0:
            given["input_args"] = torch.empty(batch, job.sequence, dtype=torch.int64, **kind)
        if number == stages - 1:
            words = job.config.vocab_size // tp
            logits = torch.empty(batch, job.sequence, words, dtype=torch.bfloat16, **kind)
            if tp > 1:
                logits = DTensor.from_local(logits, mesh["tp"], [Shard(-1)], run_check=False)
            given["output_args"] = logits.requires_grad_()
            given |= {"input_grads": hidden.detach(), "output_grads": logits.detach()}
        group = self._pp.get_group()
        device = torch.device(mesh.device_type)
        return _Alone(stage, number, stages, device, group=group, **given)

    def step(self, tokens: Tensor, labels: Tensor) -> None:
        """Forward and backward of a batch. The last stage's outputs are kept, which is default."""
        given: dict[str, Any] = {"target": labels, "losses": []} if self._last else {}
        self.schedule.step(*([tokens] if self._first else []), **given)


class _Alone(PipelineStage):
    """A stage whose neighbours do not exist, so nobody votes on whether shapes are known."""

    def _warmup_forward_vote(self, *_: object, **__: object) -> Tensor:
        return torch.ones(())

    def _warmup_backward_result(self, *_: object, **__: object) -> Tensor:
        return torch.ones(())


def stage_of(model: Llama, sizes: tuple[int, ...], number: int) -> Llama:
    """One stage of a model on the meta device; it shares nothing with the others."""
    before = sum(sizes[:number])
    stage = Llama.__new__(Llama)
    nn.Module.__init__(stage)
    stage.head_width, stage.cut, stage.tokens = model.head_width, model.cut, model.tokens
    stage.blocks = nn.ModuleList(model.blocks[before : before + sizes[number]])
    stage.embedding = model.embedding if number == 0 else None
    last = number == len(sizes) - 1
    stage.norm, stage.head = (model.norm, model.head) if last else (nn.Identity(), None)
    return stage


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return virtual_gpu_step.cross_entropy(logits, labels.flatten())
