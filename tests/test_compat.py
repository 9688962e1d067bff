"""Private names of torch stand in one module per layer and do what the layer needs of them.

Run with another torch (`python3 noxfile.py -s torch -- 2.15 tests/test_compat.py`), these tests say
which of them a version has lost or changed.
"""

from __future__ import annotations

import ast
import inspect
import math
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from source_trees import LAYERS, dotted, names_of, public_face, source_of
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import _get_fast_path_sharding_prop_cache_stats

from lamina.buffers import ShardedTensor
from lamina.buffers import compat as of_buffers
from lamina.buffers.storage_access import access_of
from lamina.checkpoint import compat as of_checkpoint
from lamina.collectives import compat as of_collectives
from lamina.ddp import compat as of_ddp
from lamina.fsdp import compat as of_fsdp
from lamina.mesh import init_distributed
from lamina.mesh.groups.process_groups import fake_store
from lamina.models import compat as of_models

# Where a layer says the private names of torch that it uses.
HOME = dict.fromkeys(LAYERS, "compat.py") | {"mesh": "groups/process_groups.py"}
ALLOWED = {
    # The base class of a stage. Its module takes a second to import, which only pipelines pay.
    ("models/pipelining/stage.py", "torch.distributed.pipelining.stage._PipelineStageBase"),
}


def private_names(source: str) -> Iterator[str]:
    """Yield each private name of torch that a module imports, or reaches from what it imports."""
    tree = ast.parse(source)
    bound = names_of(tree)
    for node in ast.walk(tree):
        found: list[str | None] = []
        if isinstance(node, ast.Attribute):
            found = [dotted(node, bound)]
        elif isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        for path in filter(None, found):
            parts = path.split(".")
            if parts[0] == "torch" and any(p[0] == "_" and p[:2] != "__" for p in parts):
                yield path


@pytest.mark.parametrize("layer", LAYERS)
def test_private_names_of_torch_stand_in_one_module(layer):
    top = source_of(layer)
    found = {
        (f"{layer}/{path.relative_to(top)}", name)
        for path in top.rglob("*.py")
        if path != top / HOME[layer]
        for name in private_names(path.read_text())
    }
    assert found - ALLOWED == set()
    assert list(private_names((top / HOME[layer]).read_text())), "a module of no use"


@pytest.mark.parametrize(
    "source",
    [
        "from torch._C import x",
        "import torch._dynamo",
        "def f():\n    from torch.utils import _pytree",
        "import torch\ntorch._C.x()",
        "from torch import distributed as d\nd.distributed_c10d._world",
    ],
)
def test_a_planted_private_name_is_seen(source):
    assert list(private_names(source))


# ------------------------------------------------------------------------ what each must do


class Probe(torch.Tensor):
    """A wrapper that has no memory of its own."""

    __torch_function__ = of_buffers.disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        assert isinstance(func, of_buffers.OpOverload)
        return torch.ones(3)


def wrappers_have_a_shape_and_no_memory():
    probe = of_buffers.make_wrapper_subclass(Probe, (3,), dtype=torch.float32)
    assert isinstance(probe, Probe)
    assert probe.shape == (3,)
    assert torch.equal(probe + 1, torch.ones(3))


def optimizers_can_be_told_of_a_class():
    lists = of_buffers.foreach_types()
    assert len(lists) == 2
    assert all(torch.Tensor in types for types in lists)
    assert all(ShardedTensor in types for types in lists)


def tracing_is_known():
    seen = []

    def note(graph, inputs):
        seen.append(of_buffers.is_traced())
        return graph.forward

    torch.compile(lambda x: x + 1, backend=note)(torch.ones(1))
    assert (seen, of_buffers.is_traced()) == ([True], False)


