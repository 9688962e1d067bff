"""A step's loss and gradient norm are judged alike on all ranks, in a message sent anyway."""

import math
import socket
import statistics
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lamina.collectives import DisagreementError, Ledger
from lamina.ddp import (
    Decision,
    DistributedDataParallel,
    DistributedDataParallelConfig,
    HealthMonitor,
    clip_grad_norm,
)
from lamina.ddp.monitor.pace import Pace
from lamina.mesh import ParallelLayout
from lamina_testing import device_type


def wrap(**config):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    mesh = ParallelLayout().build(device_type())
    return DistributedDataParallel(module, DistributedDataParallelConfig(**config), mesh), mesh


def backwards(model, health, batches):
    model.zero_grad_buffer()
    for index, batch in enumerate(batches):
        with nullcontext() if index == len(batches) - 1 else model.no_sync():
            loss = model(batch).square().mean()
            health.note(loss)
            loss.backward()


def judged(health, loss, norm=1.0):
    """The judgement of one process, whose loss and norm are given."""
    return health.judge(loss, norm, (), torch.device("cpu"), lambda _: [])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sharded", [False, True])
def test_a_nan_in_one_microbatch_is_named_on_all_ranks(sharded, ranks):
    model, mesh = wrap(use_distributed_optimizer=sharded)
    health = HealthMonitor(nonfinite="skip")
    batches = torch.ones(3, 2, 3)
    batches[2, 0, 1] = math.nan if ranks.rank == 1 else 1.0
    backwards(model, health, batches)
    told = pytest.warns(UserWarning, match="the step is skipped")
    with told if ranks.rank == 0 else nullcontext():
        clip_grad_norm(model, 1.0, mesh, health=health)
    found = health.last
    assert found.decision is Decision.SKIP
    assert "rank 1 (dp_shard_cp=1): microbatch 2 has loss nan" in found.reason
    assert "rank 0 (" not in found.reason
    names = found.reason.partition("; gradients of ")[2]
    assert set(names.split(", ")) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    backwards(model, health, torch.ones(1, 2, 3))
    clip_grad_norm(model, 1.0, mesh, health=health)
    assert health.last.decision is Decision.STEP


@pytest.mark.ranks(2)
def test_a_healthy_step_sends_no_message_for_it(ranks):
    sent = []
    for health in (None, HealthMonitor()):
        model, mesh = wrap()
        for _ in range(2):  # the first one compares settings
            backwards(model, health or HealthMonitor(), torch.ones(1, 2, 3))
            with Ledger() as ledger:
                norm = clip_grad_norm(model, 1.0, mesh, health=health)
        sent.append([(record.axis, record.op) for record in ledger.records])
        last = norm if health is None else health.last
    assert sent[0] == sent[1]
    assert last.norm == float(norm)
    with torch.no_grad():
        assert last.loss == pytest.approx(float(model(torch.ones(2, 3)).square().mean()))


@pytest.mark.ranks(2)
def test_to_stop_raises_on_all_ranks(ranks):
    model, mesh = wrap()
    bad = torch.full((1, 2, 3), math.inf if ranks.rank == 0 else 1.0)
    health = HealthMonitor()
    backwards(model, health, bad)
    with pytest.raises(FloatingPointError, match=r"not finite; rank 0 \(.*\): microbatch 0 has"):
        clip_grad_norm(model, 1.0, mesh, health=health)


@pytest.mark.ranks(2)
def test_monitors_that_would_decide_differently_are_refused(ranks):
    model, mesh = wrap()
    health = HealthMonitor(spike="skip" if ranks.rank == 0 else "back")
    backwards(model, health, torch.ones(1, 2, 3))
    with pytest.raises(DisagreementError, match="spike is back on rank 1"):
        clip_grad_norm(model, 1.0, mesh, health=health)


@pytest.mark.ranks(2)
def test_a_rank_without_a_loss_takes_the_others_verdict(ranks):
    model, mesh = wrap()
    health = HealthMonitor()
    model(torch.ones(2, 3)).mean().backward()
    if ranks.rank == 1:  # as the last stage of a pipeline does
        health.note(3.0)
    clip_grad_norm(model, 1.0, mesh, health=health)
    assert health.last.loss == 3.0


def test_a_spike_is_told_by_the_median_and_the_median_distance():
    generator = torch.Generator().manual_seed(0)
    for spread in (0.01, 1.0):  # a tenth of the median is the least deviation
        health = HealthMonitor(window=32, least=8)
        past = (5 + spread * torch.randn(40, generator=generator)).tolist()
        for value in past:
            assert judged(health, value).healthy
        seen = past[-32:]
        median = statistics.median(seen)
        distance = statistics.median([abs(value - median) for value in seen])
        most = median + 10 * max(1.4826 * distance, 0.1 * median)
        with pytest.warns(UserWarning, match=r"the loss is above its limit"):
            assert judged(health, most * 1.0001).decision is Decision.SKIP
    assert judged(health, most * 0.98).healthy
    assert judged(health, 5.0, norm=10.9).healthy  # 99 deviations of 0.1 above 1
    with pytest.warns(UserWarning, match=r"the gradient norm is above"):
        assert not judged(health, 5.0, norm=50.0).healthy
    assert health.counts == {"skip": 2}


def test_a_shift_that_lasts_is_no_spike_for_ever():
    health = HealthMonitor(window=8, least=4, patience=8)
    for _ in range(8):
        judged(health, 1.0)
    with pytest.warns(UserWarning, match="skipped"):
        verdicts = [judged(health, 100.0).healthy for _ in range(8)]
    assert verdicts == [False] * 4 + [True] * 4


