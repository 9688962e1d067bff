"""Pytest plugin: leaves the closing line where noxfile.py asks for it: it prints it last."""

from __future__ import annotations

import os
import time

import pytest

STARTED = time.perf_counter()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Append e.g. `312 passed, 4 skipped in 93.20s` to the file named by LAMINA_CLOSING_LINE."""
    where = os.environ.get("LAMINA_CLOSING_LINE")
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if where and reporter is not None and not hasattr(config, "workerinput"):
        parts, _ = reporter.build_summary_stats_line()
        counts = ", ".join(text for text, _ in parts)
        with open(where, "a") as handle:
            handle.write(f"{counts} in {time.perf_counter() - STARTED:.2f}s\n")
