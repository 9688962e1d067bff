"""Settings of the test runs that pytest's own file cannot hold."""

from __future__ import annotations

import os
import time

import pytest

STARTED = time.perf_counter()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Leave pytest's closing line where noxfile.py asks for it, to print it after nox's own."""
    where = os.environ.get("LAMINA_CLOSING_LINE")
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if where and reporter is not None and not hasattr(config, "workerinput"):
        parts, _ = reporter.build_summary_stats_line()
        counts = ", ".join(text for text, _ in parts)
        with open(where, "a") as handle:
            handle.write(f"{counts} in {time.perf_counter() - STARTED:.2f}s\n")
