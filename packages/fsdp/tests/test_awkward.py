"""Cases that break wrappers silently. Each compares parameters and gradients with one process."""

import gc
import weakref

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from lamina.ddp import full_gradients, full_parameters
from lamina.fsdp import fully_shard
from lamina_testing.toys import Block, OddNet, TiedNet, inputs

STRATEGIES = pytest.mark.parametrize("strategy", [0, 1, 2, 3])


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01, foreach=False)


def build(make=OddNet):
    torch.manual_seed(3)
    return make()


def shard(model, optimizer, world, strategy, **settings):
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    settings.setdefault("fsdp_unit_modules", [Block])
    return fully_shard(model, optimizer, device_mesh=mesh, zero_dp_strategy=strategy, **settings)


def average(gradients_of_ranks):
    """What one process would compute: zeros where a rank has none, nothing where no rank has."""
    mean = {}
    for name in gradients_of_ranks[0]:
        found = [g[name] for g in gradients_of_ranks if g[name] is not None]
        if found:
            mean[name] = torch.stack(found).sum(0) / len(gradients_of_ranks)
    return mean


def expected(make, loss_of_rank, world, steps=3, prepare=lambda model: None):
    """Plain PyTorch: each rank's loss in turn, gradients averaged, one optimizer."""
    model = build(make)
    prepare(model)
    optimizer = sgd(model.parameters())
    mean = {}
    for step in range(steps):
        per_rank = []
        for rank in range(world):
            model.zero_grad()
            loss_of_rank(model, rank, step).backward()
            per_rank.append(
                {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
            )
        mean = average(per_rank)
        for name, parameter in model.named_parameters():
            parameter.grad = mean.get(name)
        optimizer.step()
    return dict(model.named_parameters()), mean


def check(make, loss_of_rank, ranks, strategy, steps=3, prepare=lambda model: None, **settings):
    model = build(make)
    prepare(model)
    model, optimizer = shard(model, sgd(model.parameters()), ranks.world_size, strategy, **settings)
    gradients = {}
    for step in range(steps):
        loss_of_rank(model, ranks.rank, step).backward()
        gradients = full_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    compare(model, gradients, expected(make, loss_of_rank, ranks.world_size, steps, prepare))


def assert_near(name, found, wanted):
    worst = (found - wanted).abs().max() if wanted.numel() else 0.0
    assert worst <= 2e-6, f"{name} is off by {worst}"


def compare(model, gradients, oracle):
    parameters, mean = oracle
    assert gradients.keys() == mean.keys()
    for name in mean:
        assert_near(name, gradients[name], mean[name])
    found = full_parameters(model)
    assert found.keys() == parameters.keys()
    for name in parameters:
        assert_near(name, found[name], parameters[name].detach())


def plain_loss(model, rank, step):
    return model(inputs(model, 10 * step + rank)).square().mean()


@pytest.mark.ranks(1, 2)
@STRATEGIES
def test_tied_and_reused_parameters(strategy, ranks):
    check(TiedNet, plain_loss, ranks, strategy)


@pytest.mark.ranks(2)
@STRATEGIES
def test_frozen_parameters_keep_their_values_and_have_no_gradient(strategy, ranks):
    def freeze(model):
        model.blocks[1].requires_grad_(False)
        model.enter.bias.requires_grad_(False)

    def loss(model, rank, step):  # another block is frozen for a step in between
        model.blocks[2].requires_grad_(step != 1)
        model.leave.weight.requires_grad_(step != 1)
        return plain_loss(model, rank, step)

    check(OddNet, loss, ranks, strategy, prepare=freeze)
    model = build()
    freeze(model)
    model, _ = shard(model, sgd(model.parameters()), ranks.world_size, strategy)
    model.blocks[1].requires_grad_(True)
    with pytest.raises(ValueError, match=r"blocks\.1\.\S+ was frozen when the model was wrapped"):
        plain_loss(model, ranks.rank, 0)


class Conditional(OddNet):
    """Uses its last block only when told to."""

    def forward(self, x, use_last=True, use_temperature=True):
        x = self.enter(x)
        for block in self.blocks[: 3 if use_last else 2]:
            x = block(x)
        x = self.leave(x)
        return x * self.temperature if use_temperature else x


@pytest.mark.ranks(2)
@STRATEGIES
def test_unused_on_all_ranks_has_no_gradient_and_is_not_decayed(strategy, ranks):
    def loss(model, rank, step):
        return model(inputs(model, 10 * step + rank), use_last=step == 1).square().mean()

    check(Conditional, loss, ranks, strategy)


@pytest.mark.ranks(2)
@STRATEGIES
def test_unused_on_some_ranks_counts_as_zero_there(strategy, ranks):
    def loss(model, rank, step):
        out = model(inputs(model, 10 * step + rank), use_temperature=rank == 1)
        return out.square().mean()

    check(Conditional, loss, ranks, strategy)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", [0, 1, 2])
def test_whole_blocks_unused_on_some_ranks_do_not_reorder_reductions(strategy, ranks):
    def loss(model, rank, step):
        out = model(inputs(model, 10 * step + rank), use_last=(rank + step) % 2 == 1)
        return out.square().mean()

    check(Conditional, loss, ranks, strategy)


@pytest.mark.ranks(2)
@STRATEGIES
def test_two_forwards_before_one_backward(strategy, ranks):
    def loss(model, rank, step):
        first = model(inputs(model, 100 * step + rank))
        second = model(inputs(model, 100 * step + rank + 50))
        return (first * second).mean()

    check(OddNet, loss, ranks, strategy)


@pytest.mark.ranks(2)
@STRATEGIES
def test_two_forwards_before_their_two_backwards(strategy, ranks):
    model = build()
    model, optimizer = shard(model, sgd(model.parameters()), 2, strategy)
    for step in range(3):
        losses = [model(inputs(model, 100 * step + ranks.rank + k)).mean() for k in (0, 50)]
        for loss in losses:
            loss.backward()
        gradients = full_gradients(model)
        optimizer.step()
        optimizer.zero_grad()

    def both(model, rank, step):
        return sum(model(inputs(model, 100 * step + rank + k)).mean() for k in (0, 50))

    compare(model, gradients, expected(OddNet, both, 2))


@pytest.mark.ranks(2)
@STRATEGIES
def test_a_second_backward_without_no_sync_adds_and_never_reduces_twice(strategy, ranks):
    model = build()
    model, optimizer = shard(model, sgd(model.parameters()), 2, strategy)
    for step in range(3):
        for k in (0, 50, 70):
            model(inputs(model, 100 * step + ranks.rank + k)).mean().backward()
        gradients = full_gradients(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)

    def three(model, rank, step):
        return sum(model(inputs(model, 100 * step + rank + k)).mean() for k in (0, 50, 70))

    compare(model, gradients, expected(OddNet, three, 2))


class Checkpointed(OddNet):
    """Recomputes each block in backward."""

    reentrant = False

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.leave(x) * self.temperature + self.empty.sum()


class CheckpointedReentrant(Checkpointed):
    reentrant = True


class CheckpointedSegment(OddNet):
    """Recomputes several units as one segment."""

    def forward(self, x):
        x = checkpoint(
            lambda y: self.blocks[1](self.blocks[0](y)), self.enter(x), use_reentrant=False
        )
        return self.leave(self.blocks[2](x)) * self.temperature + self.empty.sum()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("make", [Checkpointed, CheckpointedReentrant, CheckpointedSegment])
@STRATEGIES
def test_recomputation_around_units(strategy, make, ranks):
    check(make, plain_loss, ranks, strategy)


class ReusedReentrant(OddNet):
    """Reentrant recomputation of a block used twice fires its hooks twice in one backward."""

    def forward(self, x):
        x = self.enter(x)
        for block in (self.blocks[0], self.blocks[1], self.blocks[0], self.blocks[2]):
            x = checkpoint(block, x, use_reentrant=True)
        return self.leave(x) * self.temperature + self.empty.sum()


@pytest.mark.ranks(2)
@STRATEGIES
def test_reentrant_recomputation_of_a_reused_block(strategy, ranks):
    check(ReusedReentrant, plain_loss, ranks, strategy)


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


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("planted")


class FailingNet(OddNet):
    fail = False

    def forward(self, x):
        x = self.blocks[0](self.enter(x))
        if self.fail:
            x = Failing.apply(x)
        return self.leave(self.blocks[2](self.blocks[1](x))) * self.temperature + self.empty.sum()


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
    model.to("cpu")  # as trainers do: torch swaps what is sharded
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
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = fully_shard(
        build(), device_mesh=mesh, zero_dp_strategy=strategy, fsdp_unit_modules=[Block]
    )
    optimizer = sgd(model.parameters())
    for step in range(3):
        plain_loss(model, ranks.rank, step).backward()
        gradients = full_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
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
    for step in range(3):
        plain_loss(model, ranks.rank, step).backward()
        gradients = full_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
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
        assert [w() for w in watched if w() is not None] == []
    finally:
        gc.enable()


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
