"""Operations on spans equal the same operations on the whole, cut afterwards; the rest is refused.

No rank talks to another here: every rank's span is made in one process.
"""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from lamina.buffers import ShardedTensor
from lamina.buffers.engine import PlainAxis
from lamina.buffers.tensors import span_reductions

from .cut_tensors import SHAPES, WORLDS, pasted, spans, values

POINTWISE = {
    "arithmetic": lambda a, b: (a * 2 - b / 3 + 1.5).neg(),
    "functions": lambda a, b: torch.tanh(a).exp().sub(torch.sigmoid(b)),
    "lerp": lambda a, b: torch.lerp(a, b, 0.3),
    "addcdiv": lambda a, b: torch.addcdiv(a, b, b.abs() + 1, value=0.7),
    "comparison": lambda a, b: (a > b) | a.isnan(),
    "where": lambda a, b: torch.where(a > 0, a, b),
    "where_number": lambda a, b: torch.where(a > 0, a, 0.0),
    "clamp": lambda a, b: a.clamp(-0.5, 0.5).maximum(b),
    "masked_fill": lambda a, b: a.masked_fill(b > 0, 7.0),
    "0-d operand": lambda a, b: a * torch.tensor(3.0),
    "operand of one element": lambda a, b: a * torch.full([1] * a.ndim, 3.0) + 1,
    "one element of double": lambda a, b: torch.full([1] * min(a.ndim, 1), 0.1).double() + a,
    "slice of all": lambda a, b: a.view(-1)[:].view(a.shape) + b.view(-1)[::1].view(b.shape),
    "0-d operand first": lambda a, b: torch.tensor(2.0, dtype=torch.float64) - a,
    "division by floor": lambda a, b: a // 0.3,
    "power": lambda a, b: a.abs() ** 1.5 + 2**b,
    "cast": lambda a, b: a.to(torch.bfloat16) + b.half(),
    "cast to double": lambda a, b: a.double() * b,
    "reversed minus": lambda a, b: 1 - a,
    "likes": lambda a, b: torch.full_like(a, 2) + torch.zeros_like(b) + torch.ones_like(a),
    "new of its shape": lambda a, b: a.new_zeros(a.shape) + b.new_full(b.shape, 2.0),
    "expanded number": lambda a, b: a + torch.tensor(4.0).expand(a.shape),
    "clone": lambda a, b: a.clone().detach(),
    "isclose": lambda a, b: torch.isclose(a, b),
    "several results": lambda a, b: torch.frexp(a)[0] + torch.frexp(b)[1],
    "larger of two": lambda a, b: torch.max(a, b),
    "nan_to_num": lambda a, b: (a / 0).nan_to_num(),
}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", list(POINTWISE))
def test_pointwise_operations_equal_those_on_the_whole(name, world):
    operation = POINTWISE[name]
    one, two = values(1), values(2)
    for key in SHAPES:
        expected = operation(one[key], two[key])
        parts = [
            operation(a[key], b[key])
            for a, b in zip(spans(one, world), spans(two, world), strict=True)
        ]
        assert all(type(part) is ShardedTensor for part in parts)
        assert parts[0].dtype == expected.dtype
        assert torch.equal(pasted(parts), expected)


IN_PLACE = {
    "add_": lambda a, b: a.add_(b, alpha=0.5),
    "mul_": lambda a, b: a.mul_(torch.tensor(0.5)),
    "lerp_": lambda a, b: a.lerp_(b, 0.1),
    "addcdiv_": lambda a, b: a.addcdiv_(b, b.abs() + 1),
    "addcmul_": lambda a, b: a.addcmul_(b, b, value=0.1),
    "zero_": lambda a, b: a.zero_(),
    "fill_": lambda a, b: a.fill_(3.0),
    "copy_": lambda a, b: a.copy_(b),
    "copy_ a number": lambda a, b: a.copy_(torch.tensor(2.0)),
    "masked write": lambda a, b: a.masked_fill_(b > 0, 1.0),
    "without torch's tag": lambda a, b: a.abs_().copysign_(b).lt_(0.3),
    "out": lambda a, b: torch.add(a, b, out=a),
    "foreach": lambda a, b: (torch._foreach_mul_([a], [b]), torch._foreach_add_([a], 1), a)[2],
    "foreach copy": lambda a, b: (torch._foreach_copy_([a], [b]), a)[1],
    "foreach lerp": lambda a, b: (torch._foreach_lerp_([a], [b], 0.2), a)[1],
}


@pytest.mark.parametrize("name", list(IN_PLACE))
def test_writes_in_place_reach_the_buffer_and_return_the_same_object(name):
    operation = IN_PLACE[name]
    one, two = values(1), values(2)
    for key in SHAPES:
        expected = operation(one[key].clone(), two[key].clone())
        parts = [part[key] for part in spans(one, 3)]
        addresses = [part.to_local().data_ptr() for part in parts]
        for part, other in zip(parts, spans(two, 3), strict=True):
            assert operation(part, other[key]) is part
        assert [part.to_local().data_ptr() for part in parts] == addresses
        assert torch.equal(pasted(parts), expected)


