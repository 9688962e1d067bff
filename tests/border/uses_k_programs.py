"""K: more of what training programs do: several models, other modes of torch, odd batches."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed.nn.functional
from border.case import STRATEGIES, Case, Net, sgd
from border.judge import use
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from lamina.ddp import ShardedOptimizer
from lamina.fsdp import fully_shard_optimizer

K = "More training programs"


class Same(Net):
    """As many outputs as inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.leave = nn.Linear(8, 5)


def _goal(out: Tensor, goal: float | Tensor = 1.0) -> Tensor:
    return (out.float() - goal).square().mean()


def _moved(case: Case, models: list[Any], starts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {
        f"{number} {name}": value
        for number, (model, start) in enumerate(zip(models, starts, strict=True))
        for name, value in case.moved(model, start).items()
    }


@use(K)
def two_models_against_each_other(case: Case):
    """A generator and a discriminator in turn; the one that rests is frozen"""
    judge, of_judge = case.setup()
    maker, of_maker = case.setup(case.net(Same))
    starts = [case.parameters(judge), case.parameters(maker)]
    for step in range(3):
        judge.requires_grad_(True)
        noise = case.rows(step + 50)
        made = maker(noise).detach().float()
        (_goal(judge(case.rows(step))) + _goal(judge(made), -1)).backward()
        of_judge.step()
        of_judge.zero_grad()
        judge.requires_grad_(False)
        _goal(judge(maker(noise).float())).backward()
        of_maker.step()
        of_maker.zero_grad()
    return _moved(case, [judge, maker], starts)


@use(K)
def two_heads_over_one_trunk(case: Case):
    """Two wrapped heads over one wrapped trunk, with a backward and an optimizer each"""
    made = [case.setup(case.net(net)) for net in (Same, Net, Net)]
    (trunk, one, two), optimizers = zip(*made, strict=True)
    starts = [case.parameters(model) for model in (trunk, one, two)]
    for step in range(3):
        hidden = trunk(case.rows(step)).float()
        _goal(one(hidden)).backward(retain_graph=True)
        _goal(two(hidden), -1).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return _moved(case, [trunk, one, two], starts)


@use(K)
def one_model_follows_another(case: Case):
    """A second wrapped model follows by p.data.mul_().add_() over both models' parameters"""
    model, optimizer = case.setup()
    follower, _ = case.setup()
    start = case.parameters(follower)

    def loss(model: Any, step: int) -> Tensor:
        with torch.no_grad():
            pairs = zip(model.parameters(), follower.parameters(), strict=True)
            for parameter, average in pairs:
                average.data.mul_(0.9).add_(parameter.data, alpha=0.1)
            goal = follower(case.rows(step)).float()
        return _goal(model(case.rows(step)), goal + 1)

    trained = case.train(model, optimizer, loss=loss)
    return {**trained, **_moved(case, [follower], [start])}


@use(K)
def functional_call_of_the_model(case: Case):
    """torch.func.functional_call(model, dict(model.named_parameters()), x)"""

    def loss(model: Any, step: int) -> Tensor:
        return _goal(functional_call(model, dict(model.named_parameters()), case.rows(step)))

    return case.train(*case.setup(), loss=loss)


@use(K)
def inner_steps_that_are_differentiated(case: Case):
    """MAML: autograd.grad(create_graph=True), then functional_call with the changed parameters"""

    def loss(model: Any, step: int) -> Tensor:
        own = dict(model.named_parameters())
        inner = torch.autograd.grad(
            _goal(model(case.rows(step))), list(own.values()), create_graph=True
        )
        changed = {
            name: parameter - 0.1 * gradient
            for (name, parameter), gradient in zip(own.items(), inner, strict=True)
        }
        return _goal(functional_call(model, changed, case.rows(step + 9)))

    return case.train(*case.setup(), 2, loss=loss)


@use(K)
def closure_of_several_forwards(case: Case):
    """torch.optim.LBFGS"""
    model, optimizer = case.setup(
        make=lambda parameters: torch.optim.LBFGS(parameters, 0.1, 3, history_size=2)
    )
    start = case.parameters(model)
    for step in range(2):

        def closure(step: int = step) -> float:
            optimizer.zero_grad()
            loss = case.loss(model, step)
            loss.backward()
            return case.mean(loss).item()

        optimizer.step(closure)
    return case.moved(model, start)


@use(K)
def two_optimizers_in_turn(case: Case):
    """Two optimizers over parts of the model, each stepping in turn"""
    model = case.wrap_model(case.net())
    core = case.core(model)
    outer = [*core.enter.parameters(), *core.leave.parameters()]
    optimizers = [sgd(core.blocks.parameters()), sgd(outer, 0.05)]
    if case.column == "ddp_sharded":
        optimizers = [ShardedOptimizer(each, model, case.mesh) for each in optimizers]
    elif case.column in STRATEGIES:
        optimizers = [fully_shard_optimizer(each, model) for each in optimizers]
    start = case.parameters(model)
    for step in range(4):
        case.loss(model, step).backward()
        optimizers[step % 2].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return case.moved(model, start)


@use(K)
def adversarial_inputs(case: Case):
    """Steps on the input by autograd.grad, then training on the input that came of it"""

    def loss(model: Any, step: int) -> Tensor:
        x = case.rows(step)
        for _ in range(2):
            x.requires_grad_()
            (gradient,) = torch.autograd.grad((model(x).float() - 1).square().sum(), [x])
            x = (x + 0.05 * gradient).detach()
        return _goal(model(x))

    return case.train(*case.setup(), loss=loss)


@use(K)
def features_of_all_ranks(case: Case):
    """torch.distributed.nn.functional.all_gather inside the loss"""

    def loss(model: Any, step: int) -> Tensor:
        features = model(case.rows(step)).float()
        if not case.plain:
            features = torch.cat(torch.distributed.nn.functional.all_gather(features))
        return _goal(features @ features.T)

    return case.train(*case.setup(), loss=loss)


@use(K)
def state_carried_between_steps(case: Case):
    """A state that is handed on, and detached between steps"""
    carried = [torch.zeros_like(case.rows(0))]

    def loss(model: Any, step: int) -> Tensor:
        total = torch.zeros(())
        state = carried[0].detach()
        for part in range(3):
            state = model(case.rows(3 * step + part) + state).float().tanh()
            total = total + _goal(state)
        carried[0] = state
        return total

    return case.train(*case.setup(case.net(Same)), loss=loss)


@use(K)
def empty_batch_on_one_rank(case: Case):
    """One rank's batch has no rows in one step"""

    def loss(model: Any, step: int) -> Tensor:
        x = case.rows(step)
        if step == 1:
            x = x[4:] if case.plain or case.rank == 0 else x
        return (model(x).float() - 1).square().sum() / (8 if case.plain else 4)

    return case.train(*case.setup(), loss=loss)


@use(K)
def best_state_is_kept_and_loaded(case: Case):
    """Copies of both state_dict()s are loaded after further steps, and training goes on"""
    model, optimizer = case.setup()
    case.train(model, optimizer, 2)
    best = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    case.train(model, optimizer, 2, begin=2)
    model.load_state_dict(best[0])
    optimizer.load_state_dict(best[1])
    return case.train(model, optimizer, 2, begin=5)


@use(K)
def norm_and_clip_in_two_calls(case: Case):
    """torch.nn.utils.get_total_norm and clip_grads_with_norm_"""
    model, optimizer = case.setup()
    start = case.parameters(model)
    for step in range(3):
        case.loss(model, step).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        whole = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, whole)
        optimizer.step()
        optimizer.zero_grad()
    return case.moved(model, start)


