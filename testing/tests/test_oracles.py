"""The oracles against numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lamina_testing.oracles import (
    bit_oracle,
    concatenate,
    global_norm,
    ordered_sum,
    tree_sum,
    whole_batch_oracle,
)

BIG = 2.0**24  # in fp32, BIG + 1 == BIG and BIG + 2 == BIG + 2


class Scale(nn.Module):
    """y = w * x, so that the gradient of mean(y) is mean(x): gradients are chosen by the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))
        self.unused = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.w * x


def mean_loss(model, batch):
    return model(batch).mean()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.5)


def numbers(*rows):
    """batches[rank][microbatch] of one number each."""
    return [[torch.tensor([float(x)]) for x in row] for row in rows]


def gradient(batches, **options):
    (step,) = bit_oracle(Scale, batches, mean_loss, sgd, **options)
    return step.gradients["w"].item()


def symbols(count):
    """Terms whose sum spells its own order."""

    class Term(str):
        def __add__(self, other):
            return Term(f"({self}{other})")

    return [Term(letter) for letter in "abcdefgh"[:count]]


@pytest.mark.parametrize(
    ("count", "order"),
    [
        (1, "a"),
        (2, "(ab)"),
        (3, "((ab)c)"),
        (4, "((ab)(cd))"),
        (5, "(((ab)(cd))e)"),
        (6, "(((ab)(cd))(ef))"),
        (7, "(((ab)(cd))((ef)g))"),
        (8, "(((ab)(cd))((ef)(gh)))"),
    ],
)
def test_the_tree_splits_at_the_largest_power_of_two_below_its_size(count, order):
    assert tree_sum(symbols(count)) == order


def test_an_ordered_sum_goes_from_left_to_right():
    assert ordered_sum(symbols(4)) == "(((ab)c)d)"


def test_missing_terms_are_zero_and_a_sum_of_none_is_missing():
    a, b, *_ = symbols(3)
    assert tree_sum([None, a, b, None]) == "(ab)"
    assert tree_sum([None, None]) is None
    with pytest.raises(ValueError, match="no ranks"):
        tree_sum([])


def test_ranks_are_summed_as_a_tree():
    # ((BIG + 1) + (1 + 1)) / 4; from left to right the ones would be lost.
    assert gradient(numbers([BIG], [1], [1], [1])) == (BIG + 2) / 4


def test_cadence_once_adds_microbatches_before_ranks():
    # With M = 2 each gradient is half the number.
    batches = numbers([2 * BIG, 2], [0, 2])
    assert gradient(batches, cadence="once") == BIG / 2, "(BIG + 1) + (0 + 1)"
    assert gradient(batches, cadence="every") == (BIG + 2) / 2, "(BIG + 0) + (1 + 1)"
    batches = numbers([2 * BIG, 0], [2, 2])
    assert gradient(batches, cadence="once") == (BIG + 2) / 2, "(BIG + 0) + (1 + 1)"
    assert gradient(batches, cadence="every") == BIG / 2, "(BIG + 1) + (0 + 1)"


def test_the_reproducible_order_is_one_tree_over_microbatches_and_ranks():
    # Leaves m * D + r, D = 3, M = 2: (BIG 1) (1 1) | (0 0), the tree adds 1 + 1 first.
    batches = numbers([2 * BIG, 2], [2, 0], [2, 0])
    expected = torch.tensor(BIG + 2) * torch.tensor(1 / 3)
    assert gradient(batches, cadence="reproducible") == expected.item()
    assert gradient(batches, cadence="once") == (torch.tensor(BIG) * torch.tensor(1 / 3)).item()


def test_an_outer_axis_is_summed_once_after_all_microbatches():
    # Two replicas of one rank each: every = per rank over microbatches, then over replicas.
    batches = numbers([2 * BIG, 2], [0, 2])
    assert gradient(batches, cadence="every", axes=(2, 1)) == BIG / 2
    assert gradient(batches, cadence="every", axes=(1, 2)) == (BIG + 2) / 2


