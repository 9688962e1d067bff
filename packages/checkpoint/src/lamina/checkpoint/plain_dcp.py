"""Checkpoints that plain torch.distributed.checkpoint wrote, such as those of torch's own FSDP2."""

from __future__ import annotations

import os
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lamina.checkpoint.entries import check_entries
from lamina.checkpoint.inspection import tensors_of
from lamina.checkpoint.loading import Source, load
from lamina.checkpoint.names import OptimizerNames, is_optimizer
from lamina.checkpoint.parts import Hints, Mesh
from lamina.checkpoint.places import place_of
from lamina.checkpoint.progress import RestoreReport
from lamina.checkpoint.reader import read_metadata
from lamina.checkpoint.selection import Selection
from lamina.checkpoint.together import Ranks
from lamina.checkpoint.values import Json


def import_dcp(
    state: MutableMapping[str, Any],
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    allow_cast: bool = False,
    mesh: Mesh = None,
    rename: Callable[[str], str] = str,
    group: dist.ProcessGroup | None = None,
) -> RestoreReport:
    """Load tensors of a plain DCP checkpoint (collective).

    For what ``dcp.save({"model": ..., "optimizer": ...})`` wrote, where the optimizer's part came
    from torch's `get_optimizer_state_dict`, which names parameters. Only tensors are taken: plain
    values are pickles there, which are not opened; hyperparameters stay as they are. Such a
    checkpoint has no checksums, so damage goes unnoticed.

    Args:
        state: name -> module or optimizer; names as in the checkpoint.
        path: of the checkpoint, or its URL.
        strict: as of `CheckpointManager.restore`, as are `include`, `exclude` and `allow_cast`.
        include: see there.
        exclude: see there.
        allow_cast: see there.
        mesh: see `CheckpointManager`.
        rename: see `CheckpointManager`; `str` changes nothing.
        group: the ranks that load; None is all.

    Raises:
        TypeError: an entry is neither a module nor an optimizer.
        CheckpointMismatchError: names, shapes or dtypes that don't fit.
        CheckpointUnsafeError: the metadata names code.
        CheckpointDamagedError: the metadata can't be read.

    """
    ranks, hints = Ranks(group), Hints(mesh, rename)
    selection = Selection(strict, tuple(include), tuple(exclude), allow_cast)

    def open_source() -> Source:
        place = place_of(path)
        metadata = read_metadata(place)
        names = list(tensors_of(metadata))
        trees = {entry: _tree(entry, value, names, state, hints) for entry, value in state.items()}
        return Source(place, None, metadata, trees)

    check_entries(state, ranks)
    source = ranks.together(open_source)
    return load(source, state, selection, ranks, hints, progress=False)


def _tree(
    entry: str, value: Any, names: list[str], state: MutableMapping[str, Any], hints: Hints
) -> Json:
    """Make what `values.json` would say of an entry."""
    if is_optimizer(value):
        prefix = f"{entry}.state."
        states: dict[str, Json] = {}
        for name in names:
            if name.startswith(prefix):
                parameter, _, key = name.removeprefix(prefix).rpartition(".")
                states.setdefault(parameter, {})[key] = {"$tensor": name}
        return {**OptimizerNames(value, state, hints.rename).named(), "state": states}
    if isinstance(value, torch.nn.Module):
        prefix = f"{entry}."
        return {n.removeprefix(prefix): {"$tensor": n} for n in names if n.startswith(prefix)}
    raise TypeError(
        f"'{entry}' is a {type(value).__name__}: modules and optimizers can be loaded from plain "
        "DCP checkpoints"
    )
