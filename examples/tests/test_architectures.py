"""Every architecture, tiny, over eight layouts: on ranks over gloo, and planned on fake ones.

Four ranks are a step of CI (`python3 noxfile.py -s architectures`), which takes half of the tests
with each commit. Eight ranks are in the weekly job.
"""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
from config import check
from options import CONFIGS, load
from recipe_runs import check_layouts

BILLIONS = {
    "gpt2": 0.124, "llama3-8b": 8.03, "llama3-70b": 70.6, "mixtral-8x7b": 46.7,
    "deepseek-v3": 671.0 + 11.5,  # its layer of multi-token prediction, by README_WEIGHTS.md
    "mamba-hybrid": 8.1, "vision-language": 8.35,
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
@pytest.mark.parametrize("model", MODELS)
def test_every_architecture_is_planned_over_every_layout(model):
    from dry_run import planned

    read = load(["--model", model, "--tiny", "--train.batch-size", "16"], "cpu")
    for mesh in (mesh for mesh in LAYOUTS if fits(model, mesh)):
        config = replace(read, mesh=mesh)
        check(config, 8)
        sent, axes = planned(config, 8).worst.sent, asdict(config.layout().validate(8))
        wide = {name for name, ranks in axes.items() if ranks > 1} - {"dp_replicate"}
        if "ep" not in wide:
            gradients = "dp_cp" if "cp" in wide else "dp_shard"  # parameters are cut over both
            named = {gradients if axis == "dp_shard" else axis for axis in wide}
            assert all(sent[axis] > 0 for axis in named), mesh


OF_A_MACHINE = ("cpu", "gpu", "tiny")
SHIPPED = sorted(path.stem for path in CONFIGS.glob("*.toml") if path.stem not in OF_A_MACHINE)


@pytest.mark.slow
@pytest.mark.parametrize("model", SHIPPED)
def test_a_shipped_run_fits_the_gpus_that_its_file_names(model):
    from dry_run import planned, ranks_of

    config = load(["--model", model], "cpu")
    assert config.plan.ranks > 0
    plan = planned(config, ranks_of(config))
    assert plan.fits, plan


@pytest.mark.parametrize("model", list(BILLIONS))
def test_architectures_have_the_published_number_of_parameters(model):
    from build import model_shape, whole_size

    shape = model_shape(load(["--model", model], "cpu"), 256)
    assert whole_size(shape) / 1e9 == pytest.approx(BILLIONS[model], rel=0.01)
