"""One restore: what is selected, and which stored tensor goes into which tensor at hand.

`Plan` compares what a checkpoint holds with what the objects at hand expect, says by name what
does not fit before anything is read, and hands the tensors back after they have been filled.
"""

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.nn import Module

from lamina.checkpoint.errors import CheckpointError, CheckpointMismatchError, shortened
from lamina.checkpoint.state.cut_tensors import CutTensors, Hints, as_part, is_cut
from lamina.checkpoint.state.json_values import RANKS, Json, decode, names_in
from lamina.checkpoint.state.optimizer_names import OPTIMIZER_CLASS, is_optimizer, unwrapped
from lamina.checkpoint.state.per_rank import PerRank
from lamina.checkpoint.state.state import Taken, holds, is_stateful, take_entry


@dataclass(frozen=True)
class Selection:
    """What a restore takes of a checkpoint.

    With `strict`, names on one side only are an error; without it they are left alone. Patterns are
    of names (`fnmatch`; a name selects all beneath it); no `include` is all. With `allow_cast` a
    tensor may be loaded into one of another dtype.
    """

    strict: bool = True
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    allow_cast: bool = False

    def takes(self, name: str) -> bool:
        """Whether a tensor or entry is selected."""

        def among(patterns: Sequence[str]) -> bool:
            return any(matches(name, pattern) for pattern in patterns)

        return (not self.include or among(self.include)) and not among(self.exclude)


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern selects a name: itself, or something above it."""
    return fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")


@dataclass
class _Entry:
    """One entry's share of the plan."""

    taken: Taken | None
    missing: set[str] = field(default_factory=set)
    selected: bool = True


