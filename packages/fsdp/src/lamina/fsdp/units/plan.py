"""Finding a model's units: the modules whose parameters are gathered and released together."""

import pkgutil
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from lamina.ddp.engine import ParameterRef, collect_parameters


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
        name = repr(units) if isinstance(units, str) else units.__name__
        raise TypeError(f"fsdp_unit_modules={units!r} is no list: write [{name}]")
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
            repeated blocks, and embeddings and heads of at least a quarter of a block's size.

    Raises:
        ValueError: if classes are given and the model has no module of any of them, or has a
            container among them that is never called.

    Examples:
        >>> layer = torch.nn.TransformerEncoderLayer(d_model=8, nhead=2)
        >>> [unit.name for unit in plan_units(torch.nn.TransformerEncoder(layer, 2), None)]
        ['', 'layers.0', 'layers.1']
    """
    # The names of units: those that were found, or all modules of the classes that were given.
    if unit_classes is None:
        names = _find_units(root)
    else:
        classes = resolve_unit_classes(unit_classes)
        matches = {n: m for n, m in root.named_modules() if n and isinstance(m, classes)}
        for name, match in matches.items():
            refuse_container(name, match)
        names = list(matches)
        if classes and not matches:
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
    # All places that hold a parameter: several modules (tied), or one module in several places.
    for ref in collect_parameters(root):
        holders = [module for reference, _ in ref.owners if (module := reference()) is not None]
        places = [path for module in holders for path in paths[id(module)]]
        # The innermost unit around all of them: the root is around everything.
        around = [name for name in unit_names if all(_is_within(path, name) for path in places)]
        owned[max(around, key=len)].append(ref)
    return _as_plans(root, owned)


def _as_plans(root: nn.Module, owned: Mapping[str, Sequence[ParameterRef]]) -> list[UnitPlan]:
    """A plan for the root and for each name that owns parameters, as registered."""
    modules = {n: module for n, module in root.named_modules() if not n or owned.get(n)}
    plans = []
    for name, module in modules.items():
        inside = (m for n, m in modules.items() if n != name and _is_within(n, name))
        plans.append(UnitPlan(name, module, tuple(owned[name]), tuple(inside)))
    return plans


def _is_within(path: str, name: str) -> bool:
    """Whether a path is that of a module, or of one below it; all are below the root, ""."""
    return not name or path == name or path.startswith(f"{name}.")


def _find_units(root: nn.Module) -> list[str]:
    """Repeated blocks (two or more modules of one class in one container), then large leaves."""
    blocks: list[str] = []
    for name, module in root.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
            if any(_is_within(name, block) for block in blocks):
                continue  # experts or heads inside a block go with their block
            # Blocks are what a container holds several of, whatever else is between them.
            by_class: dict[type[nn.Module], list[str]] = {}
            for child_name, child in _called_within(name, module):
                if child_name not in blocks and _may_be_block(child):
                    by_class.setdefault(type(child), []).append(child_name)
            for same in by_class.values():
                if len(same) > 1:
                    blocks.extend(same)
    if not blocks:
        return []
    # The root's unit is whole, and its gradients are, for as long as the step lasts. An embedding
    # and a head of a quarter each would add half a block to the peak of memory.
    threshold = statistics.median(_size(root.get_submodule(block)) for block in blocks) / 4
    leaves = [
        name
        for name, module in root.named_modules()
        if name
        and _is_called(module)
        and not any(True for _ in module.children())
        and _size(module) >= threshold
        and not any(_is_within(name, block) for block in blocks)
    ]
    return [*blocks, *leaves]


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


def _import_class(path: str) -> type[nn.Module]:
    try:
        named = pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"fsdp_unit_modules: {path!r} cannot be imported ({error}); give the class itself or "
            'its full import path, such as "my_package.model.Block"'
        ) from error
    if not (isinstance(named, type) and issubclass(named, nn.Module)):
        raise ValueError(f"fsdp_unit_modules: {path!r} is {named!r}, not a torch.nn.Module class")
    return named


def refine(root: nn.Module, plans: Sequence[UnitPlan]) -> list[UnitPlan]:
    """Cut each unit into the modules that hold its parameters; the root first, as registered.

    A module below another one that holds parameters stays with it: `nn.MultiheadAttention` reads
    the weight of its `out_proj` without calling it. Tied parameters stay where they were.
    """
    paths = {id(module): name for name, module in root.named_modules()}
    owned: dict[str, list[ParameterRef]] = {plan.name: [] for plan in plans}
    # Each unit is cut by itself: what was one unit's does not become another's.
    for plan in plans:
        alone = [_holder(ref, paths) for ref in plan.refs]
        # Of a unit whose own module holds parameters, all stay with it; the root is no such unit.
        holders = {name for name in alone if name}
        for ref, name in zip(plan.refs, alone, strict=True):
            around = [other for other in holders if name and _is_within(name, other)]
            path = plan.name if name is None else min(around, key=len, default="")
            owned.setdefault(path, []).append(ref)
    return _as_plans(root, owned)


def _holder(ref: ParameterRef, paths: dict[int, str]) -> str | None:
    """The module that alone holds a parameter; None if several do."""
    owners = {id(module) for reference, _ in ref.owners if (module := reference())}
    return paths[owners.pop()] if len(owners) == 1 else None
