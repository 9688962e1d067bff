"""Rank 0 of very many ranks, in one process."""

from __future__ import annotations

COUNTS = """
    import lamina_virtual_gpu as virtual_gpu

    start(world={world})
    model, optimizer = sharded(zero_dp_strategy={strategy})
    train(model, optimizer, 3)
    virtual_gpu.reset()
    train(model, optimizer, 1)
    seen = virtual_gpu.record()
    names = ("cudaEventRecord", "cudaStreamWaitEvent")
    end([seen.launches, sum(times for times, _ in seen.collectives.values()),
         *(seen.calls[name] for name in names)])
"""


def test_a_step_on_65536_ranks_asks_the_device_for_as_much_as_one_on_eight(on_rank_0):
    few, many = (on_rank_0(COUNTS.format(world=world, strategy=3)) for world in (8, 65536))
    # A sum over so many rows takes a kernel more for each group of parameters.
    assert [more - less for more, less in zip(many, few, strict=True)][1:] == [0, 0, 0]
    assert many[0] <= few[0] + 10
