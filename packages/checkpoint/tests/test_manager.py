"""One process: what is saved, what comes back, what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lamina.checkpoint import (
    CheckpointManager,
    CheckpointMismatchError,
    CheckpointNotFoundError,
)
from lamina.checkpoint.load.loading import open_checkpoint
from lamina.checkpoint.load.restore_plan import Plan, Selection
from lamina.checkpoint.state.cut_tensors import Hints
from lamina.checkpoint.storage.locations import LocalLocation


def make(seed: int = 0, width: int = 8, **adamw):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **adamw)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def train(state, steps: int, seed: int = 1) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        x = torch.randn(16, 4, generator=generator)
        loss = (state["model"](x) - x[:, :2]).square().mean()
        loss.backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        state["scheduler"].step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"foreach": False}, {"fused": True}])
def test_a_restored_run_goes_on_with_the_same_bits(tmp_path, options):
    state = make(**options)
    train(state, 3)
    CheckpointManager(tmp_path).save(3, state)
    expected = train(state, 4, seed=2)

    other = make(seed=99, **options)
    assert CheckpointManager(tmp_path).restore(other) == 3
    assert train(other, 4, seed=2) == expected


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
        lambda p: torch.optim.Adafactor(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1),
    ],
    ids=["momentum", "adagrad", "adafactor", "sgd"],
)
def test_state_of_any_optimizer_comes_back_into_one_that_never_stepped(tmp_path, optimizer):
    def make_pair():
        state = make()
        state["optimizer"] = optimizer(state["model"].parameters())
        state["scheduler"] = torch.optim.lr_scheduler.ConstantLR(state["optimizer"])
        return state

    state = make_pair()
    train(state, 2)
    CheckpointManager(tmp_path).save(2, state)
    other = make_pair()
    CheckpointManager(tmp_path).restore(other)
    assert train(other, 3, seed=5) == train(state, 3, seed=5)


def test_optimizer_state_follows_names_not_positions(tmp_path):
    state = make()
    train(state, 2)
    CheckpointManager(tmp_path).save(2, state)

    other = make(seed=5)
    names = dict(other["model"].named_parameters())
    backwards = torch.optim.AdamW([names[n] for n in reversed(names)], lr=1e-2)
    CheckpointManager(tmp_path).restore({"model": other["model"], "optimizer": backwards})
    for name, parameter in state["model"].named_parameters():
        expected = state["optimizer"].state[parameter]["exp_avg"]
        assert torch.equal(backwards.state[names[name]]["exp_avg"], expected)


def test_schedules_of_several_parts_go_on(tmp_path):
    def with_schedule(seed: int) -> dict[str, object]:
        state, rates = make(seed), torch.optim.lr_scheduler
        parts = [
            rates.LinearLR(state["optimizer"], total_iters=3),
            rates.MultiStepLR(state["optimizer"], [1, 2]),  # a Counter
        ]
        state["scheduler"] = rates.SequentialLR(state["optimizer"], parts, [3])
        return state

    state = with_schedule(0)
    train(state, 2)
    CheckpointManager(tmp_path).save(2, state)
    expected = train(state, 5, seed=2)
    CheckpointManager(tmp_path).restore(other := with_schedule(9))
    assert train(other, 5, seed=2) == expected


def test_numbers_of_other_libraries_are_numbers(tmp_path):
    manager = CheckpointManager(tmp_path, keep_best=1, async_save=True)
    loss = torch.nn.Parameter(torch.tensor(0.5))
    for step, metric in ((np.int64(1), loss), (torch.tensor(2), np.float32(1)), (True + 2, None)):
        manager.save(step, {"n": np.float64(0.1)}, metric=metric)
    manager.wait()
    assert manager.list() == [1, 3]
    manager.restore(state := {"n": 0})
    assert type(state["n"]) is np.float64
    for wrong, message in (
        ({"step": 2.0}, "integer"),
        ({"metric": torch.ones(2)}, "no float"),
        ({"metric": 10**400}, "no float"),
    ):
        with pytest.raises(ValueError, match=message):
            manager.save(**{"step": 5, "state": {}, **wrong})


def test_a_directory_is_where_it_was_when_the_program_goes_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    manager = CheckpointManager("run")
    manager.save(1, {"n": 1})
    (tmp_path / "x").mkdir()
    monkeypatch.chdir(tmp_path / "x")
    manager.save(2, {"n": 2})
    assert manager.list() == [1, 2]
    assert manager.directory == tmp_path / "run"
    assert list((tmp_path / "x").iterdir()) == []
    with pytest.raises(ValueError, match="pass the URL as a string"):
        CheckpointManager(Path("s3://bucket/run"))


def test_a_copy_under_the_name_of_another_step_is_refused(tmp_path):
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"n": 1})
    shutil.copytree(tmp_path / "step-00000001", tmp_path / "step-00000002")
    with pytest.raises(CheckpointMismatchError, match=r"step-00000002 holds step 1: "):
        manager.restore({"n": 0})


def test_plain_values_and_tensors_come_back(tmp_path):
    value = {"tokens": 5, "rng": torch.get_rng_state(), "order": (1, [2.5], {3: b"x"})}
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"data": value})
    state = {"data": None}
    manager.restore(state)
    assert torch.equal(state["data"].pop("rng"), value.pop("rng"))
    assert state["data"] == value


def test_ranks_that_compare_names_by_position_have_them_in_one_order(tmp_path):
    # Between processes the order of a set of strings differs: only the stored order is the same.
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(20)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    state = {"model": model, "optimizer": optimizer}
    CheckpointManager(tmp_path, verify=False).save(1, state)
    opened = open_checkpoint(LocalLocation(tmp_path / "step-00000001"))
    metadata, trees = opened.metadata, opened.trees
    names = [
        n for n in Plan(state, trees, metadata, Selection(), Hints()).claims if "param_groups" in n
    ]
    stored = trees["optimizer"]["param_groups"][0]["params"]
    assert names == [f"optimizer.param_groups.0: {name}" for name in stored]


def test_a_part_of_a_checkpoint_can_be_restored(tmp_path):
    state = make()
    manager = CheckpointManager(tmp_path)
    manager.save(1, state)
    other = make(seed=3)["model"]
    manager.restore({"model": other})
    assert torch.equal(other[0].weight, state["model"][0].weight)


def test_latest_list_and_restore_of_a_named_step(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        assert manager.latest() is None
        for step in (5, 10, 100):
            manager.save(step, {"n": step})
        assert manager.list() == [5, 10, 100]
        assert manager.latest() == 100
        state = {"n": 0}
        assert manager.restore(state, step=10) == 10
        assert state["n"] == 10


def test_keep_last_keeps_the_newest(tmp_path):
    manager = CheckpointManager(tmp_path, keep_last=2)
    for step in range(5):
        manager.save(step, {"n": step})
    assert manager.list() == [3, 4]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]


def test_a_save_is_complete_though_older_checkpoints_cannot_be_deleted(tmp_path, monkeypatch):
    from lamina.checkpoint.storage.stores import LocalStore

    manager = CheckpointManager(tmp_path, keep_last=1)
    manager.save(0, {"n": 0})

    def refuse(*_: object) -> None:
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(LocalStore, "remove", refuse)
    with pytest.warns(UserWarning, match="step 1 is saved, but older .* busy"):
        assert manager.save(1, {"n": 1}).complete
    assert manager.list() == [0, 1]


def test_keep_last_does_not_count_damaged_checkpoints(tmp_path):
    manager = CheckpointManager(tmp_path, keep_last=2)
    for step in range(3):
        manager.save(step, {"n": step})
    (tmp_path / "step-00000002" / "values.json").unlink()
    manager.save(3, {"n": 3})
    assert manager.list() == [1, 3]


def test_saving_a_step_twice_is_refused_unless_told(tmp_path):
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"n": 1})
    with pytest.raises(FileExistsError, match="overwrite=True"):
        manager.save(1, {"n": 2})
    state = {"n": 0}
    manager.restore(state)
    assert state["n"] == 1
    manager.save(1, {"n": 2}, overwrite=True)
    manager.restore(state)
    assert state["n"] == 2
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def test_no_checkpoint_raises_or_gives_the_default(tmp_path):
    manager = CheckpointManager(tmp_path / "new")
    with pytest.raises(CheckpointNotFoundError, match=r"new; to begin anew there, pass default=0"):
        manager.restore({"n": 0})
    assert manager.restore({"n": 0}, default=0) == 0
    manager.save(1, {"n": 1})
    with pytest.raises(CheckpointNotFoundError, match=r"step 7 .* there are \[1\]"):
        manager.restore({"n": 0}, step=7)


def test_what_does_not_fit_is_named_and_nothing_is_loaded(tmp_path):
    state = make()
    manager = CheckpointManager(tmp_path)
    manager.save(1, state)

    other = make(seed=4, width=9)
    before = other["model"][0].weight.clone()
    with pytest.raises(CheckpointMismatchError, match=r"model\.0\.weight' has shape \[8, 4\]"):
        manager.restore(other)
    with pytest.raises(CheckpointMismatchError, match=r"not in the checkpoint: model\.3\.bias"):
        manager.restore({"model": nn.Sequential(*state["model"], nn.LayerNorm(2))})
    with pytest.raises(CheckpointMismatchError, match=r"only in the checkpoint: model\.2\.bias"):
        manager.restore({"model": nn.Sequential(*list(state["model"])[:2])})
    with pytest.raises(CheckpointMismatchError, match="no entry ema; it has model, optimizer"):
        manager.restore({"ema": 1})
    assert torch.equal(other["model"][0].weight, before)


def test_another_dtype_is_refused_unless_told(tmp_path):
    model = nn.Linear(3, 3)
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"model": model})
    half = nn.Linear(3, 3, dtype=torch.bfloat16)
    with pytest.raises(CheckpointMismatchError, match=r"float32 in the checkpoint and .*bfloat16"):
        manager.restore({"model": half})
    manager.restore({"model": half}, allow_cast=True)
    assert torch.equal(half.weight, model.weight.bfloat16())


def test_parameter_groups_that_differ_are_named(tmp_path):
    state = make()
    train(state, 1)
    manager = CheckpointManager(tmp_path)
    manager.save(1, state)
    parameters = list(state["model"].parameters())
    split = torch.optim.AdamW([{"params": parameters[:1]}, {"params": parameters[1:]}])
    with pytest.raises(CheckpointMismatchError, match="2 parameter groups, the checkpoint has 1"):
        manager.restore({"model": state["model"], "optimizer": split})
    fewer = torch.optim.AdamW(parameters[1:])
    with pytest.raises(CheckpointMismatchError, match=r"param_groups\.0: 0\.weight"):
        manager.restore({"model": state["model"], "optimizer": fewer})


def test_a_failed_save_leaves_nothing_behind(tmp_path):
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"n": 1})
    with pytest.raises(TypeError, match=r"'bad' is a builtins\.object"):
        manager.save(2, {"bad": object()})
    sparse = torch.eye(2).to_sparse()
    with pytest.raises(Exception):  # noqa: B017 (whatever DCP says of a sparse tensor)
        manager.save(2, {"bad": sparse})
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keep_last": 0}, "keep_last is 0"),
        ({"threads": 0}, "threads is 0"),
    ],
)
def test_impossible_settings_are_refused(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        CheckpointManager(tmp_path, **arguments)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_plain_dcp_reads_it(tmp_path):
    state = make()
    train(state, 2)
    CheckpointManager(tmp_path).save(2, state)
    path = tmp_path / "step-00000002"
    other = make(seed=7)["model"].state_dict()
    dcp.load({"model": other}, checkpoint_id=path, no_dist=True)
    for name, tensor in state["model"].state_dict().items():
        assert torch.equal(other[name], tensor)
    dcp_to_torch_save(path, tmp_path / "plain.pt")
    plain = torch.load(tmp_path / "plain.pt", weights_only=True)
    moment = state["optimizer"].state[state["model"][0].weight]["exp_avg"]
    assert torch.equal(plain["optimizer"]["state"]["0.weight"]["exp_avg"], moment)
