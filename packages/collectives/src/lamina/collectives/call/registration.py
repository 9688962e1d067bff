"""Memory that NCCL reads and writes in place: user buffers and symmetric windows.

NCCL copies through buffers of its own unless it knows the caller's memory. Registered memory saves
those copies and most of the SMs that make them; registered *symmetrically* (the same layout on
every rank) it also lets NCCL choose kernels that sum in fp32 and, where there is an NVSwitch, sum
in the switch. What that does for which collective of Lamina, and the environment variables that
NCCL itself reads, are in docs/collectives-nccl.md.

Two rules of NCCL's shape the interface. Symmetric registration is collective: all ranks register
the same segments in the same order. And torch registers what a registered pool allocates later
from an allocator hook, on one rank alone, which hangs where the registration is collective. So
all allocations of a symmetric pool are made in one block, and registered together at its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from lamina.collectives.call.collective import issue
from lamina.collectives.transport.groups import backend_name
from lamina.collectives.transport.lanes import lane_of

_USER_BUFFERS = (2, 19)  # ncclCommRegister
_SYMMETRIC = (2, 27)  # ncclCommWindowRegister


class RegistrationError(RuntimeError):
    """The memory of a group can't be registered; the message says why and what to change."""


def registration_problem(
    group: ProcessGroup | None,
    device: torch.device | str | int | None = None,
    *,
    symmetric: bool = True,
) -> str | None:
    """Say why memory on `device` can't be registered with `group`, or None if it can.

    Looks at the group, the device, the build and NCCL's version, and sends nothing. NCCL may still
    refuse later, for want of drivers or by its environment: `RegisteredPool` then raises.

    The device is of CUDA; None is the current one. `symmetric` asks for symmetric windows, not only
    for user buffers.
    """
    if group is None:
        return "there is no process group (an axis of one rank), so nothing moves between ranks"
    if not torch.cuda.is_available():
        built = "has no CUDA" if torch.version.cuda is None else "sees no CUDA device"
        return f"torch {torch.__version__} {built}, and only NCCL registers memory"
    where = _device(device)
    if where.type != "cuda":
        return f"the memory is on {where}, and NCCL registers only CUDA memory"
    try:
        served_by = backend_name(group, where)
    except ValueError:  # not at all
        served_by = "no backend"
    if served_by != "nccl":
        return (
            f"group '{group.group_desc}' serves {where.type} tensors by {served_by}; start the "
            f"world with init_distributed() on GPUs (cpu:gloo,cuda:nccl)"
        )
    backend: Any = group._get_backend(where)
    try:
        whole = hasattr(backend, "register_mem_pool") and hasattr(backend, "mem_allocator")
    except RuntimeError as error:  # torch asks the device when the allocator is looked at
        return f"NCCL has no allocator for {where}, such as a GPU without multicast: {error}"
    if not whole:
        return (
            f"the NCCL backend of torch {torch.__version__} has no register_mem_pool or "
            f"mem_allocator; use a CUDA build of torch 2.11 or later"
        )
    needed = _SYMMETRIC if symmetric else _USER_BUFFERS
    version = tuple(torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    if version < needed:
        kind = "symmetric windows need" if symmetric else "user buffers need"
        remedy = "; pass symmetric=False, or update NCCL" if symmetric else "; update NCCL"
        return f"{kind} NCCL {_dotted(needed)} and this is {_dotted(version)}{remedy}"
    return None


def register_pool(
    groups: ProcessGroup | Sequence[ProcessGroup],
    device: torch.device | str | int | None = None,
    *,
    symmetric: bool = True,
) -> RegisteredPool:
    """Make a memory pool whose allocations NCCL may use in place in the collectives of `groups`.

        pool = register_pool([gather, reduce])
        with pool:
            slots = torch.empty(numel, dtype=torch.bfloat16, device="cuda")
        ...
        pool.close()  # before the process group is destroyed

    Args:
        groups: communicators that will move this memory, in the same order on all ranks.
        device: a CUDA device; None is the current one.
        symmetric: register symmetric windows (all ranks then allocate the same sizes in the same
            order, and pass the same offsets to each collective); False for user buffers.

    Raises:
        RegistrationError: the group, device, build or NCCL lacks it, with the reason.
        ValueError: no groups.
    """
    several = tuple(groups) if isinstance(groups, Sequence) else (groups,)
    if not several:
        raise ValueError(
            "register_pool: `groups` is empty; name the communicators that will use it"
        )
    for group in several:
        problem = registration_problem(group, device, symmetric=symmetric)
        if problem is not None:
            raise RegistrationError(f"register_pool: can't register memory with NCCL: {problem}")
    return RegisteredPool(several, _device(device), symmetric=symmetric)


class RegisteredPool:
    """A pool of NCCL's memory; made by `register_pool`.

    As a context manager it takes the allocations that this thread makes on its device, and on
    leaving registers them: with `symmetric`, that is collective over each group. The tensors live
    as long as they are referenced, as any others do.

    `groups` are in order of registration, and `registered` says whether it has happened.
    """

    def __init__(
        self, groups: tuple[ProcessGroup, ...], device: torch.device, *, symmetric: bool
    ) -> None:
        self.groups = groups
        self.device = device
        self.symmetric = symmetric
        self.registered = False
        self._closed = False
        self._inside: AbstractContextManager[None] | None = None
        # Never lent to other allocations when memory is short: one rank's pool would grow alone.
        self._pool = torch.cuda.MemPool(self._backend(groups[0]).mem_allocator, use_on_oom=False)

    def _backend(self, group: ProcessGroup) -> Any:
        return group._get_backend(self.device)

    def __enter__(self) -> RegisteredPool:
        if self._closed or self._inside is not None:
            state = "closed" if self._closed else "already open"
            raise RuntimeError(f"this RegisteredPool is {state}; make another with register_pool()")
        if self.registered and self.symmetric:
            raise RuntimeError(
                "this RegisteredPool is registered symmetrically, and what is allocated now would "
                "be registered by this rank alone, which hangs; allocate everything in one block, "
                "or make another pool"
            )
        self._inside = torch.cuda.use_mem_pool(self._pool, self.device)
        self._inside.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        inside, self._inside = self._inside, None
        if inside is not None:
            inside.__exit__(*exception)
        # Registering is collective. After an exception the other ranks may never come to it.
        if exception[0] is None and not self.registered:
            self._register()

    def _register(self) -> None:
        for place, group in enumerate(self.groups):
            # A communicator exists only after its first collective, unless it was made eagerly.
            first = torch.zeros(1, device=self.device)
            call = issue("register_pool", lane_of(group), first.dtype, first.element_size())
            dist.all_reduce(first, group=group)
            call.finish()
            try:
                self._backend(group).register_mem_pool(self._pool, self.symmetric)
            except (RuntimeError, TypeError) as error:
                self._deregister(self.groups[:place])
                raise RegistrationError(
                    f"NCCL {_dotted(torch.cuda.nccl.version())} refused to register memory on "  # type: ignore[no-untyped-call]
                    f"{self.device} with group '{group.group_desc}' (symmetric={self.symmetric}): "
                    f"{error}. Run with NCCL_DEBUG=INFO for its reason; NCCL_CUMEM_ENABLE=0, "
                    f"NCCL_WIN_ENABLE=0 and NCCL_LOCAL_REGISTER=0 switch it off. "
                    f"docs/collectives-nccl.md lists what is needed"
                ) from error
        self.registered = True

    def _deregister(self, groups: Sequence[ProcessGroup]) -> None:
        for group in reversed(groups):
            self._backend(group).deregister_mem_pool(self._pool)

    def close(self) -> None:
        """Deregister; call it on all ranks, before the process group is destroyed.

        Some versions of torch end the process when a communicator is destroyed that still has
        symmetric windows (pytorch issue 181610). Waits for the device first, as a collective may
        still use the memory. The tensors stay valid. A second call does nothing.
        """
        if self.registered and not self._closed:
            torch.cuda.synchronize(self.device)
            self._deregister(self.groups)
        self._closed = True
        self.registered = False


def _device(device: torch.device | str | int | None) -> torch.device:
    """The device with its index, as pools and backends are looked up by it."""
    if isinstance(device, int):
        return torch.device("cuda", device)
    where = torch.device("cuda" if device is None else device)
    if where.type == "cuda" and where.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return where


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))
