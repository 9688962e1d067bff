"""One restore: opens a checkpoint, compares names, checks sums, reads, and loads the objects."""

import json
import time
import warnings
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from lamina.checkpoint.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    shortened,
)
from lamina.checkpoint.load.reader import Reader, read_metadata
from lamina.checkpoint.load.restore_plan import Plan, Selection
from lamina.checkpoint.progress import Progress, RestoreReport
from lamina.checkpoint.ranks import Ranks, own_error
from lamina.checkpoint.state.cut_tensors import Hints
from lamina.checkpoint.state.json_values import Json, decode
from lamina.checkpoint.storage.locations import Location
from lamina.checkpoint.storage.manifest import METADATA, VALUES, Manifest
from lamina.checkpoint.storage.stores import Store


@dataclass(frozen=True)
class Source:
    """A checkpoint that is open: where it is, and what its small files say.

    `manifest` is None for a checkpoint of plain DCP. `trees` are the values that are no tensors.
    """

    location: Location
    manifest: Manifest | None
    metadata: Metadata
    trees: Mapping[str, Json]


def open_checkpoint(location: Location) -> Source:
    """Read the small files of a checkpoint; CheckpointDamagedError or -UnsafeError as they are."""
    manifest = Manifest.read(location)
    if (damaged := manifest.wrong_size(location)) is not None:
        name, size, message = damaged
        raise CheckpointDamagedError(message + _lost(location, manifest, name, size))
    metadata = read_metadata(location, manifest.read_file(location, METADATA))
    try:
        trees = json.loads(manifest.read_file(location, VALUES))
        for tree in dict(trees).values():
            decode(tree, str)
    except (CheckpointError, OSError):
        raise
    except Exception as error:  # forged values may raise nearly anything
        where = f"{location}/{VALUES}"
        raise CheckpointDamagedError(f"{where} can't be read: {error!r}") from error
    return Source(location, manifest, metadata, trees)


def _lost(location: Location, manifest: Manifest, file: str, size: int) -> str:
    """Say which tensors a data file of `size` bytes lacks, and which rank wrote it."""
    try:
        text = manifest.read_file(location, METADATA)
        storage = read_metadata(location, text).storage_data or {}
    except (CheckpointError, OSError):
        return ""
    names = {
        index.fqn: None
        for index, info in storage.items()
        if info.relative_path == file and info.offset + info.length > size
    }
    if not names:
        return ""
    rank = file.lstrip("_").partition("_")[0]
    return f" (written by rank {rank}; gone with it: {shortened(list(names))})"


def open_step(store: Store, step: int) -> Source:
    """Open a step's checkpoint; CheckpointNotFoundError, or -MismatchError if it is another's."""
    location = store.location(step)
    if not store.has(step) and step in (there := store.locations()):
        raise CheckpointDamagedError(f"{there[step]} is no directory: not a checkpoint of lamina")
    if not store.has(step):
        raise CheckpointNotFoundError(
            f"no complete checkpoint of step {step} ({location}); there are "
            f"{list(store.locations()) or 'none'}"
        )
    source = open_checkpoint(location)
    stored_step = step if source.manifest is None else source.manifest.step
    if stored_step != step:
        raise CheckpointMismatchError(
            f"{location} holds step {stored_step}: copied or renamed by hand? Call it "
            f"step-{stored_step:08d}, or move it elsewhere"
        )
    return source


def load(
    open_source: Callable[[], Source],
    state: MutableMapping[str, Any],
    selection: Selection,
    ranks: Ranks,
    hints: Hints,
    *,
    progress: bool,
) -> RestoreReport:
    """Load a checkpoint into `state` (collective). Nothing changes if any rank can't."""
    started = time.perf_counter()
    source = ranks.together(open_source)
    step = -1 if source.manifest is None else source.manifest.step
    plan = ranks.together(lambda: Plan(state, source.trees, source.metadata, selection, hints))
    # All ranks read the same names, in the same order: who has a place for which?
    anywhere = ranks.any(list(plan.claims.values()))
    claimed = dict(zip(plan.claims, anywhere, strict=True))
    ranks.together(lambda: plan.conclude(claimed, ranks.rank, ranks.size))
    read = 0
    if any(ranks.any([bool(plan.tensors)])):
        total = 0 if source.manifest is None else source.manifest.bytes // ranks.size
        bar = Progress(f"loading {source.location}", total, progress and ranks.is_first)
        reader = ranks.together(
            lambda: Reader(source.location, source.metadata, source.manifest, bar.advance)
        )
        try:
            _dcp_load(plan.tensors, reader, ranks)
        except BaseException as error:
            raise own_error(f"restoring {source.location}", error) from error
        finally:
            bar.close()
        read = reader.bytes_read
    ranks.together(lambda: plan.apply(ranks.rank, ranks.size))
    seconds = time.perf_counter() - started
    # With pipeline stages each rank knows of its own names only.
    missing = plan.missing
    if not selection.strict:
        missing = sorted({name for of_rank in ranks.lists(missing) for name in of_rank})
    unexpected = tuple(plan.unexpected)
    return RestoreReport(step, source.location.address, read, seconds, tuple(missing), unexpected)


def _dcp_load(tensors: dict[str, Any], reader: Reader, ranks: Ranks) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp_load(
            dict(tensors),
            storage_reader=reader,
            planner=DefaultLoadPlanner(flatten_state_dict=False),
            process_group=ranks.group,
            no_dist=ranks.group is None,
        )
