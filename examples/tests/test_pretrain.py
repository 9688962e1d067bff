"""The main job as a user runs it: torchrun, kill -9, Ctrl-C, again, on fewer ranks."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from lamina.checkpoint import RESUME_EXIT_CODE
from lamina_testing.programs import Ended, Program, run_ranks, start_ranks

TRAIN = Path(__file__).parents[1] / "pretrain" / "train.py"
STEPS, SAVE_EVERY = 200, 20
SETTINGS = f"""
[data]
path = "{TRAIN.parent}"
held_out = 0.2
[model]
num_layers = 1
hidden_size = 32
num_heads = 2
sequence_length = 32
dropout = 0.1
[train]
steps = {STEPS}
batch_size = 4
microbatches = 2
warmup_steps = 10
[eval]
every = 50
tokens = 512
samples = 1
sample_tokens = 8
[checkpoint]
every = {SAVE_EVERY}
"""


def words_of(directory: Path, *options: str) -> list[str]:
    config = directory.parent / "config.toml"
    config.write_text(SETTINGS)
    return [str(TRAIN), "--config", str(config), "--run.directory", str(directory), *options]


@dataclass
class Job:
    """Ranks in processes of their own, or the launcher's process."""

    programs: Sequence[Program | Launcher]

    @classmethod
    def start(cls, directory: Path, *options: str, nproc: int = 2) -> Job:
        return cls(start_ranks(words_of(directory, *options), nproc, directory.parent))

    def signal(self, number: int) -> None:
        for program in self.programs:
            program.signal(number)

    def output(self) -> str:
        return "".join(program.wait(300).output for program in self.programs)

    def finish(self) -> str:
        output = self.output()
        assert [p.wait(0).code for p in self.programs] == [0] * len(self.programs), output
        return output

    def wait_for_step(self, directory: Path, step: int) -> None:
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            if any(record["step"] >= step for record in records(directory, last=3)):
                return
            if any(program.poll() is not None for program in self.programs):
                break
            time.sleep(0.02)
        self.signal(signal.SIGKILL)
        pytest.fail(f"step {step} was not reached: {self.output()}")


