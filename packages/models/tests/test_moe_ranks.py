"""Experts over ranks: awkward loads, what overlaps, what the host waits for, weights in and out."""

from __future__ import annotations

import re
import sys
import warnings
from contextlib import ExitStack
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch.distributed.tensor.parallel import parallelize_module

from lamina.collectives import Ledger
from lamina.ddp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    ShardedOptimizer,
    finalize_grads,
)
from lamina.ddp.engine import finalize_plain_gradients
from lamina.fsdp import fully_shard
from lamina.mesh import LayoutError, ParallelLayout, role_of, seed_everything
from lamina.models import (
    GPTModel,
    MoEConfig,
    MoELayer,
    RoutingContext,
    TopKRouter,
    TransformerConfig,
    apply_recompute,
    preset,
    routing_statistics,
    tensor_parallel_plan,
    to_huggingface,
)
from lamina.models.engine import cut_weight
from lamina_testing import delayed_collectives, device_type
from lamina_testing.walk import path_in_lamina

from . import moe_oracle

MOE = MoEConfig(num_experts=4, top_k=2, ffn_size=8)
CONFIG = TransformerConfig(
    vocab_size=32, hidden_size=16, num_layers=2, num_heads=2, ffn_size=24, init_std=0.3, moe=MOE
)