def a_storage_refuses_access_until_it_is_allowed():
    kept = torch.arange(4.0)
    view = kept.view(2, 2)[1]
    access = access_of(kept.untyped_storage(), "released")
    # torch names the reason where Python can give one, and says "invalid" where it can't.
    why = "invalid" if of_buffers.refuse_access is None else "released"
    access.refuse()
    for use in (kept.sum, view.clone, view.tolist, kept.zero_, kept.data_ptr):
        with pytest.raises(RuntimeError, match=why):
            use()
    assert kept.untyped_storage().nbytes() == 16
    access.allow()
    assert view.tolist() == [2.0, 3.0]
    view.zero_()


def access_is_refused_by_functions_of_torch_where_it_has_them():
    both = of_buffers.refuse_access is not None and of_buffers.allow_access is not None
    assert both or torch.__version__ < ("2.13" if torch.version.cuda else "2.14")


def a_strided_shard_knows_its_split():
    placement = of_buffers.strided_shard(1, 4)
    assert (placement.dim, placement.split_factor) == (1, 4)


def in_backward(look):
    """What `look` returns outside, inside and after a backward."""
    seen = [look()]

    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append(look())
            return grad

    Seen.apply(torch.ones(1, requires_grad=True)).sum().backward(retain_graph=True)
    return [*seen, look()]


def a_backward_has_a_number():
    for compat in (of_buffers, of_ddp, of_models):
        outside, inside, after = in_backward(compat.current_graph_task_id)
        assert outside == after == -1 != inside


def a_transform_of_functions_is_known():
    seen = []
    torch.vmap(lambda x: seen.append(of_ddp.function_transform()) or x)(torch.ones(2))
    assert seen[0] is not None
    assert of_ddp.function_transform() is None


class HandsOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def what_a_function_hands_on_can_be_written_to():
    leaf = torch.ones(1, requires_grad=True)
    own = leaf * 1
    view = HandsOn.apply(own)
    node = view.grad_fn
    assert view.grad_fn is node
    of_ddp.set_creation_meta(view, of_ddp.COMMON_VIEW)
    view.mul_(3)
    assert view.grad_fn is not node
    own.sum().backward()
    assert (own.item(), leaf.grad.item()) == (3, 3)
    (part,) = (leaf * 1).split(1)  # one of several views that one operator made
    view = HandsOn.apply(part)
    of_ddp.set_creation_meta(view, of_ddp.creation_meta(part))
    with pytest.raises(RuntimeError, match="multiple views"):
        view.mul_(3)


def a_kept_graph_is_known():
    for compat in (of_ddp, of_models):
        assert (
            in_backward(
                lambda compat=compat: of_ddp.current_graph_task_id() == -1 or compat.graph_is_kept()
            )[1]
            is True
        )


def callbacks_come_at_the_end_of_a_backward():
    seen = []
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: of_ddp.queue_callback(lambda: seen.append(x.grad.item())))
    y.sum().backward()
    assert seen == [2.0]


def the_engine_says_which_nodes_it_will_execute():
    x, z = (torch.ones(1, requires_grad=True) for _ in range(2))
    nodes = [torch.autograd.graph.get_gradient_edge(t).node for t in (x, z)]
    y = x * 2
    seen = []
    y.register_hook(lambda grad: seen.append([of_ddp.will_execute(node) for node in nodes]))
    y.sum().backward()
    assert seen == [[True, False]]


def norms_of_several_tensors_come_at_once():
    tensors = [torch.tensor([1.0, -3.0]), torch.tensor([math.nan, 0.0]), torch.tensor([2.0])]
    largest = [norm.item() for norm in of_ddp.foreach_norm(tensors, math.inf)]
    assert largest[::2] == [3.0, 2.0]
    assert math.isnan(largest[1])


def several_tensors_are_copied_at_once():
    to = [torch.zeros(2), torch.zeros(3, dtype=torch.float64)]
    of_ddp.foreach_copy(to, [torch.ones(2), torch.full((3,), 2.0)])
    assert [each.tolist() for each in to] == [[1.0, 1.0], [2.0, 2.0, 2.0]]


def fake_tensors_are_a_class():
    assert of_models.active_fake_mode() is None
    with of_models.FakeTensorMode() as mode:
        assert isinstance(torch.ones(2), of_models.FakeTensor)
        assert of_models.active_fake_mode() is mode
    assert not isinstance(torch.ones(2), of_models.FakeTensor)


