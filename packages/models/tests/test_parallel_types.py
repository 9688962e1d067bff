"""Types of parallelism: models fit on meshes of any size, wrong programs do not, rules are honest.

A rule is honest if the derivative of a function on two real ranks is what its types say. The oracle
is a central difference, in float64.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lamina.collectives import (
    all_to_all_tokens,
    copy_to,
    gather_from,
    reduce_from,
    reduce_scatter_to,
    scatter_to,
)
from lamina.mesh import ParallelLayout, init_distributed, mark
from lamina.models import (
    ColumnParallelLinear,
    Dropout,
    GPTModel,
    HyperConnections,
    MambaConfig,
    MoEConfig,
    MultiTokenPrediction,
    RowParallelLinear,
    TransformerConfig,
    VisionConfig,
    VisionLanguageModel,
    linear_cross_entropy,
    vocab_parallel_cross_entropy,
)
from lamina.models.attention import SparseLatentAttention
from lamina.models.attention.context_parallel import Ring
from lamina.models.moe.exchange import RowExchange

spmd = pytest.importorskip("spmd_types")

from lamina.models.parallel_types import ParallelTypeError, check_types  # noqa: E402
from lamina.models.parallel_types import _rules as rules  # noqa: E402
from lamina_testing import device_type  # noqa: E402
from lamina_testing.walk import Profile, path_in_lamina  # noqa: E402

OTHERS = f"{Path(spmd.__file__).parent}/"
SHAPE = TransformerConfig(
    vocab_size=64, hidden_size=32, num_layers=2, num_heads=8, max_sequence_length=64
)
CUT = dataclasses.replace(SHAPE, sequence_parallel=True)
MOE = MoEConfig(num_experts=8, top_k=2, shared_ffn_size=16, switch_loss=0.01, z_loss=0.001)
MAMBA = {"layer_pattern": "M*", "mamba": MambaConfig(head_dim=8, state_size=8, groups=2)}
BIASED = MoEConfig(num_experts=8, top_k=2, bias=True, router_bias=True)
SPARSE = SparseLatentAttention(
    kv_lora_rank=12, q_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5,
    top_k=6, index_heads=3, index_width=8,
)  # fmt: skip
STREAMS = HyperConnections(streams=2, iterations=3)
LOADS = MoEConfig(num_experts=8, top_k=2, scores="sigmoid", global_loss=0.01, sequence_loss=0.01)


def variant(base: TransformerConfig, **fields) -> TransformerConfig:
    return dataclasses.replace(base, **fields)


MODELS = {
    "plain": (SHAPE, {"tp": 2}),
    "sequence": (CUT, {"tp": 2}),
    "context": (CUT, {"tp": 2, "cp": 2}),
    "gathered keys": (variant(SHAPE, context_parallel="all_gather"), {"tp": 2, "cp": 2}),
    "ulysses": (variant(SHAPE, context_parallel="ulysses"), {"tp": 2, "cp": 2}),
    "stages": (variant(CUT, tie_embeddings=True, qk_norm=True), {"tp": 2, "pp": 2}),
    "learned positions": (variant(CUT, positions="learned"), {"tp": 2, "cp": 2}),
    "experts": (variant(CUT, moe=MOE), {"tp": 2, "cp": 2, "ep": 4}),
    "experts in stages": (variant(CUT, moe=LOADS), {"tp": 2, "pp": 2, "ep": 2}),
    "experts that are cut": (variant(SHAPE, moe=MOE), {"tp": 2, "expert_tp": 2}),
    "experts with biases": (variant(CUT, moe=BIASED), {"tp": 2, "cp": 2, "ep": 4}),
    "cut experts with biases": (variant(SHAPE, moe=BIASED), {"tp": 2, "expert_tp": 2}),
    "ep, expert_tp and biases": (
        variant(CUT, moe=BIASED),
        {"tp": 2, "cp": 2, "ep": 2, "expert_tp": 2},
    ),
    "ep and expert_tp": (variant(CUT, moe=LOADS), {"tp": 2, "cp": 2, "ep": 2, "expert_tp": 2}),
    "gathered tokens": (
        variant(CUT, moe=dataclasses.replace(MOE, dispatcher="all_gather")),
        {"tp": 2, "cp": 2, "ep": 2, "expert_tp": 2},
    ),
    "padded": (
        variant(SHAPE, moe=dataclasses.replace(MOE, capacity_factor=1.0, pad_to_capacity=True)),
        {"ep": 4},
    ),
    "mamba": (variant(CUT, **MAMBA), {"tp": 2, "pp": 2}),
    "later tokens": (
        variant(CUT, moe=MOE, mtp=MultiTokenPrediction()),
        {"tp": 2, "cp": 2, "ep": 4},
    ),
    "later tokens in stages": (
        variant(CUT, tie_embeddings=True, mtp=MultiTokenPrediction()),
        {"tp": 2, "pp": 2},
    ),
    "chosen keys": (variant(SHAPE, mla=SPARSE, context_parallel="all_gather"), {"tp": 2, "cp": 2}),
    "chosen keys, sequence": (variant(CUT, mla=SPARSE), {"tp": 2, "pp": 2}),
    "streams": (variant(SHAPE, hyper_connections=STREAMS), {"tp": 2, "cp": 2}),
    "streams, sequence": (variant(CUT, hyper_connections=STREAMS), {"tp": 2, "pp": 2}),
    "vision": (CUT, {"tp": 2, "cp": 2}),
}


def types_of(name: str, world: int) -> dict[str, str]:
    """The types of the loss of a model on a world that is played, of which dp has the rest."""
    config, axes = MODELS[name]
    others = axes.get("tp", 1) * axes.get("cp", 1) * axes.get("pp", 1)
    replicas = 2 if world > 8 else 1
    layout = ParallelLayout(dp_replicate=replicas, dp_shard=world // others // replicas, **axes)
    with init_distributed("fake", world_size=world):
        mesh = layout.build(device_type())
        tokens = torch.randint(4, 64, (2, 32))
        if name != "vision":
            named = {"padding_mask": tokens < 8} if name == "experts" else {}
            return check_types(GPTModel(config, mesh), tokens, tokens.clone(), mesh=mesh, **named)
        eye = VisionConfig(patch_size=4, hidden_size=32, num_layers=1, num_heads=4)
        tokens[:, :4] = 3
        model = VisionLanguageModel(eye, config, mesh, image_token=3)
        labels = torch.where(tokens == 3, -100, tokens)
        return check_types(model, tokens, torch.randn(2, 3, 8, 8), labels, mesh=mesh)


@pytest.mark.matrix(few=10, limit=60)
@pytest.mark.parametrize("world", [8, 4096])
@pytest.mark.parametrize("name", MODELS)
def test_models_fit(name, world):
    found = types_of(name, world)
    assert found.pop("tp", "I") == "I"
    assert set(found.values()) <= {"P"}


def test_the_cost_does_not_grow_with_the_world():
    types_of("plain", 8)
    calls = []
    for world in (16, 4096):
        inside = Profile(lambda file: bool(path_in_lamina(file)) or file.startswith(OTHERS))
        with inside as profile, profile.walk() as walk:
            types_of("plain", world)
        calls.append(walk.calls.total())
    assert calls[1] < 1.05 * calls[0]


class Wrong(nn.Module):
    """A product that is cut over tp, and four ways to get it wrong."""

    def __init__(self, mesh, fault: str) -> None:
        super().__init__()
        self.fault, self.group = fault, mesh.group("tp")
        self.up, self.down = nn.Linear(8, 4, bias=False), nn.Linear(4, 8, bias=False)
        self.first, self.scale = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(4))
        mark(self.up.weight, tp_shard_dim=0)
        if fault != "a cut weight has no role":
            mark(self.down.weight, tp_shard_dim=1)
        if fault != "a gradient that is partial has no role":
            mark(self.scale, tp_grad="sum")

    def forward(self, x):
        x = x * self.first
        if self.fault != "gradients of the input are not summed":
            x = copy_to(x, self.group)
        y = self.down(torch.relu(self.up(x)) * self.scale)
        if self.fault != "products are not summed":
            y = reduce_from(y, self.group)
        if self.fault == "products are summed twice":
            y = reduce_from(y, self.group)
        if self.fault == "the loss is gathered":
            y = gather_from(y, self.group, grad="reduce_scatter")
        return y.square().mean()


@pytest.mark.parametrize(
    "fault",
    [
        "a cut weight has no role",
        "a gradient that is partial has no role",
        "gradients of the input are not summed",
        "products are not summed",
        "products are summed twice",
        "the loss is gathered",
    ],
)
def test_wrong_programs_do_not_fit(fault):
    with init_distributed("fake", world_size=8):
        mesh = ParallelLayout(dp_shard=4, tp=2).build(device_type())
        right = check_types(Wrong(mesh, ""), torch.randn(3, 8), mesh=mesh)
        assert right == {"dp_shard": "P", "tp": "I"}
        with pytest.raises(ParallelTypeError):
            check_types(Wrong(mesh, fault), torch.randn(3, 8), mesh=mesh)


class Unknown(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Calls(nn.Module):
    def forward(self, x):
        return Unknown.apply(x).sum()


@dataclasses.dataclass
class Helper:
    """Of no hash, as it compares by fields."""

    factor: float

    def scaled(self, x):
        return Unknown.apply(x) * self.factor


class CallsHelper(nn.Module):
    def forward(self, x):
        return Helper(2.0).scaled(x).sum()


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (Calls(), "not registered"),
        (CallsHelper(), "not registered"),
        (nn.Sequential(Dropout(0.5)), "0 drops elements"),
    ],
)
def test_what_cannot_be_checked_is_refused_by_name(module, said):
    with init_distributed("fake", world_size=8):
        mesh = ParallelLayout(dp_shard=4, tp=2).build(device_type())
        x = torch.randn(3, 8, requires_grad=True)
        with pytest.raises(ParallelTypeError, match=said):
            check_types(module, x, mesh=mesh)


def test_the_error_names_the_module_and_nothing_stays_patched():
    with init_distributed("fake", world_size=8):
        mesh = ParallelLayout(dp_shard=4, tp=2).build(device_type())
        model = GPTModel(SHAPE, mesh)
        model.blocks[1].mlp.down.weight._lamina_role = None
        tokens = torch.zeros(1, 8, dtype=torch.int64)
        with pytest.raises(ParallelTypeError, match=r"^blocks\.1\.mlp\.down: "):
            check_types(model, tokens, tokens.clone(), mesh=mesh)
        assert not any(map(spmd.has_local_type, (tokens, *model.parameters())))
        model(tokens, tokens).backward()


@pytest.mark.slow
def test_the_command_checks_a_function_of_the_users(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom lamina.models import GPTModel, TransformerConfig\n"
        "def build(mesh):\n"
        "    shape = TransformerConfig(vocab_size=64, hidden_size=32, num_layers=2, num_heads=8)\n"
        "    tokens = torch.zeros(1, 8, dtype=torch.int64)\n"
        "    return GPTModel(shape, mesh), (tokens, tokens.clone())\n"
    )
    command = [sys.executable, "-m", "lamina.models.parallel_types", "mine:build", "--tp", "2"]
    ended = subprocess.run(
        [*command, "--dp-shard", "512"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "fit on 1024 ranks" in ended.stdout


def regions(group):
    return {
        "copy_to": (lambda x: copy_to(x, group), ["I"], "R"),
        "reduce_from": (lambda x: reduce_from(x, group), ["P"], "I"),
        "scatter_to": (lambda x: scatter_to(x, group), ["I"], "V"),
        "gather_from": (lambda x: gather_from(x, group), ["V"], "I"),
        "gather_from, summed": (lambda x: gather_from(x, group, grad="reduce_scatter"), ["V"], "R"),
        "reduce_scatter_to": (lambda x: reduce_scatter_to(x, group), ["P"], "V"),
        "all_to_all_tokens": (lambda x: all_to_all_tokens(x, group), ["V"], "V"),
        "exchange": (lambda x: RowExchange(x, group, [2, 2], [2, 2]).wait(), ["V"], "V"),
    }


def layers(mesh, labels):
    tp = mesh.axis("tp")

    def product(kind, sequence):
        layer = kind(8, 8, tp, bias=True, sequence_parallel=sequence).double()
        parameters = dict(layer.named_parameters())

        def call(x, weight, bias):
            return torch.func.functional_call(
                layer, dict(zip(parameters, (weight, bias), strict=True)), x
            )

        return call, [tuple(each.shape) for each in parameters.values()]

    column, columns = product(ColumnParallelLinear, False)
    column_cut, _ = product(ColumnParallelLinear, True)
    row, rows = product(RowParallelLinear, False)
    row_cut, _ = product(RowParallelLinear, True)
    whole, half = (4, 8), (4, 4)
    ring = Ring(tp)
    heads = (1, 4, 2, 4)
    return {
        "column": (column, ["I", "V", "V"], "V", [whole, *columns]),
        "column, cut tokens": (column_cut, ["V", "V", "V"], "V", [whole, *columns]),
        "row": (row, ["V", "V", "I"], "I", [half, *rows]),
        "row, cut tokens": (row_cut, ["V", "V", "R"], "V", [half, *rows]),
        "loss of hidden states": (
            lambda x, w: linear_cross_entropy(x, w, labels, tp),
            ["R", "V"],
            "I",
            [whole, (4, 8)],
        ),
        "loss of logits": (
            lambda x: vocab_parallel_cross_entropy(x, labels, tp),
            ["V"],
            "I",
            [(4, 4)],
        ),
        "ring attention": (
            lambda q, k, v: ring(q, k, v, scale=0.5, dropout=0.0),
            ["V", "V", "V"],
            "V",
            [heads] * 3,
        ),
    }


def drawn(kind: str, shape, rank: int, seed: int) -> torch.Tensor:
    """A value (or a direction) of a type: R and I are the same on all ranks."""
    place = 0 if kind in "RI" else rank + 1
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * seed + place)).double()


@pytest.mark.ranks(2)
def test_rules_say_what_numbers_say():
    """Directional derivatives over two ranks equal what the types of the gradients promise."""
    mesh = ParallelLayout(tp=2).build(device_type())
    group, rank = mesh.group("tp"), dist.get_rank()
    cases = {name: (*case, [(4, 3)]) for name, case in regions(group).items()}
    labels = torch.tensor([0, 3, 5, 6])
    cases |= layers(mesh, labels)

    def summed(value: float) -> float:
        total = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(total)
        return float(total)

    for name, (function, kinds, result_kind, shapes) in cases.items():
        inputs = [
            drawn(kind, shape, rank, at).requires_grad_()
            for at, (kind, shape) in enumerate(zip(kinds, shapes, strict=True))
        ]
        check_case(name, function, inputs, kinds, result_kind, mesh, labels)
        result = function(*inputs)
        # A gradient is equal on all ranks for I, varies for V, and is partial for R.
        kind_of_gradient = {"I": "I", "R": "V", "V": "V"}[result_kind]
        gradient = drawn(kind_of_gradient, result.shape, rank, 77)
        grads = torch.autograd.grad(result, inputs, gradient)
        directions = [
            drawn(kind, x.shape, rank, 50 + at)
            for at, (kind, x) in enumerate(zip(kinds, inputs, strict=True))
        ]
        step, values = 1e-6, []
        for sign in (1, -1):
            moved = [
                (x + sign * step * d).detach() for x, d in zip(inputs, directions, strict=True)
            ]
            with torch.no_grad():
                values.append(float((function(*moved) * gradient).sum()))
        found = summed((values[0] - values[1]) / (2 * step)) / (2 if result_kind == "I" else 1)
        promised = 0.0
        for kind, grad, direction in zip(kinds, grads, directions, strict=True):
            part = summed(float((grad * direction).sum()))
            promised += part / (2 if kind == "I" else 1)
        assert promised == pytest.approx(found, rel=1e-6, abs=1e-6), name


def check_case(name, function, inputs, kinds, result_kind, mesh, labels) -> None:
    """The rule gives the type that the numbers are compared with."""
    axis = spmd.MeshAxis.of(mesh.group("tp"))
    with rules(), spmd.set_current_mesh({"tp": axis}), spmd.checker.typecheck("strict"):
        spmd.assert_type(labels, {axis: spmd.I})
        for x, kind in zip(inputs, kinds, strict=True):
            spmd.assert_type(x, {axis: getattr(spmd, kind)})
        result = function(*inputs)
        assert spmd.get_local_type(result)[axis].name == result_kind, name
