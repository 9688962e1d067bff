"""FSDP2's doors: what its users call, on `shard_module` and `fully_shard`."""

from __future__ import annotations

import torch
import torch.distributed as dist
from border.case import OURS, STRATEGIES, TORCH, Case, Net, sgd
from border.judge import use
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

D = "FSDP2's doors"
DOORS = ("shard_module", "fsdp2")
METHODS = ("3", "shard_module", "fsdp2")


def shard_of(case: Case):
    if case.column == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        return fully_shard
    from lamina.fsdp import shard_module

    return shard_module


def by_hand(case: Case, model: nn.Module | None = None, make=sgd, mesh=None, **settings):
    """Each block and then the root, as FSDP2's users write it."""
    model = model or case.net()
    if not case.plain:
        shard, mesh = shard_of(case), mesh or case.mesh["dp_shard"]
        for block in model.blocks:
            shard(block, mesh=mesh, **settings)
        shard(model, mesh=mesh, **settings)
    return model, make(model.parameters())


@use(D, columns=DOORS, dtypes=("fp32",))
def unnamed_mesh_of_one_dimension(case: Case):
    """`DeviceMesh("cpu", range(2))` without names of dimensions"""
    mesh = None if case.plain else DeviceMesh("cpu", [0, 1])
    return case.train(*by_hand(case, mesh=mesh))


@use(D, columns=STRATEGIES)
def unnamed_mesh_given_to_fully_shard(case: Case):
    """`fully_shard(device_mesh=DeviceMesh("cpu", range(2)))`"""
    settings = {} if case.plain else {"device_mesh": DeviceMesh("cpu", [0, 1])}
    return case.train(*case.setup(**settings))


@use(D, columns=("ddp", "ddp_sharded"), dtypes=("fp32",))
def unnamed_mesh_given_to_ddp(case: Case):
    """DDP over `DeviceMesh("cpu", range(2))`"""
    if not case.plain:
        case.mesh = DeviceMesh("cpu", [0, 1])
    return case.train(*case.setup())


@use(D, columns=DOORS, dtypes=("fp32",))
def no_mesh(case: Case):
    """No mesh: the whole world"""
    model = case.net()
    if not case.plain:
        for block in model.blocks:
            shard_of(case)(block)
        shard_of(case)(model)
    return case.train(model, sgd(model.parameters()))


@use(D, columns=DOORS, dtypes=("fp32",))
def reshard_after_forward_as_the_number_of_ranks(case: Case):
    """`reshard_after_forward=2` on two ranks"""
    return case.train(*by_hand(case, reshard_after_forward=2))


@use(
    D,
    columns=("shard_module",),
    dtypes=("fp32",),
    refused=True,
    says=("reshard_after_forward=3", "True"),
)
def reshard_after_forward_as_an_odd_integer(case: Case):
    """`reshard_after_forward=3` on two ranks"""
    by_hand(case, reshard_after_forward=3)
    return {}


@use(D, columns=DOORS, dtypes=("fp32",))
def shard_placement_function(case: Case):
    """`shard_placement_fn=lambda p: Shard(p.ndim - 1)`"""
    from torch.distributed.tensor import Shard

    return case.train(*by_hand(case, shard_placement_fn=lambda p: Shard(p.ndim - 1)))


@use(D, columns=METHODS)
def gradient_sync_off_for_the_whole_model(case: Case):
    """`set_requires_gradient_sync(False)` for all but the last microbatch"""
    model, optimizer = case.setup()
    return _accumulated(case, model, optimizer, lambda on: _sync(case, model, on))


def _sync(case: Case, model, on: bool) -> None:
    if not case.plain:
        model.set_requires_gradient_sync(on)


