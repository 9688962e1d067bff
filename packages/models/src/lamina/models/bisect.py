"""Where two layouts part: the first module, tensor and element of a step that differ.

    python -m lamina.models.bisect my.module:build "tp 2, dp_shard 2" "pp 2, cp 2"

`build(mesh)` returns a `GPTModel`, with the same weights for every mesh and for None, which is one
process; or a pair of it and a function that gives further arguments of forward for a slice of the
batch's sequences. A layout has sizes of axes (`dp_replicate`, `dp_shard`, `cp`, `tp`, `pp`, `ep`,
`expert_tp`), and may have `strategy`, `rows` (sequences of a microbatch) and `schedule`. The empty
layout is one process. Each layout trains a step of the same batch with gloo ranks on this machine.
Hooks record what every module takes, gives and sends back, and gradients and parameters at the end.

Nothing is compared with a tolerance. So a model needs `TransformerConfig(invariant=True)`, unless
the layouts only differ in `dp_replicate`, `dp_shard`, `pp`, `strategy` and `schedule`.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import torch

from lamina.mesh import init_distributed
from lamina.models.bisection.comparison import Difference, first_difference
from lamina.models.bisection.recording import Trace, load_traces
from lamina.models.bisection.stepping import Build, Loss, Step, record_step

__all__ = ["Difference", "Step", "Trace", "first_difference", "load_traces", "record_step"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0: the layouts have the same bits, 1: they part, and it says where."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("build", help="module:function that takes a mesh, see above")
    parser.add_argument("layouts", nargs="+", help="two layouts; the empty one is one process")
    parser.add_argument("--sequences", type=int, default=4, help="of the batch")
    parser.add_argument("--length", type=int, default=64, help="tokens of a sequence")
    parser.add_argument("--loss", choices=get_args(Loss), default="per_token")
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    common = Step(sequences=given.sequences, length=given.length, loss=given.loss)
    steps = [Step.parse(text, common) if text else common for text in given.layouts]
    sys.path.insert(0, "")
    module, _, function = given.build.partition(":")
    build: Build = getattr(importlib.import_module(module), function)
    if given.record is not None:
        _record(build, steps[0], given.record)
        return 0
    if len(steps) != 2:
        parser.error(f"{len(steps)} layouts: give two, and '' for one process")
    with tempfile.TemporaryDirectory() as folder:
        alone, *others = (Path(folder) / name for name in ("alone", "a", "b"))
        _start(given, "", 1, alone)
        (reference,) = load_traces(alone)
        traces = []
        for text, step, path in zip(given.layouts, steps, others, strict=True):
            if text:
                _start(given, text, step.world, path)
            traces.append(load_traces(path) if text else [reference])
    difference = first_difference(reference, *traces)
    if difference is not None:
        print(difference)
        return 1
    count = len(reference.activations) + len(reference.parameters)
    print(f"the layouts have the same bits in {count} tensors of a step")
    return 0


def _start(given: argparse.Namespace, layout: str, ranks: int, folder: Path) -> None:
    """Record a layout on ranks of this machine.

    Raises:
        SystemExit: a rank failed; its error stands above.
    """
    folder.mkdir()
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    options = [f"--{name}={getattr(given, name)}" for name in ("sequences", "length", "loss")]
    command = [sys.executable, *launch, "-m", "lamina.models.bisect", given.build, layout, *options]
    if subprocess.run([*command, f"--record={folder}"], check=False).returncode:
        raise SystemExit(
            f"bisect: the layout {layout!r} did not complete its step on {ranks} ranks"
        )


def _record(build: Build, step: Step, folder: Path) -> None:
    """Record a layout as one of its ranks."""
    torch.set_num_threads(1)  # some kernels cut their work by the number of threads
    with init_distributed("gloo", device="cpu") as runtime:
        mesh = None if step.layout is None else step.layout.build("cpu")
        record_step(build, step, mesh=mesh, rank=runtime.rank).save(folder)


if __name__ == "__main__":
    sys.exit(main())
