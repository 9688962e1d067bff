"""Two processes with a virtual GPU each: what hosts tell each other is real."""

from __future__ import annotations

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1")


def test_a_job_of_nccl_alone_trains_and_its_hosts_agree_without_a_wait(on_rank_0):
    text = """
        import os
        import torch
        import torch.distributed as dist
        import lamina_virtual_gpu as virtual_gpu

        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
        model, optimizer = sharded()
        train(model, optimizer, 4)  # Triton's kernels are compiled, measured and loaded
        with virtual_gpu.host_waits() as waits:
            train(model, optimizer, 1)
        dist.destroy_process_group()
        if os.environ["RANK"] == "0":
            end([list(lines) for lines in waits if of_lamina(lines)])
    """
    assert on_rank_0(text, (*TORCHRUN, "--nproc-per-node=2"), VGPU_DEVICES=2) == []


def test_nccl_gives_the_bits_of_gloo(on_rank_0):
    text = "import bits_of_gloo\nbits_of_gloo.main()"
    settings = {"VGPU_DEVICES": 2, "VGPU_COMPUTE": "at-once"}
    assert on_rank_0(text, (*TORCHRUN, "--nproc-per-node=2"), **settings) == []
