"""Law 8: random programs are right, or refused with the remedy. `-s fuzz` tries more of them."""

from __future__ import annotations

import pytest
from fuzz.case import Case, Part, Wrapper, program_of
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


@pytest.mark.parametrize("setting", ["reproducible", "invariant"])
def test_both_settings_that_ask_for_one_tree_are_summed_in_one_tree(setting, rank_server):
    wrapper = Wrapper("fully_shard", strategy=1, settings={setting: "True"})
    case = Case(
        name=setting,
        ranks=2,
        parts=(Part("Affine"),),
        wrappers=(wrapper,),
        steps=((("no_sync", "plain"), ()),),
        optimizer="torch.optim.SGD(groups, lr=0.05, foreach=False)",
    )
    verdict = Fuzzer(rank_server).one(case)
    assert verdict.outcome == "right", verdict


MUON = Case(
    name="torch's Muon over DTensors",
    ranks=2,
    parts=(Part("Encoder"),),
    wrappers=(Wrapper("torch", strategy=3),),
    steps=((("plain",), ("step",)),),
    optimizer="torch.optim.Muon([p for p in groups if p.ndim == 2], lr=0.02)",
)
"""Its products in bf16 are summed over ranks, and it enlarges what they lose 485 times."""


def test_numbers_that_fsdp2_has_without_lamina_are_torchs(rank_server):
    verdict = Fuzzer(rank_server).one(MUON)
    assert verdict.outcome == "theirs", verdict
    assert "part0.layer" in verdict.detail


@pytest.mark.parametrize("optimizer", [MUON.optimizer, "torch.optim.SGD(groups, lr=0.05)"])
def test_a_wrong_wrapper_over_fsdp2_is_not_torchs(optimizer, rank_server):
    line = "    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()"
    doubled = line.replace("full_tensor()", "full_tensor() * 2")
    fuzzer = Fuzzer(rank_server, ("lamina.fsdp.api.torch_fsdp2", line, doubled))
    verdict = fuzzer.one(MUON.changed(optimizer=optimizer))
    assert verdict.outcome == "wrong", verdict


def test_an_error_that_torchs_compiler_meets_without_lamina_is_torchs(rank_server):
    # Of a compiled module that has one module under two names, torch's set_state_dict takes one.
    case = Case(
        name="compiled",
        ranks=1,
        parts=(Part("Shared", ("compiled",)),),
        wrappers=(Wrapper("fully_shard", strategy=2), Wrapper("fully_shard")),
        steps=((("plain",), ("step", "set state")),),
        optimizer="torch.optim.AdamW(groups, lr=0.02, eps=1e-3)",
    )
    verdict = Fuzzer(rank_server).one(case)
    assert verdict.outcome == "theirs", verdict
    assert "Missing key(s)" in verdict.detail


def test_three_gradients_of_a_units_input_are_added_as_a_node_there_adds_them(rank_server):
    case = Case(
        name="cell",
        ranks=1,
        parts=(Part("Cell"),),
        wrappers=(Wrapper("fully_shard", settings={"enable_fine_grained_param_gather": "True"}),),
        steps=((("plain",), ()),),
        optimizer="torch.optim.SGD(groups, lr=0.05, foreach=False)",
    )
    verdict = Fuzzer(rank_server).one(case)
    assert verdict.outcome == "right", verdict


def test_gradients_that_come_twice_in_one_backward_are_one_term_of_the_sum(rank_server):
    case = Case(
        name="reentrant",
        ranks=2,
        parts=(Part("Reentrant"), Part("Reentrant", same_as=0)),
        wrappers=(Wrapper("shard_module", strategy=3, units=True),),
        steps=((("plain",), ()),),
        optimizer="torch.optim.SGD(groups, lr=0.05, foreach=False)",
    )
    verdict = Fuzzer(rank_server).one(case)
    assert verdict.outcome == "right", verdict


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
    if wrapper.kind == "torch" or {"reproducible", "invariant"} & set(wrapper.settings):
        return False
    if what == PLANTED[0]:
        several = any(len(before) > 1 for before, _ in case.steps)
        return wrapper.strategy > 1 and case.ranks > 1 and several
    return case.ranks == 1
