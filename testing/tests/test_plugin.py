"""What the plugin does with bodies that fail, die, hang or leave things behind.

One pytest run over a file of such bodies, in a subprocess; each test reads one case of its report.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from lamina_testing.snippets import python_blocks

README = Path(__file__).parent.parent / "README.md"

CASES = (Path(__file__).parent / "plugin_cases.py").read_text()


# Seconds, far more than anything here takes on a busy machine: only failing tests wait so long.
PATIENCE = 120


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}


def command(*arguments: str) -> list[str]:
    # The cases use torch.distributed alone, and the one about layers those that it makes.
    preload = "ranks_preload=torch.distributed lamina.lamina_test_*"
    options = ("-p", "no:cacheprovider", "--import-mode=importlib", "-o", preload)
    return [sys.executable, "-m", "pytest", *options, *arguments]


def run_pytest(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), cwd=directory, env=environment(), capture_output=True, text=True
    )


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return state.rpartition(")")[2].split()[0] != "Z"


def wait_until_gone(pids: list[int]) -> bool:
    deadline = time.monotonic() + PATIENCE
    while any(is_running(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


class Report:
    """The nested run's results by test name."""

    def __init__(self, directory: Path) -> None:
        (directory / "test_cases.py").write_text(CASES)
        (snippet,) = python_blocks(README)
        (directory / "test_readme.py").write_text(snippet.source)
        run = run_pytest(directory, "--junitxml=report.xml", "-rw")
        self.directory = directory
        self.output = run.stdout
        self.cases = {
            case.get("name", "").replace("[ranks2]", "").replace("[ranks1]", ""): case
            for case in ElementTree.parse(directory / "report.xml").iter("testcase")
        }

    def failure(self, name: str) -> tuple[str, str, float]:
        """Headline, text and seconds of a test that failed."""
        case = self.cases[name]
        element = case.find("failure")
        if element is None:
            element = case.find("error")
        assert element is not None, f"{name} did not fail"
        return element.get("message", ""), element.text or "", float(case.get("time", 0))

    def skip(self, name: str) -> str:
        element = self.cases[name].find("skipped")
        assert element is not None, f"{name} was not skipped"
        return element.get("message", "")


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Report:
    return Report(tmp_path_factory.mktemp("cases"))


def test_the_example_in_the_readme_passes(report):
    cases = [case for name, case in report.cases.items() if name.startswith("test_all_reduce_sums")]
    assert len(cases) == 6
    assert all(len(case) == 0 for case in cases)


def test_the_first_failing_ranks_traceback_comes_first(report):
    headline, text, _ = report.failure("test_assertion")
    assert headline.startswith("rank 1 of 2: AssertionError: assert 2 == 3")
    assert text.startswith("rank 1 failed first (2 ranks, gloo on cpu)")
    assert re.search(r"\n>           assert len\(numbers\) == 3\nE           assert 2 == 3\n", text)
    assert "    def test_assertion(ranks):" in text, "the body's source is shown"
    assert "lamina_testing" not in text, "and no frame outside it"
    assert re.search(r"\nrank 0: RuntimeError: .*\(test_cases.py:\d+\)", text)


def test_output_of_ranks_is_shown_on_failure(report):
    assert "stdout of rank 0" in report.output
    assert "said by 0" in report.output
    assert "said by 1" in report.output


def test_a_killed_rank_is_named_with_its_signal(report):
    headline, text, _ = report.failure("test_killed")
    assert headline == "rank 1 of 2: was killed by SIGKILL"
    assert "\nrank 0: RuntimeError" in text


def test_a_crash_shows_its_signal_and_its_stack(report):
    assert report.failure("test_crash")[0] == "rank 0 of 1: was killed by SIGSEGV"
    assert "Fatal Python error: Segmentation fault" in report.output
    assert re.search(r'test_cases.py", line \d+ in test_crash', report.output)


def test_an_early_exit_is_reported_with_its_code(report):
    headline = report.failure("test_exit_code")[0]
    assert headline == "rank 0 of 1: exited with code 3 before its body ended"


def test_a_system_exit_is_a_failure(report):
    assert "SystemExit: 4" in report.failure("test_system_exit")[0]


def test_a_hang_shows_every_ranks_stack_and_fails_in_time(report):
    headline, text, seconds = report.failure("test_hang")
    assert headline == "timeout: no end within 1.5 s on 2 ranks, gloo on cpu"
    stacks = re.split(r"\nrank 1: ", text)
    assert "in barrier" in stacks[0]
    assert re.search(r'test_cases.py", line \d+ in test_hang', stacks[0])
    assert re.search(r'test_cases.py", line \d+ in test_hang', stacks[1])
    assert "lamina_testing" not in text, "the plugin's own frames only distract"
    assert seconds < 45, "and not only at the 60 s that a mark without a timeout has"


def test_a_rank_that_has_passed_waits_for_its_peers(report):
    assert len(report.cases["test_one_rank_passes_long_before_the_other"]) == 0


