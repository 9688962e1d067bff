"""What a group's gradients are at a time, and what may happen to them next.

There are two questions, and a state machine answers each. `GradientState` says what main grads
hold. `BackwardPhase` says what would be lost if the backward that runs now raised. What happens to
main grads is a table in capitals: for each state before, the state after. What cannot happen in a
state (a bug) is a KeyError.

Note [What a backward that raises leaves behind]
    A backward may raise half-way, and the user may catch the exception and go on. Gradients that
    it has brought so far are wrong as a whole, so they have to go. Where nothing was held before
    it began, the local buffer is dropped and nothing is left. Where earlier microbatches had been
    accumulated, and the backward has added to them, nobody can tell the two apart any more. The
    group then stays MIXED: every step, norm and further backward is refused until the user has
    dropped the gradients. A backward that has not touched earlier gradients leaves them valid.
"""

from __future__ import annotations

from enum import Enum, auto


class GradientState(Enum):
    """What main grads hold."""

    EMPTY = auto()
    """Nothing (their bytes mean nothing)."""
    PARTIAL = auto()
    """Sums of some microbatches, not yet scaled nor summed over the outer axis."""
    FINAL = auto()
    """The sum over all ranks, scaled: the gradient that the optimizer reads."""
    FINALIZED = auto()
    """The same, after `finalize_grads`: what is no data-parallel sum is done as well."""

    __hash__ = object.__hash__  # by identity: Enum's own is a Python call for each look-up


_EMPTY, _PARTIAL, _FINAL, _FINALIZED = GradientState
FINAL = frozenset({_FINAL, _FINALIZED})
"""An optimizer may read them."""
SUMMED = {_EMPTY: _PARTIAL, _PARTIAL: _PARTIAL}
"""A microbatch was summed over ranks, and it is not the step's last."""
# What a further backward adds to a finalized gradient makes it no less so: the sum over tp or
# stages is in it, and must not be made again.
COMPLETED = dict.fromkeys(GradientState, _FINAL) | {_FINALIZED: _FINALIZED}
"""The step's last reduction has begun."""
SET_ASIDE = {_FINAL: _EMPTY, _FINALIZED: _EMPTY}
"""Final ones are kept elsewhere until a further backward is summed."""
ZEROED = {_EMPTY: _FINAL, _FINAL: _FINAL, _FINALIZED: _FINAL}
"""They were made zeros, by the user or because somebody is about to add to them."""
FINALIZED = {state: state for state in GradientState} | {_FINAL: _FINALIZED}
"""`finalize_grads` has been over them."""


class BackwardPhase(Enum):
    """What a backward that raises now would spoil (see the Note above).

    A backward begins ALONE or BESIDE what is held, and its first gradient makes BESIDE MIXED. Its
    end leads to IDLE, and so does one that raises, unless it is MIXED: that stays until the user
    has dropped all gradients.
    """

    IDLE = auto()
    """No backward runs."""
    ALONE = auto()
    """One runs, and nothing was held when it began."""
    BESIDE = auto()
    """One runs, and has added nothing yet to gradients that were held before it."""
    MIXED = auto()
    """One runs, or has raised, and what it brought cannot be told from what was held before it."""
