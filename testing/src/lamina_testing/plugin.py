"""The pytest plugin: `@pytest.mark.ranks(2)` makes a test body the program of every rank.

Imports no torch: the fork server does, while pytest collects. See testing/README.md.
"""

from __future__ import annotations

import gc
import inspect
import os
import pickle
import random
import sys
import warnings
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import pytest

from lamina_testing.client import PRELOADED, ForkServer, RankServerError
from lamina_testing.jobs import Argument, Job, RankOutcome
from lamina_testing.parametrization import parametrization
from lamina_testing.report import RanksFailed, RanksReport

_BACKENDS = ("gloo", "nccl", "fake")
_TIMEOUT = 60.0
_STATE = pytest.StashKey["State"]()


@dataclass
class State:
    """The plugin's state in one pytest process: the server, once something needs it."""

    preload: list[str]
    server: ForkServer | None = None

    def start(self) -> ForkServer:
        """Return the server, starting it if there is none."""
        if self.server is None:
            self.server = ForkServer(self.preload)
        return self.server

    def stop(self) -> None:
        """End the server; a later test would start another."""
        server, self.server = self.server, None
        if server is not None:
            server.close()


@dataclass(frozen=True)
class Marker:
    """The validated arguments of `@pytest.mark.ranks`."""

    world_sizes: tuple[int, ...]
    backend: str | None
    device: str | None
    timeout: float
    init: bool
    any_size: bool
    reuse: bool | None

    @classmethod
    def of(cls, item: Any) -> Marker | None:
        """Read the closest mark of an item or function definition; None without one."""
        mark = item.get_closest_marker("ranks")
        return None if mark is None else cls.parse(mark, item.nodeid)

    @classmethod
    def parse(cls, mark: pytest.Mark, where: str) -> Marker:
        """Check a mark's arguments. Raises pytest.UsageError that names the test."""
        options = dict(mark.kwargs)
        marker = cls(
            world_sizes=mark.args,
            backend=options.pop("backend", None),
            device=options.pop("device", None),
            timeout=options.pop("timeout", _TIMEOUT),
            init=options.pop("init", True),
            any_size=options.pop("any_size", False),
            reuse=options.pop("reuse", None),
        )
        problem = ""
        if options:
            problem = f"unknown argument {sorted(options)}"
        elif not mark.args or not all(isinstance(n, int) and n >= 1 for n in mark.args):
            problem = f"world sizes must be positive integers, not {mark.args}"
        elif marker.backend not in (None, *_BACKENDS):
            problem = f"backend must be one of {_BACKENDS}, not {marker.backend!r}"
        elif marker.device not in (None, "cpu", "cuda"):
            problem = f"device must be 'cpu' or 'cuda', not {marker.device!r}"
        elif marker.reuse and not marker.init:
            problem = "reuse=True keeps the process group, so it cannot go with init=False"
        if problem:
            raise pytest.UsageError(f"{where}: @pytest.mark.ranks: {problem}")
        return marker

    def backend_in(self, config: pytest.Config) -> str:
        """Return the backend of a run: the marker's, or the command line's, or gloo."""
        return self.backend or config.getoption("--backend") or "gloo"

    def device_in(self, config: pytest.Config) -> str:
        """Return the kind of device of a run."""
        return self.device or ("cuda" if self.backend_in(config) == "nccl" else "cpu")

    def reuse_in(self, config: pytest.Config) -> bool:
        """Return whether ranks outlive the test: if it does not start them in its own way."""
        return self.init if self.reuse is None else self.reuse


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the test matrix."""
    group = parser.getgroup("lamina", "tests on several ranks")
    group.addoption(
        "--world-size",
        type=int,
        metavar="N",
        help="run only the tests marked `ranks` for a world of N ranks",
    )
    group.addoption(
        "--backend",
        choices=_BACKENDS,
        help="backend of `ranks` tests that name none (default: gloo); those that name another "
        "one are left out",
    )
    parser.addini(
        "ranks_preload",
        "modules that are imported once, before ranks are forked; `lamina.*`: every layer",
        type="args",
        default=PRELOADED,
    )
    group.addoption("--slow", action="store_true", help="run tests marked `slow` too")
    group.addoption(
        "--shuffle",
        nargs="?",
        type=int,
        const=0,
        metavar="SEED",
        help="run modules, and the tests in each, in a random order; without SEED in another one "
        "each time, which the header tells",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marks."""
    config.addinivalue_line(
        "markers",
        "ranks(*world_sizes, backend=None, device=None, timeout=60, init=True, any_size=False, "
        "reuse=None): "
        "the body is the program of every rank of a world; see testing/README.md",
    )
    config.addinivalue_line("markers", "slow: takes long; left out without --slow")
    config.stash[_STATE] = State(list(config.getini("ranks_preload")))
    if config.getoption("--shuffle") == 0:
        # A worker of pytest-xdist parses the same words, and must not draw an order of its own.
        drawn = random.SystemRandom().randrange(1, 1 << 31)
        config.option.shuffle = getattr(config, "workerinput", {}).get("shuffle", drawn)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker of pytest-xdist the order that was drawn."""
    node.workerinput["shuffle"] = node.config.getoption("--shuffle")


def pytest_report_header(config: pytest.Config) -> str | None:
    """Say how to repeat a random order."""
    seed = config.getoption("--shuffle")
    return f"random order: --shuffle {seed}" if seed else None


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the server."""
    config.stash[_STATE].stop()


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> int:
    """Give a body its rank's `lamina_testing.Ranks`, in bodies marked `@pytest.mark.ranks`."""
    if request.node.get_closest_marker("ranks") is None:
        raise pytest.UsageError(
            f"{request.node.nodeid} uses the fixture `ranks` without @pytest.mark.ranks(N)"
        )
    world_size: int = request.param
    return world_size


