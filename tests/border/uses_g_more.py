"""Everyday uses that are not on any list: each wrapper has to bear them."""

from __future__ import annotations

import gc
from contextlib import nullcontext, suppress

import torch
from border.case import OURS, STRATEGIES, TORCH, Block, Case, Net, sgd
from border.judge import use
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

G = "Everyday uses"


@use(G)
def plain_steps(case: Case):
    """Three steps of SGD"""
    return case.train(*case.setup())


@use(G)
def adam_steps(case: Case):
    """Three steps of AdamW"""
    return case.train(*case.setup(None, lambda ps: torch.optim.AdamW(ps, lr=0.05, eps=0.05)))


@use(G)
def groups_of_parameters(case: Case):
    """Two parameter groups with their own learning rates"""

    def make(parameters):
        parameters = list(parameters)
        return torch.optim.SGD(
            [{"params": parameters[::2], "lr": 0.1}, {"params": parameters[1::2], "lr": 0.01}]
        )

    return case.train(*case.setup(None, make))


@use(
    G,
    refused=True,
    says=("written outside of an optimizer's step", "rank 1", "all ranks"),
    # docs/open.md: ZeRO-1 of DDP waits. An optimizer that Lamina was not told of, as `shard_module`
    # has here, hides a write to a rank's own span, with which all ranks compute.
    columns=(*STRATEGIES, "ddp", *TORCH),
)
def weight_written_on_one_rank(case: Case):
    """One rank alone halves a weight between a step and the next forward"""
    model, optimizer = case.setup()
    case.train(model, optimizer, 1)
    if case.rank == 1:
        with torch.no_grad():
            optimizer.param_groups[0]["params"][0].mul_(0.5)
    case.loss(model, 1).backward()
    return {}


@use(G)
def learning_rate_schedule(case: Case):
    """A scheduler made before wrapping where the wrapper takes the optimizer"""
    model, optimizer = case.setup()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    start = case.parameters(model)
    for step in range(3):
        case.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return case.moved(model, start)


@use(G)
def frozen_block(case: Case):
    """A block with `requires_grad_(False)` before wrapping"""
    model = case.net()
    model.blocks[0].requires_grad_(False)
    return case.train(*case.setup(model, lambda ps: sgd([p for p in ps if p.requires_grad])))


@use(G)
def unfrozen_after_wrapping(case: Case):
    """A block that was frozen at wrapping is unfrozen, and the optimizer made then"""
    model = case.net()
    model.blocks[0].requires_grad_(False)
    model = case.wrap_model(model)
    case.core(model).blocks[0].requires_grad_(True)
    optimizer = sgd([p for p in model.parameters() if p.requires_grad])
    return case.train(model, optimizer)


@use(G)
def frozen_after_wrapping(case: Case):
    """A block is frozen after wrapping"""
    model, optimizer = case.setup()
    case.core(model).blocks[0].requires_grad_(False)
    return case.train(model, optimizer)


@use(G)
def frozen_and_unfrozen_between_steps(case: Case):
    """A block is frozen for the second of three steps"""
    model, optimizer = case.setup(None, lambda ps: sgd(ps))
    start = case.parameters(model)
    for step in range(3):
        case.core(model).blocks[0].requires_grad_(step != 1)
        case.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return case.moved(model, start)


class Unused(Net):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(8, 8)


@use(G, columns=(*OURS, "fsdp2"))
def parameters_that_nothing_uses(case: Case):
    """A submodule that no forward calls"""
    return case.train(*case.setup(case.net(Unused)))


