"""Checks that the settings dataclasses share: each names the field, its value and the limit."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints


def require_choices(settings: object, kind: type) -> None:
    """Raise ValueError for a field that is a Literal in `kind`, and has none of its values."""
    for name, hint in get_type_hints(kind).items():
        if get_origin(hint) is Literal:
            require_one_of(name, getattr(settings, name), get_args(hint))


def refuse_unread(settings: Any, names: Sequence[str], because: str) -> None:
    """Raise ValueError for a field that differs from its default, though nobody reads it.

    `because` is the other setting, with what it means.
    """
    defaults = {field.name: field.default for field in fields(settings)}
    given = [n for n in names if getattr(settings, n) != defaults[n]]
    if given:
        pairs = ", ".join(f"{name}={getattr(settings, name)!r}" for name in given)
        verb = "have" if len(given) > 1 else "has"
        raise ValueError(f"{pairs} {verb} no effect: {because}; leave it out, or change that")


def require_one_of(what: str, value: Any, choices: Sequence[Any]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{what} is {value!r}: it must be one of {', '.join(map(repr, choices))}")


def require_at_least(least: int, settings: object, *names: str, optional: bool = False) -> None:
    """Raise ValueError for a field of `settings` below `least`; an optional field may be None."""
    for name in names:
        value = getattr(settings, name)
        if not (optional and value is None) and value < least:
            or_none = ", or None" if optional else ""
            raise ValueError(f"{name} is {value}: it must be at least {least}{or_none}")


def require_positive(settings: object, *names: str) -> None:
    """Raise ValueError for a field of `settings` that is zero, negative or NaN."""
    for name in names:
        if not getattr(settings, name) > 0.0:
            raise ValueError(f"{name} is {getattr(settings, name)}: it must be positive")


def require_in_order(name: str, low: float, high: float) -> None:
    """Raise ValueError unless a range is positive and does not end before it begins."""
    if not 0.0 < low <= high:
        raise ValueError(f"{name} are {low} and {high}: they must be positive and in order")


def require_divides(what: str, total: int, by_what: str, by: int, remedy: str) -> None:
    """Raise ValueError with the arithmetic unless `by` divides `total`."""
    if by < 1 or total % by:
        remainder = f" (remainder {total % by})" if by >= 1 else ""
        raise ValueError(f"{what} {total} is not divisible by {by_what} {by}{remainder}: {remedy}")
