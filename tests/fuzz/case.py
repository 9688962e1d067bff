"""A case: what was drawn, and the program that it stands for.

The program's text is what runs, on ranks and in the oracle, and what a script has. So nothing is
between what failed and what is shown. `program_of` writes it.
"""

from __future__ import annotations

import ast
import functools
import json
import re
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

CATALOGUE = Path(__file__).parent / "parts.py"

HEADER = """\
from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import zlib

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from lamina.ddp import DistributedDataParallel, DistributedDataParallelConfig, ShardedOptimizer
from lamina.fsdp import (
    MixedPrecisionPolicy,
    TorchFullyShardedDataParallel,
    TorchFullyShardedDataParallelConfig,
    fully_shard,
    fully_shard_model,
    fully_shard_optimizer,
    shard_module,
)
"""


@dataclass(frozen=True)
class Part:
    """A module of the model.

    Attributes:
        kind: a class of the catalogue.
        how: "frozen", "again" (called twice), "recomputed", "reentrant", "compiled", "unused",
            "sequential" (inside a container), "no_grad"; in any number.
        same_as: the place of an earlier part that this one is, the same module; or -1.
    """

    kind: str
    how: tuple[str, ...] = ()
    same_as: int = -1


@dataclass(frozen=True)
class Wrapper:
    """How a model is wrapped.

    Attributes:
        kind: "ddp", "fully_shard", "shard_module" or "torch".
        strategy: 0 to 3; 3 of the last two.
        replicas: ranks along the outer axis.
        outer: the outer strategy of `fully_shard`.
        mesh: "none", "layout" (a ParallelMesh) or "device" (a DeviceMesh).
        settings: further ones, as expressions.
        units: whether the classes of units are named.
        form: of the call: "both", "apart", "before" (the optimizer is made first).
        patterns: of `fully_shard`: a strategy for each pattern of names, instead of one for all.
    """

    kind: str
    strategy: int = 0
    replicas: int = 1
    outer: int = 0
    mesh: str = "layout"
    settings: dict[str, str] = field(default_factory=dict)
    units: bool = False
    form: str = "both"
    patterns: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """Everything that was drawn.

    Attributes:
        name: "SEED:INDEX".
        ranks: 1 to 4.
        parts: of the model, in the order of its forward.
        output: "tensor", "dict", "tuple", "loss" (computed inside).
        groups: of the optimizer: "all", "trained", "two", "some".
        optimizer: an expression over `groups`.
        wrappers: the first one, and those that the loop reloads into.
        steps: of the loop: each a list of microbatches and a list of what follows the sum.
        residual: whether parts add to what they are given.
        differs: ranks begin with values of their own.
        auto: False: `sync_model_each_microbatch=False`.
        meta: the model is on the meta device when it is wrapped, and `init_module` fills it.
    """

    name: str
    ranks: int
    parts: tuple[Part, ...]
    wrappers: tuple[Wrapper, ...]
    steps: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]
    output: str = "tensor"
    groups: str = "all"
    optimizer: str = "torch.optim.SGD(groups, lr=0.05)"
    scheduler: bool = False
    differs: bool = False
    auto: bool = True
    meta: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Case:
        given = json.loads(text)
        return Case(
            **{
                **given,
                "parts": tuple(
                    Part(p["kind"], tuple(p["how"]), p["same_as"]) for p in given["parts"]
                ),
                "wrappers": tuple(Wrapper(**w) for w in given["wrappers"]),
                "steps": tuple((tuple(a), tuple(b)) for a, b in given["steps"]),
            }
        )

    def changed(self, **how: Any) -> Case:
        return replace(self, **how)


# -- the program ----------------------------------------------------------------------------------


def program_of(case: Case) -> str:
    """The text of the case's program."""
    blocks = [HEADER, *_sources(case), _net(case), _build(case), _optimizer(case)]
    for number, wrapper in enumerate(case.wrappers):
        blocks.append(_wrapper(case, wrapper, number))
    blocks.append(_program(case))
    return "\n\n".join(block.strip("\n") for block in blocks) + "\n"


