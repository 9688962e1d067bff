"""PyTorch Lightning over sharded models: `Trainer(strategy=LaminaStrategy())`."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.strategies import DDPStrategy
from pytorch_lightning.trainer.states import TrainerFn
from torch.distributed.checkpoint.state_dict_saver import save

from lamina.ddp.engine import register_forward_method
from lamina.fsdp.api.fully_shard import fully_shard_optimizer
from lamina.fsdp.bridges.trainer_state import load_sharded, shard_over_all_ranks
from lamina.fsdp.module.sharded_module import ShardedModule

_REST = "meta.pt"
_STEPS = ("validation_step", "test_step", "predict_step")


class LaminaStrategy(DDPStrategy):
    """A strategy that shards the whole `LightningModule` over all ranks.

    Processes, samplers and reductions of metrics are those of Lightning's DDP. The module is
    sharded before `configure_optimizers` is called. Its steps gather the weights that belong to no
    block, so they may use submodules directly (with manual optimization only `self(...)` does).

    Checkpoints are folders, in the layout of Lightning's own sharded checkpoints: any number of
    ranks loads them, and `python -m lightning_fabric.utilities.consolidate_checkpoint` (or
    `lightning.fabric`'s) makes one file of them.

    Args:
        process_group_backend: as of `DDPStrategy`.
        sharding: keyword arguments of `lamina.fsdp.fully_shard`, such as `zero_dp_strategy=2`. By
            default strategy 3 over all ranks.
    """

    def __init__(self, *, process_group_backend: str | None = None, **sharding: Any) -> None:
        super().__init__(process_group_backend=process_group_backend)
        self.sharding = sharding

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Checkpoints are loaded into shards, so the module is sharded first."""
        return True

    @property
    def _sharded(self) -> ShardedModule:
        return cast(ShardedModule, self.lightning_module)

    def setup(self, trainer: Trainer) -> None:
        """Shard the module, then make its optimizers."""
        self.accelerator.setup(trainer)
        module: LightningModule = self.precision_plugin.convert_module(self.lightning_module)
        if not isinstance(module, ShardedModule):
            shard_over_all_ranks(module, self.sharding)
            # With manual optimization the backward is inside the step: only forward gathers then.
            own = ("training_step",) if module.automatic_optimization else ()
            for name in (*own, *_STEPS):
                register_forward_method(module, name)
        self.model = module
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            for optimizer in self.optimizers:
                fully_shard_optimizer(optimizer, module)
        self.setup_precision_plugin()

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Backwards inside are not the last of an accumulation."""
        with self._sharded.no_sync():
            yield

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Save weights and optimizers in shards, and the rest beside them (collective).

        Raises:
            TypeError: for `storage_options`, because no `CheckpointIO` is used.
        """
        if storage_options is not None:
            raise TypeError(f"{type(self).__name__} takes no storage_options={storage_options!r}")
        # The file name may hold a time of day, which differs between ranks.
        path = Path(self.broadcast(filepath))
        rest = dict(checkpoint)
        # Tensors go through DCP, which writes every rank's shards. What is left is small and the
        # same on all ranks.
        state = {"state_dict": rest.pop("state_dict")}
        if "optimizer_states" in checkpoint:
            rest["optimizer_states"] = []
            for index, each in enumerate(checkpoint["optimizer_states"]):
                state[f"optimizer_{index}"] = each
        save(state, checkpoint_id=path)
        if self.is_global_zero:
            torch.save(rest, path / _REST)
        self.barrier()

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load weights, and optimizers if it holds some, into the shards; return the rest."""
        path = Path(self.broadcast(checkpoint_path))
        rest: dict[str, Any] = torch.load(path / _REST, weights_only=bool(weights_only))
        stateful: dict[str, Any] = {"state_dict": self._sharded}
        if "optimizer_states" in rest:
            stateful |= {f"optimizer_{i}": each for i, each in enumerate(self.optimizers)}
        load_sharded(path, stateful)
        return {**rest, "state_dict": {}}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Nothing is left to do after `load_checkpoint`."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing is left to do after `load_checkpoint`."""

    def teardown(self) -> None:
        """As of `DDPStrategy`, but the shards stay on their device."""
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
