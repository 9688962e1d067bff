"""Cases from a seed: everything about case INDEX follows from SEED and INDEX."""

from __future__ import annotations

import random
from dataclasses import replace

from fuzz import parts as catalogue
from fuzz.case import AFTER, FINAL, MICROBATCHES, Case, Part, Wrapper
from fuzz.settings import draw as draw_settings
from fuzz.settings import narrow

KINDS = [cls.__name__ for cls in catalogue.PARTS]
LEAPS = frozenset({"Embedded", "Bag", "Branches", "Experts"})
"""A small difference in their input makes a large one in their output."""

HOW = ("frozen", "again", "recomputed", "reentrant", "compiled", "unused", "sequential", "no_grad")
SMOOTH = (
    "torch.optim.SGD(groups, lr=0.05, foreach=False)",
    "torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=0.1, foreach=False)",
    "torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True)",
    "torch.optim.Adam(groups, lr=0.02, eps=1e-3, foreach=False)",
    "torch.optim.AdamW(groups, lr=0.02, eps=1e-3, weight_decay=0.1, foreach=False)",
    "torch.optim.AdamW(groups, lr=0.02, eps=1e-3)",
    "torch.optim.AdamW(groups, lr=0.02, eps=1e-3, fused=True)",
    "torch.optim.AdamW(groups, lr=0.02, eps=1e-3, amsgrad=True)",
    "torch.optim.RMSprop(groups, lr=0.01, eps=1e-2, momentum=0.5)",
    "torch.optim.Adagrad(groups, lr=0.02, eps=1e-2)",
    "torch.optim.Adamax(groups, lr=0.02, eps=1e-2)",
    "torch.optim.NAdam(groups, lr=0.02, eps=1e-2)",
    "torch.optim.RAdam(groups, lr=0.02, eps=1e-2)",
    "torch.optim.ASGD(groups, lr=0.05)",
    "torch.optim.Adadelta(groups, lr=0.5, eps=1e-2)",
)
RARE = (
    "torch.optim.LBFGS(groups, lr=0.1, max_iter=2)",
    "torch.optim.Adafactor(groups, lr=0.02)",
    "torch.optim.Muon([p for p in groups if p.ndim == 2], lr=0.02)",
    "torch.optim.Rprop(groups, lr=0.01)",
)
"""Some of them are refused, some look at whole tensors."""


def draw(seed: int | str, index: int) -> Case:
    """The case of that name."""
    rng = random.Random(f"{seed}:{index}")
    wrappers = [_wrapper(rng, ranks := rng.choice((1, 2, 2, 2, 3, 4)))]
    steps = _steps(rng, wrappers[0])
    if any("reload" in after for _, after in steps):
        wrappers.append(_wrapper(rng, ranks, kinds=("ddp", "fully_shard", "shard_module")))
    loose = any(narrow(wrapper.settings) for wrapper in wrappers)
    case = Case(
        name=f"{seed}:{index}",
        ranks=ranks,
        parts=_parts(rng, loose),
        wrappers=tuple(wrappers),
        steps=steps,
        output=rng.choice(("tensor", "tensor", "dict", "tuple", "loss")),
        groups=rng.choice(("all", "all", "trained", "two", "some", "one each")),
        optimizer=rng.choice(SMOOTH if loose or rng.random() < 0.95 else RARE),
        scheduler=rng.random() < 0.2 and len(wrappers) == 1,
        differs=rng.random() < 0.3 and _takes_first_values(wrappers),
        auto=wrappers[0].kind != "fully_shard" or len(wrappers) > 1 or rng.random() < 0.9,
    )
    if "Muon" in case.optimizer or "LBFGS" in case.optimizer:
        case = case.changed(groups="all")
    case = _within_fsdp2(case) if wrappers[0].kind == "torch" else _further(rng, case)
    strided = {"Strided", "ChannelsLast"} & {part.kind for part in case.parts}
    if "fused" in case.optimizer and strided:
        # torch's fused kernels for CPUs read weights of other strides as if they were contiguous.
        return case.changed(optimizer=case.optimizer.replace("fused", "foreach"))
    return case


def _further(rng: random.Random, case: Case) -> Case:
    """What was drawn later, so that cases without it are what they were."""
    if rng.random() < 0.1:
        wrappers = tuple(_by_patterns(rng, case, wrapper) for wrapper in case.wrappers)
        case = case.changed(wrappers=wrappers)
    if rng.random() < 0.1 and all(wrapper.kind == "fully_shard" for wrapper in case.wrappers):
        case = case.changed(meta=True, differs=False)
    # torch's set_state_dict(full_state_dict=True) fails over an optimizer that keeps no tensors, in
    # one process of plain PyTorch too ("Expected device to be set").
    keeps_nothing = case.optimizer == SMOOTH[0]
    if rng.random() < 0.4 and not keeps_nothing:
        steps = tuple(
            (before, tuple("set state" if name == "reload" else name for name in after))
            for before, after in case.steps
        )
        case = case.changed(steps=steps)
    return case


def _by_patterns(rng: random.Random, case: Case, wrapper: Wrapper) -> Wrapper:
    if wrapper.kind != "fully_shard" or wrapper.outer:
        return wrapper
    names = ["*.bias", *(f"part{number}.*" for number in range(len(case.parts)))]
    chosen = {name: rng.randrange(4) for name in rng.sample(names, min(2, len(names)))}
    return replace(wrapper, patterns={**chosen, "*": wrapper.strategy})


