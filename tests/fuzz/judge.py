"""What is said of a case: the classes of outcomes, and the comparison with one process."""

from __future__ import annotations

import re
import traceback
import types
from dataclasses import dataclass
from typing import Any

import torch
from fuzz.case import Case
from fuzz.places import FENCES, Records, differences, in_one_process
from fuzz.settings import narrow

from lamina_testing.walk import path_in_lamina

GOOD = ("right", "refused", "invalid", "theirs")
"""Outcomes of which nobody has to hear."""

BUGS = (AssertionError, KeyError, IndexError, AttributeError, NameError, RecursionError)
"""What an error that was meant for the user is not."""

EXACT = 0.0
ROUNDING = 2e-3
"""Of a tensor's norm. What goes wrong in silence is off by a tenth and more."""
NARROW = 0.25
"""The same where something is kept or sent in fewer bits than fp32."""


@dataclass(frozen=True)
class Verdict:
    """An outcome.

    Attributes:
        outcome: "right", "refused" (an error that names the remedy), "wrong" (other numbers),
            "bits" (other bits than law 2 promises), "hung", "died", "obscure" (an error that was
            not meant for the user), "uneven" (an error on some ranks, which leaves the others
            waiting), "invalid" (plain PyTorch refuses the program), or "theirs" (torch's FSDP2
            refuses it, or has these numbers without Lamina; `torch.compile` alone refuses it, or
            has other numbers).
        detail: why.
    """

    outcome: str
    detail: str = ""

    @property
    def good(self) -> bool:
        return self.outcome in GOOD


def load(source: str) -> types.ModuleType:
    """The program as a module."""
    import linecache
    import sys

    name = "fuzz_case"
    module = types.ModuleType(name)
    module.__file__ = f"<{name}>"
    # What looks at sources (dynamo's messages, tracebacks) finds it there.
    linecache.cache[f"<{name}>"] = (len(source), None, source.splitlines(True), f"<{name}>")
    sys.modules[name] = module
    exec(compile(source, f"<{name}>", "exec"), module.__dict__)
    return module


def tolerance_of(case: Case, exact: bool) -> float:
    """How far numbers may be off."""
    if any(narrow(wrapper.settings) for wrapper in case.wrappers):
        return NARROW
    return EXACT if exact and promises_bits(case) else ROUNDING


def promises_bits(case: Case) -> bool:
    """Whether law 2 promises bits for all that the program does."""
    native = any("native" in w.settings.get("reduction", "") for w in case.wrappers)
    # Norms are summed in another order, on purpose; other kernels round differently.
    rounded = {"clip", "torch clip"} & {name for _, after in case.steps for name in after}
    plain = "foreach=False" in case.optimizer
    # Penalties reach parameters apart from what units give, or in several pieces.
    rounded |= {"weights", "penalty"} & {name for before, _ in case.steps for name in before}
    theirs = any(w.kind == "torch" for w in case.wrappers)
    # Weights in flat buffers are contiguous (decision 0427), and other strides take other kernels.
    strided = {"ChannelsLast", "Strided"} & {part.kind for part in case.parts}
    return plain and not (native or rounded or compiles(case) or theirs or strided)


def judge(case: Case, program: types.ModuleType, found: list[Records]) -> Verdict:
    """Compare what ranks have recorded with one process."""
    try:
        expected, exact = in_one_process(program.program, case.ranks, program.SUMS)
    except Exception as error:
        return Verdict("invalid", f"{type(error).__name__}: {error}"[:300])
    for records in expected:
        for what, values in records:
            if not all(bool(v.isfinite().all()) for v in values.values()):
                return Verdict("invalid", f"{what} is not finite in one process")
    tolerance = tolerance_of(case, exact)
    worst = Verdict("right")
    for rank, (theirs, ours) in enumerate(zip(expected, found, strict=True)):
        rough = max(tolerance, ROUNDING)
        for difference in differences(theirs, ours, rough, narrow=tolerance == NARROW):
            if compiles(case) and compiles_wrong(case, program, expected):
                return Verdict("theirs", f"torch.compile alone is wrong too: {difference}")
            return Verdict("wrong", f"rank {rank}: {difference}")
        if tolerance == EXACT:
            for difference in differences(theirs, ours, EXACT):
                worst = Verdict("bits", f"rank {rank}: {difference}")
                break
    if worst.outcome == "bits" and bits_of_units(case, program, found):
        return Verdict("right")
    return worst


