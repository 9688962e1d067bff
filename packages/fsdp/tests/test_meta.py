"""A model built on the meta device gets the values it would have had, one unit at a time."""

import copy
import gc
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lamina.ddp import full_parameters
from lamina.fsdp import fully_shard, shard_module
from lamina.fsdp.settings.meshes import computing_device
from lamina.fsdp.units.materialise import move_buffers
from lamina.mesh import mark, role_of
from lamina.models import GPTModel, TransformerConfig
from lamina_testing import Meter, device_type
from lamina_testing.toys import Block, ConvNet, OddNet

STRATEGIES = pytest.mark.parametrize("strategy", [3, 1])


def on_meta(make):
    with torch.device("meta"):
        return make()


def shard(model, world, strategy=3, **settings):
    mesh = init_device_mesh(device_type(), (world,), mesh_dim_names=("dp",))
    return fully_shard(model, device_mesh=mesh, zero_dp_strategy=strategy, **settings)


def config(**settings):
    return TransformerConfig(
        num_layers=2, hidden_size=32, num_heads=2, vocab_size=67, max_sequence_length=16, **settings
    )


@pytest.mark.ranks(2)
@pytest.mark.parametrize("settings", [{}, {"tie_embeddings": True}, {"positions": "learned"}])
@STRATEGIES
def test_a_gpt_has_the_bits_of_one_made_whole(strategy, settings, ranks):
    torch.manual_seed(5)
    whole = GPTModel(config(**settings))
    torch.manual_seed(5)
    meta = on_meta(lambda: GPTModel(config(**settings)))
    roles = {name: role_of(parameter) for name, parameter in whole.named_parameters()}
    model = shard(meta, 2, strategy)
    found = full_parameters(model)
    assert found.keys() == roles.keys()
    for name, value in whole.named_parameters():
        assert torch.equal(found[name], value), name
    assert {name: role_of(p) for name, p in model.named_parameters()} == roles
    tokens = torch.randint(0, 67, (2, 16))
    with torch.no_grad():
        assert torch.equal(model(tokens), whole(tokens))


class Rotary(nn.Module):
    """Owns a table and nothing else."""

    def __init__(self, dim=8):
        super().__init__()
        self.dim = dim
        self.register_buffer("inverse", torch.empty(dim // 2), persistent=False)
        self.reset_parameters()

    def reset_parameters(self):
        powers = torch.arange(0, self.dim, 2, device=self.inverse.device) / self.dim
        self.inverse.copy_(1.0 / 10000**powers)

    def forward(self, x):
        return x * self.inverse.sum()


class AttentionBlock(nn.Module):
    """torch's attention resets its children's biases after they were drawn."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm = nn.BatchNorm1d(16)
        self.rotary = Rotary()

    def forward(self, x):
        return self.rotary(x + self.attention(x, x, x, need_weights=False)[0])


class AttentionNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(AttentionBlock() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.ranks(2)
@STRATEGIES
def test_modules_are_initialised_in_the_order_of_construction(strategy, ranks):
    """With all parameters in blocks, even one generator for all gives the same bits."""
    torch.manual_seed(8)
    whole = AttentionNet()
    torch.manual_seed(8)
    model = shard(on_meta(AttentionNet), 2, strategy)
    found = full_parameters(model)
    for name, value in whole.named_parameters():
        assert torch.equal(found[name], value), name
    buffers = dict(model.named_buffers())
    for name, value in whole.named_buffers():
        assert torch.equal(buffers[name], value), name


class TiedBias(nn.Module):
    """The head's weight is the embedding's; its bias is in another unit than the weight."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(29, 12)
        self.blocks = nn.ModuleList(Block(12) for _ in range(2))
        self.head = nn.Linear(12, 29)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.ranks(2)
def test_a_tied_weight_has_the_first_holders_values_whatever_unit_the_others_are_in(ranks):
    model = shard(on_meta(TiedBias), 2, fsdp_unit_modules=[Block, nn.Linear])
    weight = full_parameters(model)["embedding.weight"]
    assert 0.8 < weight.std() < 1.2, "an embedding's normal values, not a linear layer's"
    model(torch.zeros(1, 3, dtype=torch.long)).sum().backward()


@pytest.mark.ranks(2)
def test_values_that_are_there_already_stay(ranks):
    torch.manual_seed(ranks.rank)
    model = on_meta(OddNet)
    model.enter = nn.Linear(5, 17)
    nn.init.constant_(model.enter.weight, 3.0)
    model.temperature = nn.Parameter(torch.tensor(0.5))
    found = full_parameters(shard(model, 2))
    assert bool((found["enter.weight"] == 3.0).all())
    assert found["temperature"] == 0.5


class Unknown(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))


class Forgetful(nn.Linear):
    """Has a way to initialise, which forgets the buffer."""

    def __init__(self):
        super().__init__(4, 4)
        self.register_buffer("table", torch.arange(4.0))


class Holder(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.parts = nn.ModuleList([make(), make()])


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Unknown, r"Unknown at parts\.0 .* gave scale first values: it has no reset_parameters"),
        (
            Forgetful,
            r"Forgetful at parts\.0 .* gave table first values: its reset_parameters\(\)"
            r".* build the model anew",
        ),
    ],
)
def test_a_module_without_a_way_to_initialise_is_named(make, message, ranks):
    model = on_meta(lambda: nn.ModuleList([Block(4), Block(4), Holder(make)]))
    with pytest.raises(ValueError, match=message.replace("at parts", r"at 2\.parts")):
        shard(model, 1)
    if make is Unknown:  # said before any unit was sharded
        assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.ranks(1)
