"""The main job trains with Lamina's engine and with torch's FSDP2, to the same losses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from lamina_testing.client import ForkServer
from lamina_testing.programs import run_ranks

PRETRAIN = Path(__file__).parents[1] / "pretrain"
SETTINGS = f"""
[data]
path = "{PRETRAIN}"
held_out = 0.2
[model]
num_layers = 1
hidden_size = 32
num_heads = 2
sequence_length = 32
[train]
batch_size = 4
microbatches = 2
warmup_steps = 4
[eval]
every = 6
tokens = 256
samples = 1
sample_tokens = 4
[checkpoint]
every = 6
"""


@pytest.fixture
def train(rank_server: ForkServer) -> Callable[..., list[dict[str, float]]]:
    """Train on two ranks; return the lines of metrics.jsonl."""

    def train(directory: Path, engine: str, steps: int) -> list[dict[str, float]]:
        config = directory.parent / "config.toml"
        config.write_text(SETTINGS)
        words = [str(PRETRAIN / "train.py"), "--config", str(config)]
        words += ["--run.directory", str(directory)]
        words += ["--train.engine", engine, "--train.steps", str(steps)]
        ended = rank_server.call(run_ranks, words=words, nproc=2)
        assert [each.code for each in ended] == [0, 0], "".join(each.output for each in ended)
        lines = (directory / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    return train


def losses(lines: list[dict[str, float]]) -> dict[float, float]:
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@pytest.mark.slow
def test_both_engines_train_to_the_same_losses(train, tmp_path):
    wanted = losses(train(tmp_path / "lamina", "lamina", 6))
    found = losses(train(tmp_path / "torch", "torch_fsdp2", 6))
    assert found.keys() == wanted.keys()
    for step, loss in wanted.items():
        assert found[step] == pytest.approx(loss, abs=1e-4)


@pytest.mark.slow
def test_torchs_engine_goes_on_from_its_checkpoint(train, tmp_path):
    directory = tmp_path / "run"
    wanted = losses(train(directory, "torch_fsdp2", 12))
    (newest,) = directory.rglob("step-*12")
    shutil.rmtree(newest)
    (directory / "metrics.jsonl").unlink()
    found = losses(train(directory, "torch_fsdp2", 12))
    assert min(found) > 6
    assert found == pytest.approx({step: wanted[step] for step in found}, abs=1e-6)