def _accumulated(case: Case, model, optimizer, switch):
    start = case.parameters(model)
    for step in range(2):
        for micro in range(3):
            switch(micro == 2)
            (case.loss(model, 3 * step + micro) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
    return case.moved(model, start)


@use(D, columns=DOORS)
def gradient_sync_off_for_a_part(case: Case):
    """`set_requires_gradient_sync(False)` on one block, for all but the last microbatch"""
    model, optimizer = case.setup()
    return _accumulated(case, model, optimizer, lambda on: _sync(case, model.blocks[0], on))


@use(D, columns=(*OURS, "torch_ddp"))
def no_sync(case: Case):
    """`with model.no_sync()` around all but the last microbatch"""
    from contextlib import nullcontext

    model, optimizer = case.setup()
    start = case.parameters(model)
    for step in range(2):
        for micro in range(3):
            with nullcontext() if case.plain or micro == 2 else model.no_sync():
                (case.loss(model, 3 * step + micro) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
    return case.moved(model, start)


@use(D, columns=METHODS)
def weights_kept_after_backward(case: Case):
    """`set_reshard_after_backward(False)`"""
    model, optimizer = case.setup()
    if not case.plain:
        model.set_reshard_after_backward(False)
    return case.train(model, optimizer)


@use(D, columns=METHODS)
def weights_kept_after_forward(case: Case):
    """`set_reshard_after_forward(False)`"""
    model, optimizer = case.setup()
    if not case.plain:
        model.set_reshard_after_forward(False)
    return case.train(model, optimizer)


@use(D, columns=METHODS)
def unshard_and_reshard_by_hand(case: Case):
    """`model.unshard()`, a forward, `model.reshard()` between steps"""
    model, optimizer = case.setup()
    if not case.plain:
        model.unshard()
        model.reshard()
        handle = model.unshard(async_op=True)
        handle.wait()
    return case.train(model, optimizer)


@use(D, columns=DOORS)
def prefetch_by_hand(case: Case):
    """`set_modules_to_forward_prefetch` and `set_modules_to_backward_prefetch`"""
    model, optimizer = case.setup()
    if not case.plain:
        model.set_modules_to_forward_prefetch([model.blocks[0], model.blocks[1]])
        model.blocks[1].set_modules_to_backward_prefetch([model.blocks[0]])
    return case.train(model, optimizer)


@use(D, columns=("shard_module",))
def every_method_of_fsdp_module(case: Case):
    """All of FSDPModule's methods are there"""
    from torch.distributed.fsdp import FSDPModule

    if case.plain:
        return {"missing": []}
    model, _ = case.setup()
    public = [n for n in vars(FSDPModule) if not n.startswith("_")]
    return {"missing": [n for n in public if not hasattr(model, n)]}


@use(D, columns=METHODS)
def cast_after_sharding(case: Case):
    """`model.to(torch.float64)` after sharding, before the optimizer is made"""
    if case.column == "3":
        return case.train(*case.setup())  # its optimizer is made before
    model = case.wrap_model(case.net())
    model.to(torch.float64)
    optimizer = sgd(model.parameters())

    def loss(m, step):
        return (m(case.rows(step).double()).float() - 1).square().mean()

    return case.train(model, optimizer, loss=loss)


@use(D, columns=(*OURS, *TORCH), dtypes=("fp32",))
def cast_to_bf16_after_wrapping(case: Case):
    """`model.to(torch.bfloat16)` after wrapping, with the optimizer there"""
    model, optimizer = case.setup()
    model.to(torch.bfloat16)

    def loss(m, step):
        return (m(case.rows(step).bfloat16()).float() - 1).square().mean()

    start = case.parameters(model)
    loss(model, 0).backward()
    optimizer.step()
    return {
        "dtype": str(next(iter(case.core(model).parameters())).dtype),
        **_loose(case, model, start),
    }


def _loose(case: Case, model, start) -> dict:
    size = torch.cat([v.flatten() for v in case.moved(model, start).values()]).norm()
    return {"moved": round(float(size), 1)}


@use(D, columns=DOORS, dtypes=("fp32",))
def state_is_assigned(case: Case):
    """`load_state_dict(model.state_dict(), assign=True)`"""
    model = case.wrap_model(case.net())
    state = {n: v.clone() for n, v in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    return case.train(model, sgd(model.parameters()))


class Meta(Net):
    """Whose modules know how to initialise themselves."""


@use(D, columns=DOORS, dtypes=("fp32",))
def meta_device_then_values(case: Case):
    """Meta device, shard, `to_empty`, then values by `load_state_dict` of a sharded state"""
    values = case.net().state_dict()
    if case.plain:
        model = case.net()
        return case.train(model, sgd(model.parameters()))
    with torch.device("meta"):
        model = Net()
    model = case.wrap_model(model)
    if case.column == "fsdp2":
        model.to_empty(device="cpu")
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    set_model_state_dict(model, values, options=StateDictOptions(full_state_dict=True))
    return case.train(model, sgd(model.parameters()))


@use(D, columns=DOORS, dtypes=("fp32",))
def to_empty_and_init_after_sharding(case: Case):
    """Meta device, shard, `to_empty(device=)`, then an `init_weights` that fills parameters"""
    if case.plain:
        model = case.net()
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(0.1)
        return case.train(model, sgd(model.parameters()))
    with torch.device("meta"):
        model = Net()
    model = case.wrap_model(model)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.1)
    return case.train(model, sgd(model.parameters()))


@use(D, columns=DOORS, dtypes=("fp32",))
def parameters_to_leave_alone(case: Case):
    """`ignored_params=` keeps a parameter plain"""
    model = case.net()
    ignored = {model.leave.bias}
    model.leave.bias.requires_grad_(False)
    if not case.plain:
        for block in model.blocks:
            shard_of(case)(block, mesh=case.mesh["dp_shard"])
        shard_of(case)(model, mesh=case.mesh["dp_shard"], ignored_params=ignored)
    kind = type(model.leave.bias).__name__
    optimizer = sgd([p for p in model.parameters() if p.requires_grad])
    results = case.train(model, optimizer)
    results.pop("moved leave.bias", None)  # it is nobody's
    return {**results, "kind": kind}


@use(D, columns=DOORS, dtypes=("fp32",))
def modules_in_a_list(case: Case):
    """`fully_shard([block0, block1])`: one unit of two modules"""
    model = case.net()
    if not case.plain:
        shard_of(case)(list(model.blocks), mesh=case.mesh["dp_shard"])
        shard_of(case)(model, mesh=case.mesh["dp_shard"])
    return case.train(model, sgd(model.parameters()))


@use(D, columns=DOORS)
def divide_factor(case: Case):
    """`set_gradient_divide_factor(2.0)`, which is the mean on two ranks"""
    model, optimizer = case.setup()
    for module in () if case.plain else (model, *model.blocks):
        module.set_gradient_divide_factor(2.0)
    return case.train(model, optimizer)


@use(D, columns=DOORS)
def all_reduce_hook(case: Case):
    """`set_all_reduce_hook` on a mesh of one dimension"""
    model, optimizer = case.setup()
    if not case.plain:
        model.set_all_reduce_hook(lambda gradients: None)
    return case.train(model, optimizer)


@use(D, columns=METHODS)
def forward_method_registered(case: Case):
    """`register_forward_method(model, "encode")`: another entry than forward"""
    model, optimizer = case.setup(case.net(Encodes))
    if not case.plain:
        if case.column == "fsdp2":
            from torch.distributed.fsdp import register_fsdp_forward_method as register
        else:
            from lamina.fsdp import register_forward_method as register
        register(model, "encode")
    return case.train(
        model, optimizer, loss=lambda m, s: (m.encode(case.rows(s)).float() - 1).square().mean()
    )


class Encodes(Net):
    def encode(self, x: Tensor) -> Tensor:
        return self.forward(x) * 2


@use(D, columns=DOORS, dtypes=("fp32",))
def dtensor_parameters_are_asked_for(case: Case):
    """Between steps a parameter's `.full_tensor()`, `.to_local()` and global shape"""
    model, optimizer = case.setup()
    case.train(model, optimizer, 1)
    p = model.leave.weight
    if case.plain:
        return {"whole": p.detach().float(), "shape": tuple(p.shape), "elements": p.numel()}
    count = torch.tensor(float(p.to_local().numel()))
    dist.all_reduce(count)
    return {"whole": p.full_tensor().detach(), "shape": tuple(p.shape), "elements": int(count)}