@functools.cache
def catalogue() -> dict[str, str]:
    """The source of each class of the catalogue, and of what else has a capital letter."""
    text = CATALOGUE.read_text()
    lines = text.split("\n")
    found = {}
    for node in ast.parse(text).body:
        name = getattr(node, "name", "") or getattr(getattr(node, "targets", [None])[0], "id", "")
        if name[:1].isupper() and name != "PARTS":
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
            found[name] = "\n".join(lines[first - 1 : node.end_lineno])
    return found


def _sources(case: Case) -> list[str]:
    """The classes that the program needs, those that others name first."""
    chosen: list[str] = []

    def add(name: str) -> None:
        if name in chosen:
            return
        for word in re.findall(r"(?<![\w.])[A-Z]\w+", catalogue()[name]):
            if word != name and word in catalogue():
                add(word)
        chosen.append(name)

    for part in case.parts:
        add(part.kind)
    return [catalogue()[name] for name in chosen]


def _net(case: Case) -> str:
    lines = ["class Net(nn.Module):", "    def __init__(self):", "        super().__init__()"]
    for number, part in enumerate(case.parts):
        made = f"{part.kind}()"
        if part.same_as >= 0:
            made = f"self.part{part.same_as}"
        elif "sequential" in part.how:
            made = f"nn.Sequential({part.kind}(), nn.Identity())"
        frozen = ".requires_grad_(False)" if "frozen" in part.how else ""
        lines.append(f"        self.part{number} = {made}{frozen}")
    lines += ["", "    def forward(self, x):"]
    for number, part in enumerate(case.parts):
        lines += [f"        {line}" for line in _call(number, part)]
    lines.append(
        {
            "tensor": "        return x",
            "dict": "        return {'out': x, 'none': None, 'more': [x.detach(), 3]}",
            "tuple": "        return (x, (x * 2,), 'text')",
            "loss": "        return loss_of(x)",
        }[case.output]
    )
    return "\n".join(lines)


def _call(number: int, part: Part) -> list[str]:
    name = f"self.part{number}"
    if "unused" in part.how:
        return []
    if "reentrant" in part.how:
        value = f"checkpoint({name}, x, use_reentrant=True)"
    elif "recomputed" in part.how:
        value = f"checkpoint({name}, x, use_reentrant=False)"
    else:
        value = f"{name}(x)"
    lines = [f"x = 0.5 * x + {value}"]
    if "no_grad" in part.how:
        lines = ["with torch.no_grad():", f"    y = {name}(x)", "x = x + y"]
    return lines * (2 if "again" in part.how else 1)


LOSS = """
def loss_of(out):
    if isinstance(out, dict):
        out = out["out"]
    if isinstance(out, tuple):
        out = out[0] + out[1][0]
    return (out.float() - 1).square().sum() / 16 if out.ndim else out
"""
FILL = """

def fill(module, done=()):
    own = {**module._parameters, **module._buffers}
    for name, held in own.items():
        if held is None or id(held) in done:
            continue
        seed = zlib.crc32(f"{type(module).__name__} {name} {tuple(held.shape)}".encode())
        value = torch.randn(held.shape, generator=torch.Generator().manual_seed(seed))
        if name in module._buffers:
            held.fill_(0.5)
        elif held.is_floating_point():
            held.copy_(0.3 * value if held.ndim > 1 else 0.7 + 0.1 * value)
        else:
            held.zero_()
    return [id(held) for held in own.values()]
"""
"""Fills the meta tensors of one module. Tied ones get the values of the first that holds them."""


def _build(case: Case) -> str:
    seed = "rank" if case.differs else "0"
    compiled = [n for n, part in enumerate(case.parts) if "compiled" in part.how]
    compiling = "".join(f"\n    model.part{n} = me.compile(model.part{n})" for n in compiled)
    if case.meta:
        return f"""{LOSS}{FILL}

def build(me, rank):
    with torch.device("cpu" if me.plain else "meta"):
        model = Net()
    done = []
    with torch.no_grad():
        for module in model.modules() if me.plain else ():
            done += fill(module, done){compiling}
    torch.manual_seed(100 + me.rank)
    return model"""
    return f"""{LOSS}

def build(me, rank):
    torch.manual_seed(0)
    model = Net()
    generator = torch.Generator().manual_seed(5 + {seed})
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point():
                value = torch.randn(p.shape, generator=generator)
                p.copy_(0.3 * value if p.ndim > 1 else 0.7 + 0.1 * value){compiling}
    torch.manual_seed(100 + me.rank)
    return model"""


