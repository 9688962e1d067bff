"""No setting switches another one off without a word: beside any other it still does something.

Settings come from their own signatures and dataclasses (`fuzz.settings`), so a new one is tried
without a change here. What a step does is looked at from many sides, and a setting's effect is that
some of them change. The default tests take as many settings as go together. Each of them has to
have an effect beside all the others, which covers all their pairs. The slow ones take every pair.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from fuzz.settings import NEEDS_HARDWARE, drawable
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy

from lamina.collectives import Ledger
from lamina.ddp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    ShardedOptimizer,
    full_gradients,
    full_parameters,
    memory_plan,
)
from lamina.fsdp import MixedPrecisionPolicy, fully_shard, shard_module
from lamina.mesh import ParallelLayout

NAMES = {**vars(torch.distributed.fsdp), "TorchPolicy": TorchPolicy, "torch": torch}

WRAPPERS = [
    ("fully_shard", 3),
    ("fully_shard", 1),
    ("DistributedDataParallelConfig", 0),
    ("DistributedDataParallelConfig", 1),
    ("shard_module", 3),
]
REFUSALS = (ValueError, NotImplementedError, RuntimeError)

SYNONYMS = {("broadcast_buffers", "True"), ("broadcast_buffers", "False")}  # 'forward', 'never'
OF_FP32 = "the model's parameters are in fp32, so that this is the default"
NEEDS_GPU = "about memory, graphs or kernels of GPUs"
NO_EFFECT = {
    **dict.fromkeys(NEEDS_HARDWARE, NEEDS_GPU),
    "device": "the model is there already",
    "offload_policy=OffloadPolicy()": "torch's word for no offloading",
    "maxpool_double_buffer": "what fsdp_double_buffer does in any case, as its text says",
    "fsdp_db_use_persist_buf_on_alloc_fail": "what fsdp_double_buffer does in any case",
    "reduce_message_bytes": "of messages over NCCL",
    "average_in_collective": "a sum of two ranks is halved with the same bits before and after it",
    "reduce_scatter_with_fp32_accumulation": "what all reductions do but native, which refuses",
    "grad_reduce_in_fp32": OF_FP32,
    **dict.fromkeys(("num_buckets=1", "bucket_size=4096", "bucket_size=33554432"), "one bucket"),
    "num_distributed_optimizer_instances=1": "the mesh has no replicas",
    "main_params_dtype": "main weights are never below the parameters' own precision",
    "main_grads_dtype=torch.float32": OF_FP32,
    "grad_comm_dtype=torch.float32": OF_FP32,
    "param_dtype=torch.float32": OF_FP32,
    "moments_dtype=torch.float32": OF_FP32,
    "output_dtype=torch.float32": OF_FP32,
    "mp_policy=None": OF_FP32,
    "mp_policy=TorchPolicy(param_dtype=torch.float32)": OF_FP32,
    "keep_full_precision=('part0*',)": "no parameter here has such a name",
    "encoded": "about weight_codec, which is not drawn",
}
"""Settings that change nothing in this model on these ranks, with the reason."""

PAIRS = {
    ("reshard_after_forward=True", "enable_fine_grained_param_gather"): "True and None differ in "
    "the root's own weights, of which it has none where each module is a unit",
    ("broadcast_buffers='never'", "sync_module_states"): "nothing is sent at the start then, and "
    "the default sends nothing later",
    ("fsdp_double_buffer", "check_storage"): "released memory is kept for this check too",
    ("keep_tensors_whole", "pad_buckets_for_high_nccl_busbw"): "a shard of 2^16 elements holds all "
    "of this model",
    ("grad_comm_dtype=torch.bfloat16", "param_dtype"): "gradients travel in that dtype already",
    ("keep_full_precision=('*norm*',)", "disable_bucketing"): "without param_dtype it only makes a "
    "buffer of its own of what it names, and each parameter has one then",
    ("keep_full_precision=('*norm*',)", "enable_fine_grained_param_gather"): "the same: what it "
    "names is a unit of its own",
    ("reproducible", "invariant"): "the second is the first, and asks more of modules",
    ("reduce_budget=4096", "reproducible"): "two units of this model, which is the default too "
    "where each microbatch is reduced",
    ("reduce_budget=4096", "invariant"): "the same",
    ("reduce_budget=4096", "offload_policy=CPUOffloadPolicy()"): "two units, which is the default "
    "where sums go to the host",
    ("reproducible", "grad_comm_dtype"): "sums of eight numbers in bf16 are exact in any order",
    ("reproducible", "param_dtype"): "the same: gradients travel in bf16",
    ("output_dtype=torch.bfloat16", "param_dtype"): "outputs are in that dtype already",
}
"""Settings that change nothing beside another one that does not refuse them, with the reason."""


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm = nn.Linear(16, 16), nn.LayerNorm(16, bias=False)
        self.register_buffer("mean", torch.randn(16) / 10)  # ranks' differ

    def forward(self, x):
        self.mean.lerp_(x.detach().mean(0).to(self.mean.dtype), 0.1)
        return x * (1 + self.mean.to(x.dtype)) + self.norm(self.up(x)).tanh()


@dataclass(frozen=True)
class Choice:
    """A setting with a value that is not its default; `policy` says whose field it is."""

    name: str
    value: str
    policy: str = ""

    def __str__(self):
        return f"{self.name}={self.value}"

    def is_a(self, text):
        return text in (self.name, str(self))

    @property
    def tried(self):
        return not any(map(self.is_a, NO_EFFECT))

    def listed(self, other):
        """Whether it may do nothing beside another one, or the other way round."""
        return any(
            (self.is_a(one) and other.is_a(two)) or (other.is_a(one) and self.is_a(two))
            for one, two in PAIRS
        )


def choices_of(source):
    """What is tried of a wrapper: each value of each setting, and of its policy."""
    tables = {"": drawable(source)}
    if source == "fully_shard":
        tables["mixed_precision_policy"] = drawable("MixedPrecisionPolicy")
    return [
        Choice(name, value, policy)
        for policy, table in tables.items()
        for name, values in table.items()
        for value in values
        if (name, value) not in SYNONYMS
    ]


def words(chosen):
    """Keyword arguments."""
    values = {c.name: eval(c.value, NAMES) for c in chosen if not c.policy}
    inner = {c.name: eval(c.value, NAMES) for c in chosen if c.policy}
    return {**values, "mixed_precision_policy": MixedPrecisionPolicy(**inner)} if inner else values


def wrapped(source, strategy, chosen, mesh):
    settings = words(chosen)
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(
        nn.Linear(16, 16, bias=False), Part(), Part(), Part()
    )  # the root has weights too
    if source == "DistributedDataParallelConfig":
        settings["use_distributed_optimizer"] = strategy > 0
        model = DistributedDataParallel(model, DistributedDataParallelConfig(**settings), mesh)
        return model, ShardedOptimizer(torch.optim.AdamW(model.parameters(), 1e-2), model, mesh)
    if source == "fully_shard":
        settings.update(device_mesh=mesh, zero_dp_strategy=strategy, fsdp_unit_modules=[Part])
        return fully_shard(model, torch.optim.AdamW(model.parameters(), 1e-2), **settings)
    for module in [*model[1:], model]:
        shard_module(module, mesh, **settings)
    return model, torch.optim.AdamW(model.parameters(), 1e-2)


def digest(tensors):
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        found.update(f"{name} {tensor.dtype}".encode() + raw.numpy().tobytes())
    return found.hexdigest()


@functools.cache
def observed(source, strategy, chosen, microbatches=2):
    """What a step of these settings does on this rank; None if they are refused."""
    mesh = ParallelLayout().build("cpu")
    try:
        return step(*wrapped(source, strategy, chosen, mesh), microbatches)
    except REFUSALS:
        return None


def step(model, optimizer, microbatches):
    """What the model and its optimizer do on this rank, from many sides."""
    seen, live = {}, []

    def look(*_):
        groups = list(model.parameter_groups())
        storages = {
            p.untyped_storage()._cdata: p.untyped_storage().nbytes()
            for group in groups
            for p in group.compute_parameters
        }
        states = [group.weights.state.name for group in groups if hasattr(group.weights, "state")]
        live.append((len(ledger.records), sorted(storages.values()), states))

    with Ledger() as ledger:
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(look)
                module.register_full_backward_hook(look)
        x = torch.randn(5, 16, generator=torch.Generator().manual_seed(dist.get_rank()))
        x.requires_grad_()
        with model.no_sync():
            for number in range(1, microbatches):
                model(x * number).square().sum().backward()
        output = model(x)
        output.square().sum().backward()
        seen["gradients"] = digest(full_gradients(model))
        seen["types of gradients"] = [
            (type(p.grad), getattr(p.grad, "dtype", None), hasattr(p, "decoupled_grad"))
            for p in model.parameters()
        ]
        optimizer.step()
        optimizer.zero_grad()
        look()
        for scale in (float("nan"), 1e30):
            try:
                (model(x).sum() * scale).backward()
            except (RuntimeError, ValueError) as error:
                seen[f"gradient times {scale}"] = str(error)
    # Times are of one clock: their order is what is issued, and waited for, before what.
    times = [(r.issued, n, 0) for n, r in enumerate(ledger.records)]
    times += [(r.waited, n, 1) for n, r in enumerate(ledger.records) if r.waited is not None]
    seen["order"] = [event for _, *event in sorted(times)]
    seen["messages"] = [
        (r.axis, r.op, r.purpose, r.dtype, r.bytes, r.asynchronous) for r in ledger.records
    ]
    seen["weights"] = live
    seen["plan"] = memory_plan(model)
    seen["parameters"] = digest(full_parameters(model))
    seen["buffers"] = digest(dict(model.named_buffers()))
    seen["output"] = output.dtype
    seen["class"] = [kind.__name__ for kind in type(model).__mro__]
    seen["state"] = [(k, type(v), tuple(v.shape)) for k, v in model.state_dict().items()]
    state = [v for each in optimizer.state.values() for v in each.values()]
    seen["optimizer"] = [(type(v), v.dtype) for v in state if isinstance(v, torch.Tensor)]
    seen["layout"] = [
        (g.layout.size, [g.layout.spans(each.name) for each in g.layout.specs])
        for g in model.parameter_groups()
    ]
    return seen


def is_same(one, two):
    """Whether no rank sees a difference."""
    same = torch.tensor(float(one == two))
    dist.all_reduce(same, dist.ReduceOp.MIN)
    return bool(same)


@functools.cache
def together(source, strategy):
    """As many settings as go together, in their order; one value of each."""
    mesh = ParallelLayout().build("cpu")
    chosen = ()
    # Twice, because some need others that come after them.
    for c in [c for c in choices_of(source) if c.tried] * 2:
        if any(c.name == other.name or c.listed(other) for other in chosen):
            continue
        try:
            wrapped(source, strategy, (*chosen, c), mesh)
        except REFUSALS:
            continue
        chosen += (c,)
    return chosen


SHARES = 6


@pytest.mark.ranks(2)
@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize(("source", "strategy"), [WRAPPERS[0], WRAPPERS[3]])
def test_a_setting_still_does_something_beside_all_that_go_with_it(source, strategy, share, ranks):
    chosen = together(source, strategy)
    assert len(chosen) >= 10, chosen
    everything = observed(source, strategy, chosen)
    assert everything is not None
    silent = []
    for c in chosen[share::SHARES]:
        others = tuple(each for each in chosen if each != c)
        if is_same(everything, observed(source, strategy, others)):
            silent.append(str(c))
    assert not silent, f"no effect beside {' '.join(map(str, chosen))}: {silent}"


@pytest.mark.slow
@pytest.mark.ranks(2, timeout=1500)
@pytest.mark.parametrize(("source", "strategy"), WRAPPERS)
def test_each_of_two_settings_does_something_beside_the_other_or_they_are_refused(
    source, strategy, ranks
):
    # With fewer microbatches the order of summation of `reproducible` is that of strategy 3.
    seen_of = functools.partial(observed, source, strategy, microbatches=4)
    plain = seen_of(())
    alone = {c: seen_of((c,)) for c in choices_of(source)}
    wrong = []
    for c, seen in alone.items():
        if seen is not None and is_same(seen, plain) and c.tried:
            wrong.append(f"{c} does nothing, and NO_EFFECT does not say why")
        elif seen is not None and not is_same(seen, plain) and not c.tried:
            wrong.append(f"{c} does something, and NO_EFFECT says why not")
    active = [c for c in alone if alone[c] is not None and c.tried]
    for one, two in itertools.combinations(active, 2):
        if one.name == two.name or one.listed(two):
            continue
        both = seen_of((one, two))
        if both is None:
            continue
        for on, off in ((one, two), (two, one)):
            if is_same(both, alone[on]):
                wrong.append(f"{off} does nothing beside {on}")
    assert not wrong, "\n".join(wrong)