@pytest.fixture(scope="module")
def rank_server(pytestconfig: pytest.Config) -> ForkServer:
    """The process that forks ranks: a fixture whose run several tests look at has it `call`."""
    return pytestconfig.stash[_STATE].start()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one case per world size."""
    marker = Marker.of(metafunc.definition)
    if marker is None:
        return
    if "ranks" not in metafunc.fixturenames:
        metafunc.fixturenames.append("ranks")
    sizes = marker.world_sizes
    wanted = metafunc.config.getoption("--world-size")
    if wanted is not None and marker.any_size:
        sizes = (wanted,)
    metafunc.parametrize("ranks", sizes, indirect=True, ids=[f"ranks{size}" for size in sizes])


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what the options exclude; shuffle; start the server if anything needs it."""
    kept = [item for item in items if _is_selected(config, item)]
    if len(kept) < len(items):
        left_out = [item for item in items if item not in set(kept)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept
    if seed := config.getoption("--shuffle"):
        items[:] = _shuffled(items, seed)
    if not config.option.collectonly and any(i.get_closest_marker("ranks") for i in items):
        config.stash[_STATE].start()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep what imports and the collection made out of the collector's way.

    That is most of a million objects. Tests collect garbage on purpose, and each time would
    look at all of them.
    """
    gc.collect()
    gc.freeze()


def _shuffled(items: list[pytest.Item], seed: int) -> list[pytest.Item]:
    """Shuffle modules and the tests in each; a module stays together, for its own fixtures."""
    modules: dict[object, list[pytest.Item]] = {}
    for item in items:
        modules.setdefault(item.path, []).append(item)
    order = random.Random(seed)
    groups = list(modules.values())
    order.shuffle(groups)
    for group in groups:
        order.shuffle(group)
    return [item for group in groups for item in group]


def _is_selected(config: pytest.Config, item: pytest.Item) -> bool:
    if item.get_closest_marker("slow") and not config.getoption("--slow"):
        return False
    marker = Marker.of(item)
    world_size = config.getoption("--world-size")
    if marker is None:
        return world_size is None
    if world_size is not None and _world_size(item) != world_size:
        return False
    return config.getoption("--backend") in (None, marker.backend_in(config))


def _world_size(item: Any) -> int:
    return int(item.callspec.params["ranks"])


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a marked body on its ranks instead of calling it here."""
    marker = Marker.of(pyfuncitem)
    if marker is None:
        return None
    state = pyfuncitem.config.stash[_STATE]
    job = _job(pyfuncitem, marker)
    try:
        _skip_without_gpus(state.start(), job)
        outcomes = state.start().run(job)
    except (KeyboardInterrupt, RankServerError):
        state.stop()
        raise
    _conclude(pyfuncitem, job, outcomes)
    return True


def _job(item: pytest.Function, marker: Marker) -> Job:
    config = item.config
    classes = [node.name for node in item.listchain() if isinstance(node, pytest.Class)]
    names = [n for n in inspect.signature(item.obj).parameters if n in item.funcargs]
    filters = [*config.getini("filterwarnings"), *(config.option.pythonwarnings or [])]
    for mark in item.iter_markers("filterwarnings"):
        filters += mark.args
    return Job(
        module_name=item.module.__name__,
        path=str(item.path),
        qualname=(*classes, item.originalname),
        arguments={name: _argument(item, name) for name in names},
        world_size=_world_size(item),
        backend=marker.backend_in(config),
        device=marker.device_in(config),
        timeout=marker.timeout,
        init=marker.init,
        environment=dict(os.environ),
        directory=os.getcwd(),
        sys_path=list(sys.path),
        warning_filters=filters,
        reuse=marker.reuse_in(config),
        traceback_style=config.option.tbstyle,
        show_locals=config.option.showlocals,
        # A body that names no device runs on any: that of the command line.
        tensors_on_device=marker.device_in(config) == "cuda"
        and not (marker.backend or marker.device),
    )


def _argument(item: pytest.Function, name: str) -> Argument:
    if name in ("ranks", "monkeypatch"):
        return Argument(b"")  # made on the rank
    value = item.funcargs[name]
    try:
        return Argument(pickle.dumps(value))
    except Exception as error:
        position = _position(item, name, value)
        if position is None:
            raise pytest.UsageError(
                f"{item.nodeid}: the value of {name!r} cannot reach the ranks: {error}. A body "
                "marked `ranks` may use parametrised values, `ranks`, `tmp_path`, `monkeypatch` "
                "and fixtures whose values can be pickled; make others inside the body"
            ) from error
        return Argument(None, position)


def _position(item: pytest.Function, name: str, value: object) -> int | None:
    for mark in item.iter_markers("parametrize"):
        names, cases = parametrization(mark)
        if name in names:
            for position, case in enumerate(cases):
                if case[names.index(name)] is value:
                    return position
    return None


def _skip_without_gpus(server: ForkServer, job: Job) -> None:
    if job.device != "cuda":
        return
    gpus, needed = server.device_count(), job.world_size if job.backend == "nccl" else 1
    if gpus < needed:
        reason = f"needs {needed} GPU{'s' if needed > 1 else ''}, this machine has {gpus}"
        raise pytest.skip.Exception(reason, _use_item_location=True)


def _conclude(item: pytest.Function, job: Job, outcomes: list[RankOutcome]) -> None:
    for outcome in outcomes:
        for kind in ("stdout", "stderr"):
            text = getattr(outcome, kind)
            if text:
                item.add_report_section("call", f"{kind} of rank {outcome.rank}", text)
                if item.config.option.capture == "no":
                    print(f"\n--- {kind} of rank {outcome.rank} ---\n{text}", end="")
    _issue_warnings(outcomes)
    if any(outcome.status in ("failed", "died", "hung") for outcome in outcomes):
        raise RanksFailed(RanksReport(job, outcomes))
    for outcome in outcomes:
        if outcome.status == "skipped":
            raise pytest.skip.Exception(outcome.summary, _use_item_location=True)
        if outcome.status == "xfailed":
            raise pytest.xfail.Exception(outcome.summary)


def _issue_warnings(outcomes: list[RankOutcome]) -> None:
    seen = set()
    for warning in (warning for outcome in outcomes for warning in outcome.warnings):
        key = (warning.category, warning.message, warning.filename, warning.lineno)
        if key in seen:
            continue  # every rank warns of the same
        seen.add(key)
        try:
            category = pickle.loads(warning.category)
        except Exception:
            category = UserWarning  # its class cannot be imported here
        warnings.warn_explicit(warning.message, category, warning.filename, warning.lineno)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the ranks' own tracebacks instead of this plugin's."""
    report = yield
    if call.excinfo is not None and isinstance(call.excinfo.value, RanksFailed):
        report.longrepr = call.excinfo.value.report.representation()
    return report
