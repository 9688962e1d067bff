"""What of a checkpoint is loaded, what differs from rank to rank, where it may lie."""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn

from lamina.checkpoint import (
    CheckpointError,
    CheckpointManager,
    CheckpointMismatchError,
    PerRank,
    RngState,
    import_dcp,
)
from lamina_testing import device_type


def two(extra: bool = False) -> dict[str, object]:
    torch.manual_seed(0 if extra else 1)
    layers = {"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}
    if extra:
        layers["c"] = nn.Linear(4, 4)
    model = nn.ModuleDict(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    sum(layer(torch.ones(4)).sum() for layer in model.values()).backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def test_added_layers_are_named_and_left_alone(tmp_path):
    saved, larger = two(), two(extra=True)
    manager = CheckpointManager(tmp_path)
    manager.save(1, saved)
    own = {n: p.detach().clone() for n, p in larger["model"].named_parameters()}
    with pytest.raises(CheckpointMismatchError, match=r"not in the checkpoint: model\.c\.bias"):
        manager.restore(larger)
    manager.restore(larger, strict=False)
    for name, parameter in larger["model"].named_parameters():
        expected = own if name.startswith("c") else dict(saved["model"].named_parameters())
        assert torch.equal(parameter, expected[name]), name
        assert larger["optimizer"].state[parameter]["step"] == 1
    assert "model.c.weight" in manager.last_restore.missing
    assert not manager.last_restore.unexpected


def test_a_restore_of_nothing_is_refused(tmp_path):
    manager = CheckpointManager(tmp_path)
    saved = two()
    manager.save(1, saved)
    around = {"model": nn.ModuleDict({"module": saved["model"]})}
    with pytest.raises(CheckpointMismatchError, match=r"'model' has no name in common") as error:
        manager.restore(around, strict=False)
    assert "only here model.module.a.bias" in str(error.value)
    assert "only in the checkpoint model.a.bias" in str(error.value)
    with pytest.raises(CheckpointMismatchError, match="has no entry"):
        manager.restore({"other": saved["model"]}, strict=False)
    manager.restore({"other": nn.Linear(1, 1), **saved}, strict=False)
    assert manager.last_restore.missing == ("other",)


def test_removed_layers_are_named_and_passed_over(tmp_path):
    saved, smaller = two(extra=True), two()
    manager = CheckpointManager(tmp_path)
    manager.save(1, saved)
    with pytest.raises(CheckpointMismatchError, match=r"only in the checkpoint: model\.c\.bias"):
        manager.restore(smaller)
    manager.restore(smaller, strict=False)
    expected = dict(saved["model"].named_parameters())
    for name, parameter in smaller["model"].named_parameters():
        assert torch.equal(parameter, expected[name])
        moment = saved["optimizer"].state[expected[name]]["exp_avg"]
        assert torch.equal(smaller["optimizer"].state[parameter]["exp_avg"], moment)
    assert "model.c.weight" in manager.last_restore.unexpected
    assert "optimizer.state.c.bias.exp_avg" in manager.last_restore.unexpected


def test_parts_are_loaded_by_pattern_and_the_optimizer_apart(tmp_path):
    saved = two(extra=True)
    manager = CheckpointManager(tmp_path)
    manager.save(1, saved)
    stored = dict(saved["model"].named_parameters())

    other = two(extra=True)
    with torch.no_grad():
        for parameter in other["model"].parameters():
            parameter.zero_()
    manager.restore(other, include=["model.a", "model.*.bias"], exclude=["model.b.*"])
    for name, parameter in other["model"].named_parameters():
        wanted = name.startswith("a") or name == "c.bias"
        assert torch.equal(parameter, stored[name]) == wanted, name
        assert wanted or not parameter.any()

    fresh = two(extra=True)
    fresh["optimizer"] = torch.optim.AdamW(fresh["model"].parameters(), lr=0.5)
    before = fresh["model"]["a"].weight.detach().clone()
    manager.restore(fresh, include=["optimizer"])
    assert torch.equal(fresh["model"]["a"].weight, before)
    moments = fresh["optimizer"].state[fresh["model"]["a"].weight]
    expected = saved["optimizer"].state[stored["a.weight"]]
    assert torch.equal(moments["exp_avg"], expected["exp_avg"])
    assert fresh["optimizer"].param_groups[0]["lr"] == 0.1


def test_a_pattern_that_matches_nothing_is_refused(tmp_path):
    manager = CheckpointManager(tmp_path)
    manager.save(1, two())
    before = (state := two())["model"]["a"].weight.detach().clone()
    for patterns in ({"include": ["modle"]}, {"exclude": ["optimizer", "model.c"]}):
        with pytest.raises(CheckpointMismatchError, match=r"modle|model\.c"):
            manager.restore(state, **patterns)
    assert torch.equal(state["model"]["a"].weight, before)
    larger = two(extra=True)
    manager.restore(larger, exclude=["model.c", "optimizer"])  # here, if not in the checkpoint


def test_one_pattern_needs_no_list(tmp_path):
    manager = CheckpointManager(tmp_path)
    manager.save(1, saved := two())
    state = two(extra=True)  # of another seed
    manager.restore(state, include="model", exclude="model.c")
    assert torch.equal(state["model"]["a"].weight, saved["model"]["a"].weight)


@pytest.mark.parametrize("rate", [0.5, torch.tensor(0.5)], ids=["number", "tensor"])
@pytest.mark.parametrize(
    "patterns",
    [
        {"include": ["model", "optimizer.state"]},
        {"exclude": ["optimizer.param_groups"]},
        {"exclude": ["optimizer.param_groups.*.lr"]},
    ],
)
def test_hyperparameters_that_are_not_selected_stay(tmp_path, rate, patterns):
    saved, other = two(), two()
    for held, lr in ((saved, 0.1), (other, 0.5)):
        group = held["optimizer"].param_groups[0]
        group["lr"] = torch.tensor(lr) if isinstance(rate, torch.Tensor) else lr
        group["eps"] = lr
    manager = CheckpointManager(tmp_path)
    manager.save(1, saved)
    weight, stored = other["model"]["a"].weight, saved["model"]["a"].weight
    other["optimizer"].state[weight]["exp_avg"].zero_()
    manager.restore(other, **patterns)
    assert other["optimizer"].param_groups[0]["lr"] == 0.5
    assert other["optimizer"].param_groups[0]["eps"] == (0.1 if "lr" in str(patterns) else 0.5)
    expected = saved["optimizer"].state[stored]["exp_avg"]
    assert torch.equal(other["optimizer"].state[weight]["exp_avg"], expected)
    halves = torch.optim.AdamW(
        [{"params": [p]} for p in other["model"].parameters()], lr=0.5
    )  # cut otherwise, which is all the same to the state
    if "lr" not in str(patterns):
        manager.restore({**other, "optimizer": halves}, **patterns)
        assert torch.equal(halves.state[weight]["exp_avg"], expected)


@pytest.mark.parametrize(("left_out", "rate"), [("optimizer", 0.5), ("optimizer.state", 0.1)])
def test_a_new_optimizer_begins_anew_where_its_state_is_left_out(tmp_path, left_out, rate):
    saved, other = two(), two()
    manager = CheckpointManager(tmp_path)
    manager.save(1, saved)
    other["optimizer"] = torch.optim.AdamW(other["model"].parameters(), lr=0.5)
    manager.restore(other, exclude=[left_out])
    assert torch.equal(other["model"]["a"].weight, saved["model"]["a"].weight)
    assert other["optimizer"].param_groups[0]["lr"] == rate
    assert not any(other["optimizer"].state.values())
    other["model"]["a"](torch.ones(4)).sum().backward()
    other["optimizer"].step()
    assert other["optimizer"].state[other["model"]["a"].weight]["step"] == 1


@pytest.mark.ranks(2)
def test_every_rank_reports_what_any_rank_misses(tmp_path):
    import torch.distributed as dist

    class Stage(nn.Module):  # as of a pipeline: each rank holds layers of its own
        def __init__(self, names: str) -> None:
            super().__init__()
            self.layers = nn.ModuleDict({name: nn.Linear(2, 2) for name in names})

    rank = dist.get_rank()
    torch.manual_seed(0)
    manager = CheckpointManager(tmp_path)

    def training(*rates: float) -> dict[str, object]:
        model = Stage("ab"[rank])
        groups = [{"params": [], "lr": rate} for rate in rates]
        groups[0]["params"] = list(model.parameters())
        return {"model": model, "optimizer": torch.optim.SGD(groups)}

    for rates, message in (
        ([(1.0, 2.0), (2.0, 3.0)], r"lr=1\.0 in parameter group 0 on rank 0 and 2\.0 on rank 1"),
        ([(1.0, 2.0, 3.0), (1.0, 2.0)], r"3 parameter groups on rank 0 and 2 on rank 1"),
    ):
        with pytest.raises(CheckpointError, match=message):
            manager.save(1, training(*rates[rank]))
    manager.save(2, training(1.0, 2.0))
    manager.save(1, {"model": Stage("ab"[rank])})
    manager.restore({"model": Stage(("a", "bc")[rank])}, step=1, strict=False)
    missing = ("model.layers.c.bias", "model.layers.c.weight")
    assert manager.last_restore.missing == missing
    assert manager.last_restore.unexpected == ()


@pytest.mark.ranks(2)
def test_a_cut_parameter_that_no_module_knows_the_axis_of_needs_a_mesh(tmp_path):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from lamina.mesh import mark

    def half(rank: int) -> nn.Module:
        model = nn.Linear(3, 2, bias=False)
        with torch.no_grad():
            model.weight.fill_(rank)
        mark(model.weight, tp_shard_dim=0)
        return model

    rank = dist.get_rank()
    with pytest.raises(CheckpointError, match=r"axis tp, but .* pass mesh="):
        CheckpointManager(tmp_path).save(1, {"model": half(rank)})
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("tp",))
    manager = CheckpointManager(tmp_path, mesh=mesh, threads=2)
    manager.save(1, {"model": half(rank)})
    other = half(7)
    manager.restore({"model": other})
    assert torch.equal(other.weight, torch.full((2, 3), float(rank)))
    alone = [dist.new_group([r]) for r in range(2)][rank]
    whole = nn.Linear(3, 4, bias=False)
    CheckpointManager(tmp_path, group=alone).restore({"model": whole})
    assert torch.equal(whole.weight[:, 0], torch.tensor([0.0, 0.0, 1.0, 1.0]))


def test_threads_write_a_file_each_and_a_bar_counts_what_passes(tmp_path, monkeypatch):
    import lamina.checkpoint.progress as progress_module

    bars: list[dict[str, object]] = []

    class Bar:
        def __init__(self, **options: object) -> None:
            bars.append({**options, "seen": 0, "open": True})

        def update(self, size: int) -> None:
            bars[-1]["seen"] += size

        def close(self) -> None:
            bars[-1]["open"] = False

    class Terminal:
        def isatty(self) -> bool:
            return True

    tqdm = types.SimpleNamespace(tqdm=Bar)
    monkeypatch.setattr(progress_module.importlib, "import_module", lambda _: tqdm)
    monkeypatch.setattr(progress_module.sys, "stderr", Terminal())
    state = {f"t{i}": torch.full((1000,), float(i)) for i in range(5)}
    manager = CheckpointManager(tmp_path, threads=3)
    report = manager.save(1, state)
    files = sorted((tmp_path / "step-00000001").glob("*.distcp"))
    assert [file.name for file in files] == ["__0_0.distcp", "__0_1.distcp", "__0_2.distcp"]
    assert report.bytes_per_second == report.bytes / report.seconds > 0
    got = {f"t{i}": None for i in range(5)}
    manager.restore(got)
    assert all(torch.equal(got[name], tensor) for name, tensor in state.items())
    assert manager.last_restore.bytes_per_second > 0
    assert [bar["desc"].split()[0] for bar in bars] == ["saving", "loading"]
    written = sum(file.stat().st_size for file in files)
    assert [bar["seen"] for bar in bars] == [written, written]
    assert not any(bar["open"] for bar in bars)
    model = {"model": nn.Linear(2, 2)}
    path = CheckpointManager(tmp_path, progress=False).save(2, model).path
    import_dcp(model, path)
    assert len(bars) == 2


@pytest.mark.ranks(2)
def test_every_rank_gets_its_own_state_back(tmp_path):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from lamina.mesh.engine import mesh_axis

    rank = dist.get_rank()
    torch.manual_seed(rank)
    manager = CheckpointManager(tmp_path)
    state = {"rng": PerRank(RngState()), "mine": PerRank({"rank": rank, "t": torch.ones(rank)})}
    manager.save(1, state)
    expected = torch.randn(5)
    torch.manual_seed(77)
    got = {"rng": PerRank(RngState()), "mine": PerRank(None)}
    manager.restore(got)
    assert torch.equal(torch.randn(5), expected)
    assert got["mine"].value["rank"] == rank
    assert got["mine"].value["t"].numel() == rank
    with pytest.raises((CheckpointMismatchError, CheckpointError), match="PerRank"):
        manager.restore({"mine": 0})

    # On as many, in another layout.
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("tp",))
    held = nn.Module()
    held.axis = mesh_axis(mesh, "tp")
    for options, others in (({"mesh": mesh}, {}), ({}, {"model": held})):
        manager = CheckpointManager(tmp_path, **options)
        with pytest.warns(UserWarning, match=rf"at no place .* at tp {rank} of 2"):
            manager.restore({"mine": PerRank(None), **others}, strict=False)
        expected = pytest.raises((CheckpointMismatchError, CheckpointError), match=r"tp|rank")
        with expected:
            manager.restore({"mine": PerRank(None, on_change="raise"), **others}, strict=False)
    manager = CheckpointManager(tmp_path / "b")
    manager.save(2, {"mine": PerRank(rank), "model": held})
    manager.restore(got := {"mine": PerRank(None), "model": held})
    assert got["mine"].value == rank

    alone = [dist.new_group([r]) for r in range(2)][rank]
    manager = CheckpointManager(tmp_path, group=alone)  # on another number of ranks
    with pytest.warns(UserWarning, match="saved by 2 ranks"):
        manager.restore({"mine": PerRank(None)})
    first = {"mine": PerRank(None, on_change="first")}
    manager.restore(first)
    assert first["mine"].value["rank"] == 0
    with pytest.raises(CheckpointMismatchError, match="saved by 2 ranks"):
        manager.restore({"mine": PerRank(None, on_change="raise")})


