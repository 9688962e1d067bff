"""What data-parallel ranks must have in common: parameters, settings, optimizers.

Copies and pieces of a parameter lie on the ranks of its data-parallel axes. Tensor-parallel ranks
hold other parameters, so of them only settings and hyperparameters are compared. A pipeline
compares its stages itself.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields

import torch
from torch import nn
from torch.optim import Optimizer

from lamina.collectives.engine import CommonFacts, Fact, describe, software
from lamina.ddp.parameters.axes import DataParallelAxes
from lamina.ddp.parameters.parameters import ParameterRef

_COLUMNS = 64
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_ODD = -0x61C8864680B583EB  # 2^64 / the golden ratio: spreads small numbers over all bits


def common_facts_of(what: str, axes: DataParallelAxes, device: torch.device | str) -> CommonFacts:
    """What compares facts over the ranks that hold copies or pieces of the same parameters."""
    return CommonFacts(what, axes.groups("reduce")[::-1], axes.here, device)


def require_same_over_tp(
    what: str, axes: DataParallelAxes, device: torch.device | str, facts: Sequence[Fact]
) -> None:
    """Compare what parameters do not decide over tensor-parallel ranks, or DisagreementError."""
    if axes.tp is not None:
        CommonFacts(f"{what}, ranks along tp", [axes.tp.group], axes.here, device).require(facts)


def require_same_model(
    what: str,
    refs: Sequence[ParameterRef],
    dense: DataParallelAxes,
    expert: DataParallelAxes | None,
    settings: object,
    optimizer: Optimizer | None = None,
) -> None:
    """Compare what a wrapper is about to be made of; DisagreementError if ranks differ.

    One small collective, one more with experts, and one more with tensor parallelism. Call it
    before any collective whose size depends on the model or the settings.

    `what` is the wrapper, for the message. `refs` are in order of registration, `expert` is None if
    experts have the dense axes, and `settings` is a dataclass. `optimizer` is what will update the
    model, if the wrapper is told. ValueError: a parameter cannot be trained, or its ranks would
    come to differ.
    """
    _refuse_inference_tensors(refs, dense)
    _refuse_batch_writes(refs, dense)
    device = next((ref.parameter.device for ref in refs), torch.device("cpu"))
    if device.type == "meta":
        device = torch.device("cpu")
    apart = [ref for ref in refs if expert is not None and ref.role.expert]
    alike = [ref for ref in refs if not any(ref is other for other in apart)] if apart else refs
    facts: list[Fact] = [*software(), ("the wrapper", what)]
    facts += [(field.name, describe(getattr(settings, field.name))) for field in fields(settings)]  # type: ignore[arg-type]
    over_tp = [*facts, *(optimizer_facts(optimizer, {}) if optimizer is not None else ())]
    facts += [(f"size of axis {axis.name}", str(axis.size)) for axis in (dense.outer, dense.inner)]
    facts.append(("the mesh", dense.mesh))
    facts += _parameter_facts(alike)
    if optimizer is not None:
        facts += optimizer_facts(optimizer, {id(ref.parameter): ref.name for ref in alike})
    common_facts_of(what, dense, device).require(facts)
    if expert is not None and any(ref.role.expert for ref in refs):
        common_facts_of(f"{what}, experts", expert, device).require(_parameter_facts(apart))
    require_same_over_tp(what, dense, device, over_tp)


def _refuse_inference_tensors(refs: Sequence[ParameterRef], dense: DataParallelAxes) -> None:
    """Refuse parameters that autograd can save for no backward."""
    for ref in refs:
        if ref.parameter.is_inference():
            raise ValueError(
                f"{ref.name} was made under torch.inference_mode, so it cannot be trained "
                f"({dense.describe()}): build the model, or load it, outside of that mode"
            )


def _refuse_batch_writes(refs: Sequence[ParameterRef], dense: DataParallelAxes) -> None:
    """Refuse tables whose forward rewrites the rows that it reads, which each rank chooses."""
    for ref in refs if dense.size > 1 else ():
        for owner in (reference() for reference, _ in ref.owners):
            if isinstance(owner, nn.Embedding | nn.EmbeddingBag) and owner.max_norm is not None:
                raise ValueError(
                    f"{ref.name} is of {type(owner).__name__}(max_norm={owner.max_norm}), whose "
                    f"forward rewrites the rows of its own batch: {dense.size} ranks would hold "
                    f"different tables ({dense.describe()}). Make it with max_norm=None, and let "
                    f"forward read torch.renorm(weight, {owner.norm_type}, 0, {owner.max_norm})"
                )


def _parameter_facts(refs: Sequence[ParameterRef]) -> Iterator[Fact]:
    """The order of registration, and of each parameter what its buffer's layout depends on."""
    yield "number of parameters", str(len(refs))
    for index, ref in enumerate(refs):
        parameter, role = ref.parameter, ref.role
        frozen = "" if parameter.requires_grad else ", requires_grad=False"
        tied = f", in {len(ref.owners)} places" if len(ref.owners) > 1 else ""
        marks = {field.name: getattr(role, field.name) for field in fields(role)}
        said = "".join(f", {name}={value}" for name, value in marks.items() if value)
        yield (
            f"parameter {index}",
            f"{ref.name} {tuple(parameter.shape)} {parameter.dtype}{frozen}{tied}{said}",
        )


def optimizer_facts(optimizer: Optimizer, names: Mapping[int, str]) -> list[Fact]:
    """Class, groups and hyperparameters of an optimizer.

    Without `names` of the parameters, by `id`, it tells only how many each group holds.
    """
    facts = [("the optimizer's class", describe(type(optimizer)))]
    facts.append(("its number of groups", str(len(optimizer.param_groups))))
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params":
                facts.append((f"{key} of its group {number}", describe(value)))
        known = [names[id(p)] for p in group["params"] if id(p) in names]
        many = ", ".join(known) or str(len(group["params"]))
        facts.append((f"parameters of its group {number}", many))
    return facts


def digest_of(values: torch.Tensor, weight: int = 1) -> torch.Tensor:
    """A digest of a flat tensor's bits: int64, no dimensions; exact on every device.

    Words go into columns in turn, each column is summed modulo its word, and the sums are weighted
    by odd numbers modulo 2^64. So no single bit can flip without changing the digest, and no order
    of the additions can.
    """
    words = values.view(_WORDS.get(values.itemsize, torch.int64))
    body = words.numel() // _COLUMNS * _COLUMNS
    # The cube spreads weights, as multiples of equal steps would cancel in pairs.
    scale = (weight**3 * _ODD + 2**63) % 2**64 - 2**63
    odd = torch.arange(1, 2 * _COLUMNS, 2, device=values.device) ** 3 * scale
    sums = words[:body].view(-1, _COLUMNS).sum(0, dtype=words.dtype).to(torch.int64)
    rest = words[body:].to(torch.int64)
    return (sums * odd).sum() + (rest * odd[: rest.numel()]).sum()
