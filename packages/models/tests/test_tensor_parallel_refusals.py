"""What ranks of tp cannot share, and ids that none of them has, are refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lamina.mesh import ParallelLayout
from lamina.models import GPTModel, TransformerConfig
from lamina_testing import device_type

LLAMA = TransformerConfig(
    vocab_size=61, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_size=48,
    max_sequence_length=32, vocab_multiple=4, loss_chunk=10,
)  # fmt: skip


@pytest.mark.ranks(2)
def test_ids_of_no_rank_are_refused_or_show(monkeypatch):
    mesh = ParallelLayout(tp=2).build(device_type())
    model = GPTModel(replace(LLAMA, num_layers=1), mesh, seed=5)  # 61 ids in 64 rows
    tokens, labels = torch.randint(0, 61, (2, 3, 16)).unbind()
    data = {"tokens": tokens, "labels": labels}
    for bad in (-1, 61, 64):
        for name in ("tokens", "labels"):
            strange = {**data, name: data[name].clone()}
            strange[name][1, 3] = bad
            if device_type() == "cpu":
                with pytest.raises(ValueError, match=f"{name} hold {bad} .* they must be 0 to 60"):
                    model(**strange)
            # A GPU does not look.
            with monkeypatch.context() as patch:
                for module in ("decoder.gpt", "layers.loss", "layers.embedding"):
                    patch.setattr(f"lamina.models.{module}.check_ids", lambda *_: None)
                assert model(**strange).isnan()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 1, "num_kv_heads": 1}, "num_heads 1 is not divisible by tp 2"),
        ({"num_kv_heads": 1}, "num_kv_heads 1 is not divisible by tp 2"),
        ({"ffn_size": 33}, "output width 33 is not divisible by tp 2"),
        ({"vocab_multiple": 1}, "rows 61 is not divisible by tp 2"),
    ],
)
def test_sizes_that_ranks_cannot_share_are_refused(change, message):
    mesh = ParallelLayout(tp=2).build(device_type())
    with pytest.raises(ValueError, match=message):
        GPTModel(replace(LLAMA, **change), mesh)


@pytest.mark.ranks(2)
def test_tokens_that_ranks_cannot_share_are_refused():
    mesh = ParallelLayout(tp=2).build(device_type())
    model = GPTModel(replace(LLAMA, sequence_parallel=True), mesh)
    with pytest.raises(ValueError, match="3 x 5 = 15 tokens are not divisible by tp 2"):
        model(torch.zeros(3, 5, dtype=torch.int64))