def test_an_object_store_holds_checkpoints(tmp_path):
    pytest.importorskip("fsspec")
    url = f"memory://{tmp_path.name}/run"
    state = two()
    manager = CheckpointManager(url, keep_last=2, async_save=True)
    for step in range(3):
        manager.save(step, {**state, "n": step})
    manager.close()
    assert manager.list() == [1, 2]
    assert CheckpointManager(url).latest() == 2
    other = {**two(extra=False), "n": 0}
    assert manager.restore(other) == 2
    assert other["n"] == 2
    assert torch.equal(other["model"]["a"].weight, state["model"]["a"].weight)


def test_in_an_object_store_only_a_manifest_makes_a_checkpoint(tmp_path):
    fsspec = pytest.importorskip("fsspec")
    url = f"memory://{tmp_path.name}/run"
    fs = fsspec.filesystem("memory")
    manager = CheckpointManager(url)
    manager.save(1, {"n": 1})
    with pytest.raises(FileExistsError, match="overwrite=True"):
        manager.save(1, {"n": 2})
    manager.save(1, {"n": 2}, overwrite=True)
    assert [e.rpartition("/")[2] for e in fs.ls(f"/{tmp_path.name}/run", detail=False)] == [
        "step-00000001-1"
    ]
    manager.save(5, {"n": 5})
    fs.rm_file(f"/{tmp_path.name}/run/step-00000005/manifest.json")  # a writer killed at the end
    assert manager.list() == [1]
    state = {"n": 0}
    CheckpointManager(url).restore(state)
    assert state["n"] == 2
    assert fs.exists(f"/{tmp_path.name}/run/step-00000005")  # it may be at work
    CheckpointManager(url).save(6, {"n": 6})
    assert not fs.exists(f"/{tmp_path.name}/run/step-00000005")


def test_a_failed_save_leaves_nothing_in_an_object_store(tmp_path, monkeypatch):
    fsspec = pytest.importorskip("fsspec")
    fs = fsspec.filesystem("memory")
    manager = CheckpointManager(f"memory://{tmp_path.name}")
    manager.save(1, {"t": torch.ones(3)})
    honest = type(fs).open

    def full(self, path, mode="rb", **options):
        if path.endswith("chunks.json") and mode == "wb":
            raise OSError(28, "quota exceeded")
        return honest(self, path, mode, **options)

    with monkeypatch.context() as patched:
        patched.setattr(type(fs), "open", full)
        with pytest.raises(CheckpointError, match="quota"):
            manager.save(2, {"t": torch.ones(3)})
    assert [e.rpartition("/")[2] for e in fs.ls(f"/{tmp_path.name}", detail=False)] == [
        "step-00000001"
    ]


def test_a_file_url_is_a_path(tmp_path):
    manager = CheckpointManager(f"file://{tmp_path}/run")
    manager.save(1, {"n": 1})
    assert (tmp_path / "run" / "step-00000001").is_dir()
