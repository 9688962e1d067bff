"""What a layer of a model takes from torch that torch does not promise: its private names.

No other module of this layer uses one (tests/test_compat.py), so what a new torch breaks is here.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch._C import ScriptObject
from torch._C import _current_graph_task_id as current_graph_task_id
from torch._C._distributed_c10d import _resolve_process_group
from torch._compile import _disable_dynamo as one_graph_break
from torch._guards import active_fake_mode
from torch._library.custom_ops import OPDEFS
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.distributed import ProcessGroup
from torch.library import _scoped_library as scoped_library
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as modes_now

__all__ = [
    "HAS_SCALED_MM_V2_ON_CPU",
    "HAS_WIDE_ADDMM_ON_META",
    "LACKS_WRITTEN_SCALED_MM_ON_META",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "active_fake_mode",
    "current_graph_task_id",
    "flash_attention",
    "flash_attention_backward",
    "flash_attention_backward_for_cpu",
    "flash_attention_for_cpu",
    "forget_specs",
    "graph_is_kept",
    "graphs_of",
    "group_of_argument",
    "modes_now",
    "one_graph_break",
    "parts_of",
    "resizes_told_to",
    "scaled_mm",
    "scaled_mm_v2",
    "scoped_library",
    "specs_found_in",
]

graph_is_kept = torch._C._autograd._get_current_graph_task_keep_graph  # type: ignore[attr-defined, unused-ignore]
"""Whether the backward that runs now was asked to keep its graph."""

# From torch 2.12 on, CPUs have the operator behind F.scaled_mm. torch 2.11 has the older one only.
HAS_SCALED_MM_V2_ON_CPU = torch._C._dispatch_has_kernel_for_dispatch_key(
    "aten::_scaled_mm_v2", "CPU"
)
# torch 2.11 takes a product that is added to float32 apart on meta tensors and in graphs, and then
# takes the dtype for a factor.
HAS_WIDE_ADDMM_ON_META = TorchVersion(torch.__version__) >= "2.12"
scaled_mm = torch._scaled_mm
# Not `torch._scaled_mm_v2`, which Dynamo of torch 2.12 does not trace.
scaled_mm_v2 = torch.ops.aten._scaled_mm_v2
# torch 2.11 to 2.14 know what it gives, but not that it may be written into a result.
LACKS_WRITTEN_SCALED_MM_ON_META = hasattr(
    scaled_mm_v2, "out"
) and not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2.out", "Meta")

# Attention that gives the logarithm of each row's sum beside the output.
flash_attention = torch.ops.aten._scaled_dot_product_flash_attention
flash_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
flash_attention_for_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_attention_backward_for_cpu = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
)


def group_of_argument(argument: str | ScriptObject) -> ProcessGroup:
    """The group that a collective's operator was given, by its name or in a box."""
    if isinstance(argument, str):
        return _resolve_process_group(argument)  # type: ignore[arg-type, unused-ignore]
    return ProcessGroup.unbox(argument)


@contextmanager
def resizes_told_to(resized: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Inside, `resized` is called with each storage that Python code has resized.

    No operator sees that, and to look at all storages after each operator would take most of the
    time of a plan.
    """
    kind: Any = torch.UntypedStorage
    own, before = "resize_" in vars(kind), kind.resize_

    def resize_(storage: torch.UntypedStorage, nbytes: int) -> Any:
        result = before(storage, nbytes)
        resized(storage)
        return result

    kind.resize_ = resize_
    try:
        yield
    finally:
        if own:
            kind.resize_ = before
        else:
            del kind.resize_  # it inherits its own


def graphs_of(make: Callable[[torch.fx.GraphModule], Callable[[list[Any]], Any]]) -> Any:
    """A backend of `torch.compile`: `make` gets the graphs of forward and backward, as Inductor
    has them, and returns what runs one.
    """
    # Not above: they import the compiler.
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    return aot_autograd(
        fw_compiler=lambda graph, _: make(graph),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table,
    )


def parts_of(operator: torch._ops.OpOverload) -> Callable[..., Any] | None:
    """What an operator of `torch.library.custom_op` runs on tensors with values of any device.

    None where a device has a kernel of its own, so that the operator is not made of others.
    """
    made = OPDEFS[operator._schema.name]
    return made._init_fn if set(made._backend_fns) == {None} else None


@contextmanager
def specs_found_in(context: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Have DTensor find shapes of results, for which it runs operators on whole fake tensors, in
    `context()`. It does so anew for each operator where fake tensors stand for real ones.
    """
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    find = ShardingPropagator._propagate_tensor_meta_non_cached

    def find_in_context(self: ShardingPropagator, schema: Any) -> Any:
        with context():
            return find(self, schema)

    setattr(ShardingPropagator, find.__name__, find_in_context)
    try:
        yield
    finally:
        setattr(ShardingPropagator, find.__name__, find)


def forget_specs() -> None:
    """Have DTensor forget what operators give on which mesh."""
    # Not above: DTensor takes a second to import.
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call, unused-ignore]