def draw(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def pair(mesh, sequence_parallel=False, **moe):
    """The same layer over ranks and whole."""
    config = replace(CONFIG, sequence_parallel=sequence_parallel, moe=replace(MOE, **moe))
    made = []
    for where in (mesh, None):
        torch.manual_seed(1)
        made.append(MoELayer(config, where).double())
    return made


# Tokens of each rank, top_k, and the expert that every token goes to first (None: all sorts).
LOADS = {
    "unequal": ((7, 2), 2, None),
    "one": ((1, 0), 1, 3),
    "none here": ((0, 5), 2, 0),
    "fewer than experts": ((1, 1), 1, None),
    "all to one expert, so one rank gets nothing": ((4, 4), 1, 3),
    "all to one expert first": ((4, 4), 2, 3),
}


def force(layers, pieces, expert):
    """Let every token prefer one expert, by its first element."""
    for piece in pieces:
        piece[:, 0] = 5.0
    for made in layers:
        with torch.no_grad():
            made.router.weight[:, 0] = -5.0
            made.router.weight[expert, 0] = 5.0


@pytest.mark.ranks(2)
@pytest.mark.parametrize("axes", [{"ep": 2}, {"tp": 2, "expert_tp": 2}], ids=["ep", "expert_tp"])
@pytest.mark.parametrize("dispatcher", ["all_to_all", "all_gather"])
def test_any_number_of_tokens_and_any_load_equals_one_process(dispatcher, axes, ranks):
    mesh = ParallelLayout(**axes).build(device_type())
    for tokens, top_k, expert in LOADS.values():
        moe = {"dispatcher": dispatcher, "top_k": top_k, "normalize_weights": top_k > 1}
        layer, whole = pair(mesh, "tp" in axes, num_experts=6, **moe)
        pieces = [draw(count, 16, seed=i) for i, count in enumerate(tokens)]
        if expert is not None:
            force((layer, whole), pieces, expert)
        oracle = moe_oracle.LoopMoE(moe_oracle.weights_of(whole), whole.router.moe)
        together = torch.cat(pieces)
        oracle.sets = [list(range(len(together)))]
        everything = together.clone().requires_grad_()
        expected = oracle(everything)
        expected.sin().sum().backward()
        mine = pieces[ranks.rank].clone().requires_grad_()
        found = layer(mine)
        found.sin().sum().backward()
        own = slice(0, tokens[0]) if ranks.rank == 0 else slice(tokens[0], None)
        torch.testing.assert_close(found, expected[own], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(mine.grad, everything.grad[own], rtol=1e-10, atol=1e-10)
        for one, both in ((layer.experts.up, oracle.up), (layer.experts.down, oracle.down)):
            role = role_of(one)
            dim = role.tp_shard_dim or 0
            expected = cut_weight(both.grad, dim, ranks.rank, 2, role.tp_blocks)
            torch.testing.assert_close(one.grad, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("fixed", [{}, {"capacity_factor": 1.0, "pad_to_capacity": True}], ids=str)
def test_shared_experts_compute_while_tokens_travel(fixed, ranks):
    mesh = ParallelLayout(ep=2).build(device_type())
    layer, _ = pair(mesh, shared_ffn_size=8, **fixed)
    x = draw(4, 16).requires_grad_()
    layer(x).sum().backward()  # makes the groups
    with delayed_collectives(0.2) as log:
        layer.shared.up.register_forward_hook(lambda *_: log.mark("up"))
        layer.shared.down.register_forward_hook(lambda *_: log.mark("down"))
        layer.shared.down.register_full_backward_hook(lambda *_: log.mark("down backward"))
        layer.shared.up.register_full_backward_hook(lambda *_: log.mark("up backward"))
        layer(x).sum().backward()
    # Rows travel, and nothing else does, when each half of the shared expert runs.
    for name in ("up", "down", "down backward", "up backward"):
        flying = log.in_flight_at(log.marked(name))
        assert {event.group for event in flying} == {"dp_shard:tokens"}, name
        # A message in and one out are rows; counts are smaller. A lane's thread issues one after
        # the other, so on a busy machine one of them may be on its way alone.
        assert all(event.size >= 2 * 16 * 8 for event in flying), name


@pytest.mark.ranks(2)
def test_the_host_waits_for_the_device_once_per_layer(ranks):
    """Backward included, where an auxiliary loss comes in; in float32, as grouped_mm takes it."""
    mesh = ParallelLayout(ep=2).build(device_type())
    fixed = {"capacity_factor": 1.0, "pad_to_capacity": True}
    for moe, expected in (({}, 1), ({"dispatcher": "all_gather"}, 1), (fixed, 0)):
        layer = pair(mesh, switch_loss=0.1, **moe)[0].float()
        x = draw(4, 16).float().requires_grad_()
        context = RoutingContext()
        layer(x, context)  # a forward's first layer asks for the size of messages, hosts among them
        seen = []
        with ExitStack() as patches:
            for name in ("tolist", "item", "__bool__", "__int__", "nonzero"):
                method = watch(getattr(torch.Tensor, name), seen)
                patches.enter_context(mock.patch.object(torch.Tensor, name, method))
            for name in ("tensor", "as_tensor"):  # copies to the device
                function = watch(getattr(torch, name), seen)
                patches.enter_context(mock.patch.object(torch, name, function))
            layer(x, context).sum().backward()
        assert len(seen) == expected, (moe, seen)


def watch(function, seen):
    def watched(*args, **settings):
        # Sums on a CPU look at numbers of their own, which no device has to finish first.
        if path_in_lamina(sys._getframe(1).f_code.co_filename).startswith("models/"):
            seen.append(function.__name__)
        return function(*args, **settings)

    return watched


@pytest.mark.ranks(2)
def test_messages_of_fixed_size_are_as_large_as_the_fullest_rank_needs(ranks):
    """Also where one rank alone has other numbers of tokens than before."""
    mesh = ParallelLayout(ep=2).build(device_type())
    limits = {"capacity_factor": 1.0, "switch_loss": 0.1}
    fixed, free = (pair(mesh, pad_to_capacity=pad, **limits)[0] for pad in (True, False))
    for tokens in ((4, 4), (4, 7), (9, 7), (0, 3)):
        found = []
        for layer in (fixed, free):
            layer.zero_grad()
            x = draw(tokens[ranks.rank], 16, seed=ranks.rank).requires_grad_()
            y = layer(x)
            y.sin().sum().backward()
            found.append([y.detach(), x.grad, *(p.grad for p in layer.parameters())])
        torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
    fixed.eval()(draw(4 + ranks.rank, 16))  # sends what there is
    # The layers of a model ask once, and nobody asks when blocks run again.
    config = replace(CONFIG, moe=replace(MOE, capacity_factor=1.0, pad_to_capacity=True))
    model = apply_recompute(GPTModel(config, mesh, seed=1), "full")
    with Ledger() as ledger:
        model(*moe_oracle.text(2 + ranks.rank)).backward()
    assert [record.op for record in ledger.records].count("all_reduce_small") == 1


@pytest.mark.ranks(2)
def test_jitter_is_drawn_alike_where_tokens_are_and_once_more_in_recomputation(ranks):
    for axes, sequence_parallel, alike in (
        ({"tp": 2, "expert_tp": 2}, False, True),
        ({"tp": 2}, True, False),
        ({"ep": 2}, False, False),
        ({"ep": 2, "cp": 2}, False, False),
    ):
        mesh = ParallelLayout(**axes).build(device_type())
        moe = replace(MOE, jitter=0.5, switch_loss=0.1)
        config = replace(CONFIG, sequence_parallel=sequence_parallel, moe=moe)
        gradients = []
        for recompute in ("none", "full", "selective"):
            model = apply_recompute(GPTModel(config, mesh, seed=1), recompute)
            routed = []
            for block in model.blocks:
                block.mlp.router.register_forward_hook(kept_in(routed))
            if alike and recompute == "none":  # ranks that nobody seeded may draw differently
                with pytest.raises(KeyError, match="seed_everything"):
                    model(*moe_oracle.text(2))
            seed_everything(7, mesh).begin_training()
            model(*moe_oracle.text(2)).backward()
            gradients.append([p.grad for p in model.parameters()])
            if recompute == "full":
                assert len(routed) == 4
                for one, again in zip(routed[:2], routed[:1:-1], strict=True):
                    assert torch.equal(one.experts, again.experts)
                    assert torch.equal(one.weights, again.weights)
        for found in gradients[1:]:
            assert all(map(torch.equal, found, gradients[0]))
        mine = model.blocks[0].mlp.router.score(draw(4, 16))[0].detach()
        both = [torch.empty_like(mine) for _ in range(2)]
        torch.distributed.all_gather(both, mine)
        assert torch.equal(*both) is alike, axes


@pytest.mark.ranks(2)
def test_auxiliary_losses_weigh_the_same_beside_a_loss_of_the_users(ranks):
    """Beside the whole logits, which every rank of cp has, as beside the model's own loss."""
    config = replace(CONFIG, moe=replace(MOE, switch_loss=0.1, z_loss=0.1))
    tokens, labels = moe_oracle.text(2)
    for axes in ({"cp": 2}, {}):
        model = GPTModel(config, ParallelLayout(**axes).build(device_type()), seed=1).double()
        model(tokens, labels).backward()
        expected = [p.grad.clone() for p in model.parameters()]
        for scale in (1.0, 0.5):
            model.zero_grad()
            model.auxiliary_scale = scale
            logits = model(tokens)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            (loss * scale).backward()
            found = [p.grad / scale for p in model.parameters()]
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.ranks(2)
def test_a_layer_of_the_users_own_follows_a_loss_over_cp(ranks):
    """Each rank has half of a sequence and the mean over it; ranks are averaged."""
    layer, whole = pair(ParallelLayout(cp=2).build(device_type()), switch_loss=0.1, z_loss=0.1)
    x = draw(1, 8, 16)
    whole(x).sin().mean().backward()
    context = RoutingContext()
    loss = layer(x.chunk(2, 1)[ranks.rank], context).sin().mean()
    context.scale.follow(loss, 2.0)
    loss.backward()
    for mine, expected in zip(layer.parameters(), whole.parameters(), strict=True):
        torch.distributed.all_reduce(mine.grad)
        torch.testing.assert_close(mine.grad / 2, expected.grad, rtol=1e-9, atol=1e-12)


def kept_in(outputs):
    return lambda module, inputs, output: outputs.append(output)


@pytest.mark.ranks(4)
def test_weights_do_not_depend_on_the_layout_and_export_whole(ranks):
    mesh = ParallelLayout(dp_shard=2, tp=2, ep=2, expert_tp=2).build(device_type())
    config = preset(
        "deepseek-v3", vocab_size=32, hidden_size=16, num_layers=2, num_heads=2, ffn_size=24,
        sequence_parallel=True,
        moe=replace(preset("deepseek-v3").moe, num_experts=4, top_k=2, ffn_size=8,
                    shared_ffn_size=8, num_groups=2, groups_kept=1, first_dense=1),
    )  # fmt: skip
    model, whole = GPTModel(config, mesh, seed=4), GPTModel(config, seed=4)
    held = model.blocks[1].mlp.experts
    assert held.up.shape == (2, 8, 16)
    assert held.down.shape == (2, 16, 4)
    exported, expected = to_huggingface(model), to_huggingface(whole)
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], value) for name, value in expected.items())


