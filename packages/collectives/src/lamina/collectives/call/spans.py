"""Names for what a rank does: spans that torch's profiler records, and what collectives are for.

Where no profiler records, a span costs one look at a flag. A name is put together only where
somebody reads it.
"""

from contextlib import nullcontext
from contextvars import ContextVar, Token

from torch.profiler import record_function

from lamina.collectives.compat import profiling

__all__ = ["NO_SPAN", "Serving", "Span", "purpose"]

NO_SPAN = nullcontext()
"""Stands in for a `record_function` where no profiler records."""

purpose: ContextVar[str] = ContextVar("lamina.collectives.purpose", default="")
"""What the collectives that are issued now are for; "" where nobody has said so."""


class Span:
    """A span that begins in one call and ends in another, such as those of a module's hooks.

    One that is never ended, because what it is about has raised, ends with the next or when it is
    dropped.

    Examples:
        >>> compute = Span()
        >>> compute.begin("forward of", "blocks.0")  # a profile shows what follows under this name
        >>> compute.end()
    """

    __slots__ = ("_open",)

    def __init__(self) -> None:
        self._open: record_function | None = None

    def begin(self, what: str, name: str) -> None:
        """Begin it: what is done, and the unit ("" is the root). The one before ends."""
        if self._open is not None:
            self.end()
        if profiling():
            self._open = record_function(f"{what} {name or 'the root'}")
            self._open.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """End it, if it has begun."""
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None


class Serving:
    """Says which unit or bucket the collectives are for that are issued inside.

    Their records, a profile and the messages about long waits name it.

    Args:
        purpose: the unit or bucket, in words.

    Examples:
        >>> with Ledger() as ledger, Serving("blocks.0"):
        ...     all_gather_into(torch.empty(4), torch.ones(4), None).wait()
    """

    __slots__ = ("_before", "_words")

    def __init__(self, purpose: str) -> None:
        self._words = purpose

    def __enter__(self) -> None:
        self._before: Token[str] = purpose.set(self._words)

    def __exit__(self, *error: object) -> None:
        purpose.reset(self._before)
