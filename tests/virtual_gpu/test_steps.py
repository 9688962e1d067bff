"""What a step must not do on a GPU: wait for the device, ask it for memory, or race."""

from __future__ import annotations

from importlib.metadata import version

import pytest

TORCH = tuple(int(part) for part in version("torch").split(".")[:2])

STEP = """
    import torch
    import lamina_virtual_gpu as virtual_gpu
    from lamina.ddp import clip_grad_norm
    from lamina.mesh import ParallelLayout

    start()
    mesh = ParallelLayout().build("cuda")
    model, optimizer = sharded(device_mesh=mesh, zero_dp_strategy={strategy})
    clip = {clip}
    train(model, optimizer, 3, clip)
    virtual_gpu.reset()
    with virtual_gpu.host_waits() as waits:
        train(model, optimizer, 1, clip)
    calls = virtual_gpu.record().calls
    asked = [calls.get(name, 0) for name in ("cudaMalloc", "cudaFree")]
    end([[list(lines) for lines in waits if of_lamina(lines)], asked])
"""


@pytest.mark.parametrize("strategy", [1, 3])
def test_the_host_waits_for_nothing_when_torch_clips(on_rank_0, strategy):
    clip = "lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
    waits, asked = on_rank_0(STEP.format(strategy=strategy, clip=clip))
    assert waits == []
    assert asked == [0, 0]


def test_the_host_waits_for_nothing_when_a_norm_over_a_mesh_is_taken(on_rank_0):
    clip = "lambda: clip_grad_norm(model, 1.0, mesh=mesh)"
    waits, asked = on_rank_0(STEP.format(strategy=3, clip=clip))
    assert waits == []
    assert asked == [0, 0]


def test_a_unit_is_one_message_and_takes_few_launches_and_events(on_rank_0):
    text = """
        import torch
        import lamina_virtual_gpu as virtual_gpu

        start()
        model, optimizer = sharded()
        clip = lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        train(model, optimizer, 3, clip)
        virtual_gpu.reset()
        train(model, optimizer, 1, clip)
        seen = virtual_gpu.record()
        copies = [n for name, (n, _) in seen.kernels.items() if "TensorListMetadata<2>" in name]
        norms = [n for name, (n, _) in seen.kernels.items() if "LpNormFunctor" in name]
        messages = [seen.collectives[name][0] for name in ("ncclAllGather", "ncclAlltoAll")]
        units = len(list(model.parameter_groups()))
        end([units, *messages, sum(copies), sum(norms), seen.calls["cudaEventRecord"]])
    """
    units, gathers, sums, copies, norms, events = on_rank_0(text)
    assert sums == units
    assert 0 < copies <= 5 * units  # of more gradients than that
    assert norms == 1
    # A message has three events of the backend's own, and a sum one more for who waits for it.
    more = int(TORCH >= (2, 15))
    assert events <= 3 * (gathers + sums) + sums + more


@pytest.mark.skipif(TORCH >= (2, 15), reason="torch 2.15 keeps workspaces out of its allocator")
def test_the_first_step_takes_no_large_block_that_stays(on_rank_0):
    """Products have their workspaces since the model was wrapped: Note [Workspaces come first]."""
    text = """
        import torch

        def large():
            return torch.cuda.memory_stats().get("allocation.large_pool.current", 0)

        start()
        before = large()
        model, optimizer = sharded()
        wrapped = large()
        train(model, optimizer, 1)
        end([before, wrapped, large()])
    """
    before, wrapped, trained = on_rank_0(text)
    assert before < wrapped == trained


def test_a_step_after_a_backward_that_raised_has_its_weights(on_rank_0):
    """Autograd's thread for the GPU drops what it holds a moment after the caller has the error."""
    text = """
        import torch

        def fail(_):
            raise ArithmeticError("planted")

        start()
        (model, optimizer), raised = sharded(), 0
        for _ in range(40):
            train(model, optimizer, 1)
            hook = model.blocks[0].register_forward_hook(
                lambda _, arguments, out: out.register_hook(fail) and None
            )
            try:
                train(model, optimizer, 1)
            except ArithmeticError:
                raised += 1
            hook.remove()
            optimizer.zero_grad()
        train(model, optimizer, 1)
        end(raised)
    """
    assert on_rank_0(text) == 40


def test_torchs_sanitizer_looks_at_a_step_with_released_weights(on_rank_0):
    text = """
        start()
        train(*sharded(), 2)
        end("no race")
    """
    assert on_rank_0(text, TORCH_CUDA_SANITIZER=1) == "no race"


def test_units_that_are_offloaded_share_their_streams(on_rank_0):
    """Memory serves the stream that has allocated it. So a stream for each unit would keep some."""
    streams = on_rank_0("""
        import torch
        from torch.distributed.fsdp import CPUOffloadPolicy

        start()
        model, optimizer = sharded(offload_policy=CPUOffloadPolicy())
        train(model, optimizer, 3)
        end(len({segment["stream"] for segment in torch.cuda.memory_snapshot()}))
    """)
    assert streams <= 4  # of kernels, and of reductions
