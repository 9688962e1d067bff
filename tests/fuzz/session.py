"""Many cases on one set of ranks: the program of a rank, and who starts it."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import importlib
import json
import os
import pickle
import shutil
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fuzz.alone import may_be_torchs, without_lamina
from fuzz.case import Case, program_of
from fuzz.judge import GOOD, Verdict, alike, joined, judge, load, of_error, refused_by_torch
from fuzz.places import Ranks, Records, make_mesh

from lamina_testing.client import ForkServer
from lamina_testing.jobs import Argument, Job

PATIENCE = 40.0
"""Seconds for one case. What takes longer hangs."""
AT_ONCE = 25
"""Cases on one set of ranks."""
_HERE = Path(__file__).resolve()


# -- on a rank ------------------------------------------------------------------------------------


class Meshes:
    """The meshes that wrappers are given, each made once."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._made: dict[Any, Any] = {}

    def __call__(self, kind: str, replicas: int) -> Any:
        if kind == "none":
            return None
        if (kind, replicas) not in self._made:
            self._made[kind, replicas] = make_mesh(kind, replicas, self._world)
        return self._made[kind, replicas]


def run_session(
    cases: list[tuple[str, str]], out: str, planted: tuple[str, str, str] | None, ranks: Any
) -> None:
    """Run cases one after another. A line before and a line after each says what happened."""
    if planted is not None:
        plant(*planted)
    store = dist.distributed_c10d._get_default_store()
    rank, world = ranks.rank, ranks.world_size
    meshes = Meshes(world)
    limit = datetime.timedelta(seconds=PATIENCE)
    with Path(out, str(rank)).open("a", buffering=1) as file:
        for number, (text, source) in enumerate(cases):
            case = Case.from_json(text)
            print(json.dumps([number, "begun", ""]), file=file)
            faulthandler.dump_traceback_later(PATIENCE, exit=True)
            directory = Path(out, f"case{number}")
            program, outcome, detail, records = _run(case, source, rank, world, meshes, directory)
            print(json.dumps([number, outcome, detail]), file=file)
            if outcome == "done":
                Path(out, f"{number}.{rank}").write_bytes(pickle.dumps(records))
            store.set(f"{number} {rank}", json.dumps([outcome, detail]))
            if outcome != "done":
                # Others may wait for this rank, and learn only by its end that it does not come.
                with contextlib.suppress(dist.DistStoreError):
                    store.wait(_keys(number, world), datetime.timedelta(seconds=PATIENCE / 3))
                if not store.check(_keys(number, world)):
                    os._exit(1)
            store.wait(_keys(number, world), limit)
            verdict = joined([json.loads(store.get(key)) for key in _keys(number, world)])
            if rank == 0:
                if verdict.outcome == "obscure" and program is not None:
                    verdict = refused_by_torch(case, program, verdict.detail) or verdict
                if verdict.outcome == "done":
                    files = [Path(out, f"{number}.{r}") for r in range(world)]
                    found = [unpacked(pickle.loads(file.read_bytes())) for file in files]
                    verdict = judge(case, program, found)
                print(json.dumps([number, "verdict", [verdict.outcome, verdict.detail]]), file=file)
                store.set(f"{number} verdict", verdict.outcome)
            store.wait([f"{number} verdict"], limit)
            outcome = store.get(f"{number} verdict").decode()
            if may_be_torchs(case, outcome):
                again = without_lamina(load(source), rank, world, Path(out, f"alone{number}"))
                store.set(f"{number} {rank} alone", pickle.dumps(alike(again, unpacked(records))))
                store.wait(keys := [f"{number} {r} alone" for r in range(world)], limit)
                if all(pickle.loads(store.get(key)) for key in keys):
                    outcome = "theirs"
                    if rank == 0:
                        said = f"torch's FSDP2 alone has these numbers too: {verdict.detail}"
                        print(json.dumps([number, "verdict", [outcome, said]]), file=file)
            faulthandler.cancel_dump_traceback_later()
            if outcome not in GOOD:
                return
            if outcome != "right":
                meshes = Meshes(world)  # on the old ones something may be under way
            torch._dynamo.reset()


def plant(name: str, line: str, becomes: str) -> None:
    """Change a line of a module that is imported already: functions get their new code."""
    module = importlib.import_module(name)
    text = Path(str(module.__file__)).read_text()
    assert text.count(line) == 1, f"{name} has not got the line once: {line}"
    changed: dict[str, Any] = {"__name__": name}
    exec(compile(text.replace(line, becomes), str(module.__file__), "exec"), changed)
    _take_code(vars(module), changed, name)


def _take_code(old: Any, new: Any, name: str) -> None:
    for key, value in new.items():
        if getattr(value, "__module__", None) != name or key not in old:
            continue
        if isinstance(value, types.FunctionType):
            old[key].__code__ = value.__code__
        elif isinstance(value, type):
            _take_code(vars(old[key]), vars(value), name)


def packed(records: Records) -> Any:
    """Records whose tensors are bytes: pickling tensors takes longer than most cases."""
    return [
        (what, {n: (v.dtype, v.shape, _bytes(v)) for n, v in values.items()})
        for what, values in records
    ]


def unpacked(records: Any) -> Records:
    return [(what, {n: _tensor(*value) for n, value in values.items()}) for what, values in records]


def _bytes(value: torch.Tensor) -> bytes:
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _tensor(dtype: torch.dtype, shape: torch.Size, data: bytes) -> torch.Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)


