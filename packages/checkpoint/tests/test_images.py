"""A vision-language model with frozen parts moves between layouts, as text models do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lamina.checkpoint import CheckpointManager

pytest.importorskip("lamina.fsdp")
pytest.importorskip("lamina.models")
from lamina.ddp import finalize_grads
from lamina.fsdp import fully_shard
from lamina.mesh import ParallelLayout, ParallelMesh
from lamina.models import (
    MoEConfig,
    TopKRouter,
    TransformerBlock,
    TransformerConfig,
    VisionConfig,
    VisionLanguageModel,
)
from lamina_testing import device_type

STEPS, IMAGE = 2, 19
VISION = VisionConfig(hidden_size=16, num_layers=2, num_heads=2, patch_size=4, max_grid=8)
DENSE = TransformerConfig(
    vocab_size=20,
    vocab_multiple=4,
    hidden_size=16,
    num_layers=2,
    num_heads=2,
    ffn_size=32,
    max_sequence_length=16,
    sequence_parallel=True,
)
MOE = MoEConfig(num_experts=4, top_k=2, ffn_size=8, bias_rate=0.05, shared_ffn_size=8)
LANGUAGES = {"dense": DENSE, "experts": replace(DENSE, moe=MOE)}


class Job:
    """A model on a mesh, or alone, and its optimizer; the same data for both."""

    def __init__(
        self, kind: str, frozen: tuple[str, ...], seed: int, mesh: ParallelMesh | None = None
    ) -> None:
        model = VisionLanguageModel(VISION, LANGUAGES[kind], mesh, image_token=IMAGE, seed=seed)
        self.model: torch.nn.Module = model.double().freeze(*frozen)
        trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(trained, 1e-2, foreach=False)
        self.mesh = mesh
        if mesh is not None:
            self.model, self.optimizer = fully_shard(
                model, self.optimizer, device_mesh=mesh, fsdp_unit_modules=[TransformerBlock]
            )

    @property
    def state(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer}

    def train(self, first: int) -> None:
        for step in range(first, first + STEPS):
            generator = torch.Generator().manual_seed(step)
            tokens = torch.randint(0, IMAGE, (4, 16), generator=generator)
            tokens[:, 1:5] = IMAGE  # four patches
            images = torch.rand(4, 3, 8, 8, generator=generator, dtype=torch.float64)
            labels = tokens.roll(-1, 1).masked_fill(tokens.roll(-1, 1) == IMAGE, -100)
            data = [tokens, images, labels]
            if self.mesh is not None:
                dp = self.mesh.axis("dp")
                data = [part.chunk(dp.size)[dp.rank] for part in data]
            self.model(*data).backward()
            if self.mesh is not None:
                finalize_grads(self.model, self.mesh)
            else:
                for module in self.model.modules():
                    if isinstance(module, TopKRouter):
                        module.finalize_step(None)
            self.optimizer.step()
            self.optimizer.zero_grad()


@pytest.mark.slow
@pytest.mark.ranks(4)
@pytest.mark.parametrize("frozen", [(), ("vision",), ("language",)], ids=str)
@pytest.mark.parametrize("kind", list(LANGUAGES))
def test_a_model_that_reads_images_moves_from_layout_to_layout(
    tmp_path: Path, kind: str, frozen: tuple[str, ...]
) -> None:
    ep = {"ep": 2} if kind == "experts" else {}
    meshes = [
        ParallelLayout(**axes, **ep).build(device_type())
        for axes in ({"tp": 2, "dp_shard": 2}, {"dp_shard": 4})
    ]
    mine = [dist.new_group([r]) for r in range(4)][dist.get_rank()]
    alone = Job(kind, frozen, 0)
    alone.train(0)
    if dist.get_rank() == 0:
        CheckpointManager(tmp_path / "0", group=mine).save(STEPS, alone.state)
    dist.barrier()
    for number, mesh in enumerate(meshes):
        job = Job(kind, frozen, 1 + number, mesh)
        CheckpointManager(tmp_path / str(number)).restore(job.state)
        CheckpointManager(tmp_path / str(number + 1)).save(STEPS, job.state)
    for each in (job, alone):
        each.train(STEPS)
    CheckpointManager(tmp_path / "end").save(2 * STEPS, job.state)
    back = Job(kind, frozen, 3)
    CheckpointManager(tmp_path / "end", group=mine).restore(back.state)
    for (name, found), expected in zip(
        back.model.named_parameters(), alone.model.parameters(), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9, msg=name)
        assert (found in back.optimizer.state) == (expected in alone.optimizer.state), name
    for found, expected in zip(back.model.buffers(), alone.model.buffers(), strict=True):
        assert torch.equal(found, expected)
