"""Cuts of layers into stages: as good as the best of all cuts, and refused where impossible."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations_with_replacement, pairwise

import pytest

from lamina.models import TransformerConfig, preset
from lamina.models.engine import cut_layers
from lamina.models.pipelining.cuts import part_costs, resolve_layout
from lamina.models.pipelining.pipeline import _layout
from lamina.models.pipelining.schedule import SCHEDULES, number_of_stages, schedule_kind

CONFIG = TransformerConfig(
    vocab_size=5000, hidden_size=64, num_layers=7, num_heads=2, max_sequence_length=128
)


def cost_of(layers, costs):
    """Costs of the stages of a cut."""
    first, each, last = costs
    sums = [sum(each[layer] for layer in stage) for stage in layers]
    sums[0] += first
    sums[-1] += last
    return sums


@pytest.mark.parametrize("vocabulary", [50, 5000, 50_000])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 8])
def test_no_cut_has_a_cheaper_dearest_stage(vocabulary, num_stages):
    config = replace(CONFIG, vocab_size=vocabulary)
    costs = part_costs(config, 128)
    best = float("inf")
    for inner in combinations_with_replacement(range(8), num_stages - 1):
        ends = (0, *inner, 7)
        cut = [range(a, b) for a, b in pairwise(ends)]
        if all(cut[1:-1]):
            best = min(best, max(cost_of(cut, costs)))
    found = cut_layers(config, num_stages)
    assert [layer for stage in found for layer in stage] == list(range(7))
    assert max(cost_of(found, costs)) == pytest.approx(best)


def test_the_head_of_a_large_vocabulary_counts_as_layers():
    config = preset("llama3-8b")
    sizes = [len(stage) for stage in cut_layers(config, 8, sequence=8192)]
    assert sum(sizes) == 32
    # The head costs as much as two and a half blocks.
    assert sizes[-1] < min(sizes[:-1])


def test_what_is_cut_by_is_the_length_that_is_trained_on():
    long, short = preset("llama3.1-8b"), preset("llama3-8b")
    assert long.max_sequence_length == 16 * short.max_sequence_length
    at_8k = cut_layers(short, 8)
    assert _layout(long, "1f1b", 8, None, None, 8192) == at_8k
    assert _layout(long, "1f1b", 8, None, None, None) != at_8k


def test_layouts_are_numbers_of_layers_or_layers():
    assert resolve_layout([0, 2, 1], 3) == ((), (0, 1), (2,))
    assert resolve_layout([[0], [1, 2]], 3) == ((0,), (1, 2))
    with pytest.raises(ValueError, match="0 to 3, each once and in order"):
        resolve_layout([2, 1], 4)
    with pytest.raises(ValueError, match="in order"):
        resolve_layout([[1], [0]], 2)
    with pytest.raises(ValueError, match=r"stages \[1\] hold nothing"):
        resolve_layout([2, 0, 1], 3)


def test_too_few_layers_are_refused_with_the_arithmetic():
    with pytest.raises(ValueError, match=r"7 layers cannot be cut into 10 stages.* 8 in all"):
        cut_layers(CONFIG, 10)


def test_schedules_say_what_they_need():
    with pytest.raises(ValueError, match="'2f2b' is not known: choose one of gpipe, 1f1b"):
        schedule_kind("2f2b")
    with pytest.raises(ValueError, match="2 stages per rank with schedule '1f1b'"):
        number_of_stages("1f1b", 4, 2, None)
    with pytest.raises(ValueError, match="layout has 6 stages"):
        number_of_stages("gpipe", 4, None, 6)
    assert number_of_stages("interleaved_1f1b", 4, None, 12) == 12
    assert number_of_stages("looped_bfs", 2, 3, None) == 6
    assert number_of_stages("zbv_zero_bubble", 4, None, None) == 8


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_every_stage_is_on_one_rank(name):
    kind = SCHEDULES[name]
    num_stages = 4 * (kind.stages_per_rank or 3)
    held = [kind.stages_of(rank, 4, num_stages) for rank in range(4)]
    assert sorted(stage for stages in held for stage in stages) == list(range(num_stages))
    assert num_stages - 1 in held[kind.rank_of_last(4)]
