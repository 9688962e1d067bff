"""The small examples as a user runs them, in a short mode; whole, if slow tests are asked for."""

from __future__ import annotations

import re
import resource
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lamina_testing.client import ForkServer
from lamina_testing.programs import run_ranks

EXAMPLES = Path(__file__).parents[1]
NUMBER = r"\d+(?:\.\d+)?(?:e[+-]?\d+)?"


@pytest.fixture
def run(rank_server: ForkServer, tmp_path: Path) -> Callable[..., str]:
    """Run a program on two ranks, in an empty directory; return what the first prints."""

    def run(program: str, *options: str) -> str:
        words = [str(EXAMPLES / program), *options]
        ended = rank_server.call(run_ranks, words=words, nproc=2, directory=tmp_path)
        assert [each.code for each in ended] == [0, 0], "".join(each.output for each in ended)
        return ended[0].output

    return run


def numbers(pattern: str, output: str) -> list[float]:
    return [float(found) for found in re.findall(pattern, output)]


def test_a_zero_1_made_by_hand_equals_plain_pytorch(run):
    output = run("custom_stack/train.py", "--steps", "30")
    assert numbers(r"plain PyTorch after 30 steps: (\S+)", output) == [0.0]
    (mine, whole) = re.findall(r"state: (\d+) numbers on this rank, (\d+)", output)[0]
    assert int(mine) < 0.55 * int(whole)  # half, and padding between tensors
    assert len((EXAMPLES / "custom_stack/zero1.py").read_text().splitlines()) <= 60


def radial_in_one_process(example: dict[str, Any], steps: int) -> tuple[list[float], list[float]]:
    """The example's model in plain PyTorch: four losses on new points, and both sharpnesses."""
    torch.manual_seed(0)
    layers = []
    for inputs, outputs in ((2, 8), (8, 2)):
        centres, values = torch.randn(64, inputs), torch.randn(outputs, 64) / 32**0.5
        given = (centres, values, torch.ones(()), torch.zeros(outputs))
        layers.append([tensor.requires_grad_() for tensor in given])
    parameters = [parameter for layer in layers for parameter in layer]

    def loss_on(points: Tensor, which: Tensor) -> Tensor:
        x = points
        for number, (centres, values, sharpness, bias) in enumerate(layers):
            x = x.tanh() if number else x
            gaussians = (-sharpness * torch.cdist(x, centres) ** 2).exp()
            x = nn.functional.linear(gaussians, values, bias)
        return nn.functional.cross_entropy(x, which)

    optimizer, losses = torch.optim.AdamW(parameters, lr=example["RATE"]), []
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        loss_on(*example["spirals"](step)).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if step % (steps // 4) == 0:
            losses.append(loss_on(*example["spirals"](-1)).item())
    return losses, [layer[2].item() for layer in layers]


def test_a_layer_of_ones_own_trains_like_one_process(run, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES / "own_layer")
    example = runpy.run_path(str(EXAMPLES / "own_layer/train.py"))
    losses, sharpnesses = radial_in_one_process(example, steps=32)
    for tp in ("2", "1"):
        output = run("own_layer/train.py", "--tp", tp, "--steps", "32")
        assert numbers(r"loss (\S+),", output) == pytest.approx(losses, abs=2e-4)
        (learned,) = re.findall(r"1.0000: (\S+) (\S+)", output)
        assert [float(value) for value in learned] == pytest.approx(sharpnesses, abs=2e-4)


@pytest.mark.slow
def test_a_transformers_model_is_tuned_and_saved(run, tmp_path):
    output = run("huggingface/train.py", "--steps", "12")
    before, after = numbers(r"(\d\.\d+) before", output) + numbers(r"(\d\.\d+) after", output)
    assert after < 0.9 * before
    assert numbers(r"loaded by transformers again: (\S+)", output) == [after]
    assert (tmp_path / "runs/huggingface/tuned/model.safetensors").exists()


@pytest.mark.slow
def test_pictures_are_described_after_a_few_steps(run, tmp_path):
    options = ["--steps", "2", "--batch", "4", "--held-out", "12"]
    output = run("multimodal/train.py", *options)
    assert len(numbers(r"(\d+) of 12", output)) == 2
    assert (tmp_path / "runs/multimodal/contact_sheet.png").read_bytes()[1:4] == b"PNG"


@pytest.mark.slow
def test_a_hybrid_stack_trains_a_few_steps(run):
    output = run("mamba/train.py", "--steps", "2")
    assert len(numbers(r"length \d+: (\d+)% right", output)) == 4


def run_whole(program: str, directory: Path) -> str:
    """By the README's command. It takes less than a minute on two cores: counted as work, as others
    may use them, of which the launcher's is a part."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", str(EXAMPLES / program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=directory,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert spent / 2 < 50, f"{program} used {spent / 2:.0f} s of each core"
    check_figures((EXAMPLES / program).with_name("README.md").read_text(), done.stdout)
    return done.stdout


def lines_of(text: str) -> dict[str, list[float]]:
    """The numbers of each line, by its words. Of times nothing can be said."""
    found = {}
    for line in text.splitlines():
        if line.startswith(("dp_shard ", "total ")) or "processor time" in line:
            continue
        words = re.sub(rf"{NUMBER}|[▁-█]", "", line)
        if words != line and " " in words.strip():
            figures = re.findall(NUMBER, line)
            at = re.findall(r"(?:step|length) (\d+)", line)  # of lines that differ in it
            found[" ".join(words.split() + at)] = [float(figure) for figure in figures]
    return found


def check_figures(readme: str, output: str) -> None:
    """What the README shows is what a run prints, as near as other processors round."""
    shown = lines_of("\n".join(re.findall(r"^```\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)))
    printed = lines_of(output)
    common = shown.keys() & printed.keys()
    assert len(common) >= 3, f"{sorted(shown)} and {sorted(printed)}"
    for words in common:
        assert printed[words] == pytest.approx(shown[words], rel=0.25, abs=0.05), words


@pytest.mark.slow
def test_new_pictures_are_described_rightly(tmp_path):
    output = run_whole("multimodal/train.py", tmp_path)
    new, never_shown_together = numbers(r"\((\d+)%\)", output)
    assert new >= 80
    assert never_shown_together >= 80


@pytest.mark.slow
def test_mamba_remembers_over_more_noise_than_it_was_trained_on(tmp_path):
    output = run_whole("mamba/train.py", tmp_path)
    trained, twice, *_ = numbers(r"length \d+: (\d+)% right", output)
    assert trained >= 85
    assert twice >= 75


@pytest.mark.slow
def test_a_bias_or_a_loss_keeps_experts_equally_busy(tmp_path):
    output = run_whole("moe/train.py", tmp_path)
    busiest = re.findall(r"busiest/mean (\S+) (\S+)", output)
    nothing, loss, bias = (max(map(float, layers)) for layers in busiest)
    assert max(loss, bias) < 0.8 * nothing


@pytest.mark.slow
@pytest.mark.parametrize(
    "program", ["custom_stack/train.py", "huggingface/train.py", "own_layer/train.py"]
)
def test_the_others_take_less_than_a_minute_too(program, tmp_path):
    run_whole(program, tmp_path)
