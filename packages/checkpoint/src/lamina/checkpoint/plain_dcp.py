"""Checkpoints that plain torch.distributed.checkpoint wrote, such as those of torch's own FSDP2."""

import os
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lamina.checkpoint.errors import CheckpointMismatchError
from lamina.checkpoint.inspection import tensors_of
from lamina.checkpoint.load.loading import Source, load
from lamina.checkpoint.load.reader import read_metadata
from lamina.checkpoint.load.restore_plan import Selection
from lamina.checkpoint.progress import RestoreReport
from lamina.checkpoint.ranks import Ranks
from lamina.checkpoint.state.cut_tensors import Hints, Mesh
from lamina.checkpoint.state.json_values import Json
from lamina.checkpoint.state.optimizer_names import OptimizerNames, is_optimizer
from lamina.checkpoint.state.state import check_entries
from lamina.checkpoint.storage.locations import location_of


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

    For what `dcp.save({"model": ..., "optimizer": ...})` wrote, where the optimizer's part came
    from torch's `get_optimizer_state_dict`, which names parameters. Only tensors are taken: plain
    values are pickles there, which are not opened; hyperparameters stay as they are. Such a
    checkpoint has no checksums, so damage goes unnoticed.

    Args:
        state: name -> module or optimizer, under the names of the `dcp.save`: many programs call
            the optimizer "optim" there.
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
        CheckpointMismatchError: names, shapes or dtypes that don't fit; an entry that is not in the
            checkpoint (`strict=False` lists it in `missing`).
        CheckpointUnsafeError: the metadata names code.
        CheckpointDamagedError: the metadata can't be read.

    Examples:
        >>> state = {"model": torch.nn.Linear(4, 1)}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = CheckpointManager(folder).save(1, state).path
        ...     report = import_dcp(state, path)
    """
    ranks, hints = Ranks(group), Hints(mesh, rename)
    selection = Selection(strict, tuple(include), tuple(exclude), allow_cast)

    def open_source() -> Source:
        """Read the metadata, and show it as a checkpoint of this layer."""
        location = location_of(path)
        metadata = read_metadata(location)
        names = list(tensors_of(metadata))
        paths = {name: _path(name, metadata.planner_data) for name in names}
        stored = list(metadata.state_dict_metadata)
        trees: dict[str, Json] = {name.partition(".")[0]: {} for name in stored}
        for entry, value in state.items():
            # An optimizer without state has its groups there. One with neither is not there.
            parts = ("state", "param_groups") if is_optimizer(value) else ("",)
            if any(name.startswith(f"{entry}.{part}") for name in stored for part in parts):
                trees[entry] = _tree(entry, value, paths, state, hints)
        return Source(location, None, metadata, trees)

    check_entries(state, ranks)
    return load(open_source, state, selection, ranks, hints, progress=False)


def _tree(
    entry: str,
    value: Any,
    paths: Mapping[str, tuple[Any, ...]],
    state: MutableMapping[str, Any],
    hints: Hints,
) -> Json:
    """Make what `values.json` would say of an entry."""
    if is_optimizer(value):
        prefix = f"{entry}.state."
        states: dict[Any, Any] = {}
        for name, path in paths.items():
            if not name.startswith(prefix):
                continue
            parameter, _, key = name.removeprefix(prefix).rpartition(".")
            keys = path[2:] if path[:2] == (entry, "state") else (parameter, key)
            inner = states
            for key in keys[:-1]:
                inner = inner.setdefault(key, {})
            inner[keys[-1]] = {"$tensor": name}
        named = OptimizerNames(value, state, hints.rename).named()
        return {**named, "state": {key: _with_lists(tree, key) for key, tree in states.items()}}
    if isinstance(value, torch.nn.Module):
        prefix = f"{entry}."
        return {n.removeprefix(prefix): {"$tensor": n} for n in paths if n.startswith(prefix)}
    raise TypeError(
        f"'{entry}' is a {type(value).__name__}: modules and optimizers can be loaded from plain "
        "DCP checkpoints"
    )


def _path(name: str, planner_data: Any) -> tuple[Any, ...]:
    """Return the keys that DCP joined to a name: numbers are places in lists."""
    path = planner_data.get(name) if isinstance(planner_data, dict) else None
    return path if isinstance(path, tuple) else ()


def _with_lists(tree: Any, name: str) -> Json:
    """Turn mappings from numbers back into the lists that they were."""
    if not isinstance(tree, dict) or "$tensor" in tree:
        return tree
    items = {key: _with_lists(value, f"{name}.{key}") for key, value in tree.items()}
    if not any(isinstance(key, int) for key in items):
        return items
    if set(items) != set(range(len(items))):
        raise CheckpointMismatchError(
            f"optimizer state '{name}' is a list of tensors and other values, which are pickles "
            "and not opened: load it with plain DCP"
        )
    return [items[number] for number in range(len(items))]
