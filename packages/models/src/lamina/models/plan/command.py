"""The command: `python -m lamina.models.plan --model llama3-8b --ranks 8 --gpu h100-80gb`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import get_args

from lamina.mesh import LayoutError, ParallelLayout
from lamina.models.activation_memory.recompute import Kind
from lamina.models.base.config import TransformerConfig
from lamina.models.decoder.presets import preset
from lamina.models.huggingface.configs import config_from_huggingface
from lamina.models.pipelining.schedule import SCHEDULES
from lamina.models.plan.clock import memory_over_time, write_trace
from lamina.models.plan.constants import GIB, GPUS, machine
from lamina.models.plan.fsdp2 import fsdp2
from lamina.models.plan.job import Job
from lamina.models.plan.job_plan import Plan, plan
from lamina.models.plan.measured import calibrated, on_device
from lamina.models.plan.preflight import complaints
from lamina.models.plan.record.step_record import CATEGORIES
from lamina.models.plan.search import search


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 0, 1 where a check fails, or 2 for wrong arguments."""
    parser = _parser()
    words = parser.parse_args(arguments)
    try:
        costs = calibrated(words.calibrate) if words.calibrate else None
        at = machine(words.gpu, costs)
        if words.model is None:
            if costs is None:
                parser.error("--model: name a preset, or a directory with a config.json")
            print(costs)
            return 0
        job = job_of(words)
        if words.search:
            if job.shard is not None:
                parser.error("--search compares layouts of --engine lamina alone")
            print(search(job, at, count=10))
            return 0
        planned = replace(plan(job, at, whole=words.whole), gpu=words.gpu)
    except (ValueError, LayoutError, FileNotFoundError) as error:
        print(f"this cannot run: {error}", file=sys.stderr)
        return 1 if words.check else 2
    problems = complaints(planned) if words.check else []
    _write(planned, words, problems)
    return 1 if problems else 0


def _write(planned: Plan, words: argparse.Namespace, problems: list[str]) -> None:
    played, timing = planned.played
    if words.trace:
        write_trace(timing, played.record, words.trace)
    if words.plot:
        write_plot(planned, words.plot)
    there = entry_points(group="lamina.plan") if words.device else ()
    measured = on_device(planned.job, next(iter(there)).load()) if there else None
    if words.device and measured is None:
        print("no device to measure on: it needs the environment of a virtual GPU", file=sys.stderr)
    if words.json:
        print(json.dumps({**planned.as_json(), "problems": problems, "device": measured}, indent=1))
        return
    print(planned)
    if measured is not None:
        print(
            f"on the device: {measured['allocated'] / GIB:.2f} GiB allocated "
            f"({planned.allocated / measured['allocated'] - 1:+.1%} planned), "
            f"{measured['reserved'] / GIB:.2f} GiB reserved"
        )
    for problem in problems:
        print(f"problem: {problem}")
    if words.check and not problems:
        print("checked: it fits, its types agree, and no rank waits for ever")


def job_of(words: argparse.Namespace) -> Job:
    """The job that the command's words describe."""
    settings = {name: getattr(words, name) for name in _JOB_WORDS}
    shard = None if words.engine == "lamina" else fsdp2
    return Job(config=config_of(words.model), layout=layout_of(words.mesh), shard=shard, **settings)


_JOB_WORDS = (
    "ranks batch sequence microbatches strategy schedule recompute precision compiled"
).split()


def config_of(name: str) -> TransformerConfig:
    """The config of a preset, or of a directory with a Hugging Face `config.json`."""
    file = Path(name) / "config.json"
    if not file.is_file():
        return preset(name)
    return config_from_huggingface(json.loads(file.read_text()))


def layout_of(words: str) -> ParallelLayout:
    """The layout of words such as `tp=8,dp_shard=-1`. ValueError says how to write one."""
    try:
        pairs = [pair.split("=") for pair in words.split(",")]
        return ParallelLayout(**{name.strip(): int(size) for name, size in pairs})
    except (ValueError, TypeError) as error:
        raise ValueError(f"--mesh {words}: {error}; write tp=2,pp=2,dp_shard=-1") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lamina.models.plan", description=__doc__)
    add = parser.add_argument
    add("--model", help="a preset, or a directory with a Hugging Face config.json")
    add("--ranks", type=int, default=8, help="GPUs of the whole run")
    add("--gpu", default="h100-80gb", choices=GPUS, help="the profile of a GPU")
    add("--batch", type=int, default=1, help="sequences of a data-parallel rank in a step")
    add("--sequence", type=int, default=4096, help="tokens per sequence")
    add("--microbatches", type=int, default=1, help="passes in which a rank takes its batch")
    add("--mesh", default="dp_shard=-1", help="ranks per axis, such as tp=8,dp_shard=-1")
    add("--strategy", default=3, type=_strategy, help="of fully_shard: 0 to 3 or a name")
    add("--engine", default="lamina", choices=("lamina", "fsdp2"), help="fsdp2 is torch's own")
    add("--schedule", default="1f1b", choices=SCHEDULES, help="of pipeline stages")
    add("--recompute", default="none", choices=get_args(Kind), help="of activations")
    add("--precision", default="bf16", choices=("bf16", "fp32", "fp8"), help="of products")
    add("--compiled", action="store_true", help="blocks are compiled by torch.compile")
    add("--whole", action="store_true", help="play all layers, for what the allocator reserves")
    add("--search", action="store_true", help="the ten best layouts, and why others lose")
    add("--check", action="store_true", help="exit with status 1 if something would go wrong")
    add("--device", action="store_true", help="run the step on a virtual GPU, too")
    add("--json", action="store_true", help="print JSON")
    add("--trace", type=Path, help="write the step's Perfetto trace to this file")
    add("--plot", type=Path, help="write memory over the step as SVG to this file")
    add("--calibrate", type=Path, help="file of constants: measured on this GPU if it is not there")
    return parser


def _strategy(word: str) -> int | str:
    return int(word) if word.isdigit() else word


_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b0a695")


def write_plot(planned: Plan, path: str | Path) -> None:
    """Write memory by category over the played step as an SVG drawing."""
    played, timing = planned.played
    points = memory_over_time(timing, played.record)
    width, height = 900.0, 360.0
    most = max(sum(now.values()) for _, now in points)
    length = max(timing.total, 1e-9)
    base = [0.0] * len(points)
    shapes = []
    for place, (category, colour) in enumerate(zip(CATEGORIES, _COLOURS, strict=True)):
        top = [low + now.get(category, 0) for low, (_, now) in zip(base, points, strict=True)]
        outline = [
            f"{width * at / length:.1f},{height * (1 - value / most):.1f}"
            for values, order in ((top, points), (base[::-1], points[::-1]))
            for value, (at, _) in zip(values, order, strict=True)
        ]
        shapes.append(f'<polygon fill="{colour}" points="{" ".join(outline)}"/>')
        shapes.append(
            f'<text x="10" y="{20 + 16 * place}" fill="{colour}" stroke="#fff" stroke-width="3" '
            f'paint-order="stroke">{category}</text>'
        )
        base = top
    axis = f"{most / GIB:.1f} GiB at most, {length:.3f} s"
    Path(path).write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height + 24:.0f}" '
        f'font-family="sans-serif" font-size="13">{"".join(shapes)}'
        f'<text x="{width - 8:.0f}" y="{height + 18:.0f}" text-anchor="end">{axis}</text></svg>\n'
    )
