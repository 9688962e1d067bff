"""Messages as operations: they arrive, are on the ledger, and refuse what would go wrong."""

import pytest
import torch
import torch.distributed as dist

from lamina.collectives import Ledger
from lamina.collectives.engine import receive_operation, send_operation


@pytest.mark.ranks(2, backend="gloo")  # NCCL has no tags: messages meet in their order
def test_messages_meet_by_tag_and_are_on_the_ledger(ranks):
    group, other = dist.group.WORLD, 1 - ranks.rank
    sent = [torch.full((4,), 10.0 * ranks.rank + tag) for tag in (1, 2)]
    found = [torch.empty(4), torch.empty(4)]
    with Ledger() as ledger:
        # Sent in the other order than received.
        operations = [send_operation(sent[tag], group, other, tag=tag) for tag in (1, 0)]
        operations += [receive_operation(found[tag], group, other, tag=tag) for tag in (0, 1)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    assert [float(tensor[0]) for tensor in found] == [10.0 * other + 1, 10.0 * other + 2]
    assert ledger.bytes(op="send_operation") == 2 * 16


@pytest.mark.ranks(2)
def test_a_peer_outside_the_group_is_refused(ranks):
    with pytest.raises(ValueError, match="peer=2 is not a rank"):
        send_operation(torch.zeros(1), dist.group.WORLD, 2)
    with pytest.raises(ValueError, match="contiguous"):
        receive_operation(torch.zeros(4, 4).t(), dist.group.WORLD, 0)
