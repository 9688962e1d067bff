"""What changed in a layer's faces between two source trees, read by griffe.

`python -m tasks.release.faces LAYER OLD NEW` prints JSON, in the environment `.nox/api`: griffe
reads sources, so neither torch nor the layer need be installed there.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import griffe

from tasks.bootstrap import SUB_FACES


def faces(layer: str, source: Path) -> dict[str, Any]:
    """Return face -> what it offers: module path -> its public names as griffe's objects.

    The faces are `lamina.LAYER` for users, `lamina.LAYER.engine` for layers above, and SUB_FACES.
    """
    top = griffe.load(f"lamina.{layer}", search_paths=[str(source)], allow_inspection=False)
    found: dict[str, Any] = {}
    beside = [top.modules[n] for n in ("engine", *SUB_FACES.get(layer, ())) if n in top.modules]
    for module in [top, *beside]:
        names = {str(name) for name in module.exports or ()} & set(module.members)
        found[module.path] = {name: module.members[name] for name in sorted(names)}
    return found


def container(path: str, names: dict[str, Any]) -> griffe.Module:
    """Return a module that holds these objects and nothing else; they keep their own parents."""
    module = griffe.Module(path)
    module.members.update(names)
    return module


def changes(layer: str, old: Path, new: Path) -> dict[str, list[str]]:
    """Return what breaks callers and what was added, as lines `path: what`."""
    before, after = faces(layer, old), faces(layer, new)
    breaking, added = [], []
    for face, names in before.items():
        found = griffe.find_breaking_changes(
            container(face, names), container(face, after.get(face, {}))
        )
        for breakage in found:
            what = breakage.as_dict()
            values = " -> ".join(str(what[k]) for k in ("old_value", "new_value") if what[k])
            detail = "" if what["kind"] is griffe.BreakageKind.OBJECT_REMOVED else f": {values}"
            breaking.append(f"{what['object_path']}: {what['kind'].value}{detail}")
    for face, names in after.items():
        fresh = set(names) - set(before.get(face, {}))
        added += [f"{face}.{name}: added" for name in sorted(fresh)]
    return {"breaking": sorted(set(breaking)), "added": sorted(set(added))}


if __name__ == "__main__":
    logging.disable()  # griffe tells of names of other layers, which it is not to look for
    layer, old, new = sys.argv[1:]
    print(json.dumps(changes(layer, Path(old), Path(new))))
