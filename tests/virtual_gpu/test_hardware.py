"""What depends on the GPU: registered memory, graphs."""

from __future__ import annotations

from importlib.metadata import version

TORCH = tuple(int(part) for part in version("torch").split(".")[:2])


def test_a_gpu_without_multicast_is_told_apart_where_memory_is_registered(on_rank_0):
    text = """
        import torch.distributed as dist
        from lamina.collectives.engine import registration_problem

        start()
        end(registration_problem(dist.group.WORLD, "cuda:0"))
    """
    assert on_rank_0(text, VGPU_MULTICAST=1) is None
    refusal = on_rank_0(text, VGPU_MULTICAST=0)
    if TORCH < (2, 15):  # which registers memory without multicast too
        assert "without multicast" in refusal
    else:
        assert refusal is None


def test_a_block_is_captured_and_replayed_where_its_weights_will_be(on_rank_0):
    """docs/fsdp.md, "Slots": each replayed block reads the addresses that its graph recorded."""
    text = """
        import torch
        import lamina_virtual_gpu as virtual_gpu

        start()
        model, optimizer = sharded(
            fsdp_unit_modules=[Block], fsdp_double_buffer=True, cuda_graph_mode=True
        )
        train(model, optimizer, 2)
        torch.autograd.graph.set_override_stale_capture_stream(True)
        mlp = model.blocks[0].mlp
        addresses = lambda: [parameter.data_ptr() for parameter in mlp.parameters()]
        with model.unsharded():
            captured = addresses()
            x = torch.empty(
                1, 512, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True
            )
            torch.cuda.make_graphed_callables(mlp, (x,))
        read = []
        mlp.register_forward_pre_hook(lambda *_: read.append(addresses()))
        virtual_gpu.reset()
        train(model, optimizer, 2)
        launched = virtual_gpu.record().calls["cudaGraphLaunch"]
        end([launched, [each == captured for each in read]])
    """
    assert on_rank_0(text) == [4, [True, True]]
