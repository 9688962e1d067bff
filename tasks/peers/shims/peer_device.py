"""Stand-ins for what torch's tests take from a machine with GPUs. LAMINA_PEER_RANKS: how many."""

from __future__ import annotations

import contextlib
import os
import unittest
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._composable import replicate as torch_replicate
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP1
from torch.testing._internal.common_distributed import MultiProcessTestCase
from torch.testing._internal.common_fsdp import FSDPTest as TorchFSDPTest
from torch.testing._internal.common_utils import set_rng_seed

TEST_CUDA = True
HAS_CUDA = False  # for Inductor, which wants a real one
RANKS = int(os.environ.get("LAMINA_PEER_RANKS", "2"))

PRELOADED = [
    "torch.distributed.checkpoint.state_dict",
    "torch.testing._internal.common_fsdp",
    "torch.testing._internal.distributed._tensor.common_dtensor",
    *(["peer_lamina"] if os.environ.get("LAMINA_PEER") else []),
]


def device_count() -> int:
    """Return how many ranks tests may have."""
    return RANKS


def is_available() -> bool:
    """Return True, so that tests do not leave themselves out."""
    return True


def current_device() -> torch.device:
    """Return the device of all ranks."""
    return torch.device("cpu")


def nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing: what is asked for changes no result on a CPU."""


synchronize = set_device = empty_cache = _sleep = manual_seed = manual_seed_all = nothing


class Stream:
    """A stream of a device on which everything is done when a call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = current_device()

    wait_stream = wait_event = record_event = synchronize = nothing

    def __enter__(self) -> Stream:
        """Do nothing."""
        return self

    def __exit__(self, *args: object) -> None:
        """Do nothing."""


def current_stream(*args: Any) -> Stream:
    """Return the stream that there is."""
    return Stream()


def stream(other: Stream) -> contextlib.AbstractContextManager[Stream]:
    """Use a stream."""
    return other


def device(*args: Any) -> contextlib.AbstractContextManager[None]:
    """Use a device."""
    return contextlib.nullcontext()


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise unittest.SkipTest(f"torch.cuda.{name} has no meaning without a GPU")


def skip_if_lt_x_gpu(count: int, **options: Any) -> Any:
    """Leave out tests that want more ranks than there are."""
    return unittest.skipIf(count > RANKS, f"wants {count} ranks, LAMINA_PEER_RANKS is {RANKS}")


def nccl_skip_if_lt_x_gpu(backend: str, count: int) -> Any:
    """Leave out tests that want more ranks than there are."""
    return skip_if_lt_x_gpu(count)


def requires_nccl() -> Any:
    """Let tests run over gloo that ask for NCCL."""
    return lambda test: test


def skip_if_no_gpu(test: Any) -> Any:
    """Let tests run on a CPU that ask for GPUs."""
    return test


def test_compiled_fsdp(**options: Any) -> Any:
    """Let tests run without torch.compile that later torches no longer compile."""
    return lambda test: test


test_compiled_fsdp.__test__ = False  # type: ignore[attr-defined]  # pytest: no test


def without_index(place: Any) -> Any:
    """Return the CPU for the number of a GPU, and anything else as it is."""
    return "cpu" if isinstance(place, int) and not isinstance(place, bool) else place


def init_multigpu_helper(world_size: int, backend: str) -> dict[int, list[int]]:
    """Return a device for each rank."""
    return {rank: [rank] for rank in range(world_size)}


def with_variables(variables: dict[str, str], target: Any, *args: Any, **kwargs: Any) -> None:
    """Be a rank with the variables of the process that wants it; the server has its first ones."""
    os.environ.update(variables)
    target(*args, **kwargs)


def start_quickly(case: Any) -> None:
    """Start a test's ranks from a server that has imported torch, not each from nothing."""
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)

    def process(target: Any, name: str, args: Any, kwargs: Any) -> Any:
        args = (dict(os.environ), target, *args)
        return context.Process(target=with_variables, name=name, args=args, kwargs=kwargs)

    case._start_processes(process)


MultiProcessTestCase._spawn_processes = start_quickly


class FSDPTest(TorchFSDPTest):
    """Ranks on a CPU, where torch's class leaves every test out without a GPU per rank."""

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return RANKS

    @classmethod
    def _run(
        cls, rank: int, test_name: str, file_name: str, parent_pipe: Any, **kwargs: Any
    ) -> None:
        self = cls(test_name)
        self.rank, self.file_name = rank, file_name
        size = int(self.world_size)
        dist.init_process_group("gloo", self.init_method, world_size=size, rank=rank)
        dist.barrier()
        set_rng_seed()  # type: ignore[no-untyped-call]
        self.run_test(test_name, parent_pipe)
        dist.barrier()
        dist.destroy_process_group()


class FSDPTestMultiThread(FSDPTest):
    """Ranks that are processes, where torch has threads that share one process's state."""

    def perThreadSetUp(self) -> None:  # noqa: N802
        """Do nothing more than a rank's process does."""

    def perThreadTearDown(self) -> None:  # noqa: N802
        """Do nothing more than a rank's process does."""


class DistributedDataParallel(torch.nn.parallel.DistributedDataParallel):
    """torch's own wrapper; the GPUs that a caller names do not exist."""

    def __init__(self, module: torch.nn.Module, *args: Any, **options: Any) -> None:
        for name in ("device_ids", "output_device"):
            options.pop(name, None)
        super().__init__(module, *args[2:], **options)


class FullyShardedDataParallel(TorchFSDP1):
    """torch's first FSDP, which runs on a CPU if that is asked for in words."""

    def __init__(self, module: torch.nn.Module, *args: Any, **options: Any) -> None:
        super().__init__(module, *args, **{"device_id": current_device(), **options})


def replicate(module: torch.nn.Module, *args: Any, **options: Any) -> torch.nn.Module:
    """Torch's own function; the GPUs that a caller names do not exist."""
    options.pop("device_ids", None)
    return torch_replicate(module, *args, **options)
