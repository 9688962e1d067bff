"""The program of one rank's process: take a job, run the body in a process group, report."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import faulthandler
import gc
import inspect
import os
import pickle
import random
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from _pytest.config import parse_warning_filter
from torch.testing._internal.distributed.fake_pg import FakeStore

from lamina_testing.jobs import Argument, Assignment, Job, RankOutcome, RankWarning, receive, send
from lamina_testing.modules import ModuleLoader
from lamina_testing.parametrization import parametrization
from lamina_testing.ranks import Ranks

STACK_SIGNAL = signal.SIGUSR1
_PR_SET_PDEATHSIG = 1


def serve(connection: socket.socket, rank: int, loader: ModuleLoader) -> NoReturn:
    """Run assignments from ``connection`` until it closes or one of them ends the process."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setpgid(0, 0)
    # Prints of a rank that is killed must not be lost in a buffer.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    while True:
        assignment: Assignment | None = receive(connection)
        if assignment is None:
            os._exit(0)
        outcome = _run(assignment, rank, loader)
        sys.stdout.flush()
        sys.stderr.flush()
        send(connection, outcome)
        if not assignment.job.reuse or outcome.status != "passed":
            # No interpreter shutdown: a failed rank's threads may hang, and peers wait for the end.
            os._exit(0)


def _run(assignment: Assignment, rank: int, loader: ModuleLoader) -> RankOutcome:
    job, directory = assignment.job, Path(assignment.place.directory)
    for number, name in ((1, "out"), (2, "err")):
        _point(number, directory / f"{rank}.{name}")
    with (directory / f"{rank}.stack").open("w") as stack_file:
        faulthandler.enable()
        faulthandler.register(STACK_SIGNAL, file=stack_file, all_threads=True)
        recorded: list[RankWarning] = []
        try:
            _enter_environment(assignment, rank)
            with _recorded_warnings(job, recorded):
                _run_body(assignment, rank, loader)
            outcome = RankOutcome(rank, "passed", time.monotonic())
        except BaseException as error:  # SystemExit and KeyboardInterrupt are failures of the body
            outcome = _failure(job, rank, error)
        faulthandler.unregister(STACK_SIGNAL)
    outcome.warnings = recorded
    return outcome


def _point(number: int, path: Path) -> None:
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(target, number)
    os.close(target)


def _enter_environment(assignment: Assignment, rank: int) -> None:
    job = assignment.job
    os.environ.clear()
    os.environ.update(job.environment)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    variables = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    for name in (*variables, "MASTER_PORT"):
        os.environ.pop(name, None)
    if not job.init:
        # The body starts the process group itself: give it what torchrun would.
        size = str(job.world_size)
        values = (str(rank), size, str(rank), size, "127.0.0.1")
        os.environ.update(zip(variables, values, strict=True))
        os.environ["MASTER_PORT"] = str(assignment.place.port)
    os.chdir(job.directory)
    sys.path[:] = job.sys_path


def _run_body(assignment: Assignment, rank: int, loader: ModuleLoader) -> None:
    job = assignment.job
    module = loader.load(job.module_name, job.path)
    body: Any = module
    for name in job.qualname:
        owner, body = body, getattr(body, name)
        if inspect.isclass(owner) and not isinstance(
            inspect.getattr_static(owner, name), (staticmethod, classmethod)
        ):
            body = getattr(owner(), name)
    torch.manual_seed(0)
    random.seed(0)
    with _process_group(assignment, rank) as device, pytest.MonkeyPatch.context() as monkeypatch:
        arguments: dict[str, Any] = {}
        for name, argument in job.arguments.items():
            if name == "ranks":
                arguments[name] = Ranks(rank, job.world_size, job.backend, device)
            elif name == "monkeypatch":
                arguments[name] = monkeypatch
            else:
                arguments[name] = _value(name, argument, body)
        body(**arguments)


def _value(name: str, argument: Argument, body: Callable[..., Any]) -> Any:
    if argument.pickled is not None:
        return pickle.loads(argument.pickled)
    owners = [body, getattr(body, "__self__", None), sys.modules[body.__module__]]
    for owner in owners:
        marks = getattr(owner, "pytestmark", [])
        for mark in marks if isinstance(marks, list) else [marks]:
            mark = getattr(mark, "mark", mark)
            if mark.name != "parametrize":
                continue
            names, values = parametrization(mark)
            if name in names:
                return values[argument.position or 0][names.index(name)]
    raise LookupError(f"no parametrize mark of {body.__qualname__} names {name!r}")


@contextlib.contextmanager
def _process_group(assignment: Assignment, rank: int) -> Iterator[torch.device]:
    job = assignment.job
    device = torch.device("cpu")
    if job.device == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if job.init and not dist.is_initialized():
        # A little more than the test may take: the plugin's own timeout shows stacks, this doesn't.
        limit = datetime.timedelta(seconds=job.timeout + 30)
        if job.backend == "fake":
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=job.world_size)
        else:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if job.backend == "nccl" else job.backend,
                init_method=f"file://{assignment.place.directory}/store",
                rank=rank,
                world_size=job.world_size,
                timeout=limit,
                device_id=device if job.backend == "nccl" else None,
            )
    yield device
    if job.device == "cuda":
        torch.cuda.synchronize()
    if job.reuse:
        gc.collect()
        torch.cuda.empty_cache()
    elif dist.is_initialized():
        dist.destroy_process_group()


@contextlib.contextmanager
def _recorded_warnings(job: Job, recorded: list[RankWarning]) -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for text in job.warning_filters:
            warnings.filterwarnings(*parse_warning_filter(text, escape=False))
        try:
            yield
        finally:
            for warning in caught:
                recorded.append(
                    RankWarning(
                        _pickled_category(warning.category),
                        str(warning.message),
                        warning.filename,
                        warning.lineno,
                    )
                )


def _pickled_category(category: type[Warning]) -> bytes:
    try:
        return pickle.dumps(category)
    except (pickle.PicklingError, AttributeError):
        return pickle.dumps(UserWarning)


def _failure(job: Job, rank: int, error: BaseException) -> RankOutcome:
    when = time.monotonic()
    if isinstance(error, pytest.skip.Exception):
        return RankOutcome(rank, "skipped", when, summary=str(error.msg))
    if isinstance(error, pytest.xfail.Exception):
        return RankOutcome(rank, "xfailed", when, summary=str(error.msg))
    lines = traceback.format_exception_only(type(error), error)
    place = _place(job, error)
    summary = " ".join(line.strip() for line in lines if line.strip())
    return RankOutcome(rank, "failed", when, f"{summary}{place}", _formatted(job, error))


def _place(job: Job, error: BaseException) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == job.path]
    return f" ({Path(job.path).name}:{frames[-1].lineno})" if frames else ""


def _formatted(job: Job, error: BaseException) -> str:
    try:
        info = pytest.ExceptionInfo.from_exception(error)
        info.traceback = info.traceback.cut(path=job.path)
        style: Any = "long" if job.traceback_style == "auto" else job.traceback_style
        if style == "no":
            style = "line"
        return str(info.getrepr(style=style, showlocals=job.show_locals, chain=True))
    except Exception:
        # A repr that raises must not hide the error it was to show.
        return "".join(traceback.format_exception(type(error), error, error.__traceback__))
