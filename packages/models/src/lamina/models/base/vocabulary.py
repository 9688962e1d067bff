"""Ids that a vocabulary does not have: an error on a CPU, and NaN in the loss on a GPU.

To read ids on a GPU the host would have to wait for the device in every forward.
"""

import torch
from torch import Tensor

__all__ = ["check_ids", "label_weights"]


def check_ids(
    name: str,
    ids: Tensor,
    vocab_size: int,
    ignored: int | None = None,
    *,
    remedy: str | None = None,
) -> None:
    """Raise ValueError for ids outside of `0 .. vocab_size - 1` but for `ignored`; on a CPU only.

    They are not read on another device or while compiling. `name` and `remedy` are for the message,
    which by default asks about the tokenizer.

    Raises:
        TypeError: if the ids are not integers.
        ValueError: with the first id that does not exist, and how many do not.
    """
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"{name} are {ids.dtype}: ids are integers, such as torch.int64")
    if ids.device.type != "cpu" or torch.compiler.is_compiling() or type(ids) is not Tensor:
        return  # a tensor subclass, such as a fake tensor, may have no values
    strange = (ids < 0) | (ids >= vocab_size)
    if ignored is not None:
        strange &= ids != ignored
    if not strange.any():
        return
    left_out = "" if ignored is None else f" or {ignored} (left out)"
    if remedy is None:
        remedy = f"is the tokenizer larger than vocab_size {vocab_size}, or should a label be -100?"
    raise ValueError(
        f"{name} hold {int(ids[strange][0])} (and {int(strange.sum())} ids in all that do not "
        f"exist): they must be 0 to {vocab_size - 1}{left_out}; {remedy}"
    )


def label_weights(labels: Tensor, vocab_size: int, ignored: int, dtype: torch.dtype) -> Tensor:
    """The weight of each label: 1, or 0 if it is ignored, or NaN if there is no such id."""
    exists = (labels >= 0) & (labels < vocab_size)
    weights = torch.where(exists, 1.0, torch.nan).to(dtype)
    return torch.where(labels == ignored, 0.0, weights)
