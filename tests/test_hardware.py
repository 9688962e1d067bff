"""The tasks `gpu` and `validate`: their plans fit the tree, and no step can stop the others."""

from __future__ import annotations

import argparse
import json
import os
import resource
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tasks.hardware import command
from tasks.hardware.plan import Step, choose, gpu, parts, validate
from tasks.hardware.running import run_all, run_step

ROOT = Path(__file__).resolve().parents[1]
JOB = "examples/pretrain/train.py"


def commands() -> list[list[str]]:
    """The words of all commands of both plans, each once, without the tool's own."""
    texts = {text for step in validate(8) for text in (step.run, step.rehearse) if text}
    words = [[word for word in text.split() if "--nproc" not in word] for text in sorted(texts)]
    return [[tool, *rest] for tool, *rest in words]


def test_every_command_names_a_file_of_the_tree():
    for _, path, *_ in commands():
        assert (ROOT / path).exists(), path
    for _, path, *words in commands():
        named = [word.partition("::")[0] for word in words if word.startswith("tests/")]
        assert all((ROOT / name).exists() for name in named), path


class ParsedError(Exception):
    """Ends a program once its arguments were understood."""


def test_every_benchmark_understands_its_options(monkeypatch):
    """Each program runs up to its parser, which takes the words or ends the program."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    parse = argparse.ArgumentParser.parse_args

    def understood(self, *arguments, **options):
        parse(self, *arguments, **options)
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", understood)
    monkeypatch.setitem(os.environ, "TRITON_INTERPRET", os.environ.get("TRITON_INTERPRET", ""))
    seen = 0
    for tool, path, *words in commands():
        if tool == "pytest" or not path.startswith("benchmarks/"):
            continue
        monkeypatch.setattr(sys, "argv", [path, *words])
        with pytest.raises(ParsedError):
            runpy.run_path(str(ROOT / path), run_name="__main__")
        seen += 1
    assert seen > 15


def test_the_main_job_understands_its_options(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "pretrain"))
    options = pytest.importorskip("options")
    from config import check

    for _, path, *words in commands():
        if path == JOB:
            check(options.load(words, "cuda"), 1)


def test_ranks_of_torchrun_find_each_other_where_the_machine_has_no_address(tmp_path):
    """A machine that is lent has no network: nothing may look for its name."""
    (tmp_path / "told.py").write_text("import os; print(os.environ['MASTER_ADDR'])")
    step = Step("one", "told", f"torchrun --nproc-per-node=1 {tmp_path}/told.py")
    words = step.command(False, sys.executable, str(tmp_path))
    told = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert told.stdout.split() == ["127.0.0.1"], told.stderr


def test_correctness_comes_first_and_one_gpu_is_enough():
    plan = gpu()
    kinds = [step.figures for step in plan]
    assert kinds == sorted(kinds)
    assert {step.gpus for step in plan} == {1}
    assert set(parts(plan)) >= {"kernels", "step", "models", "checkpoint", "order"}
    for step in (plan, validate(8)):
        names = [one.name for one in step]
        assert len(set(names)) == len(names)
    assert max(step.gpus for step in validate(3)) == 2
    with pytest.raises(ValueError, match="stepp: no such part; there are"):
        choose(plan, ["stepp"])


def test_what_was_left_out_runs_by_its_numbers():
    plan = gpu()
    assert choose(plan, ["3", "2"]) == plan[1:3]
    assert choose(plan, ["order", "1"]) == [plan[0], *(s for s in plan if s.part == "order")]
    with pytest.raises(ValueError, match=f"and steps 1 to {len(plan)}"):
        choose(plan, [str(len(plan) + 1)])


def test_every_test_that_was_never_run_is_in_the_plan():
    """A test module that asks for a CUDA device at its top is one that no CPU runs."""
    words = {word for step in gpu() for word in step.run.split()}
    alone = [*ROOT.glob("packages/*/tests/test_*.py"), ROOT / "tests" / "test_gpu.py"]
    wanted = [path for path in alone if is_for_gpus(path.read_text())]
    assert len(wanted) >= 4
    for path in wanted:
        name = str(path.relative_to(ROOT))
        # The program that `test_cuda.py` starts stands in the plan itself.
        assert name in words or path.name == "test_cuda.py", name


def is_for_gpus(source: str) -> bool:
    skipped = "pytestmark = pytest.mark.skipif(not torch.cuda.is_available()" in source
    shares = '@pytest.mark.ranks(2, 4, backend="gloo", device="cuda"' in source
    return skipped or shares


SCRIPTS = {
    "fine": "print('before')\nprint('| a | b |')\nprint('| --- | --- |')\nprint('| 1 | 2 |')",
    "fails": "print('so far')\nraise ValueError('a wrong number')",
    "hangs": """
import os, time
if child := os.fork():
    print('child', child, flush=True)
