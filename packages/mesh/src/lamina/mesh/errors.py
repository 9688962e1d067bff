"""Errors in the description of a layout, of a mesh or of a process' start, and in keywords.

Every class also is the built-in error that a caller would expect, so `except ValueError`
works for callers who don't know Lamina.
"""

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

__all__ = [
    "AxisError",
    "EnvironmentVariableError",
    "GroupCreationError",
    "LayoutError",
    "OverlapError",
    "RendezvousError",
    "translates",
]

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


class LayoutError(ValueError):
    """A layout that no assignment of ranks can satisfy; the message shows the arithmetic."""


class AxisError(LookupError):
    """A mesh has no axis of that name, or those axes can't be joined into one."""


class EnvironmentVariableError(ValueError):
    """An environment variable is missing, contradicts another one or isn't what it should be."""


class GroupCreationError(RuntimeError):
    """A process group couldn't be made: a member did not come, or the backend refused."""


class RendezvousError(RuntimeError):
    """The ranks of a job did not find each other within the timeout."""


class OverlapError(RuntimeError):
    """Overlap of communication and compute was asked for where a setting rules it out."""


def translates(words: Mapping[str, str]) -> Callable[[FunctionT], FunctionT]:
    """Refuse keywords that a function does not have, and say what to write instead.

    `words` have for each foreign keyword the rest of a sentence that begins "use".
    """

    def decorate(function: FunctionT) -> FunctionT:
        title = function.__qualname__.removesuffix(".__init__")
        known = [name for name in inspect.signature(function).parameters if name != "self"]

        @functools.wraps(function)
        def checked(*args: Any, **settings: Any) -> Any:
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
