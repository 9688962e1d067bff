"""The doctor: a good machine passes, and each known trouble is named with what to change."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from lamina.mesh import check_environment
from lamina.mesh.engine import Machine, environment
from lamina.mesh.launching.doctor import main, report

CPU = Machine(
    torch_version="2.13.0+cpu",
    cuda_build=None,
    visible_gpus=(),
    gpu_devices=0,
    backends=("gloo",),
    triton=None,
    cores=16,
    shm_bytes=8 << 30,
    open_files=65_536,
    host_resolves=True,
    interfaces=("lo", "eth0"),
)
GPU = replace(
    CPU,
    torch_version="2.11.0+cu130",
    cuda_build="13.0",
    visible_gpus=("NVIDIA H100 80GB HBM3",) * 8,
    gpu_devices=8,
    backends=("gloo", "nccl"),
    triton="3.6.0",
)


def found(machine: Machine, **variables: str) -> dict[str, str]:
    """Names of the problems with their severities."""
    problems = check_environment(environment(variables), machine)
    return {problem.name: problem.severity for problem in problems}


@pytest.mark.parametrize("machine", [CPU, GPU], ids=["cpu", "gpu"])
def test_a_good_machine_has_nothing_to_change(machine: Machine) -> None:
    assert found(machine) == {}
    assert "Nothing to change." in report(machine, [])


@pytest.mark.parametrize(
    ("variable", "value", "severity"),
    [
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", "warning"),
        ("CUDA_LAUNCH_BLOCKING", "1", "warning"),
        ("MASTER_ADDR", "8.8.4.4", "warning"),
        ("TORCH_NCCL_BLOCKING_WAIT", "1", "warning"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", "warning"),
        ("NCCL_P2P_DISABLE", "1", "warning"),
        ("NCCL_SHM_DISABLE", "1", "warning"),
        ("NCCL_IB_DISABLE", "1", "note"),
        ("NCCL_ALGO", "Ring", "note"),
        ("NCCL_PROTO", "LL", "note"),
        ("NCCL_NVLS_ENABLE", "0", "note"),
        ("NCCL_CUMEM_ENABLE", "0", "note"),
        ("NCCL_DEBUG", "info", "note"),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "warning"),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", "warning"),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:True", "note"),
        ("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1", "warning"),
        ("NVIDIA_TF32_OVERRIDE", "0", "note"),
        ("TRITON_INTERPRET", "1", "warning"),
        ("OMP_NUM_THREADS", "8", "warning"),
        ("GLOO_SOCKET_IFNAME", "ib0", "error"),
        ("NCCL_SOCKET_IFNAME", "=ib0,ib1", "error"),
    ],
)
def test_a_setting_that_hurts_is_named(variable: str, value: str, severity: str) -> None:
    assert found(GPU, **{variable: value}) == {variable: severity}


def test_many_ranks_need_groups_that_connect_late() -> None:
    job = {"RANK": "3", "LOCAL_RANK": "3", "MASTER_ADDR": "node0", "MASTER_PORT": "29400"}
    assert found(GPU, **job, WORLD_SIZE="256") == {"TORCH_GLOO_LAZY_INIT": "warning"}
    assert found(GPU, **job, WORLD_SIZE="256", TORCH_GLOO_LAZY_INIT="1") == {}
    assert found(GPU, **job, WORLD_SIZE="255") == {}


@pytest.mark.parametrize(
    "variables",
    [
        {"CUDA_DEVICE_MAX_CONNECTIONS": "32"},
        {"NCCL_DEBUG": "WARN"},
        {"NCCL_P2P_DISABLE": "0"},
        {"NCCL_SOCKET_IFNAME": "eth"},
        {"NCCL_SOCKET_IFNAME": "^docker,lo"},
        {"GLOO_SOCKET_IFNAME": "eth0"},
        {"OMP_NUM_THREADS": "2", "LOCAL_WORLD_SIZE": "8"},
        {"OMP_NUM_THREADS": "2,1"},
        {"MASTER_ADDR": "192.168.3.4"},
        {"MASTER_ADDR": "node0"},
    ],
)
def test_settings_that_do_no_harm_are_not_named(variables: dict[str, str]) -> None:
    assert found(GPU, **variables) == {}


@pytest.mark.parametrize(
    ("machine", "change", "expected"),
    [
        (CPU, {"torch_version": "2.10.1"}, {"torch": "error"}),
        (CPU, {"torch_version": "2.16.0a0+git"}, {"torch": "error"}),
        (CPU, {"backends": ()}, {"torch.distributed": "error"}),
        (CPU, {"gpu_devices": 8}, {"GPU": "warning"}),
        (CPU, {"shm_bytes": 64 << 20}, {"/dev/shm": "warning"}),
        (CPU, {"open_files": 1024}, {"open files": "note"}),
        (CPU, {"host_resolves": False}, {"host name": "note"}),
        (GPU, {"backends": ("gloo",)}, {"torch.distributed": "error"}),
        (GPU, {"triton": None}, {"Triton": "error"}),
        (GPU, {"visible_gpus": ()}, {"GPU": "warning"}),
        (CPU, {"address": "8.8.4.4"}, {"this machine's address": "note"}),
        (CPU, {"address": "10.0.0.7"}, {}),
    ],
)
def test_what_a_machine_lacks_is_named(machine: Machine, change: dict, expected: dict) -> None:
    assert found(replace(machine, **change)) == expected


@pytest.mark.parametrize(
    ("variables", "severity", "remedy"),
    [
        ({"LOCAL_WORLD_SIZE": "4"}, "warning", "Set it to 4."),
        ({"LOCAL_WORLD_SIZE": "4", "OMP_NUM_THREADS": "8"}, "warning", "Set it to 4."),
        ({"LOCAL_WORLD_SIZE": "4", "OMP_NUM_THREADS": "1"}, "note", "Set it to 4"),
        ({"LOCAL_WORLD_SIZE": "64", "OMP_NUM_THREADS": "1"}, "warning", "Set it to 1."),
    ],
)
def test_threads_are_compared_with_cores(variables: dict, severity: str, remedy: str) -> None:
    (problem,) = check_environment(environment(variables), CPU)
    assert (problem.name, problem.severity) == ("OMP_NUM_THREADS", severity)
    assert problem.remedy.startswith(remedy)


def test_variables_that_cannot_be_are_reported_and_the_rest_is_checked() -> None:
    problems = check_environment(
        environment({"RANK": "x", "WORLD_SIZE": "2", "OMP_NUM_THREADS": "all"}),
        replace(CPU, shm_bytes=0),
    )
    text = report(CPU, problems)
    assert [problem.severity for problem in problems] == ["error", "error", "warning"]
    assert "RANK='x' is not an integer" in text
    assert "OMP_NUM_THREADS='all' is not an integer" in text
    assert text.splitlines()[-1] == "2 errors, 1 warning, 0 notes"


def test_every_problem_says_what_to_change() -> None:
    variables = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_SOCKET_IFNAME": "ib0", "NCCL_ALGO": "T"}
    bad = replace(GPU, visible_gpus=(), torch_version="2.0.0", shm_bytes=0, open_files=64)
    problems = check_environment(environment(variables), bad)
    assert len(problems) >= 6
    for problem in problems:
        assert problem.effect
        assert problem.remedy
        assert problem.remedy.split()[0] in report(bad, [problem])


def test_the_command_fails_and_names_the_setting() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lamina.mesh", "doctor"],
        env={**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "WARNING CUDA_DEVICE_MAX_CONNECTIONS is 1" in done.stdout
    assert "-> Unset it, or set it to 8 or more." in done.stdout
    assert not done.stderr


def test_the_command_speaks_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert main(["doctor", "--json"]) == 1
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert any(p["name"] == "CUDA_LAUNCH_BLOCKING" for p in told["problems"])
    assert told["machine"]["cores"] >= 1


@pytest.mark.parametrize(
    ("world", "said"),
    [
        (None, "hosts     1 of 1 rank on each"),
        (4, "hosts     unknown: LAMINA_RANKS_PER_HOST=8 does not divide 4 ranks"),
        (16, "hosts     8 of 16 ranks on each; ordered sums begin with 8 of a host"),
    ],
)
def test_ranks_per_host_are_shown_for_the_job_that_variables_tell(monkeypatch, world, said):
    monkeypatch.setenv("LAMINA_RANKS_PER_HOST", "8")
    launch = {"RANK": 0, "LOCAL_RANK": 0, "MASTER_ADDR": "here", "MASTER_PORT": 1}
    for name, value in launch.items() if world else ():
        monkeypatch.setenv(name, str(value))
    if world:
        monkeypatch.setenv("WORLD_SIZE", str(world))
    assert said in report(CPU, []).splitlines()


def test_a_machine_without_ipv4_can_be_inspected(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")

    monkeypatch.setattr("lamina.mesh.launching.doctor.socket.socket", refuse)
    assert Machine.inspect().address is None