@pytest.mark.ranks(2)
def test_a_whole_model_is_cut_in_place(ranks):
    mesh = ParallelLayout(tp=2, expert_tp=2).build(device_type())
    config = replace(CONFIG, moe=replace(MOE, bias_rate=0.1, switch_loss=0.1))
    whole, model = GPTModel(config, seed=2).double(), GPTModel(config, seed=2).double()
    with torch.no_grad():
        for made in (whole, model):
            made.blocks[0].mlp.router.expert_bias[0] = 0.3
    tokens = torch.randint(0, 32, (2, 9), generator=torch.Generator().manual_seed(1))
    for sequence_parallel in (False, True):
        cut = GPTModel(config, seed=2).double()
        cut.load_state_dict(whole.state_dict())
        plan = tensor_parallel_plan(cut, sequence_parallel=sequence_parallel)
        cut = parallelize_module(cut, mesh["tp"], plan)
        assert cut.blocks[0].mlp.experts.up.shape == (4, 8, 16)
        loss, expected = (made(tokens[:, :-1], tokens[:, 1:]) for made in (cut, whole))
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.ranks(2)
def test_bare_copies_of_experts_are_not_left_apart(ranks):
    mesh = ParallelLayout(tp=2).build(device_type())  # expert_dp is 2
    model = GPTModel(replace(CONFIG, sequence_parallel=True), mesh, seed=1)
    with pytest.raises(ValueError, match="2 ranks hold copies of the same experts"):
        finalize_plain_gradients(model, mesh)