def test_out_of_place_foreach_gives_sharded_tensors():
    full = values()
    results = [
        torch._foreach_sqrt(torch._foreach_abs(list(part.values()))) for part in spans(full, 3)
    ]
    for at, tensor in enumerate(full.values()):
        assert torch.equal(pasted([result[at] for result in results]), tensor.abs().sqrt())


def test_a_masked_write_by_index_is_pointwise():
    full = values()
    expected = full["matrix"].clone()
    expected[expected > 0] = 9.0
    parts = [part["matrix"] for part in spans(full, 3)]
    for part in parts:
        part[part > 0] = 9.0
    assert torch.equal(pasted(parts), expected)


def test_views_that_keep_element_order_keep_the_span():
    full = values()["cube"]
    for shape in [(-1,), (15, 4), (5, 1, 3, 4), (5, 12)]:
        parts = [part["cube"].view(shape) for part in spans({"cube": full}, 3)]
        assert torch.equal(pasted(parts), full.view(shape))
    parts = [part["cube"].unsqueeze(1).squeeze(1).flatten() for part in spans({"cube": full}, 3)]
    assert torch.equal(pasted(parts), full.flatten())
    part = spans({"cube": full}, 3)[0]["cube"]
    part.view(-1).fill_(5.0)
    assert bool((part.to_local() == 5).all())


def test_the_shape_is_that_of_the_whole():
    part = spans(values(), 3)[1]["matrix"]
    assert part.shape == (13, 8)
    assert part.numel() == 104
    assert part.stride() == (8, 1)
    assert part.is_contiguous()
    assert len(part) == 13
    assert (part.start, part.stop) == (part.start, part.start + part.to_local().numel())
    assert f"span={part.start}..{part.stop} of 104, dp=1/3" in repr(part)
    assert "requires_grad=True" in repr(nn.Parameter(part))


def test_a_tensor_made_from_anothers_spec_lies_at_its_place():
    one, two = values(1), values(2)
    made = [
        ShardedTensor.from_spec(part["matrix"].to_local() + 1, other["matrix"].spec)
        for part, other in zip(spans(one, 3), spans(two, 3), strict=True)
    ]
    assert torch.equal(pasted(made), one["matrix"] + 1)
    assert not any(part.requires_grad for part in made)


# -- what is refused ----------------------------------------------------------------------------

REFUSED = {
    "matrix product": (lambda t: torch.zeros(2, 13) @ t, "aten.mm.*call the module"),
    "linear": (lambda t: nn.functional.linear(torch.zeros(2, 8), t), "call the module"),
    "transpose": (lambda t: t.t(), r"full_tensor\(\)"),
    "index": (lambda t: t[0], "aten.select.*other ranks may hold"),
    "slice": (lambda t: t[2:4], "aten.slice.*other ranks may hold"),
    "assignment by index": (lambda t: t.__setitem__(0, 1.0), "other ranks may hold"),
    "iteration": (list, "aten.unbind"),
    "sum over rows": (lambda t: t.sum(0), r"dimensions \[0\].*parts of rows"),
    "norm over rows": (lambda t: t.norm(dim=1), r"dimensions \[1\].*parts of rows"),
    "softmax": (lambda t: t.softmax(-1), "softmax"),
    "cumsum": (lambda t: t.cumsum(0), "cumsum"),
    "cat": (lambda t: torch.cat([t, t]), "aten.cat"),
    "stack": (lambda t: torch.stack([t, t]), "aten.stack"),
    "sort": (lambda t: t.sort(), "aten.sort"),
    "argmax": (lambda t: t.argmax(), "aten.argmax"),
    "topk": (lambda t: t.topk(2), "aten.topk"),
    "nonzero": (lambda t: t.nonzero(), "aten.nonzero"),
    "bernoulli_": (lambda t: t.bernoulli_(t), "aten.bernoulli_.*initialise the whole tensor"),
    "dropout": (nn.functional.dropout, "draws would differ"),
    "rrelu": (lambda t: nn.functional.rrelu(t, training=True), "draws would differ"),
    "rand_like": (torch.rand_like, "aten.rand_like.*draws would differ"),
    "tril": (lambda t: t.tril(), "aten.tril"),
    "set_": (lambda t: t.set_(), "aten.set_"),
    "resize_": (lambda t: t.resize_(3), "aten.resize_"),
    "bits": (lambda t: t.view(torch.int32), "aten.view.dtype"),
    "into a plain tensor": (lambda t: torch.zeros(13, 8).copy_(t), r"full_tensor\(\)"),
    "parameters_to_vector": (lambda t: nn.utils.parameters_to_vector([t]), "aten.cat"),
    "pickle": (lambda t: torch.save(t, io.BytesIO()), "torch.distributed.checkpoint"),
    "data": (lambda t: setattr(t, "data", t), "copy_"),
}


