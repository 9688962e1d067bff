"""Steps that break wrappers silently. Parameters and gradients are compared with one process."""

import gc
import weakref

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from lamina.ddp import full_gradients, full_parameters
from lamina.fsdp import fully_shard
from lamina_testing import device_type, not_freed
from lamina_testing.toys import Block, OddNet, inputs

from .one_process import (
    STRATEGIES,
    Conditional,
    FailingNet,
    assert_near,
    build,
    compare,
    expected,
    plain_loss,
    sgd,
    shard,
    train,
)


@pytest.mark.matrix(few=2)
@pytest.mark.ranks(2)
@STRATEGIES
def test_gradient_only_in_the_last_microbatch(strategy, ranks):
    model = build(Conditional)
    model, optimizer = shard(model, sgd(model.parameters()), 2, strategy)
    for step in range(3):
        with model.no_sync():
            model(inputs(model, 10 * step + ranks.rank), use_last=False).mean().backward()
        model(inputs(model, 10 * step + ranks.rank + 5)).mean().backward()
        gradients = full_gradients(model)
        optimizer.step()
        optimizer.zero_grad()

    def both(model, rank, step):
        first = model(inputs(model, 10 * step + rank), use_last=False).mean()
        return first + model(inputs(model, 10 * step + rank + 5)).mean()

    compare(model, gradients, expected(Conditional, both, 2))


@pytest.mark.ranks(2)
@STRATEGIES
def test_gradient_only_in_the_first_microbatch(strategy, ranks):
    model = build(Conditional)
    model, optimizer = shard(model, sgd(model.parameters()), 2, strategy)
    for step in range(3):
        with model.no_sync():
            model(inputs(model, 10 * step + ranks.rank)).mean().backward()
        model(inputs(model, 10 * step + ranks.rank + 5), use_last=False).mean().backward()
        gradients = full_gradients(model)
        optimizer.step()
        optimizer.zero_grad()

    def both(model, rank, step):
        first = model(inputs(model, 10 * step + rank)).mean()
        return first + model(inputs(model, 10 * step + rank + 5), use_last=False).mean()

    compare(model, gradients, expected(Conditional, both, 2))


@pytest.mark.ranks(2)
@STRATEGIES
def test_an_exception_in_backward_leaves_nothing_behind(strategy, ranks):
    model = build(FailingNet)
    model, optimizer = shard(model, sgd(model.parameters()), 2, strategy)
    for step in range(3):
        if step == 1:
            model.fail = True
            with pytest.raises(RuntimeError, match="planted"):
                plain_loss(model, ranks.rank, 77).backward()
            model.fail = False
            optimizer.zero_grad()
        loss = plain_loss(model, ranks.rank, step)
        if step == 2:  # another one raises after this one's forward
            model.fail = True
            with pytest.raises(RuntimeError, match="planted"):
                plain_loss(model, ranks.rank, 78).backward()
            model.fail = False
        loss.backward()
        gradients = full_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    compare(model, gradients, expected(FailingNet, plain_loss, 2))


@pytest.mark.ranks(2)
@STRATEGIES
def test_evaluation_between_backward_and_step_does_not_hide_the_update(strategy, ranks):
    model = build()
    model, optimizer = shard(model, sgd(model.parameters()), 2, strategy)
    model.to(device_type())  # as trainers do: torch swaps what is sharded
    for step in range(3):
        with torch.no_grad():
            model(inputs(model, 5))
        plain_loss(model, ranks.rank, step).backward()
        with torch.inference_mode():
            model(inputs(model, 6))
        gradients = full_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    compare(model, gradients, expected(OddNet, plain_loss, 2))
    reference = build()
    with torch.no_grad():
        for name, value in full_parameters(model).items():
            reference.get_parameter(name).copy_(value)
        torch.testing.assert_close(model(inputs(model, 9)), reference(inputs(model, 9)))


@pytest.mark.ranks(2)
@STRATEGIES
def test_an_optimizer_nobody_was_told_of_still_takes_effect(strategy, ranks):
    """Built after sharding and not given to fully_shard: the next forward uses its weights."""
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))
    model = fully_shard(
        build(), device_mesh=mesh, zero_dp_strategy=strategy, fsdp_unit_modules=[Block]
    )
    optimizer = sgd(model.parameters())
    gradients = train(model, optimizer, plain_loss, ranks.rank)
    compare(model, gradients, expected(OddNet, plain_loss, 2))


@pytest.mark.ranks(2)
@STRATEGIES
def test_zero_grad_between_microbatches_discards_them(strategy, ranks):
    model = build()
    model, optimizer = shard(model, sgd(model.parameters()), 2, strategy)
    for step in range(3):
        with model.no_sync():
            plain_loss(model, ranks.rank, step + 31).backward()
        optimizer.zero_grad()
        plain_loss(model, ranks.rank, step).backward()
        gradients = full_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    compare(model, gradients, expected(OddNet, plain_loss, 2))


