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

    @property
    def is_final(self) -> bool:
        """Whether an optimizer may read them."""
        return self is GradientState.FINAL or self is GradientState.FINALIZED

    def after(self, event: GradientEvent) -> GradientState:
        """The state that follows. Raises KeyError for an event that cannot happen (a bug)."""
        return _STATES[event][self]


class GradientEvent(Enum):
    """What changes main grads."""

    SUMMED = auto()  # a microbatch was summed over ranks, and it is not the step's last
    COMPLETED = auto()  # the step's last reduction
    SET_ASIDE = auto()  # final ones are kept elsewhere until a further backward is summed
    ZEROED = auto()  # made zeros, by the user or because somebody is about to add to them
    FINALIZED = auto()  # `finalize_grads` has been over them
    DROPPED = auto()  # by the user


_EMPTY, _PARTIAL = GradientState.EMPTY, GradientState.PARTIAL
_FINAL, _FINALIZED = GradientState.FINAL, GradientState.FINALIZED
_STATES = {
    GradientEvent.SUMMED: {_EMPTY: _PARTIAL, _PARTIAL: _PARTIAL},
    # What a further backward adds to a finalized gradient makes it no less so: the sum over tp
    # or stages is in it, and must not be made again.
    GradientEvent.COMPLETED: dict.fromkeys(GradientState, _FINAL) | {_FINALIZED: _FINALIZED},
    GradientEvent.SET_ASIDE: {_FINAL: _EMPTY, _FINALIZED: _EMPTY},
    GradientEvent.ZEROED: {_EMPTY: _FINAL, _FINAL: _FINAL, _FINALIZED: _FINAL},
    GradientEvent.FINALIZED: {s: s for s in GradientState} | {_FINAL: _FINALIZED},
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

    BEGAN = auto()  # and nothing was held
    BEGAN_BESIDE = auto()  # and gradients were held
    ADDED = auto()  # it has brought a gradient; `late_gradients` does so while none runs
    RAISED = auto()
    CLEARED = auto()  # it has ended, or the user has dropped all gradients


_IDLE, _MIXED = BackwardPhase.IDLE, BackwardPhase.MIXED
_PHASES = {
    BackwardEvent.BEGAN: dict.fromkeys(BackwardPhase, BackwardPhase.ALONE),
    BackwardEvent.BEGAN_BESIDE: dict.fromkeys(BackwardPhase, BackwardPhase.BESIDE),
    BackwardEvent.ADDED: {p: p for p in BackwardPhase} | {BackwardPhase.BESIDE: _MIXED},
    BackwardEvent.RAISED: dict.fromkeys(BackwardPhase, _IDLE) | {_MIXED: _MIXED},
    BackwardEvent.CLEARED: dict.fromkeys(BackwardPhase, _IDLE),
}
