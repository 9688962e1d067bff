"""Leaves out each wait of Lamina, and of torch's FSDP2, in turn, and says what shows it.

`VGPU_COMPUTE=adversarial VGPU_SHARE=0 python tests/virtual_gpu/left_out.py [SCENARIO...]` in the
environment of the virtual GPU: `tests/order_scenarios.py` has the scenarios, `FSDP2` is one more.
`--only TEXT` leaves out the waits whose line has it, so that further seeds try what one has missed.
`--plant NAME` plants a fault of `tests/historic_faults.py` in place of leaving waits out.
The wait does not happen, the rest runs as ever. A race, an error, or another number after a step
shows it. One process plays rank 0 of four. A kernel that fails for want of a wait ends the device:
the row then says so, the process ends, and `--after LINE` goes on behind that wait.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1] / "benchmarks")]

import historic_faults  # noqa: E402
import order_scenarios as scenarios  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from one_of_eight import start  # noqa: E402
from torch.optim.optimizer import register_optimizer_step_post_hook  # noqa: E402

import lamina_virtual_gpu as virtual_gpu  # noqa: E402
from lamina.collectives.call import collective  # noqa: E402
from lamina_testing.toys import Block  # noqa: E402
from lamina_testing.walk import path_in_lamina  # noqa: E402

RANKS = 4
FSDP2 = "/torch/distributed/fsdp/_fully_shard/"
BETWEEN = (__file__, "/torch/cuda/streams.py", "/torch/_utils.py", "/unittest/mock.py")
USUAL = (
    "strategy 3", "HSDP", "slots", "dropped handles", "a backward on another stream",
    "DDP, sharded optimizer", "offload", "tp 2", "offloaded activations", "staged checkpoint",
    "FSDP2",
)  # fmt: skip
Site = str


class DeviceFailedError(Exception):
    """A kernel has failed, and every later call to CUDA does."""


def site() -> Site:
    """Return the line that waits, "" if it is neither Lamina's nor FSDP2's."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.endswith(BETWEEN):
        frame = frame.f_back
    name = frame.f_code.co_filename
    file = path_in_lamina(name)
    if not file and FSDP2 in name:
        file = "torch: " + name.rpartition("/")[2]
    return f"{file}:{frame.f_lineno} {frame.f_code.co_qualname}" if file else ""


class Device:
    """What a scenario asks of a `Recording` on a GPU."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)
        self.on_gpu, self.facts_on_host = True, True

    def unseen(self) -> contextlib.AbstractContextManager[None]:
        """A copy of data is a copy like others here."""
        return contextlib.nullcontext()

    all_on_host = unseen

    def on_host(self, *tensors: Any, pinned: bool = False) -> None:
        """Tensors of the host are on the host."""


def fsdp2(device: Any) -> None:
    """A toy model under torch's own `fully_shard`."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Block(8) for _ in range(3))).to(device.device)
    for module in (*model, model):
        fully_shard(module)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(scenarios.STEPS):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randn(4, 8, generator=generator).to(device.device)
        model(batch).square().mean().backward()
        adamw.step()
        adamw.zero_grad()


@contextlib.contextmanager
def left_out(without: Site | None, seen: Counter[Site]) -> Iterator[None]:
    """Count the waits of the block, and let one not happen."""

    def happens() -> bool:
        line = site()
        if line:
            seen[line] += 1
        return not line or line != without

    def stays(method: Callable[..., Any], answer: Any = None) -> Callable[..., Any]:
        @functools.wraps(method)
        def run(*given: Any, **named: Any) -> Any:
            return method(*given, **named) if happens() else answer

        return run

    wait = collective.Handle.wait

    def waited(handle: Any) -> None:
        if handle._pending and handle._end is not None and not happens():
            handle._end.forget()
            return
        wait(handle)

    with contextlib.ExitStack() as stack:
        owners = ((torch.cuda.Stream, ("wait_stream", "wait_event", "synchronize")),
                  (torch.cuda.Event, ("wait", "synchronize")),
                  (torch.Tensor, ("record_stream",)))  # fmt: skip
        for owner, names in owners:
            for name in names:
                method = stays(getattr(owner, name))
                stack.enter_context(mock.patch.object(owner, name, method))
        stack.enter_context(
            mock.patch.object(dist.Work, "wait", stays(dist.Work.wait, answer=True))
        )
        stack.enter_context(mock.patch.object(collective.Handle, "wait", waited))
        yield