def _optimizer(case: Case) -> str:
    groups = {
        "all": "list(model.parameters())",
        "trained": "[p for p in model.parameters() if p.requires_grad]",
        "some": "list(model.parameters())[1:] or list(model.parameters())",
        "two": "[{'params': [p for p in model.parameters() if p.ndim > 1]}, "
        "{'params': [p for p in model.parameters() if p.ndim <= 1], 'lr': 0.02}]",
        "one each": "[{'params': [p], 'lr': 0.01 * (n % 5 + 1)} "
        "for n, p in enumerate(model.parameters())]",
    }[case.groups]
    filtered = ""
    if case.groups in ("two", "one each"):
        filtered = "\n    groups = [group for group in groups if group['params']]"
    return f"""
def make(model):
    groups = {groups}{filtered}
    return {case.optimizer}"""


def _mesh(wrapper: Wrapper) -> str:
    return f"mesh({wrapper.mesh!r}, {wrapper.replicas})"


def _wrapper(case: Case, wrapper: Wrapper, number: int) -> str:
    lines = [f"def wrapper{number}(model, make, mesh):"]
    settings = dict(wrapper.settings)
    names = [part.kind for part in case.parts]
    lines += {
        "ddp": _ddp,
        "fully_shard": _fully_shard,
        "shard_module": _shard_module,
        "torch": _torch,
    }[wrapper.kind](case, wrapper, settings, list(dict.fromkeys(names)))
    lines += ["", "", f"SUMS[{f'wrapper{number}'!r}] = {sums_of(case, wrapper)}"]
    if number == 0:
        lines[:0] = ["SUMS = {}", "", ""]
    return "\n".join(lines)


def _keywords(settings: dict[str, str]) -> str:
    return "".join(f", {name}={value}" for name, value in settings.items())


def _ddp(case: Case, wrapper: Wrapper, settings: dict[str, str], names: list[str]) -> list[str]:
    if wrapper.strategy:
        settings["use_distributed_optimizer"] = "True"
    if wrapper.strategy == 2:
        settings["zero_dp_strategy"] = "2"
    lines = [
        f"    config = DistributedDataParallelConfig({_keywords(settings).removeprefix(', ')})"
    ]
    if wrapper.form == "before":
        lines.append("    optimizer = make(model)")
    lines.append(f"    model = DistributedDataParallel(model, config, {_mesh(wrapper)})")
    if wrapper.form != "before":
        lines.append("    optimizer = make(model)")
    if wrapper.strategy or wrapper.form != "apart":
        lines.append(f"    optimizer = ShardedOptimizer(optimizer, model, {_mesh(wrapper)})")
    return [*lines, "    return model, optimizer"]


def _fully_shard(
    case: Case, wrapper: Wrapper, settings: dict[str, str], names: list[str]
) -> list[str]:
    strategy = str(wrapper.patterns or wrapper.strategy)
    given = {"device_mesh": _mesh(wrapper), "zero_dp_strategy": strategy}
    if case.meta:
        given["init_module"] = "fill"
    if wrapper.mesh == "device":
        given["dp_shard_dim"] = "'dp_shard'"
        if wrapper.replicas > 1:
            given["dp_outer_dim"] = "'dp_replicate'"
    if wrapper.outer:
        given["outer_dp_sharding_strategy"] = str(wrapper.outer)
    if wrapper.units:
        given["fsdp_unit_modules"] = f"[{', '.join(names)}]"
    if not case.auto:
        given["sync_model_each_microbatch"] = "False"
    words = _keywords({**given, **settings})
    if wrapper.form == "both":
        return [f"    return fully_shard(model, make(model){words})"]
    lines = [f"    model = fully_shard_model(model{words})"]
    if wrapper.form == "before":
        lines[:0] = ["    optimizer = make(model)"]
        return [*lines, "    return model, fully_shard_optimizer(optimizer, model)"]
    return [*lines, "    return model, fully_shard_optimizer(make(model), model)"]


