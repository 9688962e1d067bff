"""Models and their modes, checkpoints and the watchdog on a GPU: where the host waits."""

from __future__ import annotations

from virtual_gpu.steady import step_complaints

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1")
MAY_WAIT = {
    "experts over ep, gathered": "moe/dispatcher.py",
    "offload of weights": "weights/offloaded.py",
    "vision": "decoder/splice.py",
}
"""Modes in which the host waits for the device, and the file that does: their pages say so."""


def test_every_mode_of_a_model_trains_without_a_wait(on_rank_0):
    rows = on_rank_0("import modes_on_device; end(modes_on_device.main())")
    wrong = [
        f"{row['mode']}: {complaint}"
        for row in rows
        for complaint in (
            [row["error"]]
            if "error" in row
            else step_complaints(row["steps"], MAY_WAIT.get(row["mode"]))
        )
    ]
    assert not wrong, "\n".join(wrong)
    waits = [what for row in rows for what, *_ in row["steps"][1]["waits"]]
    assert not any(what.startswith("cudaMemcpyAsync host to device") for what in waits)


def test_what_follows_numbers_on_the_device_trains_like_one_process(on_rank_0):
    """`varlen`, experts over ep, images, Mamba-1, delta nets, pipelines: with arithmetic."""
    rows = on_rank_0(
        "import modes_with_values; modes_with_values.main()",
        (*TORCHRUN, "--nproc-per-node=2"), VGPU_DEVICES=2, VGPU_COMPUTE="at-once",
    )  # fmt: skip
    assert len(rows) == 11
    # The first mode multiplies in bf16, as its kernel takes nothing wider.
    wrong = [
        row for row in rows
        if "error" in row or row["apart"] > (2e-3 if row["mode"] == "varlen" else 1e-6)
    ]  # fmt: skip
    assert not wrong, "\n".join(map(str, wrong))


def test_a_checkpoint_is_staged_in_pinned_memory_and_its_writer_waits(on_rank_0):
    """Without a comparison of replicas nothing waits in `save`. With it, one small copy does."""
    text = """
        import tempfile
        import torch
        import lamina_virtual_gpu as virtual_gpu
        from lamina.checkpoint import CheckpointManager

        start("cpu:gloo,cuda:nccl", world=1)
        model, optimizer = sharded()
        train(model, optimizer, 2)
        state, seen = {"model": model, "optimizer": optimizer}, []
        for check in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                how = {"async_save": True, "progress": False, "check_replicas": check}
                with CheckpointManager(folder, **how) as manager:
                    for step in (1, 2, 3):  # the first two make the buffers
                        manager.wait()
                        train(model, optimizer, 1)
                        virtual_gpu.reset()
                        with virtual_gpu.host_waits(depth=60) as waits:
                            manager.save(step, state)
                            manager.wait()
                        calls = virtual_gpu.record()
                    written = manager.staged_bytes
                    manager.restore(state)
            train(model, optimizer, 1)
            staged = calls.copies["device to host"][1]
            pageable = calls.copies.get("device to host, pageable", (0, 0))[1]
            asked = sum(calls.calls.get(name, 0) for name in ("cudaHostAlloc", "cudaMalloc"))
            # The waits of this thread: the writer's stack does not begin in this file.
            here = [lines[1] for lines in waits if __file__ in " ".join(lines)]
            seen.append([staged == written, pageable, asked, here, len(waits) > len(here)])
        end(seen)
    """
    without, compared = on_rank_0(text)
    assert without == [True, 0, 0, [], True]
    staged, pageable, asked, here, writer_waits = compared
    assert staged
    assert 0 < pageable < 1 << 20
    assert asked == 0
    assert all("save/offer.py" in line for line in here)
    assert writer_waits


def test_the_watchdog_takes_an_event_of_a_collective_and_nothing_else(on_rank_0):
    """It takes one where a wait has dropped the backend's own: see `_EndOnDevice.forget`."""
    text = """
        import os
        import torch
        import torch.distributed as dist
        import lamina_virtual_gpu as virtual_gpu
        from lamina.mesh import init_distributed

        asked = []
        for limit in (None, 1.0):
            with init_distributed(soft_limit=limit) as runtime:
                model, optimizer = sharded()
                train(model, optimizer, 4)
                virtual_gpu.reset()
                with virtual_gpu.host_waits() as waits:
                    train(model, optimizer, 1)
                seen = virtual_gpu.record()
                names = ("cudaEventRecord", "cudaStreamWaitEvent", "cudaMalloc", "cudaFree")
                asked.append([seen.launches, seen.collectives, len(waits),
                              *(seen.calls.get(name, 0) for name in names)])
                del model, optimizer
        if os.environ["RANK"] == "0":
            end(asked)
    """
    without, watched = on_rank_0(text, (*TORCHRUN, "--nproc-per-node=2"), VGPU_DEVICES=2)
    recorded, more = without.pop(3), watched.pop(3)
    assert watched == without
    _, collectives, waits, *_ = without
    assert waits == 0
    assert 0 <= more - recorded <= sum(times for times, _ in collectives.values())
