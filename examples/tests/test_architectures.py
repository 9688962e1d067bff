"""Every architecture, tiny, over eight layouts: on ranks over gloo, and planned on fake ones.

Four ranks are a step of CI (`python3 noxfile.py -s architectures`), eight are in the weekly job.
"""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
from config import check
from options import load
from recipe_runs import check_layouts, size

BILLIONS = {
    "gpt2": 0.124, "llama3-8b": 8.03, "llama3-70b": 70.6, "mixtral-8x7b": 46.7,
    "deepseek-v3": 671.0, "mamba-hybrid": 8.1, "vision-language": 8.35,
}  # fmt: skip
MODELS = ("gpt", *BILLIONS)
LAYOUTS = (
    "dp_shard=-1",
    "dp_replicate=2,dp_shard=-1",
    "tp=2,dp_shard=-1",
    "cp=2,dp_shard=-1",
    "pp=2,dp_shard=-1",
    "tp=2,pp=2,dp_shard=-1",
    "ep=4,dp_shard=-1",
    "tp=2,cp=2,dp_shard=-1",
)


def fits(model: str, mesh: str) -> bool:
    """What is refused, with the reason, is no cell."""
    experts = model in ("mixtral-8x7b", "deepseek-v3")
    return not (
        ("ep=" in mesh and not experts)
        or ("pp=" in mesh and model == "vision-language")
        or ("cp=" in mesh and model == "mamba-hybrid")
    )


@pytest.mark.slow
@pytest.mark.ranks(4, 8, timeout=600)
@pytest.mark.parametrize("model", MODELS)
def test_every_architecture_trains_over_every_layout(tmp_path, model, ranks):
    meshes = [mesh for mesh in LAYOUTS if fits(model, mesh)]
    batch = ("--train.batch-size", str(2 * ranks.world_size), "--model.dropout", "0")
    check_layouts(tmp_path, model, meshes, *batch)


@pytest.mark.slow
@pytest.mark.ranks(8, backend="fake", timeout=300)
@pytest.mark.parametrize("model", MODELS)
def test_every_architecture_is_planned_over_every_layout(model):
    from dry_run import plan

    read = load(["--model", model, "--tiny", "--train.batch-size", "16"], "cpu")
    for mesh in (mesh for mesh in LAYOUTS if fits(model, mesh)):
        config = replace(read, mesh=mesh)
        check(config, 8)
        printed, axes = "\n".join(plan(config)), asdict(config.layout().validate(8))
        for axis in mesh.replace("-1", "").split(","):
            name = axis.partition("=")[0]
            assert f"{name:>12}{axes[name]:>6}" in printed, mesh
        wide = {name for name, ranks in axes.items() if ranks > 1} - {"dp_replicate"}
        if "ep" not in wide:
            gradients = "dp_cp" if "cp" in wide else "dp_shard"  # parameters are cut over both
            named = {gradients if axis == "dp_shard" else axis for axis in wide}
            assert all(size(printed, axis) > 0 for axis in named), mesh


@pytest.mark.slow
@pytest.mark.ranks(256, backend="fake", timeout=300)
@pytest.mark.parametrize("model", list(BILLIONS))
def test_every_architecture_is_planned_in_its_own_size(model):
    from dry_run import plan

    printed = "\n".join(plan(load(["--model", model], "cpu")))
    assert float(printed.split()[1]) == pytest.approx(BILLIONS[model], rel=0.01)
    assert size(printed, "all at the peak") > size(printed, "peak")


@pytest.mark.parametrize("model", list(BILLIONS))
def test_architectures_have_the_published_number_of_parameters(model):
    from build import model_shape, whole_size

    shape = model_shape(load(["--model", model], "cpu"), 256)
    assert whole_size(shape) / 1e9 == pytest.approx(BILLIONS[model], rel=0.01)
