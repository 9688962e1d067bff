"""Print the file or command that starts a job on several hosts.

    python examples/launch/render.py torchrun --hosts 2 --ranks 8 --endpoint node0
    python examples/launch/render.py slurm --hosts 2 --ranks 8 > job.sbatch
    python examples/launch/render.py jobset --hosts 2 --ranks 8 --image IMAGE > job.yaml

Words after `--` are the program and its options; without them it is the main job. All three run one
torchrun per host, restart a job that fails, and give it time to save when the machine is wanted
back.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Sequence

PORT = 29400
PROGRAM = ["examples/pretrain/train.py", "--run.directory", "runs/a"]


def launcher(given: argparse.Namespace, endpoint: str, hosts: str) -> list[str]:
    """What torchrun is given, up to the program."""
    return [
        "torchrun",
        f"--nnodes={hosts}",
        f"--nproc-per-node={given.ranks}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={endpoint}:{PORT}",
        f"--rdzv-id={given.name}",
        "--max-restarts=3",
        "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
    ]


def torchrun(given: argparse.Namespace) -> str:
    """The command to type on each host."""
    hosts = f"1:{given.hosts}" if given.hosts > 1 else "1"  # goes on without a host that is lost
    return shlex.join([*launcher(given, given.endpoint, hosts), *given.program]) + "\n"


def slurm(given: argparse.Namespace) -> str:
    """A batch script that saves before its time is over and puts itself into the queue again."""
    # The endpoint is known inside the job only, so the shell puts it in.
    words = launcher(given, "$endpoint", str(given.hosts))
    quoted = [f'"{word}"' if "$" in word else shlex.quote(word) for word in words]
    return f"""\
#!/bin/bash
#SBATCH --job-name={given.name}
#SBATCH --nodes={given.hosts} --ntasks-per-node=1 --gpus-per-node={given.ranks}
#SBATCH --cpus-per-task={given.ranks * 8}
#SBATCH --requeue --open-mode=append
#SBATCH --signal=B:USR1@{given.grace}
# SLURM sends USR1 to this script {given.grace} s before the end: ranks save, the job queues again.
trap 'kill -TERM $job; wait $job; scontrol requeue $SLURM_JOB_ID' USR1
endpoint=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --kill-on-bad-exit=1 {" ".join(quoted)} \\
    {shlex.join(given.program)} & job=$!
wait $job
"""


def jobset(given: argparse.Namespace) -> str:
    """A JobSet: one pod per host, restarted together, with room in /dev/shm and time to save."""
    # JobSet gives pod i of this job the name NAME-hosts-0-i.NAME.
    words = launcher(given, f"{given.name}-hosts-0-0.{given.name}", str(given.hosts))
    command = "".join(
        f"\n                    - {json.dumps(word)}" for word in [*words, *given.program]
    )
    return f"""\
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: {given.name}
spec:
  failurePolicy:
    maxRestarts: 10
  network:
    enableDNSHostnames: true
  replicatedJobs:
    - name: hosts
      replicas: 1
      template:
        spec:
          parallelism: {given.hosts}
          completions: {given.hosts}
          completionMode: Indexed
          backoffLimit: 0
          template:
            spec:
              restartPolicy: Never
              terminationGracePeriodSeconds: {given.grace}
              containers:
                - name: ranks
                  image: {given.image}
                  ports:
                    - containerPort: {PORT}
                  command:{command}
                  resources:
                    limits:
                      nvidia.com/gpu: {given.ranks}
                  volumeMounts:
                    - mountPath: /dev/shm
                      name: shm
                    - mountPath: /workspace/runs
                      name: runs
              volumes:
                - name: shm
                  emptyDir:
                    medium: Memory
                    sizeLimit: 8Gi
                - name: runs
                  persistentVolumeClaim:
                    claimName: {given.claim}
"""


RECIPES: dict[str, Callable[[argparse.Namespace], str]] = {
    "torchrun": torchrun,
    "slurm": slurm,
    "jobset": jobset,
}


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Read the command line; words after `--` are the program."""
    end = words.index("--") if "--" in words else len(words)
    own, program = words[:end], words[end + 1 :] or PROGRAM
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", choices=list(RECIPES))
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=8, help="ranks, and GPUs, of each host")
    parser.add_argument("--name", default="lamina")
    parser.add_argument("--endpoint", default="HOST", help="torchrun: the host that all reach")
    parser.add_argument("--grace", type=int, default=180, help="seconds that a save may take")
    parser.add_argument("--image", default="IMAGE", help="jobset: with torch and Lamina")
    parser.add_argument("--claim", default="runs", help="jobset: a volume that all hosts share")
    given = parser.parse_args(own)
    if min(given.hosts, given.ranks, given.grace) < 1:
        parser.error("--hosts, --ranks and --grace must be at least 1")
    given.program = list(program)
    return given


def main(words: Sequence[str]) -> str:
    """The text of a recipe."""
    given = parse(words)
    return RECIPES[given.recipe](given)


if __name__ == "__main__":
    print(main(sys.argv[1:]), end="")
