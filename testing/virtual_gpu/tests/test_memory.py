"""The caching allocator is torch's own; the device beneath it has the memory of its profile."""

from __future__ import annotations

import pytest
import torch

import lamina_virtual_gpu as virtual_gpu

GIB = 1 << 30


def test_eighty_gigabytes_cost_nothing_until_they_are_touched():
    before = resident()
    x = torch.empty(60 * GIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() >= 60 * GIB
    assert resident() - before < GIB // 4
    del x
    torch.cuda.empty_cache()


def resident() -> int:
    """Bytes of this process in the machine's memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_more_than_the_device_has_is_refused_with_torchs_error():
    with pytest.raises(torch.OutOfMemoryError, match=r"79\.18 GiB"):
        torch.empty(100 * GIB, dtype=torch.uint8, device="cuda")


def test_freed_blocks_are_used_again_without_the_device():
    torch.empty(GIB, dtype=torch.uint8, device="cuda")
    virtual_gpu.reset()
    for _ in range(5):
        torch.empty(GIB, dtype=torch.uint8, device="cuda")
    assert "cudaMalloc" not in virtual_gpu.record().calls


def test_memory_that_is_full_is_given_back_and_asked_for_once_more():
    torch.cuda.empty_cache()
    retries = torch.cuda.memory_stats()["num_alloc_retries"]
    torch.empty(50 * GIB, dtype=torch.uint8, device="cuda")  # stays in the cache
    x = torch.empty(60 * GIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_stats()["num_alloc_retries"] == retries + 1
    assert virtual_gpu.record().host_waits["cudaFree"] >= 1
    del x
    torch.cuda.empty_cache()


def test_new_memory_is_zero_after_it_was_given_back():
    x = torch.ones(1 << 20, device="cuda")
    x.copy_(torch.ones(1 << 20))
    del x
    torch.cuda.empty_cache()
    assert torch.empty(1 << 20, device="cuda").sum().item() == 0


def test_expandable_segments_grow_where_blocks_would_not_fit(program):
    text = """
        import json, torch, lamina_virtual_gpu as virtual_gpu
        parts = [torch.empty(8 << 30, dtype=torch.uint8, device="cuda") for _ in range(9)]
        del parts[::2]   # five holes of 8 GiB
        torch.empty(16 << 30, dtype=torch.uint8, device="cuda")
        stats = torch.cuda.memory_stats()
        calls = virtual_gpu.record().calls
        mapped = calls["cuMemMap"] > 0
        print(json.dumps([stats["num_alloc_retries"], calls.get("cudaMalloc", 0), mapped]))
    """
    expandable = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    # One retry: 32 GiB are in use, 40 lie in the holes, and 16 more do not fit beside them.
    assert program(text, **expandable) == [1, 0, True]


def test_another_process_sees_the_same_memory(program):
    text = """
        import json, torch, torch.multiprocessing as mp

        def child(tensor, done):
            done.put(tensor.cpu().tolist())
            tensor.copy_(torch.tensor([5.0, 6.0, 7.0]))
            torch.cuda.synchronize()
            done.put("written")

        if __name__ == "__main__":
            mp.set_start_method("spawn")
            x, done = torch.tensor([1.0, 2.0, 3.0], device="cuda"), mp.Queue()
            process = mp.Process(target=child, args=(x, done))
            process.start()
            seen = done.get(timeout=120)
            assert done.get(timeout=120) == "written"
            process.join()
            print(json.dumps([seen, x.tolist()]))
    """
    assert program(text) == [[1, 2, 3], [5, 6, 7]]


def test_snapshots_name_segments_and_frames():
    torch.cuda.memory._record_memory_history()
    x = torch.empty(1 << 20, device="cuda")
    snapshot = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(enabled=None)
    del x
    assert snapshot["segments"]
    assert snapshot["device_traces"][0]
