"""Law 8: random programs are right, or refused with the remedy. `-s fuzz` tries more of them."""

from __future__ import annotations

import pytest
from fuzz.case import Case, program_of
from fuzz.draw import draw
from fuzz.judge import of_error
from fuzz.session import Fuzzer
from fuzz.settings import BY_PROGRAM, SOURCES, choices, fields
from planted import BUGS

SEED, CASES, AT_ONCE = "tests", 60, 6


def batches() -> list[list[Case]]:
    """The cases of the fixed seed, those of one number of ranks together."""
    cases = sorted((draw(SEED, index) for index in range(CASES)), key=lambda case: case.ranks)
    return [cases[first : first + AT_ONCE] for first in range(0, CASES, AT_ONCE)]


@pytest.mark.parametrize("number", range(CASES // AT_ONCE))
def test_random_programs_are_right_or_refused(number, rank_server):
    verdicts = Fuzzer(rank_server).run(batches()[number])
    bad = [
        f"{name}: {v.outcome}: {v.detail}\nreplay: python3 noxfile.py -s fuzz -- --case {name}"
        for name, v in verdicts.items()
        if not v.good
    ]
    assert not bad, "\n".join(bad)


def test_a_case_follows_from_its_name():
    assert draw("a", 7) == draw("a", 7) == Case.from_json(draw("a", 7).to_json())
    assert program_of(draw("a", 7)) != program_of(draw("a", 8))


def test_in_a_clone_called_lamina_an_error_of_torch_is_still_torchs():
    text = "raise ValueError('mat1 and mat2 must have the same dtype, but got Float and BFloat16')"
    torch = "/home/ada/lamina/.nox/env/lib/python3.11/site-packages/torch/nn/modules/linear.py"
    with pytest.raises(ValueError) as raised:
        exec(compile(text, torch, "exec"))
    outcome, detail = of_error(draw(SEED, 7), raised.value)
    assert outcome == "obscure", detail


def test_every_setting_is_drawn_or_has_its_place_in_the_program():
    left = {
        f"{source}: {name}: {annotation}"
        for source in SOURCES
        for name, (annotation, _) in fields(source).items()
        if name not in BY_PROGRAM and not choices(name, annotation)
    }
    assert not {
        text for text in left if "Group" not in text and "Mesh" not in text and "Codec" not in text
    }


PLANTED = (
    "only the last microbatch counts",
    "gradients are doubled where the data-parallel group has one rank",
)


@pytest.mark.parametrize("what", PLANTED)
def test_cases_of_the_fixed_seed_find_a_planted_bug(what, rank_server):
    (bug,) = [bug for bug in BUGS if bug.what == what]
    module = f"lamina.{bug.file.removesuffix('.py').replace('/', '.')}"
    fuzzer = Fuzzer(rank_server, (module, bug.line, bug.becomes))
    cases = [draw(SEED, index) for index in range(CASES)]
    met = [case for case in cases if meets(what, case)][:5]
    verdicts = fuzzer.run(met).values()
    assert any(verdict.outcome in ("wrong", "bits") for verdict in verdicts)


def meets(what: str, case: Case) -> bool:
    """Whether the bug shows in the case, if it has what it is about."""
    wrapper = case.wrappers[0]
    if wrapper.kind == "torch" or "reproducible" in wrapper.settings:
        return False
    if what == PLANTED[0]:
        several = any(len(before) > 1 for before, _ in case.steps)
        return wrapper.strategy > 1 and case.ranks > 1 and several
    return case.ranks == 1
