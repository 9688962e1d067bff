"""Smaller cases that fail in the same way: parts, statements and settings are dropped."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator

from fuzz.case import Case, Part, Wrapper
from fuzz.judge import Verdict

SECONDS = 240.0
"""Of one shrinking."""


def shrink(
    case: Case,
    verdict: Verdict,
    run: Callable[[Case], Verdict],
    seconds: float = SECONDS,
) -> tuple[Case, Verdict]:
    """The smallest case that was found, and its verdict."""
    deadline = time.monotonic() + seconds
    tried = {case.to_json()}
    smaller = True
    while smaller:
        smaller = False
        for candidate in smaller_than(case):
            if candidate.to_json() in tried:
                continue
            if time.monotonic() > deadline:
                return case, verdict
            tried.add(candidate.to_json())
            other = run(candidate)
            if same(verdict, other):
                case, verdict, smaller = candidate, other, True
                break
    return case, verdict


def same(one: Verdict, other: Verdict) -> bool:
    """Whether two cases fail in the same way."""
    if one.outcome != other.outcome:
        # Without rounding in the way, what is wrong in its bits may be wrong altogether.
        return {one.outcome, other.outcome} == {"bits", "wrong"} and other.outcome == "wrong"
    if one.outcome in ("obscure", "uneven"):
        return _kind(one.detail) == _kind(other.detail)
    return True


def _kind(detail: str) -> str:
    """An error without its numbers, names and lines."""
    return re.sub(r"\(.*|[0-9.]+|'[^']*'", "", detail)[:60]


def smaller_than(case: Case) -> Iterator[Case]:
    """Cases with less in them, the largest cuts first."""
    yield from _fewer_steps(case)
    yield from _fewer_parts(case)
    for ranks in range(1, case.ranks):
        wrappers = tuple(
            _with(w, replicas=w.replicas if ranks % w.replicas == 0 else 1) for w in case.wrappers
        )
        yield case.changed(ranks=ranks, wrappers=wrappers)
    yield from _plainer_wrappers(case)
    yield from _fewer_statements(case)
    yield from _plainer_parts(case)
    for name, value in {
        "output": "tensor",
        "groups": "all",
        "scheduler": False,
        "differs": False,
        "auto": True,
        "meta": False,
        "optimizer": "torch.optim.SGD(groups, lr=0.05, foreach=False)",
    }.items():
        if getattr(case, name) != value:
            yield case.changed(**{name: value})


def _fewer_steps(case: Case) -> Iterator[Case]:
    for index in range(len(case.steps) if len(case.steps) > 1 else 0):
        yield _tidy(case.changed(steps=case.steps[:index] + case.steps[index + 1 :]))


def _fewer_parts(case: Case) -> Iterator[Case]:
    for index in range(len(case.parts) if len(case.parts) > 1 else 0):
        parts = []
        for place, part in enumerate(case.parts):
            if place == index:
                continue
            same_as = part.same_as - (part.same_as > index)
            parts.append(Part(part.kind, part.how, -1 if part.same_as == index else same_as))
        yield case.changed(parts=tuple(parts))


def _plainer_parts(case: Case) -> Iterator[Case]:
    for index, part in enumerate(case.parts):
        plainer = [Part(part.kind, tuple(w for w in part.how if w != word), part.same_as)
                   for word in part.how]  # fmt: skip
        if part.same_as >= 0:
            plainer.append(Part(part.kind, part.how))
        elif part.kind != "Affine" and all(other.same_as != index for other in case.parts):
            plainer.append(Part("Affine", part.how))
        for changed in plainer:
            yield case.changed(parts=(*case.parts[:index], changed, *case.parts[index + 1 :]))


def _fewer_statements(case: Case) -> Iterator[Case]:
    for index, step in enumerate(case.steps):
        for half in (0, 1):
            for place in range(len(step[half])):
                left = step[half][:place] + step[half][place + 1 :]
                if half == 0 and not left:
                    left = ("plain",)
                if left != step[half]:
                    yield _tidy(_with_step(case, index, half, left))
        for place, name in enumerate(step[0]):
            if name not in ("plain", "no_sync"):
                left = (*step[0][:place], "plain", *step[0][place + 1 :])
                yield _with_step(case, index, 0, left)


def _with_step(case: Case, index: int, half: int, names: tuple[str, ...]) -> Case:
    step = (names, case.steps[index][1]) if half == 0 else (case.steps[index][0], names)
    return case.changed(steps=(*case.steps[:index], step, *case.steps[index + 1 :]))


def _tidy(case: Case) -> Case:
    """Without what another statement has to come before."""
    seen: set[str] = set()
    steps = []
    for before, after in case.steps:
        kept = []
        for name in after:
            needs = {"thaw": "freeze"}.get(name, name.removesuffix(" back"))
            if needs == name or needs in seen:
                kept.append(name)
                seen.add(name)
        steps.append((before, tuple(kept)))
    wrappers = case.wrappers if seen & {"reload", "set state"} else case.wrappers[:1]
    return case.changed(steps=tuple(steps), wrappers=wrappers)


def _plainer_wrappers(case: Case) -> Iterator[Case]:
    for index, wrapper in enumerate(case.wrappers):
        plainer = [
            _with(wrapper, settings={k: v for k, v in wrapper.settings.items() if k != name})
            for name in wrapper.settings
        ]
        for name, value in {
            "replicas": 1, "outer": 0, "mesh": "layout", "units": False, "form": "both",
            "patterns": {},
        }.items():  # fmt: skip
            if getattr(wrapper, name) != value:
                plainer.append(_with(wrapper, **{name: value}))
        if wrapper.kind == "shard_module":
            plainer.append(_with(wrapper, kind="fully_shard", settings={}))
        for changed in plainer:
            wrappers = (*case.wrappers[:index], changed, *case.wrappers[index + 1 :])
            yield case.changed(wrappers=wrappers)


def _with(wrapper: Wrapper, **how: object) -> Wrapper:
    if how.get("replicas") == 1:
        how["outer"] = 0
    return Wrapper(**{**vars(wrapper), **how})  # type: ignore[arg-type]
