"""A parameter is used as PyTorch allows: every row of the first table of what was tried."""

from __future__ import annotations

import copy
import io

import torch
from border.case import OURS, STRATEGIES, Block, Case, Net, sgd
from border.judge import use
from torch import Tensor, nn

A = "A parameter is used as PyTorch allows"
UNITS = ("3", "shard_module", "fsdp2")


def penalty(model: nn.Module) -> Tensor:
    return 0.1 * sum(p.float().square().sum() for p in model.parameters())


@use(A)
def loss_term_outside_forward(case: Case):
    """A loss term on `model.parameters()` outside forward (L2, EWC)"""
    model, optimizer = case.setup()
    return case.train(model, optimizer, loss=lambda m, s: case.loss(m, s) + penalty(m))


@use(A)
def loss_term_in_a_backward_of_its_own(case: Case):
    """A penalty on parameters with a `backward()` of its own, after the loss's"""
    model, optimizer = case.setup()
    start = case.parameters(model)
    for step in range(3):
        case.loss(model, step).backward()
        penalty(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    return case.moved(model, start)


@use(A)
def loss_term_on_one_block(case: Case):
    """An orthogonality term on one block's weight, read through the module after forward"""
    model, optimizer = case.setup()

    def loss(m, step):
        weight = case.core(m).blocks[0].up.weight
        return case.loss(m, step) + 0.1 * weight.float().square().sum()

    return case.train(model, optimizer, loss=loss)


class ReadsChild(Net):
    """Its own forward reads a weight of a block's."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out + self.blocks[0].up.weight.square().mean()


@use(A)
def root_reads_a_childs_weight(case: Case):
    """The root's forward reads a weight of a child unit (`blocks[0].up.weight.square()`)"""
    return case.train(*case.setup(case.net(ReadsChild)))


class ReadsChildBefore(Net):
    """Reads before any block has run."""

    def forward(self, x: Tensor) -> Tensor:
        scale = self.blocks[1].down.weight.square().mean()
        return super().forward(x) * (1 + scale)


@use(A)
def root_reads_a_childs_weight_before_it_ran(case: Case):
    """The root's forward reads a weight of a block that has not run yet"""
    return case.train(*case.setup(case.net(ReadsChildBefore)))


def write(model: nn.Module, values: list[Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), values, strict=True):
            parameter.copy_(value)


@use(A)
def averages_swapped_in_and_back(case: Case):
    """An exponential average of the weights, swapped in to evaluate and back again"""
    model, optimizer = case.setup()
    mains = [p for group in optimizer.param_groups for p in group["params"]]
    average = [p.detach().clone() for p in mains]
    start = case.parameters(model)
    seen = []
    for step in range(3):
        case.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mean, p in zip(average, mains, strict=True):
                mean.lerp_(p.detach(), 0.5)
            kept = [p.detach().clone() for p in mains]
            for mean, p in zip(average, mains, strict=True):
                p.copy_(mean)
            seen.append(case.mean(case.loss(model, 9)))
            for old, p in zip(kept, mains, strict=True):
                p.copy_(old)
    return {**case.moved(model, start), "evaluated": torch.stack(seen)}


@use(A)
def weights_clamped_between_steps(case: Case):
    """`p.clamp_()` under no_grad on the optimizer's parameters between steps"""
    model, optimizer = case.setup()
    start = case.parameters(model)
    for step in range(3):
        case.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.clamp_(-0.2, 0.2)
    loss = case.mean(case.loss(model, 9))
    return {**case.moved(model, start), "loss": loss}


@use(A)
def weights_written_after_a_forward(case: Case):
    """The optimizer's parameters are halved after a forward without a step"""
    model, optimizer = case.setup()
    first = case.mean(case.loss(model, 0))
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.5)
    return {"first": first, "second": case.mean(case.loss(model, 0)), **case.parameters(model)}


@use(A, says=(r"copy_\(",))
def data_assigned_between_steps(case: Case):
    """`p.data = 0.9 * p.data` on the model's parameters between steps"""
    model, optimizer = case.setup()

    def loss(m, step):
        for parameter in m.parameters():
            parameter.data = 0.9 * parameter.data
        return case.loss(m, step)

    return case.train(model, optimizer, loss=loss)


@use(A)
def weights_written_through_data(case: Case):
    """`p.data.mul_(0.9)` on the model's parameters between steps (weight decay by hand)"""
    model, optimizer = case.setup()
    start = case.parameters(model)
    for step in range(3):
        case.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        for parameter in model.parameters():
            parameter.data.mul_(0.9)
    return {**case.moved(model, start), "loss": case.mean(case.loss(model, 9))}


