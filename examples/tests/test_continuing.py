"""A run that goes on in its directory: what stays, what is said to change, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from build import learning_rate
from config import Config, EvalConfig, ModelConfig, TrainConfig
from options import load
from run import Run

TRAIN = TrainConfig(steps=100, warmup_steps=10, learning_rate=1e-2, final_fraction=0.1)
BEGUN = Config(train=TRAIN, model=ModelConfig(hidden_size=64))


def goes_on(directory, config):
    """Where the schedule ends, and what is said, of a run that was begun with `BEGUN`."""
    runtime = SimpleNamespace(is_main=True)
    Run(BEGUN, directory, runtime).begin()
    return Run(config, directory, runtime).continued()


def with_train(**changes):
    return replace(BEGUN, train=replace(TRAIN, **changes))


def test_the_same_settings_go_on_without_a_word(tmp_path):
    assert goes_on(tmp_path, BEGUN) == (100, [])
    prompted = replace(BEGUN, eval=EvalConfig(prompt="def main"))
    assert goes_on(tmp_path, prompted) == (100, [])


def test_more_steps_do_not_raise_the_learning_rate_and_both_rates_are_said(tmp_path):
    end, (said,) = goes_on(tmp_path, with_train(steps=200))
    assert end == 100
    continued = replace(TRAIN, steps=200, schedule_steps=end)
    rates = [learning_rate(step, continued) for step in range(200)]
    assert rates[:100] == [learning_rate(step, TRAIN) for step in range(100)]
    assert rates[100:] == pytest.approx([1e-3] * 100)
    raised = learning_rate(100, replace(TRAIN, steps=200))
    assert raised > 5e-3
    assert "1.0e-03" in said
    assert f"--train.schedule-steps 200 raises it to {raised:.1e}" in said


def test_another_schedule_is_a_choice_and_both_rates_are_said(tmp_path):
    end, (said,) = goes_on(tmp_path, with_train(steps=200, schedule_steps=200))
    assert end == 200
    raised = learning_rate(100, replace(TRAIN, steps=200))
    assert f"is {raised:.1e} and not 1.0e-03" in said


def test_steps_at_a_rate_of_zero_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(f"{__name__}.BEGUN", with_train(final_fraction=0.0))
    with pytest.raises(ValueError, match=r"of 0; --train\.schedule-steps 200 raises"):
        goes_on(tmp_path, with_train(final_fraction=0.0, steps=200))


def test_a_run_of_other_sizes_is_refused_with_a_command_that_goes_on(tmp_path, monkeypatch):
    words = ["--config", "mine.toml", "--model.hidden-size", "96", "--tiny"]
    monkeypatch.setattr("sys.argv", ["train.py", *words])
    other = replace(BEGUN, model=ModelConfig(hidden_size=96), tiny=True)
    with pytest.raises(ValueError, match=r"model\.hidden_size was 64 and is 96") as caught:
        goes_on(tmp_path, other)
    advised = str(caught.value).partition("-s train -- ")[2].split()
    assert advised[:2] == ["--config", "mine.toml"]
    config = load(advised[2:], "cpu")
    assert config.model.hidden_size == 64
    assert not config.tiny


def test_what_may_change_is_said(tmp_path):
    _, said = goes_on(tmp_path, with_train(learning_rate=2e-2))
    assert said == ["--train.learning-rate was 0.01 and is 0.02 from here on"]


def test_a_record_from_before_there_was_a_schedule_is_read(tmp_path):
    runtime = SimpleNamespace(is_main=True)
    Run(BEGUN, tmp_path, runtime).begin()
    record = json.loads((tmp_path / "config.json").read_text())
    del record["train"]["schedule_steps"]
    (tmp_path / "config.json").write_text(json.dumps(record))
    assert Run(with_train(steps=200), tmp_path, runtime).continued()[0] == 100
