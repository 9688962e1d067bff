"""noxfile.py starts where little is installed, and says what is missing."""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tasks.bootstrap import in_one_line, write_lent, write_torchrun

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def alone(tmp_path: Path) -> Path:
    """A directory with the file and its tasks, and nothing else."""
    shutil.copy(ROOT / "noxfile.py", tmp_path)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "tasks", tmp_path / "tasks", ignore=ignored)
    return tmp_path


def start(place: Path, *words: str, broken: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """Run the file with an interpreter in which the modules `broken` cannot be imported."""
    for name in broken:
        (place / "broken").mkdir(exist_ok=True)
        (place / "broken" / f"{name}.py").write_text(f"raise ImportError('no {name}')\n")
    env = {**os.environ, "PYTHONPATH": str(place / "broken")}
    command = [sys.executable, "noxfile.py", *words]
    return subprocess.run(command, cwd=place, env=env, capture_output=True, text=True)


def test_a_python_that_cannot_make_environments_is_told_what_to_install(alone):
    run = start(alone, "-l", broken=("ensurepip", "pip"))
    assert run.returncode == 1
    assert "apt install python3-venv" in run.stderr
    assert not (alone / ".nox" / "bootstrap").exists()


@pytest.mark.slow
def test_a_python_without_ensurepip_is_helped_by_its_pip(alone):
    run = start(alone, "-l", broken=("ensurepip",))
    assert run.returncode == 0, run.stderr
    lines = [line for line in run.stdout.splitlines() if " -> " in line]
    told = [line.partition(" -> ")[2] for line in lines]
    assert all(told)
    assert len(set(told)) == len(told) < 50  # one line a task, and no sentence twice
    for form in ("--full", "--installed fsdp", "--shard 1/4", "fsdp-nccl-8"):
        assert sum(f"matrix -- {form}" in line for line in lines) == 1


def test_an_environment_with_a_borrowed_torch_has_a_torchrun(tmp_path):
    python = tmp_path / "a place" / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    write_torchrun(python)
    run = subprocess.run([python.with_name("torchrun"), "a b.py"], capture_output=True, text=True)
    assert run.stdout == "-m torch.distributed.run a b.py\n", run.stderr


@pytest.mark.parametrize("editable", [False, True])
def test_a_borrowed_environment_lends_its_packages_and_not_its_lamina(tmp_path, editable):
    lender, tree, env = tmp_path / "lender", tmp_path / "a tree", tmp_path / "env"
    theirs = tmp_path / "other tree" if editable else lender
    for module in (theirs / "lamina/gone", theirs / "lamina/both", tree / "lamina/both"):
        module.mkdir(parents=True)
        (module / "__init__.py").touch()
    lender.mkdir(exist_ok=True)
    (lender / "guest.py").touch()
    if editable:
        (lender / "other.pth").write_text(f"{theirs}\n")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", env], check=True)
    (site_packages,) = env.glob("lib/python3*/site-packages")
    write_lent(site_packages, [str(lender)])
    (site_packages / "lamina.pth").write_text(f"{tree}\n")
    show = (
        "import guest, importlib.util, lamina.both; print(lamina.both.__file__, *lamina.__path__, "
        "importlib.util.find_spec('lamina.gone'), sep='|')"
    )
    run = subprocess.run([env / "bin/python", "-c", show], capture_output=True, text=True)
    both = tree / "lamina" / "both" / "__init__.py"
    assert run.stdout == f"{both}|{tree / 'lamina'}|None\n", run.stderr


def test_a_checkout_that_cannot_be_written_is_told_in_a_sentence(alone):
    (alone / ".nox").symlink_to("/proc")  # where root cannot write either
    run = start(alone, "-l", broken=())
    assert run.returncode == 1
    assert f"{alone / '.nox'} cannot be written (" in run.stderr
    assert "Clone the repository into a directory of yours" in run.stderr
    assert "Traceback" not in run.stderr


def imports(nodes: list[ast.stmt]) -> list[str]:
    """Names of the modules that these statements import."""
    names = []
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            path = f"{node.module}.{node.names[0].name}"
            names.append(path if (ROOT / f"{path.replace('.', '/')}.py").exists() else node.module)
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return names


def test_of_what_pip_says_a_terminal_keeps_nothing(capsys):
    with in_one_line() as shown:
        subprocess.run([sys.executable, "-c", "print('one\\ntwo' + 99 * 'o')"], stdout=shown)
    said = capsys.readouterr().out
    assert "\n" not in said
    assert [line[:6] for line in said.split("\r")] == ["", "\x1b[Kone", "\x1b[Ktwo", "\x1b[K"]
    assert len(said.split("\r")[2]) < 99


def test_what_runs_before_nox_is_there_imports_the_standard_library_alone():
    tree = ast.parse((ROOT / "noxfile.py").read_text())
    starts = [isinstance(n, ast.If) and "__name__" in ast.unparse(n.test) for n in tree.body]
    waiting = imports(tree.body[: starts.index(True)])  # up to `if __name__ == "__main__":`
    seen = set()
    while waiting:
        name = waiting.pop()
        seen.add(name)
        if name.startswith("tasks."):
            source = ROOT / f"{name.replace('.', '/')}.py"
            waiting += imports(ast.parse(source.read_text()).body)
    assert "tasks.bootstrap" in seen
    others = {name.split(".")[0] for name in seen} - {"tasks"}
    assert others <= set(sys.stdlib_module_names)


def constants_of(name: str) -> dict[str, object]:
    """The constants of a module of `tasks`, which is not imported: it needs nox."""
    return {
        statement.targets[0].id: ast.literal_eval(statement.value)
        for statement in ast.parse((ROOT / "tasks" / f"{name}.py").read_text()).body
        if isinstance(statement, ast.Assign)
        and isinstance(statement.targets[0], ast.Name)
        and isinstance(statement.value, ast.Constant)
    }


@pytest.mark.slow
def test_the_first_run_finds_byte_code_of_all_that_it_imports_of_torch(tmp_path):
    """What another core compiles while pip works: nobody waits for it, or looks at how it ended."""
    compiled = tmp_path / "compiled"
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    env["PYTHONPYCACHEPREFIX"] = str(compiled)
    program = constants_of("environment")["IMPORT_TORCH"]
    subprocess.run([sys.executable, "-c", program], env=env, check=True, capture_output=True)
    (torch,) = importlib.util.find_spec("torch").submodule_search_locations
    compiled /= torch.lstrip("/")
    made = {*compiled.rglob("*.pyc")}
    train = [sys.executable, str(ROOT / "examples/pretrain/train.py"), "--tiny"]
    options = ["--run.directory", str(tmp_path / "run"), "--log.no-tensorboard"]
    subprocess.run([*train, *options], env=env, check=True, capture_output=True)
    needed = {*compiled.rglob("*.pyc")}
    assert len(made) > 1000
    assert len(needed - made) < 0.05 * len(needed), sorted(map(str, needed - made))


@pytest.mark.parametrize(
    ("version", "coming"),
    [
        ("2.13.0+cpu", False),
        ("2.15.0", False),
        ("2.16.0.dev20261101+cpu", True),
        ("2.16.0a0", True),
    ],
)
def test_nightly_ends_on_a_release_with_its_version_and_the_index(tmp_path, version, coming):
    (tmp_path / "torch.py").write_text(f"__version__ = {version!r}\n")
    constants = constants_of("tests")
    command = [sys.executable, "-c", constants["SHOW"] + constants["ONLY_COMING"], "https://index"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    run = subprocess.run(command, env=env, capture_output=True, text=True)
    assert (run.returncode == 0) == coming, run.stderr
    assert coming or f"torch {version} is a release, and no coming version: https://index" in (
        run.stderr
    )