def test_a_failure_to_leave_the_process_group_is_a_failure(report):
    headline, _, _ = report.failure("test_teardown")
    assert headline.startswith("rank 1 of 2: passed, but leaving the process group it exited")
    assert "RuntimeError: cannot leave" in report.output


def test_a_rank_can_skip_for_the_others_what_they_have_not_ended(report):
    assert report.skip("test_skip_for_all") == "nothing was computed"
    assert float(report.cases["test_skip_for_all"].get("time", 0)) < 50
    headline, *_ = report.failure("test_failure_before_a_skip_for_all")
    assert headline.startswith("rank 0 of 2: AssertionError")


def test_skips_and_expected_failures_inside_bodies_count_as_such(report):
    assert report.skip("test_skip") == "for a reason"
    assert report.skip("test_xfail") == "known"
    assert report.cases["test_marked_xfail"].find("skipped") is not None


def test_a_warning_of_all_ranks_is_shown_once(report):
    assert len(re.findall("DeprecationWarning: told once", report.output)) == 1


def test_warning_filters_hold_inside_bodies(report):
    headline, _, _ = report.failure("test_warning_is_error")
    assert headline.startswith("rank 0 of 1: UserWarning: too much")


def test_a_fixture_that_cannot_travel_is_refused_by_name(report):
    _, text, _ = report.failure("test_fixture_with_state")
    assert "the value of 'capsys' cannot reach the ranks" in text


def test_the_fixture_needs_the_mark(report):
    assert "without @pytest.mark.ranks(N)" in report.failure("test_no_marker")[1]


def test_processes_that_a_body_leaves_behind_are_ended(report):
    assert wait_until_gone([int((report.directory / "grandchild").read_text())])


def test_too_few_gpus_skip_with_the_numbers(report):
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has GPUs")
    assert report.skip("test_gpus") == "needs 2 GPUs, this machine has 0"


def test_reused_ranks_live_until_a_test_fails(report):
    pids = [
        [int((report.directory / f"pid{use}.{rank}").read_text()) for rank in range(2)]
        for use in range(4)
    ]
    assert pids[0] == pids[1], "the second test runs on the first one's ranks"
    assert pids[1] != pids[2], "which failed, so the third gets new ones"
    assert pids[2] == pids[3]
    assert wait_until_gone([pid for pair in pids for pid in pair])


HANGING = """
import os, time
import pytest

@pytest.mark.ranks(2)
def test_hang(ranks):
    with open(f"{ranks.rank}.part", "w") as file:
        file.write(f"{os.getpid()} {os.getppid()}")
    os.rename(f"{ranks.rank}.part", f"{ranks.rank}.pid")
    time.sleep(1000)
"""


@pytest.mark.parametrize(
    "signal_number",
    [
        signal.SIGKILL,
        *(pytest.param(each, marks=pytest.mark.slow) for each in (signal.SIGINT, signal.SIGTERM)),
    ],
)
def test_nothing_is_left_when_pytest_is_ended(tmp_path, signal_number):
    (tmp_path / "test_hanging.py").write_text(HANGING)
    process = subprocess.Popen(
        command(), cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL
    )
    files = [tmp_path / "0.pid", tmp_path / "1.pid"]
    deadline = time.monotonic() + PATIENCE
    while not all(file.exists() for file in files):
        assert process.poll() is None, "pytest ended by itself"
        assert time.monotonic() < deadline
        time.sleep(0.05)
    pids = [int(pid) for file in files for pid in file.read_text().split()]
    command_line = Path(f"/proc/{pids[1]}/cmdline").read_text().split("\0")
    run_directory = Path(command_line[command_line.index("lamina_testing.server") + 2])
    assert run_directory.is_dir()

    process.send_signal(signal_number)
    process.wait(timeout=PATIENCE)

    assert wait_until_gone(pids)
    assert not run_directory.exists()


SELECTED = """
import pytest

@pytest.mark.ranks(1, 2)
def test_sizes(): pass

@pytest.mark.ranks(2, any_size=True)
def test_any(): pass

@pytest.mark.ranks(3, backend="fake")
def test_fake(): pass

def test_single(): pass

@pytest.mark.slow
def test_slow(): pass
"""


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], {"sizes[ranks1]", "sizes[ranks2]", "any[ranks2]", "fake[ranks3]", "single"}),
        (["--world-size=2"], {"sizes[ranks2]", "any[ranks2]"}),
        (["--world-size=5"], {"any[ranks5]"}),
        (["--backend=fake", "--world-size=3"], {"any[ranks3]", "fake[ranks3]"}),
        (["--backend=nccl", "--world-size=1"], {"sizes[ranks1]", "any[ranks1]"}),
        (["--slow", "-m", "slow"], {"slow"}),
    ],
)
def test_options_select_the_cells_of_the_matrix(tmp_path, options, expected):
    (tmp_path / "test_selected.py").write_text(SELECTED)
    run = run_pytest(tmp_path, "--collect-only", "-q", *options)
    names = re.findall(r"::test_(\S+)", run.stdout)
    assert set(names) == expected
    assert "lamina" not in run.stderr


NUMBERED = "import pytest\n\n@pytest.mark.parametrize('n', range(6))\ndef test_it(n): pass\n"