@use(A)
def tensor_hook_doubles_gradients(case: Case):
    """`p.register_hook(lambda g: 2 * g)` after wrapping"""
    model, optimizer = case.setup()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: 2 * gradient)
    return case.train(model, optimizer)


@use(A)
def tensor_hook_before_wrapping(case: Case):
    """`p.register_hook(lambda g: 2 * g)` before wrapping"""
    model = case.net()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: 2 * gradient)
    return case.train(*case.setup(model))


@use(A)
def post_accumulate_hook_sees_final_gradients(case: Case):
    """`register_post_accumulate_grad_hook` after wrapping: called once, with the final gradient"""
    model, optimizer = case.setup()
    calls, squares = [], []

    def hook(parameter: Tensor) -> None:
        calls.append(1)
        squares.append(parameter.grad.float().square().sum())

    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(hook)
    case.loss(model, 0).backward()
    total = sum(_plain(value) for value in squares)
    del optimizer
    return {"calls": len(calls) == len(parameters), "square of the norm": total}


def _plain(value: Tensor) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


@use(A)
def optimizer_in_backward(case: Case):
    """One optimizer per parameter, stepped in its post-accumulate hook (torchtune's way)"""
    model = case.wrap_model(case.net())
    return _in_backward(case, model)


@use(A)
def optimizer_in_backward_set_before_wrapping(case: Case):
    """The same hooks, set before wrapping"""
    model = case.net()
    own = {p: sgd([p]) for p in model.parameters()}

    def step(parameter: Tensor) -> None:
        own[parameter].step()
        own[parameter].zero_grad()

    for parameter in own:
        parameter.register_post_accumulate_grad_hook(step)
    model = case.wrap_model(model)
    start = case.parameters(model)
    for number in range(3):
        case.loss(model, number).backward()
    return case.moved(model, start)


def _in_backward(case: Case, model: nn.Module):
    own = {p: sgd([p]) for p in model.parameters()}

    def step(parameter: Tensor) -> None:
        own[parameter].step()
        own[parameter].zero_grad()

    for parameter in own:
        parameter.register_post_accumulate_grad_hook(step)
    start = case.parameters(model)
    for number in range(3):
        case.loss(model, number).backward()
    return case.moved(model, start)


class Codebook(Net):
    """Writes one of its weights in forward, as vector quantisation does."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.blocks[0].down.bias.add_(0.125)
        return super().forward(x)


class WritingBlock(Block):
    """Writes its own bias in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.down.bias.mul_(0.5)
        return super().forward(x)


class WritingNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(WritingBlock() for _ in range(2))


@use(A)
def weight_written_in_its_modules_forward(case: Case):
    """A module writes its own weight in its forward under no_grad (codebooks)"""
    return case.train(*case.setup(case.net(WritingNet), **_units(case, WritingBlock)))


def _units(case: Case, *classes: type) -> dict:
    return {"fsdp_unit_modules": list(classes)} if case.column in STRATEGIES else {}


@use(A)
def weight_written_in_the_roots_forward(case: Case):
    """The root's forward writes a block's weight under no_grad"""
    return case.train(*case.setup(case.net(Codebook)))


@use(A)
def vmap_over_the_model(case: Case):
    """`torch.vmap(model)` over a batch in training"""
    model, optimizer = case.setup()

    def loss(m, step):
        return (torch.vmap(m)(case.rows(step)).float() - 1).square().mean()

    return case.train(model, optimizer, loss=loss)


class Scaled(Tensor):
    """A tensor subclass that wraps another tensor, as quantised weights do."""

    @staticmethod
    def __new__(cls, inner: Tensor):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, requires_grad=inner.requires_grad
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def unwrap(x):
            return x.inner if isinstance(x, Scaled) else x

        out = func(
            *torch.utils._pytree.tree_map(unwrap, args),
            **torch.utils._pytree.tree_map(unwrap, kwargs or {}),
        )
        keeps = func in (
            torch.ops.aten.detach.default,
            torch.ops.aten.clone.default,
            torch.ops.aten._to_copy.default,
        )
        return Scaled(out) if keeps else out


