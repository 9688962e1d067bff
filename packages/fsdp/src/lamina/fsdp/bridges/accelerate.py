"""Accelerate over sharded models: `LaminaAccelerator` in the place of `Accelerator`."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from lamina.fsdp.bridges.trainer_state import (
    attach_optimizer,
    load_sharded,
    shard_over_all_ranks,
    whole_state,
    with_memory_of_their_own,
)
from lamina.mesh import init_distributed

_STATE = "sharded_state"
_OTHERS = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


class LaminaAccelerator(Accelerator):
    """An `Accelerator` that shards the models it prepares, and the state of their optimizers.

    Loaders, metrics, trackers, autocast and the rest stay Accelerate's: every rank reads other
    batches, as under its DDP.

    Args:
        sharding: keyword arguments of `lamina.fsdp.fully_shard`, such as
            `{"zero_dp_strategy": 2}`. By default strategy 3 over all ranks.
        args, kwargs: as of `Accelerator`, without plugins for other ways to shard.

    Raises:
        ValueError: if a plugin or variable asks for FSDP, DeepSpeed or Megatron-LM as well, or if
            Accelerate counts other processes than there are ranks.
    """

    _models: list[nn.Module]
    _optimizers: list[Optimizer]

    def __init__(
        self, *args: Any, sharding: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._shard_with(sharding)

    @classmethod
    def adopt(cls, accelerator: Accelerator, sharding: Mapping[str, Any] | None = None) -> Self:
        """Turn an `Accelerator` that somebody else has made into one that shards, in place."""
        accelerator.__class__ = cls
        accelerator._shard_with(sharding)
        return accelerator

    def _shard_with(self, sharding: Mapping[str, Any] | None) -> None:
        if self.distributed_type in _OTHERS:
            raise ValueError(
                f"{type(self).__name__} shards models itself, and this run asks for "
                f"{self.distributed_type.value} too: leave out fsdp_plugin and deepspeed_plugin, "
                "and start with torchrun or a plain multi-process configuration of Accelerate"
            )
        if not dist.is_initialized():  # Accelerate starts none for what it takes for one process
            init_distributed(device=self.device)
        if (ranks := dist.get_world_size()) != self.num_processes:
            raise ValueError(
                f"{ranks} ranks share a process group, and Accelerate counts "
                f"{self.num_processes} processes, so that ranks would read the same batches. It "
                "reads RANK, LOCAL_RANK and WORLD_SIZE: start with torchrun, leave them set, and "
                "pass cpu=True (use_cpu=True to a Trainer) on CPUs"
            )
        self.sharding = dict(sharding or {})

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """As of `Accelerator`; models come first, because optimizers need their shards."""
        order = sorted(range(len(args)), key=lambda i: not isinstance(args[i], nn.Module))
        places = None if device_placement is None else [device_placement[i] for i in order]
        prepared = super().prepare(*(args[i] for i in order), device_placement=places)
        if len(args) == 1:
            return prepared
        by_place = dict(zip(order, prepared, strict=True))
        return tuple(by_place[i] for i in range(len(args)))

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        """Shard the model, which moves its shards to the device; autocast and compile it."""
        shard_over_all_ranks(model, self.sharding)
        # `evaluation_mode` is what leaves out DistributedDataParallel, and nothing else.
        return super().prepare_model(model, device_placement=False, evaluation_mode=True)

    def prepare_optimizer(
        self, optimizer: Optimizer, device_placement: bool | None = None
    ) -> Optimizer:
        """Let the optimizer update the shards of a model that is prepared already."""
        if not getattr(optimizer, "_is_accelerate_prepared", False):
            attach_optimizer(optimizer, map(self._bare, self._models))
        return super().prepare_optimizer(optimizer, device_placement=False)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """Whole tensors in the main process's memory, gathered one by one (collective).

        Other processes get an empty dictionary, as under Accelerate's FSDP.
        """
        bare = self._bare(model) if unwrap else model
        return whole_state(bare, keep=self.is_main_process)

    def save(self, obj: Any, f: str | Path, safe_serialization: bool = False) -> None:
        """As of `Accelerator`; parts of one flat buffer are not taken for tied weights."""
        if safe_serialization:
            obj = with_memory_of_their_own(obj)
        super().save(obj, f, safe_serialization=safe_serialization)

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> Path:
        """As of `Accelerator`; models and optimizers are saved in shards (collective).

        They are a checkpoint of `torch.distributed.checkpoint` in the folder `sharded_state`,
        which any number of ranks can load. Hooks that you registered see no models.
        """
        with self._models_apart():
            location = Path(super().save_state(output_dir, *args, **kwargs))
        state = {name: each.state_dict() for name, each in self._stateful().items()}
        save(state, checkpoint_id=location / _STATE)
        return location

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """As of `Accelerator`, from what `save_state` has written on any number of ranks."""
        folders: list[str] = []
        hook = self.register_load_state_pre_hook(lambda _, folder: folders.append(folder))
        try:
            with self._models_apart():
                super().load_state(input_dir, *args, **kwargs)
        finally:
            hook.remove()
        load_sharded(Path(folders[0]) / _STATE, self._stateful())

    @contextmanager
    def _models_apart(self) -> Iterator[None]:
        """Keep models and optimizers out of the files that Accelerate writes and reads."""
        kept = self._models, self._optimizers
        self._models, self._optimizers = [], []
        try:
            yield
        finally:
            self._models, self._optimizers = kept

    def _stateful(self) -> dict[str, Any]:
        models = {f"model_{i}": self._bare(each) for i, each in enumerate(self._models)}
        return models | {f"optimizer_{i}": each for i, each in enumerate(self._optimizers)}

    def _bare(self, model: nn.Module) -> nn.Module:
        bare: nn.Module = self.unwrap_model(model, keep_torch_compile=False)
        return bare