@pytest.mark.slow
def test_a_random_order_keeps_modules_together_and_can_be_repeated(tmp_path):
    for name in "abc":
        (tmp_path / f"test_{name}.py").write_text(NUMBERED)

    def order(*options):
        run = run_pytest(tmp_path, "--collect-only", "-q", *options)
        return re.findall(r"test_(\w)\.py::test_it\[(\d)\]", run.stdout), run

    straight, _ = order()
    first, _ = order("--shuffle=7")
    assert first == order("--shuffle=7")[0] != straight
    assert sorted(first) == straight
    assert first != order("--shuffle=8")[0]
    names = [name for name, _ in first]
    assert all(names[k * 6 : k * 6 + 6] == names[k * 6 : k * 6 + 1] * 6 for k in range(3))
    run = run_pytest(tmp_path, "--shuffle", "-n2")
    (seed,) = re.findall(r"random order: --shuffle (\d+)", run.stdout)
    assert "18 passed" in run.stdout
    assert int(seed) > 0


WRONG_MARKS = {
    "": "world sizes must be positive integers, not ()",
    "0": "world sizes must be positive integers, not (0,)",
    "2, backend='mpi'": "backend must be one of ('gloo', 'nccl', 'fake'), not 'mpi'",
    "2, device='tpu'": "device must be 'cpu' or 'cuda', not 'tpu'",
    "2, timout=3": "unknown argument ['timout']",
    "2, reuse=True, init=False": "so it cannot go with init=False",
}


def test_wrong_marks_are_refused_with_the_reason(tmp_path):
    for number, arguments in enumerate(WRONG_MARKS):
        source = f"import pytest\n@pytest.mark.ranks({arguments})\ndef test_it(): pass\n"
        (tmp_path / f"test_wrong{number}.py").write_text(source)
    run = run_pytest(tmp_path, "--collect-only")
    assert f"{len(WRONG_MARKS)} errors" in run.stdout.splitlines()[-1]
    for complaint in WRONG_MARKS.values():
        assert complaint in run.stdout


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_works_under_xdist_with_the_same_reports(tmp_path, workers):
    (tmp_path / "test_cases.py").write_text(CASES)
    run = run_pytest(
        tmp_path, f"-n{workers}", "-k", "assertion or killed or skip or (warning and not error)"
    )
    assert "rank 1 failed first" in run.stdout
    assert re.search(r"FAILED .*test_killed.* - rank 1 of 2: was killed", run.stdout)
    assert re.search(r"3 failed, 1 passed, 2 skipped, 1 warning", run.stdout.splitlines()[-1])


def test_the_plugin_imports_no_torch(tmp_path):
    probe = "import sys, lamina_testing, lamina_testing.plugin; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", probe], check=True)


BROKEN = """
import pytest

@pytest.mark.ranks(1)
def test_sound():
    import lamina.lamina_test_sound

@pytest.mark.ranks(1)
def test_broken():
    import lamina.lamina_test_broken
"""


def test_a_layer_that_does_not_import_breaks_only_its_own_tests(tmp_path, monkeypatch):
    for name, source in (("sound", ""), ("broken", "raise RuntimeError('half written')")):
        layer = tmp_path / "lamina" / f"lamina_test_{name}"
        layer.mkdir(parents=True)
        (layer / "__init__.py").write_text(source)
    (tmp_path / "test_broken.py").write_text(BROKEN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run = run_pytest(tmp_path)
    assert "RuntimeError: half written" in run.stdout
    assert run.stdout.splitlines()[-1].strip("= ").startswith("1 failed, 1 passed")


LATE = """
import os, sys, time
import pytest

@pytest.mark.ranks(2)
def test_peer_has_joined(ranks):
    assert os.path.exists("joined")

if "torch.distributed" in sys.modules:  # in a rank
    import torch.distributed as dist
    join = dist.init_process_group

    def join_late(*words, rank, **options):
        join(*words, rank=rank, **options)
        if rank == 0:
            time.sleep(0.5)
            open("joined", "w").close()

    dist.init_process_group = join_late
"""


def test_no_rank_begins_before_all_have_joined(tmp_path):
    """Or else one that fails at once closes connections that its peers are still making."""
    (tmp_path / "test_late.py").write_text(LATE)
    run = run_pytest(tmp_path)
    assert "1 passed" in run.stdout, run.stdout


THREE_HUNDRED = """
import pytest

@pytest.mark.ranks(2)
@pytest.mark.parametrize("number", range(300))
def test_all_reduce(number):
    import torch, torch.distributed as dist
    total = torch.ones(4)
    dist.all_reduce(total)
    assert total.tolist() == [2] * 4
"""


@pytest.mark.slow
def test_three_hundred_two_rank_tests_take_under_two_minutes(tmp_path):
    (tmp_path / "test_many.py").write_text(THREE_HUNDRED)
    begin = time.monotonic()
    run = run_pytest(tmp_path, "-q")
    seconds = time.monotonic() - begin
    print(f"300 two-rank tests: {seconds:.1f} s")
    assert "300 passed" in run.stdout
    assert seconds < 120
