"""Small runs of the main job on ranks of a test, and the same in one process of plain PyTorch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from config import Config

PRETRAIN = Path(__file__).parents[1] / "pretrain"
STEPS = 3
SETTINGS = f"""
tiny = true
[data]
path = "{PRETRAIN}"
held_out = 0.2
[train]
steps = {STEPS}
batch_size = 8
microbatches = 2
learning_rate = 1e-3
warmup_steps = 1
[eval]
every = 1000
tokens = 64
samples = 0
[log]
tensorboard = false
"""


def settings(directory: Path, model: str, *options: str) -> list[str]:
    """The command line of a small run: the architecture's kinds, without its schedule."""
    path = directory / f"settings{os.getpid()}.toml"
    path.write_text(SETTINGS)
    steps = ["--train.steps", str(STEPS), "--eval.samples", "0", "--eval.tokens", "64"]
    return ["--config", str(path), "--model", model, *steps, *options]


def train_here(directory: Path, words: list[str]) -> None:
    """Run the job in this process, which is a rank."""
    from options import configure
    from train import train

    from lamina.mesh import init_distributed

    with init_distributed() as runtime:
        train(configure(["--run.directory", str(directory), *words], runtime), runtime)
    dist.barrier()  # the first rank writes the report


def losses(directory: Path) -> list[float]:
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [record["loss"] for record in map(json.loads, lines) if "loss" in record]


def one_process(directory: Path, config: Config) -> list[float]:
    """The same model on the same batches: plain PyTorch, no mesh, the whole batch at once."""
    from build import learning_rate, model_shape
    from data import Windows, open_corpus, slice_of_step

    from lamina.models import GPTModel, VisionLanguageModel

    corpus = open_corpus(config.data, directory / "data")
    shape = model_shape(config, corpus.tokenizer.vocab_size)
    if shape.vision is None:
        model = GPTModel(shape.language, seed=config.run.seed)
    else:
        token = shape.language.vocab_size - 1
        model = VisionLanguageModel(
            shape.vision, shape.language, image_token=token, seed=config.run.seed
        )
    train, samples = config.train, Windows(corpus.train, config.model.sequence_length)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
        betas=(train.beta1, train.beta2),
        weight_decay=train.weight_decay,
    )
    found = []
    for step in range(train.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, train)
        places = range(train.batch_size)
        mine = slice_of_step(step, config.run.seed, len(samples), train.batch_size, places)
        loss = model(**shape.arguments(*samples.batch(mine, torch.device("cpu"))))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), train.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def check_layouts(directory: Path, model: str, meshes: Iterable[str], *options: str) -> None:
    """Runs on these ranks, one after the other, have the losses of one process."""
    from config import check
    from options import configure
    from train import train

    from lamina.mesh import init_distributed

    with init_distributed() as runtime:
        read = configure(settings(directory, model, *options), runtime)
        expected: list[float] = []
        for mesh in meshes:
            run = replace(read.run, directory=str(directory / mesh))
            config = replace(read, mesh=mesh, run=run)
            check(config, runtime.world_size)
            train(config, runtime)
            dist.barrier()  # the first rank writes the report
            if runtime.is_main:
                found = losses(directory / mesh)
                expected = expected or one_process(directory / mesh, read)
                assert len(found) == STEPS, mesh
                assert found[-1] < found[0], mesh
                # A rank balances the load of its own tokens' experts, one process that of all.
                tolerance = 2e-2 if model in ("mixtral-8x7b", "deepseek-v3") else 2e-4
                assert found == pytest.approx(expected, rel=tolerance), mesh


def size(printed: str, label: str) -> float:
    """Bytes of the first stage, on a line of what `--dry-run` prints."""
    (line,) = [line for line in printed.splitlines() if line.startswith(f"  {label}  ")]
    number, unit = line.removeprefix(f"  {label}").split()[:2]
    return float(number) * {"MiB": 2**20, "GiB": 2**30}[unit]
