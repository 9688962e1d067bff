"""`python -m lamina.mesh doctor`: looks at a machine and says what to change."""

import argparse
import json
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial

from lamina.mesh.errors import EnvironmentVariableError
from lamina.mesh.launch import read_launch
from lamina.mesh.machine import MACHINE_CHECKS, Machine
from lamina.mesh.settings import EnvironmentProblem, settings_problems
from lamina.mesh.variables import Environment, environment

__all__ = ["check_environment", "main", "report"]

_ORDER = {"error": 0, "warning": 1, "note": 2}


def check_environment(
    env: Environment | None = None, machine: Machine | None = None
) -> list[EnvironmentProblem]:
    """What should be changed before a run, the worst first.

    Args:
        env: by default this process' variables.
        machine: by default the one this process runs on.

    Examples:
        >>> wrong = [str(each) for each in check_environment() if each.severity == "error"]
    """
    variables = env if env is not None else environment()
    place = machine if machine is not None else Machine.inspect()
    problems = settings_problems(variables)
    checks: list[Callable[[], object]] = [partial(read_launch, variables)]
    for check in checks + [partial(each, place, variables) for each in MACHINE_CHECKS]:
        try:
            problem = check()
        except EnvironmentVariableError as error:
            effect, wrong = "nothing that reads it can start.", "wrong or missing"
            problem = EnvironmentProblem("a variable", wrong, effect, str(error), "error")
        if isinstance(problem, EnvironmentProblem):
            problems.append(problem)
    return sorted(problems, key=lambda problem: _ORDER[problem.severity])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit code: 1 if there is something to change."""
    parser = argparse.ArgumentParser(
        prog="python -m lamina.mesh", description="Tools for whoever starts distributed runs."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser(
        "doctor",
        help="check this machine and its settings and print what to change",
        description="Exit code 0: nothing to change (notes may be printed). 1: errors or "
        "warnings. Run it where the job will run, with the job's environment.",
    )
    doctor.add_argument("--json", action="store_true", help="print JSON for other programs")
    chosen = parser.parse_args(arguments)
    machine = Machine.inspect()
    problems = check_environment(machine=machine)
    if chosen.json:
        state = {"machine": asdict(machine), "problems": [asdict(each) for each in problems]}
        print(json.dumps(state, indent=2))
    else:
        print(report(machine, problems))
    return int(any(problem.severity != "note" for problem in problems))


def report(machine: Machine, problems: Sequence[EnvironmentProblem]) -> str:
    """The machine in a few lines, then each problem with what to change."""
    lines = [*_facts(machine), ""]
    for problem in problems:
        lines.append(f"{problem.severity.upper():<8}{problem.name} is {problem.found}")
        for text, bullet in ((problem.effect, ""), (problem.remedy, "-> ")):
            first, rest = " " * 8 + bullet, " " * (8 + len(bullet))
            lines += textwrap.wrap(text, 92, initial_indent=first, subsequent_indent=rest)
        lines.append("")
    counts = {kind: sum(problem.severity == kind for problem in problems) for kind in _ORDER}
    if counts["error"] or counts["warning"]:
        lines.append(", ".join(_counted(number, kind) for kind, number in counts.items()))
    else:
        notes = f" ({_counted(counts['note'], 'note')})" if counts["note"] else ""
        lines.append(f"Nothing to change{notes}.")
    return "\n".join(lines)


def _hosts() -> str:
    """Ranks of the job per host, as far as variables tell: the job itself compares its hosts."""
    variables = environment()
    try:
        launch, here = read_launch(variables), variables.ranks_per_host
    except EnvironmentVariableError:
        return "unknown"
    if here is not None and launch.world_size > 1 and launch.world_size % here:
        return f"unknown: LAMINA_RANKS_PER_HOST={here} does not divide {launch.world_size} ranks"
    here = min(here or launch.local_world_size or 1, launch.world_size)
    # Sums over hosts begin with the largest power of two that divides the ranks of a host.
    sums = f"; ordered sums begin with {here & -here} of a host" * (here < launch.world_size)
    return f"{here} of {_counted(launch.world_size, 'rank')} on each{sums}"


def _facts(machine: Machine) -> list[str]:
    gpus = ", ".join(dict.fromkeys(machine.visible_gpus)) or "none visible"
    count = f"{len(machine.visible_gpus)} x " if machine.visible_gpus else ""
    shm = "none" if machine.shm_bytes is None else f"{machine.shm_bytes / (1 << 30):.1f} GiB"
    cuda = f"CUDA {machine.cuda_build}" if machine.cuda_build else "CPU build"
    rows = (
        ("torch", f"{machine.torch_version} ({cuda}; {', '.join(machine.backends) or 'none'})"),
        ("triton", machine.triton or "not installed"),
        ("GPUs", f"{count}{gpus}"),
        ("cores", str(machine.cores)),
        ("/dev/shm", shm),
        ("hosts", _hosts()),
    )
    return [f"{name:<10}{value}" for name, value in rows]


def _counted(number: int, kind: str) -> str:
    return f"{number} {kind}{'' if number == 1 else 's'}"
