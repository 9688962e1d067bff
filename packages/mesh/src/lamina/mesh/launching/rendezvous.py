"""Where the ranks of a job meet: a key-value store that holds nothing from an earlier attempt.

torchrun's agents serve one store for the whole job. Restarted workers find the addresses that
their predecessors left there and connect to ports where nobody listens. torchrun's restart count
doesn't tell attempts apart: each agent counts the failures of its own workers only. So rank 0
draws a name for the attempt and every rank's keys live under it (docs/decisions/0103).
"""

import time
import uuid
from datetime import timedelta
from typing import cast

from torch.distributed import (  # type: ignore[attr-defined]  # public, but not in its stubs
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
)

from lamina.mesh.errors import RendezvousError
from lamina.mesh.launching.launch import Launch


def open_store(launch: Launch, timeout: timedelta) -> Store:
    """A fresh store shared by all ranks of `launch`.

    A world of one gets a store of its own and needs neither address nor port.

    RendezvousError: it cannot be reached, or ranks did not arrive within `timeout`.
    """
    if launch.world_size == 1:
        return cast(Store, HashStore())
    host, port = launch.host, launch.port
    if host is None or port is None:
        raise RendezvousError(
            f"{launch.world_size} ranks have no address to meet at: host={host}, port={port}."
        )
    # Where torchrun's agent serves a store, a second one could not bind the port.
    serves = launch.rank == 0 and not launch.store_is_running
    try:
        store = TCPStore(
            host,
            port,
            launch.world_size,
            is_master=serves,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (RuntimeError, ValueError) as error:
        action = "serve" if serves else "reach"
        raise RendezvousError(
            f"rank {launch.rank} of {launch.world_size} couldn't {action} the rendezvous store at "
            f"{host}:{port} ({launch.launcher}): {error}\n"
            "See that MASTER_ADDR is rank 0's host, that MASTER_PORT is free there and the same on "
            "all ranks, and that no firewall lies between."
        ) from error
    return cast(Store, PrefixStore(f"lamina/{agree_on_attempt(store, launch, timeout)}", store))


def agree_on_attempt(store: Store, launch: Launch, timeout: timedelta) -> str:
    """A name that all ranks of this attempt, and no rank of an earlier one, know.

    Rank 0 publishes a random name, waits until every rank has signed under it and gives the go.
    Another rank that reads a name of an earlier attempt notices: if that attempt ever got its go,
    its own rank had signed already, and if it did not, the go never comes and the name changes.

    RendezvousError names the ranks that did not come within `timeout`.
    """
    published = f"lamina/attempt/{launch.world_size}"
    deadline = time.monotonic() + timeout.total_seconds()
    if launch.rank == 0:
        attempt = uuid.uuid4().hex
        store.set(published, attempt)
        # All ranks have read the new name before anybody goes on: nobody is left with an old one.
        _await_signatures(store, launch, attempt, timeout)
        store.set(f"lamina/{attempt}/go", "1")
        return attempt
    signed, first = "", False
    # Pauses grow to a tenth of a second, and further in worlds whose polls would add up.
    pause, longest = 0.002, max(0.1, launch.world_size / 20_000)
    while True:
        if store.check([published]):
            attempt = str(store.get(published), "utf-8")
            if attempt != signed:
                # The count is above one where this rank's predecessor has signed: an old attempt.
                first = store.add(_signature(attempt, launch.rank), 1) == 1
                signed = attempt
            if first and store.check([f"lamina/{attempt}/go"]):
                return attempt
        if time.monotonic() >= deadline:
            reason = "rank 0 never came" if not signed else "some rank never came"
            raise RendezvousError(
                f"rank {launch.rank} of {launch.world_size} waited "
                f"{timeout.total_seconds():.0f} s at {launch.host}:{launch.port}, but {reason}. "
                "Rank 0's message names the missing ranks, if it runs."
            )
        time.sleep(pause)
        pause = min(2 * pause, longest)


def _await_signatures(store: Store, launch: Launch, attempt: str, timeout: timedelta) -> None:
    others = range(1, launch.world_size)
    try:
        store.wait([_signature(attempt, rank) for rank in others], timeout)
    except RuntimeError as error:
        # The store cannot say who is missing, so each rank is asked for now.
        missing = [rank for rank in others if not store.check([_signature(attempt, rank)])]
        raise RendezvousError(
            f"rank 0 waited {timeout.total_seconds():.0f} s at {launch.host}:{launch.port} for "
            f"{launch.world_size} ranks; {len(missing)} never came: "
            f"{', '.join(map(str, missing[:16]))}{', ...' if len(missing) > 16 else ''}. "
            "See the first error in their output, and that they were given this address and the "
            f"same world size ({launch.world_size})."
        ) from error


def _signature(attempt: str, rank: int) -> str:
    return f"lamina/{attempt}/signed/{rank}"