def storages_say_that_they_are_resized():
    """Once each, also inside one another, and afterwards torch's own function is back."""
    inner, outer, storage = [], [], torch.ones(4).untyped_storage()
    own = torch.UntypedStorage.resize_
    with of_models.resizes_told_to(outer.append):
        with of_models.resizes_told_to(inner.append):
            storage.resize_(0)
        storage.resize_(8)
    storage.resize_(0)
    assert [each.nbytes() for each in outer] == [0, 0]
    assert (len(inner), len(outer)) == (1, 2)
    assert torch.UntypedStorage.resize_ is own
    assert "resize_" not in vars(torch.UntypedStorage)


def modes_are_listed():
    assert not of_models.modes_now()
    with of_models.FakeTensorMode() as mode:
        assert of_models.modes_now() == [mode]


def a_compiler_hands_its_graphs_over():
    seen = []

    def make(graph):
        seen.append([node.target for node in graph.graph.nodes if node.op == "call_function"])

        def run(arguments):
            return graph(*arguments)

        run._boxed_call = True
        return run

    def function(x, weight):
        return ((x @ weight).exp() * 2).sum()

    x, weight = (torch.ones(2, 2, requires_grad=True) for _ in range(2))
    torch.compile(function, backend=of_models.graphs_of(make))(x, weight).backward()
    torch.compiler.reset()
    forward, backward = seen
    product, exponential = torch.ops.aten.mm.default, torch.ops.aten.exp.default
    assert product in forward
    assert exponential in forward
    assert exponential in backward  # the partition computes it again
    assert backward.count(product) == 2
    torch.testing.assert_close(x.grad, torch.full((2, 2), 4 * math.exp(2.0)))


def operators_made_of_others_have_parts():
    doubled = torch.library.custom_op("lamina_test::doubled", mutates_args=())(_doubled)
    operator = torch.ops.lamina_test.doubled.default
    assert of_models.parts_of(operator)(torch.ones(2)).tolist() == [2.0, 2.0]
    doubled.register_kernel("cuda")(_doubled)
    assert of_models.parts_of(operator) is None


def _doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def collectives_tell_their_group():
    with init_distributed("fake", rank=0, world_size=2):
        group = torch.distributed.group.WORLD
        for argument in (group.group_name, group.boxed()):
            assert of_models.group_of_argument(argument).size() == 2


def dtensors_forget_what_they_know_of_meshes():
    with init_distributed("fake", rank=0, world_size=2):
        shards = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)])
        hits = []
        for forgets in (False, False, True):
            if forgets:
                of_models.forget_specs()
            torch.add(shards, 1.0)
            hits.append(_get_fast_path_sharding_prop_cache_stats()[0])
        assert hits[1] == hits[0] + 1
        assert hits[2] == 0


def dtensors_find_shapes_in_a_context_and_as_before_afterwards():
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    entered = []

    @contextmanager
    def context():
        entered.append(True)
        yield

    find = ShardingPropagator._propagate_tensor_meta_non_cached
    with init_distributed("fake", rank=0, world_size=2):
        of_models.forget_specs()
        shards = distribute_tensor(torch.ones(2, 4), init_device_mesh("cpu", (2,)), [Shard(0)])
        with of_models.specs_found_in(context):
            assert torch.add(shards, 1.0).shape == (2, 4)
    assert entered
    assert ShardingPropagator._propagate_tensor_meta_non_cached is find


def operators_get_a_form_for_a_while():
    x = torch.empty(2, 2, device="meta")
    with of_models.scoped_library("lamina_tests", "FRAGMENT") as library:
        library.define("halved(Tensor x) -> Tensor")
        library.impl("halved", lambda x: x[:1], "Meta")
        assert torch.ops.lamina_tests.halved(x).shape == (1, 2)
    with pytest.raises(AttributeError):
        _ = torch.ops.lamina_tests.halved
    if of_models.LACKS_WRITTEN_SCALED_MM_ON_META:  # else a plan would register it twice
        with of_models.scoped_library("aten", "IMPL") as library:
            library.impl("_scaled_mm_v2.out", lambda *_, out: out, "Meta")


