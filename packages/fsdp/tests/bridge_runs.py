"""What the tests of the bridges train, with other people's trainers and in one plain process."""

import os

import torch

from lamina.ddp import full_parameters

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

RANKS, BATCH, STEPS, VOCABULARY, LR = 2, 2, 4, 67, 0.1
TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TINY |= {"num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 64}
TINY |= {"vocab_size": VOCABULARY, "max_position_embeddings": 32}


def llama(**settings):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(11)
    return LlamaForCausalLM(LlamaConfig(**TINY | settings)).train()


def rows(count=RANKS * BATCH * STEPS, seed=5):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(2, VOCABULARY, (count, 8), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


def stacked(chosen):
    return {name: torch.stack([row[name] for row in chosen]) for name in chosen[0]}


def sgd(model, lr=LR):
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trained, lr=lr, momentum=0.9, foreach=False)


def one_process(model, steps, *, clip=1.0, rate=lambda step: LR):
    """Plain PyTorch over the rows of all ranks: `steps` holds the microbatches of each step."""
    optimizer = sgd(model)
    for number, microbatches in enumerate(steps):
        optimizer.param_groups[0]["lr"] = rate(number)
        for batch in microbatches:
            (model(**batch).loss / len(microbatches)).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters())


def in_order(data, microbatches=1):
    """Steps of one process that read the rows from the first to the last."""
    size = RANKS * BATCH
    batches = [stacked(data[i : i + size]) for i in range(0, len(data), size)]
    return [batches[i : i + microbatches] for i in range(0, len(batches), microbatches)]


def as_read(seen, data):
    """The same steps from what each rank has read, which together is all of the data, once."""
    ranks = [None] * RANKS
    torch.distributed.all_gather_object(ranks, seen)
    read = [row for own in ranks for row in own]
    assert len(read) == len(data)
    assert sorted(read) == sorted(row["input_ids"].tolist() for row in data)
    steps = []
    for i in range(0, len(seen), BATCH):
        tokens = torch.tensor([row for own in ranks for row in own[i : i + BATCH]])
        steps.append([{"input_ids": tokens, "labels": tokens}])
    return steps


def assert_near(model, wanted, atol=2e-5):
    found = full_parameters(model)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value.detach(), rtol=0, atol=atol, msg=name)


def forget_accelerate():
    """Accelerate keeps what it knows of the process in classes; the next test starts anew."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def accelerator_for(strategy=3, **settings):
    from lamina.fsdp.bridges.accelerate import LaminaAccelerator

    forget_accelerate()
    return LaminaAccelerator(sharding={"zero_dp_strategy": strategy}, **{"cpu": True} | settings)


def loop(accelerator, model, optimizer, loader, seen=None):
    for batch in loader:
        if seen is not None:
            seen += batch["input_ids"].tolist()
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def arguments(folder, kind=None, **settings):
    from transformers import TrainingArguments

    forget_accelerate()
    defaults = {
        "output_dir": str(folder),
        "use_cpu": True,
        "per_device_train_batch_size": BATCH,
        "per_device_eval_batch_size": BATCH,
        "max_steps": STEPS,
        "train_sampling_strategy": "sequential",
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_strategy": "no",
    }
    return (kind or TrainingArguments)(**(defaults | settings))


def trainer_of(model, folder, data, strategy=3, **settings):
    from lamina.fsdp.bridges.transformers import LaminaTrainer

    extra = {key: settings.pop(key) for key in ("eval_dataset", "optimizers") if key in settings}
    return LaminaTrainer(
        model=model,
        args=arguments(folder, **settings),
        train_dataset=data,
        sharding={"zero_dp_strategy": strategy},
        **extra,
    )


def decaying(step):
    return LR * (1 - step / STEPS)


def task_of(net):
    import pytorch_lightning

    class Task(pytorch_lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net
            self.seen = []

        def forward(self, **batch):
            return self.net(**batch)

        def configure_optimizers(self):
            optimizer = sgd(self)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

        def training_step(self, batch, index):
            self.seen += batch["input_ids"].tolist()
            return self.net(**batch).loss

        def validation_step(self, batch, index):
            self.log("held_out", self.net(**batch).loss, sync_dist=True)

    return Task()


def lightning(folder, strategy=3, **settings):
    import pytorch_lightning

    from lamina.fsdp.bridges.lightning import LaminaStrategy

    defaults = {
        "accelerator": "cpu",
        "devices": RANKS,
        "max_epochs": 1,
        "gradient_clip_val": 1.0,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
        "strategy": LaminaStrategy(zero_dp_strategy=strategy),
    }
    return pytorch_lightning.Trainer(**(defaults | settings))


def halved(step):
    return LR * 0.5 ** (step // STEPS)  # a StepLR steps after each epoch
