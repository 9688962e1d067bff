"""Settings: files, command line, errors that name the nearest."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields, is_dataclass, replace

import pytest
from build import make_model, model_shape
from config import LIMITS, Config, ModelConfig, TrainConfig, check, unused
from dry_run import ranks_of
from options import CONFIGS, OptionError, check_compiler, configure, from_toml, load

from lamina.collectives import DisagreementError
from lamina.mesh import ParallelLayout, init_distributed


@pytest.fixture
def toml(tmp_path):
    def write(text: str):
        path = tmp_path / "a.toml"
        path.write_text(text)
        return path

    return write


def test_the_first_words_come_before_torch_is_read(tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch is read')")
    train = CONFIGS.with_name("train.py")
    run = subprocess.run(
        [sys.executable, "-P", str(train)],
        env={"PYTHONPATH": f"{tmp_path}{os.pathsep}{train.parent}"},
        capture_output=True,
        text=True,
    )
    assert "train.py: reading PyTorch, which takes some seconds" in run.stdout
    assert "torch is read" in run.stderr


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
    ("text", "messages"),
    [
        ("[train]\nlearning_rat = 1.0", ["train.learning_rat", "--train.learning-rate"]),
        ("[trian]\nsteps = 1", ["trian.steps", "--train.steps"]),
        ("[train]\nnum_layers = 1", ["'train.num_layers'; did you mean 'model.num_layers'?"]),
        ("[train]\nsteps = 1.5", ["--train.steps", "int", "1.5"]),
        ("[train]\nsteps = true", ["--train.steps"]),
        ("[train]\nstrategy = 4", ["--train.strategy", "'4'", "'0', '1', '2', '3'"]),
        ("train = 4", ["'train' is a section: write [train]"]),
    ],
)
def test_a_wrong_file_is_refused_with_the_place_and_the_nearest(toml, text, messages, capsys):
    with pytest.raises(SystemExit) as caught:
        load(["--config", str(toml(text))], "cpu")
    assert caught.value.code == 2
    said = " ".join(capsys.readouterr().err.replace("│", "").split())
    for message in ["a.toml", *messages]:
        assert message in said


def test_a_file_that_is_no_toml_or_not_there_is_refused(toml, tmp_path):
    with pytest.raises(OptionError, match=r"a\.toml"):
        load(["--config", str(toml("[train"))], "cpu")
    with pytest.raises(OptionError, match=r"no such file; in .* there are .*llama3-8b\.toml"):
        load(["--config", str(tmp_path / "b.toml")], "cpu")


def test_a_model_is_a_file_of_settings_or_a_name():
    assert load(["--model", "llama3-8b"], "cpu") == from_toml(CONFIGS / "llama3-8b.toml")
    assert load(["--model", "qwen3-4b"], "cpu") == Config(model=ModelConfig(name="qwen3-4b"))


def test_dropout_is_what_the_setting_says_whatever_the_architecture_has():
    for words, expected in (([], 0.0), (["--model.dropout", "0.2"], 0.2)):
        shape = model_shape(load(["--model", "gpt2", *words], "cpu"), 256).language
        assert (shape.dropout, shape.attention_dropout) == (expected, expected)


def test_tiny_comes_after_the_file_and_before_the_command_line():
    config = load(["--model", "gpt2", "--tiny", "--train.steps", "3", "--mesh", "pp=2"], "cpu")
    tiny = from_toml(CONFIGS / "tiny.toml")
    assert config.model.sequence_length == tiny.model.sequence_length
    assert config.train.learning_rate == from_toml(CONFIGS / "gpt2.toml").train.learning_rate
    assert (config.train.steps, config.model.name, config.mesh) == (3, "gpt2", "pp=2")


def test_an_unknown_option_is_refused_with_the_nearest(capsys):
    with pytest.raises(SystemExit) as caught:
        load(["--train.stepz", "5"], "cpu")
    assert caught.value.code == 2
    assert "--train.steps" in capsys.readouterr().err


def commands():
    """The options of each command of the main job in READMEs and pages."""
    root = CONFIGS.parents[2]
    pages = [*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("examples/**/*.md")]
    text = "\n".join(page.read_text() for page in pages)
    lines = re.findall(r"-s train -- (.*)|examples/pretrain/train.py (--.*)", text)
    return sorted(
        {re.split(r"   | [&>] |`", a or b)[0].rstrip("\\") for a, b in lines} - {"--help"}
    )


@pytest.mark.parametrize("command", commands())
def test_each_command_of_a_page_is_understood(command, tmp_path):
    (tmp_path / "mine.toml").write_text("[train]\nsteps = 5000")
    words = shlex.split(command.replace("mine.toml", str(tmp_path / "mine.toml")), comments=True)
    config = load(words, "cpu")
    check(config, config.ranks or ranks_of(config))


def test_help_explains_every_field(capsys):
    with pytest.raises(SystemExit) as caught:
        load(["--help"], "cpu")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for name in ("--run.seed", "--data.held-out", "--train.clip-norm", "--log.every"):
        assert name in text
    assert "nats" in text or "tokens" in text


def test_a_batch_that_does_not_divide_is_refused_with_the_nearest_ones_in_a_pipeline():
    config = Config(train=TrainConfig(batch_size=10, microbatches=2), mesh="pp=2")
    with pytest.raises(ValueError, match=r"10 is not divisible by 2 ranks x 2 .* take 8 or 12"):
        check(config, ranks=4)
    check(config, ranks=10)
    check(replace(config, mesh="dp_shard=-1"), ranks=4)  # elsewhere it is cut unevenly


def test_compiling_for_a_cpu_is_refused_where_torch_cannot_link(monkeypatch):
    compiled, place = Config(compile=True), "/home/a user/lib/torch/__init__.py"
    monkeypatch.setattr("torch.__version__", "2.13.0")
    with pytest.raises(ValueError, match="lies in /home/a user/lib/torch; clone into a path"):
        check_compiler(compiled, "cpu", place)
    check_compiler(compiled, "cuda", place)
    check_compiler(compiled, "cpu", place.replace(" ", ""))
    check_compiler(Config(), "cpu", place)
    monkeypatch.setattr("torch.__version__", "2.14.0")
    check_compiler(compiled, "cpu", place)


def test_the_same_bits_are_promised_only_where_they_are_kept():
    train = TrainConfig(reproducible=2)
    check(Config(train=train), ranks=3)
    wrong = (
        Config(train=train, mesh="tp=2"),
        Config(train=train, model=ModelConfig(dropout=0.1)),
        Config(train=replace(train, engine="torch_fsdp2")),
    )
    for config in wrong:
        with pytest.raises(ValueError, match=r"--train.reproducible 2 .* dropout 0"):
            check(config, ranks=2)


def test_with_one_order_for_every_layout_axes_and_dropout_are_free():
    train = TrainConfig(reproducible=1, invariant=True)
    check(Config(train=train, mesh="tp=2", model=ModelConfig(dropout=0.1)), ranks=2)


@pytest.mark.parametrize(
    ("option", "limit"),
    [
        ("--train.steps 0", "at least 1"),
        ("--train.batch-size -8", "at least 1"),
        ("--train.microbatches 0", "at least 1"),
        ("--train.learning-rate -1", "above 0"),
        ("--train.learning-rate nan", "above 0"),
        ("--train.clip-norm -1", "above 0"),
        ("--train.warmup-steps -1", "at least 0"),
        ("--train.weight-decay -0.1", "at least 0"),
        ("--train.final-fraction 2", "at most 1"),
        ("--train.beta2 1", "below 1"),
        ("--train.seconds -1", "at least 0"),
        ("--model.dropout 2", "below 1"),
        ("--model.sequence-length 0", "at least 1"),
        ("--model.num-layers -1", "at least 0"),
        ("--data.held-out 0", "above 0"),
        ("--data.held-out 1", "below 1"),
        ("--eval.temperature -1", "at least 0"),
        ("--eval.tokens 0", "at least 1"),
        ("--checkpoint.keep 0", "at least 1"),
        ("--log.every 0", "at least 1"),
    ],
)
def test_impossible_numbers_are_refused_with_the_limit_and_a_number_that_works(option, limit):
    config = load(option.split(), "cpu")
    with pytest.raises(ValueError, match=f"{option.split()[0]} .*{limit}") as refused:
        check(config, ranks=2)
    remedy = str(refused.value).split("such as ")[1]
    check(load([*remedy.split(), "--train.batch-size", "16"], "cpu"), ranks=2)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--train.learning-rate 1e-4", r"learning_rate is 0\.0001 on rank 1 and 0\.002 on rank 0"),
        ("--train.steps 0", r"refused, or --help.* rank 1"),
    ],
)
def test_hosts_that_were_started_with_other_settings_are_told_which(ranks, option, said):
    words = option.split() if ranks.rank == 1 else []
    with init_distributed() as runtime, pytest.raises(DisagreementError, match=said):
        configure(words, runtime)


def test_every_number_has_limits():
    sections = {"": Config(), **{f.name: getattr(Config(), f.name) for f in fields(Config)}}
    numbers = {
        f"{prefix}.{setting.name}".lstrip(".")
        for prefix, section in sections.items()
        if is_dataclass(section)
        for setting in fields(section)
        if type(getattr(section, setting.name)) in (int, float)
    }
    assert numbers - set(LIMITS) == {"run.seed", "train.strategy"}  # any, and one of four


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--model.num-heads 5", "192 is not divisible by num_heads 5"),
        ("--model lama3-8b", "did you mean llama3"),
        ("--mesh tp=x", "--mesh tp=x: .*write tp=2"),
        ("--mesh tq=2", "--mesh tq=2: .*tq"),
        ("--mesh tp=3", "--mesh tp=3: "),
        ("--mesh dp_shard=2,tp=-1,cp=-1", "-1"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_arithmetic(options, said):
    config = load(shlex.split(options), "cpu")
    with pytest.raises(ValueError, match=said):
        check(config, ranks=2) or model_shape(config, 256)


def test_torchs_engine_is_not_asked_for_what_it_does_not_do():
    for options in ("--train.strategy 1", "--mesh pp=2"):
        words = [*options.split(), "--train.engine", "torch_fsdp2"]
        with pytest.raises(ValueError, match=r"--train\.engine lamina"):
            check(load(words, "cpu"), ranks=2)


# Every setting that another one switches off, with the words that do so.
UNUSED = [
    ("schedule", "--schedule gpipe", "--mesh dp_shard=-1"),
    ("eval.samples", "--mesh pp=2 --eval.samples 2", "--mesh pp=2"),
    ("eval.prompt", "--mesh pp=2 --eval.prompt def", "--mesh pp=2"),
    ("eval.prompt", "--eval.samples 0 --eval.prompt def", "--eval.samples 0"),
    ("eval.sample_tokens", "--eval.samples 0 --eval.sample-tokens 7", "--eval.samples 0"),
    ("eval.temperature", "--eval.samples 0 --eval.temperature 1", "--eval.samples 0"),
    (
        "train.microbatches",
        "--train.reproducible 2 --train.microbatches 4",
        "--train.reproducible 2",
    ),
    (
        "train.final_fraction",
        "--train.steps 5 --train.warmup-steps 9 --train.final-fraction 0.5",
        "--train.warmup-steps 9",
    ),
    ("recompute", "--recompute offload", "CPUs"),
    ("run.name", "--run.name a --run.directory b", "--run.directory b"),
    ("health.heal", "--health.replicas 0 --health.heal", "--health.replicas 0"),
    ("health.limit", "--health.spike ignore --health.limit 5", "--health.spike ignore"),
    ("health.patience", "--health.spike stop --health.patience 5", "--health.spike stop"),
    ("data.pattern", "--data.pattern *.md", "--data.path stdlib"),
    ("data.pattern", f"--data.path {shlex.quote(__file__)} --data.pattern *.md", "--data.path /"),
    ("log.trace", "--train.steps 5 --log.trace 20", "--train.steps 5"),
    ("train.engine", "--dry-run --train.engine torch_fsdp2", "--dry-run"),
]


@pytest.mark.parametrize(("name", "options", "by"), UNUSED)
def test_a_setting_that_another_switches_off_is_said_with_the_other(name, options, by):
    (found,) = [
        each for each in unused(load(shlex.split(options), "cpu"), "cpu") if each.name == name
    ]
    assert str(found).startswith(f"--{name.replace('_', '-')} does nothing: ")
    assert by in str(found)


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.toml")), ids=lambda file: file.stem)
def test_no_shipped_file_sets_what_does_nothing(file):
    words = [] if file.stem in ("cpu", "gpu", "tiny") else ["--model", file.stem]
    assert unused(load(words, "cuda" if file.stem == "gpu" else "cpu"), "cuda") == []


def test_settings_for_who_starts_the_ranks_are_not_passed_over():
    with pytest.raises(ValueError, match="--ranks 4: torchrun has started 2"):
        check(Config(ranks=4), ranks=2)


@pytest.mark.ranks(1)
def test_an_export_that_cannot_be_is_refused_before_training():
    config = load(["--model", "mamba-hybrid", "--tiny", "--run.export", "there"], "cpu")
    with pytest.raises(ValueError, match=r"--run\.export there: .*leave --run"):
        make_model(model_shape(config, 256), config, ParallelLayout().build("cpu"))