class Twice(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in (self.blocks[0], self.blocks[1], self.blocks[0]):
            x = block(x)
        return self.leave(x)


@use(G)
def block_used_twice(case: Case):
    """A block that runs twice in a forward"""
    return case.train(*case.setup(case.net(Twice)))


@use(G)
def two_forwards_then_one_backward(case: Case):
    """Two forwards whose losses are added before one backward"""
    model, optimizer = case.setup()
    return case.train(
        model, optimizer, loss=lambda m, s: (case.loss(m, s) + case.loss(m, s + 10)) / 2
    )


@use(G)
def two_forwards_then_two_backwards(case: Case):
    """Two forwards, then their two backwards"""
    model, optimizer = case.setup()
    start = case.parameters(model)
    for step in range(2):
        first, second = case.loss(model, step), case.loss(model, step + 10)
        first.backward()
        second.backward()
        optimizer.step()
        optimizer.zero_grad()
    return case.moved(model, start)


@use(G)
def backward_twice_through_one_graph(case: Case):
    """`backward(retain_graph=True)` and again"""
    model, optimizer = case.setup()
    start = case.parameters(model)
    for step in range(2):
        loss = case.loss(model, step)
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return case.moved(model, start)


@use(G)
def evaluation_between_forward_and_backward(case: Case):
    """A forward under no_grad between a forward and its backward"""
    model, optimizer = case.setup()
    start = case.parameters(model)
    for step in range(2):
        loss = case.loss(model, step)
        with torch.no_grad():
            case.loss(model, 7)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return case.moved(model, start)


@use(G)
def evaluation_mode_and_back(case: Case):
    """`model.eval()`, a forward under inference_mode, `model.train()`"""
    model, optimizer = case.setup()
    start = case.parameters(model)
    seen = []
    for step in range(2):
        case.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.inference_mode():
            seen.append(float(case.loss(model, 0).clone()))
        model.train()
    total = case.mean(torch.tensor(seen))
    return {**case.moved(model, start), "seen": total}


class Checkpointed(Net):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.leave(x)


class Reentrant(Checkpointed):
    reentrant = True


@use(G)
def activations_recomputed(case: Case):
    """`checkpoint(block, x, use_reentrant=False)` inside the model"""
    return case.train(*case.setup(case.net(Checkpointed)))


@use(G, columns=(*OURS, "fsdp2"))
def activations_recomputed_reentrantly(case: Case):
    """`checkpoint(block, x, use_reentrant=True)` inside the model"""
    return case.train(*case.setup(case.net(Reentrant)))


@use(G)
def gradients_scaled_by_hand(case: Case):
    """`p.grad.mul_(0.5)` on the optimizer's parameters before the step"""
    model, optimizer = case.setup()
    start = case.parameters(model)
    for step in range(3):
        case.loss(model, step).backward()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return case.moved(model, start)


@use(G)
def gradients_replaced_by_hand(case: Case):
    """`p.grad = p.grad * 0.5` on the optimizer's parameters before the step"""
    model, optimizer = case.setup()
    start = case.parameters(model)
    for step in range(3):
        case.loss(model, step).backward()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = parameter.grad * 0.5
        optimizer.step()
        optimizer.zero_grad()
    return case.moved(model, start)


@use(G)
def gradients_set_to_none_by_hand(case: Case):
    """`p.grad = None` for one parameter before the step"""
    model, optimizer = case.setup()
    start = case.parameters(model)
    for step in range(3):
        case.loss(model, step).backward()
        optimizer.param_groups[0]["params"][0].grad = None
        optimizer.step()
        optimizer.zero_grad()
    return case.moved(model, start)


@use(G)
def zero_grad_in_place(case: Case):
    """`optimizer.zero_grad(set_to_none=False)`"""
    model, optimizer = case.setup()
    start = case.parameters(model)
    for step in range(3):
        case.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return case.moved(model, start)


@use(G)
def zero_grad_of_the_model(case: Case):
    """`model.zero_grad()` instead of the optimizer's"""
    model, optimizer = case.setup()
    start = case.parameters(model)
    for step in range(3):
        case.loss(model, step).backward()
        optimizer.step()
        model.zero_grad()
    return case.moved(model, start)


@use(G)
def gradients_accumulated_without_no_sync(case: Case):
    """Two backwards before a step, without `no_sync`"""
    model, optimizer = case.setup()
    start = case.parameters(model)
    for step in range(2):
        for micro in range(2):
            (case.loss(model, 2 * step + micro) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return case.moved(model, start)


@use(G)
def step_without_backward(case: Case):
    """`optimizer.step()` before any backward"""
    model, optimizer = case.setup()
    optimizer.step()
    return case.train(model, optimizer, 1)


@use(G)
def closure_is_given(case: Case):
    """`optimizer.step(closure)`"""
    model, optimizer = case.setup()
    start = case.parameters(model)
    losses = []
    for step in range(2):

        def closure(step=step):
            optimizer.zero_grad()
            loss = case.loss(model, step)
            loss.backward()
            return loss

        losses.append(case.mean(optimizer.step(closure)))
    return {**case.moved(model, start), "losses": torch.stack(losses)}


@use(G)
def forward_hooks(case: Case):
    """Forward hooks on blocks, before and after wrapping"""
    model = case.net()
    seen: list[float] = []
    model.blocks[0].register_forward_hook(lambda m, a, out: out * 2)
    model, optimizer = case.setup(model)
    case.core(model).blocks[1].register_forward_hook(lambda m, a, out: seen.append(1.0))
    return {**case.train(model, optimizer), "calls": len(seen)}


@use(G)
def backward_hooks_of_modules(case: Case):
    """`register_full_backward_hook` on a block"""
    model, optimizer = case.setup()
    calls = []
    case.core(model).blocks[0].register_full_backward_hook(lambda *_: calls.append(1))
    return {**case.train(model, optimizer), "calls": len(calls)}


@use(G)
def autocast_around_forward(case: Case):
    """`torch.autocast("cpu", torch.bfloat16)` around forward"""
    model, optimizer = case.setup()

    def loss(m, step):
        with nullcontext() if case.plain else torch.autocast("cpu", torch.bfloat16):
            return case.loss(m, step)

    results = case.train(model, optimizer, 1, loss=loss)
    return {k: v.sign() * 0 + v.norm().log2().round() for k, v in results.items() if "moved" in k}


class Dictionary(Net):
    def forward(self, x: Tensor, scale: float = 1.0, *, extra: dict | None = None) -> dict:
        out = super().forward(x) * scale
        return {"logits": out, "extra": [out.mean(), None, extra]}


@use(G)
def keyword_arguments_and_dictionaries(case: Case):
    """Inputs by keyword, outputs in dictionaries and lists"""
    model, optimizer = case.setup(case.net(Dictionary))

    def loss(m, step):
        out = m(x=case.rows(step), scale=2.0, extra={"a": 1})
        return (out["logits"].float() - 1).square().mean() + out["extra"][0].float()

    return case.train(model, optimizer, loss=loss)


@use(G, columns=(*OURS, "fsdp2"))
def part_of_the_model_is_called(case: Case):
    """A block is called by itself, and its output has a loss of its own"""
    model, optimizer = case.setup()
    core = case.core(model)

    def loss(m, step):
        side = core.blocks[0](case.rows(step, (8,)))
        return case.loss(m, step) + side.float().square().mean()

    return case.train(model, optimizer, loss=loss)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.table((x[:, 0].float().abs() * 3).long() % 11)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@use(G)
def tied_weights(case: Case):
    """A head tied to the embedding before wrapping"""
    return case.train(*case.setup(case.net(Tied)))


@use(G, says=("leave.bias", "memory"), columns=(*OURS, "torch_ddp"))
def two_parameters_over_one_memory(case: Case):
    """Two parameters that are views of the same memory"""
    model = case.net()
    model.leave.bias = nn.Parameter(model.enter.bias.data[:3])
    return case.train(*case.setup(model))


@use(G, columns=(*OURS, "torch_ddp"))
def parameters_beside_each_other_in_one_memory(case: Case):
    """Parameters that are columns of one matrix, without an element in common"""
    model = case.net()
    both = torch.cat([model.blocks[i].down.weight.data for i in range(2)], dim=1)
    for i in range(2):
        model.blocks[i].down.weight = nn.Parameter(both[:, 16 * i : 16 * (i + 1)])
    return case.train(*case.setup(model))


@use(G)
def tied_after_wrapping(case: Case):
    """`model.b.weight = model.a.weight` after wrapping"""
    model, optimizer = case.setup()
    core = case.core(model)
    core.blocks[1].up.weight = core.blocks[0].up.weight
    return case.train(model, optimizer)


@use(G)
def parameter_replaced_after_wrapping(case: Case):
    """`model.leave.weight = nn.Parameter(...)` after wrapping"""
    model, optimizer = case.setup()
    core = case.core(model)
    core.leave.weight = nn.Parameter(torch.full((3, 8), 0.1))
    return case.train(model, optimizer)


@use(G)
def parameter_removed_after_wrapping(case: Case):
    """`model.leave.bias = None` after wrapping"""
    model, optimizer = case.setup()
    case.core(model).leave.bias = None
    results = case.train(model, optimizer)
    return {k: v for k, v in results.items() if "leave.bias" not in k}


@use(G)
def weight_norm_applied_before(case: Case):
    """`torch.nn.utils.parametrizations.weight_norm` before wrapping"""
    model = case.net()
    nn.utils.parametrizations.weight_norm(model.blocks[0].up)
    return case.train(*case.setup(model))


@use(G, dtypes=("fp32",))  # its own buffers are fp32
def spectral_norm_applied_before(case: Case):
    """`torch.nn.utils.parametrizations.spectral_norm` before wrapping"""
    model = case.net()
    nn.utils.parametrizations.spectral_norm(model.leave)
    model, optimizer = case.setup(model)
    return case.train(model, optimizer)


@use(G)
def weight_norm_applied_after(case: Case):
    """`torch.nn.utils.parametrizations.weight_norm` after wrapping"""
    model, optimizer = case.setup()
    nn.utils.parametrizations.weight_norm(case.core(model).blocks[0].up)
    return case.train(model, optimizer)


@use(G)
def model_applied_after_wrapping(case: Case):
    """`model.apply(init)` after wrapping: weights are written by `nn.init` functions"""
    model, optimizer = case.setup()

    def init(module):
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.05)

    model.apply(init)
    return case.train(model, optimizer)


@use(G)
def weights_initialised_randomly_after_wrapping(case: Case):
    """`nn.init.normal_(p)` on parameters after wrapping: ranks draw the same values"""
    model, optimizer = case.setup()
    torch.manual_seed(11)
    for p in model.parameters():
        nn.init.normal_(p, std=0.1)
    values = case.parameters(model)
    case.loss(model, 0).backward()
    optimizer.step()
    same = case.same_on_ranks(case.parameters(model))
    spread = torch.stack([v.std() for n, v in values.items() if v.numel() > 60])
    return {"same": same, "spread": (spread * 10).round()}


@use(G)
def no_grad_norm_of_weights(case: Case):
    """`sum(p.norm() ** 2)` of parameters, logged between steps"""
    model, optimizer = case.setup()
    case.train(model, optimizer, 1)
    with torch.no_grad():
        return {"norm": sum(_plain(p.float().norm()) ** 2 for p in model.parameters())}


@use(G)
def norm_of_gradients(case: Case):
    """`sum(p.grad.norm() ** 2)` logged between backward and step"""
    model, optimizer = case.setup()
    del optimizer
    case.loss(model, 0).backward()
    return {"norm": sum(_plain(p.grad.float().norm()) ** 2 for p in model.parameters())}


def _plain(value: Tensor) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


@use(G)
def number_of_parameters(case: Case):
    """`sum(p.numel())`, shapes and names of parameters"""
    model, _ = case.setup()
    named = case.core(model).named_parameters()
    return {"shapes": [(n, tuple(p.shape), p.requires_grad) for n, p in named]}


@use(G, columns=(*OURS, "torch_ddp"))
def number_of_parameters_inside_forward(case: Case):
    """Names and shapes of all parameters, asked inside forward"""
    model, _ = case.setup()
    seen = []
    core = case.core(model)
    hook = core.blocks[0].register_forward_hook(
        lambda *_: seen.append([(n, tuple(p.shape)) for n, p in core.named_parameters()])
    )
    case.loss(model, 0).backward()
    hook.remove()
    return {"seen": seen}


@use(G)
def exception_in_forward(case: Case):
    """An exception in forward, caught; then training goes on"""
    model, optimizer = case.setup(case.net(Raises))
    core = case.core(model)
    for _ in range(2):
        core.raises = True
        with suppress(ArithmeticError):
            case.loss(model, 0)
        core.raises = False
    return case.train(model, optimizer)


class Raises(Net):
    raises = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        x = self.blocks[0](x)
        if self.raises:
            raise ArithmeticError
        return self.leave(self.blocks[1](x))


@use(G, columns=(*OURS, "fsdp2"))
def exception_in_backward(case: Case):
    """An exception in backward, caught; `zero_grad`; then training goes on"""
    model, optimizer = case.setup()

    def fail(gradient):
        raise ArithmeticError

    x = case.rows(0)
    core = case.core(model)
    hook = core.blocks[0].register_forward_hook(lambda m, a, out: out.register_hook(fail) and None)
    with suppress(ArithmeticError):
        (model(x).float() - 1).square().mean().backward()
    hook.remove()
    optimizer.zero_grad()
    return case.train(model, optimizer)


@use(G)
def loss_without_gradient_on_one_rank(case: Case):
    """One rank's loss is multiplied by zero (an empty batch)"""
    model, optimizer = case.setup()

    def loss(m, step):
        if case.plain:
            out = m(case.rows(step)[:4]).float()
            return (out - 1).square().mean() / 2
        return case.loss(m, step) * (1.0 if case.rank == 0 else 0.0)

    return case.train(model, optimizer, loss=loss)


@use(G)
def two_models_in_one_process(case: Case):
    """Two wrapped models train in turns"""
    first, second = case.setup(), case.setup()
    one = case.train(*first)
    two = case.train(*second, begin=3)
    return {**{f"one {k}": v for k, v in one.items()}, **{f"two {k}": v for k, v in two.items()}}


@use(G)
def output_of_one_model_into_another(case: Case):
    """The output of one wrapped model is the input of another; one backward"""
    first, second = case.setup(), case.setup(case.net(Second))

    def loss(m, step):
        return (second[0](m(case.rows(step))).float() - 1).square().mean()

    start = case.parameters(second[0])
    results = case.train(*first, loss=loss)
    second[1].step()
    second[1].zero_grad()
    return {**results, **{f"second {k}": v for k, v in case.moved(second[0], start).items()}}


class Second(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(3, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return x


@use(G, columns=(*OURS, "fsdp2"))
def teacher_is_read_under_no_grad(case: Case):
    """A frozen wrapped teacher beside a trained student"""
    teacher = case.net()
    teacher.requires_grad_(False)
    teacher = case.wrap_model(teacher)
    student, optimizer = case.setup()

    def loss(m, step):
        with torch.no_grad():
            wanted = teacher(case.rows(step + 5)).float()
        return (m(case.rows(step)).float() - wanted).square().mean()

    return case.train(student, optimizer, loss=loss)


@use(G)
def gradient_of_the_input(case: Case):
    """`x.requires_grad_()`: the gradient of the input"""
    model, optimizer = case.setup()
    x = case.rows(0).requires_grad_()
    (model(x).float() - 1).square().mean().backward()
    optimizer.step()
    mine = x.grad.detach().clone()
    if case.plain:
        return {"gradient": torch.stack([mine[:4] * 2, mine[4:] * 2]).mean(0)}
    return {"gradient": case.mean(mine)}


@use(G)
def gradient_penalty(case: Case):
    """`torch.autograd.grad(out, x, create_graph=True)` in the loss (double backward)"""
    model, optimizer = case.setup()

    def loss(m, step):
        x = case.rows(step).requires_grad_()
        out = m(x).float()
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return (out - 1).square().mean() + gradient.float().square().mean()

    return case.train(model, optimizer, 2, loss=loss)


@use(G)
def model_moved_to_its_device(case: Case):
    """`model.to("cpu")`, `model.cpu()` and `model.float()` after wrapping, which change nothing"""
    model, optimizer = case.setup()
    model.to("cpu")
    if case.dtype == "fp32":
        model.float()
    return case.train(model, optimizer)


@use(G)
def requires_grad_of_the_model(case: Case):
    """`model.requires_grad_(False)` for an evaluation, and True again"""
    model, optimizer = case.setup()
    case.train(model, optimizer, 1)
    model.requires_grad_(False)
    loss = case.mean(case.loss(model, 8))
    model.requires_grad_(True)
    return {"loss": loss, **case.train(model, optimizer, 2, begin=1)}


@use(G, columns=(*OURS, "fsdp2"))
def batches_of_changing_size(case: Case):
    """Batches of different sizes from step to step"""
    model, optimizer = case.setup()
    return case.train(model, optimizer, loss=lambda m, s: case.loss(m, s, rows=3 + s))


@use(G)
def collector_runs_between_steps(case: Case):
    """`gc.collect()` and dropped outputs between steps; a forward whose graph is thrown away"""
    model, optimizer = case.setup()

    def loss(m, step):
        case.loss(m, step)  # never used
        gc.collect()
        return case.loss(m, step)

    return case.train(model, optimizer, loss=loss)


@use(G)
def optimizer_holds_a_parameter_twice_over_steps(case: Case):
    """Another optimizer is made over the same parameters after training began"""
    model, optimizer = case.setup()
    start = case.parameters(model)
    case.train(model, optimizer, 1)
    mains = [p for group in optimizer.param_groups for p in group["params"]]
    second = torch.optim.SGD(mains, lr=0.1)
    case.loss(model, 5).backward()
    second.step()
    second.zero_grad()
    loss = case.mean(case.loss(model, 8))
    return {"loss": loss, **case.moved(model, start)}


@use(G, columns=("ddp", "ddp_sharded", "torch_ddp"), dtypes=("fp32",), says=("hook",))
def communication_hook(case: Case):
    """`register_comm_hook(state, fp16_compress_hook)`"""
    model, optimizer = case.setup()
    if not case.plain:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        model.register_comm_hook(None, allreduce_hook)
    return case.train(model, optimizer)


@use(G, columns=(*OURS, "torch_ddp"), dtypes=("fp32",), says=("join",))
def uneven_inputs_with_join(case: Case):
    """`with model.join()`: rank 1 has one batch less"""
    model, optimizer = case.setup()
    start = case.parameters(model)
    with nullcontext() if case.plain else model.join():
        for step in range(2 if case.plain or case.rank else 3):
            case.loss(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    if case.plain:  # rank 0's last batch alone, with the factor of two ranks
        (model(case.rows(2)[:4]) - 1).square().mean().div(2).backward()
        optimizer.step()
    return case.moved(model, start)


@use(G)
def fused_optimizer(case: Case):
    """`AdamW(fused=True)`"""
    return case.train(
        *case.setup(None, lambda ps: torch.optim.AdamW(ps, lr=0.05, eps=0.05, fused=True))
    )


@use(G)
def foreach_off(case: Case):
    """`AdamW(foreach=False)`"""
    return case.train(
        *case.setup(None, lambda ps: torch.optim.AdamW(ps, lr=0.05, eps=0.05, foreach=False))
    )


@use(G)
def optimizer_of_ones_own(case: Case):
    """A hand-written optimizer that reads `p.grad` and writes `p` in place"""

    class Own(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.add_(p.grad, alpha=-group["lr"])

    return case.train(*case.setup(None, Own))


@use(G)
def sam_perturbs_weights(case: Case):
    """Sharpness-aware minimisation: weights are moved, run, and moved back before the step"""
    model, optimizer = case.setup()
    start = case.parameters(model)
    for step in range(2):
        case.loss(model, step).backward()
        moved = []
        with torch.no_grad():
            for group in optimizer.param_groups:
                for p in group["params"]:
                    change = p.grad.to(p.dtype) * 0.5
                    p.add_(change)
                    moved.append((p, change))
        optimizer.zero_grad()
        case.loss(model, step).backward()
        with torch.no_grad():
            for p, change in moved:
                p.sub_(change)
        optimizer.step()
        optimizer.zero_grad()
    return case.moved(model, start)


@use(G)
def lookahead_of_weights(case: Case):
    """`torch.func.functional_call` with the model's own parameters"""
    model, optimizer = case.setup()

    def loss(m, step):
        parameters = dict(m.named_parameters())
        out = torch.func.functional_call(m, parameters, (case.rows(step),))
        return (out.float() - 1).square().mean()

    return case.train(model, optimizer, loss=loss)
