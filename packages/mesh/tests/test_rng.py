"""Random numbers: who draws the same, and that saved generators go on where they were."""

from __future__ import annotations

import io
import json
import random
import sys
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from lamina.mesh import (
    ParallelLayout,
    derive_seed,
    init_distributed,
    rng_state,
    rng_stream,
    seed_everything,
    set_rng_state,
)
from lamina.mesh.engine import recompute_contexts, require_stream
from lamina_testing import device_type


def stream_draw(name: str) -> list[float]:
    with rng_stream(name):
        return torch.rand(2).tolist()


def draws_of(seed: int, mesh: Any) -> dict[str, Any]:
    """One draw of each kind."""
    with seed_everything(seed, mesh):
        parameters = torch.nn.Linear(3, 3).weight.tolist()
    return {
        "parameters": parameters,
        "dropout": F.dropout(torch.ones(64), 0.5).tolist(),
        "tp": stream_draw("tp"),
        "augmentation": (random.random(), float(np.random.rand())),
    }


def check_who_draws_the_same(mesh: Any, place: dict[str, int], equal: dict[str, set[str]]) -> None:
    """Gather every rank's draws: equal exactly where the places differ in allowed axes only."""
    mine = (place, draws_of(7, mesh))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for other_place, other_draws in everyone:
        differing = {name for name in place if place[name] != other_place[name]}
        for kind, axes in equal.items():
            same = other_draws[kind] == mine[1][kind]
            assert same == (differing <= axes), (kind, place, other_place)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("sizes", [{"pp": 2, "tp": 2}, {"cp": 2, "tp": 2}, {"dp_replicate": 2}])
def test_ranks_draw_the_same_exactly_where_they_should(sizes: dict[str, int]) -> None:
    mesh = ParallelLayout(**sizes).build(device_type())
    place = {n: mesh.coordinate[n] for n in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}
    data = {"dp_replicate", "dp_shard"}
    equal = {
        "parameters": {*data, "cp", "tp"},
        "dropout": {"tp"},
        "tp": set(),
        "augmentation": {"pp", "cp", "tp"},
    }
    check_who_draws_the_same(mesh, place, equal)


@pytest.mark.ranks(4)
def test_plain_meshes_seed_by_the_names_of_their_dimensions() -> None:
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("replicas", "tp"))
    place = dict(zip(("replicas", "tp"), mesh.get_coordinate(), strict=True))
    equal = {"parameters": {"replicas", "tp"}, "dropout": {"tp"}, "tp": set()}
    check_who_draws_the_same(mesh, place, equal)


def test_the_same_seed_gives_the_same_draws_and_another_gives_others() -> None:
    first, again, other = (draws_of(seed, None) for seed in (7, 7, 8))
    assert first == again
    assert all(first[kind] != other[kind] for kind in first)


def test_parameters_do_not_depend_on_the_number_of_replicas() -> None:
    drawn = []
    for world_size in (1, 8, 64):
        with init_distributed("fake", world_size=world_size, rank=world_size - 1):
            drawn.append(draws_of(7, ParallelLayout().build(device_type()))["parameters"])
    assert drawn[0] == drawn[1] == drawn[2]


@given(st.integers(), st.lists(st.text(max_size=3), max_size=3))
def test_derived_seeds_are_seeds(seed: int, parts: list[str]) -> None:
    derived = derive_seed(seed, *parts)
    assert 0 <= derived < 2**63
    assert derived == derive_seed(seed, *parts)
    assert derived != derive_seed(seed, *parts, "x")
    torch.Generator().manual_seed(derived)


def test_derived_seeds_are_the_same_in_every_process() -> None:
    # A number written down once: checkpoints and comparisons rely on it.
    assert derive_seed(1234, "layers.0.weight") == 8063219106859986098


