"""The bridges further: resuming, accumulation, adapters, refusals, the programs of the pages."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from lamina.ddp import full_parameters
from lamina.fsdp import ShardedModule, fully_shard, register_forward_method
from lamina.mesh import init_distributed
from lamina_testing import device_type

from .bridge_runs import (
    BATCH,
    LR,
    RANKS,
    STEPS,
    VOCABULARY,
    accelerator_for,
    arguments,
    as_read,
    assert_near,
    decaying,
    forget_accelerate,
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

pytestmark = [pytest.mark.slow, pytest.mark.ranks(RANKS, init=False, timeout=200)]
DOCS = Path(__file__).parents[3] / "docs"


# ------------------------------------------------------------------------ transformers' Trainer


@pytest.mark.parametrize(("strategy", "later"), [(3, 3), (3, 1), (1, 3), (0, 2)])
def test_a_resumed_trainer_ends_as_one_that_never_stopped(strategy, later, ranks, tmp_path):
    """Shuffled rows, AdamW of the Trainer's making, two microbatches a step."""
    data = rows(2 * RANKS * BATCH * STEPS)
    settings = {
        "gradient_accumulation_steps": 2,
        "train_sampling_strategy": "random",
        "learning_rate": 1e-3,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    trainer = trainer_of(llama(), tmp_path, data, strategy, **settings)
    trainer.train()
    wanted = full_parameters(trainer.model)
    again = trainer_of(llama(), tmp_path, data, later, **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    atol = 0 if strategy == later else 1e-5
    assert_near(again.model, wanted, atol=atol)
    assert again.state.global_step == STEPS


def test_a_trainer_accumulates_like_one_process_on_the_whole_batch(ranks, tmp_path):
    data = rows(2 * RANKS * BATCH * STEPS)
    model = llama()
    settings = {"gradient_accumulation_steps": 2, "optimizers": (sgd(model), None)}
    trainer_of(model, tmp_path, data, **settings).train()
    wanted = one_process(llama(), in_order(data, microbatches=2), rate=decaying)
    assert_near(model, wanted)


def test_label_smoothing_shifts_the_labels_of_a_sharded_model(ranks, tmp_path):
    data = rows()
    model = llama()
    settings = {"label_smoothing_factor": 0.1, "optimizers": (sgd(model), None)}
    trainer_of(model, tmp_path, data, **settings).train()

    class Smoothed(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, input_ids, labels):
            logits = self.inner(input_ids=input_ids).logits[:, :-1].flatten(0, 1)
            self.loss = torch.nn.functional.cross_entropy(
                logits, labels[:, 1:].flatten(), label_smoothing=0.1
            )
            return self

    wanted = one_process(Smoothed(llama()), in_order(data), rate=decaying)
    assert_near(model, {name.removeprefix("inner."): value for name, value in wanted.items()})


def test_a_trainer_loads_its_best_model_and_evaluates_before_it_trains(ranks, tmp_path):
    data, held_out = rows(), rows(8, seed=6)
    model = llama()
    settings = {"save_strategy": "steps", "eval_strategy": "steps", "eval_steps": 1}
    settings |= {"save_steps": 1, "load_best_model_at_end": True, "learning_rate": 1.0}
    trainer = trainer_of(model, tmp_path, data, eval_dataset=held_out, **settings)
    plain = llama()
    with torch.no_grad():
        loss = plain(**stacked(held_out)).loss.item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(loss, abs=1e-5)
    trainer.train()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(losses) == STEPS
    assert min(losses) < losses[-1]  # at this rate the last one is not the best
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(losses), abs=1e-6)


def test_lora_in_a_trainer_saves_adapters_goes_on_and_merges(ranks, tmp_path):
    peft = pytest.importorskip("peft", reason="pip install peft")

    def adapted():
        torch.manual_seed(4)
        settings = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
        return peft.get_peft_model(llama(), settings)

    data, strategy = rows(), {"*lora_*": 3, "*": 0}
    model = adapted()
    settings = {"save_strategy": "steps", "save_steps": 2}
    trainer = trainer_of(model, tmp_path, data, strategy, optimizers=(sgd(model), None), **settings)
    trainer.train()
    reference = adapted()
    wanted = one_process(reference, in_order(data), rate=decaying)
    assert_near(model, wanted)

    again = adapted()
    trainer = trainer_of(again, tmp_path, data, 3, optimizers=(sgd(again), None), **settings)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_near(again, wanted)
    trainer.save_model(str(tmp_path / "adapters"))
    torch.distributed.barrier()
    names = {path.name for path in (tmp_path / "adapters").iterdir()}
    assert "adapter_model.safetensors" in names
    assert "model.safetensors" not in names
    merged = peft.PeftModel.from_pretrained(llama(), tmp_path / "adapters").merge_and_unload()
    for name, value in reference.merge_and_unload().named_parameters():
        torch.testing.assert_close(merged.get_parameter(name), value, rtol=0, atol=2e-5, msg=name)


def test_the_lines_of_the_page_about_adapters_and_generation_run(ranks, tmp_path, monkeypatch):
    peft = pytest.importorskip("peft", reason="pip install peft")
    monkeypatch.chdir(tmp_path)
    page = (DOCS / "how-to/transformers.md").read_text()
    mark = "<!-- not run: a slow test of packages/fsdp runs this -->\n```python\n"
    shard, save, merge, register = (block.split("```")[0] for block in page.split(mark)[1:])
    adapters = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(4)
    wanted, base = peft.get_peft_model(llama(), adapters).merge_and_unload(), llama()
    torch.manual_seed(4)
    model = peft.get_peft_model(llama(), adapters)
    names = {"model": model, "optimizer": sgd(model), "base": base, "PeftModel": peft.PeftModel}
    with init_distributed() as runtime:
        names |= {"fully_shard": fully_shard, "full_parameters": full_parameters}
        names |= {"runtime": runtime, "register_forward_method": register_forward_method}
        exec(shard + save, names)
        exec(register, names)
        prompt = torch.arange(4).view(1, 4)
        written = names["model"].generate(input_ids=prompt, max_new_tokens=4, do_sample=False)
        expected = wanted.generate(input_ids=prompt, max_new_tokens=4, do_sample=False)
        assert torch.equal(written, expected)
        if runtime.is_main:
            exec(merge, names)
            merged = type(wanted).from_pretrained("merged")
            for name, value in wanted.named_parameters():
                torch.testing.assert_close(merged.get_parameter(name), value, msg=name)


def test_the_sft_trainer_of_trl_with_the_mixin(ranks, tmp_path):
    trl = pytest.importorskip("trl", reason="pip install trl")
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    from lamina.fsdp.bridges.transformers import ShardedTraining

    class Tuning(ShardedTraining, trl.SFTTrainer):
        pass

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="w1", pad_token="w0", unk_token="w0"
    )
    data, model = rows(), llama()
    written = Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in data])
    Tuning(
        model=model,
        args=arguments(tmp_path, trl.SFTConfig, bf16=False),
        processing_class=tokenizer,
        train_dataset=written,
        optimizers=(sgd(model), None),
    ).train()
    assert isinstance(model, ShardedModule)
    assert_near(model, one_process(llama(), in_order(data), rate=decaying))


