"""Finding a model's units: the modules whose parameters are gathered and released together."""

import pkgutil
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from lamina.ddp.engine import ParameterRef, collect_parameters

__all__ = ["UnitPlan", "plan_units", "refine", "refuse_container", "resolve_unit_classes"]


@dataclass(frozen=True)
class UnitPlan:
    """A unit before anything is allocated: its module and the parameters that are its own."""

    name: str
    module: nn.Module
    refs: tuple[ParameterRef, ...]
    inner: tuple[nn.Module, ...] = ()
    """Units inside this one: their modules are not its own."""
    together: tuple[nn.Module, ...] = ()
    """The modules that are this one unit, where `module` only holds several of them."""

    @property
    def called(self) -> tuple[nn.Module, ...]:
        """The modules whose calls gather the unit."""
        return self.together or (self.module,)

    def own_modules(self) -> Iterator[nn.Module]:
        """The unit's modules, without those of units inside it."""
        barred = {id(module) for unit in self.inner for module in unit.modules()}
        for module in self.module.modules():
            if id(module) not in barred:
                yield module


def resolve_unit_classes(units: Sequence[type[nn.Module] | str]) -> tuple[type[nn.Module], ...]:
    """Classes from classes or import strings such as "my_package.model.Block".

    A class inside a class has both names: "my_package.model.Decoder.Block". TypeError refuses one
    that is not in a list, ValueError a string that names no module class.
    """
    if isinstance(units, (type, str)):
        raise TypeError(f"fsdp_unit_modules={units!r} is no list: write [{_name(units)}]")
    return tuple(_import_class(unit) if isinstance(unit, str) else unit for unit in units)


def plan_units(
    root: nn.Module, unit_classes: Sequence[type[nn.Module] | str] | None
) -> list[UnitPlan]:
    """Cut a model into units: the root first, then the others in order of registration.

    Every parameter belongs to the innermost unit that encloses all places that hold it, so one
    that is tied across units belongs to the unit around them both.

    Args:
        root: the whole model.
        unit_classes: classes (or import strings) of the modules that become units; None finds
            repeated blocks, and embeddings and heads of at least half a block's size.

    Raises:
        ValueError: if classes are given and the model has no module of any of them, or has a
            container among them that is never called.

    Examples:
        >>> layer = torch.nn.TransformerEncoderLayer(d_model=8, nhead=2)
        >>> [unit.name for unit in plan_units(torch.nn.TransformerEncoder(layer, 2), None)]
        ['', 'layers.0', 'layers.1']
    """
    if unit_classes is None:
        names = _find_units(root)
    else:
        classes = resolve_unit_classes(unit_classes)
        matches = {n: m for n, m in root.named_modules() if n and isinstance(m, classes)}
        for name, match in matches.items():
            refuse_container(name, match)
        names = list(matches)
        if classes and not names:
            wanted = ", ".join(c.__name__ for c in classes)
            present = sorted({type(m).__name__ for m in root.modules()})
            raise ValueError(
                f"fsdp_unit_modules=[{wanted}] matches no submodule of {type(root).__name__}; "
                f"it is made of {', '.join(present)}. Leave it out to have units found"
            )
    unit_names = ["", *dict.fromkeys(names)]
    owned: dict[str, list[ParameterRef]] = {name: [] for name in unit_names}
    paths: dict[int, list[str]] = {}  # a module shared by two units is found under two names
    for name, module in root.named_modules(remove_duplicate=False):
        paths.setdefault(id(module), []).append(name)
    for ref in collect_parameters(root):
        holders = [module for reference, _ in ref.owners if (module := reference()) is not None]
        places = [path for module in holders for path in paths[id(module)]]
        owned[_innermost(places, unit_names)].append(ref)
    return _as_plans(root, owned, [name for name in unit_names if owned[name] or not name])


def _as_plans(
    root: nn.Module, owned: Mapping[str, Sequence[ParameterRef]], names: Sequence[str]
) -> list[UnitPlan]:
    """A plan for each name, from the parameters that each unit owns."""
    modules = {name: root.get_submodule(name) for name in names}

    def inside(name: str) -> Iterator[nn.Module]:
        for other, module in modules.items():
            if other != name and (not name or other.startswith(name + ".")):
                yield module

    return [
        UnitPlan(name, module, tuple(owned[name]), tuple(inside(name)))
        for name, module in modules.items()
    ]


def _innermost(places: Sequence[str], unit_names: Sequence[str]) -> str:
    enclosing = [
        unit
        for unit in unit_names
        if all(not unit or place == unit or place.startswith(unit + ".") for place in places)
    ]
    return max(enclosing, key=len)


