"""Settings: what contradicts itself is refused, and checks name what they find."""

import math
import re
from unittest import mock

import pytest
import torch

from lamina.collectives import RegistrationError
from lamina.ddp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    LargeGradientError,
    NonFiniteGradientError,
    clip_grad_norm,
)
from lamina.ddp.backward.agreement import GradientChecks
from lamina.ddp.engine import (
    collect_parameters,
    registration_refusal,
    resolve_reduction,
    resolve_strategy,
)
from lamina.ddp.wrapper.buckets import plan_buckets
from lamina.mesh import ParallelLayout
from lamina_testing import device_type
from lamina_testing.toys import OddNet

from .passing import pass_gradients


def build():
    torch.manual_seed(7)
    return OddNet()


def wrap(model, **config):
    mesh = ParallelLayout().build(device_type())
    settings = {"use_distributed_optimizer": True, "num_buckets": 3, **config}
    return DistributedDataParallel(model, DistributedDataParallelConfig(**settings), mesh), mesh


def toy_input(rank, step):
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))


@pytest.mark.ranks(4)
def test_bad_gradients_are_named_with_their_ranks_on_all_ranks_that_sum_them(ranks):
    mesh = ParallelLayout(tp=2).build(device_type())
    settings = {"use_distributed_optimizer": True, "num_buckets": 3, "overlap_grad_reduce": True}
    checks = {"check_for_nan_in_grad": True, "check_for_large_grads": 1e3}
    config = DistributedDataParallelConfig(**settings, **checks)
    wrapped = DistributedDataParallel(build(), config, mesh)
    if ranks.rank % 2:
        wrapped(toy_input(0, 0)).mean().backward()  # these sum among themselves
        return
    factor = float("nan") if ranks.rank == 2 else 1e9
    pass_gradients(wrapped.module.leave, "bias", lambda gradient: gradient * factor)
    with pytest.raises(NonFiniteGradientError) as raised:  # the worst kind of them
        wrapped(toy_input(0, 0)).mean().backward()
    for rank, what in enumerate([r"reaches \S+e\+\d+", "is not finite"]):
        place = re.escape(f"on rank {2 * rank} (dp_shard={rank}, tp=0) before its reduction")
        assert re.search(f"gradient of leave.bias {what} {place}", str(raised.value))


@pytest.mark.ranks(2)
def test_all_ranks_refuse_a_step_that_one_has_spoilt_and_can_go_on(ranks):
    ended = []
    for steps in ((0, 2), (0, 1, 2)):
        wrapped, _ = wrap(build(), use_distributed_optimizer=False, check_for_nan_in_grad=True)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
        for step in steps:
            optimizer.zero_grad()
            if step == 1:
                factor = float("nan") if ranks.rank == 1 else 1.0
                with pytest.raises(NonFiniteGradientError, match=r"on rank 1 \(dp_shard=1\)"):
                    wrapped(factor * toy_input(ranks.rank, step)).mean().backward()
            else:
                wrapped(toy_input(ranks.rank, step)).mean().backward()
                optimizer.step()
        ended.append([one.detach().clone() for one in wrapped.parameters()])
    assert all(map(torch.equal, *ended))


@pytest.mark.ranks(1)
def test_nan_is_above_every_limit_of_large_gradients(ranks):
    wrapped, _ = wrap(build(), check_for_large_grads=1e3)
    pass_gradients(wrapped.module.leave, "bias", lambda gradient: gradient * float("nan"))
    with pytest.raises(LargeGradientError, match=r"leave\.bias reaches nan"):
        wrapped(toy_input(0, 0)).mean().backward()


@pytest.mark.ranks(1)
def test_the_host_looks_at_gradients_once_per_step(ranks, monkeypatch):
    looks = []
    look = GradientChecks.look
    monkeypatch.setattr(GradientChecks, "look", lambda self: (looks.append(1), look(self))[1])
    wrapped, _ = wrap(build(), check_for_nan_in_grad=True)
    assert len(list(wrapped.parameter_groups())) > 1
    with wrapped.no_sync():
        wrapped(toy_input(0, 0)).mean().backward()
    assert not looks
    wrapped(toy_input(0, 1)).mean().backward()
    assert len(looks) == 1


