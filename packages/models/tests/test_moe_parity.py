"""Experts over ranks train like one process that holds all of them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from lamina.models import MambaConfig

from .moe_parity import Case, check

GROUPS = {"num_experts": 8, "num_groups": 4, "groups_kept": 2, "scores": "sigmoid"}
BALANCED = {"bias_rate": 0.05, "weight_scale": 1.7, "shared_ffn_size": 8}
BIASES = {"bias": True, "router_bias": True}
CLAMPED = {"activation": "swiglu_clamped"}
ONE = {"top_k": 1, "normalize_weights": False}
LOSSES = {"switch_loss": 0.1, "sequence_loss": 0.2, "global_loss": 0.1, "z_loss": 0.02}
CASES = {
    "ep 2": Case({"ep": 2}, LOSSES | BALANCED, strategy="ddp", per_token=True, microbatches=2,
                 max_norm=math.inf),
    "ep 2, fp32": Case({"ep": 2}, LOSSES | BALANCED, strategy=0, fp32=True, max_norm=0.5),
    "ep 4": Case({"ep": 4}, GROUPS | BALANCED | LOSSES, strategy=2, recompute="selective"),
    "ep 4, gathered": Case({"ep": 4}, {"dispatcher": "all_gather", "switch_loss": 0.1}, strategy=1,
                           crowded=3),
    "ep 2, dp_shard 4": Case({"dp_shard": 4, "ep": 2}, {"capacity_factor": 0.9} | LOSSES | BALANCED,
                             max_norm=0.5),
    "ep 2, tp 2": Case({"dp_shard": 2, "tp": 2, "ep": 2}, BALANCED | LOSSES,
                       config={"sequence_parallel": True}, recompute="full", microbatches=2,
                       strategy=2, max_norm=math.inf, padding=True),
    "ep 2, cp 2": Case({"cp": 2, "ep": 2, "dp_shard": 2}, LOSSES, strategy=1, max_norm=math.inf,
                       padding=True),
    "ep 2, HSDP": Case({"dp_replicate": 2, "dp_shard": 2, "ep": 2}, BALANCED, max_norm=0.5),
    "ep 2, HFSDP": Case({"dp_replicate": 2, "dp_shard": 2, "ep": 2}, LOSSES, outer=1,
                        microbatches=2, max_norm=math.inf),
    "ep 2, expert_tp 2": Case({"dp_shard": 2, "tp": 2, "ep": 2, "expert_tp": 2}, BALANCED,
                              config={"sequence_parallel": True}, strategy="ddp, sharded",
                              max_norm=math.inf),
    "tp 2, experts whole": Case({"tp": 2}, LOSSES | BALANCED, strategy="ddp, sharded",
                                config={"sequence_parallel": True}, max_norm=math.inf),
    "tp 2, experts whole, plain": Case({"tp": 2}, ONE,
                                       strategy=0, config={"sequence_parallel": True},
                                       max_norm=math.inf),
    "expert_tp 2, tokens whole": Case({"tp": 2, "expert_tp": 2}, LOSSES | BALANCED, strategy=0,
                                      max_norm=math.inf),
    "ep 2, expert_tp 2, gathered": Case(
        {"dp_shard": 2, "tp": 2, "ep": 2, "expert_tp": 2}, ONE | {"dispatcher": "all_gather"},
        config={"sequence_parallel": True}, strategy=1, crowded=2, max_norm=math.inf),
    "ep 2, expert_tp 2, padded": Case(
        {"dp_shard": 2, "tp": 2, "ep": 2, "expert_tp": 2},
        ONE | {"capacity_factor": 1.5, "pad_to_capacity": True},
        config={"sequence_parallel": True}, strategy=2, crowded=1, max_norm=math.inf),
    "ep 2, pp 2": Case({"pp": 2, "ep": 2, "dp_shard": 2}, LOSSES | BALANCED, microbatches=2,
                       max_norm=math.inf),
    "ep 2, padded": Case({"ep": 2}, {"capacity_factor": 0.8, "pad_to_capacity": True,
                                     "drop": "position", "first_dense": 1} | LOSSES),
    "ep 2, biases": Case({"ep": 2}, BIASES | LOSSES, strategy=3, config=CLAMPED, microbatches=2,
                         max_norm=math.inf),
    "expert_tp 2, biases": Case({"tp": 2, "expert_tp": 2}, BIASES | BALANCED, strategy=1,
                                config=CLAMPED, max_norm=math.inf),
    "ep 2, expert_tp 2, biases, padded": Case(
        {"dp_shard": 2, "tp": 2, "ep": 2, "expert_tp": 2},
        BIASES | {"capacity_factor": 1.5, "pad_to_capacity": True},
        config={"sequence_parallel": True} | CLAMPED, strategy="ddp, sharded", max_norm=math.inf),
    "ep 2, pp 2, biases": Case({"pp": 2, "ep": 2, "dp_shard": 2}, BIASES, microbatches=2,
                               config=CLAMPED),
    "ep 2, layers of letters": Case({"ep": 2}, LOSSES | BALANCED, max_norm=math.inf, config={
        "layer_pattern": "ME*E", "num_layers": 4,
        "mamba": MambaConfig(state_size=8, head_dim=4, groups=2, chunk_size=8)}),
}  # fmt: skip


FOUR = [name for name, case in CASES.items() if "dp_shard" in case.axes or case.axes == {"ep": 4}]


@pytest.mark.matrix(few=3)
@pytest.mark.ranks(2, timeout=120)
@pytest.mark.parametrize("name", [name for name in CASES if name not in FOUR])
def test_two_ranks_equal_one_process(name, steps):
    check(CASES[name], steps)


@pytest.mark.matrix(few=3)
@pytest.mark.ranks(4, timeout=120)
@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_equal_one_process(name, steps):
    check(CASES[name], steps)


LAYOUTS = {
    "ep 4": {"ep": 4},
    "ep 2, dp_shard 4": {"dp_shard": 4, "ep": 2},
    "ep 2, dp_replicate 2": {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
    "ep 2, tp 2": {"dp_shard": 2, "tp": 2, "ep": 2},
    "ep 2, cp 2": {"dp_shard": 2, "cp": 2, "ep": 2},
    "ep 2, pp 2": {"pp": 2, "dp_shard": 2, "ep": 2},
}


@pytest.mark.matrix(strength=1)
@pytest.mark.ranks(4, timeout=120)
@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("strategy", [0, 3])
@pytest.mark.parametrize("capacity", [None, 0.9])
@pytest.mark.parametrize("dispatcher", ["all_to_all", "all_gather"])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("fp32", [False, True])
def test_every_layout_equals_one_process(
    layout, strategy, capacity, dispatcher, scores, microbatches, fp32, steps
):
    moe = {"capacity_factor": capacity, "dispatcher": dispatcher, "scores": scores}
    case = Case(
        LAYOUTS[layout],
        moe | LOSSES | BALANCED,
        strategy=strategy,
        config={"sequence_parallel": "tp" in layout},
        microbatches=microbatches,
        fp32=fp32,
    )
    check(case, steps)


@pytest.mark.slow
@pytest.mark.ranks(4, timeout=120)
@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("strategy", [1, 2, "ddp, sharded"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_every_strategy_equals_one_process_on_every_layout(layout, strategy, microbatches, steps):
    case = Case(
        LAYOUTS[layout],
        LOSSES | BALANCED,
        strategy=strategy,
        config={"sequence_parallel": "tp" in layout},
        microbatches=microbatches,
        max_norm=math.inf,
    )
    check(case, steps)


MUON = {
    "tp 2": Case({"tp": 2}, config={"sequence_parallel": True}),
    "ep 2": Case({"ep": 2}, BALANCED),
    "ep 2, biases": Case({"ep": 2}, BIASES | BALANCED, config=CLAMPED),
    "expert_tp 2": Case({"tp": 2, "expert_tp": 2}, BALANCED, strategy=0),
    "ep 2, tp 2": Case({"dp_shard": 2, "tp": 2, "ep": 2}, BALANCED, strategy="ddp, sharded",
                       config={"sequence_parallel": True}),
    "ep 2, expert_tp 2": Case({"dp_shard": 2, "tp": 2, "ep": 2, "expert_tp": 2}, strategy=2,
                              config={"sequence_parallel": True}),
    "HSDP, ep 2": Case({"dp_replicate": 2, "dp_shard": 2, "ep": 2}, BALANCED),
    "HFSDP, ep 2": Case({"dp_replicate": 2, "dp_shard": 2, "ep": 2}, outer=1, microbatches=2),
}  # fmt: skip


@pytest.mark.ranks(2, timeout=120)
@pytest.mark.parametrize("name", [name for name in MUON if "dp_shard" not in MUON[name].axes])
def test_muon_over_two_ranks_equals_muon_written_out(name, steps):
    check(replace(MUON[name], muon=True), steps)


@pytest.mark.matrix(few=2)
@pytest.mark.ranks(4, timeout=120)
@pytest.mark.parametrize("name", [name for name in MUON if "dp_shard" in MUON[name].axes])
def test_muon_over_four_ranks_equals_muon_written_out(name, steps):
    check(replace(MUON[name], muon=True), steps)
