"""Do all ranks call the same thing? A check for debugging: it costs a small exchange per call.

Backends do not ask. gloo takes buffers of different sizes without a word and ends the process on
different dtypes; NCCL hangs. With `check=True` every rank first tells the others what it is
about to do, and all of them raise, with the table of who does what, if they differ. It is done at
every call and not only at the first of its kind: a rank that has seen a call before would
otherwise not answer one that has not.
"""

from collections.abc import Sequence

import torch
from torch.distributed import ProcessGroup

from lamina.collectives.transport.groups import where
from lamina.collectives.transport.transport import route_for

__all__ = ["require_agreement", "require_matching_splits", "rows_of_all"]

_LENGTH = 256


def require_agreement(
    call: str, group: ProcessGroup | None, device: torch.device, **facts: object
) -> None:
    """Compare a description of this call over all ranks; collective.

    Args:
        call: name of the collective.
        group: the ranks; None needs no agreement.
        device: of its tensors.
        facts: what has to be equal everywhere: sizes, dtypes, options.

    Raises:
        ValueError: on every rank, if any two differ.
    """
    if group is None or group.size() == 1 or device.type == "meta":
        return
    mine = f"{call}({', '.join(f'{name}={value}' for name, value in facts.items())})"
    encoded = mine.encode()[:_LENGTH].ljust(_LENGTH)
    message = torch.tensor(list(encoded), dtype=torch.uint8, device=device)
    rows = rows_of_all(message, group).tolist()
    said = [bytes(row).decode(errors="replace").rstrip() for row in rows]
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

    Raises:
        ValueError: on every rank, naming all pairs that differ.
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