def test_uneven_inner_axes_have_a_tree_each():
    # axes (2, 3): ((BIG 1) 1) + ((1 0) 0) loses all ones; the flat tree of 6 keeps the pair.
    batches = numbers([BIG], [1], [1], [1], [0], [0])
    sixth = torch.tensor(1 / 6)
    assert gradient(batches, axes=(2, 3)) == (torch.tensor(BIG) * sixth).item()
    assert gradient(batches) == (torch.tensor(BIG + 2) * sixth).item()


def test_three_axes_are_summed_from_the_inside_out():
    # axes (3, 2, 1) add pairs first, and 1 + 1 survives: (BIG 0) (1 1) (0 0).
    # axes (2, 3, 1) add triples first, and both ones are lost: (BIG 0 1) (1 0 0).
    batches = numbers([BIG], [0], [1], [1], [0], [0])
    sixth = torch.tensor(1 / 6)
    assert gradient(batches, axes=(3, 2, 1)) == (torch.tensor(BIG + 2) * sixth).item()
    assert gradient(batches, axes=(2, 3, 1)) == (torch.tensor(BIG) * sixth).item()


def test_the_mean_is_a_product_with_the_rounded_reciprocal():
    value = next(  # a number for which x / 3 and x * fp32(1/3) differ
        x
        for x in range(1, 100)
        if torch.tensor(float(x)) / 3 != torch.tensor(float(x)) * torch.tensor(1 / 3)
    )
    expected = (torch.tensor(float(value)) * torch.tensor(1 / 3)).item()
    assert gradient(numbers([value], [0], [0])) == expected


def test_the_wire_rounds_each_ranks_share():
    # bf16 has 8 bits: 257 rounds to 256 (to even), 259 to 260. Twice 257 on one rank is 514: exact
    # in fp32, 512 + 2 needs 9 bits and rounds to 512 (to even).
    assert gradient(numbers([257], [259]), wire_dtype=torch.bfloat16) == (256 + 260) / 2
    assert gradient(numbers([257, 257], [0, 0]), wire_dtype=torch.bfloat16) == 256 / 2
    batches = numbers([2 * 257, 2 * 1], [0, 0])
    assert gradient(batches, cadence="once", wire_dtype=torch.bfloat16) == 258 / 2
    assert gradient(batches, cadence="every", wire_dtype=torch.bfloat16) == (256 + 1) / 2


def test_bf16_compute_steps_on_fp32_main_weights():
    def build():
        model = Scale()
        model.w.data.fill_(1.0)
        return model

    def loss(model, batch):
        assert model.w.dtype == torch.bfloat16
        return model(batch.bfloat16()).float().sum()

    def optimizer(model):
        assert model.w.dtype == torch.float32
        return torch.optim.SGD(model.parameters(), lr=2.0**-10)

    # The gradient of a sum of 1 is 1 (no weight decay): each step takes 2^-10, below bf16's reach.
    history = bit_oracle(
        build, numbers([1]), loss, optimizer, steps=3, compute_dtype=torch.bfloat16
    )
    assert [step.parameters["w"].item() for step in history] == [1 - n / 1024 for n in (1, 2, 3)]
    assert history[2].losses[0].item() == 1.0, "the model computed with the rounded weight"


def test_an_unused_parameter_has_no_gradient_and_stays():
    (step,) = bit_oracle(Scale, numbers([1], [3]), mean_loss, sgd)
    assert step.gradients["unused"] is None
    assert step.parameters["unused"].item() == 1.0, "weight decay would have moved it"
    assert step.parameters["w"].item() == -2.0


def test_a_gradient_missing_on_one_rank_counts_as_zero_there():
    def loss(model, batch):
        value = model(batch).mean()
        return value + model.unused.sum() if batch.item() == 3 else value

    (step,) = bit_oracle(Scale, numbers([1], [3]), loss, sgd)
    assert step.gradients["unused"].item() == 0.5