def bits_of_units(case: Case, program: types.ModuleType, found: list[Records]) -> bool:
    """Whether one process has the same bits where inputs of units are nodes of its graph too."""
    for fenced in FENCES:
        try:
            expected, _ = in_one_process(program.program, case.ranks, program.SUMS, fenced=fenced)
        except Exception:  # a module that wants its very inputs
            continue
        pairs = zip(expected, found, strict=True)
        if not any(next(differences(a, b, EXACT), None) for a, b in pairs):
            return True
    return False


def compiles(case: Case) -> bool:
    return any("compiled" in part.how for part in case.parts)


def alike(one: Records, other: Records) -> bool:
    """Whether two runs of a program have the same numbers."""
    return bool(one) and not any(differences(one, other, ROUNDING))


def compiles_wrong(case: Case, program: types.ModuleType, expected: list[Records]) -> bool:
    """Whether one process has other numbers where torch compiles some of the parts."""
    try:
        compiled, _ = in_one_process(program.program, case.ranks, program.SUMS, compiles=True)
    except Exception:
        return True
    pairs = zip(expected, compiled, strict=True)
    return any(next(differences(a, b, ROUNDING), None) for a, b in pairs)


def refused_by_torch(case: Case, program: types.ModuleType, said: str) -> Verdict | None:
    """Whether one process of plain PyTorch refuses the program too, compiled or not.

    Where a policy says what is computed in, its weights have that dtype. It has to say the same
    then: batch norm on CPUs takes no weights in bf16 beside statistics in fp32, and a part that
    computes in fp64 takes none in fp32, under any policy.
    """
    policies = " ".join(str(wrapper.settings) for wrapper in case.wrappers)
    named = sorted(set(re.findall(r"param_dtype=torch\.(\w+)", policies)))
    for weights in (None, *(getattr(torch, name) for name in named)):
        try:
            in_one_process(program.program, case.ranks, program.SUMS, weights=weights)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            if weights is None or text.splitlines()[0] in said:
                return Verdict("invalid", text[:300])
    if compiles(case):
        try:
            in_one_process(program.program, case.ranks, program.SUMS, compiles=True)
        except Exception as error:
            if (text := head_of(error)) in said:
                return Verdict("theirs", f"torch.compile alone: {text}")
    return None


def head_of(error: BaseException) -> str:
    """An error's type and first words."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])[:400]}"


def of_error(case: Case, error: BaseException) -> tuple[str, str]:
    """Outcome and detail of an error on one rank."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if path_in_lamina(f.filename)]
    head = head_of(error)
    place = "; ".join(f"{f.filename.rsplit('/', 2)[-1]}:{f.lineno}" for f in frames[-3:])
    detail = f"{head} ({place})"
    if case.wrappers[0].kind == "torch" and not (ours and frames[-1] is ours[-1]):
        return "theirs", detail
    meant = bool(ours) and frames[-1] is ours[-1] and not isinstance(error, BUGS)
    # What a collective says of its tensors is for a layer above, and no user calls one here.
    place_of_ours = path_in_lamina(frames[-1].filename)
    meant &= not (isinstance(error, ValueError) and place_of_ours.startswith("collectives/"))
    words = head.partition(": ")[2]
    return ("refused" if meant and len(words) >= 60 else "obscure"), detail


def joined(each: list[Any]) -> Verdict:
    """Of what the ranks say: (outcome, detail), or None for a rank that said nothing."""
    said = [one for one in each if one is not None]
    outcomes = {outcome for outcome, _ in said}
    bad = sorted(outcomes - {"done"})
    if not bad:
        return Verdict("died" if len(said) < len(each) else "done")
    detail = "; ".join(dict.fromkeys(d for outcome, d in said if outcome in bad))
    if len(said) < len(each) or "done" in outcomes:
        outcome = "theirs" if bad == ["theirs"] else "uneven"
        return Verdict(outcome, f"{bad[0]} on some ranks: {detail}")
    for outcome in ("obscure", "theirs", "refused"):
        if outcome in outcomes:
            return Verdict(outcome, next(d for o, d in said if o == outcome))
    return Verdict(bad[0], detail)
