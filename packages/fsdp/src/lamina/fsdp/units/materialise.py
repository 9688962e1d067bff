"""Giving a model that was built on the meta device its first values, unit by unit."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from lamina.buffers import BufferLayout
from lamina.ddp.engine import ParameterRef
from lamina.fsdp.compat import free_of_references
from lamina.fsdp.units.plan import UnitPlan

_UNWRITTEN = 0xA5
_LOOK_AT = 4096  # bytes of a tensor that tell whether anybody wrote to it


def materialise_unit(
    plan: UnitPlan,
    device: torch.device,
    init: Callable[[nn.Module], None] | None = None,
    layouts: Iterable[tuple[Sequence[ParameterRef], BufferLayout]] = (),
    buffers_later: bool = False,
) -> None:
    """Allocate a unit's meta parameters and buffers and run its modules' own initialisation.

    Modules are initialised children first, as construction would do it. A parameter that several
    modules hold gets its value from the first. Nothing that has values already is touched: while
    the initialisation runs, modules hold meta tensors in place of those. Parameters keep their
    identity (and roles), so optimizers and ties made before still hold.

    `init` initialises one module, as given to `nn.Module.apply` (for a model of `transformers` its
    own `_init_weights`); None calls the module's `reset_parameters()`. Parameters of `layouts` are
    made in one flat tensor, as the buffer will have them, so that it need not be copied from them.
    `buffers_later` leaves buffers that nothing has written for `refuse_unwritten_buffers`.
    ValueError names a module with meta tensors that nothing has initialised.
    """
    views = _views_in(layouts, device)
    with free_of_references(plan.own_modules()):
        new = (*_new_parameters(plan, device, views), *_new_buffers(plan, device))
    fresh = {id(tensor): tensor for tensor in new}
    if not fresh or device.type == "meta":  # a plan of shapes, without values
        return
    with torch.no_grad(), _only(fresh, plan.module):
        for module in _children_first(plan):
            if init is not None:
                init(module)
            elif (reset := _own_initialisation(module)) is not None:
                reset()
    kinds = (nn.Parameter,) if buffers_later else (torch.Tensor,)
    unwritten = {k for k, t in fresh.items() if isinstance(t, kinds) and _is_unwritten(t)}
    more = ". Units before it are sharded already: build the model anew"
    _refuse_left(plan.module, plan.name, lambda tensor: id(tensor) in unwritten, more)


def _views_in(
    layouts: Iterable[tuple[Sequence[ParameterRef], BufferLayout]], device: torch.device
) -> dict[int, torch.Tensor]:
    """Where in a flat tensor each parameter goes, for groups that are wholly on meta."""
    views: dict[int, torch.Tensor] = {}
    for refs, layout in layouts:
        # One with values, or in another memory format, is copied into the buffer in any case.
        if not all(ref.parameter.is_meta and ref.parameter.is_contiguous() for ref in refs):
            continue
        flat = torch.empty(layout.size, dtype=refs[0].parameter.dtype, device=device)
        views |= zip((id(ref.parameter) for ref in refs), layout.views(flat), strict=True)
    return views


def _new_parameters(
    plan: UnitPlan, device: torch.device, views: dict[int, torch.Tensor]
) -> Iterator[torch.Tensor]:
    for ref in plan.refs:
        meta = ref.parameter
        if not meta.is_meta:
            continue
        made = views.get(id(meta))
        if made is None:
            made = torch.empty_like(meta, device=device, requires_grad=False)
        # A pattern that no initialisation leaves, to find out whether one wrote at all.
        _first_bytes(made).fill_(_UNWRITTEN)
        real = nn.Parameter(made, requires_grad=meta.requires_grad)
        real.__dict__.update(meta.__dict__)
        # The object stays: optimizers, ties and the user's own variables hold it.
        torch.utils.swap_tensors(meta, real)  # type: ignore[no-untyped-call]
        yield meta


def _new_buffers(plan: UnitPlan, device: torch.device) -> Iterator[torch.Tensor]:
    made: dict[int, torch.Tensor] = {}  # a buffer that several modules hold stays one
    for module in plan.own_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                if id(buffer) not in made:
                    made[id(buffer)] = torch.empty_like(buffer, device=device)
                    _first_bytes(made[id(buffer)]).fill_(_UNWRITTEN)
                module._buffers[name] = made[id(buffer)]
    yield from made.values()


def _first_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's own first bytes in memory (of a dense tensor, whatever its strides)."""
    size = tensor.element_size()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    length = min(_LOOK_AT, tensor.numel() * size)
    with torch.no_grad():
        return flat.set_(tensor.untyped_storage(), tensor.storage_offset() * size, (length,), (1,))


