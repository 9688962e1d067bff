"""What only a GPU has: streams that a forward may not mix, and memory that must not be taken.

A CPU has one stream and no pinned memory, so nothing there shows these.
"""

from __future__ import annotations

import textwrap

NET = """
    import torch
    from lamina.fsdp import fully_shard

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            layers = [torch.nn.Linear(1024, 1024, device="cuda") for _ in range(4)]
            self.layers, self.skips, self.side = torch.nn.ModuleList(layers), False, None

        def forward(self, x):
            for layer in self.layers[: 3 if self.skips else 4]:
                x = layer(x).relu()
                if self.side is not None:
                    self.side.wait_stream(torch.cuda.current_stream())
                    torch.cuda.set_stream(self.side)
            return x

    start()
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    model, optimizer = fully_shard(
        net, optimizer, zero_dp_strategy=3, fsdp_unit_modules=[torch.nn.Linear]
    )
    x = torch.zeros(1, 1024, device="cuda")
"""


def test_a_unit_on_another_stream_than_its_forward_is_refused(on_rank_0):
    text = """
        net.side = torch.cuda.Stream()
        try:
            model(x)
        except RuntimeError as error:
            end(str(error))
        end("taken")
    """
    message = on_rank_0(textwrap.dedent(NET) + textwrap.dedent(text))
    assert message.startswith("unit layers.1 runs on another CUDA stream")
    assert "run all units on one stream" in message


def test_a_unit_that_was_gathered_ahead_and_not_called_is_released(on_rank_0):
    """Usually the last unit's weights stay for the backward, which begins there."""
    text = """
        after_forward = []
        for net.skips in (False, False, True):
            loss = model(x).sum()
            after_forward.append(torch.cuda.memory_allocated())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        end(after_forward)
    """
    *_, usual, skipping = on_rank_0(textwrap.dedent(NET) + textwrap.dedent(text))
    assert usual - skipping >= 4 * 1024 * 1024  # bytes of a weight


def test_a_second_save_copies_into_the_pinned_memory_of_the_first(on_rank_0):
    text = """
        import torch
        from lamina.checkpoint.save.staging import Stage

        start()
        stage, pointers = Stage(), []
        for dtype in (torch.float32, torch.float32, torch.bfloat16):
            weights = torch.ones(1000, device="cuda", dtype=dtype)
            plan = stage.plan({"weights": weights}, coordinator=True)
            staged = stage.copy(plan, known=False)
            staged.ready()
            (copy,) = staged.tensors.values()
            pointers.append([copy.data_ptr(), copy.is_pinned(), str(copy.dtype)])
        end(pointers)
    """
    first, second, other = on_rank_0(text)
    assert first == second
    assert first[1:] == [True, "torch.float32"]
    assert other[1:] == [True, "torch.bfloat16"]
    assert other[0] != first[0]


def test_a_thread_asks_an_event_while_another_one_captures(on_rank_0):
    """The watchdog does: in the default mode the question would spoil the capture."""
    text = """
        import threading
        import torch
        from lamina.collectives.compat import has_ended

        start()
        x, event, answers = torch.zeros(8, device="cuda"), torch.cuda.Event(), []
        event.record()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x.add_(1)
            thread = threading.Thread(target=lambda: answers.append(has_ended(event)))
            thread.start()
            thread.join()
        graph.replay()
        end(answers)
    """
    assert on_rank_0(text)[-1:] == [True]