def _shard_module(
    case: Case, wrapper: Wrapper, settings: dict[str, str], names: list[str]
) -> list[str]:
    lines = [f"    mesh = {_mesh(wrapper)}"]
    if wrapper.units:
        chosen = f"({', '.join(names)},)"
        lines += [
            f"    for module in [m for m in model.modules() if isinstance(m, {chosen})]:",
            "        if any(p.requires_grad for p in module.parameters()):",
            f"            shard_module(module, mesh{_keywords(settings)})",
        ]
    return [
        *lines,
        f"    model = shard_module(model, mesh{_keywords(settings)})",
        "    return model, make(model)",
    ]


def _torch(case: Case, wrapper: Wrapper, settings: dict[str, str], names: list[str]) -> list[str]:
    words = _keywords(settings).removeprefix(", ")
    units = f", [{', '.join(names)}]" if wrapper.units else ""
    return [
        f"    config = TorchFullyShardedDataParallelConfig({words})",
        f"    model = TorchFullyShardedDataParallel(model, config, {_mesh(wrapper)}{units})",
        "    return model, make(model)",
    ]


def sums_of(case: Case, wrapper: Wrapper) -> dict[str, Any]:
    """In which order the wrapper promises to sum, and what it does to buffers."""
    settings = wrapper.settings
    words = {0: "once", 1: "once", 2: "every", 3: "every"}
    cadence: Any = words[wrapper.strategy]
    if wrapper.patterns:
        cadence = [(pattern, words[strategy]) for pattern, strategy in wrapper.patterns.items()]
    if "True" in (settings.get("reproducible"), settings.get("invariant")):
        cadence = "reproducible"
    policy = {"ddp": "'forward'", "torch": "'never'"}.get(wrapper.kind, "'start'")
    inner = case.ranks // wrapper.replicas
    # An axis of one rank shards nothing, and replicas are summed as its ranks would be.
    found: dict[str, Any] = {"cadence": cadence, "inner": case.ranks if inner == 1 else inner}
    if settings.get("broadcast_buffers", policy) in ("'forward'", "True"):
        found["buffers"] = True
    if settings.get("calculate_per_token_loss") == "True":
        found["mean"] = False
    return found


# -- the loop -------------------------------------------------------------------------------------

FORWARD = "loss_of(model(me.batch()))"
MICROBATCHES: dict[str, str] = {
    "plain": f"me.backward({FORWARD})",
    "no_sync": f"with me.no_sync(model):\n    me.backward({FORWARD}, last=False)",
    "rows": "me.backward(loss_of(model(me.batch(2 + me.rank))))",
    "two at once": f"me.backward({FORWARD} + {FORWARD})",
    "two, then": f"a = {FORWARD}\nb = {FORWARD}\nme.backward(a)\nme.backward(b)",
    "two, back": f"a = {FORWARD}\nb = {FORWARD}\nme.backward(b)\nme.backward(a)",
    "two inside": f"with me.no_sync(model):\n    a = {FORWARD}\n    b = {FORWARD}\n"
    "    me.backward(a, last=False)\nme.backward(b)",
    "retain": f"a = {FORWARD}\nme.backward(a, retain_graph=True)\nme.backward(a)",
    "penalty": "x = me.batch().requires_grad_()\na = loss_of(model(x))\n"
    "(slope,) = torch.autograd.grad(a, x, create_graph=True)\n"
    "me.backward(a + 0.1 * slope.square().sum())",
    "weights": f"a = {FORWARD}\n"
    "me.backward(a + 0.01 * sum(p.square().sum() for p in model.parameters() if p.requires_grad))",
    "no backward": f"{FORWARD}",
    "evaluate": "model.eval()\nwith torch.no_grad():\n"
    "    me.record('evaluated', loss_of(model(me.batch())))\nmodel.train()",
    "inference": "with torch.inference_mode():\n"
    "    me.record('inferred', loss_of(model(me.batch())))",
    "input gradient": "x = me.batch().requires_grad_()\nme.backward(loss_of(model(x)))\n"
    "me.record('gradient of x', x.grad)",
}
"""What happens before gradients are summed. Each microbatch that is not inside no_sync is final."""
FINAL = frozenset(MICROBATCHES) - {"no_sync", "no backward", "evaluate", "inference"}
"""Of these, one has to be the last."""