class Plan:
    """Compares a state at hand with the trees of a checkpoint's `values.json` and DCP's metadata.

    CheckpointMismatchError names entries, shapes or dtypes that don't fit.
    """

    def __init__(
        self,
        state: MutableMapping[str, Any],
        trees: Mapping[str, Json],
        metadata: Metadata,
        selection: Selection,
        hints: Hints,
    ) -> None:
        self._state, self._trees, self._selection = state, trees, selection
        self._objects = {entry: unwrapped(value) for entry, value in state.items()}
        self._stored = metadata.state_dict_metadata
        self._cut_tensors = CutTensors(self._objects, hints)
        absent = sorted(set(state) - set(trees))
        if absent and (selection.strict or len(absent) == len(state)):
            raise CheckpointMismatchError(
                f"the checkpoint has no entry {shortened(absent)}; "
                f"it has {shortened(sorted(trees))}"
            )
        #: name -> tensor that is filled
        self.tensors: dict[str, torch.Tensor] = {}
        self._values: dict[str, torch.Tensor] = {}  # the same, as load_state_dict takes them
        #: stored names that should have a place on some rank -> whether they have one on this rank
        self.claims: dict[str, bool] = {}
        self.missing: list[str] = absent
        self.unexpected: list[str] = []
        self._entries = {e: self._plan_entry(e, v) for e, v in self._objects.items() if e in trees}
        self._claim_patterns()

    def _claim_patterns(self) -> None:
        """Note which patterns match a name that is stored, or one that is here."""
        patterns = self._selection.include + self._selection.exclude
        if not patterns:
            return
        stored = (name for entry, tree in self._trees.items() for name in names_in(tree, entry))
        here = (n for entry in self._entries.values() if entry.taken for n in entry.taken.tensors)
        names = [*self._state, *stored, *here]
        for pattern in patterns:
            self.claims[_PATTERN + pattern] = any(matches(name, pattern) for name in names)

    def _plan_entry(self, entry: str, value: Any) -> _Entry:
        stored: list[str] = []
        decode(self._trees[entry], stored.append)
        selected = [name for name in stored if self._selection.takes(name)]
        if not selected and not self._selection.takes(entry):
            return _Entry(None, selected=False)
        of_ranks = isinstance(self._trees[entry], dict) and RANKS in self._trees[entry]
        if of_ranks != isinstance(value, PerRank):
            raise CheckpointMismatchError(
                f"'{entry}' is {'' if of_ranks else 'not '}PerRank in the checkpoint and "
                f"{'not ' if of_ranks else ''}here"
            )
        plain = of_ranks or not is_stateful(value)
        taken = None if plain else self._taken(entry, value)
        planned = _Entry(taken)
        if taken is None:
            kept = self._sharded(entry, value) if plain and not of_ranks else None
            for name in stored:
                self._fill(name, kept, None)
            return planned
        known = isinstance(value, Module) or taken.optimizer is not None
        tree = self._trees[entry]
        if taken.optimizer is not None and not (isinstance(tree, dict) and "param_groups" in tree):
            raise CheckpointMismatchError(
                f"'{entry}' is an optimizer here, and none in the checkpoint"
            )
        if taken.optimizer is not None and self._selection.strict:
            self._refuse_other_optimizer(entry, taken)
        owners = self._owners(entry, taken)
        for name in selected if known else stored:  # of other objects all or nothing
            owner = owners.get(name)
            here = name in taken.tensors or owner is not None
            if known:
                self.claims[name] = here
            if owner is not None and name not in taken.tensors and name.endswith(_MAIN_WEIGHTS):
                continue  # this optimizer's weights are the model's own
            if here or not known:
                self._fill(name, taken, owner)
        if isinstance(value, Module):
            planned.missing = {
                name for name in set(taken.tensors) - set(stored) if self._selection.takes(name)
            }
        if taken.optimizer is not None:
            self._plan_groups(entry, planned)
        return planned

    def _refuse_other_optimizer(self, entry: str, taken: Taken) -> None:
        """Another class, or another option that decides what state there is (`amsgrad`)."""
        if not any(self._selection.takes(f"{entry}.{key}") for key in ("state", "param_groups")):
            return
        there, here = self._trees[entry], taken.tree
        pairs = [(OPTIMIZER_CLASS, there.get(OPTIMIZER_CLASS), here[OPTIMIZER_CLASS])]
        for stored, own in zip(there["param_groups"], here["param_groups"], strict=False):
            pairs += [
                (key, stored.get(key), value)
                for key, value in own.items()
                if type(value) is bool and key not in _HOW_TO_STEP
            ]
        for key, stored, own in pairs:
            if stored is not None and stored != own:
                raise CheckpointMismatchError(
                    f"'{entry}' has {key} {stored} in the checkpoint and {key} {own} here, and "
                    f"would go on with state that is not its own: make it with {key} {stored}; or "
                    f"begin its state anew with exclude=['{entry}'], or load it all the same with "
                    "strict=False"
                )

    def _taken(self, entry: str, value: Any) -> Taken | None:
        """Take what is at hand apart; None for what a checkpoint could not hold, but may replace.

        That is a placeholder, or an object whose state of now has other values than the stored one.
        """
        try:
            return take_entry(entry, value, self._objects, self._cut_tensors)
        except (TypeError, CheckpointError):
            if isinstance(value, Module) or is_optimizer(value):
                raise
            return None

    def _sharded(self, entry: str, value: Any) -> Taken | None:
        """Find sharded tensors in a plain value: they keep their sharding and are filled."""
        taken = self._taken(entry, value)
        if taken is None:
            return None
        cut = {n: t for n, t in taken.tensors.items() if is_cut(t)}
        return replace(taken, tensors=cut)

    def _owners(self, entry: str, taken: Taken) -> dict[str, torch.Tensor]:
        """Return, of stored names of optimizer state at any depth, the parameter at hand."""
        owners: dict[str, torch.Tensor] = {}
        if taken.optimizer is not None:
            for key, tree in self._trees[entry]["state"].items():
                if key in taken.optimizer.parameters:
                    names: list[str] = []
                    decode(tree, names.append)
                    owners |= dict.fromkeys(names, taken.optimizer.parameters[key])
        return owners

    def _plan_groups(self, entry: str, planned: _Entry) -> None:
        """Claim the stored members of groups; note members that no stored group has."""
        if planned.taken is None or planned.taken.optimizer is None:
            return
        here = planned.taken.optimizer.groups()
        groups = self._trees[entry]["param_groups"]
        there = [group["params"] for group in groups]
        if len(here) != len(there):
            if not any(self._chosen(entry, n, group) for n, group in enumerate(groups)):
                return
            raise CheckpointMismatchError(
                f"'{entry}' has {len(here)} parameter groups, the checkpoint has {len(there)}"
            )
        for number, (local, stored) in enumerate(zip(here, there, strict=True)):
            prefix = f"{entry}.param_groups.{number}: "
            # In the stored order: ranks compare claims by position, and sets of strings have
            # another order in every process.
            self.claims.update({prefix + name: name in local for name in stored})
            planned.missing |= {prefix + name for name in local.difference(stored)}

    def _chosen(self, entry: str, number: int, group: Mapping[str, Any]) -> set[str]:
        """Return the hyperparameters of a stored group that are selected."""
        prefix = f"{entry}.param_groups.{number}."
        return {key for key in group if key != "params" and self._selection.takes(prefix + key)}

    def _fill(self, name: str, taken: Taken | None, owner: torch.Tensor | None) -> None:
        metadata = self._stored.get(name)
        if not isinstance(metadata, TensorStorageMetadata):
            raise CheckpointMismatchError(f"tensor '{name}' is not in the checkpoint's metadata")
        # Main weights are read beside themselves: a model that is loaded overwrites them.
        in_place = taken is not None and name in taken.tensors and taken.tensors[name] is not owner
        if taken is not None and in_place:
            self._values[name], target = taken.tensors[name].detach(), taken.shown[name]
            counts = taken.optimizer is not None and taken.paths[name][1] == "state"
            if counts and target.ndim == 0 and type(target) is torch.Tensor:
                # Parameters that step together share one tensor for their step count.
                self._values[name] = target = target.detach().clone()
        else:
            self._values[name], target = self._empty(name, metadata, owner)
        if self._values[name].is_meta:
            raise CheckpointMismatchError(
                f"'{name}' is on the meta device here, where nothing can be loaded: give the "
                "module memory first (module.to_empty(device=...)), and make its optimizer "
                "after that"
            )
        if target.shape != metadata.size:
            raise CheckpointMismatchError(
                f"'{name}' has shape {list(metadata.size)} in the checkpoint and "
                f"{list(target.shape)} here"
            )
        if target.dtype != metadata.properties.dtype and not self._selection.allow_cast:
            raise CheckpointMismatchError(
                f"'{name}' is {metadata.properties.dtype} in the checkpoint and {target.dtype} "
                "here: pass allow_cast=True to convert it"
            )
        self.tensors[name] = target

    def _empty(
        self, name: str, metadata: TensorStorageMetadata, owner: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Make the tensor for state that does not exist yet, and show it as a part.

        An optimizer that has not stepped has no state. What has its parameter's shape is cut as
        the parameter is (empty_like keeps a sharded tensor's placement); the rest is whole and on
        the CPU.
        """
        dtype = metadata.properties.dtype
        if owner is not None and owner.ndim > 0:
            region = self._cut_tensors.region_of(name, owner)
            if metadata.size == (owner.shape if region is None else torch.Size(region.shape)):
                made = torch.empty_like(owner.detach(), dtype=dtype)
                return made, as_part(made, region, owner)
        made = torch.empty(metadata.size, dtype=dtype)
        return made, made

    def conclude(self, claimed: Mapping[str, bool], rank: int, world_size: int) -> None:
        """Compare names, once it is known which names have a place on some rank (`claimed`).

        CheckpointMismatchError says that a name is on one side only, and the selection strict; that
        an entry has no name in common; that a pattern matches nothing; or that a `PerRank` refuses
        another layout.
        """
        for entry, planned in self._entries.items():
            value = self._objects[entry]
            if planned.selected and isinstance(value, PerRank):
                of_ranks = self._trees[entry][RANKS]
                value.change(entry, of_ranks, rank, world_size, self._cut_tensors.coordinates())
        idle = [n.removeprefix(_PATTERN) for n in claimed if n.startswith(_PATTERN)]
        idle = [pattern for pattern in idle if not claimed[_PATTERN + pattern]]
        if idle:
            raise CheckpointMismatchError(
                f"{shortened([repr(pattern) for pattern in idle])} of include and exclude matches "
                f"no name; the checkpoint's begin with {shortened(sorted(self._trees))}"
            )
        for entry, planned in self._entries.items():
            missing = sorted(planned.missing)
            unexpected = sorted(
                name
                for name, anywhere in claimed.items()
                if not anywhere and name.startswith(f"{entry}.")
            )
            stored = sum(name.startswith(f"{entry}.") for name in claimed)
            if not self._selection.strict and stored and len(unexpected) == stored:
                raise CheckpointMismatchError(
                    f"'{entry}' has no name in common with the checkpoint, so strict=False would "
                    f"load nothing: only here {shortened(missing) or 'none'}; only in the "
                    f"checkpoint {shortened(unexpected)}. Name its modules alike (a "
                    "wrapper may put a prefix before them), or leave it as it is with "
                    f"exclude=['{entry}']"
                )
            if self._selection.strict and (missing or unexpected):
                raise CheckpointMismatchError(
                    f"'{entry}' does not fit the checkpoint: not in the checkpoint: "
                    f"{shortened(missing) or 'none'}; only in the checkpoint: "
                    f"{shortened(unexpected) or 'none'}; strict=False loads what fits"
                )
            self.missing += missing
            self.unexpected += unexpected

    def apply(self, rank: int, world_size: int) -> None:
        """Give every object its loaded state, and put loaded plain values into the dict."""
        # Modules first: a wrapper whose model weights are loaded rounds its main weights from
        # them, and the optimizer has these as they were.
        chosen = [entry for entry, planned in self._entries.items() if planned.selected]
        for entry in sorted(chosen, key=lambda entry: not isinstance(self._objects[entry], Module)):
            value, planned = self._objects[entry], self._entries[entry]
            if isinstance(value, PerRank):
                of_ranks, place = self._trees[entry][RANKS], self._cut_tensors.coordinates()
                value.load(entry, of_ranks, rank, world_size, place)
            elif not is_stateful(value):
                self._state[entry] = self._decoded(entry)
            elif planned.taken is not None and isinstance(value, Module):
                self._load_module(entry, value, planned.taken)
            elif planned.taken is not None and planned.taken.optimizer is not None:
                tree = self._optimizer_tree(entry, planned.taken)
                value.load_state_dict(planned.taken.optimizer.numbered(tree))
            else:
                value.load_state_dict(self._decoded(entry))

    def _decoded(self, entry: str) -> Any:
        return decode(self._trees[entry], lambda name: self._values.get(name, _LEFT))

    def _load_module(self, entry: str, module: Module, taken: Taken) -> None:
        """Hand a module what was loaded: tensors, filled in place, and other stored values.

        And no more: a wrapper rounds main weights anew from the weights that it is given.
        """
        stored = self._decoded(entry)
        values = {
            name: value
            for name, value in stored.items()
            if name in taken.tree
            and not isinstance(taken.tree[name], torch.Tensor)
            and self._selection.takes(f"{entry}.{name}")
            and not holds(value, _LEFT)
        }
        left = {
            name
            for name, value in taken.tree.items()
            if isinstance(value, torch.Tensor) and f"{entry}.{name}" not in self._values
        }
        tree = {
            taken.own_names.get(name, name): value
            for name, value in {**taken.tree, **values}.items()
            if name not in left
        }
        if left:
            module.load_state_dict(tree, strict=False)
        else:
            module.load_state_dict(tree)

    def _optimizer_tree(self, entry: str, taken: Taken) -> dict[str, Any]:
        """The stored state, and this optimizer's own where nothing is stored or selected."""
        stored: dict[str, Any] = self._decoded(entry)
        own = taken.tree["state"]
        members = {name for group in stored["param_groups"] for name in group["params"]}
        state = {
            name: value
            for name, value in own.items()
            # A parameter that the checkpoint knows and has no state of loses what it has here.
            if name not in members or not self._selection.takes(f"{entry}.state.{name}")
        }
        for name, values in stored["state"].items():
            loaded = _read_of(values, own.get(name))
            if loaded is not None:
                state[name] = loaded
        loads = {k: self._selection.takes(f"{entry}.{k}") for k in (*taken.tree, *stored)}
        loads |= {k: False for k, v in stored.items() if holds(v, _LEFT)}
        tree = {
            **{k: v for k, v in taken.tree.items() if not loads[k]},
            **{k: v for k, v in stored.items() if loads[k]},
        }
        groups = self._groups(entry, stored["param_groups"], taken.tree["param_groups"])
        return {**tree, "state": state, "param_groups": groups}

    def _groups(self, entry: str, stored: list[Any], own: list[Any]) -> list[dict[str, Any]]:
        """The stored hyperparameters where they are selected, this optimizer's own elsewhere."""
        chosen = [self._chosen(entry, number, group) for number, group in enumerate(stored)]
        if not any(chosen):
            return own
        return [
            {**ours, **{k: theirs[k] for k in keys if not holds(theirs[k], _LEFT)}}
            for ours, theirs, keys in zip(own, stored, chosen, strict=True)
        ]


def _read_of(stored: Any, own: Any) -> Any:
    """Return what was read of one stored state, and this optimizer's own for the rest."""
    if not isinstance(stored, Mapping):  # an optimizer may keep other values among its states
        return own if holds(stored, _LEFT) else stored
    loaded = {key: value for key, value in stored.items() if not holds(value, _LEFT)}
    whole = len(loaded) == len(stored)
    return (loaded if whole else {**(own or {}), **loaded}) or None


_PATTERN = "pattern "
"""Before the patterns in `Plan.claims`, which are no names."""

_HOW_TO_STEP = ("foreach", "fused", "capturable", "differentiable")
"""Options of torch's optimizers that change no number that is kept."""

_LEFT = object()
"""Stands for a stored tensor that was not read: not selected, or another rank's."""

_MAIN_WEIGHTS = ".main_weights"
"""What `lamina.ddp.ShardedOptimizer` calls weights that its model holds in fewer bits."""