@use(K)
def adafactor_of_torch(case: Case):
    """torch.optim.Adafactor"""
    return case.train(*case.setup(make=lambda p: torch.optim.Adafactor(p, lr=0.05)))


@use(K)
def inference_mode_comes_first(case: Case):
    """The first forward is under torch.inference_mode, and training follows"""
    model, optimizer = case.setup()
    with torch.inference_mode():
        model(case.rows(0))
    return case.train(model, optimizer)


@use(K)
def inference_mode_between_forward_and_backward(case: Case):
    """An evaluation under torch.inference_mode between forward and backward"""

    def loss(model: Any, step: int) -> Tensor:
        trained = case.loss(model, step)
        with torch.inference_mode():
            model(case.rows(step + 7))
        return trained

    return case.train(*case.setup(), loss=loss)


@use(K)
def wrapped_under_inference_mode(case: Case):
    """The wrapping happens under torch.inference_mode"""
    net = case.net()
    if case.plain:
        return case.train(*case.setup(net))
    with torch.inference_mode():
        model, optimizer = case.setup(net)
    return case.train(model, optimizer)


@use(K, says=("weight", "inference_mode"), refused=True)
def made_under_inference_mode(case: Case):
    """The model is made under torch.inference_mode"""
    with torch.inference_mode():
        net = case.net()
    return case.train(*case.setup(net))


@use(K)
def memory_filled_for_determinism(case: Case):
    """torch.use_deterministic_algorithms(True), which fills new memory with NaN"""
    torch.use_deterministic_algorithms(True)
    try:
        return case.train(*case.setup())
    finally:
        torch.use_deterministic_algorithms(False)


@use(K)
def operations_are_counted(case: Case):
    """FlopCounterMode around forward, backward and step"""
    model, optimizer = case.setup()
    with FlopCounterMode(display=False):
        return case.train(model, optimizer)


@use(K)
def loader_with_workers(case: Case):
    """A DataLoader with two forked workers, which is made after wrapping"""
    model, optimizer = case.setup()
    start = case.parameters(model)
    batches = [case.rows(step) for step in range(3)]
    for x in DataLoader(batches, batch_size=None, num_workers=2):  # type: ignore[arg-type]
        _goal(model(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return case.moved(model, start)


class Renormed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 8, max_norm=0.5)

    def forward(self, x: Tensor) -> Tensor:
        ids = (x[:, 0] * 3).long().clamp(0, 5)
        return super().forward(x) + self.leave(self.table(ids))


@use(K, says=("table.weight", "max_norm", "renorm"), refused=True)
def embedding_with_max_norm(case: Case):
    """nn.Embedding(max_norm=), whose forward rewrites the rows of its batch"""
    return case.train(*case.setup(case.net(Renormed)))


class Lazy(Net):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.LazyLinear(8)


@use(K, says=("enter",), refused=True)
def lazy_layer_without_values(case: Case):
    """nn.LazyLinear that has seen no batch"""
    return case.train(*case.setup(case.net(Lazy)))