def _keys(number: int, world: int) -> list[str]:
    return [f"{number} {rank}" for rank in range(world)]


def _run(
    case: Case, source: str, rank: int, world: int, meshes: Meshes, directory: Path
) -> tuple[Any, str, str, Any]:
    program = None
    try:
        program = load(source)
        place = Ranks(rank, world, meshes, directory)
        return program, "done", "", packed(place.start(program.program))
    except Exception as error:
        return program, *of_error(case, error), None


# -- in pytest, or the task -----------------------------------------------------------------------


class Fuzzer:
    """Runs cases, in as few sessions as failures allow.

    With `planted` (module, line, what it becomes) the ranks have a fault.
    """

    def __init__(self, server: ForkServer, planted: tuple[str, str, str] | None = None) -> None:
        self._server, self._planted = server, planted

    def run(
        self, cases: Iterable[Case], say: Callable[[Case, Verdict], None] = lambda *_: None
    ) -> dict[str, Verdict]:
        """Verdicts by name. A case that failed among others has failed alone as well."""
        verdicts: dict[str, Verdict] = {}
        for ranks, group in _by_ranks(cases):
            left = list(group)
            while left:
                some = self._session(ranks, left[:AT_ONCE])
                for case, verdict in zip(left, some, strict=False):
                    if not verdict.good:
                        verdict = self.alone(case, verdict)
                    verdicts[case.name] = verdict
                    say(case, verdict)
                left = left[len(some) :]
        return verdicts

    def alone(self, case: Case, before: Verdict) -> Verdict:
        """The case once more, on new ranks."""
        (verdict,) = self._session(case.ranks, [case])
        if verdict.good and not before.good:
            return Verdict(
                "unsteady",
                f"{before.outcome} among others, {verdict.outcome} alone: {before.detail}",
            )
        return verdict

    def one(self, case: Case) -> Verdict:
        """The verdict on one case."""
        return self._session(case.ranks, [case])[0]

    def _session(self, ranks: int, cases: Sequence[Case]) -> list[Verdict]:
        out = Path(tempfile.mkdtemp(prefix="lamina-fuzz-", dir=_shared()))
        try:
            begun = time.monotonic()
            texts = [(case.to_json(), program_of(case)) for case in cases]
            outcomes = self._server.run(_job(ranks, texts, out, self._planted))
            lines = [_lines(out / str(rank)) for rank in range(ranks)]
        finally:
            shutil.rmtree(out, ignore_errors=True)
        verdicts = []
        for number in range(len(cases)):
            each = [of_rank.get(number, {}) for of_rank in lines]
            if not any(each):
                break
            if "verdict" in each[0]:
                verdicts.append(Verdict(*each[0]["verdict"]))
            else:
                verdicts.append(_broken(each, outcomes, time.monotonic() - begun))
        if not verdicts:
            said = "\n".join(o.text + o.stderr for o in outcomes)
            raise RuntimeError(f"no case was run:\n{said}")
        return verdicts


def _broken(each: list[dict[str, Any]], outcomes: Any, seconds: float) -> Verdict:
    """Of a case that ended its session: what ranks said, and how they ended."""
    said = [next(((k, v) for k, v in of_rank.items() if k != "begun"), None) for of_rank in each]
    bad = [one for one in said if one is not None and one[0] != "done"]
    ways = "; ".join(dict.fromkeys(o.summary for o in outcomes if o.summary))
    stacks = "\n".join(o.stderr[-1500:] for o in outcomes if "Timeout" in o.stderr)[:3000]
    if stacks or (seconds > PATIENCE and not bad):
        first = f"{bad[0][0]} on some ranks: {bad[0][1]}; " if bad else ""
        return Verdict("hung", f"{first}{ways} {stacks}")
    if bad:
        return joined(said)
    return Verdict("died", ways + "".join(o.stderr[-600:] for o in outcomes))


def _by_ranks(cases: Iterable[Case]) -> Iterator[tuple[int, list[Case]]]:
    """Cases of one number of ranks, at most a few hundred at a time."""
    waiting: dict[int, list[Case]] = {}
    for case in cases:
        of_ranks = waiting.setdefault(case.ranks, [])
        of_ranks.append(case)
        if len(of_ranks) == AT_ONCE:
            yield case.ranks, waiting.pop(case.ranks)
    yield from waiting.items()


def _shared() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _lines(file: Path) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        number, outcome, detail = json.loads(line)
        found.setdefault(number, {})[outcome] = detail
    return found


def _job(
    ranks: int, cases: list[tuple[str, str]], out: Path, planted: tuple[str, str, str] | None
) -> Job:
    return Job(
        module_name="fuzz.session",
        path=str(_HERE),
        qualname=("run_session",),
        arguments={
            "cases": Argument(pickle.dumps(cases)),
            "out": Argument(pickle.dumps(str(out))),
            "planted": Argument(pickle.dumps(planted)),
            "ranks": Argument(b""),
        },
        world_size=ranks,
        backend="gloo",
        device="cpu",
        timeout=60 + PATIENCE * len(cases),
        init=True,
        environment=dict(os.environ),
        directory=os.getcwd(),
        sys_path=[str(_HERE.parents[1]), *sys.path],
        warning_filters=["ignore"],
        reuse=False,
        traceback_style="short",
        show_locals=False,
    )