def test_clipping_is_by_the_global_norm_and_rounds_it_once():
    gradients = {"a": torch.full((3,), 1e-4), "b": None, "c": torch.full((1,), 1e4)}
    exact = sum(float(x) ** 2 for g in gradients.values() if g is not None for x in g) ** 0.5
    assert global_norm(gradients) == torch.tensor(exact)
    assert global_norm({"a": torch.tensor([3e20, 4e20])}) == 5e20, "whose square is beyond fp32"

    (step,) = bit_oracle(Scale, numbers([4], [8]), mean_loss, sgd, max_norm=3.0)
    assert step.norm == 6.0
    assert step.gradients["w"] == 6.0
    assert step.clipped_gradients["w"] == 6.0 * (3.0 / (torch.tensor(6.0) + 1e-6))
    assert step.parameters["w"] == -step.clipped_gradients["w"]
    (step,) = bit_oracle(Scale, numbers([4], [8]), mean_loss, sgd, max_norm=100.0)
    assert step.clipped_gradients["w"] == 6.0


def test_per_token_divides_the_sum_by_the_global_count():
    def loss(model, batch):
        return model(batch).sum(), len(batch)

    batches = [[torch.tensor([1.0, 2.0, 3.0])], [torch.tensor([6.0])]]
    (step,) = bit_oracle(Scale, batches, loss, sgd, per_token=True)
    assert step.gradients["w"] == 12.0 / 4
    (whole,) = whole_batch_oracle(Scale, batches, loss, sgd, per_token=True)
    assert whole.gradients["w"] == 12.0 / 4


def test_batches_may_depend_on_the_step():
    history = bit_oracle(Scale, lambda step: numbers([step + 1]), mean_loss, sgd, steps=2)
    assert [step.gradients["w"].item() for step in history] == [1.0, 2.0]
    assert [step.parameters["w"].item() for step in history] == [-1.0, -1.0 + 0.5 - 2.0]


def small_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def regression(model, batch):
    return (model(batch["x"]) - batch["y"]).square().mean()


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)


@pytest.mark.parametrize("cadence", ["once", "every", "reproducible"])
def test_both_oracles_agree_in_fp64(cadence):
    generator = torch.Generator().manual_seed(2)
    batches = [
        [
            {name: torch.randn(3, n, generator=generator).double() for name, n in shapes}
            for _ in range(2)
        ]
        for shapes in [(("x", 4), ("y", 2))] * 3
    ]
    one = bit_oracle(small_model, batches, regression, adamw, steps=4, cadence=cadence)
    whole = whole_batch_oracle(small_model, batches, regression, adamw, steps=4)
    for name in dict(small_model().named_parameters()):
        torch.testing.assert_close(
            one[3].parameters[name], whole[3].parameters[name], rtol=0, atol=1e-12
        )
        torch.testing.assert_close(
            one[3].gradients[name], whole[3].gradients[name], rtol=0, atol=1e-12
        )


def test_one_local_batch_is_a_plain_training_loop():
    generator = torch.Generator().manual_seed(2)
    batch = {
        "x": torch.randn(3, 4, generator=generator),
        "y": torch.randn(3, 2, generator=generator),
    }
    history = bit_oracle(lambda: small_model().float(), [[batch]], regression, adamw, steps=3)
    model = small_model().float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    for _ in range(3):
        optimizer.zero_grad()
        regression(model, batch).backward()
        optimizer.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, history[-1].parameters[name])


def test_the_optimizer_steps_one_parameter_at_a_time():
    seen = []

    def build(model):
        seen.append(adamw(model))
        return seen[0]

    bit_oracle(
        lambda: small_model(),
        [[{"x": torch.ones(1, 4).double(), "y": torch.ones(1, 2).double()}]],
        regression,
        build,
    )
    assert [group["foreach"] for group in seen[0].param_groups] == [False]


def test_impossible_arguments_are_refused():
    with pytest.raises(ValueError, match=r"\[1, 2\] microbatches"):
        bit_oracle(Scale, numbers([1], [1, 2]), mean_loss, sgd)
    with pytest.raises(ValueError, match=r"axes \(2, 2\) make 4 ranks; there are 3"):
        bit_oracle(Scale, numbers([1], [1], [1]), mean_loss, sgd, axes=(2, 2))
    with pytest.raises(ValueError, match="a mean needs equal ones"):
        whole_batch_oracle(Scale, [[torch.ones(2)], [torch.ones(3)]], mean_loss, sgd)
    with pytest.raises(TypeError, match="batches are tensors"):
        concatenate(["text", "more"])
