"""Operators on meta tensors whose results a plan remembers, beside torch's own."""

from __future__ import annotations

import pytest
import torch

from lamina.models.plan.record.recorder import StepRecorder
from lamina.models.plan.record.remembered import Remembered

ATEN = torch.ops.aten


def meta(*sizes, dtype=torch.float32):
    return torch.empty(*sizes, dtype=dtype, device="meta")


CALLS = {
    "add": (ATEN.add.Tensor, (meta(3, 4), meta(4)), {}),
    "scale": (ATEN.mul.Scalar, (meta(3, 4, dtype=torch.int64), 2.0), {}),
    "cast": (ATEN._to_copy.default, (meta(3, 4),), {"dtype": torch.bfloat16}),
    "transposed": (ATEN.clone.default, (meta(5, 3).t(),), {}),
    "norm": (ATEN.native_layer_norm.default, (meta(2, 8), [8], None, None, 1e-5), {}),
    "joined": (ATEN.cat.default, ([meta(2, 3), meta(4, 3)], 0), {}),
    "best": (ATEN.topk.default, (meta(5, 9), 2), {}),
    "product": (ATEN.mm.default, (meta(2, 3), meta(3, 7)), {}),
    "several": (ATEN._foreach_add.List, ([meta(2), meta(3)], [meta(2), meta(3)]), {}),
    "a number of a CPU": (ATEN.mul.Tensor, (meta(3), torch.tensor(2.0)), {}),
}


def told(result):
    parts = result if isinstance(result, (tuple, list)) else [result]
    return [(p.shape, p.stride(), p.dtype, p.untyped_storage().nbytes()) for p in parts]


@pytest.mark.parametrize("name", list(CALLS))
def test_results_are_those_of_torch_in_memory_of_their_own(name):
    func, args, kwargs = CALLS[name]
    remembered, wanted = Remembered(), func(*args, **kwargs)
    results = [remembered.call(func, args, kwargs) for _ in range(3)]
    assert [told(result) for result in results] == [told(wanted)] * 3
    assert all(type(result) is type(wanted) for result in results)
    first = [r[0] if isinstance(r, (tuple, list)) else r for r in results]
    assert len({part.untyped_storage()._cdata for part in first}) == 3


def test_an_operator_is_asked_once_for_each_shape_dtype_and_kind_of_number(monkeypatch):
    asked = []

    class Asked:
        def __init__(self, func):
            self.func, self._schema, self.namespace = func, func._schema, func.namespace

        def __call__(self, *args, **kwargs):
            asked.append(args)
            return self.func(*args, **kwargs)

    remembered, scale, joined = Remembered(), Asked(ATEN.mul.Scalar), Asked(ATEN.cat.default)
    for size in (3, 4, 3, 4):
        remembered.call(scale, (meta(size), 2), {})
    assert len(asked) == 2
    whole = meta(3, dtype=torch.int64)
    made = [remembered.call(scale, (whole, number), {}) for number in (1, 1.0, True, 1, 1.0)]
    assert [each.dtype for each in made] == [
        torch.int64, torch.float32, torch.int64, torch.int64, torch.float32
    ]  # fmt: skip
    assert len(asked) == 5
    remembered.call(joined, ([meta(2, 3), meta(4, 3)], 0), {})
    remembered.call(joined, ([meta(4, 3), meta(2, 3)], 0), {})
    assert len(asked) == 7


def test_views_writes_and_values_are_not_remembered():
    remembered, x, on_cpu = Remembered(), meta(6), torch.arange(3.0)
    for _ in range(2):
        view = remembered.call(ATEN.view.default, (x, [2, 3]), {})
        assert view.untyped_storage()._cdata == x.untyped_storage()._cdata
        assert remembered.call(ATEN.add_.Scalar, (x, 1.0), {}) is x
        doubled = remembered.call(ATEN.mul.Scalar, (on_cpu, 2.0), {})
        on_cpu = on_cpu + 1.0
    assert doubled.tolist() == [2.0, 4.0, 6.0]


def test_a_recorded_step_that_repeats_its_shapes_has_the_lives_of_one_that_does_not():
    lives = {}
    for device in ("meta", "cpu"):  # of a CPU nothing is remembered
        with torch.device(device):
            layers = torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8)
        placed = torch.nn.Sequential(*layers)
        with StepRecorder(device) as recorder:
            for _ in range(3):
                placed(torch.empty(4, 8, device=device)).sum().backward()
                placed.zero_grad()
        lives[device] = [life.sizes for life in recorder.record.lives]
    assert lives["meta"] == lives["cpu"]
