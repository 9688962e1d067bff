"""A strategy for each pattern of parameter names: the bits of each one's own, and its bytes."""

from fnmatch import fnmatchcase

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lamina.collectives import Ledger
from lamina.ddp import Cadence, clip_grad_norm, full_gradients, full_parameters, memory_plan
from lamina.ddp.engine import resolve_strategy
from lamina.fsdp import MixedPrecisionPolicy, fully_shard
from lamina_testing import device_type
from lamina_testing.oracles import bit_oracle
from lamina_testing.parity import OPTIMIZERS, assert_bits, batches, build, loss_fn, train
from lamina_testing.toys import Block, OddNet, inputs

STEPS = 3
MIXES = {
    "head and tail whole": {"blocks.*": 3, "*": 0},
    "one block whole": {"blocks.1.*": "no_shard", "*": "optim_grads_params"},
    "within a unit": {"*.bias": 1, "*norm*": 0, "blocks.*": 3, "*": 2},
    "a strategy of one's own": {"*.weight": resolve_strategy(1), "*": 3},
}
WORDS = {Cadence.ONCE: "once", Cadence.EVERY_MICROBATCH: "every"}


def cadence_in(mix):
    def of(name):
        chosen = next(one for pattern, one in mix.items() if fnmatchcase(name, pattern))
        return WORDS[resolve_strategy(chosen).cadence]

    return of


def mesh_of(world):
    return init_device_mesh(device_type(), (world,), mesh_dim_names=("dp",))


def shard(model, optimizer, mix, world=2, **settings):
    settings.setdefault("fsdp_unit_modules", [Block])
    return fully_shard(
        model, optimizer, device_mesh=mesh_of(world), zero_dp_strategy=mix, **settings
    )


@pytest.mark.matrix(few=6)
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("overlap", [False, True])
def test_each_parameter_has_the_bits_of_its_own_strategy(
    mix, microbatches, optimizer, overlap, ranks
):
    world = ranks.world_size
    model = build()
    data = batches(model, world, microbatches)
    sharded, stepper = shard(
        model,
        OPTIMIZERS[optimizer](model),
        MIXES[mix],
        world,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
    )
    mine = lambda step: data(step)[ranks.rank]  # noqa: E731
    found = train(sharded, stepper, mine, STEPS, full_gradients, full_parameters)
    wanted = bit_oracle(
        build, data, loss_fn, OPTIMIZERS[optimizer], steps=STEPS, cadence=cadence_in(MIXES[mix])
    )
    assert_bits(found, wanted)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("clip", ["torch", "lamina"])
def test_the_norm_counts_whole_and_sharded_gradients_once(clip, ranks):
    model, _ = shard(build(), None, MIXES["within a unit"]), None
    model(inputs(model, ranks.rank)).square().mean().backward()
    gradients = full_gradients(model)
    wanted = torch.stack([g.double().square().sum() for g in gradients.values()]).sum().sqrt()
    if clip == "torch":
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5 * float(wanted))
    else:
        norm = clip_grad_norm(model, 0.5 * float(wanted), mesh_of(2))
    torch.testing.assert_close(norm.double(), wanted, rtol=1e-6, atol=0)
    for name, value in full_gradients(model).items():
        torch.testing.assert_close(value, 0.5 * gradients[name], rtol=1e-5, atol=1e-9)


class Adapted(Block):
    """A frozen block with a small trained one beside it."""

    def __init__(self, width):
        super().__init__(width)
        for parameter in self.parameters():
            parameter.requires_grad_(False)
        self.adapter = nn.Linear(width, width)

    def forward(self, x):
        return super().forward(x) + self.adapter(x)


class AdaptedNet(OddNet):
    def __init__(self):
        super().__init__()
        for parameter in self.parameters():
            parameter.requires_grad_(False)
        width = self.blocks[0].up.in_features
        self.blocks = nn.ModuleList(Adapted(width) for _ in range(3))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_frozen_weights_that_stay_whole_are_never_sent(precision, ranks):
    """Gathers once per microbatch where weights stay for backward, and one sum: of adapters."""
    torch.manual_seed(3)
    model = shard(
        AdaptedNet(),
        None,
        {"*adapter*": 3, "*": 0},
        fsdp_unit_modules=[Adapted],
        reshard_after_forward=False,
        mixed_precision_policy=MixedPrecisionPolicy(param_dtype=precision),
    )
    adapters = [g for g in model.parameter_groups() if "adapter" in g.refs[0].name]
    assert len(adapters) == 3
    assert all(group.refs[0].parameter.requires_grad for group in adapters)
    itemsize = 4 if precision is None else 2
    sent = sum(group.layout.size // 2 * itemsize for group in adapters)
    for microbatch in range(2):
        with Ledger() as ledger:
            loss = model(inputs(model, 10 * microbatch + ranks.rank)).float().square().mean()
            loss.backward()
        assert ledger.bytes(axis="dp:gather") == sent
        assert ledger.bytes(op="reduce_scatter_fp32") == sent
        flags = ledger.bytes() - 2 * sent
        # A number for each trained parameter says who has a gradient, and one more whether one is
        # bad. Two ranks send an even number of them; 32 bytes are the digest of what they have in
        # common, and 16 that of their gathers.
        numbers = sum(len(group.refs) for group in adapters) + 1
        assert 0 <= flags <= 8 * (numbers + numbers % 2) + 48
        model.zero_grad()
    plan = memory_plan(model)
    frozen = sum(g.layout.size * itemsize for g in model.parameter_groups() if not g.requires_grad)
    adapted = sum(group.layout.size // 2 * 4 for group in adapters)  # main weights, and no others
    assert plan.weights == frozen + adapted
    assert plan.gathered <= 2 * max(group.layout.size * itemsize for group in adapters)


@pytest.mark.ranks(1)
def test_what_a_mapping_cannot_mean_is_refused_by_name(ranks):
    for mix, says in (
        ({"blocks.*": 3}, r"no pattern that .* matches: add one, such as '\*'"),
        ({"*lora*": 3, "*": 0}, r"zero_dp_strategy=\{'\*lora\*': ...\} matches nothing"),
        ({"*": 4}, "zero_dp_strategy=4 is not known"),
    ):
        model = OddNet()
        with pytest.raises(ValueError, match=says):
            shard(model, None, mix, world=1)
        assert not any(hasattr(p, "to_local") for p in model.parameters()), "half sharded"
    with pytest.raises(ValueError, match=r"check_order=True.*keeps weights whole"):
        shard(OddNet(), None, {"blocks.*": 1, "*": 0}, world=1, check_order=True)
