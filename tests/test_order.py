"""The order of streams: every conflicting access is ordered by a wait, and each wait is needed.

The engine's code for CUDA runs on a CPU with streams that only record. `-s order` runs all
scenarios and deletes each wait in each of them.
"""

from __future__ import annotations

import contextlib
import random
from unittest import mock

import historic_faults
import order_on_gpu
import order_scenarios as scenarios
import pytest
import torch

from lamina.collectives.call import collective
from lamina.ddp.backward.gradient_hooks import BackwardStream
from lamina.fsdp import fully_shard
from lamina.fsdp.weights.sharded import ShardedWeights
from lamina.mesh import ParallelLayout
from lamina_testing.autograd_streams import AutogradStreams
from lamina_testing.capture import capturing
from lamina_testing.cuda_trace import written_by
from lamina_testing.happens_before import HOST, Access, History
from lamina_testing.order import recorded_order
from lamina_testing.order_graphs import OrderGraph, differences, other_kernels
from lamina_testing.toys import Block, OddNet, inputs

EVERYDAY = (
    "strategy 0", "strategy 1", "strategy 2", "strategy 3", "HSDP", "slots", "offload",
    "offload, one rank", "offloaded activations", "staged checkpoint", "1f1b, last stage",
    "a stream of its own", "DDP, a branch beside a stream of its own",
    "a backward on another stream",
)  # fmt: skip
STREAMS = ("compute", "side", "copy", HOST)


def unordered_pairs(program) -> bool:
    """The oracle: a graph of all nodes with an edge per rule, closed by brute force."""
    edges, nodes, last, waiting = set(), [], {}, {s: set() for s in STREAMS}
    for what, stream, value in program:
        if what == "run":
            number = len(nodes)
            nodes.append((stream, *value))
            before = {last[s] for s in {stream, HOST} if s in last} | waiting[stream]
            before |= waiting[HOST]
            edges |= {(other, number) for other in before}
            last[stream] = number
        else:  # the stream waits for what another has been given so far
            other = value
            reached = {last[s] for s in {other, HOST} if s in last} | waiting[other]
            waiting[stream] = waiting[stream] | reached | waiting[HOST]
    reach = {a: {b for x, b in edges if x == a} for a in range(len(nodes))}
    for middle in range(len(nodes)):
        for start in range(len(nodes)):
            if middle in reach[start]:
                reach[start] |= reach[middle]
    return any(
        nodes[a][1] == nodes[b][1] and (nodes[a][2] or nodes[b][2]) and b not in reach[a]
        for a in range(len(nodes))
        for b in range(a + 1, len(nodes))
    )


def test_the_checker_finds_a_race_where_brute_force_finds_one():
    dice, found = random.Random(0), []
    for _ in range(400):
        program = []
        for _ in range(dice.randint(2, 12)):
            stream = dice.choice(STREAMS)
            run = "run", stream, (dice.randint(0, 2), dice.random() < 0.4)
            wait = "wait", stream, dice.choice(STREAMS)
            program.append(run if dice.random() < 0.5 else wait)
        history = History()
        for what, stream, value in program:
            if what == "run":
                memory, writes = value
                history.run(stream, "work", [Access(memory, 0, 8, writes)])
            else:
                history.wait(stream, history.record(value))
        found.append(bool(history.races))
        assert found[-1] == unordered_pairs(program), program
    assert 100 < sum(found) < 300


def test_only_bytes_that_overlap_conflict():
    history = History()
    history.run("one", "left", [Access(0, 0, 8, True)])
    history.run("two", "right", [Access(0, 8, 16, True)])
    assert not history.races
    history.run("two", "both", [Access(0, 7, 9, False)])
    assert [str(race) for race in history.races] == [
        "left on one writes, and both on two reads the same bytes unordered"
    ]


@pytest.fixture(scope="module")
def recordings():
    return {name: scenarios.record(name) for name in EVERYDAY}


def test_all_conflicting_accesses_are_ordered(recordings):
    for name, recording in recordings.items():
        assert recording.history.nodes > 10, name
        assert not recording.races, (name, recording.races[:3])


def test_every_wait_is_needed(recordings):
    """Each line of the packages that waits is deleted, in the first scenario that comes by it."""
    where = {}
    for name, recording in recordings.items():
        for site in recording.waits:
            where.setdefault(site, name)
    files = {site.file for site in where}
    assert files >= {
        "collectives/call/collective.py", "collectives/transport/transport.py",
        "ddp/backward/reducer.py", "ddp/group/weights.py", "fsdp/weights/offloaded.py",
        "models/activation_memory/offload.py", "checkpoint/save/staging.py",
        "torch: schedules.py",
    }  # fmt: skip
    needed_elsewhere = {"BackwardStream.entered": "DDP, a branch beside a stream of its own"}
    unseen = [
        site
        for site, name in where.items()
        if not scenarios.races_without(needed_elsewhere.get(site.function, name), site)
    ]
    assert not unseen, list(map(str, unseen))