def run(name: str, without: Site | None = None) -> tuple[Counter[Site], list[Any], list[str]]:
    """Run a scenario; return its waits, the numbers after each step, and what it says."""
    numbers: list[torch.Tensor] = []
    seen: Counter[Site] = Counter()

    def keep(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            numbers.extend(p.detach().float().sum() for p in group["params"] if p.numel())

    scenario: Any = fsdp2 if name == "FSDP2" else scenarios.SCENARIOS[name]
    hook = register_optimizer_step_post_hook(keep)
    said: list[str] = []
    virtual_gpu.forget_races()
    try:
        with left_out(without, seen):
            scenario(Device())
    except Exception as error:
        said.append(f"{type(error).__name__}: {error}".splitlines()[0])
    finally:
        hook.remove()
    try:
        torch.cuda.synchronize()
        values = [float(x) for x in numbers]
    except torch.AcceleratorError as error:
        raise DeviceFailedError from error
    return seen, values, [*virtual_gpu.races(), *said]


def differ(before: list[float], after: list[float]) -> bool:
    """Whether a number is another one; NaN is a number."""
    pairs = zip(before, after, strict=False)
    return len(before) != len(after) or any(a != b and not (a != a and b != b) for a, b in pairs)


def symptoms(says: list[str], before: list[float], after: list[float]) -> str:
    """Name what shows that a run went wrong, "" if nothing does."""
    how = ["a race"] if any("a race" in text for text in says) else []
    how += ["an error"] if any("a race" not in text for text in says) else []
    how += ["a wrong number"] if differ(before, after) else []
    return ", ".join(how)


def with_fault(plant: str) -> None:
    """Print a line of JSON: what shows the fault, which is planted in its scenario."""
    name, planted = historic_faults.PLANTS[plant]
    _, before, said = run(name)
    other = torch.cuda.Stream()
    try:
        with planted(lambda: torch.cuda.stream(other)):
            _, after, says = run(name)
        shown = symptoms(says, before, after)
    except DeviceFailedError:
        shown = "an error"
    row = {"scenario": name, "plant": plant, "seed": os.environ.get("VGPU_SEED", "0")}
    print(json.dumps({**row, "says": said, "shown": {plant: shown}, "failed": ""}), flush=True)


def main(names: list[str]) -> int:
    """Print a line of JSON for each scenario: what shows each wait that is left out."""
    if names[:1] == ["--plant"]:
        start(world=RANKS)
        with_fault(names[1])
        sys.stderr.flush()
        os._exit(0)
    only = names.pop(names.index("--only") + 1) if "--only" in names else ""
    after = names.pop(names.index("--after") + 1) if "--after" in names else ""
    names = [name for name in names if name not in ("--only", "--after")]
    start(world=RANKS)
    for name in names or USUAL:
        seen, before, said = run(name)
        _, again, _ = run(name)
        if differ(before, again):
            raise RuntimeError(f"{name} gives other numbers each time, with all its waits")
        shown: dict[Site, str] = {}
        failed = ""
        for wait in sorted(line for line in seen if only in line and line > after):
            try:
                _, later, says = run(name, wait)
            except DeviceFailedError:
                shown[wait], failed = "an error", wait
                break
            shown[wait] = symptoms([text for text in says if text not in said], before, later)
        row = {"scenario": name, "seed": os.environ.get("VGPU_SEED", "0"), "says": said}
        row |= {"waits": sum(seen.values()), "shown": shown, "failed": failed}
        print(json.dumps(row), flush=True)
        if failed:
            break
    sys.stderr.flush()
    os._exit(0)  # the process group's threads would wait for the other ranks


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
