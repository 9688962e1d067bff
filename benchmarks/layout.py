"""Padding of buffer layouts on the units of public models: ours beside two other rules.

    python benchmarks/layout.py [--shards 8 64 256 1024]

Columns, in padding per element of the unit:

* element: `BufferLayout.plan` with its default (cuts between any two aligned elements).
* row: the same with row granularity, then its lower bound, and one buffer per row size.
* lcm: one buffer per unit whose shards are a multiple of the least common multiple of all row sizes
  (rows of dim 0), so that no row is ever cut.
* dim 0: every tensor on its own is cut along its first dimension into equal numbers of rows.

Sizes are those of the models' published configurations.
"""

from __future__ import annotations

import argparse
import math
import time

from lamina.buffers import BufferLayout, Granularity, TensorSpec, padding_report

Shapes = dict[str, tuple[int, ...]]


def llama(hidden: int, ffn: int, kv: int, vocab: int) -> dict[str, Shapes]:
    """Llama 3: grouped-query attention, SwiGLU, embedding and head apart."""
    return {
        "embedding": {"tokens": (vocab, hidden)},
        "block": {
            "q": (hidden, hidden),
            "k": (kv, hidden),
            "v": (kv, hidden),
            "o": (hidden, hidden),
            "gate": (ffn, hidden),
            "up": (ffn, hidden),
            "down": (hidden, ffn),
            "norm1": (hidden,),
            "norm2": (hidden,),
        },
        "head": {"norm": (hidden,), "head": (vocab, hidden)},
    }


def mixtral() -> dict[str, Shapes]:
    """Mixtral 8x7B: dense attention with the router, eight experts."""
    hidden, ffn, kv, experts = 4096, 14336, 1024, 8
    return {
        "embedding": {"tokens": (32000, hidden)},
        "attention": {
            "q": (hidden, hidden),
            "k": (kv, hidden),
            "v": (kv, hidden),
            "o": (hidden, hidden),
            "router": (experts, hidden),
            "norm1": (hidden,),
            "norm2": (hidden,),
        },
        "experts": {
            "gate_up": (experts, 2 * ffn, hidden),
            "down": (experts, hidden, ffn),
        },
        "head": {"norm": (hidden,), "head": (32000, hidden)},
    }


def deepseek_v3() -> dict[str, Shapes]:
    """DeepSeek-V3: multi-head latent attention, a shared expert, 256 routed experts."""
    hidden, heads, q_rank, kv_rank, nope, rope, value = 7168, 128, 1536, 512, 128, 64, 128
    expert, dense = 2048, 18432
    attention: Shapes = {
        "q_a": (q_rank, hidden),
        "q_a_norm": (q_rank,),
        "q_b": (heads * (nope + rope), q_rank),
        "kv_a": (kv_rank + rope, hidden),
        "kv_a_norm": (kv_rank,),
        "kv_b": (heads * (nope + value), kv_rank),
        "o": (hidden, heads * value),
        "norm1": (hidden,),
        "norm2": (hidden,),
    }
    return {
        "embedding": {"tokens": (129280, hidden)},
        "dense block": {
            **attention,
            "gate": (dense, hidden),
            "up": (dense, hidden),
            "down": (hidden, dense),
        },
        "attention, shared expert": {
            **attention,
            "router": (256, hidden),
            "router_bias": (256,),
            "shared_gate": (expert, hidden),
            "shared_up": (expert, hidden),
            "shared_down": (hidden, expert),
        },
        "experts": {
            "gate_up": (256, 2 * expert, hidden),
            "down": (256, hidden, expert),
        },
        "head": {"norm": (hidden,), "head": (129280, hidden)},
    }


def gpt_oss_120b() -> dict[str, Shapes]:
    """GPT-OSS-120B: attention with biases and sinks, 128 experts with biases."""
    hidden, heads, kv_heads, head, experts = 2880, 64, 8, 64, 128
    return {
        "embedding": {"tokens": (201088, hidden)},
        "attention": {
            "q": (heads * head, hidden),
            "q_bias": (heads * head,),
            "k": (kv_heads * head, hidden),
            "k_bias": (kv_heads * head,),
            "v": (kv_heads * head, hidden),
            "v_bias": (kv_heads * head,),
            "o": (hidden, heads * head),
            "o_bias": (hidden,),
            "sinks": (heads,),
            "router": (experts, hidden),
            "router_bias": (experts,),
            "norm1": (hidden,),
            "norm2": (hidden,),
        },
        "experts": {
            "gate_up": (experts, hidden, 2 * hidden),
            "gate_up_bias": (experts, 2 * hidden),
            "down": (experts, hidden, hidden),
            "down_bias": (experts, hidden),
        },
        "head": {"norm": (hidden,), "head": (201088, hidden)},
    }


MODELS: dict[str, dict[str, Shapes]] = {
    "Llama-3 8B": llama(4096, 14336, 1024, 128256),
    "Llama-3 70B": llama(8192, 28672, 1024, 128256),
    "Mixtral 8x7B": mixtral(),
    "DeepSeek-V3": deepseek_v3(),
    "GPT-OSS-120B": gpt_oss_120b(),
}


def unit_wide_lcm(shapes: Shapes, shards: int) -> float:
    """Padding when a unit's shards are a multiple of every tensor's row (``shape[1:]``)."""
    numel = sum(math.prod(shape) for shape in shapes.values())
    row = math.lcm(*(math.prod(shape[1:]) for shape in shapes.values()))
    shard = -(-numel // (shards * row)) * row
    return shards * shard / numel - 1


def dim0(shapes: Shapes, shards: int) -> float:
    """Padding when each tensor's first dimension is rounded up to a multiple of the shards."""
    numel = sum(math.prod(shape) for shape in shapes.values())
    padded = sum(
        -(-shape[0] // shards) * shards * math.prod(shape[1:]) for shape in shapes.values()
    )
    return padded / numel - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shards", type=int, nargs="+", default=[8, 64, 256, 1024])
    shards_list = parser.parse_args().shards
    head = f"{'model':<13} {'unit':<25} {'shards':>6} {'element':>9} {'row':>9} {'row bound':>9}"
    print(head + f" {'row split':>9} {'lcm':>9} {'dim 0':>9}  ms")
    worst = 0.0
    for model, units in MODELS.items():
        for unit, shapes in units.items():
            for shards in shards_list:
                fine = [TensorSpec(name, shape) for name, shape in shapes.items()]
                rows = [
                    TensorSpec(
                        name, shape, Granularity.row() if len(shape) > 1 else Granularity.element()
                    )
                    for name, shape in shapes.items()
                ]
                started = time.perf_counter()
                layout = BufferLayout.plan(fine, shards)
                row_layout = BufferLayout.plan(rows, shards)
                elapsed = 1e3 * (time.perf_counter() - started)
                report = padding_report(row_layout)
                worst = max(worst, layout.padding_fraction)
                figures = (
                    layout.padding_fraction,
                    report.fraction,
                    report.least_fraction,
                    report.split_fraction,
                    unit_wide_lcm(shapes, shards),
                    dim0(shapes, shards),
                )
                print(
                    f"{model:<13} {unit:<25} {shards:>6} "
                    + " ".join(f"{figure:>9.3%}" for figure in figures)
                    + f"  {elapsed:.1f}"
                )
    print(f"worst padding with the default granularity: {worst:.3%}")


if __name__ == "__main__":
    main()
