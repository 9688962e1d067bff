"""Padding of the units of public models: below one percent with the default granularity."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from lamina.buffers import BufferLayout, Granularity, TensorSpec, padding_report

BENCHMARK = Path(__file__).resolve().parents[3] / "benchmarks" / "layout.py"
SPEC = importlib.util.spec_from_file_location("benchmarks_layout", BENCHMARK)
assert SPEC is not None
assert SPEC.loader is not None
benchmark = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(benchmark)

SHARDS = (8, 64, 256, 1024)


@pytest.mark.parametrize("model", list(benchmark.MODELS))
def test_padding_of_public_models_is_below_one_percent(model):
    for unit, shapes in benchmark.MODELS[model].items():
        specs = [TensorSpec(name, shape) for name, shape in shapes.items()]
        for shards in SHARDS:
            fraction = BufferLayout.plan(specs, shards).padding_fraction
            assert fraction < 0.01, (unit, shards, fraction)


@pytest.mark.parametrize("model", list(benchmark.MODELS))
def test_row_granularity_stays_near_its_lower_bound(model):
    for unit, shapes in benchmark.MODELS[model].items():
        specs = [
            TensorSpec(name, shape, Granularity.row() if len(shape) > 1 else Granularity.element())
            for name, shape in shapes.items()
        ]
        for shards in SHARDS:
            report = padding_report(BufferLayout.plan(specs, shards))
            assert report.distance <= max(0.05, 0.35 * report.least_fraction), (
                unit,
                shards,
                report,
            )