def test_windows_of_peers_need_each_wait():
    """Ranks that read each other's memory; one wait only makes its stream a part of a graph."""
    pytest.importorskip("triton")
    recording = scenarios.record("windows")
    assert not recording.races
    waits = [site for site in recording.waits if "peer_windows" in site.file]
    assert len(waits) == 3
    for site in waits:
        assert scenarios.races_without("windows", site), site


def races_with(plant: str) -> list[str]:
    """Plant a fault of another's history, and return what the recorder says."""
    scenario, planted = historic_faults.PLANTS[plant]
    with (
        recorded_order(scenarios.RANKS) as recording,
        mock.patch.object(collective, "_LOOK_AROUND", 0.1),
        planted(lambda: recording.on("another stream")),
    ):
        try:
            scenarios.SCENARIOS[scenario](recording)
        except Exception as error:  # the engine may notice too, later than the recorder
            print(error)
    return recording.races


def test_storage_that_is_reused_before_its_collective_ends_is_seen():
    found = races_with("reuse")
    assert any("all_gather" in race and "free on compute" in race for race in found), found


def test_an_optimizer_that_does_not_wait_for_its_gradients_is_seen():
    scenario, function = historic_faults.WAITS["optimizer"]
    (site,) = [s for s in scenarios.record(scenario).waits if s.function == function]
    found = scenarios.races_without(scenario, site)
    assert any("ddp/optimizer" in race or "aten::lerp_" in race for race in found), found


def test_a_prefetch_into_a_slot_that_backward_still_reads_is_seen():
    found = races_with("prefetch")
    assert any("all_gather" in race and "aten::" in race for race in found), found


def test_memory_that_is_freed_on_another_stream_than_its_use_is_seen():
    found = races_with("free")
    assert any("free on another stream" in race for race in found), found


def test_a_copy_on_the_host_that_is_read_too_early_is_seen(recordings):
    scenario, function = historic_faults.WAITS["host copy"]
    (site,) = [s for s in recordings[scenario].waits if s.function == function]
    found = scenarios.races_without(scenario, site)
    assert any("copy_ on side" in race and "on host" in race for race in found), found


def test_backward_runs_where_forward_ran_and_waits_for_what_gave_it_gradients():
    """The oracle is what torch documents of streams in backward."""
    ran = []
    with recorded_order(2) as recording:

        def watch(tensor, name):
            tensor.register_hook(lambda _: ran.append((name, recording.current)))

        def there(stream, before):
            recording.wait(stream, recording.mark(before))
            return recording.on(stream)

        leaf = torch.ones(4, requires_grad=True)
        with there("left", "compute"):
            left = leaf.sin()
        with there("right", "compute"):
            right = leaf.cos()
        recording.wait("compute", recording.mark("left"))
        recording.wait("compute", recording.mark("right"))
        total = (left * right).sum()
        for name, tensor in {"left": left, "right": right, "total": total}.items():
            watch(tensor, name)
        with there("caller", "compute"):
            total.backward()
            leaf.grad.add_(1.0)  # the caller has waited for the leaf
        assert ran[0] == ("total", "compute")
        assert sorted(ran[1:]) == [("left", "left"), ("right", "right")]
        assert not recording.races
        with recording.on("stranger"):
            leaf.grad.add_(1.0)
        assert recording.races


def test_hooks_that_stay_on_the_stream_where_the_wrapper_was_made_are_seen(monkeypatch):
    """Only autograd's choice of streams shows it: hooks run where the leaves' nodes were made."""
    monkeypatch.setattr(BackwardStream, "entered", lambda *_: contextlib.nullcontext())
    found = scenarios.record("a stream of its own").races
    assert any("gradients/group_gradients" in race and "all_to_all" in race for race in found)
    monkeypatch.setattr(AutogradStreams, "steering", lambda *_: contextlib.nullcontext())
    assert not scenarios.record("a stream of its own").races


def test_a_unit_on_another_stream_than_its_forward_is_refused():
    refused = pytest.raises(RuntimeError, match="another CUDA stream")
    with recorded_order(scenarios.RANKS) as recording, refused:
        scenarios.sharded(net=scenarios.Branched)(recording)


GRAPHS = {"fsdp_double_buffer": True, "cuda_graph_mode": True}


def test_blocks_can_be_captured_into_graphs_and_what_they_use_stays():
    assert scenarios.captured_blocks(**GRAPHS) == ([], 0)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("the host reads", "the host waits"),
        ("no join", "nobody waits for side"),
        ("no fork", "runs on side 3, which takes no part"),
    ],
)
def test_blocks_that_cannot_be_captured_are_seen(fault, told):
    breaks, _ = scenarios.captured_blocks(fault, **GRAPHS)
    assert told in "; ".join(breaks)


def test_weights_without_fixed_addresses_are_not_where_a_graph_looks_for_them():
    assert scenarios.captured_blocks()[1] > 0


