"""What `invariant=True` costs: parts, a block and a model, beside torch's kernels.

    python benchmarks/invariance.py --threads 1
    .nox/virtual-gpu/bin/python benchmarks/invariance.py --clock

Forward plus backward of the same modules with and without the setting. They take turns, and the
median counts, in seconds that this process computed: other work on the machine changes it little.
Gradients of both are compared first. The last line is a step of a whole model. With `--clock` the
milliseconds are those of the virtual GPU's clock, where nothing is computed, in fp32 and bf16.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from lamina.models import GPTModel, MambaConfig, MoEConfig, TransformerConfig
from lamina.models.attention import AttentionContext
from lamina.models.moe.dispatcher import ExpertRows

SHAPE = TransformerConfig(
    vocab_size=8192,
    hidden_size=512,
    num_layers=4,
    num_heads=8,
    num_kv_heads=4,
    ffn_size=1408,
    max_sequence_length=512,
    qk_norm=True,
)
WIDE = replace(
    SHAPE, hidden_size=2048, num_heads=16, num_kv_heads=8, ffn_size=5632, vocab_size=32768,
    max_sequence_length=4096,
)  # fmt: skip
"""What the clock is asked about: launches should not be all that counts."""
MIXED = replace(
    SHAPE,
    num_layers=2,
    layer_pattern="ME",
    moe=MoEConfig(num_experts=8, top_k=2, ffn_size=704),
    mamba=MambaConfig(head_dim=64, state_size=64, chunk_size=128),
)
"""A layer of Mamba and one of experts, of which as many weights are used as the MLP has."""
Step = Callable[[], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=5, help="times that each is measured")
    parser.add_argument("--sequences", type=int, default=2)
    parser.add_argument("--clock", action="store_true", help="on the virtual GPU")
    arguments = parser.parse_args()
    if arguments.clock:
        for dtype in (torch.float32, torch.bfloat16):
            on_the_clock(dtype, arguments.sequences)
        return
    torch.set_num_threads(arguments.threads)
    shape = (arguments.sequences, SHAPE.max_sequence_length)
    tokens = torch.randint(SHAPE.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    print(
        f"torch {torch.__version__}, {arguments.threads} thread(s), {shape[0]} x {shape[1]}, "
        f"hidden {SHAPE.hidden_size}, {SHAPE.num_layers} layers, vocabulary {SHAPE.vocab_size}"
    )
    print("| part | torch's kernels, s | invariant=True, s | ratio |")
    print("| --- | --- | --- | --- |")
    for shape_of, steps in ((SHAPE, parts(tokens)), (MIXED, mixed_parts(tokens))):
        plain, fixed = (
            GPTModel(replace(shape_of, invariant=invariant), seed=1) for invariant in (False, True)
        )
        for name, step in steps.items():
            first, second = step(plain), step(fixed)
            compare(name, first, second, plain, fixed)
            before, after = in_turns(first, second, arguments.turns)
            print(f"| {name} | {before:.3f} | {after:.3f} | {after / before:.2f} |", flush=True)


def on_the_clock(dtype: torch.dtype, sequences: int) -> None:
    """Print seconds of the virtual GPU's clock, in a step that is not the first."""
    import lamina_virtual_gpu as virtual_gpu

    shape = (sequences, WIDE.max_sequence_length)
    print(
        f"\n{torch.cuda.get_device_name()}, {shape[0]} x {shape[1]}, hidden {WIDE.hidden_size}, "
        f"{WIDE.num_layers} layers, vocabulary {WIDE.vocab_size}, {dtype}\n"
    )
    print("| part | torch's kernels, ms | invariant=True, ms | ratio |")
    print("| --- | --- | --- | --- |")
    tokens = torch.zeros(shape, dtype=torch.int64, device="cuda")
    mixed = replace(
        MIXED, hidden_size=WIDE.hidden_size, max_sequence_length=WIDE.max_sequence_length
    )
    of_mixed = mixed_parts(tokens, dtype)
    # The host reads loads, and nothing has values here.
    del of_mixed["experts (2 of 8)"]
    of_mixed["experts (2 of 8), even loads"] = lambda model: even_experts(model, tokens, dtype)
    for shape_of, steps in ((WIDE, parts(tokens, dtype)), (mixed, of_mixed)):
        models = []
        for invariant in (False, True):
            with torch.device("cuda"):
                model = GPTModel(replace(shape_of, invariant=invariant), seed=1)
            models.append(model.to(dtype))
        for name, step in steps.items():
            taken = []
            for model in models:
                run = step(model)
                run()
                torch.cuda.synchronize()
                begun = virtual_gpu.now()
                run()
                torch.cuda.synchronize()
                taken.append(1e3 * (virtual_gpu.now() - begun))
            before, after = taken
            print(f"| {name} | {before:.2f} | {after:.2f} | {after / before:.1f} |", flush=True)


