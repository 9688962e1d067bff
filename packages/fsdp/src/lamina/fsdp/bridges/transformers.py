"""The Trainer of transformers over sharded models: `LaminaTrainer` in the place of `Trainer`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import Trainer
from transformers.trainer import SCHEDULER_NAME

from lamina.fsdp.bridges.accelerate import LaminaAccelerator
from lamina.fsdp.bridges.trainer_state import load_sharded

_OPTIMIZER = "sharded_optimizer"
_Mixin: Any = object  # mypy then lets it use what the trainer beside it has


class ShardedTraining(_Mixin):
    """Mixin for `Trainer` and classes made from it: `class Mine(ShardedTraining, SFTTrainer)`.

    Checkpoints hold the whole model in the files of `save_pretrained`, which the main process
    writes, and the optimizer's state in shards. A run goes on with any number of ranks.

    Args:
        sharding: keyword arguments of `lamina.fsdp.fully_shard`, such as
            `{"zero_dp_strategy": 2}`. By default strategy 3 over all ranks.
        args, kwargs: as of the trainer.
    """

    def __init__(
        self, *args: Any, sharding: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        self.sharding = dict(sharding or {})
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """As of `Trainer`, with an accelerator that shards."""
        super().create_accelerator_and_postprocess()
        LaminaAccelerator.adopt(self.accelerator, self.sharding)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model where it is: sharding moves this rank's shards, and only them."""

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None
    ) -> None:
        """As of `Trainer`, with weights that all ranks have gathered for the main process."""
        if state_dict is None:
            state_dict = self.accelerator.get_state_dict(self.model)
        super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        state = {"optimizer": self.optimizer.state_dict()}
        save(state, checkpoint_id=Path(output_dir, _OPTIMIZER))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER_NAME))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load the state in shards, or an `optimizer.pt` that a plain `Trainer` has written."""
        if checkpoint is None or not (folder := Path(checkpoint, _OPTIMIZER)).is_dir():
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        load_sharded(folder, {"optimizer": self.optimizer})
        saved = torch.load(Path(checkpoint, SCHEDULER_NAME), weights_only=True)
        self.lr_scheduler.load_state_dict(saved)


class LaminaTrainer(ShardedTraining, Trainer):
    """A `Trainer` that shards its model over all ranks; see `ShardedTraining`."""
