"""What a launcher's variables mean, and what is said when they can't mean anything."""

from __future__ import annotations

import pytest

from lamina.mesh.engine import EnvironmentVariableError, environment
from lamina.mesh.launching.launch import Launch, first_host, read_launch

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SLURM_STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-09,12]",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}


def test_no_variables_are_a_world_of_one() -> None:
    assert read_launch(environment({})) == Launch("none")


def test_torchruns_variables_are_read() -> None:
    assert read_launch(environment(TORCHRUN)) == Launch(
        "torchrun", 5, 8, 1, 4, "node0", 29500, store_is_running=True
    )


def test_a_world_of_one_needs_no_address() -> None:
    launch = read_launch(environment({"RANK": "0", "WORLD_SIZE": "1"}))
    assert (launch.world_size, launch.host) == (1, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": ""}, r"RANK is not set although WORLD_SIZE is set.*torchrun"),
        ({"WORLD_SIZE": ""}, r"WORLD_SIZE is not set although RANK is set"),
        ({"RANK": "five"}, r"RANK='five' is not an integer"),
        ({"RANK": "-1"}, r"RANK=-1 is below its minimum, 0"),
        ({"RANK": "8"}, r"RANK=8 is outside WORLD_SIZE=8: ranks run from 0 to 7"),
        ({"WORLD_SIZE": "0"}, r"WORLD_SIZE=0 is below its minimum, 1"),
        ({"LOCAL_RANK": "4"}, r"LOCAL_RANK=4 is outside LOCAL_WORLD_SIZE=4"),
        ({"MASTER_ADDR": ""}, r"WORLD_SIZE=8 but MASTER_ADDR is not set"),
        ({"MASTER_PORT": ""}, r"WORLD_SIZE=8 but MASTER_PORT is not set"),
        ({"MASTER_PORT": "70000"}, r"MASTER_PORT=70000 is above 65535"),
    ],
)
def test_torchruns_variables_that_cannot_be_are_named(change: dict, message: str) -> None:
    with pytest.raises(EnvironmentVariableError, match=message):
        read_launch(environment({**TORCHRUN, **change}))


def test_a_slurm_step_of_several_tasks_is_read() -> None:
    launch = read_launch(environment(SLURM_STEP))
    assert (launch.launcher, launch.rank, launch.world_size) == ("slurm", 3, 6)
    assert (launch.local_rank, launch.local_world_size) == (1, 2)
    assert launch.host == "gpu07"
    assert not launch.store_is_running


def test_ranks_of_a_slurm_step_agree_on_a_port_and_other_jobs_have_another() -> None:
    def port(**change: str) -> int | None:
        return read_launch(environment({**SLURM_STEP, **change})).port

    assert port() == port(SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_NODEID="0")
    assert len({port(), port(SLURM_JOB_ID="4712"), port(SLURM_STEP_ID="1")}) == 3
    assert port(MASTER_PORT="12345") == 12345


@pytest.mark.parametrize(
    "variables",
    [
        # A batch script or an allocation's shell: SLURM's variables, but one process.
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
        # An interactive step (salloc with use_interactive_step).
        {**SLURM_STEP, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"},
    ],
)
def test_slurms_variables_outside_a_step_of_several_tasks_do_not_count(variables: dict) -> None:
    assert read_launch(environment(variables)) == Launch("none")


def test_torchrun_inside_a_slurm_step_counts_first() -> None:
    assert read_launch(environment({**SLURM_STEP, **TORCHRUN})).launcher == "torchrun"


def test_a_slurm_step_without_an_address_says_what_to_export() -> None:
    with pytest.raises(EnvironmentVariableError, match="export MASTER_ADDR="):
        read_launch(environment({**SLURM_STEP, "SLURM_STEP_NODELIST": ""}))


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("gpu1", "gpu1"),
        ("gpu[07-09,12],login1", "gpu07"),
        ("login1,gpu[07-09]", "login1"),
        ("rack[1-2]node[3,4]", "rack1node3"),
        ("gpu-a[001]", "gpu-a001"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_node_list(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host