# ------------------------------------------------------------------------ Accelerate


@pytest.mark.parametrize("strategy", [3, 1])
def test_accelerate_accumulates_schedules_names_checkpoints_and_exports(strategy, ranks, tmp_path):
    from accelerate.utils import ProjectConfiguration

    data, seen = rows(), []
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    settings = {"gradient_accumulation_steps": 2, "project_config": project}
    accelerator = accelerator_for(strategy, **settings)
    model = llama()
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = DataLoader(data, batch_size=BATCH, shuffle=True, collate_fn=stacked)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    loop(accelerator, model, optimizer, loader, seen)
    steps = as_read(seen, data)
    pairs = [steps[i] + steps[i + 1] for i in range(0, len(steps), 2)]
    assert_near(model, one_process(llama(), pairs))
    saved = full_parameters(model)
    accelerator.save_state()
    accelerator.save_model(model, str(tmp_path / "model"))
    torch.distributed.barrier()
    assert_equal(tensors_in(tmp_path / "model"), saved)
    loop(accelerator, model, optimizer, loader)
    accelerator.load_state()
    assert_near(model, saved, atol=0)


@pytest.mark.parametrize("variables", [True, False])
def test_ranks_that_accelerate_does_not_count_are_refused(variables, ranks, monkeypatch):
    """Without `cpu=True`, or without variables, Accelerate counts one process on a CPU."""
    if not variables:
        torch.distributed.init_process_group("gloo")
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.delenv(name)
    with pytest.raises(ValueError, match=r"2 ranks.*1 processes.*RANK, LOCAL_RANK and WORLD_SIZE"):
        accelerator_for(cpu=not variables)