@pytest.mark.parametrize("init", [nn.init.normal_, nn.init.xavier_uniform_])
@pytest.mark.parametrize("world", WORLDS)
def test_ranks_draw_the_tensor_of_one_process(init, world):
    torch.manual_seed(7)
    whole = init(torch.empty(13, 8)).reshape(-1)
    after = torch.rand(1)
    for of_rank in spans(values(), world):
        span = of_rank["matrix"].detach()
        torch.manual_seed(7)
        assert init(span) is span
        assert torch.equal(span.to_local(), whole[span.start : span.stop])
        assert torch.equal(torch.rand(1), after), "the generator has gone on as in one process"


@pytest.mark.parametrize("name", list(REFUSED))
@pytest.mark.parametrize("world", WORLDS)
def test_what_a_span_cannot_do_right_is_refused_and_says_what_to_call(name, world):
    call, words = REFUSED[name]
    with pytest.raises(NotImplementedError, match=words):
        call(spans(values(), world)[0]["matrix"].detach())


MIXED = {
    "plain operand": lambda t, other: t + torch.zeros(13, 8),
    "plain first": lambda t, other: torch.zeros(13, 8) + t,
    "plain written": lambda t, other: torch.zeros(13, 8).add_(t),
    "one element written": lambda t, other: torch.zeros(1).add_(t),
    "plain out": lambda t, other: torch.add(t, t, out=torch.zeros(1)),
    "broadcast row": lambda t, other: t * torch.zeros(8),
    "span as plain": lambda t, other: t * t.to_local(),
    "another cut": lambda t, other: t + other,
    "plain list written": lambda t, other: torch._foreach_add_([torch.zeros(13, 8)], [t]),
    "list with plain": lambda t, other: torch._foreach_add_([t], [torch.zeros(13, 8)]),
    "part of the whole": lambda t, other: t.copy_(torch.zeros(8)),
}


@pytest.mark.parametrize("name", list(MIXED))
def test_operands_of_unknown_place_are_refused(name):
    full = {"matrix": values()["matrix"]}
    part, other = spans(full, 3)[0]["matrix"], spans(full, 3)[1]["matrix"]
    before = part.to_local().clone()
    with pytest.raises(ValueError, match=r"ShardedTensor|cut differently"):
        MIXED[name](part, other)
    assert torch.equal(part.to_local(), before)


def test_a_reduction_without_a_way_to_other_ranks_says_what_to_call():
    part = spans(values(), 3)[1]["matrix"]
    for call in (part.sum, part.norm, part.full_tensor, part.max, lambda: torch.equal(part, part)):
        with pytest.raises(RuntimeError, match=r"dp=1/3.*communicator=.*to_local\(\).*lamina.ddp"):
            call()


class LossyCommunicator:
    """Two ranks, the other of which holds zeros; its max and min drop NaN, as a backend may."""

    size = 2

    def all_reduce(self, tensor, op):
        zeros = torch.zeros_like(tensor)
        keep = tensor > zeros if op == "max" else tensor < zeros
        return torch.where(keep, tensor, zeros)

    def all_gather(self, local, numels):
        raise NotImplementedError


def test_nan_survives_backends_whose_extremes_drop_it():
    local = torch.tensor([1.0, torch.nan])
    axis = PlainAxis("dp", 2, 0)
    tensor = ShardedTensor(local, (4,), 0, axis, communicator=LossyCommunicator())
    for result in (
        tensor.max(),
        tensor.min(),
        torch.linalg.vector_norm(tensor, float("inf")),
        torch.linalg.vector_norm(tensor, -float("inf")),
    ):
        assert result.isnan()
    tensor.to_local()[1] = 3.0
    assert tensor.max() == 3.0
    assert tensor.min() == 0.0


def test_large_spans_are_reduced_piece_by_piece(monkeypatch):
    monkeypatch.setattr(span_reductions, "_CHUNK", 7)
    whole = torch.randn(9, 5, generator=torch.Generator().manual_seed(0))
    tensor = ShardedTensor(whole.view(-1), (9, 5))
    for order in (2.0, 1.0, 3.0, 0.0, float("inf"), -float("inf")):
        expected = torch.linalg.vector_norm(whole.double(), order).float()
        torch.testing.assert_close(torch.linalg.vector_norm(tensor, order), expected)
    for reduce in (torch.sum, torch.mean, torch.var):
        torch.testing.assert_close(reduce(tensor), reduce(whole.double()).float())
    flat = tensor.flatten()
    torch.testing.assert_close(torch.dot(flat, flat), whole.double().square().sum().float())


