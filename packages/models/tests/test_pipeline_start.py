"""Stages start with the whole model's weights, whoever draws them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lamina.ddp import DistributedDataParallel, DistributedDataParallelConfig, full_gradients
from lamina.fsdp import fully_shard
from lamina.mesh import ParallelLayout
from lamina.models import GPTModel, MoEConfig, TransformerConfig, pipeline
from lamina_testing import device_type

CONFIG = TransformerConfig(
    vocab_size=40, hidden_size=16, num_layers=4, num_heads=2, ffn_size=24, max_sequence_length=16,
    init_std=0.2,
)  # fmt: skip


@pytest.mark.ranks(2, backend="gloo")  # what a CPU cannot do is refused
def test_a_model_on_the_meta_device_starts_with_the_whole_models_weights(ranks):
    mesh = ParallelLayout(pp=2).build(device_type())
    config = replace(CONFIG, tie_embeddings=True, positions="learned")
    with torch.device("meta"):
        model = GPTModel(config, mesh, seed=1)
    runner = pipeline(model, mesh, "interleaved_1f1b", 2, device="cpu")
    whole = GPTModel(config, seed=1)
    state = whole.state_dict()
    found = runner.state_dict()
    assert found.keys() < state.keys()
    for name, value in found.items():
        assert torch.equal(value, state[name]), name
    names = {name for name, _ in whole.named_parameters()}
    assert {name for name, _ in runner.named_parameters()} < names
    # A whole model's weights go to whichever stage has them.
    runner.load_state_dict({name: value + 1 for name, value in state.items()})
    for name, value in runner.state_dict().items():
        assert torch.equal(value, state[name] + 1), name
    with pytest.raises(ValueError, match="assign=True"):
        runner.load_state_dict(state, assign=True)
    # Positions that the table lacks are refused on every rank: one would wait for the other.
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"positions hold 16 .* must be 0 to 15"):
        runner.evaluate(tokens, tokens, torch.arange(13, 17))
    # So is attention that the device cannot do.
    model = GPTModel(replace(config, attention_path="flex"), mesh, seed=1)
    model.blocks[1].eval()
    runner = pipeline(model, mesh, "1f1b", 2)
    with pytest.raises(ValueError, match="attention_path 'flex' has no backward on cpu"):
        runner.step(tokens, tokens)
    # What was in evaluation stays there.
    modes = {n: m.training for stage in runner.stages for n, m in stage.named_modules() if n}
    assert [n for n in modes if not modes[n]] == [n for n in modes if n.startswith("blocks.1")]


@pytest.mark.ranks(1)
def test_what_no_stage_would_have_is_refused(ranks):
    class Own(GPTModel):
        def embed(self, tokens, positions, splice=None):
            return 2 * super().embed(tokens, positions, splice)

    class Started(GPTModel):
        def build(self, config, axis):
            super().build(config, axis)

        def init_weights(self):
            super().init_weights()
            torch.nn.init.zeros_(self.final_norm.weight)

        def num_parameters(self, *, embeddings=True):
            return 2 * super().num_parameters(embeddings=embeddings)

    def hooked(model):
        model.register_forward_hook(lambda *_: None)

    mesh = ParallelLayout().build(device_type())
    changes = {
        r"modules of its own .*\(extra\)": lambda m: m.add_module("extra", torch.nn.Identity()),
        r"parameters and buffers .*\(bias\)": lambda m: m.register_buffer("bias", torch.ones(1)),
        "hooks of its own": hooked,
        r"methods of its own .*\(forward\)": lambda m: setattr(m, "forward", print),
        r"blocks of its own .*\(4\)": lambda m: m.blocks.append(torch.nn.Identity()),
        "has 3 blocks, and num_layers .* is 4": lambda m: m.blocks.pop(1),
    }
    for message, change in changes.items():
        model = GPTModel(CONFIG, seed=1)
        change(model)
        with pytest.raises(ValueError, match=message):
            pipeline(model, mesh)
    with pytest.raises(ValueError, match=r"the Own has methods of its own .*\(embed\)"):
        pipeline(Own(CONFIG, seed=1), mesh)
    # What has been called already, or no step calls, is not lost.
    started = Started(CONFIG, seed=1)
    assert not started.final_norm.weight.any()
    assert not pipeline(started, mesh).stages[0].final_norm.weight.any()
    with torch.device("meta"):
        late = Started(CONFIG, seed=1)
    with pytest.raises(ValueError, match=r"methods of its own .*\(init_weights\)"):
        pipeline(late, mesh, device="cpu")
    runner, tokens = pipeline(GPTModel(CONFIG, seed=1).half(), mesh), torch.zeros(1, 4).long()
    with pytest.raises(ValueError, match=r"step in float16: .* without a loss scale"):
        runner.step(tokens, tokens)
    assert runner.evaluate(tokens, tokens).isfinite()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_parts_of_a_model_from_different_seeds_are_refused(axis, ranks):
    mesh = ParallelLayout(**{axis: 2}).build(device_type())
    torch.manual_seed(ranks.rank)
    for device in ("cpu", "meta"):
        with torch.device(device):
            with pytest.raises(ValueError, match=f"ranks of {axis} would draw .* different seeds"):
                GPTModel(CONFIG, mesh)
            model = GPTModel(CONFIG, seed=ranks.rank)
        if axis == "pp":
            with pytest.raises(ValueError, match=r"ranks of pp would draw .* different seeds"):
                pipeline(model, mesh, "1f1b", 2, device="cpu")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("axis", ["cp", "tp", "ep"])
def test_a_model_that_is_not_built_for_the_mesh_is_refused(axis, ranks):
    sizes = {"dp_shard": 2, "ep": 2} if axis == "ep" else {axis: 2}
    mesh, alone = (ParallelLayout(**s).build(device_type()) for s in (sizes, {"dp_shard": 2}))
    config = CONFIG
    if axis == "ep":
        config = replace(CONFIG, moe=MoEConfig(num_experts=4, top_k=2, ffn_size=8))
    with pytest.raises(ValueError, match=f"built for {axis} 1, and the mesh has {axis} 2"):
        pipeline(GPTModel(config, seed=0), mesh, wrap=lambda stage: stage)
    with pytest.raises(ValueError, match=f"built for {axis} 2, and the mesh has {axis} 1"):
        pipeline(GPTModel(config, mesh, seed=0), alone, wrap=lambda stage: stage)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("schedule", "kind"),
    [
        ("1f1b", None),
        ("1f1b", "ddp"),
        ("zbv_zero_bubble", "fsdp"),
        ("interleaved_zero_bubble", None),
    ],
)
def test_a_first_stage_may_be_frozen(schedule, kind, ranks):
    mesh = ParallelLayout(pp=2).build(device_type())
    model, whole = (GPTModel(CONFIG, m, seed=1) for m in (mesh, None))
    layout = [2, 2] if schedule == "1f1b" else [1, 1, 1, 1]
    for each in (model, whole):
        for module in (each.embedding, *each.blocks[: layout[0]]):
            module.requires_grad_(False)
    wraps = {
        "fsdp": lambda stage: fully_shard(stage, device_mesh=mesh),
        "ddp": lambda stage: DistributedDataParallel(stage, DistributedDataParallelConfig(), mesh),
    }
    runner = pipeline(model, mesh, schedule, 4, layout, wrap=wraps.get(kind))
    tokens = torch.arange(32).view(4, 8)
    for _ in range(2):
        loss = whole(tokens, tokens)
        loss.backward()
        torch.testing.assert_close(runner.step(tokens, tokens), loss.detach())
        found = {name: p.grad for name, p in runner.named_parameters() if p.grad is not None}
        if kind is not None:
            found = full_gradients(runner)
        assert bool(found) == (ranks.rank == 1 or schedule != "1f1b")
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, whole.get_parameter(name).grad, msg=name)
        for stage in (whole, *runner.stages):
            getattr(stage, "zero_grad_buffer", stage.zero_grad)()