def test_settings_that_contradict_each_other_are_refused():
    with pytest.raises(ValueError, match="nothing to gather"):
        DistributedDataParallelConfig(overlap_param_gather=True)
    with pytest.raises(ValueError, match="give one"):
        DistributedDataParallelConfig(bucket_size=5, num_buckets=2)
    with pytest.raises(ValueError, match="at least 1"):
        DistributedDataParallelConfig(bucket_size=0)
    with pytest.raises(ValueError, match="overlap_param_gather=True puts"):
        DistributedDataParallelConfig(align_param_gather=True, use_distributed_optimizer=True)
    with pytest.raises(ValueError, match="no sharded optimizer"):
        DistributedDataParallelConfig(num_distributed_optimizer_instances=2)
    for limit in (True, math.nan, -1.0):
        with pytest.raises(ValueError, match="is no limit"):
            DistributedDataParallelConfig(check_for_large_grads=limit)
    with pytest.raises(ValueError, match="max_norm=nan must be"):
        clip_grad_norm(build(), math.nan)
    with pytest.raises(ValueError, match="choose one"):
        DistributedDataParallelConfig(average_in_collective=True, calculate_per_token_loss=True)
    with pytest.raises(ValueError, match="fully_shard"):
        DistributedDataParallelConfig(zero_dp_strategy=3, use_distributed_optimizer=True)
    with pytest.raises(ValueError, match="contradicts use_distributed_optimizer=False"):
        DistributedDataParallelConfig(zero_dp_strategy="optim_grads")
    with pytest.raises(ValueError, match="contradicts use_distributed_optimizer=True"):
        DistributedDataParallelConfig(zero_dp_strategy=0, use_distributed_optimizer=True)
    with pytest.raises(ValueError, match="choose one of 0 or 'no_shard'"):
        DistributedDataParallelConfig(zero_dp_strategy="zero2", use_distributed_optimizer=True)


def test_a_size_of_messages_is_refused_where_no_sum_is_cut_by_it():
    assert resolve_reduction("ordered", message_bytes=4096).message_bytes == 4096
    for reduction, reproducible in ("native", False), ("int8", False), ("ordered", True):
        with pytest.raises(ValueError, match="reduce_message_bytes=4096 cuts ordered sums"):
            resolve_reduction(reduction, reproducible, message_bytes=4096)


@pytest.mark.ranks(1, backend="gloo")
def test_checksums_are_refused_for_a_device_that_the_host_would_wait_for(monkeypatch, ranks):
    wrap(build(), reduction="checked")
    monkeypatch.setattr(torch.nn.Parameter, "device", torch.device("cuda", 3), raising=False)
    with pytest.raises(ValueError, match=r"reduction='checked' on cuda:3: .*\n?.*='ordered'"):
        wrap(build(), reduction="checked")


def test_strategies_have_numbers_and_names():
    settings = {"use_distributed_optimizer": True}
    assert DistributedDataParallelConfig().strategy == resolve_strategy("no_shard")
    assert DistributedDataParallelConfig(**settings).strategy == resolve_strategy(1)
    named = DistributedDataParallelConfig(zero_dp_strategy="optim_grads", **settings)
    assert named.strategy == resolve_strategy(2)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("convert", ["half", "double"])
def test_a_model_that_was_converted_after_wrapping_is_refused_by_name(convert):
    wrapped, _ = wrap(build())
    getattr(wrapped, convert)()
    was = rf"was torch\.float32 on {device_type()}\S* in its .* before it is"
    with pytest.raises(RuntimeError, match=was):
        wrapped(torch.ones(2, 5))