@use(A, says=("Scaled",))
def trained_subclass_parameter(case: Case):
    """A trained parameter that is a tensor subclass (`__torch_dispatch__` wrapper)"""
    model = case.net()
    up = model.blocks[0].up
    up.weight = nn.Parameter(Scaled(up.weight.detach().clone()))
    model, optimizer = case.setup(model)
    results = case.train(model, optimizer)
    kind = type(case.core(model).blocks[0].up.weight.data).__name__
    return {**results, "kind": kind if not case.plain else "Scaled"}


@use(A, says=("Scaled",))
def frozen_subclass_parameter(case: Case):
    """A frozen parameter that is a tensor subclass"""
    model = case.net()
    up = model.blocks[0].up
    up.weight = nn.Parameter(Scaled(up.weight.detach().clone()), requires_grad=False)
    model, optimizer = case.setup(model)
    start = case.parameters(model)
    for step in range(2):
        case.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    moved = case.moved(model, start)
    return {k: v for k, v in moved.items() if "blocks.0.up.weight" not in k}


RELEASED = "released|Storage that is invalid"
"""What is said of released weights: before torch 2.14 a CPU build can't name what a view is of."""


@use(A, columns=(*UNITS, "1", "2"), says=("blocks.0.up.weight", "released", "unsharded"))
def released_weight_read_through_a_reference(case: Case):
    """A Python reference to a weight, taken in its module's forward, read while it is released"""
    return {"value": _kept(case, lambda m, _: m.weight).detach().float().clone()}


@use(A, columns=(*UNITS, "1", "2"), says=("blocks.0.up.weight", "released", "unsharded"))
def released_weight_read_through_its_data(case: Case):
    """`weight.data` of a reference that was taken in a forward"""
    return {"value": _kept(case, lambda m, _: m.weight).data.float().clone()}


@use(A, columns=(*UNITS, "1", "2"), says=(RELEASED,))
def released_weight_read_through_a_view(case: Case):
    """A view of a weight (`weight.data[0]`), taken in its module's forward and read later"""
    return {"sum": _kept(case, lambda m, _: m.weight.data[0]).float().sum().clone()}


@use(A, columns=(*UNITS, "1", "2"), says=(RELEASED,))
def released_weight_read_through_what_autograd_saved(case: Case):
    """What autograd saved of a weight (`out.grad_fn._saved_mat2`), read later"""
    saved = _kept(case, lambda _, out: out.grad_fn._saved_mat2.detach())
    return {"sum": saved.float().sum().clone()}


@use(A, columns=(*UNITS, "1", "2"), says=("blocks.0.up.weight", "released", "unsharded"))
def released_weight_written_through_a_reference(case: Case):
    """A write under no_grad through a reference to a weight that was taken in a forward"""
    weight = _kept(case, lambda m, _: m.weight)
    with torch.no_grad():
        weight.mul_(2)
    return {"value": weight.detach().float().clone()}


def _kept(case: Case, take) -> Tensor:
    """What `take(module, output)` finds in the forward of the first block's linear layer."""
    model, optimizer = case.setup()
    kept = []
    layer = case.core(model).blocks[0].up
    handle = layer.register_forward_hook(lambda m, _, out: kept.append(take(m, out)))
    case.loss(model, 0).backward()
    handle.remove()
    del optimizer
    return kept[0]


