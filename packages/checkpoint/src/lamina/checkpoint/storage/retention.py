"""Which checkpoints to keep: the rules, and the deletion of what no rule keeps."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lamina.checkpoint.errors import CheckpointDamagedError
from lamina.checkpoint.storage.locations import Location
from lamina.checkpoint.storage.manifest import Manifest
from lamina.checkpoint.storage.stores import Store

_LOOKS = 4  # checkpoints whose files are looked for at each save


@dataclass(frozen=True)
class Kept:
    """A checkpoint is kept if any rule keeps it; the newest always is.

    `last` are the newest so many; None keeps all if no other rule is given, else the newest one.
    `every` keeps those whose step is a multiple of it, and `best` so many of those saved with a
    metric, of which small or large ones are good.
    """

    last: int | None = None
    every: int | None = None
    best: int | None = None
    best_is: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        for name in ("last", "every", "best"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(
                    f"keep_{name} is {value}: it must be at least 1, or None"
                    + (" to keep all" if name == "last" else "")
                )
        if self.best_is not in ("min", "max"):
            raise ValueError(f"best_is is {self.best_is!r}: it must be 'min' or 'max'")
        if self.best_is != "min" and self.best is None:
            raise ValueError(
                f"best_is={self.best_is!r} has no effect: keep_best=None looks at no metric; leave "
                "it out, or give keep_best"
            )

    @property
    def all(self) -> bool:
        """Whether nothing is ever deleted."""
        return self.last is None and self.every is None and self.best is None

    def doomed(self, checkpoints: Mapping[int, float | None]) -> list[int]:
        """Return the steps to delete, ascending, of undamaged checkpoints (step -> metric).

        Damaged ones don't count, so that they can't push the last good one out.
        """
        if self.all:
            return []
        steps = sorted(checkpoints)
        kept = set(steps[-(self.last or 1) :])
        if self.every is not None:
            kept |= {step for step in steps if step % self.every == 0}
        if self.best is not None:
            sign = 1.0 if self.best_is == "min" else -1.0
            measured = [
                (sign * metric, -step)  # of equals the newer
                for step, metric in checkpoints.items()
                if metric is not None and not math.isnan(metric)
            ]
            kept |= {-step for _, step in sorted(measured)[: self.best]}
        return [step for step in steps if step not in kept]


class Retention:
    """Deletes from a store what the rules do not keep.

    `damaged` are steps whose checkpoint a restore, or a scrubber, found damaged; they count for no
    rule.
    """

    def __init__(self, store: Store, kept: Kept) -> None:
        self.kept, self.damaged = kept, set[int]()
        self._store = store
        self._manifests: dict[str, Manifest] = {}  # of the checkpoints that were kept
        self._round = 0

    def retire(self, saved: Manifest) -> None:
        """Delete what is not kept. Each manifest is read once, however many saves follow.

        So is each checkpoint's list of files, but for a few at each save: the newest ones, which a
        run would go back to, and the next ones of a round over all.
        """
        self.damaged.discard(saved.step)  # only now: a save that fails may be tried again
        if self.kept.all:
            return  # nobody needs to know what is there
        known, self._manifests = self._manifests, {}
        metrics, healthy = {}, set[int]()
        locations = self._store.locations()
        steps = list(locations)
        self._round = (self._round + 1) % max(1, len(steps))
        looked_at = {*steps[-_LOOKS:], steps[self._round]}
        for step, location in locations.items():
            manifest = saved if step == saved.step else known.get(str(location))
            if manifest is None or (step in looked_at and manifest is not saved):
                manifest = whole(location, manifest)
            if manifest is not None and step not in self.damaged:
                self._manifests[str(location)], metrics[step] = manifest, manifest.metric
                healthy |= {step} if manifest.healthy else set()
        # The newest in time stays, although a run that went back has saved others after its step.
        # What its last step has damaged shows in the next one only, so a healthy one stays too.
        spared = {saved.step, max(healthy - {saved.step}, default=saved.step)}
        for step in self.kept.doomed(metrics):
            if step not in spared:
                self._store.remove(step)


def whole(location: Location, known: Manifest | None = None) -> Manifest | None:
    """Return the manifest, or what is known of it; None if a file is missing or too short."""
    try:
        manifest = Manifest.read(location) if known is None else known
        manifest.check_sizes(location)
    except CheckpointDamagedError:
        return None
    return manifest
