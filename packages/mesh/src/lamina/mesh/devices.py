"""Choice of the device that a rank works on and of the backend for its collectives."""

import torch
import torch.distributed as dist

__all__ = ["bind_device", "choose_device", "default_backend"]


def choose_device(
    local_rank: int, backend: str | None, device: torch.device | str | None
) -> torch.device:
    """The device asked for, or by default the GPU of `local_rank` if the backend can use it.

    Raises:
        RuntimeError: a GPU was asked for and isn't there, or NCCL's ranks outnumber the GPUs.
    """
    if device is not None:
        asked = torch.device(device)
        return asked if asked.type != "cuda" else _gpu(asked.index, local_rank, backend)
    speaks_cuda = backend is None or "nccl" in backend
    if speaks_cuda and torch.cuda.is_available():
        return _gpu(None, local_rank, backend)
    if backend is not None and "nccl" in backend:
        raise RuntimeError(
            f"backend={backend!r} needs a GPU and torch sees none "
            f"(torch {torch.__version__}, CUDA {torch.version.cuda or 'not built in'}). "
            "Use backend='gloo' for a CPU run; `python -m lamina.mesh doctor` says what is missing."
        )
    return torch.device("cpu")


def default_backend(device: torch.device) -> str:
    """`cpu:gloo,cuda:nccl` for a GPU, so that CPU tensors can travel too; `gloo` for the CPU.

    RuntimeError says that this build of torch lacks what the device needs.
    """
    if device.type == "cpu":
        return "gloo"
    if device.type != "cuda":
        raise RuntimeError(
            f"no default backend for {device}: Lamina runs on cpu and cuda. Name the backend."
        )
    if not dist.is_nccl_available():
        raise RuntimeError(
            f"torch {torch.__version__} was built without NCCL. Install a build that has it, or "
            "pass backend='gloo' (slow: tensors travel through host memory)."
        )
    return "cpu:gloo,cuda:nccl"


def bind_device(device: torch.device) -> None:
    """Make `device` the process' current device, so that `cuda` means this rank's GPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _gpu(index: int | None, local_rank: int, backend: str | None) -> torch.device:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise RuntimeError(
            f"device='cuda' was asked for and torch sees no GPU (torch {torch.__version__}, CUDA "
            f"{torch.version.cuda or 'not built in'}). `python -m lamina.mesh doctor` says why."
        )
    if index is not None:
        if index >= count:
            raise RuntimeError(f"device cuda:{index} was asked for and torch sees {count} GPUs.")
        return torch.device("cuda", index)
    # A launcher that shows each rank its own GPU only (srun --gpus-per-task) numbers it 0.
    if count == 1:
        return torch.device("cuda", 0)
    shares = backend is not None and "nccl" not in backend
    if local_rank >= count and not shares:
        raise RuntimeError(
            f"local rank {local_rank} has no GPU: torch sees {count} on this machine and NCCL "
            f"takes one rank each. Start at most {count} ranks here "
            f"(torchrun --nproc-per-node={count}), or let ranks share GPUs with backend='gloo'."
        )
    return torch.device("cuda", local_rank % count)