def threads_carry_objects():
    of_collectives.set_in_thread("lamina.tests", ("x",))
    assert of_collectives.is_in_thread("lamina.tests")
    assert of_collectives.get_in_thread("lamina.tests") == ("x",)
    if of_collectives.remove_from_thread:
        of_collectives.remove_from_thread("lamina.tests")
        assert not of_collectives.is_in_thread("lamina.tests")


def a_block_of_memory_can_be_shared():
    """Without a GPU only the names are there; the blocks themselves are for `-s gpu`."""
    import torch.distributed._symmetric_memory as symmetric

    assert list(inspect.signature(symmetric.rendezvous).parameters)[:2] == ["tensor", "group"]
    assert {"dtype", "device"} <= set(inspect.signature(symmetric.empty).parameters)
    for name in ("buffer_ptrs", "get_buffer", "barrier"):
        assert hasattr(torch._C._distributed_c10d._SymmetricMemory, name)
    assert callable(of_collectives.shared_block)


def a_group_is_found_by_its_name():
    with init_distributed("gloo"):
        group = torch.distributed.group.WORLD
        assert of_collectives.group_named(group.group_name) is group


def a_stream_can_be_held():
    """It takes a number of cycles; that it holds a stream is for `-s gpu`."""
    if not torch.cuda.is_available():
        with pytest.raises((RuntimeError, AttributeError)):
            of_collectives.hold_stream(1)
        return
    of_collectives.hold_stream(1)


def trees_are_walked():
    tree = {"a": [1, (2,)], "b": 3}
    assert of_ddp.tree_leaves(tree) == of_fsdp.tree_leaves(tree) == [1, 2, 3]
    leaves, spec = of_ddp.tree_flatten(tree)
    assert of_ddp.tree_unflatten([-x for x in leaves], spec) == {"a": [-1, (-2,)], "b": -3}
    assert of_ddp.tree_flatten(leaves)[0] == leaves
    assert of_ddp.tree_flatten(spec)[0] == [spec]
    assert of_fsdp.tree_map_only(str, len, ["ab", 1]) == [2, 1]


