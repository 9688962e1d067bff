"""Which of an optimizer's groups a saved group was: told by the parameters' names, not by place."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["match_groups"]


def match_groups(own: Sequence[Sequence[str]], saved: Sequence[Sequence[str]]) -> list[int | None]:
    """For each of an optimizer's groups the place of the saved one with its parameters.

    Args:
        own: names of the parameters in each group.
        saved: the same of the saved groups.

    Returns:
        Places in `saved`; None for a group without parameters.

    Raises:
        ValueError: if the parameters are not grouped alike.
    """
    place = {name: at for at, names in enumerate(saved) for name in names}
    taken: dict[int, str] = {}
    matched: list[int | None] = []
    for names in own:
        found = {place[name]: name for name in names if name in place}
        if len(found) > 1:
            (first, one), (second, other) = list(found.items())[:2]
            raise _differ(f"{one} was in group {first} and {other} in group {second}, here in one")
        if not found:
            if names:
                raise _differ(f"no saved group holds {names[0]}")
            matched.append(None)
            continue
        (at, name), *_ = found.items()
        if at in taken:
            raise _differ(f"{taken[at]} and {name} were in one group, here in two")
        taken[at] = name
        matched.append(at)
    for at, names in enumerate(saved):
        if names and at not in taken:
            raise _differ(f"saved group {at} holds {names[0]}, which no group here does")
    return matched


def _differ(how: str) -> ValueError:
    return ValueError(
        f"the saved optimizer groups its parameters otherwise: {how}. Learning rates and weight "
        "decay are kept by group: build the optimizer with the groups it was saved with"
    )