@pytest.mark.ranks(2)
def test_a_loop_that_never_ends_a_step_is_told_so_once(ranks):
    """As the optimizer steps where it knows the wrapper, at the next forward elsewhere."""
    mesh = ParallelLayout().build(device_type())
    for wrapper in ("fully_shard", "ShardedOptimizer"):
        assert warnings_of_steps(wrapper, mesh, [True, False, False, False]) == [0, 1, 0, 0]
    for wrapper in ("ddp", "bare", 3):
        assert warnings_of_steps(wrapper, mesh, [True, False, False, False]) == [0, 0, 1, 0]
    for wrapper in (0, 1, 2):
        assert warnings_of_steps(wrapper, mesh, [True, True]) == [0, 0]


def warnings_of_steps(wrapper, mesh, ended):
    """How often steps of two microbatches warned; a number shards the model, not the optimizer."""
    model = GPTModel(replace(CONFIG, moe=replace(MOE, bias_rate=0.1)), seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    settings = DistributedDataParallelConfig(use_distributed_optimizer=wrapper != "ddp")
    if wrapper == "fully_shard":
        model, optimizer = fully_shard(model, optimizer, device_mesh=mesh)
    elif isinstance(wrapper, int):
        model = fully_shard(model, device_mesh=mesh, zero_dp_strategy=wrapper)
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    elif wrapper != "bare":
        model = DistributedDataParallel(model, settings, mesh)
        if wrapper == "ShardedOptimizer":
            optimizer = ShardedOptimizer(optimizer, model, mesh)
    routers = [module for module in model.modules() if isinstance(module, TopKRouter)]
    heard = []
    for ends in ended:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                model(*moe_oracle.text(2)).backward()
            if ends and wrapper != "bare":
                finalize_grads(model, mesh)
            elif ends:
                for router in routers:
                    router.finalize_step(None)
            optimizer.step()
            optimizer.zero_grad()
        said = [str(w.message) for w in caught if "finalize_grads" in str(w.message)]
        if wrapper in ("fully_shard", "ShardedOptimizer"):
            assert all(re.search(r"steps, and .*blocks\.0\.mlp\.router", x) for x in said)
        heard.append(len(said))
    return heard


@pytest.mark.ranks(2)
def test_a_global_loss_over_ranks_that_the_model_does_not_know_is_refused(ranks):
    mesh = ParallelLayout().build(device_type())
    config = replace(CONFIG, moe=replace(MOE, global_loss=0.1))
    for where in (None, mesh):
        model = fully_shard(GPTModel(config, where, seed=1), device_mesh=mesh)
        model(*moe_oracle.text(2)).backward()
        if where is None:
            with pytest.raises(
                ValueError, match=r"2 ranks of dp .* build GPTModel\(config, mesh\)"
            ):
                finalize_grads(model, mesh)
        else:
            finalize_grads(model, mesh)


@pytest.mark.ranks(2)
def test_losses_are_averaged_over_the_microbatches_of_all_ranks(ranks):
    mesh = ParallelLayout(cp=2, ep=2).build(device_type())  # two parts of one microbatch
    apart = ParallelLayout().build(device_type())  # two ranks of other sequences
    for where, counts in ((mesh, (2, 2)), (apart, (2, 1))):
        layer = MoELayer(replace(CONFIG, moe=replace(MOE, z_loss=0.1)), where).double()
        forwards = [draw(4, 16, seed=8 * ranks.rank + i) for i in range(counts[ranks.rank])]
        for x in forwards:
            layer(x)
        with torch.no_grad():
            scores = torch.cat(forwards) @ layer.router.weight.T
        own = 0.1 * scores.logsumexp(-1).square().sum() / 4
        torch.distributed.all_reduce(own)
        own /= 4 if where is mesh else 3
        found = routing_statistics(torch.nn.Sequential(layer), where)["0.router"]
        assert found.losses["z"] == pytest.approx(own.item())


@pytest.mark.ranks(2)
def test_meshes_that_would_count_tokens_twice_are_refused(ranks):
    with pytest.raises(LayoutError, match="needs sequence parallelism"):
        GPTModel(CONFIG, ParallelLayout(tp=2, ep=2).build(device_type()))
    config = replace(CONFIG, moe=replace(MOE, num_experts=5))
    with pytest.raises(ValueError, match=r"num_experts 5 is not divisible by ep 2 \(remainder 1\)"):
        MoELayer(config, ParallelLayout(ep=2).build(device_type()))