class Complex(nn.Module):
    """One complex parameter between real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(5, 8)
        self.turn = nn.Parameter(torch.randn(8, dtype=torch.complex64))
        self.leave = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave((self.enter(x).float() * self.turn).abs().to(x.dtype))


@use(A, says=("turn", "complex"), dtypes=("fp32",))
def complex_parameter(case: Case):
    """A complex parameter"""
    model, optimizer = case.setup(case.net(Complex))
    for step in range(2):
        case.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"loss": case.mean(case.loss(model, 9))}


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8, sparse=True)
        self.leave = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.table((x[:, 0].float().abs() * 3).long() % 11))


@use(A, says=("table", "sparse"))
def sparse_gradients(case: Case):
    """An embedding with sparse gradients"""
    return case.train(*case.setup(case.net(Sparse), lambda p: torch.optim.SGD(p, lr=0.1)))


@use(A)
def autograd_grad_of_parameters(case: Case):
    """`torch.autograd.grad(loss, model.parameters())`"""
    model, optimizer = case.setup()
    del optimizer
    parameters = dict(case.core(model).named_parameters())
    gradients = torch.autograd.grad(case.loss(model, 0), list(parameters.values()))
    return {
        name: case.mean(_plain(gradient))
        for name, gradient in zip(parameters, gradients, strict=True)
    }


@use(A)
def backward_to_the_parameters_by_name(case: Case):
    """`loss.backward(inputs=list(model.parameters()))`"""
    model, optimizer = case.setup()
    start = case.parameters(model)
    for step in range(3):
        loss = case.loss(model, step) + (penalty(model) if step == 1 else 0)
        loss.backward(inputs=list(model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    return case.moved(model, start)


@use(A)
def backward_to_some_parameters(case: Case):
    """`loss.backward(inputs=[...])` with the weights of one block: others get no gradient"""
    model, optimizer = case.setup()
    start = case.parameters(model)
    for step in range(2):
        some = [p for n, p in model.named_parameters() if "blocks.1.down" in n]
        case.loss(model, step).backward(inputs=some)
        optimizer.step()
        optimizer.zero_grad()
    return case.moved(model, start)


@use(A, says=("optimizer",))
def optimizer_made_before_and_not_given(case: Case):
    """An optimizer made before wrapping the model alone, and not given to the wrapper"""
    model = case.net()
    optimizer = sgd(model.parameters())
    model = case.wrap_model(model)
    return case.train(model, optimizer)


@use(A)
def submodule_replaced_after_wrapping(case: Case):
    """A submodule is replaced after wrapping, and the new parameters given to the optimizer"""
    model, optimizer = case.setup()
    core = case.core(model)
    torch.manual_seed(3 + case.rank)
    core.leave = nn.Linear(8, 3)
    if case.plain:
        torch.manual_seed(3)
        core.leave.load_state_dict(nn.Linear(8, 3).state_dict())
    optimizer.add_param_group({"params": list(core.leave.parameters())})
    return case.train(model, optimizer)


@use(A)
def parameter_added_after_wrapping(case: Case):
    """A parameter is registered after wrapping, and added to the optimizer"""
    model, optimizer = case.setup()
    core = case.core(model)
    core.shift = nn.Parameter(torch.zeros(3))
    optimizer.add_param_group({"params": [core.shift]})

    def loss(m, step):
        return (m(case.rows(step)).float() + core.shift.float() - 1).square().mean()

    return case.train(model, optimizer, loss=loss)


@use(A, says=("optimizer",), warns="optimizer")
def parameters_in_no_optimizer(case: Case):
    """Half of the parameters are in no optimizer, and require gradients"""
    model = case.net()
    chosen = {id(p) for p in model.leave.parameters()}

    def make(parameters):
        parameters = list(parameters)
        return sgd(
            parameters[-2:] if not case.plain else [p for p in parameters if id(p) in chosen]
        )

    return case.train(*case.wrap(model, make))


@use(A, says=("device_mesh|mesh", "tp"), refused=True, columns=STRATEGIES)
def tensor_parallel_model_without_its_mesh(case: Case):
    """`fully_shard(tp_model, optimizer)` without `device_mesh`"""
    from lamina.fsdp import fully_shard
    from lamina.mesh import mark

    model = case.net()
    for block in model.blocks:
        mark(block.up.weight, tp_shard_dim=0)
    fully_shard(model, sgd(model.parameters()), zero_dp_strategy=int(case.column))
    return {}


@use(A, says=("tp",), refused=True, columns=("ddp", "ddp_sharded"))
def tensor_parallel_model_over_a_data_mesh(case: Case):
    """DDP of a tensor-parallel model over a mesh without tensor-parallel ranks"""
    from lamina.mesh import mark

    model = case.net()
    for block in model.blocks:
        mark(block.up.weight, tp_shard_dim=0)
    case.wrap(model)
    return {}


@use(A, columns=(*OURS, "fsdp2"), slow=True)
def compile_of_the_model_first(case: Case):
    """`torch.compile(model)` is the first call of a wrapped model"""
    model, optimizer = case.setup()
    compiled = torch.compile(model, backend="eager")
    return case.train(
        model, optimizer, 2, loss=lambda m, s: (compiled(case.rows(s)).float() - 1).square().mean()
    )


@use(A, columns=(*OURS, "fsdp2"), slow=True)
def compile_of_each_block_first(case: Case):
    """Each block is compiled in place before wrapping"""
    model = case.net()
    for block in model.blocks:
        block.compile(backend="eager")
    return case.train(*case.setup(model), steps=2)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(5, 8)
        self.norm = nn.BatchNorm1d(8)
        self.leave = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.norm(self.enter(x)))


@use(A, columns=(*OURS, "torch_ddp"), dtypes=("fp32",))
def batch_norm_buffers_agree(case: Case):
    """BatchNorm's running statistics are the same on both ranks in a forward after training"""
    asked = {} if "ddp" in case.column else {"broadcast_buffers": "forward"}
    model, optimizer = case.setup(case.net(Normed), **asked)
    for step in range(3):
        case.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    model(case.rows(7))  # torch sends the first rank's before a forward in training
    model.eval()
    with torch.no_grad():
        out = model(torch.ones(2, 5))
    return {"same": case.same_on_ranks({"out": out})}