@pytest.mark.ranks(2)
@STRATEGIES
def test_ranks_that_start_from_different_weights_train_the_first_ranks(strategy, ranks):
    torch.manual_seed(3 if ranks.rank == 0 else 99)
    model = OddNet()
    model, optimizer = shard(model, sgd(model.parameters()), 2, strategy)
    gradients = train(model, optimizer, plain_loss, ranks.rank)
    compare(model, gradients, expected(OddNet, plain_loss, 2))


@pytest.mark.ranks(2)
@STRATEGIES
def test_clip_grad_norm_of_torch_gives_the_global_norm(strategy, ranks):
    model = build()
    model, _ = shard(model, sgd(model.parameters()), 2, strategy)
    reference = build()
    loss = sum(plain_loss(reference, rank, 0) for rank in range(2)) / 2
    loss.backward()
    expected_norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
    plain_loss(model, ranks.rank, 0).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    torch.testing.assert_close(float(norm), float(expected_norm), rtol=1e-6, atol=0)
    for name, gradient in full_gradients(model).items():
        torch.testing.assert_close(gradient, reference.get_parameter(name).grad, atol=1e-7, rtol=0)


@pytest.mark.ranks(2)
@STRATEGIES
def test_deleting_the_model_frees_it_without_the_garbage_collector(strategy, ranks):
    gc.collect()
    gc.disable()
    try:
        model = build()
        model, optimizer = shard(model, sgd(model.parameters()), 2, strategy)
        plain_loss(model, ranks.rank, 0).backward()
        optimizer.step()
        watched = [weakref.ref(model), weakref.ref(model.blocks[0].up)]
        watched += [weakref.ref(g) for g in model.parameter_groups()]
        del model, optimizer
        assert not_freed(watched) == []
    finally:
        gc.enable()


@pytest.mark.matrix(few=2)
@pytest.mark.ranks(2)
@STRATEGIES
def test_groups_hyperparameters_and_schedulers_survive(strategy, ranks):
    def optimizer_of(model):
        decay = [p for p in model.parameters() if p.dim() > 1]
        rest = [p for p in model.parameters() if p.dim() <= 1]
        return torch.optim.AdamW(
            [
                {"params": decay, "weight_decay": 0.3, "lr": 0.01},
                {"params": rest, "weight_decay": 0.0, "lr": 0.02, "betas": (0.5, 0.6)},
            ],
            foreach=False,
        )

    model = build()
    optimizer = optimizer_of(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    before = optimizer
    model, optimizer = shard(model, optimizer, 2, strategy)
    assert optimizer is before
    reference = build()
    plain = optimizer_of(reference)
    plain_scheduler = torch.optim.lr_scheduler.LambdaLR(plain, lambda step: 1 / (1 + step))
    for step in range(4):
        plain_loss(model, ranks.rank, step).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        sum(plain_loss(reference, rank, step) / 2 for rank in range(2)).backward()
        plain.step()
        plain_scheduler.step()
        plain.zero_grad()
    for name, value in full_parameters(model).items():
        torch.testing.assert_close(
            value, reference.get_parameter(name).detach(), atol=2e-5, rtol=0, msg=name
        )


def loss_with_penalty(model, rank, step):
    """Gradients of the last block, which the forward leaves out, come from the penalty alone."""
    out = model(inputs(model, 10 * step + rank), use_last=False)
    return out.square().mean() + sum(p.square().sum() for p in model.parameters())


@pytest.mark.ranks(2)
def test_a_gradient_that_comes_before_any_output_begins_the_backward(ranks):
    """Under strategy 0 the module's parameters are the optimizer's, so a penalty reaches them."""
    model = build(Conditional)
    model, optimizer = shard(model, sgd(model.parameters()), 2, 0)
    gradients = train(model, optimizer, loss_with_penalty, ranks.rank)
    compare(model, gradients, expected(Conditional, loss_with_penalty, 2))
    with model.no_sync():
        plain_loss(model, ranks.rank, 4).backward()
    loss_with_penalty(model, ranks.rank, 5).backward()
    alone = build(Conditional)
    alone.load_state_dict(full_parameters(model))
    for rank in range(2):
        both = plain_loss(alone, rank, 4) + loss_with_penalty(alone, rank, 5)
        (both / 2).backward()
    found = full_gradients(model)
    for name, parameter in alone.named_parameters():
        assert_near(name, found[name], parameter.grad)


@pytest.mark.ranks(1)
def test_without_its_wrapper_a_parameter_keeps_its_gradient(ranks):
    model = build(OddNet)
    weight = model.enter.weight
    model, _ = shard(model, sgd(model.parameters()), 1, 0)
    del model
    gc.collect()
    weight.square().sum().backward()
    assert torch.equal(weight.grad, 2 * weight.detach())
