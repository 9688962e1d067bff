"""The allocator of plans beside PyTorch's own, by the same random requests."""

from __future__ import annotations

import random

import pytest
import torch

from lamina.models.plan.record.allocator import CachingAllocator


@pytest.mark.parametrize("seed", range(20))
def test_random_requests_reserve_what_torch_reserves(seed):
    draw = random.Random(seed)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    allocator, streams = CachingAllocator(), [torch.cuda.current_stream(), torch.cuda.Stream()]
    pairs = []
    for _ in range(400):
        if pairs and draw.random() < 0.45:
            tensor, block = pairs.pop(draw.randrange(len(pairs)))
            del tensor
            allocator.give_back(block)
            continue
        stream = draw.randrange(2)
        nbytes = int(2 ** draw.uniform(4, 29))
        with torch.cuda.stream(streams[stream]):
            pairs.append(
                (
                    torch.empty(nbytes, dtype=torch.uint8, device="cuda"),
                    allocator.take(nbytes, stream),
                )
            )
        assert allocator.reserved == torch.cuda.memory_reserved() - before
