"""`shard_module`, used as torch FSDP2's `fully_shard` is: one call per block, then the root."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy

from lamina.collectives import Ledger
from lamina.ddp import full_gradients, full_parameters
from lamina.fsdp import UnavailableError, fully_shard, fully_shard_optimizer, shard_module
from lamina_testing import not_freed
from lamina_testing.toys import Block, OddNet, TiedNet, inputs

from .module_models import assert_same, build, loss_of, mesh_of, one_line, run, sgd, sharded


@pytest.mark.matrix(strength=1)
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("reshard", [None, True, False, 1])
def test_bottom_up_calls_train_as_the_one_line_does(reshard, ranks):
    mesh = mesh_of(ranks.world_size)
    model = sharded(mesh, reshard_after_forward=reshard)
    gradients, parameters = run(model, sgd(model), ranks.rank)
    wanted_gradients, wanted = one_line(mesh, ranks.rank)
    assert_same(gradients, wanted_gradients)
    assert_same(parameters, wanted)


@pytest.mark.ranks(4, timeout=180)  # on virtual GPUs all kernels are interpreted
def test_two_dimensions_replicate_and_shard(ranks):
    mesh = mesh_of(2, 2)
    model = sharded(mesh)
    _, parameters = run(model, sgd(model), ranks.rank)
    _, wanted = one_line(mesh, ranks.rank, dp_shard_dim="shard", dp_outer_dim="replicate")
    assert_same(parameters, wanted)


@pytest.mark.ranks(2)
def test_an_optimizer_that_is_told_steps_over_flat_shards(ranks):
    mesh = mesh_of(2)
    model = sharded(mesh)
    optimizer = fully_shard_optimizer(sgd(model), model)
    _, parameters = run(model, optimizer, ranks.rank)
    _, wanted = one_line(mesh, ranks.rank)
    assert_same(parameters, wanted)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("reshard", "again"), [(True, 2), (False, 0), (None, 1)])
def test_reshard_after_forward_decides_what_backward_gathers_again(reshard, again, ranks):
    """Of three blocks and the root: the last block is never given back."""
    model = sharded(mesh_of(2), reshard_after_forward=reshard)
    optimizer = sgd(model)
    for _ in range(2):
        loss = loss_of(model, 0, ranks.rank)
        with Ledger() as ledger:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    gathers = [r for r in ledger.records if r.communicator == "shard:gather"]
    assert len(gathers) == {2: 3, 0: 0, 1: 2}[again]


@pytest.mark.ranks(2)
def test_records_and_errors_give_parameters_their_names_in_the_whole_model(ranks):
    """A module is sharded before the model around it is known, and so before its full name is."""

    def purposes(model):
        with Ledger() as ledger:
            loss_of(model, 0, ranks.rank).backward()
        records = ledger.records
        return {r.purpose for r in records if r.op in ("all_gather_into", "reduce_scatter_fp32")}

    mesh = mesh_of(2)
    model = sharded(mesh)
    wanted = purposes(fully_shard(build(), device_mesh=mesh, fsdp_unit_modules=[Block]))
    assert len(wanted) > 2
    assert purposes(model) == wanted

    model.blocks[1].up.weight.register_post_accumulate_grad_hook(lambda p: {}[p])
    with pytest.raises(RuntimeError, match=r"a hook of blocks\.1\.up\.weight looked"):
        loss_of(model, 1, ranks.rank).backward()


@pytest.mark.ranks(2)
def test_parameters_are_sharded_before_the_model_runs(ranks):
    model = sharded(mesh_of(2))
    held = sum(p.to_local().numel() for p in model.parameters())
    total = sum(p.numel() for p in build().parameters())
    assert held < 0.7 * total
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in build().named_parameters()]
    assert isinstance(model, OddNet)


@pytest.mark.ranks(2)
def test_ignored_parameters_stay_as_they_are(ranks):
    model = build()
    ignored = model.leave.weight
    shard_module(model, mesh_of(2), ignored_params={ignored})
    assert model.leave.weight is ignored
    loss_of(model, 0, ranks.rank).backward()
    assert ignored.grad.shape == ignored.shape
    assert "leave.weight" not in full_parameters(model)


@pytest.mark.ranks(2)
def test_torchs_mixed_precision_policy_is_taken(ranks):
    model = build()
    for module in (*model.blocks, model):
        policy = TorchPolicy(
            param_dtype=torch.bfloat16,
            reduce_dtype=torch.float32,
            output_dtype=torch.float32 if module is model else None,
        )
        shard_module(module, mesh_of(2), mp_policy=policy)
    seen = []
    model.blocks[0].up.register_forward_pre_hook(
        lambda module, args: seen.append((module.weight.dtype, args[0].dtype))
    )
    out = model(inputs(model, 0))
    assert seen == [(torch.bfloat16, torch.bfloat16)]
    assert out.dtype == torch.float32
    with Ledger() as ledger:
        out.sum().backward()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    wires = {r.dtype for r in ledger.records if r.op == "reduce_scatter_fp32"}
    assert {str(wire).removeprefix("torch.") for wire in wires} == {"float32"}


@pytest.mark.ranks(2)
def test_unshard_and_reshard_one_module(ranks):
    model = sharded(mesh_of(2))
    optimizer = sgd(model)
    whole = build().blocks[0].up.weight
    handle = model.blocks[0].unshard(async_op=True)
    handle.wait()
    assert torch.equal(model.blocks[0].up.weight, whole)
    assert hasattr(model.blocks[1].up.weight, "to_local"), "unshard is not recursive"
    model.blocks[0].reshard()
    assert hasattr(model.blocks[0].up.weight, "to_local")
    with torch.no_grad():
        model.blocks[0].unshard()
    assert torch.equal(model.blocks[0].up.weight, whole)
    handle = model.blocks[1].unshard(async_op=True)
    _, parameters = run(model, optimizer, ranks.rank)  # the root is the outermost all the same
    handle.wait()
    assert hasattr(model.blocks[1].up.weight, "to_local"), "its forward has used the gather up"
    assert_same(parameters, one_line(mesh_of(2), ranks.rank)[1])


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "method", ["set_requires_gradient_sync", "set_requires_all_reduce", "set_is_last_backward"]
)
def test_accumulation_by_flag_equals_no_sync(method, ranks):
    results = []
    for flags in (True, False):
        model = sharded(mesh_of(2))
        for m in range(3):
            if flags:
                getattr(model, method)(m == 2)
                loss_of(model, m, ranks.rank).backward()
                assert model.sharding_engine.reducer.is_final is (m == 2)
            else:
                with model.no_sync() if m < 2 else torch.enable_grad():
                    loss_of(model, m, ranks.rank).backward()
        results.append(full_gradients(model))
    assert_same(*results)


@pytest.mark.ranks(2)
def test_prefetch_lists_say_what_is_gathered_ahead(ranks):
    model = sharded(mesh_of(2))
    optimizer = sgd(model)
    run(model, optimizer, ranks.rank, steps=1)
    ahead = model.blocks[2]
    model.blocks[0].set_modules_to_forward_prefetch([ahead])
    seen = []
    model.blocks[0].norm.register_forward_pre_hook(
        lambda *_: seen.append([b.sharding_unit.gathered[0].state.name for b in model.blocks])
    )
    loss_of(model, 1, ranks.rank)
    assert seen[0][1] == "RELEASED"
    assert seen[0][2] in ("GATHERING", "READY", "IN_USE")
    with pytest.raises(ValueError, match="Linear"):
        model.set_modules_to_forward_prefetch([model.enter])


@pytest.mark.ranks(2)
def test_set_reshard_after_forward_reaches_all_parts(ranks):
    model = sharded(mesh_of(2))
    model.set_reshard_after_forward(False)
    loss = loss_of(model, 0, ranks.rank)
    states = [b.sharding_unit.gathered[0].state.name for b in model.blocks]
    assert states == ["IN_USE"] * 3
    loss.backward()


@pytest.mark.ranks(2)
def test_fully_shards_model_has_fsdp2s_methods_and_its_units_too(ranks):
    settings = {"device_mesh": mesh_of(2), "fsdp_unit_modules": [Block]}
    model = fully_shard(build(), reshard_after_forward=False, **settings)
    units = [model.unit_of(name) for name in ("", "blocks.0", "blocks.1", "blocks.2")]
    assert list(model.sharding_units()) == units
    states = lambda: [u.gathered[0].state.name for u in units]  # noqa: E731
    optimizer = sgd(model)
    loss_of(model, 0, ranks.rank)
    assert states() == ["IN_USE"] * 4
    units[1].set_reshard_after_forward(True)
    loss_of(model, 0, ranks.rank).backward()
    loss = loss_of(model, 0, ranks.rank)
    assert states() == ["IN_USE", "RELEASED", "IN_USE", "IN_USE"]
    del loss
    model.set_requires_gradient_sync(False)
    loss_of(model, 0, ranks.rank).backward()
    model.set_requires_gradient_sync(True)
    optimizer.zero_grad()
    run(model, optimizer, ranks.rank, steps=1)
    model.set_reshard_after_forward(True)
    model.set_modules_to_forward_prefetch([model.blocks[1]])
    assert units[0].prefetch == {1: (units[2],)}
    loss = loss_of(model, 1, ranks.rank)
    assert states() == ["RELEASED"] * 3 + ["IN_USE"]
    loss.backward()
    model.unshard()
    assert states() == ["IN_USE"] + ["RELEASED"] * 3
    model.reshard()
    units[3].unshard()
    assert model.blocks[2].up.weight.shape == (51, 17)
    units[3].reshard()
    with pytest.raises(ValueError, match=r"blocks\.0\.up is no unit .* the root, blocks\.0"):
        model.unit_of("blocks.0.up")
    for wrong in ({"reshard_after_forward": 2}, {"zero_dp_strategy": 2}):
        with pytest.raises(ValueError, match="reshard_after_forward"):
            fully_shard(build(), **{"reshard_after_forward": False, **settings, **wrong})


@pytest.mark.ranks(2)
def test_what_cannot_be_honoured_is_refused(ranks):
    mesh = mesh_of(2)
    with pytest.raises(UnavailableError, match="reshard_after_forward=3"):
        shard_module(build(), mesh, reshard_after_forward=3)
    with pytest.raises(TypeError, match="offload_policy"):
        shard_module(build(), mesh, offload_policy="cpu")
    with pytest.raises(TypeError, match="mp_policy"):
        shard_module(build(), mesh, mp_policy=torch.bfloat16)
    model = sharded(mesh)
    with pytest.raises(RuntimeError, match="sharded already"):
        shard_module(model, mesh)
    with pytest.raises(RuntimeError, match="sharded already"):
        fully_shard(model, device_mesh=mesh)
    with pytest.raises(UnavailableError, match="set_requires_gradient_sync"):
        model.set_requires_gradient_sync(False, recurse=False)
    with pytest.raises(UnavailableError, match="set_reshard_after_backward"):
        model.set_reshard_after_backward(False)


@pytest.mark.ranks(2)
def test_a_weight_tied_across_units_is_refused_by_name(ranks):
    model = build(TiedNet)
    shard_module(model.embedding, mesh_of(2))
    with pytest.raises(ValueError, match=r"head\.weight"):
        shard_module(model, mesh_of(2))


@pytest.mark.ranks(2)
def test_a_block_used_before_its_root_is_named(ranks):
    mesh = mesh_of(2)
    model = sharded(mesh)
    model.blocks[1].zero_grad()  # no use: there is nothing to forget
    model(inputs(model, 0))
    model = sharded(mesh)
    model.blocks[1](torch.randn(2, 17))
    with pytest.raises(RuntimeError, match=r"blocks\.1 was called"):
        model(inputs(model, 0))


@pytest.mark.ranks(2)
def test_blocks_alone_are_models_of_their_own(ranks):
    model = build()
    for block in model.blocks:
        shard_module(block, mesh_of(2))
    loss_of(model, 0, ranks.rank).backward()
    reference = build()
    for rank in range(2):
        (loss_of(reference, 0, rank) / 2).backward()
    torch.testing.assert_close(
        full_gradients(model.blocks[1])["up.weight"], reference.blocks[1].up.weight.grad
    )


@pytest.mark.ranks(2)
def test_meta_modules_are_materialised_call_by_call(ranks):
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)))
    for block in model:
        shard_module(block, mesh_of(2))
    shard_module(model, mesh_of(2))
    model(torch.randn(2, 8)).sum().backward()
    assert all(not p.is_meta for p in model.parameters())


@pytest.mark.ranks(2)
def test_state_loads_into_the_one_lines_model(ranks):
    model = sharded(mesh_of(2))
    run(model, sgd(model), ranks.rank)
    other = build()
    with torch.no_grad():
        other.enter.weight.zero_()
    other = fully_shard(other, device_mesh=mesh_of(2), fsdp_unit_modules=[Block])
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(other(inputs(other, 5)), model(inputs(model, 5)))


@pytest.mark.ranks(2)
def test_deleting_the_model_frees_it(ranks):
    gc.collect()
    gc.disable()
    try:
        model = sharded(mesh_of(2))
        loss_of(model, 0, ranks.rank).backward()
        watched = [weakref.ref(model), *map(weakref.ref, model.parameter_groups())]
        del model
        assert not_freed(watched) == []
    finally:
        gc.enable()


@pytest.mark.ranks(2, timeout=120)
def test_a_compiled_root_is_called_again(ranks):
    """What torch compiles at the first call, in which the engine is made, is not for the second."""
    models = [build(lambda: nn.Sequential(nn.Linear(5, 3), nn.ReLU())) for _ in range(2)]
    optimizers = [sgd(models[0])]
    compiled = torch.compile(shard_module(models[1], mesh_of(2)), backend="eager")
    optimizers.append(sgd(compiled))
    for step in range(3):
        batch = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        for model, optimizer in zip([models[0], compiled], optimizers, strict=True):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, value in full_parameters(models[1]).items():
        torch.testing.assert_close(value, models[0].get_parameter(name).detach())


@pytest.mark.ranks(2, timeout=120)
def test_torch_compile_of_the_root_may_make_the_first_call(ranks):
    """Also where the root has parameters of its own, which are released at that moment."""
    mesh = mesh_of(2)
    model = sharded(mesh)
    optimizer = sgd(model)
    forward = torch.compile(model, backend="eager")
    for step in range(3):
        forward(inputs(model, 10 * step + ranks.rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    _, wanted = one_line(mesh, ranks.rank)
    assert_same(full_parameters(model), wanted)
