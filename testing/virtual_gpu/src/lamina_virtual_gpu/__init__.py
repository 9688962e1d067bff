"""A virtual GPU: what a program asks of CUDA is recorded and timed, and nothing is computed.

Stand-ins for NVIDIA's libraries lie under an unmodified CUDA build of PyTorch. torch's caching
allocator, autograd's streams, ProcessGroupNCCL, CUDA graphs and Triton are the real ones.

`lamina-virtual-gpu setup FOLDER` makes an environment. In it, programs run as on a machine with a
GPU, and may look at the record:

    import lamina_virtual_gpu as virtual_gpu

    virtual_gpu.reset()
    step()
    print(virtual_gpu.record().launches)
"""

from lamina_virtual_gpu.profiles import PROFILES, Profile
from lamina_virtual_gpu.recording import (
    Record,
    forget_races,
    host_waits,
    now,
    now_at_rates,
    races,
    record,
    reset,
    stream_ends,
)

__all__ = [
    "PROFILES",
    "Profile",
    "Record",
    "forget_races",
    "host_waits",
    "now",
    "now_at_rates",
    "races",
    "record",
    "reset",
    "stream_ends",
]
