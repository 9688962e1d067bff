"""The numbers that a save is called by, step and metric, as users have them."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch


def as_step(step: Any) -> int:
    """Return a training step as an int.

    Raises:
        ValueError: it is no integer, or negative.

    """
    try:
        number = int(operator.index(step))
    except TypeError:
        raise ValueError(f"step is {step!r}: it must be an integer") from None
    if number < 0:
        raise ValueError(f"step is {number}: it must be 0 or more")
    return number


def as_metric(metric: Any) -> float | None:
    """Return a metric as a float, None where there is nothing to compare by (NaN, infinity).

    Raises:
        ValueError: it is no number.

    """
    if metric is None:
        return None
    try:
        number = float(metric.detach() if isinstance(metric, torch.Tensor) else metric)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"metric is {metric!r:.80}, which is no float: {error}") from None
    return number if math.isfinite(number) else None