def _within_fsdp2(case: Case) -> Case:
    """Without what torch's FSDP2 cannot do: it ends the process, hangs, or drops gradients."""
    parts = tuple(Part("Affine", p.how) if p.kind == "Branches" else p for p in case.parts)
    steps = tuple(
        (tuple("plain" if n in ("retain", "penalty") else n for n in before), after)
        for before, after in case.steps
    )
    return case.changed(parts=parts, steps=steps)


def _takes_first_values(wrappers: list[Wrapper]) -> bool:
    first = wrappers[0]
    return first.settings.get("sync_module_states") != "False" and first.kind != "shard_module"


def _parts(rng: random.Random, loose: bool) -> tuple[Part, ...]:
    kinds = [kind for kind in KINDS if not (loose and kind in LEAPS)]
    parts: list[Part] = []
    for place in range(rng.choice((1, 2, 2, 3, 3, 4, 5))):
        if parts and rng.random() < 0.08:
            same = rng.randrange(place)
            parts.append(Part(parts[same].kind, same_as=same))
            continue
        how = tuple(word for word in HOW if rng.random() < (0.02 if word == "compiled" else 0.05))
        kind = rng.choice(kinds)
        if kind == "Random":  # a compiler draws other numbers
            how = tuple(word for word in how if word != "compiled")
        parts.append(Part(kind, how))
    if parts[0].same_as >= 0 or all("unused" in part.how for part in parts):
        parts[0] = Part(parts[0].kind)
    return tuple(parts)


def _wrapper(
    rng: random.Random,
    ranks: int,
    kinds: tuple[str, ...] = ("ddp", "ddp", "fully_shard", "fully_shard", "fully_shard",
                              "shard_module", "shard_module", "torch"),
) -> Wrapper:  # fmt: skip
    kind = rng.choice(kinds)
    if kind == "torch" and rng.random() < 0.6:
        kind = "fully_shard"
    strategy = {"ddp": rng.randrange(3), "fully_shard": rng.randrange(4)}.get(kind, 3)
    replicas = rng.choice([n for n in (1, 1, 2, 3, 4) if ranks % n == 0])
    mesh = rng.choice(("layout", "device") if replicas > 1 else ("none", "layout", "device"))
    if kind == "torch" and mesh == "none":
        mesh = "device"
    source = {
        "ddp": "DistributedDataParallelConfig",
        "torch": "TorchFullyShardedDataParallelConfig",
    }.get(kind, kind)
    count = rng.choice((0, 0, 0, 1, 1, 2, 3))
    given = {
        "ddp": {"use_distributed_optimizer": str(strategy > 0)}
        | ({"zero_dp_strategy": "2"} if strategy == 2 else {}),
        "fully_shard": {"zero_dp_strategy": str(strategy)},
    }.get(kind, {})
    return Wrapper(
        kind=kind,
        strategy=strategy,
        replicas=replicas,
        outer=int(kind == "fully_shard" and replicas > 1 and strategy == 3 and rng.random() < 0.4),
        mesh=mesh,
        settings=draw_settings(rng, source, count, given),
        units=rng.random() < 0.5,
        form=rng.choice(("both", "both", "apart", "before")),
    )


def _steps(
    rng: random.Random, wrapper: Wrapper
) -> tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]:
    kept: set[str] = set()
    reloaded = False
    steps = []
    for _ in range(rng.choice((1, 2, 2, 3, 3, 4))):
        before = _microbatches(rng)
        after = _after(rng, kept, reloaded)
        reloaded = reloaded or "reload" in after
        steps.append((before, after))
    return tuple(steps)


def _microbatches(rng: random.Random) -> tuple[str, ...]:
    names = ["plain"]
    if rng.random() < 0.3:
        names = [rng.choice(sorted(FINAL))]
    for _ in range(rng.choice((0, 0, 0, 1, 1, 2))):
        name = "no_sync" if rng.random() < 0.6 else rng.choice(sorted(MICROBATCHES))
        names.insert(0, name)
    if rng.random() < 0.1:
        names.insert(rng.randrange(len(names) + 1), rng.choice(("evaluate", "no backward")))
    return tuple(names)


_PLAIN = ("clip", "torch clip", "clip values", "scale")


def _after(rng: random.Random, kept: set[str], reloaded: bool) -> tuple[str, ...]:
    names = []
    if rng.random() < 0.3:
        names.append(rng.choice(_PLAIN))
    names.append("step" if rng.random() < 0.93 else "closure")
    names.append(rng.choice(("zero", "zero", "zero", "zero in place", "model zero")))
    if rng.random() < 0.04:
        names.remove(rng.choice(names[-2:]))
    if rng.random() < 0.35:
        extra = rng.choice(sorted(set(AFTER) - set(_PLAIN) - {"step", "closure", "set state"}))
        allowed = {
            "thaw": "freeze" in kept,
            "state back": "state" in kept and not reloaded,
            "optimizer state back": "optimizer state" in kept and not reloaded,
            "reload": not reloaded,
        }
        if allowed.get(extra, True):
            kept.add(extra)
            names.append(extra)
    return tuple(names)
