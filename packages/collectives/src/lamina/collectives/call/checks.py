"""Refusals: a wrong call is named before any byte is sent.

gloo kills the process on mismatched dtypes, and lets mismatched sizes pass in silence; NCCL hangs.
So what one rank can see is checked at every call, and what the ranks only see together on request.
With `check=True` every rank first tells the others what it is about to do, and all of them raise,
with the table of who does what, if they differ. It is done at every call and not only at the first
of its kind: a rank that has seen a call before would otherwise not answer one that has not.
"""

from collections.abc import Iterable, Sequence

import torch
from torch.distributed import ProcessGroup

from lamina.collectives.transport.groups import size_of, where
from lamina.collectives.transport.transport import route_for

_LENGTH = 256  # bytes of a call in words

WIRE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def require_flat(op: str, name: str, tensor: torch.Tensor, group: ProcessGroup | None) -> None:
    """Refuse a tensor that is not one contiguous run of elements, with a ValueError."""
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"{op} {where(group)}: `{name}` must be flat and contiguous, but has shape "
            f"{tuple(tensor.shape)} and strides {tensor.stride()}; pass a flat buffer, or "
            f"`.contiguous().view(-1)` of a temporary"
        )


def require_same_device(
    op: str, group: ProcessGroup | None, **tensors: torch.Tensor
) -> torch.device:
    """Return the one device of `tensors`; ValueError if they lie on several."""
    devices = {name: tensor.device for name, tensor in tensors.items()}
    if len(set(devices.values())) != 1:
        listing = ", ".join(f"`{name}` on {device}" for name, device in devices.items())
        raise ValueError(f"{op} {where(group)}: tensors must share one device, got {listing}")
    return next(iter(devices.values()))


def require_disjoint(
    op: str,
    group: ProcessGroup | None,
    first: tuple[str, torch.Tensor],
    second: tuple[str, torch.Tensor],
    *,
    unless: str = "",
) -> None:
    """Refuse two contiguous tensors that share memory, with a ValueError.

    `unless` tells what overlap would have been allowed.
    """
    (name, tensor), (other_name, other) = first, second
    if not tensor.numel() or not other.numel() or tensor.device != other.device or tensor.is_meta:
        return
    start, other_start = tensor.data_ptr(), other.data_ptr()
    if start < other_start + other.nbytes and other_start < start + tensor.nbytes:
        hint = f"; {unless}" if unless else ""
        raise ValueError(
            f"{op} {where(group)}: `{name}` and `{other_name}` share memory{hint}; pass "
            f"distinct buffers"
        )


def require_divisible(
    what: str, tensor: torch.Tensor, dim: int, group: ProcessGroup | None
) -> None:
    """Refuse, with a ValueError, a dimension that can't be cut into equal pieces."""
    size = size_of(group)
    if tensor.shape[dim] % size:
        raise ValueError(
            f"{what} {where(group)}: dimension {dim} of shape {tuple(tensor.shape)} has size "
            f"{tensor.shape[dim]}, which is not divisible by the group's {size} ranks; pad it to "
            f"{-(-tensor.shape[dim] // size) * size} or choose another dimension"
        )


def require_agreement(
    call: str, group: ProcessGroup | None, device: torch.device, **facts: object
) -> None:
    """Compare a description of this call over all ranks; collective.

    Facts are what has to be equal everywhere: sizes, dtypes, options. ValueError, on every rank, if
    any two differ.
    """
    if group is None or group.size() == 1 or device.type == "meta":
        return
    mine = f"{call}({', '.join(f'{name}={value}' for name, value in facts.items())})"
    said = texts_of_all(mine, _LENGTH, [group], device)
    if len(set(said)) > 1:
        table = "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(said))
        raise ValueError(
            f"{call} {where(group)}: the ranks of the group do not call the same thing:\n{table}\n"
            f"all ranks must make the same calls in the same order with the same sizes and dtypes"
        )


def require_matching_splits(
    call: str,
    group: ProcessGroup | None,
    device: torch.device,
    sends: Sequence[int],
    receives: Sequence[int],
) -> None:
    """Compare what each rank is about to send with what its receivers expect; collective.

    ValueError, on every rank, names all pairs that differ.
    """
    if group is None or group.size() == 1 or device.type == "meta":
        return
    size = group.size()
    message = torch.tensor([*sends, *receives], device=device)
    table = rows_of_all(message, group).view(size, 2, size).tolist()
    wrong = [
        f"rank {source} sends {table[source][0][target]} rows to rank {target}, which expects "
        f"{table[target][1][source]}"
        for source in range(size)
        for target in range(size)
        if table[source][0][target] != table[target][1][source]
    ]
    if wrong:
        raise ValueError(
            f"{call} {where(group)}: the splits of the ranks do not match: {'; '.join(wrong)}"
        )


def rows_of_all(message: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Every rank's message, as rows."""
    rows = message.new_empty(group.size() * message.numel())
    route_for(group, message.numel(), rows.numel(), message.device).gather(rows, message)()
    return rows.view(group.size(), -1)


def texts_of_all(
    text: str, length: int, groups: Iterable[ProcessGroup], device: torch.device
) -> list[str]:
    """Every rank's text, cut at `length` bytes; the first group is the innermost axis."""
    # Texts of one length, so that this message fits even where what ranks call does not.
    encoded = text.encode()[:length].ljust(length)
    rows = torch.tensor(list(encoded), dtype=torch.uint8, device=device)
    for group in groups:
        rows = rows_of_all(rows.view(-1), group)
    return [bytes(row).decode(errors="replace").rstrip() for row in rows.view(-1, length).tolist()]
