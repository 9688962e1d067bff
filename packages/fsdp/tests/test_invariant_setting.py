"""`invariant=True` of the wrappers: it is `reproducible`, and modules and dtypes have to fit."""

import pytest
import torch
from torch import nn

from lamina.ddp import DistributedDataParallel, DistributedDataParallelConfig
from lamina.fsdp import MixedPrecisionPolicy, fully_shard, shard_module
from lamina.mesh import ParallelLayout


class Layer(nn.Linear):
    """A layer that says whether its sums have one order."""

    def __init__(self, fixed: bool) -> None:
        super().__init__(4, 4)
        self.layout_invariant = fixed


def by_ddp(module: nn.Module, invariant: bool) -> nn.Module:
    config = DistributedDataParallelConfig(invariant=invariant, grad_reduce_in_fp32=True)
    return DistributedDataParallel(module, config)


def by_fsdp(module: nn.Module, invariant: bool) -> nn.Module:
    return fully_shard(module, invariant=invariant)


WRAPPERS = pytest.mark.parametrize("wrap", [by_ddp, by_fsdp])


@WRAPPERS
@pytest.mark.ranks(1)
def test_a_wrapper_and_its_modules_have_to_agree(wrap):
    for fixed in (False, True):
        with pytest.raises(ValueError, match=rf"invariant={not fixed}.*1 \(Layer\)"):
            wrap(nn.Sequential(nn.Linear(4, 4), Layer(fixed)), not fixed)
        wrap(nn.Sequential(nn.Linear(4, 4), Layer(fixed)), fixed)


@pytest.mark.ranks(1)
def test_shard_module_has_no_such_order():
    with pytest.raises(ValueError, match=r"shard_module.*fully_shard\(invariant=True\)"):
        shard_module(Layer(fixed=True))


@WRAPPERS
@pytest.mark.ranks(1)
def test_invariant_is_reproducible(wrap):
    wrapped = wrap(nn.Linear(4, 4), True)
    (group,) = wrapped.parameter_groups()
    assert group.settings.reduction.name == "reproducible"


@pytest.mark.ranks(1)
def test_gradients_are_not_rounded_before_they_are_added():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    with pytest.raises(
        ValueError,
        match=r"weight travel in torch.bfloat16.*there \(grad_comm_dtype of Mixed[A-Za-z]+\)",
    ):
        fully_shard(nn.Linear(4, 4), invariant=True, mixed_precision_policy=policy)
    config = DistributedDataParallelConfig(invariant=True)
    with pytest.raises(
        ValueError, match=r"bias travel in torch.bfloat16.*there \(grad_reduce_in_fp32=True\)"
    ):
        DistributedDataParallel(nn.Linear(4, 4).bfloat16(), config)
    wide = MixedPrecisionPolicy(param_dtype=torch.bfloat16, grad_comm_dtype=torch.float32)
    fully_shard(nn.Linear(4, 4), invariant=True, mixed_precision_policy=wide)


def test_the_backend_s_own_order_is_refused():
    with pytest.raises(ValueError, match="native"):
        DistributedDataParallelConfig(invariant=True, reduction="native")


@pytest.mark.ranks(1)
def test_a_fused_optimizer_on_a_cpu_is_refused_and_keeps_its_parameters(ranks):
    for fused in (True, False):
        model = nn.Linear(4, 4).cpu()
        optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
        before = list(optimizer.param_groups[0]["params"])
        mesh = {"device_mesh": ParallelLayout().build("cpu")}
        if not fused:
            fully_shard(model, optimizer, invariant=True, **mesh)
            continue
        with pytest.raises(ValueError, match=r"fused=True\) with invariant=True on a CPU"):
            fully_shard(model, optimizer, invariant=True, **mesh)
        fully_shard(model, **mesh)  # it is as it was
        assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], before, strict=True))
