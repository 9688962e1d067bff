"""The program of one rank's process: take a job, run the body in a process group, report."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import faulthandler
import gc
import inspect
import io
import os
import pickle
import random
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from _pytest._code import Traceback
from _pytest._io import TerminalWriter
from _pytest.config import parse_warning_filter
from torch.testing._internal.distributed.fake_pg import FakeStore

from lamina_testing.busy_clock import LONGEST
from lamina_testing.jobs import (
    STACK_SIGNAL,
    Argument,
    Assignment,
    Job,
    RankOutcome,
    RankWarning,
    Release,
    receive,
    send,
)
from lamina_testing.modules import ModuleLoader
from lamina_testing.parametrization import parametrization
from lamina_testing.ranks import Ranks, tensors_on

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, however that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class RankProcess:
    """The rank's side of its connection to the server."""

    def __init__(self, connection: socket.socket, rank: int, loader: ModuleLoader) -> None:
        self._connection = connection
        self._rank = rank
        self._loader = loader
        self._stack_file: IO[str] | None = None

    def serve(self, server: int) -> NoReturn:
        """Run assignments until told to leave; `server` is the parent's process id."""
        end_with_parent()
        if os.getppid() != server:  # it ended before it could be noticed
            os._exit(1)
        os.setpgid(0, 0)
        # Prints of a rank that is killed must not be lost in a buffer.
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        while message := receive(self._connection):
            if isinstance(message, Release):
                code = _leave()
                if code or not message.stays:
                    os._exit(code)
                send(self._connection, code)
                continue
            outcome = self._run(message)
            _flush()
            send(self._connection, outcome)
            if outcome.status == "failed":
                # Its threads may hang, and its peers wait for connections to close.
                os._exit(0)
        os._exit(_leave())

    def _run(self, assignment: Assignment) -> RankOutcome:
        job, directory = assignment.job, Path(assignment.place.directory)
        for number, name in ((1, "out"), (2, "err")):
            _point(number, directory / f"{self._rank}.{name}")
        previous = self._stack_file
        self._stack_file = (directory / f"{self._rank}.stack").open("w")
        faulthandler.enable()
        faulthandler.register(STACK_SIGNAL, file=self._stack_file, all_threads=True)
        if previous is not None:
            previous.close()
        recorded: list[RankWarning] = []
        before = process_state()
        try:
            _enter_environment(assignment, self._rank)
            with _recorded_warnings(job, recorded):
                value = _run_body(assignment, self._rank, self._loader)
            outcome = RankOutcome(self._rank, "passed", time.monotonic(), value=value)
            outcome.reusable = process_state() == before
        except BaseException as error:  # SystemExit and KeyboardInterrupt are failures of the body
            outcome = _failure(job, self._rank, error)
        outcome.warnings = recorded
        return outcome


def process_state() -> tuple[object, ...]:
    """Return what a body could leave changed for another one in the same process."""
    return (
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        _threads_with_work(),
        [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)],
    )


def _threads_with_work() -> int:
    """Count threads, less those that lanes keep and that wait for their next work.

    Which these are is Note [Threads are used again] in lanes.py of lamina.collectives. Their only
    frame is `_run_all`.
    """
    # No name may refer to the frames. Those of this thread would be among them: a cycle, which
    # keeps what other threads' frames refer to, such as process groups that were destroyed.
    running = {thread: frame.f_code.co_name for thread, frame in sys._current_frames().items()}
    at_rest = (
        thread.name == "lamina-lane" and running.get(thread.ident or 0) == "_run_all"
        for thread in threading.enumerate()
    )
    return threading.active_count() - sum(at_rest)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def _leave() -> int:
    """Leave the process group; returns the exit code. The interpreter does not shut down."""
    try:
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        _flush()
        return 1
    return 0


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
    if job.device == "cuda":  # for `lamina_virtual_gpu.values`
        os.environ["VGPU_STEERED"] = f"{assignment.place.directory}/{rank}.steered"
    if not job.init:
        # The body starts the process group itself: give it what torchrun would.
        size = str(job.world_size)
        values = (str(rank), size, str(rank), size, "127.0.0.1")
        os.environ.update(zip(variables, values, strict=True))
        os.environ["MASTER_PORT"] = str(assignment.place.port)
    os.chdir(job.directory)
    sys.path[:] = job.sys_path