def test_a_stream_leaves_the_default_generators_alone() -> None:
    seed_everything(1).begin_training()
    expected = torch.rand(4)
    seed_everything(1).begin_training()
    first = stream_draw("tp")
    assert stream_draw("tp") != first
    assert torch.equal(torch.rand(4), expected)
    require_stream("tp")
    with pytest.raises(KeyError, match=r"no random stream 'dp'"):
        require_stream("dp")
    with pytest.raises(KeyError, match=r"no random stream 'dp': .* makes tp"):
        stream_draw("dp")


def test_an_error_inside_a_stream_puts_the_default_generators_back() -> None:
    seed_everything(1).begin_training()
    before = torch.get_rng_state()

    def fail() -> None:
        with rng_stream("tp"):
            torch.rand(1)
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        fail()
    assert torch.equal(torch.get_rng_state(), before)


def all_draws() -> list[Any]:
    return [
        random.random(),
        random.gauss(0.0, 1.0),
        float(np.random.standard_normal()),
        torch.rand(3).tolist(),
        stream_draw("tp"),
    ]


@pytest.mark.parametrize("through_file", [False, True])
def test_saved_generators_go_on_where_they_were(through_file: bool) -> None:
    seed_everything(3).begin_training()
    all_draws()  # an odd number of Gaussian draws: the half-used pair is part of the state
    saved = rng_state()
    if through_file:
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
    expected = [all_draws() for _ in range(3)]
    seed_everything(99)
    set_rng_state(saved)
    assert [all_draws() for _ in range(3)] == expected
    set_rng_state(saved)  # drawing changed nothing in what was saved
    assert all_draws() == expected[0]


def test_the_state_is_tensors_and_what_json_knows() -> None:
    seed_everything(3)
    stream_draw("tp")

    def plain(value: Any) -> Any:
        return value.tolist() if isinstance(value, torch.Tensor) else value

    def flatten(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: flatten(item) for key, item in value.items()}
        return plain(value)

    state = flatten(rng_state())
    assert json.loads(json.dumps(state)) == state


def test_states_that_do_not_fit_are_refused() -> None:
    state = rng_state()
    with pytest.raises(ValueError, match=r"no state from rng_state\(\): .*streams.* missing"):
        set_rng_state({"python": state["python"]})
    if not torch.cuda.is_available():
        gpu = {**state, "torch_cuda": torch.zeros(16, dtype=torch.uint8)}
        with pytest.raises(ValueError, match="saved on a GPU and this process has none"):
            set_rng_state(gpu)
        set_rng_state(gpu, strict=False)


@pytest.mark.parametrize("seed", [1.5, "7", True, None])
def test_a_seed_is_an_integer(seed: Any) -> None:
    with pytest.raises(ValueError, match="give an integer"):
        seed_everything(seed)


def test_recomputation_draws_the_streams_numbers_again() -> None:
    def gradient_is_the_mask(**options: Any) -> bool:
        seed_everything(5).begin_training()

        def block(x: torch.Tensor) -> torch.Tensor:
            # The square makes the gradient depend on the recomputed mask.
            with rng_stream("tp"):
                return F.dropout(x, 0.5).square()

        x = torch.ones(256, requires_grad=True)
        y = checkpoint(block, x, use_reentrant=False, **options)
        stream_draw("tp")  # another layer's forward
        after_forward = rng_state()["streams"]["tp"]["states"]["cpu"]
        y.sum().backward()
        after_backward = rng_state()["streams"]["tp"]["states"]["cpu"]
        undisturbed = torch.equal(after_forward, after_backward)
        return undisturbed and torch.equal(x.grad, 2 * y.detach())

    assert gradient_is_the_mask(context_fn=recompute_contexts)
    assert not gradient_is_the_mask()  # what it is for


def test_a_process_without_numpy_has_no_state_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with_numpy = rng_state()
    monkeypatch.delitem(sys.modules, "numpy")
    seed_everything(1)
    state = rng_state()
    assert state["numpy"] is None
    set_rng_state(state)
    with pytest.raises(ValueError, match="Import numpy first, or pass strict=False"):
        set_rng_state(with_numpy)
    assert "numpy" not in sys.modules