@pytest.mark.ranks(1)
def test_what_is_no_config_and_no_mesh_is_refused():
    mesh, config = ParallelLayout().build(device_type()), DistributedDataParallelConfig()
    with pytest.raises(TypeError, match="config is a ParallelMesh, not a"):
        DistributedDataParallel(build(), mesh, config)
    with pytest.raises(TypeError, match="mesh is a str, not a ParallelMesh or DeviceMesh"):
        DistributedDataParallel(build(), config, "dp")


@pytest.mark.ranks(2)
def test_what_the_mesh_or_the_machine_does_not_have_is_refused(ranks):
    sharded = {"use_distributed_optimizer": True}
    for instances, layout in ((2, {}), (1, {"dp_replicate": 2, "dp_shard": 1})):
        mesh = ParallelLayout(**layout).build(device_type())
        config = DistributedDataParallelConfig(
            num_distributed_optimizer_instances=instances, **sharded
        )
        with pytest.raises(ValueError, match=f"dp_replicate={instances}"):
            DistributedDataParallel(build(), config, mesh)
    if device_type() == "cpu":
        with pytest.raises(RegistrationError, match=r"nccl_ub=True: .* only NCCL registers memory"):
            wrap(build(), nccl_ub=True)
    with mock.patch(
        "lamina.ddp.wrapper.buckets.registration_problem",
        lambda group, *_, **__: "no" if group == "experts" else None,
    ):  # every group is looked at
        found = registration_refusal(["dense", None, "experts"], torch.device("cuda"))
        assert found == "nccl_ub=True: no; leave it out here"
    pool = mock.MagicMock()  # in the place of memory that only NCCL has
    with mock.patch("lamina.ddp.wrapper.wrapper.registered_pool", return_value=pool) as made:
        wrapped, _ = wrap(build(), nccl_ub=True)
    assert made.call_args.args[1].type == device_type()
    assert [call[0] for call in pool.mock_calls] == ["__enter__", "__exit__"]
    wrapped.deregister_memory()
    assert pool.mock_calls[-1] == mock.call.close()


def buckets_of(sizes, ranks=1, **config):
    """Names of the parameters in each bucket of a model with parameters of these sizes."""
    module = torch.nn.Module()
    for index, size in enumerate(sizes):
        parameter = torch.nn.Parameter(torch.empty(size, device="meta"))
        module.register_parameter(f"p{index}", parameter)
    planned = plan_buckets(
        collect_parameters(module), DistributedDataParallelConfig(**config), ranks
    )
    return [[int(ref.name[1:]) for ref in refs] for _, refs in planned]


def test_buckets_are_filled_in_reverse_order_of_registration():
    assert buckets_of([5, 5, 5, 5, 5], bucket_size=10) == [[4, 3], [2, 1], [0]]
    assert buckets_of([5, 100, 5], bucket_size=10) == [[2, 1], [0]]  # none is cut
    assert buckets_of([1] * 12, num_buckets=4) == [[11, 10, 9], [8, 7, 6], [5, 4, 3], [2, 1, 0]]
    assert buckets_of([7, 7, 7], bucket_size=1) == [[2], [1], [0]]


def test_a_bucket_holds_40m_elements_or_1m_for_each_rank():
    million = [1_000_000] * 101
    assert [len(bucket) for bucket in buckets_of(million)] == [40, 40, 21]
    assert [len(bucket) for bucket in buckets_of(million, ranks=40)] == [40, 40, 21]
    assert [len(bucket) for bucket in buckets_of(million, ranks=64)] == [64, 37]


@pytest.mark.ranks(2)
def test_shards_are_padded_for_bus_bandwidth(ranks):
    for padded, multiple in ((True, 1 << 16), (False, 128)):
        wrapped, _ = wrap(build(), pad_buckets_for_high_nccl_busbw=padded)
        sizes = [group.layout.shard_size for group in wrapped.parameter_groups()]
        assert all(size % multiple == 0 for size in sizes)
        assert (min(sizes) < 1 << 16) is not padded