def parts(
    tokens: Tensor, dtype: torch.dtype = torch.float32
) -> dict[str, Callable[[GPTModel], Step]]:
    """Steps by name: each is made for a model, and returns what it has computed."""
    hidden = hidden_states(tokens, SHAPE if tokens.device.type == "cpu" else WIDE, dtype)

    def of(
        module: Callable[[GPTModel], nn.Module], *, attends: bool = False
    ) -> Callable[[GPTModel], Step]:
        def make(model: GPTModel) -> Step:
            part = module(model)
            context = AttentionContext.build(model.config, tokens, dtype)
            more = (context,) if attends else ()
            return lambda: backward(part(hidden.requires_grad_(), *more))

        return make

    return {
        "linear layer (up)": of(lambda model: model.blocks[0].mlp.up),
        "norm": of(lambda model: model.blocks[0].mlp_norm),
        "MLP": of(lambda model: model.blocks[0].mlp),
        "attention": of(lambda model: model.blocks[0].attention, attends=True),
        "block": of(lambda model: model.blocks[0], attends=True),
        "embedding": lambda model: lambda: backward(model.embedding(tokens)),
        "head and loss": lambda model: (
            lambda: backward(model.head(hidden.requires_grad_(), tokens, "sum"))
        ),
        "model": lambda model: lambda: backward(model(tokens, tokens)),
    }


def hidden_states(tokens: Tensor, config: TransformerConfig, dtype: torch.dtype) -> Tensor:
    """The input of a block, `[sequences, length, hidden]`."""
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randn(*tokens.shape, config.hidden_size, generator=generator)
    return drawn.to(tokens.device, dtype)


def mixed_parts(
    tokens: Tensor, dtype: torch.dtype = torch.float32
) -> dict[str, Callable[[GPTModel], Step]]:
    """As `parts`, of a model with Mamba and experts."""
    hidden = hidden_states(tokens, SHAPE if tokens.device.type == "cpu" else WIDE, dtype)

    def of(block: int) -> Callable[[GPTModel], Step]:
        def make(model: GPTModel) -> Step:
            mixer = model.blocks[block].mixer
            return lambda: backward(mixer(hidden.requires_grad_()))

        return make

    return {"Mamba": of(0), "experts (2 of 8)": of(1)}


def even_experts(model: GPTModel, tokens: Tensor, dtype: torch.dtype) -> Step:
    """Experts without router and transport, with equal loads that the host knows."""
    layer, moe = model.blocks[1].mixer, model.config.moe
    copies = tokens.numel() * moe.top_k
    # The n-th copy of all goes to expert n modulo experts.
    numbers = torch.arange(copies).view(-1, moe.num_experts).t().flatten() // moe.top_k
    counts = torch.full((moe.num_experts,), copies // moe.num_experts, device=tokens.device)
    rows = torch.zeros(copies, model.config.hidden_size, dtype=dtype, device=tokens.device)
    sizes = (copies // moe.num_experts,) * moe.num_experts
    arrived = ExpertRows(rows.requires_grad_(), counts, sizes, numbers)
    return lambda: backward(layer.experts(arrived))


def backward(result: Tensor) -> Tensor:
    """Gradients of a result, whose own gradient is its cosine."""
    result.backward(result.detach().cos())
    return result.detach()


def compare(name: str, first: Step, second: Step, plain: nn.Module, fixed: nn.Module) -> None:
    """Exit unless both compute the same but for rounding."""
    torch.testing.assert_close(second(), first(), rtol=1e-3, atol=1e-3)
    pairs = zip(plain.named_parameters(), fixed.parameters(), strict=True)
    for (parameter, ours), theirs in pairs:
        if ours.grad is not None and theirs.grad is not None:
            error = (ours.grad - theirs.grad).abs().max() / ours.grad.abs().max()
            if error > 1e-2:
                raise SystemExit(f"{name}: gradients of {parameter} differ by {error:.1e}")
    for model in (plain, fixed):
        model.zero_grad()


def in_turns(first: Step, second: Step, turns: int) -> tuple[float, float]:
    """Median seconds of each, measured in turn."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(turns):
        for step, measured in zip((first, second), times, strict=True):
            start = time.process_time()
            step()
            measured.append(time.process_time() - start)
    return statistics.median(times[0]), statistics.median(times[1])


if __name__ == "__main__":
    main()