class Launcher:
    """torchrun, as a user starts it: a group of processes, as a shell gives to a job."""

    def __init__(self, words: list[str]) -> None:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        self.process = subprocess.Popen(
            [sys.executable, *launch, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def signal(self, number: int) -> None:
        os.killpg(self.process.pid, number)

    def poll(self) -> int | None:
        return self.process.poll()

    def wait(self, seconds: float) -> Ended:
        output = self.process.communicate(timeout=seconds)[0]
        return Ended(self.process.returncode, output, "")


def records(directory: Path, last: int = 0) -> list[dict[str, float]]:
    """The lines of metrics.jsonl that are whole; only so many of the last if asked."""
    try:
        lines = (directory / "metrics.jsonl").read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines[-last:] if line.endswith("\n")]


def numbers(directory: Path) -> list[tuple[float, ...]]:
    """What must not depend on interruptions: every loss, gradient norm and held-out loss."""
    return [
        (r["step"], r["held_out_loss"])
        if "held_out_loss" in r
        else (r["step"], r["loss"], r["grad_norm"])
        for r in records(directory)
        if not {"checkpoint_blocked_seconds", "straggler"} & set(r)
    ]  # a step that was judged a spike has a line without a loss, and fails here: none may be


def play(base: Path) -> dict[str, object]:
    """Run once without interruption, and once with a kill and a Ctrl-C."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        del os.environ[name]  # this process supervises
    whole, torn = base / "whole", base / "torn"
    quiet = "--log.no-tensorboard"
    job = Job.start(torn, quiet)
    job.wait_for_step(torn, SAVE_EVERY + 10)
    job.signal(signal.SIGKILL)
    job.output()
    after_kill = records(torn)[-1]["step"]

    job = Job([Launcher(words_of(torn, quiet))])
    job.wait_for_step(torn, after_kill + 15)
    job.signal(signal.SIGINT)  # what a terminal does on Ctrl-C
    interrupted = job.output()
    saved = sorted(path.name for path in (torn / "checkpoints").iterdir())
    shutil.copytree(torn, base / "fewer")

    outputs = {
        "torn": Job.start(torn, quiet).finish(),
        "fewer": Job.start(base / "fewer", quiet, nproc=1).finish(),
        "whole": Job.start(whole, "--log.trace", "30", "31").finish(),
    }
    return {
        "base": base,
        "after_kill": after_kill,
        "interrupted": interrupted,
        "saved": saved,
        **outputs,
    }


@pytest.fixture(scope="module")
def runs(rank_server, tmp_path_factory) -> dict[str, object]:
    return rank_server.call(play, base=tmp_path_factory.mktemp("runs"), timeout=900)


def test_a_killed_run_continues_with_the_same_losses_bit_for_bit(runs):
    assert SAVE_EVERY < runs["after_kill"] < STEPS
    whole = numbers(runs["base"] / "whole")
    assert [r[0] for r in whole if len(r) == 3] == list(range(1, STEPS + 1))
    assert numbers(runs["base"] / "torn") == whole


def test_ctrl_c_leaves_a_checkpoint_and_says_so(runs):
    step = int(runs["saved"][-1].removeprefix("step-"))
    assert runs["after_kill"] + 15 <= step < STEPS
    assert f"stopped on request after step {step}" in runs["interrupted"]
    assert f"continuing {runs['base'] / 'torn'} after step {step}" in runs["torn"]


def test_a_run_continues_on_another_number_of_ranks_with_the_same_samples(runs):
    whole, fewer = numbers(runs["base"] / "whole"), numbers(runs["base"] / "fewer")
    step = int(runs["saved"][-1].removeprefix("step-"))
    assert [r[0] for r in fewer] == [r[0] for r in whole]
    for a, b in zip(fewer, whole, strict=True):
        # Dropout differs with the ranks, so losses do: by far less than other samples would.
        assert a[1] == pytest.approx(b[1], rel=0.15 if a[0] > step else 0)


def test_the_run_ends_with_what_it_promised(runs):
    directory, output = runs["base"] / "whole", runs["whole"]
    for name in ("report.html", "samples.txt", "report.json", "config.json", "metrics.jsonl"):
        assert (directory / name).stat().st_size > 0
        if name in ("report.html", "samples.txt"):
            assert str(directory / name) in output
    assert list((directory / "tensorboard").glob("events.*"))
    assert sorted(p.name for p in (directory / "checkpoints").iterdir())[-1] == f"step-{STEPS:08d}"
    report = json.loads((directory / "report.json").read_text())
    assert report["held_out_loss"] < 0.95 * report["unigram_entropy"]
    assert report["state_bytes_of_one_process"] == pytest.approx(
        2 * report["state_bytes_per_rank"], rel=0.01
    )
    saves = [r["step"] for r in records(directory) if "checkpoint_blocked_seconds" in r]
    assert saves == list(range(SAVE_EVERY, STEPS + 1, SAVE_EVERY))
    for words in (
        "MiB/s; the loop waited",
        "unigram entropy",
        "one process alone would need",
        "next",
    ):
        assert words in output


def test_tensorboard_has_the_numbers_and_samples_of_the_run(runs):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    directory = runs["base"] / "whole"
    events = EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    for name in ("loss", "held_out_loss", "exposed_share", "data_share", "checkpoint_share"):
        found = [(event.step, event.value) for event in events.Scalars(name)]
        expected = [(r["step"], r[name]) for r in records(directory) if name in r]
        assert found == [(step, pytest.approx(value)) for step, value in expected]
    (sample,) = events.Tensors("sample 1/text_summary")
    written = (directory / "samples.txt").read_text().splitlines()[1]
    assert written in sample.tensor_proto.string_val[0].decode()


WANDB = """
import json, os
def init(dir, **settings):
    print(json.dumps(settings), file=open(os.path.join(dir, "settings"), "a"))
    return Run(open(os.path.join(dir, "logged"), "a"))
class Run:
    def __init__(self, file): self.file = file
    def define_metric(self, name, step_metric): assert (name, step_metric) == ("*", "step")
    def log(self, values): print(json.dumps(values), file=self.file)
    def finish(self): self.file.close()
"""


@pytest.mark.ranks(1)
def test_weights_and_biases_gets_the_same_numbers_in_one_run_that_goes_on(tmp_path, monkeypatch):
    (tmp_path / "wandb.py").write_text(WANDB)
    monkeypatch.syspath_prepend(tmp_path)
    directory = tmp_path / "run"
    for steps in ("2", "4"):
        run_here(directory, "--train.steps", steps, "--log.wandb", "mine")
    first, then = [json.loads(line) for line in (directory / "settings").read_text().splitlines()]
    assert first["id"] == then["id"]
    assert then["project"] == "mine"
    assert (first["config"]["train"]["steps"], then["config"]["train"]["steps"]) == (2, 4)
    logged = [json.loads(line) for line in (directory / "logged").read_text().splitlines()]
    assert [line for line in logged if "sample 1" not in line] == records(directory)
    assert [line["step"] for line in logged if "sample 1" in line] == [2, 4]


def test_weights_and_biases_that_is_not_there_is_said_before_anything_starts(monkeypatch):
    sys.path.insert(0, str(TRAIN.parent))
    from config import Config, LogConfig, check

    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"--log.wandb mine: .* pip install wandb"):
        check(Config(log=LogConfig(wandb="mine")), ranks=2)


def test_a_trace_names_what_units_compute_gather_and_reduce(runs):
    traces = runs["base"] / "whole" / "traces"
    assert len(list(traces.iterdir())) == 4  # two steps of two ranks
    for path in (traces / "step-30-rank-0.json", traces / "step-31-rank-1.json"):
        times: dict[tuple[str, str], list[float]] = {}
        for event in json.loads(path.read_text())["traceEvents"]:
            name = event["name"].split(".attention")[0]  # without the parameters' own names
            times.setdefault((event["ph"], name), []).append(event.get("ts"))
        for unit in ("blocks.0", "the root"):
            assert len(times["X", f"forward of {unit}"]) == 2  # microbatches
            assert len(times["X", f"backward of {unit}"]) == 2
        gathered = min(times["b", "all_gather_into of blocks.0"])
        reduced = max(times["e", "reduce_scatter_fp32 of blocks.0"])
        assert gathered < min(times["X", "forward of blocks.0"])
        assert max(times["X", "backward of blocks.0"]) < reduced


def test_a_wrong_setting_is_said_once_and_nothing_is_made(rank_server, tmp_path):
    directory = tmp_path / "run"
    words = words_of(directory, "--train.stepz", "5")
    ended = rank_server.call(run_ranks, words=words, nproc=2)
    output = "".join(each.output for each in ended)
    assert [each.code for each in ended] == [2, 2]
    assert output.count("Unrecognized options") == 2  # the box's title and its text, of one rank
    assert "--train.steps" in output
    assert not directory.exists()


def test_what_fails_on_the_first_rank_alone_is_named_by_all(rank_server, tmp_path):
    words = words_of(tmp_path / "run", "--data.path", str(tmp_path / "nothing"))
    ended = rank_server.call(run_ranks, words=words, nproc=2)
    assert [each.code for each in ended] == [1, 1]
    for each in ended:  # torchrun's last line quotes whichever was first
        assert re.search(r"Error: .*--data.path .*nothing: no file matches", each.output)


def run_here(directory: Path, *options: str) -> None:
    """Run the job in this process, which is a rank."""
    sys.path.insert(0, str(TRAIN.parent))
    from options import load
    from train import train

    from lamina.mesh import init_distributed

    path = directory.parent / f"config{os.getpid()}.toml"
    path.write_text(SETTINGS)
    words = ["--config", str(path), "--run.directory", str(directory), "--log.no-tensorboard"]
    with init_distributed() as runtime:
        train(load([*words, *options], "cpu"), runtime)


@pytest.mark.ranks(1)
def test_a_finished_run_says_how_to_go_on_and_writes_from_its_checkpoint(tmp_path):
    directory = tmp_path / "run"
    run_here(directory, "--train.steps", "2")
    with contextlib.redirect_stdout(io.StringIO()) as said:
        run_here(
            directory, "--train.steps", "2", "--eval.prompt", "import a", "--eval.samples", "2"
        )
    assert "finished before (2 steps)" in said.getvalue()
    assert re.search(r"^next .* -s train -- .*--train.steps 4$", said.getvalue(), re.MULTILINE)
    texts = (directory / "samples.txt").read_text()
    assert texts.splitlines().count("import a") == 2
    assert texts in said.getvalue()
    assert [record["step"] for record in records(directory) if "loss" in record] == [1, 2]


@pytest.mark.ranks(2)
def test_a_time_limit_ends_the_run_with_a_checkpoint_and_a_report(tmp_path):
    import torch.distributed as dist

    directory = tmp_path / "run"
    run_here(directory, "--train.steps", "1000000", "--train.seconds", "0.3")
    dist.barrier()  # the first rank writes the report
    (last,) = {record["step"] for record in records(directory) if "held_out_loss" in record}
    saved = sorted(place.name for place in (directory / "checkpoints").iterdir())
    assert saved[-1] == f"step-{last:08d}"
    assert 0 < last < 100_000
    assert (directory / "report.html").exists()
    assert not (directory / "report.json").exists()  # the run is not finished: it can go on


@pytest.mark.filterwarnings("ignore:rank 1")
@pytest.mark.ranks(2)
def test_a_rank_that_holds_the_others_up_is_named_on_the_first_and_in_the_log(
    ranks, tmp_path, monkeypatch
):
    sys.path.insert(0, str(TRAIN.parent))
    import data

    # The test's own clock, which only reading data moves: no machine is too slow for it.
    batch, seconds = data.Windows.batch, [0.0]

    def batch_late(self, *given):
        seconds[0] += 4.0 if ranks.rank == 1 else 1.0
        return batch(self, *given)

    monkeypatch.setattr(data.Windows, "batch", batch_late)
    own = SimpleNamespace(perf_counter=lambda: seconds[0])
    monkeypatch.setattr("lamina.ddp.monitor.pace.time", own)
    waits = contextlib.nullcontext(SimpleNamespace(records=()))
    monkeypatch.setattr("lamina.ddp.monitor.pace.Ledger", lambda: waits)
    directory = tmp_path / "run"
    with contextlib.redirect_stdout(io.StringIO()) as said:
        run_here(directory, "--train.steps", "10", "--health.slow-steps", "8", "--health.slow", "2")
    if ranks.rank == 0:
        (found,) = [r for r in records(directory) if "straggler" in r]
        assert found["step"] == 10  # step 8 was timed, and step 9 told it
        assert re.fullmatch(r"rank 1 \(.*=1\) on \S+ takes .* times as long .*", found["straggler"])
        assert found["factor"] == 4
        assert f"step 10: {found['straggler']}" in said.getvalue()


@pytest.mark.ranks(2, timeout=120)
def test_a_rank_told_to_leave_stops_all_with_a_checkpoint_and_the_run_goes_on(tmp_path):
    import torch.distributed as dist

    directory = tmp_path / "run"

    def tell_when_training() -> None:
        while not any("loss" in record for record in records(directory)):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR1)

    if dist.get_rank() == 1:
        threading.Thread(target=tell_when_training, daemon=True).start()
    with pytest.raises(SystemExit) as left:
        run_here(directory, "--train.steps", "1000000")
    assert left.value.code == RESUME_EXIT_CODE == 75
    dist.barrier()
    stopped = max(record["step"] for record in records(directory))
    saved = sorted(place.name for place in (directory / "checkpoints").iterdir())
    assert saved[-1] == f"step-{stopped:08d}"
    dist.barrier()
    run_here(directory, "--train.steps", str(stopped + 2))
    dist.barrier()
    steps = [record["step"] for record in records(directory) if "loss" in record]
    assert steps == list(range(1, stopped + 3))