def test_init_module_is_called_for_every_module_children_first(ranks):
    called = []

    def init(module):
        called.append(type(module).__name__)
        for parameter in module.parameters(recurse=False):
            nn.init.constant_(parameter, 2.0)

    model = shard(on_meta(lambda: Holder(Parent)), 1, init_module=init)
    assert called == ["Unknown", "Sequential", "Parent"] * 2
    assert all(bool((value == 2.0).all()) for value in full_parameters(model).values())


class Parent(nn.Module):
    """Owns nothing itself."""

    def __init__(self):
        super().__init__()
        self.inside = nn.Sequential(Unknown())

    def forward(self, x):
        return self.inside(x)


class Marked(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 8) for _ in range(2))
        mark(self.parts[0].weight, tp_grad="sum")
        mark(self.parts[1].weight, expert=True)
        self.parts[1].weight.is_special = True


@pytest.mark.ranks(2)
def test_roles_and_users_marks_survive(ranks):
    model = shard(on_meta(Marked), 2)
    assert role_of(model.parts[0].weight).tp_grad == "sum"
    assert role_of(model.parts[1].weight).expert
    assert model.parts[1].weight.is_special


WIDTH, DEPTH = 64, 6


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(DEPTH))


@pytest.mark.ranks(4)
def test_no_rank_ever_holds_more_than_its_shards_and_one_unit(ranks):
    """Without the broadcast, whose tensor gloo's thread may hold a moment longer than the wait."""
    model = on_meta(Deep)
    gc.collect()
    with Meter() as meter:
        before = meter.live_bytes()
        meter.reset()
        model = shard(model, 4, sync_module_states=False)
        peak = meter.peak_live_bytes - before
    units = [4 * group.layout.size for group in model.parameter_groups()]
    shards = 2 * sum(units) // 4  # weights and main grads
    # Another flat tensor of a unit would be 100 KiB; what is left are flags and handles.
    assert peak <= shards + max(units) + 2048, f"{(peak - shards) / max(units):.2f} units above"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("given", [False, True], ids=["own mesh", "given mesh"])
def test_a_model_that_is_sharded_while_tensors_are_made_on_meta_takes_a_state(given, ranks):
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",)) if given else None
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(2)))
        for layer in model:
            shard_module(layer, mesh)
        shard_module(model, mesh)
    torch.manual_seed(5)
    wanted = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(2))).state_dict()
    model.load_state_dict(wanted)
    for name, value in full_parameters(model).items():
        assert torch.equal(value, wanted[name]), name
    model(torch.ones(2, 4)).sum().backward()