def _find_units(root: nn.Module) -> list[str]:
    """Repeated blocks (two or more modules of one class in one container), then large leaves."""
    blocks: list[str] = []
    for name, module in root.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
            if any(name == block or name.startswith(block + ".") for block in blocks):
                continue  # experts or heads inside a block go with their block
            by_class: dict[type[nn.Module], list[str]] = {}
            for child_name, child in _called_within(name, module):
                if child_name not in blocks and _may_be_block(child):
                    by_class.setdefault(type(child), []).append(child_name)
            for same in by_class.values():
                if len(same) > 1:
                    blocks.extend(same)
    if not blocks:
        return []
    threshold = statistics.median(_size(root.get_submodule(block)) for block in blocks) / 2
    leaves = [
        name
        for name, module in root.named_modules()
        if name
        and _is_called(module)
        and not any(True for _ in module.children())
        and _size(module) >= threshold
        and not any(name.startswith(block + ".") for block in blocks)
    ]
    order = [name for name, _ in root.named_modules()]
    return sorted([*blocks, *leaves], key=order.index)


def refuse_container(name: str, module: nn.Module) -> None:
    """Raise ValueError for a container: what is never called gathers nothing."""
    containers = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
    if isinstance(module, containers) and not _is_called(module):
        raise ValueError(
            f"{name or 'the module'} is a {type(module).__name__}, which has no forward: it is "
            "never called, and its weights would never be gathered. Make units of the modules in "
            "it, or of the module that reads it"
        )


def _is_called(module: nn.Module) -> bool:
    """Whether a module has a forward, so that its hooks run."""
    return "forward" in module.__dict__ or type(module).forward is not nn.Module.forward


def _called_within(name: str, container: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """A container's children, those of containers that are never called in their place."""
    for child_name, child in container.named_children():
        path = f"{name}.{child_name}" if name else child_name
        if _is_called(child):
            yield path, child
        else:
            yield from _called_within(path, child)


def _may_be_block(module: nn.Module) -> bool:
    """Layers of torch.nn are parts of blocks; a user's own class with weights is a block."""
    own_class = not type(module).__module__.startswith("torch.nn.modules")
    return _size(module) > 0 and (own_class or any(True for _ in module.children()))


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _name(unit: type | str) -> str:
    return repr(unit) if isinstance(unit, str) else unit.__name__


def _import_class(path: str) -> type[nn.Module]:
    try:
        found = pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"fsdp_unit_modules: {path!r} cannot be imported ({error}); give the class itself or "
            'its full import path, such as "my_package.model.Block"'
        ) from error
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ValueError(f"fsdp_unit_modules: {path!r} is {found!r}, not a torch.nn.Module class")
    return found


def refine(root: nn.Module, plans: Sequence[UnitPlan]) -> list[UnitPlan]:
    """Cut each unit into the modules that hold its parameters; the root first, as registered.

    A module below another one that holds parameters stays with it: `nn.MultiheadAttention` reads
    the weight of its `out_proj` without calling it. Tied parameters stay where they were.
    """
    order = {id(module): (place, name) for place, (name, module) in enumerate(root.named_modules())}
    owned: dict[str, list[ParameterRef]] = {plan.name: [] for plan in plans}
    for plan in plans:
        holders = {_holder(ref, order) for ref in plan.refs} - {None}
        for ref in plan.refs:
            name = _holder(ref, order)
            outermost = plan.name if name is None else _outermost(name, plan.name, holders)
            owned.setdefault(outermost, []).append(ref)
    names = (name for name in owned if owned[name] or not name)
    by_order = sorted(names, key=lambda name: order[id(root.get_submodule(name))][0])
    return _as_plans(root, owned, by_order)


def _holder(ref: ParameterRef, order: dict[int, tuple[int, str]]) -> str | None:
    """The module that alone holds a parameter; None if several do."""
    owners = {id(module) for reference, _ in ref.owners if (module := reference())}
    return order[owners.pop()][1] if len(owners) == 1 else None


def _outermost(name: str, unit: str, holders: set[str | None]) -> str:
    """The outermost module at or above `name`, inside the unit, that holds parameters itself."""
    if unit and unit in holders:
        return unit
    start = len(unit) + 1 if unit else 0
    path = name
    parts = name[start:].split(".") if name != unit else []
    for depth in range(1, len(parts)):
        above = name[:start] + ".".join(parts[:depth])
        if above in holders:
            path = above
            break
    return path