@contextmanager
def _only(fresh: dict[int, torch.Tensor], root: nn.Module) -> Iterator[None]:
    """For the time being, modules hold each fresh tensor once, and meta tensors for all others."""
    replaced: list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor]] = []
    kept: set[int] = set()
    for module in root.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None or tensor.is_meta:
                    continue
                # A tied one is written by its first holder alone, as when the model is constructed.
                if id(tensor) in fresh and id(tensor) not in kept:
                    kept.add(id(tensor))
                    continue
                replaced.append((tensors, name, tensor))  # type: ignore[arg-type]
    try:
        for tensors, name, tensor in replaced:
            shape = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            parameter = isinstance(tensor, nn.Parameter)
            tensors[name] = nn.Parameter(shape, tensor.requires_grad) if parameter else shape
        yield
    finally:
        for tensors, name, tensor in replaced:
            tensors[name] = tensor


def _children_first(plan: UnitPlan) -> list[nn.Module]:
    """The unit's modules in the order of `nn.Module.apply`."""
    # Modules of other units inside this one are initialised with their own unit.
    own = {id(module) for module in plan.own_modules()}
    ordered: dict[int, nn.Module] = {}

    def visit(module: nn.Module) -> None:
        """Note a module after those inside it."""
        for child in module.children():
            if id(child) in own and id(child) not in ordered:
                visit(child)
        ordered.setdefault(id(module), module)

    visit(plan.module)
    return list(ordered.values())


def _own_initialisation(module: nn.Module) -> Callable[[], object] | None:
    for name in ("reset_parameters", "_reset_parameters"):  # the latter: nn.MultiheadAttention
        reset = getattr(module, name, None)
        if callable(reset):
            return reset  # type: ignore[no-any-return]
    return None


def _is_unwritten(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 0 and bool((_first_bytes(tensor) == _UNWRITTEN).all())


def refuse_unwritten_buffers(root: nn.Module) -> None:
    """Raise ValueError for a buffer that was made on the meta device and that nobody has written.

    As in torch's order: meta device, `fully_shard`, `to_empty`, and then the model's own
    initialisation, which may write buffers that no `reset_parameters()` does.
    """

    def left(tensor: torch.Tensor) -> bool:
        """Whether a tensor is a buffer that still has the pattern."""
        buffer = not isinstance(tensor, nn.Parameter) and not tensor.is_meta
        return buffer and tensor.nbytes > 3 and _is_unwritten(tensor)

    _refuse_left(root, "", left)


def _refuse_left(
    root: nn.Module, name: str, left: Callable[[torch.Tensor], bool], more: str = ""
) -> None:
    """Raise ValueError for the first module below `root` (called `name`) with such tensors."""
    for path, module in root.named_modules():
        names = [key for key, tensor in _tensors_of(module).items() if left(tensor)]
        if names:
            where = ".".join(part for part in (name, path) if part) or "the root"
            why = "it has no reset_parameters()"
            # The remedy differs: a module without the method needs one, and one that has it must
            # write more.
            if _own_initialisation(module) is not None:
                why = "its reset_parameters() left them alone"
            raise ValueError(
                f"{type(module).__name__} at {where} was built on the meta device and nothing gave "
                f"{', '.join(names)} first values: {why}. Write them there (buffers too), or pass "
                "init_module=function(module), which is called for every module of a unit; for a "
                f"model of transformers, init_module=model._init_weights{more}"
            )


def refuse_uninitialised(root: nn.Module, init: Callable[[nn.Module], None] | None) -> None:
    """Raise ValueError for a meta tensor that nothing will write, before any unit is sharded.

    A module above may write its children's tensors, and of a tied one any holder: what is in doubt
    is left for `materialise_unit` to find out.
    """
    if init is not None:
        return
    # Who has an initialisation may write its own tensors and those of modules below it.
    able = [module for module in root.modules() if _own_initialisation(module) is not None]
    covered = {id(below): below for module in able for below in module.modules()}
    written = {id(t) for module in covered.values() for t in _tensors_of(module).values()}
    _refuse_left(root, "", lambda t: t.is_meta and bool(t.numel()) and id(t) not in written)


def _tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    tensors = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def move_buffers(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Put modules' own buffers where the model computes, maybe not where it was built."""
    moved: dict[int, torch.Tensor] = {}  # a buffer that several modules hold stays one
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[name] = moved.setdefault(id(buffer), buffer.to(device))
