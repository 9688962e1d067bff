"""Arguments of public functions: their names, and the types and ranges of their values.

Note [Checked where they are given]
    A value of another type than an argument says mostly fails deep inside, or is taken for true. So
    whoever takes settings checks them where they are given, by what stands beside each of them
    already: its annotation, and the limits of its field. Protocols without `runtime_checkable` and
    the elements of iterators are not looked at.
"""

import difflib
import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, fields
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
_PLAIN = (bool, int, float, str, types.NoneType)


def setting(default: Any, *, least: float | None = None, unit: str = "", **rules: Any) -> Any:
    """A dataclass' field with what its values must keep to.

    Args:
        default: its default value.
        least: the smallest value; None sets no limit.
        unit: what a number counts, such as "bytes"; for messages.
        rules: further ones, in the field's metadata, for the dataclass to check by itself. Where
            there is an `example` of a value, a message gives it in place of the types.
    """
    return field(default=default, metadata={"least": least, "unit": unit, **rules})


def check_fields(settings: Any) -> None:
    """Refuse values of a dataclass that its annotations and limits exclude.

    TypeError names a value of another type, ValueError one below the least. A dataclass calls it
    first of all when it is made.
    """
    title, hints = type(settings).__name__, _hints(settings.__class__)
    for each in fields(settings):
        value = getattr(settings, each.name)
        _check(f"{title}({each.name}=", value, hints[each.name], each.metadata)


def check_arguments(function: FunctionT) -> FunctionT:
    """Refuse arguments of a function that its annotations exclude, with TypeError."""
    title = function.__qualname__.removesuffix(".__init__")
    signature = inspect.signature(function)

    @functools.wraps(function)
    def checked(*args: Any, **settings: Any) -> Any:
        """The function, after a look at each argument that was given."""
        # Only now: an annotation may name what its module defines further down.
        hints = _hints(function)
        given = signature.bind(*args, **settings).arguments
        for name, value in given.items():
            several = signature.parameters[name].kind in (
                inspect.Parameter.VAR_POSITIONAL,
                inspect.Parameter.VAR_KEYWORD,
            )
            if name in hints and not several:
                _check(f"{title}({name}=", value, hints[name], {})
        return function(*args, **settings)

    return checked  # type: ignore[return-value]  # the same signature, as `wraps` says


@functools.cache
def _hints(owner: Any) -> dict[str, Any]:
    return get_type_hints(owner)


def _check(what: str, value: Any, hint: Any, rules: Mapping[str, Any]) -> None:
    unit, least = rules.get("unit", ""), rules.get("least")
    if not _fits(value, hint):
        counted = f", in {unit}" if unit else ""
        remedy = f"give {rules.get('example') or _spelled(hint)}{counted}"
        if _fits([value], hint):
            name = getattr(value, "__name__", repr(value))
            raise TypeError(f"{what}{name}) is no list: write [{name}]")
        if type(value) in map(type, _choices(hint)):
            raise ValueError(f"{what}{value!r}) is no choice: {remedy}")
        raise TypeError(f"{what}{value!r}) is of type {type(value).__name__}: {remedy}")
    if least is not None and value is not None and not value >= least:  # NaN neither
        raise ValueError(f"{what}{value!r}): it must be at least {least:g}{' ' * bool(unit)}{unit}")


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of the type that an annotation says."""
    contents: Any = value
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, each) for each in inner)
    if origin is Literal:
        return any(value == each and type(value) is type(each) for each in inner)
    if hint is None or hint is types.NoneType:
        return value is None
    if hint in (int, float):
        # True is no number here, and what stands for an index (of NumPy, say) is one.
        whole = hasattr(value, "__index__") and not hasattr(value, "shape")
        return not isinstance(value, bool) and (whole or isinstance(value, hint))
    kind = origin or hint
    if kind is type:
        return isinstance(value, type)
    if kind is Any or not isinstance(kind, type) or getattr(kind, "_is_protocol", False):
        return True  # a variable of types, and a protocol, say nothing that could be looked at
    if kind is Sequence and isinstance(value, str):
        return False  # its characters were never meant
    if not isinstance(value, kind):
        return False
    if issubclass(kind, Mapping) and inner:
        return all(_fits(k, inner[0]) and _fits(v, inner[1]) for k, v in contents.items())
    if issubclass(kind, Sequence) and inner and kind is not tuple:
        return all(_fits(each, inner[0]) for each in contents)
    return True


def _choices(hint: Any) -> list[Any]:
    """The values that an annotation lists one by one."""
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return [choice for each in get_args(hint) for choice in _choices(each)]


def _spelled(hint: Any) -> str:
    """An annotation in words, without the names of modules."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_spelled(each) for each in inner))
    if origin is Literal:
        return " or ".join(map(repr, inner))
    if hint is types.NoneType:
        return "None"
    if inner and origin not in (None, Callable) and isinstance(origin, type):
        within = ", ".join(_spelled(each) for each in inner)
        return f"{origin.__name__}[{within}]"
    return str(getattr(origin or hint, "__name__", hint))


def translates(words: Mapping[str, str]) -> Callable[[FunctionT], FunctionT]:
    """Refuse keywords that a function does not have, and say what to write instead.

    `words` have for each foreign keyword the rest of a sentence that begins "use".
    """

    def decorate(function: FunctionT) -> FunctionT:
        """The function that refuses them."""
        title = function.__qualname__.removesuffix(".__init__")
        known = [name for name in inspect.signature(function).parameters if name != "self"]

        @functools.wraps(function)
        def checked(*args: Any, **settings: Any) -> Any:
            """The function, if it has all the keywords that were given."""
            for name in settings:
                if name not in known:
                    raise TypeError(_refusal(title, name, known, words))
            return function(*args, **settings)

        return checked  # type: ignore[return-value]  # the same signature, as `wraps` says

    return decorate


def _refusal(title: str, name: str, known: list[str], words: Mapping[str, str]) -> str:
    refusal = f"{title}({name}=) is not an argument"
    if name in words:
        return f"{refusal}: use {words[name]}"
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"{refusal}: did you mean {near[0]}=?"
    return f"{refusal}: {title} takes {', '.join(known)}"
