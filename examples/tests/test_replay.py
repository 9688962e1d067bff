"""A step of a run over many ranks, executed again on one: every bit is the same."""

from __future__ import annotations

import json

import pytest
from recipe_runs import PRETRAIN, settings

from lamina_testing.programs import run_ranks


@pytest.mark.slow
@pytest.mark.parametrize(("dropout", "beta1"), [(0.0, 0.0), (0.1, 0.9)])
def test_a_step_of_eight_ranks_is_replayed_on_one(tmp_path, rank_server, dropout, beta1):
    """With a beta1 of 0 the first moments that are compared are the gradients themselves."""
    run = tmp_path / "run"
    options = [
        *("--mesh", "tp=2,pp=2,dp_shard=2", "--train.steps", "2", "--train.reproducible", "1"),
        *("--train.invariant", "--model.dropout", str(dropout), "--train.beta1", str(beta1)),
        *("--checkpoint.every", "1", "--train.warmup-steps", "1", "--run.directory", str(run)),
    ]  # fmt: skip
    words = [str(PRETRAIN / "train.py"), *settings(tmp_path, "gpt", *options)]
    for ended in rank_server.call(run_ranks, words=words, nproc=8):
        assert ended.code == 0, ended.output
    replay = [str(PRETRAIN / "replay.py"), str(run), "2"]
    (ended,) = rank_server.call(run_ranks, words=replay, nproc=0)
    assert ended.code == 0, ended.output
    assert "0 tensors differ" in ended.output
    # A rate that is a little higher than the run's was is seen in the weights, and moments agree.
    record = json.loads((run / "config.json").read_text())
    record["train"]["learning_rate"] *= 1.001
    (run / "config.json").write_text(json.dumps(record))
    (ended,) = rank_server.call(run_ranks, words=replay, nproc=0)
    assert ended.code == 1, ended.output
    assert "0 tensors differ" not in ended.output
