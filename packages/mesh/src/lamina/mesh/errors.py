"""Errors in the description of a layout, of a mesh or of a process' start.

Every class also is the built-in error that a caller would expect, so `except ValueError`
works for callers who don't know Lamina.
"""


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
