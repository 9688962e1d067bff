"""Settings: files, command line, errors that name the nearest."""

from __future__ import annotations

import pytest
from config import Config, ModelConfig, TrainConfig, check
from options import CONFIGS, OptionError, from_toml, load


@pytest.fixture
def toml(tmp_path):
    def write(text: str):
        path = tmp_path / "a.toml"
        path.write_text(text)
        return path

    return write


def test_the_command_line_wins_over_the_file_and_the_file_over_defaults(toml):
    path = toml("[train]\nsteps = 7\nlearning_rate = 1\n")
    config = load(["--config", str(path), "--train.steps", "9"], "cpu")
    assert config.train.steps == 9
    assert config.train.learning_rate == 1.0
    assert config.train.batch_size == TrainConfig().batch_size


def test_defaults_follow_the_device():
    assert load([], "cpu") == from_toml(CONFIGS / "cpu.toml")
    assert load([], "cuda") == from_toml(CONFIGS / "gpu.toml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[train]\nlearning_rat = 1.0", r"'train\.learning_rat'; did you mean 'train\.learning_r"),
        ("[trian]\nsteps = 1", r"'trian'; did you mean 'train'"),
        ("[train]\nnum_layers = 1", r"did you mean 'model\.num_layers'"),
        ("[train]\nsteps = 1.5", r"'train\.steps' is 1\.5: it must be int"),
        ("[train]\nsteps = true", r"'train\.steps' is True: it must be int"),
        ("[train]\nstrategy = 4", r"'train\.strategy' is 4: choose 0, 1, 2, 3"),
        ("train = 4", r"'train' is a section"),
        ("[train", r"a\.toml"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place_and_the_nearest(toml, text, message):
    with pytest.raises(OptionError, match=message):
        load(["--config", str(toml(text))], "cpu")


def test_an_unknown_option_is_refused_with_the_nearest(capsys):
    with pytest.raises(SystemExit) as caught:
        load(["--train.stepz", "5"], "cpu")
    assert caught.value.code == 2
    assert "--train.steps" in capsys.readouterr().err


def test_help_explains_every_field(capsys):
    with pytest.raises(SystemExit) as caught:
        load(["--help"], "cpu")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for name in ("--run.seed", "--data.held-out", "--train.clip-norm", "--log.every"):
        assert name in text
    assert "nats" in text or "tokens" in text


def test_a_batch_that_does_not_divide_is_refused_with_the_nearest_ones():
    config = Config(train=TrainConfig(batch_size=10, microbatches=2))
    with pytest.raises(ValueError, match=r"10 is not divisible by 2 ranks x 2 .* take 8 or 12"):
        check(config, ranks=2)
    check(config, ranks=5)


@pytest.mark.parametrize(
    "config",
    [
        Config(train=TrainConfig(steps=0)),
        Config(model=ModelConfig(sequence_length=0)),
    ],
)
def test_impossible_numbers_are_refused(config):
    with pytest.raises(ValueError, match="at least 1"):
        check(config, ranks=1)
