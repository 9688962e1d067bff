"""The recipes for several hosts, read as torchrun, bash, SLURM and Kubernetes would read them."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

sys.path.insert(0, str(Path(__file__).parents[1] / "launch"))
import render

HOSTS, RANKS = 3, 4
ASKED = ["--hosts", str(HOSTS), "--ranks", str(RANKS), "--name", "job", "--grace", "90"]


def as_torchrun_reads(words: list[str]):
    """Its own parser refuses what it does not know."""
    assert words[0] == "torchrun"
    given = get_args_parser().parse_args(words[1:])
    assert (given.nproc_per_node, given.max_restarts) == (str(RANKS), 3)
    assert given.rdzv_backend == "c10d"
    assert given.rdzv_endpoint.endswith(":29400")
    assert "SIGTERM" in given.signals_to_handle.split(",")
    assert (given.training_script, given.training_script_args) == ("train.py", ["--option", "a b"])
    return given


PROGRAM = ["--", "train.py", "--option", "a b"]


def test_torchrun_reads_the_command_of_each_host():
    text = render.main(["torchrun", *ASKED, "--endpoint", "node0", *PROGRAM])
    given = as_torchrun_reads(shlex.split(text))
    assert given.nnodes == f"1:{HOSTS}"
    assert given.rdzv_endpoint == "node0:29400"
    assert render.main(["torchrun", "--hosts", "1"]).split()[1] == "--nnodes=1"


SBATCH = {  # options of sbatch that the script uses, and what they may be
    "job-name": r"\w+", "nodes": r"\d+", "ntasks-per-node": "1", "gpus-per-node": r"\d+",
    "cpus-per-task": r"\d+", "requeue": "", "open-mode": "append", "signal": r"B:USR1@\d+",
}  # fmt: skip


def test_bash_and_slurm_read_the_batch_script(tmp_path):
    text = render.main(["slurm", *ASKED, *PROGRAM])
    path = tmp_path / "job.sbatch"
    path.write_text(text)
    subprocess.run(["bash", "-n", str(path)], check=True)
    options = {}
    before = text.splitlines()
    directives = [line for line in before if line.startswith("#SBATCH")]
    assert before[1 : 1 + len(directives)] == directives  # after the first command they count not
    for word in " ".join(line.removeprefix("#SBATCH") for line in directives).split():
        name, _, value = word.removeprefix("--").partition("=")
        assert re.fullmatch(SBATCH[name], value), word
        options[name] = value
    assert options.keys() == SBATCH.keys()
    assert (options["nodes"], options["gpus-per-node"]) == (str(HOSTS), str(RANKS))
    assert options["signal"] == "B:USR1@90"


def test_the_batch_script_saves_and_queues_itself_again(tmp_path):
    """A stand-in for srun waits until it is told to end; one for scontrol knows two hosts."""
    (tmp_path / "job.sbatch").write_text(render.main(["slurm", *ASKED, *PROGRAM]))
    # As of bash, a list of what it was given, a line each; then it waits as ranks would.
    srun = f'trap "echo saved > {tmp_path}/saved; exit 75" TERM\n'
    srun += f'printf "%s\\n" "$@" > {tmp_path}/given'
    srun += f"\nmv {tmp_path}/given {tmp_path}/words\nwhile :; do sleep 0.05; done"
    scontrol = 'case $1 in show) echo n7; echo n8;; *) echo "$@" > '
    scontrol += f"{tmp_path}/queued;; esac"
    for name, body in (("srun", srun), ("scontrol", scontrol)):
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    variables = {"SLURM_JOB_ID": "5", "SLURM_JOB_NODELIST": "n[7-8]"}
    path = f"{tmp_path}:/usr/bin:/bin"
    with subprocess.Popen(
        ["bash", str(tmp_path / "job.sbatch")], env={"PATH": path, **variables}
    ) as job:
        deadline = time.monotonic() + 30
        while not (tmp_path / "words").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        words = (tmp_path / "words").read_text().splitlines()
        assert words[0] == "--kill-on-bad-exit=1"
        given = as_torchrun_reads(words[1:])
        assert (given.nnodes, given.rdzv_endpoint) == (str(HOSTS), "n7:29400")
        job.send_signal(signal.SIGUSR1)
        job.wait(30)
    assert (tmp_path / "saved").exists()
    assert (tmp_path / "queued").read_text() == "requeue 5\n"


def test_a_jobset_has_a_pod_for_each_host_and_nothing_that_jobset_does_not_know():
    text = render.main(["jobset", *ASKED, "--image", "registry/lamina:1", *PROGRAM])
    manifest = yaml.safe_load(text)
    assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert manifest["metadata"] == {"name": "job"}
    spec = manifest["spec"]
    assert spec.keys() <= {"failurePolicy", "network", "replicatedJobs", "successPolicy", "suspend"}
    assert spec["network"]["enableDNSHostnames"]  # without it the endpoint has no address
    (hosts,) = spec["replicatedJobs"]
    assert hosts.keys() == {"name", "replicas", "template"}
    job = hosts["template"]["spec"]
    assert (job["parallelism"], job["completions"]) == (HOSTS, HOSTS)
    assert (job["completionMode"], job["backoffLimit"]) == ("Indexed", 0)
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # Kubernetes takes OnFailure or Never in a Job
    assert pod["terminationGracePeriodSeconds"] == 90
    (container,) = pod["containers"]
    assert container["image"] == "registry/lamina:1"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": RANKS}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert set(mounts.values()) == set(volumes)
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    given = as_torchrun_reads(container["command"])
    assert given.nnodes == str(HOSTS)
    # The first pod: JOBSET-JOB-REPLICA-INDEX.SUBDOMAIN, where the subdomain is the JobSet's name.
    port = container["ports"][0]["containerPort"]
    assert given.rdzv_endpoint == f"job-{hosts['name']}-0-0.job:{port}"


@pytest.mark.parametrize("wrong", [["--hosts", "0"], ["--ranks", "-1"], ["--grace", "0"]])
def test_numbers_that_mean_nothing_are_refused(wrong, capsys):
    with pytest.raises(SystemExit):
        render.main(["slurm", *wrong])
    assert "at least 1" in capsys.readouterr().err