def test_a_whole_on_every_rank_reduces_alone():
    whole = torch.randn(6, 2)
    tensor = ShardedTensor(whole.view(-1), (6, 2))
    assert torch.equal(tensor.full_tensor(), whole)
    assert torch.equal(tensor.sum(), whole.double().sum().float())
    assert "whole on every rank" in repr(tensor)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: ShardedTensor(torch.zeros(2, 3), (2, 3)), ValueError, "flat and contiguous"),
        (lambda: ShardedTensor(torch.zeros(6)[::2], (3,)), ValueError, "flat and contiguous"),
        (lambda: ShardedTensor(torch.zeros(4), (2, 3)), ValueError, "4 of 6 elements.*axis="),
        (
            lambda: ShardedTensor(torch.zeros(4), (2, 3), 3, PlainAxis("dp", 2, 1)),
            ValueError,
            r"3\.\.7 is not inside",
        ),
        (
            lambda: ShardedTensor(ShardedTensor(torch.zeros(4), (4,)), (4,)),
            TypeError,
            r"\.to_local\(\)",
        ),
    ],
)
def test_impossible_spans_are_named(call, error, words):
    with pytest.raises(error, match=words):
        call()


# -- life in a module ---------------------------------------------------------------------------


def module_of(parts):
    module = nn.Module()
    for name, part in parts.items():
        setattr(module, name, nn.Parameter(part))
    return module


def test_parameters_gradients_and_copies_are_sharded_tensors():
    module = module_of(spans(values(), 3)[1])
    module.matrix.note = "kept"
    module.matrix.grad = torch.ones_like(module.matrix)
    twin = copy.deepcopy(module)
    for tensor in (twin.matrix, twin.matrix.grad, module.matrix.grad):
        assert type(tensor) is ShardedTensor
    assert isinstance(twin.matrix, nn.Parameter)
    assert twin.matrix.note == "kept"
    assert twin.matrix.to_local().data_ptr() != module.matrix.to_local().data_ptr()
    assert torch.equal(twin.matrix.to_local(), module.matrix.to_local())
    frozen = copy.deepcopy(module.requires_grad_(False))
    assert not frozen.matrix.requires_grad
    assert [parameter.numel() for parameter in module.parameters()] == [104, 1, 0, 17, 60]


def test_modules_convert_and_load_state_dicts_of_whole_tensors():
    full, other = values(1), values(2)
    modules = [module_of(part) for part in spans(full, 3)]
    for module in modules:
        module.load_state_dict(other)
        module.to(torch.bfloat16)
    for name, tensor in other.items():
        parts = [getattr(module, name).detach() for module in modules]
        assert parts[0].to_local().dtype == parts[0].dtype == torch.bfloat16
        assert torch.equal(pasted(parts), tensor.bfloat16())
    with pytest.raises(RuntimeError, match="size mismatch for matrix"):
        modules[0].load_state_dict({**other, "matrix": torch.zeros(3)})


def test_an_exponential_moving_average_runs_on_spans():
    full, other = values(1), values(2)
    ema = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    results = []
    for rank in range(3):
        module = module_of(spans(full, 3)[rank])
        averaged = torch.optim.swa_utils.AveragedModel(module, multi_avg_fn=ema)
        averaged.update_parameters(module)
        module.load_state_dict(other)
        averaged.update_parameters(module)
        results.append(averaged.module.matrix.detach())
    assert torch.equal(pasted(results), full["matrix"].lerp(other["matrix"], 1 - 0.9))


def test_a_penalty_on_sharded_parameters_has_sharded_gradients():
    full = {"w": values()["matrix"]}
    tensor = nn.Parameter(spans(full, 1)[0]["w"])
    loss = (tensor * tensor).sum() + tensor.norm()
    loss.backward()
    whole = nn.Parameter(full["w"].clone())
    ((whole * whole).sum() + whole.norm()).backward()
    assert type(tensor.grad) is ShardedTensor
    torch.testing.assert_close(tensor.grad.to_local().view(13, 8), whole.grad)


def test_compiled_functions_take_sharded_tensors():
    full = values()
    part, other = spans(full, 3)[1]["matrix"], spans(values(2), 3)[1]["matrix"]

    def step(a, b):
        a.add_(b, alpha=-0.1)
        return a * 2

    expected = step(part.clone(), other).to_local()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    result = compiled(part.clone(), other)
    assert type(result) is ShardedTensor
    # torch 2.11 compiles `add_` with a factor into two operators, which round twice.
    torch.testing.assert_close(result.to_local(), expected)


def test_foreach_paths_are_chosen_for_sharded_tensors():
    from torch.utils._foreach_utils import _has_foreach_support

    assert _has_foreach_support([spans(values(), 1)[0]["matrix"]], torch.device("cpu"))