def operators_are_seen_below_autograd():
    names = []

    class Seen(of_fsdp.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    with Seen():
        torch.ones(2).add(1)
    assert "aten.add.Tensor" in names


def a_rank_knows_its_shard_of_a_dtensor():
    with init_distributed("fake", world_size=2, rank=1):
        mesh = torch.distributed.init_device_mesh("cpu", (2,))
        placements = [torch.distributed.tensor.Shard(0)]
        shape, offset = of_fsdp.local_shape_and_offset(torch.Size([5, 3]), mesh, placements)
    assert (tuple(shape), tuple(offset)) == ((2, 3), (3, 0))


def a_graph_break_runs_the_function_as_it_is():
    for compat in (of_collectives, of_fsdp, of_models):
        assert compat.one_graph_break(lambda: 7)() == 7


def a_profiler_is_seen_from_every_thread():
    seen = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        look = threading.Thread(target=lambda: seen.append(of_collectives.profiling()))
        look.start()
        look.join()
    assert [*seen, of_collectives.profiling()] == [True, False]


def attention_gives_the_logarithm_of_sums():
    query = torch.zeros(1, 1, 3, 8)
    output, logs = of_models.flash_attention_for_cpu(query, query, torch.ones_like(query))
    assert torch.allclose(output, torch.ones_like(output))
    assert torch.allclose(logs.flatten(), torch.tensor(3.0).log().expand(3))
    for name in ("flash_attention", "flash_attention_backward", "flash_attention_backward_for_cpu"):
        assert getattr(of_models, name).default


def products_of_float8_are_there():
    assert callable(of_models.scaled_mm)
    assert callable(of_models.scaled_mm_v2)
    assert isinstance(of_models.HAS_SCALED_MM_V2_ON_CPU, bool)


def products_are_added_to_float32_on_meta_tensors_if_it_says_so():
    total, narrow = torch.zeros(4, 4, device="meta"), torch.zeros(4, 4, device="meta").bfloat16()
    refused = pytest.raises(TypeError) if not of_models.HAS_WIDE_ADDMM_ON_META else nullcontext()
    with refused:
        torch.ops.aten.addmm.dtype_out(total, narrow, narrow, torch.float32, out=total)


def dcp_names_what_it_pickles():
    info = of_checkpoint.StorageInfo("file", 1, 2)
    assert (info.relative_path, info.offset, info.length) == ("file", 1, 2)
    assert of_checkpoint.MemoryFormatCode(0).name
    assert of_checkpoint.get_layout("torch.strided") is torch.strided


def generic_state_functions_keep_what_they_were_given():
    found = []

    class Looks(torch.nn.Linear):
        def named_parameters(self, *args, **kwargs):
            look()
            return super().named_parameters(*args, **kwargs)

        def state_dict(self, *args, **kwargs):
            found.append(of_ddp.local_of_state_call("info").full_state_dict)
            return super().state_dict(*args, **kwargs)

    def look():
        if (optimizers := of_ddp.local_of_state_call("optims", within=1)) is not None:
            found.append((of_ddp.local_of_state_call("model"), *optimizers))

    model = Looks(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    assert not found
    options = StateDictOptions(full_state_dict=True)
    get_state_dict(model, optimizer, options=options)
    assert found[0] == (model, optimizer)
    assert True in found
    assert of_ddp.local_of_state_call("info") is None


def fsdp2_forgets_its_groups():
    with init_distributed("fake", world_size=2, rank=0):
        mesh = init_device_mesh("cpu", (2,))
        net = torch.nn.Sequential(torch.nn.Linear(4, 4))
        before = sys.getrefcount(mesh.get_group())
        fully_shard(net[0], mesh=mesh)
        fully_shard(net, mesh=mesh, reshard_after_forward=2)
        held = sys.getrefcount(mesh.get_group())
        of_fsdp.forget_groups(net)
        assert sys.getrefcount(mesh.get_group()) == before < held


def recurrent_modules_refer_weakly_to_their_parameters():
    net = torch.nn.GRU(2, 2)
    other = torch.nn.Parameter(torch.zeros(6, 2))
    with pytest.raises(RuntimeError, match="weakref"):
        torch.utils.swap_tensors(net.weight_ih_l0, other)
    with of_fsdp.free_of_references([net]):
        torch.utils.swap_tensors(net.weight_ih_l0, other)
    assert not net(torch.ones(1, 1, 2))[0].isnan().any()


CHECKS = {
    wrappers_have_a_shape_and_no_memory: (
        "make_wrapper_subclass OpOverload disabled_torch_function_impl"
    ),
    optimizers_can_be_told_of_a_class: "foreach_types",
    a_storage_refuses_access_until_it_is_allowed: "refuse_writes",
    access_is_refused_by_functions_of_torch_where_it_has_them: "refuse_access allow_access",
    a_strided_shard_knows_its_split: "strided_shard",
    tracing_is_known: "is_traced",
    a_backward_has_a_number: "current_graph_task_id",
    a_kept_graph_is_known: "graph_is_kept",
    a_transform_of_functions_is_known: "function_transform",
    what_a_function_hands_on_can_be_written_to: "COMMON_VIEW creation_meta set_creation_meta",
    callbacks_come_at_the_end_of_a_backward: "queue_callback",
    the_engine_says_which_nodes_it_will_execute: "will_execute",
    norms_of_several_tensors_come_at_once: "foreach_norm",
    several_tensors_are_copied_at_once: "foreach_copy",
    fake_tensors_are_a_class: "FakeTensor FakeTensorMode active_fake_mode",
    modes_are_listed: "modes_now",
    storages_say_that_they_are_resized: "resizes_told_to",
    a_compiler_hands_its_graphs_over: "graphs_of",
    operators_made_of_others_have_parts: "parts_of",
    collectives_tell_their_group: "group_of_argument",
    dtensors_forget_what_they_know_of_meshes: "forget_specs",
    dtensors_find_shapes_in_a_context_and_as_before_afterwards: "specs_found_in",
    operators_get_a_form_for_a_while: "scoped_library LACKS_WRITTEN_SCALED_MM_ON_META",
    threads_carry_objects: "set_in_thread is_in_thread get_in_thread remove_from_thread",
    a_block_of_memory_can_be_shared: "shared_block",
    a_group_is_found_by_its_name: "group_named",
    a_stream_can_be_held: "hold_stream",
    trees_are_walked: "tree_flatten tree_leaves tree_map_only tree_unflatten",
    operators_are_seen_below_autograd: "TorchDispatchMode",
    a_rank_knows_its_shard_of_a_dtensor: "local_shape_and_offset",
    fsdp2_forgets_its_groups: "forget_groups",
    recurrent_modules_refer_weakly_to_their_parameters: "free_of_references",
    a_graph_break_runs_the_function_as_it_is: "one_graph_break",
    a_profiler_is_seen_from_every_thread: "profiling",
    attention_gives_the_logarithm_of_sums: (
        "flash_attention flash_attention_for_cpu flash_attention_backward "
        "flash_attention_backward_for_cpu"
    ),
    products_of_float8_are_there: "scaled_mm scaled_mm_v2 HAS_SCALED_MM_V2_ON_CPU",
    products_are_added_to_float32_on_meta_tensors_if_it_says_so: "HAS_WIDE_ADDMM_ON_META",
    generic_state_functions_keep_what_they_were_given: "local_of_state_call",
    dcp_names_what_it_pickles: "StorageInfo MemoryFormatCode get_layout",
}
ELSEWHERE = {  # in collectives' own test_compat.py
    "DeviceEnd",  # what `has_ended` takes
    "all_gather_single",
    "has_ended",
    "reduce_scatter_single",
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_what_a_layer_needs_of_a_private_name_holds(check):
    check()


def test_a_simulated_job_has_a_store():
    assert fake_store() is not None


def test_each_name_has_a_check():
    named = {name for names in CHECKS.values() for name in names.split()} | ELSEWHERE
    homes = [source_of(layer) / home for layer, home in HOME.items() if home == "compat.py"]
    assert set().union(*(public_face(home.read_text()) for home in homes)) == named


def returns_a_given_tensor(forward: ast.FunctionDef) -> Iterator[int]:
    """Lines of a forward where the last call may give back a tensor that it was given."""
    in_place = {
        node.target.id
        for node in ast.walk(forward)
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name)
    }
    for node in ast.walk(forward):
        if not isinstance(node, ast.Return):
            continue
        match node.value:
            case ast.Name(id=name) if name in in_place:
                yield node.lineno
            case ast.Call(func=ast.Attribute(attr=name)) if name in (
                "to",
                "contiguous",
                "float",
                "flatten",
            ) or name.endswith("_"):
                yield node.lineno


def forwards(source: str) -> Iterator[ast.FunctionDef]:
    """The forwards of a file's autograd functions."""
    for kind in ast.walk(ast.parse(source)):
        if isinstance(kind, ast.ClassDef) and any("Function" in ast.unparse(b) for b in kind.bases):
            for method in kind.body:
                if isinstance(method, ast.FunctionDef) and method.name == "forward":
                    yield method


# See Note [Results that are another tensor] in lamina.models.base.applied.
def test_no_forward_returns_a_tensor_that_its_last_call_was_given():
    wrong = [
        f"{path}:{line}"
        for layer in LAYERS
        for path in source_of(layer).rglob("*.py")
        for forward in forwards(path.read_text())
        for line in returns_a_given_tensor(forward)
    ]
    assert not wrong
    planted = """
class F(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        total = x * 2
        total += x
        if x.ndim:
            return total
        if x.numel():
            return (x * 2).to(x.dtype)
        return (x * 2).add_(1)
"""
    assert len(list(returns_a_given_tensor(*forwards(planted)))) == 3