time.sleep(600)
""",
}


@pytest.fixture
def plan(tmp_path) -> list[Step]:
    """Steps of programs that pass, fail and hang, and one that needs too many GPUs."""
    for name, source in SCRIPTS.items():
        (tmp_path / f"{name}.py").write_text(source)
    steps = [
        Step("one", name, f"python {tmp_path}/{name}.py", limit=limit, figures=True)
        for name, limit in (("fails", 60), ("hangs", 3), ("fine", 60))
    ]
    return [*steps, Step("two", "many", f"python {tmp_path}/fine.py", gpus=4)]


def run(plan, tmp_path, *words):
    options = command.parse("gpu", ["--out", str(tmp_path / "out"), *words])
    machine = {"GPU": "1 x Stand-in", "torch": "2.13", "commit": "abc", "date": "2026-01-01"}
    return command.run_plan("gpu", plan, options, sys.executable, machine, 1)


def alive(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"


def test_what_fails_or_hangs_leaves_the_others_and_a_report(plan, tmp_path, capfd):
    assert run(plan, tmp_path) == 1
    found = json.loads((tmp_path / "out/gpu/report.json").read_text())
    states = {step["name"]: (step["state"], step["reason"]) for step in found["steps"]}
    assert states["fails"] == ("failed", "exit code 1: ValueError: a wrong number")
    assert states["hangs"] == ("stopped", "after 3 s")
    assert states["fine"][0] == "passed"
    assert states["many"] == ("left out", "needs 4 GPUs, and there are 1")
    child = int(found["steps"][1]["lines"][0].split()[1])
    assert not alive(child)
    page = (tmp_path / "out/gpu/report.md").read_text()
    assert "```text\nbefore\n```\n\n| a | b |\n| --- | --- |\n| 1 | 2 |" in page
    assert "| fine | never run | passed |  |" in page
    assert "| fine | never run | passed |  |" in capfd.readouterr().out  # it ends with what is new


def test_a_report_is_there_after_every_step(plan, tmp_path):
    """Killed in the middle, as by a limit from outside, the report still has what was done."""
    steps = [plan[2], Step("one", "long", plan[1].run, limit=600)]
    words = [f"{tmp_path}/fine.py", f"{tmp_path}/hangs.py"]
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from tasks.hardware import command\nfrom tasks.hardware.plan import Step\n"
        f"steps = [Step('one', w, 'python ' + w, limit=600) for w in {words!r}]\n"
        f"options = command.parse('gpu', ['--out', {str(tmp_path / 'out')!r}])\n"
        "command.run_plan('gpu', steps, options, sys.executable, {}, 1)\n"
    )
    assert len(steps) == 2
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL)
    record = tmp_path / "out/gpu/report.json"
    try:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            text = record.read_text() if record.exists() else "{}"
            if json.loads(text).get("steps"):
                break
            time.sleep(0.05)
    finally:
        process.terminate()
        process.wait()
    found = json.loads(record.read_text())
    assert [step["state"] for step in found["steps"]] == ["passed"]
    assert found["waiting"] == [words[1]]


def test_no_step_begins_when_the_time_is_over(plan):
    outcomes = list(run_all(plan, None, seconds=0, gpus=4, rehearsal=False))
    assert {outcome.state for outcome in outcomes} == {"left out"}


def test_a_run_of_pytest_in_which_all_is_skipped_has_shown_nothing(tmp_path):
    test = tmp_path / "test_it.py"
    test.write_text("import pytest\n@pytest.mark.skip(reason='no device')\ndef test_it(): ...\n")
    pytest_step = Step("one", "skips", f"pytest -p no:cacheprovider {test} -rs")
    assert run([pytest_step], tmp_path) == 1
    found = json.loads((tmp_path / "out/gpu/report.json").read_text())
    assert found["steps"][0]["reason"].startswith("no test ran: ")
    assert run([pytest_step], tmp_path, "--rehearse") == 0


def test_a_layer_without_tests_for_so_many_ranks_is_left_out(tmp_path):
    test = tmp_path / "test_none.py"
    test.write_text("import pytest\n@pytest.mark.ranks(2)\ndef test_it(): ...\n")
    step = Step("nccl", "8 ranks", f"pytest {test} --backend=gloo --world-size=8")
    words = step.command(False, sys.executable, "")
    outcome = run_step(step, words, 60, tmp_path / "log", command.environment())
    assert (outcome.state, outcome.reason) == (
        "left out",
        "the layer has no test for so many ranks",
    )


def test_a_rehearsal_on_a_virtual_gpu_runs_the_commands_of_a_gpu(tmp_path, monkeypatch):
    (tmp_path / "shows.py").write_text(
        "import os, sys\nprint(sys.argv[1:], os.environ.get('VGPU_DEVICES'))\n"
    )
    shows = f"python {tmp_path}/shows.py"
    plan = [
        Step("one", "counts", f"{shows} large", f"{shows} small"),
        Step("one", "computes", f"{shows} large", f"{shows} small", arithmetic=True),
    ]
    monkeypatch.setattr(command, "PLANS", {"gpu": (lambda count: plan, 1.0)})
    monkeypatch.setattr(command, "look", lambda python, variables: ({"torch": "2.14"}, 1))
    monkeypatch.setattr(command, "virtual_gpu", lambda: sys.executable)
    assert command.main("gpu", ["--rehearse", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "gpu-rehearsal/report.json").read_text())
    lines = [step["lines"] for step in found["steps"]]
    assert lines == [["['large'] 1"], ["['small'] 1"]]


def test_without_a_gpu_the_task_says_so_and_needs_nothing_installed(tmp_path):
    if command.DRIVER.exists():
        pytest.skip("there is a driver here")
    (tmp_path / "nox.py").write_text("raise ImportError('no nox')\n")
    for name in ("gpu", "validate"):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, "noxfile.py", "-s", name],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 1
        assert "no NVIDIA driver" in done.stderr
        assert "--rehearse" in done.stderr
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpu", "validate"])
def test_the_whole_plan_runs_on_a_cpu(name, tmp_path):
    env = {**os.environ, "LAMINA_PYTHON": sys.executable}
    words = ["-s", name, "--", "--rehearse", "--minutes", "30", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "noxfile.py", *words], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
