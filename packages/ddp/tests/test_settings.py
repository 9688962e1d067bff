"""Settings: what contradicts itself is refused, and checks name what they find."""

import pytest
import torch

from lamina.ddp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    LargeGradientError,
    NonFiniteGradientError,
)
from lamina.mesh import ParallelLayout
from lamina_testing.toys import OddNet


def build():
    torch.manual_seed(7)
    return OddNet()


def wrap(model, **config):
    mesh = ParallelLayout().build("cpu")
    settings = {"use_distributed_optimizer": True, "num_buckets": 3, **config}
    return DistributedDataParallel(model, DistributedDataParallelConfig(**settings), mesh), mesh


def toy_input(rank, step):
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))


@pytest.mark.ranks(2)
def test_non_finite_gradients_are_named_before_they_are_sent(ranks):
    model = build()
    wrapped, _ = wrap(model, check_for_nan_in_grad=True, overlap_grad_reduce=False)
    batch = toy_input(0, 0)
    batch[0, 0] = float("nan")
    with pytest.raises(NonFiniteGradientError, match=r"gradient of .* dp_shard"):
        wrapped(batch).mean().backward()


@pytest.mark.ranks(2)
def test_huge_gradients_are_named_before_they_are_sent(ranks):
    model = build()
    wrapped, _ = wrap(model, check_for_large_grads=1e3, overlap_grad_reduce=False)
    wrapped(toy_input(0, 0)).mean().backward()
    with pytest.raises(LargeGradientError, match=r"gradient of .* reaches"):
        (wrapped(toy_input(0, 0)).mean() * 1e9).backward()


def test_settings_that_contradict_each_other_are_refused():
    with pytest.raises(ValueError, match="nothing to gather"):
        DistributedDataParallelConfig(overlap_param_gather=True)
    with pytest.raises(ValueError, match="give one"):
        DistributedDataParallelConfig(bucket_size=5, num_buckets=2)
    with pytest.raises(ValueError, match="at least 1"):
        DistributedDataParallelConfig(bucket_size=0)


@pytest.mark.ranks(2)
def test_instances_that_the_mesh_does_not_have_are_refused(ranks):
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, num_distributed_optimizer_instances=2
    )
    with pytest.raises(ValueError, match="dp_replicate=2"):
        DistributedDataParallel(build(), config, ParallelLayout().build("cpu"))