@use(A, columns=(*OURS, "torch_ddp"))
def buffers_start_from_the_first_rank(case: Case):
    """Buffers that differ at wrapping start from the first rank's"""
    model = case.net()
    model.register_buffer("table", torch.full((3,), 1.0 + (0 if case.plain else case.rank)))
    model, _ = case.setup(model)
    return {"table": dict(case.core(model).named_buffers())["table"].float()}


@use(A, columns=("ddp", "ddp_sharded", "torch_ddp"))
def parameters_to_ignore(case: Case):
    """`_ddp_params_and_buffers_to_ignore`: an ignored parameter keeps its rank's value"""
    model = case.net()
    model.own = nn.Parameter(torch.full((2,), 1.0 if case.plain else 1.0 + case.rank))
    model._ddp_params_and_buffers_to_ignore = ["own"]
    model, _ = case.setup(model)
    own = case.core(model).own
    return {"own": float(own[0]) - (0 if case.plain else case.rank)}


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.leave = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.conv(x).mean(dim=(2, 3)))


@use(A, columns=(*OURS, "torch_ddp"), warns="channels_last")
def channels_last_weights_are_kept(case: Case):
    """channels_last weights stay channels_last while the model runs"""
    model = case.net(Images).to(memory_format=torch.channels_last)
    model, optimizer = case.setup(model)
    kept = []
    conv = case.core(model).conv
    hook = conv.register_forward_hook(
        lambda m, *_: kept.append(m.weight.is_contiguous(memory_format=torch.channels_last))
    )

    def loss(m, step):
        return (m(case.rows(step, (2, 4, 4))).float() - 1).square().mean()

    results = case.train(model, optimizer, loss=loss)
    hook.remove()
    return {**results, "kept": kept}


def _again(case: Case, model: nn.Module):
    """A copy of a wrapped model trains on, or at least evaluates to the same."""
    with torch.no_grad():
        return {"loss": case.mean(case.loss(model, 5))}


@use(A)
def deepcopy_of_the_wrapper(case: Case):
    """`copy.deepcopy` of a wrapped model that has trained"""
    model, optimizer = case.setup()
    case.train(model, optimizer, 1)
    return _again(case, copy.deepcopy(model))


@use(A)
def torch_save_of_the_wrapper(case: Case):
    """`torch.save(model)` and `torch.load` of a wrapped model"""
    model, optimizer = case.setup()
    case.train(model, optimizer, 1)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return _again(case, torch.load(file, weights_only=False))


@use(A, columns=("3",), dtypes=("fp32",))
def roles_survive_deepcopy(case: Case):
    """`copy.deepcopy` of a model of `lamina.models` keeps the marks of its parameters"""
    return {"rows": _rows_of_copy(case, _lamina_model(), copy.deepcopy)}


@use(A, columns=("3",), dtypes=("fp32",))
def roles_of_one_layer_survive_deepcopy(case: Case):
    """`copy.deepcopy` of a single layer whose parameters are marked keeps the marks"""
    return {"rows": _rows_of_copy(case, nn.Linear(4, 4), copy.deepcopy)}


@use(A, columns=("3",), dtypes=("fp32",))
def roles_survive_torch_save(case: Case):
    """`torch.save` of layers whose parameters are marked keeps the marks"""
    return {"rows": _rows_of_copy(case, nn.Linear(4, 4), _saved_and_loaded)}


def _lamina_model() -> nn.Module:
    from lamina.models import GPTModel, TransformerConfig

    return GPTModel(TransformerConfig(vocab_size=8, hidden_size=8, num_layers=1, num_heads=2))


def _saved_and_loaded(layer: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _rows_of_copy(case: Case, layer, make) -> int | None:
    from lamina.mesh import mark, role_of

    if case.plain:
        return 2  # plain PyTorch has no marks, so it cannot say what is right
    name, weight = next((n, p) for n, p in layer.named_parameters() if p.ndim == 2)
    mark(weight, block_rows=2)
    return role_of(make(layer).get_parameter(name)).block_rows