def _run_body(assignment: Assignment, rank: int, loader: ModuleLoader) -> bytes:
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
    device = _join(assignment, rank)
    with pytest.MonkeyPatch.context() as monkeypatch:
        arguments: dict[str, Any] = {}
        for name, argument in job.arguments.items():
            if name == "ranks":
                arguments[name] = Ranks(rank, job.world_size, job.backend, device)
            elif name == "monkeypatch":
                arguments[name] = monkeypatch
            else:
                arguments[name] = _value(name, argument, body)
        with tensors_on(device) if job.tensors_on_device else contextlib.nullcontext():
            returned = body(**arguments)
    if device.type == "cuda":
        torch.cuda.synchronize()  # an error of a kernel belongs to this body
    if job.reuse:
        del arguments
        gc.collect()
    if job.keeps_group:
        torch.cuda.empty_cache()
    return b"" if returned is None else pickle.dumps(returned)


def _value(name: str, argument: Argument, body: Callable[..., Any]) -> Any:
    if argument.pickled is not None:
        return pickle.loads(argument.pickled)
    owners = [body, getattr(body, "__self__", None), sys.modules[body.__module__]]
    for owner in owners:
        marks: Any = getattr(owner, "pytestmark", [])
        for decorator in marks if isinstance(marks, list) else [marks]:
            mark = decorator.mark if isinstance(decorator, pytest.MarkDecorator) else decorator
            if mark.name != "parametrize":
                continue
            names, values = parametrization(mark)
            if name in names:
                return values[argument.position or 0][names.index(name)]
    raise LookupError(f"no parametrize mark of {body.__qualname__} names {name!r}")


def _join(assignment: Assignment, rank: int) -> torch.device:
    job = assignment.job
    device = torch.device("cpu")
    if job.device == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if job.init and not dist.is_initialized():
        # More than the test may take: the plugin's own timeout shows stacks, this one doesn't.
        limit = datetime.timedelta(seconds=LONGEST * job.timeout + 30)
        if job.backend == "fake":
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=job.world_size)
        else:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if job.backend == "nccl" else job.backend,
                init_method=f"file://{assignment.place.store}",
                rank=rank,
                world_size=job.world_size,
                timeout=limit,
                device_id=device if job.backend == "nccl" else None,
            )
            # Note [All ranks join before one begins]
            # A rank has joined when it is connected to the others. They may still look for this
            # one then. If its body failed at once, its connections would close, and on a busy
            # machine a peer would fail before its own body, with an error of gloo's start-up.
            dist.all_reduce(torch.zeros(1))  # by gloo, also beside NCCL
    return device


@contextlib.contextmanager
def _recorded_warnings(job: Job, recorded: list[RankWarning]) -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for text in job.warning_filters:
            warnings.filterwarnings(*parse_warning_filter(text, escape=False))
        try:
            yield
        finally:
            recorded.extend(_portable(warning) for warning in caught)


def _portable(warning: warnings.WarningMessage) -> RankWarning:
    try:
        category = pickle.dumps(warning.category)
    except (pickle.PicklingError, AttributeError):  # a class made inside a function
        category = pickle.dumps(UserWarning)
    return RankWarning(category, str(warning.message), warning.filename, warning.lineno)


def _failure(job: Job, rank: int, error: BaseException) -> RankOutcome:
    when = time.monotonic()
    if isinstance(error, pytest.skip.Exception):
        # Without arithmetic (`lamina_virtual_gpu.values`) one rank's number may part the ranks.
        everywhere = getattr(error, "for_all_ranks", False)
        return RankOutcome(rank, "skipped", when, str(error.msg), for_all_ranks=everywhere)
    if isinstance(error, pytest.xfail.Exception):
        return RankOutcome(rank, "xfailed", when, summary=str(error.msg))
    lines = "".join(traceback.format_exception_only(type(error), error)).splitlines()
    # A syntax error's last line says what is wrong; anything else begins with it.
    line = lines[-1] if isinstance(error, SyntaxError) else lines[0]
    return RankOutcome(rank, "failed", when, line + _place(job, error), _formatted(job, error))


def _place(job: Job, error: BaseException) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == job.path]
    return f" ({Path(job.path).name}:{frames[-1].lineno})" if frames else ""


def _as_pytest_does(job: Job, error: BaseException) -> str:
    info = pytest.ExceptionInfo.from_exception(error)
    info.traceback = info.traceback.cut(path=job.path)
    style: Any = job.traceback_style
    if style == "auto":
        style = "long"
        between = (entry.with_repr_style("short") for entry in info.traceback[1:-1])
        if len(info.traceback) > 2:
            info.traceback = Traceback([info.traceback[0], *between, info.traceback[-1]])
    if style == "no":
        style = "line"
    text = io.StringIO()
    info.getrepr(style=style, showlocals=job.show_locals).toterminal(TerminalWriter(text))
    return text.getvalue().rstrip()


def _formatted(job: Job, error: BaseException) -> str:
    try:
        return _as_pytest_does(job, error)
    except Exception:
        # A repr that raises must not hide the error it was to show.
        return "".join(traceback.format_exception(type(error), error, error.__traceback__))
