"""What a group's gradients are at a time, and what may happen to them next.

There are two questions, and a state machine answers each. `GradientState` says what main grads
hold. `BackwardPhase` says what would be lost if the backward that runs now raised.

Note [What a backward that raises leaves behind]
    A backward may raise half-way, and the user may catch the exception and go on. Gradients that
    it has brought so far are wrong as a whole, so they have to go. Where nothing was held before
    it began, the local buffer is dropped and nothing is left. Where earlier microbatches had been
    accumulated, and the backward has added to them, nobody can tell the two apart any more. The
    group then stays MIXED: every step, norm and further backward is refused until the user has
    dropped the gradients. A backward that has not touched earlier gradients leaves them valid.

    One case is MIXED from the start. Where the optimizer's parameters are the module's own, the
    engine empties `.grad` for autograd at the beginning of a backward. If that backward raises,
    `.grad` is None, which otherwise tells that the user has dropped the gradients.
"""

from __future__ import annotations

from enum import Enum, auto

__all__ = ["BackwardEvent", "BackwardPhase", "GradientEvent", "GradientState"]


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

    @property
    def is_final(self) -> bool:
        """Whether an optimizer may read them."""
        return self is GradientState.FINAL or self is GradientState.FINALIZED

    def after(self, event: GradientEvent) -> GradientState:
        """The state that follows. Raises KeyError for an event that cannot happen (a bug)."""
        return _STATES[event][self]


class GradientEvent(Enum):
    """What changes main grads."""

    SUMMED = auto()
    """A microbatch was summed over ranks, and it is not the step's last."""
    COMPLETED = auto()
    """The step's last reduction."""
    SET_ASIDE = auto()
    """Final gradients are kept elsewhere until what a further backward brings is summed."""
    ZEROED = auto()
    """They were made zeros, by the user or because somebody is about to add to them."""
    FINALIZED = auto()
    """`finalize_grads` has been over them."""
    DROPPED = auto()
    """The user has dropped them."""


_EMPTY, _PARTIAL = GradientState.EMPTY, GradientState.PARTIAL
_FINAL, _FINALIZED = GradientState.FINAL, GradientState.FINALIZED
_STATES = {
    GradientEvent.SUMMED: {_EMPTY: _PARTIAL, _PARTIAL: _PARTIAL},
    GradientEvent.COMPLETED: {
        _EMPTY: _FINAL,
        _PARTIAL: _FINAL,
        _FINAL: _FINAL,  # a further backward was added
        _FINALIZED: _FINALIZED,  # and part of the sum must not be finalized again
    },
    GradientEvent.SET_ASIDE: {_FINAL: _EMPTY, _FINALIZED: _EMPTY},
    GradientEvent.ZEROED: {_EMPTY: _FINAL, _FINAL: _FINAL, _FINALIZED: _FINAL},
    GradientEvent.FINALIZED: {
        _EMPTY: _EMPTY,
        _PARTIAL: _PARTIAL,
        _FINAL: _FINALIZED,
        _FINALIZED: _FINALIZED,
    },
    GradientEvent.DROPPED: dict.fromkeys(GradientState, _EMPTY),
}


class BackwardPhase(Enum):
    """What a backward that raises now would spoil (see the Note above)."""

    IDLE = auto()
    """No backward runs."""
    ALONE = auto()
    """One runs, and nothing was held when it began."""
    BESIDE = auto()
    """One runs, and has added nothing yet to gradients that were held before it."""
    MIXED = auto()
    """One runs, or has raised, and what it brought cannot be told from what was held before it."""

    def after(self, event: BackwardEvent) -> BackwardPhase:
        """The phase that follows."""
        return _PHASES[event][self]


class BackwardEvent(Enum):
    """What a backward does to the gradients of one group."""

    BEGAN = auto()
    """It has begun, and nothing was held."""
    BEGAN_BESIDE = auto()
    """It has begun, and gradients were held."""
    ADDED = auto()
    """It has brought a gradient."""
    ENDED = auto()
    """It has ended, and all that it brought is where it belongs."""
    RAISED = auto()
    """It has raised."""
    DROPPED = auto()
    """The user has dropped all gradients."""


_IDLE, _ALONE = BackwardPhase.IDLE, BackwardPhase.ALONE
_BESIDE, _MIXED = BackwardPhase.BESIDE, BackwardPhase.MIXED
_PHASES = {
    BackwardEvent.BEGAN: dict.fromkeys(BackwardPhase, _ALONE),
    BackwardEvent.BEGAN_BESIDE: dict.fromkeys(BackwardPhase, _BESIDE),
    # Gradients may arrive while no backward of this wrapper runs (`late_gradients`).
    BackwardEvent.ADDED: {_IDLE: _IDLE, _ALONE: _ALONE, _BESIDE: _MIXED, _MIXED: _MIXED},
    BackwardEvent.ENDED: dict.fromkeys(BackwardPhase, _IDLE),
    BackwardEvent.RAISED: {_IDLE: _IDLE, _ALONE: _IDLE, _BESIDE: _IDLE, _MIXED: _MIXED},
    BackwardEvent.DROPPED: dict.fromkeys(BackwardPhase, _IDLE),
}
