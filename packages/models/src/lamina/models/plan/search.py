"""The best layouts of a model on a number of GPUs, and why the next ones lose.

All layouts are bounded first, by the cost model and by closed forms of memory: that takes some
tens of microseconds for each. The best are then played as `plan` plays them, and the plan's numbers
replace the bounds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from typing import Any

from lamina.mesh import LayoutError, ParallelLayout
from lamina.models.base.config import TransformerConfig
from lamina.models.decoder.cost import matrix_parameters, training_flops_per_token
from lamina.models.plan.clock import message_seconds, product_seconds
from lamina.models.plan.constants import GIB, Machine, workspaces_of
from lamina.models.plan.job import Job
from lamina.models.plan.job_plan import Plan, passes_to_play, plan
from lamina.models.plan.record.step_record import Message, Operation

SECONDS_OF_A_PASS = 1.2
"""What playing a microbatch takes on a core of 2026, roughly."""


@dataclass(frozen=True)
class Candidate:
    """A layout with its bounds: bytes and seconds by category; `played` once it has a plan."""

    job: Job
    memory: dict[str, float]
    seconds: dict[str, float]
    played: Plan | None = field(default=None, compare=False)

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return self.played.step_seconds if self.played else sum(self.seconds.values())

    @property
    def bytes(self) -> float:
        """Bytes at the peak."""
        return self.played.allocated if self.played else sum(self.memory.values())

    def __str__(self) -> str:
        job, layout = self.job, self.job.layout
        axes = ",".join(
            f"{axis}={size}"
            for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")
            if (size := getattr(layout, axis)) > 1
        )
        order = f" {job.schedule}" if layout.pp > 1 else ""
        source = "played" if self.played else "bound"
        return (
            f"{self.step:9.3f} s {self.bytes / GIB:7.1f} GiB ({source})  --mesh {axes or 'tp=1'} "
            f"--strategy {job.strategy} --microbatches {job.microbatches} --batch {job.batch} "
            f"--recompute {job.recompute}{order}"
        )


@dataclass(frozen=True)
class SearchResult:
    """What a search gives: the best, the next ones with the reason, and how many there were."""

    best: tuple[Candidate, ...]
    losers: tuple[tuple[Candidate, str], ...]
    tried: int
    fitting: int
    seconds: float

    def __str__(self) -> str:
        lines = [f"{self.tried} layouts, of which {self.fitting} fit; {self.seconds:.0f} s"]
        lines += [f"{place:3} {each}" for place, each in enumerate(self.best, 1)]
        if self.losers:
            lines.append("the next ones lose:")
        lines += [f"    {each}\n        {why}" for each, why in self.losers]
        return "\n".join(lines)


def search(
    job: Job, at: Machine, *, count: int = 10, confirm: int = 3, budget: float = 40.0
) -> SearchResult:
    """Search layouts for the model, ranks, precision and tokens per step of a job.

    Args:
        job: its layout, microbatches, schedule, strategy and recomputation are what is sought.
        at: the machine.
        count: how many of the best, and of the next ones, are named.
        confirm: how many of the best are played.
        budget: seconds for playing; a layout that would take longer stays a bound.
    """
    begun = time.monotonic()
    limit = (at.gpu.memory - at.costs.context) / at.costs.reserved
    bounded = [_bounds(each, at) for each in candidates(job)]
    ordered = sorted(bounded, key=lambda c: (round(c.step, 4), c.bytes))
    fitting = [each for each in ordered if each.bytes <= limit]
    leading = fitting[: count + confirm]
    shares = []
    for place, each in enumerate(leading[:confirm]):
        if time.monotonic() - begun + SECONDS_OF_A_PASS * passes_to_play(each.job) > budget:
            continue
        leading[place] = replace(each, played=(made := plan(each.job, at)))
        shares.append(made.step_seconds / sum(each.seconds.values()))
    # A bound is below what a plan of the same layout says. Beside plans it counts as much more as
    # plans of the others were above theirs.
    above = statistics.median(shares) if shares else 1.0
    left = [each for each in leading if each.played is None or each.played.fits]
    best = sorted(left, key=lambda c: c.step if c.played else c.step * above)[:count]
    losers = [(each, _reason(each, best[0], limit)) for each in fitting[count : count + 3] if best]
    near = sorted((c for c in bounded if c.bytes > limit), key=lambda c: c.step)[:3]
    losers += [(each, _reason(each, best[0] if best else each, limit)) for each in near]
    seconds = time.monotonic() - begun
    return SearchResult(tuple(best), tuple(losers), len(bounded), len(fitting), seconds)


def candidates(job: Job) -> Iterator[Job]:
    """Jobs that train the same tokens in a step on as many ranks, by all ways that can run."""
    config, sequences = job.config, job.batch * job.data_ranks
    powers = [1 << n for n in range(15)]
    heads = config.kv_heads
    tps = [n for n in powers if n <= 8 and heads % n == 0]
    pps = [n for n in powers if n <= 32 and n * 2 <= config.num_layers] or [1]
    cps = [n for n in powers if n <= 16 and job.sequence // n >= 4096] or [1]
    experts = 1 if config.moe is None else config.moe.num_experts
    eps = [n for n in powers if n <= min(64, experts) and experts % n == 0]
    for tp, pp, cp, ep in product(tps, pps, cps, eps):
        data, rest = divmod(job.ranks, tp * pp * cp)
        if rest or not data or sequences % data:
            continue
        own = sequences // data
        for size, recompute, strategy in product((1, 2, 4), _RECOMPUTE, (1, 2, 3)):
            passes, rest = divmod(own, size)
            if rest or (pp > 1 and passes < 2 * pp):
                continue
            orders = ("1f1b", "interleaved_1f1b") if pp > 1 else ("1f1b",)
            for schedule in orders:
                if schedule != "1f1b" and (passes % pp or config.num_layers < 2 * pp):
                    continue
                layout = ParallelLayout(dp_shard=data, tp=tp, pp=pp, cp=cp, ep=ep)
                choice: dict[str, Any] = {"microbatches": passes, "batch": own, "layout": layout}
                choice |= {"schedule": schedule, "recompute": recompute, "strategy": strategy}
                try:
                    yield replace(job, config=job.config, stage=None, **choice)
                except (LayoutError, ValueError):
                    continue


_RECOMPUTE = ("none", "selective", "full")


# ------------------------------------------------------------------------------ bounds


@lru_cache(maxsize=64)
def _weights(config: TransformerConfig) -> tuple[float, float, float]:
    """Dense weights of all layers, weights of experts, and those of embedding and head."""
    ends = config.padded_vocab_size * config.hidden_size
    active = float(matrix_parameters(config) - ends)
    experts = 0.0
    if config.moe is not None:
        moe = config.moe
        layers = config.num_layers - moe.first_dense
        expert = 3.0 * config.hidden_size * (moe.ffn_size or config.ffn_width)
        experts = layers * expert * moe.num_experts
        active -= layers * expert * moe.top_k
    return active, experts, ends * (1.0 if config.tie_embeddings else 2.0)


@lru_cache(maxsize=64)
def _flops(config: TransformerConfig, sequence: int) -> float:
    return training_flops_per_token(config, sequence)


def _bounds(job: Job, at: Machine) -> Candidate:
    layout, config = job.layout, job.config
    dense, experts, ends = _weights(config)
    tp, pp, cp, ep = layout.tp, layout.pp, layout.cp, layout.ep
    own = (dense / pp + ends / (1 if pp == 1 else 2)) / tp
    own_experts = experts / pp / ep
    own_weights = own + own_experts
    shards = layout.dp_shard * cp
    states = own / shards + own_experts / max(1.0, shards * tp / ep)
    tokens = job.batch // job.microbatches * job.sequence / cp
    strategy = job.strategy if isinstance(job.strategy, int) else 3
    # Main weights and two moments in fp32, sharded; the weights as well, or whole in bf16.
    memory = {"weights": 4 * states + (0 if strategy == 3 else 2 * own_weights)}
    memory["optimizer state"] = 8 * states
    memory["workspaces"] = float(workspaces_of(at.gpu))
    layer = own_weights / max(1, config.num_layers // pp)
    whole = own_weights if pp > 1 else min(own_weights, 2 * layer + ends / tp)
    memory["gathered units"] = 2 * whole if strategy == 3 else 0.0
    memory["gradients"] = 4 * (own_weights if strategy < 2 or pp > 1 else states) + 4 * layer
    in_flight = min(pp, job.microbatches) * (1.0 + (job.schedule != "1f1b") * (pp - 1) / pp)
    layers = config.num_layers / pp
    saved = 2.0 * _saved(config, str(job.recompute)) / tp * tokens
    memory["activations"] = saved * layers * in_flight
    again = 2.0 * _saved(config, "none") / tp * tokens if job.recompute == "full" else saved
    memory["temporaries"] = again + 6.0 * config.padded_vocab_size / tp * min(tokens, 1024.0)
    return Candidate(job, memory, _seconds(job, at, own_weights, tokens))


def _saved(config: TransformerConfig, recompute: str) -> float:
    """Elements in bf16 that a layer keeps for each token (what plans of Llama 3 8B show)."""
    h, q = config.hidden_size, config.num_heads * config.head_width
    kv, f = config.kv_heads * config.head_width, config.ffn_width
    if config.moe is not None:
        f = config.moe.top_k * (config.moe.ffn_size or f) + (config.moe.shared_ffn_size or 0)
    between = config.stream_width
    if recompute == "full":
        return between
    streams = 0 if between == h else 2 * between
    selective = streams + 2 * h + q + 2 * kv + 2 * f
    return selective if recompute == "selective" else selective + 3 * h + 2 * f + 9 * (q + kv)


def _seconds(job: Job, at: Machine, own_weights: float, tokens: float) -> dict[str, float]:
    """Seconds of a step by category, of a rank with so many weights and tokens of a microbatch."""
    seconds = _computing(job, at, tokens)
    computing = sum(seconds.values())
    # A stage waits at both ends of a step; with two stages on a rank the ends are half as long.
    turns = job.microbatches * (1 if job.schedule == "1f1b" else 2)
    seconds["bubbles"] = computing * (job.layout.pp - 1) / turns
    return {
        **seconds,
        **_exposed_in_layers(job, at, tokens),
        **_exposed_over_data(job, at, own_weights, computing),
    }


def _computing(job: Job, at: Machine, tokens: float) -> dict[str, float]:
    """Seconds of products and of kernels that memory binds."""
    config, layout, costs = job.config, job.layout, at.costs
    flops = _flops(config, job.sequence) * job.tokens / job.ranks
    flops *= 4 / 3 if job.recompute == "full" else 1.0  # forward runs again
    # All products run at the rate of the MLP's, which has most of them.
    narrow = max(1, config.ffn_width // layout.tp)
    shape = (1, int(tokens), narrow, config.hidden_size)
    whole = 2.0 * tokens * narrow * config.hidden_size
    width = {"fp8": 1, "bf16": 2, "fp32": 4}[job.precision]
    probe = Operation("mm", 0, 0, whole, 0, shape, width)
    rate = whole / product_seconds(probe, at)
    # Each element that a layer keeps is read and written some six times, in bf16.
    layers = config.num_layers / layout.pp
    moved = 2.0 * _saved(config, "none") * 6 / layout.tp * tokens * job.microbatches * layers
    moved *= costs.fused if job.compiled else 1.0
    bandwidth = at.gpu.bandwidth * costs.memory
    return {"products": flops / rate, "other kernels": moved / bandwidth}


def _exposed_in_layers(job: Job, at: Machine, tokens: float) -> dict[str, float]:
    """Seconds of messages that a layer waits for: nothing runs beside them."""
    config, layout = job.config, job.layout
    tp, visits = layout.tp, job.microbatches * config.num_layers / layout.pp
    seconds = {}
    if tp > 1:
        # Attention and MLP gather before and scatter after, forward and backward.
        piece = 2.0 * tokens * config.hidden_size * (tp - 1) / tp
        times = 6 if job.recompute == "full" else 4
        call = Message("tp", "tp", "all_gather_into", "", int(piece), 0, tp, 0, None)
        seconds["exposed tp"] = times * visits * message_seconds(call, at)
    if layout.cp > 1:
        # Keys and values go round, and in backward their gradients too; half of that is hidden.
        keys = 4.0 * tokens * config.kv_heads * config.head_width / tp * (layout.cp - 1)
        outside = int(keys) if tp * layout.cp > at.per_host else 0
        call = Message("cp", "cp", "send_recv", "", int(keys), outside, layout.cp, 0, None)
        seconds["exposed cp"] = 1.5 * visits * message_seconds(call, at)
    if layout.ep > 1 and config.moe is not None:
        # Tokens go to their experts and come back, forward and backward.
        rows = 2.0 * tokens * config.hidden_size * config.moe.top_k
        outside = int(rows) if layout.ep > at.per_host else 0
        call = Message("ep", "ep", "all_to_all", "", int(rows), outside, layout.ep, 0, None)
        seconds["exposed ep"] = 4 * visits * message_seconds(call, at)
    return seconds


def _exposed_over_data(
    job: Job, at: Machine, own_weights: float, computing: float
) -> dict[str, float]:
    """Seconds of gathers and reductions that are longer than the kernels beside them."""
    layout = job.layout
    shards = layout.dp_shard * layout.cp
    if shards == 1:
        return {}
    # Strategy 3 gathers before forward and before backward, of each microbatch without a pipeline.
    gathers = 1 if layout.pp > 1 or job.strategy in (1, 2) else 2 * job.microbatches
    reductions = job.microbatches if job.strategy in (2, 3) and layout.pp == 1 else 1
    nbytes = own_weights * (2.0 * gathers + 2.0 * reductions) * (shards - 1) / shards
    near = max(1, at.per_host // (layout.tp * layout.cp))
    crosses = shards * layout.tp > at.per_host
    outside = int(nbytes * (shards - near) / (shards - 1)) if crosses else 0
    call = Message("dp_shard", "", "all_gather_into", "", int(nbytes), outside, shards, 0, None)
    hidden = 0.85 * computing if layout.pp == 1 else 0.0
    return {"exposed dp_shard": max(0.0, message_seconds(call, at) - hidden)}


def _reason(each: Candidate, best: Candidate, limit: float) -> str:
    if each.bytes > limit:
        most = max(each.memory, key=lambda name: each.memory[name])
        return (
            f"does not fit: {each.bytes / GIB:.0f} GiB of {limit / GIB:.0f}, most of it {most} "
            f"({each.memory[most] / GIB:.0f} GiB)"
        )
    others = best.seconds
    worst = max(each.seconds, key=lambda name: each.seconds[name] - others.get(name, 0.0))
    more = each.seconds[worst] - others.get(worst, 0.0)
    return f"{each.step / best.step - 1:+.1%} beside the best: {worst} takes {more:+.3f} s"
