"""The workflows of GitHub only call tasks that there are, and may do only what they need."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest
import yaml
from tasks.bootstrap import LAYERS
from tasks.torches import supported

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PYTHONS = ["3.11", "3.12", "3.13", "3.14"]


def sessions() -> set[str]:
    """Names of nox's sessions: functions under `@task`, `@task(...)` or `@nox.session(...)`."""
    found = set()
    for path in (ROOT / "tasks").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef):
                for decorator in node.decorator_list:
                    if re.match(r"task\b|nox\.session\b", ast.unparse(decorator)):
                        found.add(node.name)
                        found |= set(re.findall(r"name='([\w-]+)'", ast.unparse(decorator)))
    return found


def load(path: Path) -> dict:
    text = yaml.safe_load(path.read_text())
    return {"on" if key is True else key: value for key, value in text.items()}


JOBS = [
    pytest.param(load(path), job, id=f"{path.stem}-{name}")
    for path in WORKFLOWS
    for name, job in load(path)["jobs"].items()
]


def complaints(job: dict, known: set[str]) -> list[str]:
    """What a job's steps run that is no task of the repository."""
    found = []
    for step in job["steps"]:
        if "run" not in step:
            continue
        words = shlex.split(step["run"])
        if words == ["bash", ".ci/run"]:
            continue
        if words[:3] != ["python3", "noxfile.py", "-s"]:
            found.append(f"{step['run']}: not a task")
        elif words[3] not in known:
            found.append(f"{step['run']}: no such task")
        elif len(words) > 4 and words[4] != "--":
            found.append(f"{step['run']}: what goes to the task stands behind --")
        if re.search(r"\$\{\{[^}]*(inputs|github\.(event|head_ref|ref_name))", step["run"]):
            found.append(f"{step['run']}: text from outside in a command; pass it by `env`")
    return found


@pytest.mark.parametrize(("workflow", "job"), JOBS)
def test_a_workflow_calls_tasks_and_nothing_else(workflow, job):
    assert complaints(job, sessions()) == []


@pytest.mark.parametrize(
    "command",
    [
        "pip install torch",
        "python3 noxfile.py -s no-such-task",
        "python3 noxfile.py -s tests -x",
        "python3 noxfile.py -s archives -- ${{ github.ref_name }}",
        "python3 noxfile.py -s matrix -- ${{ inputs.cells }}",
    ],
)
def test_the_check_sees_what_is_planted(command):
    assert complaints({"steps": [{"run": command}]}, sessions())


def test_the_tasks_that_workflows_could_call_are_found():
    assert {"tests", "matrix", "release", "env", "docs", "nightly"} <= sessions()
    assert {"run", "pytest", "griffe"}.isdisjoint(sessions())


def test_every_task_that_ci_runs_there_is():
    text = (ROOT / ".ci" / "run").read_text()
    assert set(re.findall(r"noxfile\.py -s ([\w-]+)", text)) <= sessions()


@pytest.mark.parametrize(("workflow", "job"), JOBS)
def test_only_publishing_may_ask_for_an_identity_and_nothing_may_write(workflow, job):
    assert workflow["permissions"] == {"contents": "read"}
    publishes = any("pypi-publish" in step.get("uses", "") for step in job["steps"])
    assert job.get("permissions", {}) == ({"id-token": "write"} if publishes else {})
    assert not publishes or job["environment"] in ("pypi", "testpypi")
    assert not publishes or not any("run" in step for step in job["steps"])


@pytest.mark.parametrize(("workflow", "job"), JOBS)
def test_actions_have_a_version(workflow, job):
    uses = [step["uses"] for step in job["steps"] if "uses" in step]
    assert all(re.search(r"@(v\d+|release/v\d+|[0-9a-f]{40})$", name) for name in uses)


def test_every_python_and_every_torch_that_is_declared_is_run():
    ci = load(ROOT / ".github/workflows/ci.yml")["jobs"]
    assert ["3.11", *ci["pythons"]["strategy"]["matrix"]["python"]] == PYTHONS
    weekly = load(ROOT / ".github/workflows/weekly.yml")["jobs"]
    assert weekly["torch"]["strategy"]["matrix"]["torch"] == supported()


def test_the_rehearsal_offers_every_layer():
    rehearsal = load(ROOT / ".github/workflows/rehearsal.yml")
    options = rehearsal["on"]["workflow_dispatch"]["inputs"]["layer"]["options"]
    assert tuple(options) == LAYERS


def test_updates_look_where_requirements_are():
    updates = yaml.safe_load((ROOT / ".github/dependabot.yml").read_text())["updates"]
    places = {entry["package-ecosystem"]: entry["directory"] for entry in updates}
    assert places == {"pip": "/requirements", "github-actions": "/"}
    assert list((ROOT / "requirements").glob("*.txt"))
