"""The backend's own reductions in one call, beside `reduce_scatter_fp32` and `all_reduce_fp32`."""

from __future__ import annotations

from lamina.collectives.engine import reduction_class


def reduce_scatter_native(output, input, group, *, op="sum", async_op=False, **options):
    reduction = reduction_class("native")(output, input, group, scatter=True, op=op)
    return reduction.start(output, input, async_op=async_op, **options)


def all_reduce_native(output, input, group, *, op="sum", async_op=False, **options):
    reduction = reduction_class("native")(output, input, group, scatter=False, op=op)
    return reduction.start(output, input, async_op=async_op, **options)
