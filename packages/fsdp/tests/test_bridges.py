"""`Accelerator`, `Trainer` and Lightning over sharded models, against one plain process.

The oracle trains the rows of all ranks as one batch, in plain PyTorch. What imports a trainer takes
seconds in every rank, so there is one default test for each; the others are slow.
"""

import json
from importlib.util import find_spec

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lamina.ddp import full_parameters
from lamina.fsdp import ShardedModule, fully_shard
from lamina.fsdp.bridges.trainer_state import whole_state

from .bridge_runs import (
    BATCH,
    RANKS,
    accelerator_for,
    as_read,
    assert_near,
    decaying,
    halved,
    in_order,
    lightning,
    llama,
    loop,
    one_process,
    rows,
    sgd,
    stacked,
    task_of,
    trainer_of,
)

TRAINERS = ("accelerate", "transformers", "pytorch_lightning")
pytestmark = pytest.mark.skipif(
    not all(map(find_spec, TRAINERS)), reason=f"pip install {' '.join(TRAINERS)}"
)


class Shared(nn.Module):
    """Tied, frozen, small and empty parameters, and buffers."""

    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.inner[0].weight
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.none = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x):
        for layer in (*self.inner, self.tied):
            x = layer(x)
        return x


@pytest.mark.matrix(strength=1)
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("strategy", [0, 1, 2, 3, {"inner.*": 3, "*": 0}], ids=str)
def test_libraries_get_tensors_that_share_no_storage_unless_they_are_tied(strategy, ranks):
    """Accelerate and huggingface_hub save one tensor of each storage; see the Note there."""
    torch.manual_seed(2)
    model = Shared()
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    model = fully_shard(model, zero_dp_strategy=strategy)
    given = whole_state(model, keep=ranks.rank == 0)
    assert list(given) == (list(wanted) if ranks.rank == 0 else [])
    for name, value in given.items():
        assert torch.equal(value, wanted[name]), name
        sharing = [n for n, v in given.items() if v.numel() and _storage(v) == _storage(value)]
        tied = ["inner.0.weight", "tied.weight"]
        assert sharing == (tied if name in tied else [name] if value.numel() else [])
        assert value.untyped_storage().nbytes() == value.nbytes
    for value in given.values():
        value.fill_(7)  # copies: the model stays as it is
    for name, value in full_parameters(model).items():
        assert torch.equal(value, wanted[name]), name


def _storage(tensor):
    return tensor.untyped_storage().data_ptr()


@pytest.mark.slow
@pytest.mark.ranks(RANKS, init=False, timeout=120)
def test_accelerate_trains_shards_on_other_rows_per_rank_and_goes_on(ranks, tmp_path):
    data, seen = rows(), []
    accelerator = accelerator_for()
    assert accelerator.is_main_process == (ranks.rank == 0)
    model = llama()
    loader = DataLoader(data, batch_size=BATCH, collate_fn=stacked)
    optimizer, model, loader = accelerator.prepare(sgd(model), model, loader)
    assert isinstance(model, ShardedModule)
    loop(accelerator, model, optimizer, loader, seen)
    wanted = one_process(llama(), as_read(seen, data))
    assert_near(model, wanted)

    accelerator.save_state(str(tmp_path / "state"))
    loop(accelerator, model, optimizer, loader)
    again = accelerator_for(1)
    other, stepper, loader = again.prepare(fresh := llama(), sgd(fresh), loader)
    again.load_state(str(tmp_path / "state"))
    assert_near(other, wanted)
    loop(again, other, stepper, loader)
    assert_near(other, full_parameters(model), atol=1e-6)


@pytest.mark.ranks(RANKS, init=False, timeout=120)
def test_a_trainer_trains_saves_evaluates_and_generates_in_shards(ranks, tmp_path):
    from transformers import AutoModelForCausalLM

    data, held_out = rows(), rows(8, seed=6)
    model = llama()
    optimizers = (sgd(model), None)
    trainer = trainer_of(model, tmp_path, data, eval_dataset=held_out, optimizers=optimizers)
    trainer.train()
    assert isinstance(model, ShardedModule)
    reference = llama()
    wanted = one_process(reference, in_order(data), rate=decaying)
    assert_near(model, wanted)

    with torch.no_grad():
        loss = reference(**stacked(held_out)).loss.item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(loss, abs=1e-5)
    prompt = stacked(held_out)["input_ids"][:1, :4]
    written = model.generate(input_ids=prompt, max_new_tokens=4, do_sample=False)
    plain = reference.eval().generate(input_ids=prompt, max_new_tokens=4, do_sample=False)
    assert written.tolist() == plain.tolist()

    trainer.save_model(str(tmp_path / "model"))
    torch.distributed.barrier()
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert_near(model, dict(loaded.named_parameters()), atol=0)


@pytest.mark.slow
@pytest.mark.ranks(RANKS, init=False, timeout=120)
def test_lightning_trains_shards_on_other_rows_per_rank_and_goes_on(ranks, tmp_path):
    data, held_out = rows(), rows(8, seed=6)
    loader = DataLoader(data, batch_size=BATCH, collate_fn=stacked)
    others = DataLoader(held_out, batch_size=BATCH, collate_fn=stacked)
    task, trainer = task_of(llama()), lightning(tmp_path)
    trainer.fit(task, loader)
    assert isinstance(task, ShardedModule)
    reference, steps = llama(), as_read(task.seen, data)
    wanted = one_process(reference, steps, rate=halved)
    assert_near(task, {f"net.{name}": value for name, value in wanted.items()})

    with torch.no_grad():
        loss = reference(**stacked(held_out)).loss.item()
    assert trainer.validate(task, others)[0]["held_out"] == pytest.approx(loss, abs=1e-5)
    prompt = stacked(held_out)["input_ids"][:1, :4]
    with task.unsharded():
        written = task.net.generate(input_ids=prompt, max_new_tokens=4, do_sample=False)
    plain = reference.generate(input_ids=prompt, max_new_tokens=4, do_sample=False)
    assert written.tolist() == plain.tolist()
    trainer.save_checkpoint(tmp_path / "state")

    again, trainer = task_of(llama()), lightning(tmp_path, strategy=1, max_epochs=2)
    trainer.fit(again, loader, ckpt_path=tmp_path / "state", weights_only=False)
    steps += as_read(again.seen, data)
    wanted = one_process(llama(), steps, rate=halved)
    assert_near(again, {f"net.{name}": value for name, value in wanted.items()})