def test_meshes_whose_ranks_need_the_same_rows_are_refused(ranks):
    from lamina.mesh import ParallelLayout, init_distributed

    with init_distributed():
        mesh = ParallelLayout(dp_shard=1, tp=2).build(device_type())
        accelerator = accelerator_for()
        accelerator.sharding["device_mesh"] = mesh
        with pytest.raises(ValueError, match=r"tp=2.*same rows"):
            accelerator.prepare(llama())


# ------------------------------------------------------------------------ Lightning


@pytest.mark.parametrize("strategy", [3, 1])
def test_lightning_accumulates_and_goes_on_from_its_last_checkpoint(strategy, ranks, tmp_path):
    from pytorch_lightning.callbacks import ModelCheckpoint

    data = rows()
    loader = DataLoader(data, batch_size=BATCH, collate_fn=stacked)

    def fit(epochs, **resume):
        task = task_of(llama())
        keeper = ModelCheckpoint(tmp_path / "kept", save_last=True, every_n_epochs=1)
        settings = {"accumulate_grad_batches": 2, "max_epochs": epochs}
        settings |= {"enable_checkpointing": True, "callbacks": [keeper]}
        trainer = lightning(tmp_path, strategy, **settings)
        trainer.fit(task, loader, **resume)
        return task, keeper

    task, keeper = fit(1)
    steps = as_read(task.seen, data)
    wanted = one_process(llama(), [steps[i] + steps[i + 1] for i in range(0, len(steps), 2)])
    assert_near(task, {f"net.{name}": value for name, value in wanted.items()})
    if ranks.rank == 0:  # Lightning's own tool makes one file of the folder
        tool, file = "lightning_fabric.utilities.consolidate_checkpoint", tmp_path / "one.ckpt"
        words = [keeper.last_model_path, "--output_file", str(file)]
        plain = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        subprocess.run([sys.executable, "-m", tool, *words], check=True, env=plain)
        saved = torch.load(file, weights_only=False)["state_dict"]
        for name, value in wanted.items():
            torch.testing.assert_close(saved[f"net.{name}"], value.detach(), rtol=0, atol=2e-5)
    again, _ = fit(2, ckpt_path=keeper.last_model_path, weights_only=False)
    steps += as_read(again.seen, data)
    pairs = [steps[i] + steps[i + 1] for i in range(0, len(steps), 2)]
    half = len(pairs) // 2
    wanted = one_process(llama(), pairs, rate=lambda step: LR * 0.5 ** (step // half))
    assert_near(again, {f"net.{name}": value for name, value in wanted.items()})


def test_lightning_with_backwards_by_hand(ranks, tmp_path):
    data = rows()
    task = task_of(llama())

    def training_step(batch, batch_idx):
        optimizer = task.optimizers()
        task.seen += batch["input_ids"].tolist()
        task.manual_backward(task(**batch).loss)  # through forward: its backward is in the step
        optimizer.step()
        optimizer.zero_grad()

    task.automatic_optimization = False
    task.training_step = training_step
    loader = DataLoader(data, batch_size=BATCH, collate_fn=stacked)
    lightning(tmp_path, gradient_clip_val=None).fit(task, loader)
    wanted = one_process(llama(), as_read(task.seen, data), clip=None)
    assert_near(task, {f"net.{name}": value for name, value in wanted.items()})


# ------------------------------------------------------------------------ what is saved

MAPPING = {"*.self_attn.*": 3, "*": 0}


def tensors_in(folder):
    from safetensors.torch import load_file

    files = folder.rglob("*.safetensors") if folder.is_dir() else [folder]
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def one_file(model, folder):
    """What Accelerate saves of a plain model."""
    from accelerate import Accelerator

    forget_accelerate()
    Accelerator(cpu=True).save_model(model, str(folder))


def assert_equal(saved, wanted):
    assert sorted(saved) == sorted(wanted)
    for name, value in wanted.items():
        assert torch.equal(saved[name], value), name


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("strategy", [0, 1, 2, 3, MAPPING], ids=str)
def test_files_of_accelerate_have_the_tensors_of_one_process(strategy, tied, ranks, tmp_path):
    accelerator = accelerator_for(strategy)
    plain = llama(tie_word_embeddings=tied)
    model = accelerator.prepare(llama(tie_word_embeddings=tied))
    state = accelerator.get_state_dict(model)  # collective
    accelerator.save_model(model, str(tmp_path / "ours"), max_shard_size="20KB")
    if ranks.rank == 0:
        one_file(plain, tmp_path / "plain")
        wanted = tensors_in(tmp_path / "plain")
        assert len(wanted) == 21 - tied
        assert_equal(tensors_in(tmp_path / "ours"), wanted)
        plain.save_pretrained(tmp_path / "theirs")
        model.save_pretrained(tmp_path / "pretrained", state_dict=dict(state))
        assert_equal(tensors_in(tmp_path / "pretrained"), tensors_in(tmp_path / "theirs"))
        if strategy == 0:  # its state dictionary holds plain tensors
            accelerator.save(model.state_dict(), tmp_path / "own.safetensors", True)
            own = tensors_in(tmp_path / "own.safetensors")
            assert_equal({name: own[name] for name in wanted}, wanted)


@pytest.mark.parametrize("strategy", [0, 1, 2, 3, MAPPING], ids=str)
def test_files_of_a_trainer_have_the_tensors_of_one_process(strategy, ranks, tmp_path):
    tied = strategy in (0, 3)
    model = llama(tie_word_embeddings=tied)
    settings = {"optimizers": (sgd(model, lr=0.0), None), "max_steps": 1}
    trainer = trainer_of(model, tmp_path, rows(), strategy, **settings)
    trainer.train()
    trainer.save_model(str(tmp_path / "ours"))
    if ranks.rank == 0:
        llama(tie_word_embeddings=tied).save_pretrained(tmp_path / "plain")
        assert_equal(tensors_in(tmp_path / "ours"), tensors_in(tmp_path / "plain"))


@pytest.mark.parametrize("strategy", [{"*lora_*": 3, "*": 0}, 0, 3], ids=str)
def test_adapters_that_are_saved_are_those_of_one_process(strategy, ranks, tmp_path):
    peft = pytest.importorskip("peft", reason="pip install peft")

    def adapted():
        torch.manual_seed(4)
        settings = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
        return peft.get_peft_model(llama(), peft.LoraConfig(r=2, **settings))

    model = adapted()
    settings = {"optimizers": (sgd(model, lr=0.0), None), "max_steps": 1}
    trainer = trainer_of(model, tmp_path, rows(), strategy, **settings)
    trainer.train()
    trainer.save_model(str(tmp_path / "ours"))
    trainer.accelerator.save_model(model, str(tmp_path / "all"))
    if ranks.rank == 0:
        adapted().save_pretrained(tmp_path / "plain")
        one_file(adapted(), tmp_path / "whole")
        assert_equal(tensors_in(tmp_path / "ours"), tensors_in(tmp_path / "plain"))
        assert_equal(tensors_in(tmp_path / "all"), tensors_in(tmp_path / "whole"))


@pytest.mark.parametrize("strategy", [0, 1, 2, 3, MAPPING], ids=str)
def test_checkpoints_of_lightning_have_the_tensors_of_one_process(strategy, ranks, tmp_path):
    task = task_of(llama())
    task.configure_optimizers = lambda: sgd(task, lr=0.0)
    loader = DataLoader(rows(), batch_size=BATCH, collate_fn=stacked)
    trainer = lightning(tmp_path, strategy, max_steps=1)
    trainer.fit(task, loader)
    trainer.save_checkpoint(tmp_path / "state")
    if ranks.rank == 0:
        tool, file = "lightning_fabric.utilities.consolidate_checkpoint", tmp_path / "one.ckpt"
        words = [str(tmp_path / "state"), "--output_file", str(file)]
        plain = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        subprocess.run([sys.executable, "-m", tool, *words], check=True, env=plain)
        saved = torch.load(file, weights_only=False)["state_dict"]
        assert_equal(saved, {f"net.{n}": t for n, t in llama().state_dict().items()})


# ------------------------------------------------------------------------ the pages

PAGES = ["how-to/transformers.md", "coming-from/accelerate.md", "coming-from/lightning.md"]


@pytest.mark.parametrize("page", PAGES)
def test_the_program_of_a_page_runs_as_it_is(page, ranks, tmp_path):
    text = (DOCS / page).read_text()
    mark = "<!-- not run: a slow test of packages/fsdp runs it on two ranks -->\n```python\n"
    program = text.split(mark)[1].split("```")[0]
    file = tmp_path / f"program_{ranks.rank}.py"
    file.write_text(program)
    run = subprocess.run(
        [sys.executable, str(file)], cwd=tmp_path, env=os.environ, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