def test_a_whole_step_cannot_be_captured():
    """The host reads which parameters were used."""
    with recorded_order(scenarios.RANKS) as recording:
        mesh = ParallelLayout().build("cpu")
        model = fully_shard(OddNet(11), device_mesh=mesh, fsdp_unit_modules=[Block])
        with capturing(recording) as capture:
            model(inputs(model, 0)).square().mean().backward()
    assert "the host reads numbers" in capture.breaks


def test_a_view_reads_nothing_and_an_operator_in_place_writes():
    with recorded_order(2) as recording:
        first = torch.zeros(8)
        with recording.on("other"):
            first[2:4].view(2, 1).t().detach()
        assert not recording.races
        with recording.on("other"):
            first[2:4].add_(1.0)
        assert len(recording.races) == 1


DEVICES = ("the CPU", "the GPU")


def graphs(recordings, name, **options):
    """The graph of a scenario, and that of another run of it, as `tests/order_on_gpu.py` has them.

    What acts as CUDA is the second run, so the fault of a test is one of the GPU.
    """
    second = scenarios.record(name, **options)
    return OrderGraph.of(recordings[name]), OrderGraph.of(second)


@pytest.mark.parametrize("name", ["strategy 3", "HSDP", "offload"])
def test_two_recordings_of_one_step_have_one_graph(name, recordings):
    first, second = graphs(recordings, name)
    assert len(first.order) > 2
    assert not differences(first, second, DEVICES)
    assert not other_kernels(first, second, DEVICES)


def test_a_wait_that_a_gpu_lacks_is_named(recordings):
    (site,) = [s for s in recordings["strategy 2"].waits if s.function.endswith("drain")]
    first, second = graphs(recordings, "strategy 2", without=site)
    found = differences(first, second, DEVICES)
    missing = [line for line in found if str(site) in line]
    assert missing, found
    assert all("Handle.wait for " in line for line in missing)
    assert all("the CPU has wait: " in line for line in missing)
    assert all(line.endswith("the GPU does not") for line in missing)
    assert not [line for line in found if "the CPU has collective" in line]


def test_memory_that_a_gpu_frees_besides_is_named(recordings, monkeypatch):
    release = ShardedWeights.release

    def release_more(weights):
        release(weights)
        torch.ones(77, dtype=torch.int8).untyped_storage().resize_(0)

    monkeypatch.setattr(ShardedWeights, "release", release_more)
    first, second = graphs(recordings, "strategy 3")
    found = differences(first, second, DEVICES)
    assert found
    assert all("the GPU has free: 77 bytes, given back; the CPU" in line for line in found), found


def test_a_kernel_that_a_gpu_runs_besides_is_no_difference_of_the_order(recordings, monkeypatch):
    step = torch.optim.AdamW.step

    def step_and_look(optimizer, *args, **closure):
        torch.zeros(7).sin()
        return step(optimizer, *args, **closure)

    monkeypatch.setattr(torch.optim.AdamW, "step", step_and_look)
    first, second = graphs(recordings, "strategy 3")
    assert not differences(first, second, DEVICES)
    found = other_kernels(first, second, DEVICES)
    assert any("kernel: aten::sin: 0 times on the CPU, 2 on the GPU" in line for line in found)


def test_the_program_for_a_gpu_goes_on_after_a_scenario_that_raises(monkeypatch, capsys):
    def broken(recording):
        raise ValueError("no such device")

    monkeypatch.setitem(scenarios.SCENARIOS, "broken", broken)
    assert order_on_gpu.main(["--stand-in", "dropped handles"]) == 0
    assert order_on_gpu.main(["--stand-in", "broken", "dropped handles"]) == 1
    shown = capsys.readouterr().out
    assert shown.count("| dropped handles | ") == 2
    assert "the GPU raised ValueError('no such device')" in shown


def test_what_a_kernel_of_triton_writes_stands_in_its_source():
    kernels = pytest.importorskip("lamina.collectives.reduction.triton_kernels")
    adamw = pytest.importorskip("lamina.ddp.optimizer.adamw_cuda").adamw_kernel
    tensors = (
        (kernels.sum_kernel, {"output", "partials"}, {"rows"}),
        (kernels.segment_kernel, {"sums"}, {"rows"}),
        (kernels.finish_kernel, {"squared_norm", "nonfinite"}, {"partials"}),
        (adamw, {"main", "average", "square", "weights"}, {"gradient", "step"}),
    )
    for kernel, written, read in tensors:
        assert written_by(kernel.fn) & (written | read) == written, kernel


def test_kernels_of_triton_are_recorded(monkeypatch):
    """No dispatch mode sees them."""
    kernel = pytest.importorskip("lamina.collectives.reduction.triton_kernels").finish_kernel
    monkeypatch.setattr(type(kernel), "run", lambda *_, **__: None)  # nothing can run it here
    with recorded_order(2) as recording:
        partials, norm, nonfinite = torch.ones(4), torch.ones(()), torch.ones(())
        with recording.on("other"):
            kernel[(1,)](partials, norm, nonfinite, 4, BLOCK=16)
    assert any("triton finish_kernel on other" in race for race in recording.races)