def test_patience_ends_what_skips_every_step():
    health = HealthMonitor(nonfinite="skip", patience=3)
    for _ in range(2):
        with pytest.warns(UserWarning, match="skipped"):
            judged(health, math.nan)
    with pytest.raises(FloatingPointError, match=r"\(3 steps in a row\)"):
        judged(health, math.nan)


def test_a_monitor_goes_on_as_the_one_that_was_saved():
    health, other = HealthMonitor(least=2), HealthMonitor(least=2)
    for value in (1.0, 1.1, 1.2):
        judged(health, value)
    health.went_back(3, bad=7)
    other.load_state_dict(health.state_dict())
    assert (other.batch(3), other.batch(4)) == (8, 9)
    for one in (health, other):
        with pytest.warns(UserWarning, match="above its limit"):
            assert not judged(one, 30.0).healthy
    assert health.state_dict() == other.state_dict()


def test_settings_that_mean_nothing_are_refused():
    for settings in ({"nonfinite": "ignore"}, {"spike": "none"}, {"limit": 0}, {"least": 65}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            HealthMonitor(**settings)


def test_a_run_that_fails_at_the_same_step_after_each_return_stops():
    def run(fails, patience):
        """Steps to the end of ten, from step 2 again after each failure."""
        health, done, tries = HealthMonitor(nonfinite="back", patience=patience), 0, 0
        while done < 10:
            tries += 1
            assert tries < 100
            bad = fails(done, tries)
            if judged(health, math.nan if bad else 1.0).decision is Decision.BACK:
                bad, done = health.batch(done), 2
                health.went_back(done, bad)
            else:
                done += 1

    with pytest.warns(UserWarning, match="goes back"):
        run(lambda done, tries: tries in (6, 11), patience=2)  # at step 5, and past it at step 6
    stops = pytest.raises(FloatingPointError, match=r"\(3 steps in a row\)")
    with pytest.warns(UserWarning, match="goes back"), stops:
        run(lambda done, tries: done == 5, patience=3)


def train(model, mesh, health, steps, late):
    """Steps; the timed ones, every eighth, compute for `late` seconds. Those with stragglers."""
    found = {}
    for number in range(steps):
        with health.step():
            time.sleep(late(number) if number % 8 == 7 else 0)
            backwards(model, health, torch.ones(1, 2, 3))
            clip_grad_norm(model, 1.0, mesh, health=health)
        if health.last.stragglers:
            found[number] = health.last.stragglers
    return found


@pytest.mark.ranks(3)
def test_a_rank_that_holds_the_others_up_is_named_once_on_all_ranks(ranks):
    model, mesh = wrap()
    health = HealthMonitor(slow=2.0, slow_steps=16)
    train(model, mesh, health, 8, lambda _: 0.025)
    told = pytest.warns(UserWarning, match="as long for a step as the other ranks")
    with told if ranks.rank == 0 else nullcontext():
        found = train(model, mesh, health, 40, lambda _: 0.25 if ranks.rank == 1 else 0.025)
    ((step, (straggler,)),) = found.items()
    # Steps 16 and 24 are timed, told in the norm's message of the next, and named in the one after.
    assert step == 17
    assert straggler.rank == "rank 1 (dp_shard_cp=1)"
    assert straggler.host == socket.gethostname()
    assert 2 < straggler.factor <= 10.5
    # One that recovers is named again if it is slow again; all of them slow is nobody.
    assert not train(model, mesh, health, 24, lambda _: 0.1)
    again = train(model, mesh, health, 32, lambda _: 0.25 if ranks.rank == 1 else 0.025)
    assert len(again) == 1


def test_the_network_is_blamed_once_if_all_ranks_wait_longer_than_they_used_to():
    paces = [Pace(1.5, 16) for _ in range(3)]

    def timed(*waits, own=0.1):
        for pace, wait in zip(paces, waits, strict=True):
            records = [SimpleNamespace(exposed=wait / 2, between=between) for between in (0, 9)]
            pace._timed = SimpleNamespace(records=records), own + wait
        sums = [sum(numbers) for numbers in zip(*(each.message() for each in paces), strict=True)]
        for each in paces:
            each.compare(sums)
        (told,) = {each.network for each in paces}
        return told

    assert not any(timed(0.02, 0.01, 0.03) for _ in range(4))
    assert not any(timed(0.5, 0.5, 0.02) for _ in range(4)), "the third rank holds the others up"
    assert not any(timed(0.09, 0.09, 0.09) for _ in range(4)), "longer, and not most of a step"
    found = [timed(0.8, 0.8, 0.8) for _ in range(4)]
    assert [bool(each) for each in found] == [False, True, False, False]
    assert "all 3 ranks wait " in found[1]
    assert "(0.8 s of a step, 50% of it for other hosts)" in found[1]
    assert not timed(0.02, 0.01, 0.03)
    assert any(timed(0.8, 0.8, 0.8) for _ in range(2)), "again, after it had recovered"


@pytest.mark.ranks(2)
def test_a_rank_that_is_slow_now_and_then_is_not_named(ranks):
    model, mesh = wrap()
    health = HealthMonitor(slow=2.0, slow_steps=16)
    late = [0.2 if ranks.rank == 1 and number % 16 == 7 else 0.05 for number in range(64)]
    assert not train(model, mesh, health, 64, late.__getitem__)
