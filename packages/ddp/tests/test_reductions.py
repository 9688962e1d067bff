"""`reproducible=True` gives one set of bits for any strategy and ranks; `native` is near it."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from lamina.collectives import Ledger
from lamina.collectives.engine import Agreement
from lamina.ddp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    ShardedOptimizer,
    finalize_grads,
    full_gradients,
    full_parameters,
)
from lamina.ddp.backward.agreement import BadGradients, GatherLog, ProducedFlags
from lamina.ddp.backward.reducer import Order, ReductionQueue
from lamina.ddp.engine import ScratchBuffers, resolve_reduction
from lamina.ddp.gradients.reduction import PartialSums
from lamina.mesh import ParallelLayout
from lamina_testing import device_type
from lamina_testing.oracles import bit_oracle, tree_sum
from lamina_testing.toys import OddNet, inputs

LEAVES, STEPS = 12, 3


def build():
    torch.manual_seed(7)
    return OddNet()


def sums(model, batch):
    """A sum over tokens, and their number: leaves do not depend on how many there are."""
    return model(batch).square().sum(), len(batch)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, foreach=False)


def leaf(model, step, number):
    return inputs(model, 1000 * step + number, batch=2 + number % 3)


def train(world, rank, sharded, replicate, **config):
    model = build()
    mesh = ParallelLayout(dp_replicate=replicate).build(device_type())
    optimizer = sgd(model)
    wrapped = DistributedDataParallel(
        model,
        DistributedDataParallelConfig(
            use_distributed_optimizer=sharded,
            num_buckets=3,
            overlap_grad_reduce=True,
            calculate_per_token_loss=True,
            **config,
        ),
        mesh,
    )
    optimizer = ShardedOptimizer(optimizer, wrapped, mesh)
    found = []
    for step in range(STEPS):
        for microbatch in range(LEAVES // world):
            batch = leaf(model, step, microbatch * world + rank)
            if microbatch < LEAVES // world - 1:
                with wrapped.no_sync():
                    sums(wrapped, batch)[0].backward()
            else:
                sums(wrapped, batch)[0].backward()
        mine = sum(2 + number % 3 for number in range(rank, LEAVES, world))
        finalize_grads(wrapped, mesh, num_tokens=mine)
        gradients = full_gradients(wrapped)
        optimizer.step()
        optimizer.zero_grad()
        found.append((gradients, full_parameters(wrapped)))
    return found


def oracle():
    def of_step(step):
        return [[leaf(build(), step, number) for number in range(LEAVES)]]

    return bit_oracle(
        build, of_step, sums, sgd, steps=STEPS, cadence="reproducible", per_token=True
    )


@pytest.mark.ranks(1, 2, 3, 4, 6, timeout=120)
@pytest.mark.parametrize("replicate", [1, 2])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.matrix(
    where=lambda ranks, replicate: ranks % replicate == 0 and ranks > replicate - 1, few=5
)
def test_reproducible_gives_the_same_bits_for_every_number_of_ranks(sharded, replicate, ranks):
    found = train(ranks.world_size, ranks.rank, sharded, replicate, reproducible=True)
    for (gradients, parameters), wanted in zip(found, oracle(), strict=True):
        for name, value in wanted.gradients.items():
            assert torch.equal(gradients[name], value), f"gradient of {name}"
        for name, value in wanted.parameters.items():
            assert torch.equal(parameters[name], value), name


@pytest.mark.ranks(3)
def test_without_it_the_bits_differ(ranks):
    found = train(3, ranks.rank, True, 1)
    wanted = oracle()[0].gradients
    assert not all(torch.equal(found[0][0][name], value) for name, value in wanted.items())


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("replicate", [1, 2])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.matrix(where=lambda ranks, replicate: ranks >= replicate, few=3)
def test_native_reductions_are_near_the_ordered_ones(sharded, replicate, ranks):
    with Ledger() as ledger:
        found = train(ranks.world_size, ranks.rank, sharded, replicate, reduction="native")
    for (gradients, _), wanted in zip(found, oracle(), strict=True):
        for name, value in wanted.gradients.items():
            torch.testing.assert_close(gradients[name], value, rtol=1e-4, atol=1e-4)
    used = {record.op for record in ledger.records}
    assert not used & {"reduce_scatter_fp32", "all_reduce_fp32"}


@pytest.mark.parametrize("number", range(1, 20))
@pytest.mark.parametrize("block", [1, 2, 4])
def test_partial_sums_are_the_tree(number, block):
    number *= block
    leaves = [torch.randn(7) * 10.0 ** (k % 9) for k in range(number)]
    partial = PartialSums(ScratchBuffers())
    for start in range(0, number, block):
        partial.push(tree_sum(leaves[start : start + block]).clone(), block)
    assert torch.equal(partial.take(), tree_sum(leaves))
    assert partial.take() is None


def test_leaves_without_gradients_keep_their_places():
    leaves = [torch.randn(7) if k not in (2, 3, 5) else None for k in range(9)]
    partial = PartialSums(ScratchBuffers())
    for one in leaves:
        partial.push(None if one is None else one.clone(), 1)
    assert torch.equal(partial.take(), tree_sum(leaves))


def test_partial_sums_are_logarithmically_many():
    partial, most = PartialSums(ScratchBuffers()), 0
    for _ in range(1000):
        partial.push(torch.zeros(1), 1)
        most = max(most, len(partial._stack))
    assert most <= 10


@pytest.mark.parametrize(("keeps", "held"), [(False, 0), (True, 4000)])
def test_free_scratch_of_another_size_is_not_held_beside_a_new_buffer(keeps, held):
    scratch, cpu = ScratchBuffers(keep_on_cpu=keeps), torch.device("cpu")
    first = scratch.take(1000, torch.float32, cpu)
    scratch.give(first)
    assert scratch.take(900, torch.float32, cpu).data_ptr() == first.data_ptr()
    scratch.give(first)
    scratch.take(500, torch.float32, cpu)
    assert scratch.nbytes == held


def test_contradicting_reductions_are_refused():
    with pytest.raises(ValueError, match="use reduction='ordered'"):
        resolve_reduction("native", reproducible=True)
    with pytest.raises(ValueError, match="'ordered', 'native'"):
        resolve_reduction("fast")
    with pytest.raises(ValueError, match="adds in the wire dtype"):
        DistributedDataParallelConfig(
            reduction="native", reduce_scatter_with_fp32_accumulation=True
        )


class _Flags:
    def __init__(self, flags):
        self.produced_gradient = flags

    def mark_produced(self, flags):
        self.produced_gradient = flags


def test_flags_of_produced_gradients_lie_on_the_host_and_one_rank_asks_nobody():
    class Group:
        group_desc = "a stand-in"

    group = Group()
    alone, both = (
        [
            SimpleNamespace(
                refs=[1] * len(flags),
                device="cuda",
                trained=_Flags(flags),
                axes=SimpleNamespace(groups=lambda _, over=over: over, here="rank 0"),
                look_for_writes=lambda: None,
                writes=SimpleNamespace(uncompared={}),
            )
            for flags in ([True, False], [False])
        ]
        for over in ((None, None), (None, group))
    )

    prepared = []
    nothing_to_say = Agreement(()), BadGradients(), GatherLog(), ()

    class Combined:
        def __init__(self, tensors, over, op):
            assert (over, op, len(tensors)) == (group, "max", 3)
            prepared.append(self)

        def reduce(self, tensors):
            assert tensors[0].device.type == "cpu"
            tensors[0][1] = 1

    with (
        mock.patch(
            "lamina.ddp.backward.agreement.host_device", return_value=torch.device("cpu")
        ) as place,
        mock.patch("lamina.ddp.backward.agreement.SmallReduction", Combined),
        mock.patch("lamina.ddp.backward.agreement.common_facts_of") as common,
    ):
        common.return_value.differ.return_value = False
        ProducedFlags(dict(enumerate(alone))).agree(*nothing_to_say)
        assert not place.called
        assert not prepared
        flags = ProducedFlags(dict(enumerate(both)))
        flags.agree(*nothing_to_say)
        flags.agree(*nothing_to_say)
        place.assert_called_once_with([group], "cuda")
        assert len(prepared) == 1
    assert [one.trained.produced_gradient for one in both] == [[True, True], [False]]


@pytest.mark.parametrize("elsewhere", [None, "the backward's stream"])
def test_room_for_a_buffer_is_made_on_the_stream_of_the_backward_alone(elsewhere):
    """A wait on another stream would order nothing there: the oldest reduction goes on."""
    waited, before_buffers = [], []
    handle = SimpleNamespace(wait=lambda: waited.append("the oldest"))
    local = SimpleNamespace(tell_before_buffers=before_buffers.append)
    group = SimpleNamespace(
        trained=SimpleNamespace(
            local=local, wire_bytes=80, ends_alone=True, reduce=lambda final: iter([handle])
        ),
        weights=SimpleNamespace(title="a unit"),
        shown=SimpleNamespace(hooks=SimpleNamespace(exist=False)),
    )
    queue = ReductionQueue(
        [group],
        order=Order.AS_CLOSED,
        overlap=True,
        max_in_flight=2,
        max_bytes_in_flight=None,
        max_bytes_held=100,
        stream=SimpleNamespace(elsewhere=elsewhere),
        started=None,
        done=lambda number: None,
    )
    queue.issue(0)
    (make_room,) = before_buffers
    make_room(20)
    assert waited == []
    make_room(80)
    assert waited == ([] if elsewhere else ["the oldest"])