AFTER: dict[str, str] = {
    "step": "optimizer.step()",
    "zero": "optimizer.zero_grad()",
    "zero in place": "optimizer.zero_grad(set_to_none=False)",
    "model zero": "model.zero_grad()",
    "clip": "me.clip(model, 0.5)",
    "torch clip": "torch.nn.utils.clip_grad_norm_(\n"
    "    [p for group in optimizer.param_groups for p in group['params']], 0.5\n)",
    "clip values": "torch.nn.utils.clip_grad_value_(\n"
    "    [p for group in optimizer.param_groups for p in group['params']], 0.05\n)",
    "scale": "with torch.no_grad():\n"
    "    for group in optimizer.param_groups:\n        for p in group['params']:\n"
    "            if p.grad is not None:\n                p.grad.mul_(0.5)",
    "decay": "with torch.no_grad():\n"
    "    for group in optimizer.param_groups:\n        for p in group['params']:\n"
    "            if p.is_floating_point():\n                p.mul_(0.9)",
    "rate": "for group in optimizer.param_groups:\n    group['lr'] *= 0.5",
    "closure": "optimizer.zero_grad()\n\n"
    "def closure():\n    optimizer.zero_grad()\n"
    f"    loss = {FORWARD}\n    me.backward(loss)\n    me.sync(model)\n    return loss\n\n"
    "optimizer.step(closure)",
    "freeze": "inner(model).part0.requires_grad_(False)",
    "thaw": "inner(model).part0.requires_grad_(True)",
    "state": "kept = copy.deepcopy(model.state_dict())",
    "state back": "model.load_state_dict(kept)",
    "optimizer state": "kept_state = copy.deepcopy(optimizer.state_dict())",
    "optimizer state back": "optimizer.load_state_dict(kept_state)",
    "copy": "twin = copy.deepcopy(model).eval()\nwith torch.no_grad():\n"
    "    me.record('of the copy', loss_of(twin(me.batch())))",
    "look": "me.parameters(model)",
    "evaluate": MICROBATCHES["evaluate"],
    "reload": "me.save(model, optimizer)\n"
    "model, optimizer = me.wrap(functools.partial(build, me), make, wrapper1)\n"
    "me.load(model, optimizer)",
    "set state": "state = me.state_of(model, optimizer)\n"
    "model, optimizer = me.wrap(functools.partial(build, me), make, wrapper1)\n"
    "me.set_state(model, optimizer, *state)",
}
"""What happens when the gradients of all ranks are there."""


def _program(case: Case) -> str:
    lines = [
        "def inner(model):",
        "    return getattr(model, 'module', model)",
        "",
        "",
        "def program(me):",
        "    model, optimizer = me.wrap(functools.partial(build, me), make, wrapper0)",
        "    me.parameters(model)",
    ]
    if case.scheduler:
        lines.append("    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)")
    for number, (before, after) in enumerate(case.steps):
        lines.append(f"    # step {number}")
        for name in before:
            lines += _indented(MICROBATCHES[name])
        if not case.auto or (before and before[-1] == "no_sync"):
            lines.append("    me.finish(model)")
        lines.append("    me.sync(model)")
        for name in after:
            lines += _indented(AFTER[name])
        if case.scheduler and "step" in after:
            lines.append("    scheduler.step()")
        lines.append("    me.parameters(model)")
    lines.append("    " + "\n    ".join(MICROBATCHES["evaluate"].split("\n")))
    return "\n".join(lines)


def _indented(text: str) -> list[str]:
    return [f"    {line}" if line else "" for line in text.split("\n")]