@pytest.mark.ranks(1)
def test_module_by_module_holds_no_more_than_shards_and_one_unit(ranks):
    """On one rank, whose shards are whole: no broadcast holds on to a unit."""
    model = on_meta(Deep)
    mesh = init_device_mesh(device_type(), (1,), mesh_dim_names=("dp",))
    gc.collect()
    with Meter() as meter:
        before = meter.live_bytes()
        meter.reset()
        for block in model.blocks:
            shard_module(block, mesh)
        peak = meter.peak_live_bytes - before
    units = [4 * block.sharding_unit.groups[0].layout.size for block in model.blocks]
    assert peak <= 2 * sum(units) + max(units) + 4096, f"{(peak - 2 * sum(units)) / max(units):.2f}"


@pytest.mark.slow
@pytest.mark.ranks(2, timeout=300)
def test_models_of_transformers_start_on_meta_with_their_own_initialisation(ranks):
    from transformers.models.gpt2 import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel
    from transformers.models.llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    gpt2 = GPT2Config(vocab_size=67, n_positions=32, n_embd=32, n_layer=2, n_head=2)
    llama = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        vocab_size=67, max_position_embeddings=32,
    )  # fmt: skip
    for make in (lambda: GPT2LMHeadModel(gpt2), lambda: LlamaForCausalLM(llama)):
        torch.manual_seed(4)
        whole = make().eval()
        meta = on_meta(make).eval()
        model = shard(meta, 2, init_module=meta._init_weights)
        assert len(model.sharding_engine.units) == 3
        found = full_parameters(model)
        for name, value in whole.named_parameters():
            assert abs(float(found[name].std()) - float(value.detach().std())) < 0.004, name
            assert abs(float(found[name].mean()) - float(value.detach().mean())) < 0.004, name
        buffers = dict(model.named_buffers())
        for name, value in whole.named_buffers():
            assert torch.equal(buffers[name], value), name
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 4, dtype=torch.long))


def test_a_model_computes_where_it_was_asked_to_else_where_its_mesh_is():
    model, meta = nn.Linear(2, 2), torch.device("meta")
    cpus, others = SimpleNamespace(device_type="cpu"), SimpleNamespace(device_type="meta")
    assert computing_device(model, cpus, None) == torch.device("cpu")
    assert computing_device(model, cpus, "meta") == meta
    assert computing_device(model, others, None) == meta, "moved to the mesh's device"
    assert computing_device(model.to_empty(device="meta"), cpus, None) == torch.device("cpu")


@pytest.mark.ranks(1)
def test_a_model_that_has_values_is_moved_to_where_it_computes(ranks):
    """Where no accelerator is: what the groups are told, and what becomes of buffers."""
    model = ConvNet()
    sharded = fully_shard(model, device="cpu")
    assert {group.settings.device for group in sharded.parameter_groups()} == {torch.device("cpu")}
    model = ConvNet()
    model.head.register_buffer("seen", model.seen)
    move_buffers(model.modules(), torch.device("meta"))
    assert model.seen.is_meta
    assert model.head.seen is model.seen


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.inside = kind(5, 4, num_layers=2, batch_first=True)
        self.leave = nn.Linear(4, 2)

    def forward(self, x):
        return self.leave(self.inside(x)[0])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_recurrent_modules_come_from_meta_and_are_copied(kind, ranks):
    """They refer to their parameters weakly, and torch swaps no tensor that somebody refers to."""
    with torch.device("meta"):
        model = Recurrent(kind)
    model = fully_shard(model, fsdp_unit_modules=[kind])
    plain, copied = Recurrent(kind), copy.deepcopy(model)
    plain.load_state_dict(full_parameters(model))
    for each in (model, copied, plain):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        each(torch.ones(2, 3, 5)).square().mean().backward()
        optimizer.step()
    for each in (model, copied):
        for name, value in full_parameters(each).items():
            torch.testing.assert_close(value, plain.get_parameter(name).detach())
