"""Every architecture over every axis: the losses are those of one process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from options import load
from recipe_runs import (
    PRETRAIN,
    SETTINGS,
    STEPS,
    check_layouts,
    losses,
    one_process,
    settings,
    size,
    train_here,
)
from torch.multiprocessing.reductions import StorageWeakRef

from lamina_testing.client import ForkServer
from lamina_testing.inductor import needs_inductor
from lamina_testing.programs import Ended, run_ranks


@pytest.mark.matrix(few=2)
@pytest.mark.ranks(2, timeout=120)
@pytest.mark.parametrize(
    ("model", "mesh", "options"),
    [
        ("llama3-8b", "tp=2", "--recompute selective"),
        ("llama3-70b", "pp=2", ""),
        ("mixtral-8x7b", "ep=2,dp_shard=-1", "--train.strategy 1"),
        ("gpt-oss-20b", "ep=2,dp_shard=-1", ""),
        ("qwen3-next-80b-a3b", "tp=2", "--recompute selective"),
        ("vision-language", "dp_replicate=2,dp_shard=1", ""),
    ],
)
def test_an_architecture_over_an_axis_trains_like_one_process(tmp_path, model, mesh, options):
    check_layouts(tmp_path, model, [mesh], *options.split())


@pytest.mark.ranks(3, timeout=120)
@pytest.mark.parametrize("options", ["--train.strategy 1", "--train.reproducible 1"])
def test_eight_sequences_over_three_ranks_train_like_one_process(tmp_path, options):
    check_layouts(tmp_path, "gpt", ["dp_shard=-1"], *options.split())


@pytest.mark.slow
@pytest.mark.ranks(2, timeout=120)
def test_products_in_fp8_and_compiled_blocks_train(tmp_path):
    words = settings(tmp_path, "llama3-8b", "--precision", "fp8", "--mesh", "dp_shard=2")
    train_here(tmp_path / "run", words)
    exact = settings(tmp_path, "llama3-8b", "--mesh", "dp_shard=2")
    if dist.get_rank() == 0:
        found, expected = (
            losses(tmp_path / "run"),
            one_process(tmp_path / "run", load(exact, "cpu")),
        )
        assert found != expected
        assert found == pytest.approx(expected, rel=2e-2)


@pytest.mark.slow  # minutes of compiling
@needs_inductor
@pytest.mark.ranks(4, timeout=600)
def test_the_readmes_command_over_two_axes_in_fp8_compiled_trains_and_evaluates(tmp_path):
    axes = ("--mesh", "tp=2,pp=2,dp_shard=-1", "--recompute", "selective")
    words = settings(tmp_path, "llama3-8b", *axes, "--precision", "fp8", "--compile")
    train_here(tmp_path / "run", words)
    if dist.get_rank() == 0:
        exact = settings(tmp_path, "llama3-8b", *axes)
        found, expected = (
            losses(tmp_path / "run"),
            one_process(tmp_path / "run", load(exact, "cpu")),
        )
        assert found == pytest.approx(expected, rel=2e-2)
        assert json.loads((tmp_path / "run" / "report.json").read_text())["held_out_loss"] > 0


@pytest.mark.slow  # two minutes of compiling
@needs_inductor
@pytest.mark.ranks(2, timeout=400)
def test_compiled_blocks_train_evaluate_and_write_to_the_end_of_a_run(tmp_path):
    check_layouts(tmp_path, "llama3-8b", ["dp_shard=2"], "--compile", "--eval.samples", "1")
    if dist.get_rank() == 0:
        directory = tmp_path / "dp_shard=2"
        assert "written" in (directory / "samples.txt").read_text()
        assert json.loads((directory / "report.json").read_text())["step"] == STEPS


@pytest.mark.slow
@needs_inductor  # the job asks before it starts, also for another compiler
@pytest.mark.ranks(1, timeout=400)
def test_several_kinds_of_blocks_compile_to_the_end_of_a_run(tmp_path, monkeypatch):
    whole, compiled = torch.nn.Module.compile, []

    def compile_(block: torch.nn.Module) -> None:
        compiled.append(block)
        whole(block, backend="eager")

    monkeypatch.setattr(torch.nn.Module, "compile", compile_)
    words = settings(
        tmp_path, "mamba-hybrid", "--compile", "--recompute", "selective", "--model.num-layers",
        "4", "--eval.samples", "1",
    )  # fmt: skip
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        train_here(tmp_path / "run", words)
    assert len({type(block) for block in compiled}) == 3
    assert "written" in (tmp_path / "run" / "samples.txt").read_text()


@pytest.mark.slow
@pytest.mark.ranks(2, timeout=120)
@pytest.mark.parametrize(
    "schedule",
    ["interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev"],
)
def test_every_schedule_trains_like_one_process(tmp_path, schedule):
    # Two stages per rank, and as many microbatches as dualpipev asks for.
    options = ("--schedule", schedule, "--train.microbatches", "4")
    check_layouts(tmp_path, "llama3-8b", ["pp=2"], *options)


@pytest.mark.ranks(2, timeout=120)
def test_weights_come_from_hugging_face_and_go_back(tmp_path):
    transformers = pytest.importorskip("transformers")
    source, target = tmp_path / "source", tmp_path / "target"
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        shape = transformers.LlamaConfig(
            vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        )  # fmt: skip
        transformers.LlamaForCausalLM(shape).save_pretrained(source)
    dist.barrier()
    rate = ("--train.learning-rate", "1e-12", "--train.weight-decay", "0")
    tiny = [word for word in settings(tmp_path, str(source), *rate) if word != "--tiny"]
    (tmp_path / f"settings{os.getpid()}.toml").write_text(SETTINGS.replace("tiny = true", ""))
    export = ("--run.export", str(target), "--model.sequence-length", "32", "--mesh", "tp=2")
    train_here(tmp_path / "run", [*tiny, *export])
    if dist.get_rank() == 0:
        load = transformers.AutoModelForCausalLM.from_pretrained
        expected, found = load(source).state_dict(), load(target).state_dict()
        assert expected.keys() == found.keys()
        for name, value in expected.items():  # such a rate moves nothing
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6, msg=name)


@pytest.mark.slow
@pytest.mark.ranks(2, timeout=120)
def test_a_run_goes_on_over_other_axes(tmp_path):
    exact = settings(tmp_path, "llama3-8b", "--mesh", "dp_shard=2")
    first = [*exact, "--train.steps", "2", "--train.warmup-steps", str(STEPS)]
    first += ["--train.schedule-steps", str(STEPS)]
    rest = [*exact, "--mesh", "tp=2", "--train.warmup-steps", str(STEPS)]
    train_here(tmp_path / "run", first)
    train_here(tmp_path / "run", rest)
    if dist.get_rank() == 0:
        expected = one_process(tmp_path / "run", load(rest, "cpu"))
        found = losses(tmp_path / "run")
        assert len(found) == STEPS
        assert found == pytest.approx(expected, rel=2e-4)


@pytest.fixture
def dry_run(rank_server: ForkServer) -> Callable[..., Ended]:
    """`--dry-run` in a process, as it makes a world of its own."""

    def dry_run(*words: str) -> Ended:
        command = [str(PRETRAIN / "train.py"), "--dry-run", *words]
        (ended,) = rank_server.call(run_ranks, words=command, nproc=0)
        return ended

    return dry_run


def plan(dry_run: Callable[..., Ended], *words: str) -> str:
    """What `--dry-run` prints."""
    done = dry_run(*words)
    assert done.code == 0, done.output
    return done.output


def words_to_plan(directory: Path) -> list[str]:
    return settings(
        directory, "llama3-8b", "--mesh", "dp_shard=2", "--precision", "fp32",
        "--train.microbatches", "1",
    )  # fmt: skip


@pytest.fixture
def printed(dry_run: Callable[..., Ended], tmp_path: Path) -> str:
    return plan(dry_run, *words_to_plan(tmp_path))


@pytest.mark.ranks(2, timeout=120)
def test_the_plan_of_a_run_is_what_it_holds_and_sends(tmp_path, printed):
    from build import make_model, model_shape, shard

    from lamina.collectives import Ledger
    from lamina.ddp import finalize_grads
    from lamina.ddp.engine import groups_of
    from lamina.mesh import init_distributed

    words = words_to_plan(tmp_path)
    with init_distributed() as runtime:
        config = load(words, "cpu")
        mesh = config.layout().build("cpu")
        shape = model_shape(config, 256)
        model, optimizer = shard(make_model(shape, config, mesh), config, mesh, runtime.device)
        tokens = torch.randint(256, (4, 64))
        saved: dict[int, tuple[StorageWeakRef, int]] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            saved[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
            return tensor

        # A plan is of a steady step: the first one gathers more.
        model(tokens, labels=tokens).backward()
        finalize_grads(model, mesh)
        optimizer.step()
        optimizer.zero_grad()
        with Ledger() as ledger:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                loss = model(tokens, labels=tokens)
            # The loss computes its gradients at once, so what it has saved may be gone.
            kept = sum(size for reference, size in saved.values() if not reference.expired())
            loss.backward()
            finalize_grads(model, mesh)
            optimizer.step()
        moments = sum(
            value.to_local().nbytes if hasattr(value, "to_local") else value.nbytes
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor) and value.numel() > 1
        )
    if runtime.rank == 0:
        near = {"abs": 0.01 * 2**20}  # as printed, and blocks of 512 bytes
        local = sum(group.weights.local.data.nbytes for group in groups_of(model))
        assert size(printed, "weights") == pytest.approx(local, **near)
        assert size(printed, "optimizer state") == pytest.approx(moments, **near)
        assert size(printed, "dp_shard") == pytest.approx(ledger.bytes(), **near)
        # Saved weights are no activations. At the peak, in the last layer's backward, some of what
        # the forward has saved is gone. `test_plan_truth.py` of models compares peaks themselves.
        weights = sum(p.numel() for p in make_model(shape, config, mesh).parameters()) * 4
        assert size(printed, "activations") == pytest.approx(kept - weights, rel=0.15)


def words_to_save(directory: Path) -> list[str]:
    return settings(directory, "llama3-8b", "--checkpoint.every", "1", "--checkpoint.keep", "1")


@pytest.fixture
def printed_of_saves(dry_run: Callable[..., Ended], tmp_path: Path) -> str:
    return plan(dry_run, *words_to_save(tmp_path))


@pytest.mark.ranks(1, timeout=120)
def test_a_plan_says_what_a_run_writes_to_the_disk(tmp_path, printed_of_saves):
    (said,) = re.findall(
        r"gets (\d+) checkpoints of ([\d.]+) MiB.* ([\d.]+) MiB at", printed_of_saves
    )
    number, each, most = map(float, said)
    assert number == STEPS
    assert most == pytest.approx(3 * each, abs=0.03)
    train_here(tmp_path / "run", words_to_save(tmp_path))
    kept = list((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert len(kept) == 2
    for folder in kept:
        written = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        assert written == pytest.approx(each * 2**20, rel=0.1)  # names weigh something


def test_a_plan_takes_no_memory_for_what_it_counts(dry_run):
    words = ["--model", "llama3-70b", "--model.num-layers", "2", "--mesh", "dp_shard=8"]
    done = dry_run(*words)
    assert size(done.output, "allocated") > 8 << 30
    assert done.peak < 2 << 20  # KiB
    assert "8 ranks, planned by this one process, which uses no device" in done.output


@pytest.mark.matrix(few=1)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--mesh tp=4 --model gpt --model.num-heads 6", "tp"),
        ("--model.num-heads 5", "num_heads 5"),
        ("--train.learning-rate -1", "above 0"),
    ],
)
def test_a_plan_refuses_what_a_run_would_refuse(dry_run, words, said):
    done = dry_run(*words.split())
    assert done.code == 2
    assert said in done.output
    assert "Traceback" not in done.output


@pytest.mark.slow
def test_a_loss_that_is_not_finite_ends_the_run_unsaved_and_leaves_one_line(tmp_path):
    line, directory = tmp_path / "line", tmp_path / "run"
    words = settings(tmp_path, "gpt", "--train.learning-rate", "1e30", "--checkpoint.every", "1")
    command = [
        sys.executable, str(PRETRAIN.parents[1] / "tasks" / "torchrun.py"), str(line),
        "--standalone", "--nproc-per-node=2", str(PRETRAIN / "train.py"),
        "--run.directory", str(directory), *words,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 1
    said = line.read_text()
    assert re.fullmatch(r"rank \d: FloatingPointError: step [23]: loss .*learning-rate", said), said
    assert "ChildFailedError" not in done.stderr
    step = int(said.split("step ")[1].partition(":")[0])
    saved = sorted(path.name for path in (directory / "checkpoints").iterdir())
    assert saved[-1] < f"step-{step:08d}"


@pytest.mark.filterwarnings("ignore:loss")
@pytest.mark.ranks(2)
def test_a_run_goes_back_past_bad_data(ranks, tmp_path, monkeypatch):
    import data

    from lamina.ddp import HealthMonitor

    taken, slice_of_step, note = [], data.slice_of_step, HealthMonitor.note

    def slice_noted(number, *given):
        taken.append(number)
        return slice_of_step(number, *given)

    def note_bad(self, loss):
        bad = taken[-1] == 2 and ranks.rank == 1
        note(self, loss * float("nan") if bad else loss)

    monkeypatch.setattr(data, "slice_of_step", slice_noted)
    monkeypatch.setattr(HealthMonitor, "note", note_bad)
    directory = tmp_path / "run"
    options = ("--health.nonfinite", "back", "--checkpoint.every", "1", "--checkpoint.keep", "1")
    train_here(directory, settings(tmp_path, "gpt", *options))
    assert taken == [0, 1, 2, 3, 4]  # from step 2 back to step 1, which takes the batch after 2
    if ranks.rank == 0:
        lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
        steps = [
            (line["step"], "unhealthy" in line)
            for line in lines
            if {"loss", "unhealthy"} & set(line)
        ]
        assert steps == [(1, False), (2, False), (3, True), (2, False), (3, False)]
    saved = sorted(path.name for path in (directory / "checkpoints").iterdir())
    assert saved == ["step-00000002", "step-00000003"]
