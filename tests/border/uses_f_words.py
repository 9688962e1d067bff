"""F: the wrong words, as newcomers and users of peers write them."""

from __future__ import annotations

import torch
from border.case import STRATEGIES, Block, Case, sgd
from border.judge import use
from torch.distributed.device_mesh import DeviceMesh

F = "The wrong words"


def wrong(*says: str, columns=STRATEGIES):
    return use(F, says=says, refused=True, columns=columns, dtypes=("fp32",))


def settings(case: Case) -> dict:
    return {"zero_dp_strategy": int(case.column)}


def shard(*args, **kwargs):
    from lamina.fsdp import fully_shard

    return fully_shard(*args, **kwargs)


def per_module(*args, **kwargs):
    from lamina.fsdp import shard_module

    return shard_module(*args, **kwargs)


@wrong("shard_module")
def fully_shard_per_block(case: Case):
    """`fully_shard(block)` for each block, then `fully_shard(model)`"""
    model = case.net()
    for block in model.blocks:
        shard(block, **settings(case))
    shard(model, **settings(case))
    return {}


@wrong("mesh", "device_mesh")
def mesh_as_a_keyword(case: Case):
    """`fully_shard(model, mesh=mesh)`"""
    shard(case.net(), mesh=case.mesh, **settings(case))
    return {}


@wrong("mesh", "device_mesh")
def mesh_as_second_argument(case: Case):
    """`fully_shard(model, mesh)`"""
    shard(case.net(), case.mesh["dp_shard"], **settings(case))
    return {}


@wrong("mesh", "device_mesh")
def parallel_mesh_as_second_argument(case: Case):
    """`fully_shard(model, parallel_mesh)`"""
    shard(case.net(), case.mesh, **settings(case))
    return {}


@wrong("tuple|two|both", "model, optimizer =|unpack")
def result_is_not_unpacked(case: Case):
    """`model = fully_shard(model, optimizer)`, and the pair is called"""
    net = case.net()
    model = shard(net, sgd(net.parameters()), device_mesh=case.mesh, **settings(case))
    model(case.rows(0))
    return {}


@wrong("mp_policy", "mixed_precision_policy")
def fsdp2_name_of_the_policy(case: Case):
    """`fully_shard(model, mp_policy=policy)`"""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    shard(case.net(), mp_policy=policy, **settings(case))
    return {}


@wrong("ignored_params", "shard_module")
def fsdp2_name_of_ignored_parameters(case: Case):
    """`fully_shard(model, ignored_params={...})`"""
    net = case.net()
    shard(net, ignored_params={net.leave.bias}, **settings(case))
    return {}


@wrong("shard_placement_fn", "granularity|block_rows|shard_module|elements")
def fsdp2_placement_function(case: Case):
    """`fully_shard(model, shard_placement_fn=...)`"""
    shard(case.net(), shard_placement_fn=lambda p: None, **settings(case))
    return {}


@wrong("auto_wrap_policy", "fsdp_unit_modules")
def fsdp1_wrap_policy(case: Case):
    """`fully_shard(model, auto_wrap_policy=...)`"""
    shard(case.net(), auto_wrap_policy={Block}, **settings(case))
    return {}


@wrong("sharding_strategy", "zero_dp_strategy")
def fsdp1_sharding_strategy(case: Case):
    """`fully_shard(model, sharding_strategy=ShardingStrategy.FULL_SHARD)`"""
    from torch.distributed.fsdp import ShardingStrategy

    shard(case.net(), sharding_strategy=ShardingStrategy.FULL_SHARD, **settings(case))
    return {}


@wrong("cpu_offload", "offload_policy")
def fsdp1_cpu_offload(case: Case):
    """`fully_shard(model, cpu_offload=True)`"""
    shard(case.net(), cpu_offload=True, **settings(case))
    return {}


@wrong("device_id", "device")
def fsdp1_device_id(case: Case):
    """`fully_shard(model, device_id=0)`"""
    shard(case.net(), device_id=0, **settings(case))
    return {}


@wrong("use_orig_params")
def fsdp1_use_orig_params(case: Case):
    """`fully_shard(model, use_orig_params=True)`"""
    shard(case.net(), use_orig_params=True, **settings(case))
    return {}


@wrong("zero_stage|stage", "zero_dp_strategy")
def deepspeed_stage(case: Case):
    """`fully_shard(model, stage=3)`"""
    shard(case.net(), stage=int(case.column))
    return {}


@wrong("data_parallel_sharding_strategy", "zero_dp_strategy")
def megatron_strategy_name(case: Case):
    """`fully_shard(model, data_parallel_sharding_strategy="optim")`"""
    shard(case.net(), data_parallel_sharding_strategy="optim", **settings(case))
    return {}


@wrong("zero_dp_stratgy", "zero_dp_strategy")
def misspelt_argument(case: Case):
    """`fully_shard(model, zero_dp_stratgy=3)`"""
    shard(case.net(), zero_dp_stratgy=3)
    return {}


@wrong("7", "optim_grads_params|0.*3")
def unknown_strategy_number(case: Case):
    """`zero_dp_strategy=7`"""
    shard(case.net(), device_mesh=case.mesh, zero_dp_strategy=7)
    return {}


@wrong("zero3", "optim_grads_params")
def unknown_strategy_name(case: Case):
    """`zero_dp_strategy="zero3"`"""
    shard(case.net(), device_mesh=case.mesh, zero_dp_strategy="zero3")
    return {}


@wrong("optimizer", "AdamW")
def optimizer_class_for_optimizer(case: Case):
    """`fully_shard(model, torch.optim.AdamW)`: the class"""
    shard(case.net(), torch.optim.AdamW, device_mesh=case.mesh, **settings(case))
    return {}


@wrong("parameters", "module|model")
def parameters_for_the_module(case: Case):
    """`fully_shard(model.parameters())`"""
    shard(case.net().parameters(), device_mesh=case.mesh, **settings(case))
    return {}


@wrong("optimizer")
def optimizer_of_another_model(case: Case):
    """An optimizer over another model's parameters"""
    other = sgd(case.net().parameters())
    shard(case.net(), other, device_mesh=case.mesh, **settings(case))
    return {}


@wrong("Blok", "fsdp_unit_modules")
def unit_that_is_not_there(case: Case):
    """`fsdp_unit_modules=["border.case.Blok"]`"""
    shard(
        case.net(),
        device_mesh=case.mesh,
        fsdp_unit_modules=["border.case.Blok"],
        **settings(case),
    )
    return {}


@wrong("wrong", "dp_shard_dim")
def dimension_that_is_not_there(case: Case):
    """`dp_shard_dim="wrong"`"""
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",))
    shard(case.net(), device_mesh=mesh, dp_shard_dim="wrong", **settings(case))
    return {}


@wrong("sharded already")
def sharded_twice(case: Case):
    """`fully_shard` twice on one model"""
    net = case.net()
    shard(net, device_mesh=case.mesh, **settings(case))
    shard(net, device_mesh=case.mesh, **settings(case))
    return {}


@wrong("param_dtype", "torch.bfloat16|dtype")
def dtype_for_a_policy(case: Case):
    """`mixed_precision_policy=torch.bfloat16`"""
    shard(
        case.net(), device_mesh=case.mesh, mixed_precision_policy=torch.bfloat16, **settings(case)
    )
    return {}


@wrong("config", "DistributedDataParallelConfig", columns=("ddp",))
def ddp_without_config(case: Case):
    """`DistributedDataParallel(model, mesh)`: the mesh where the config belongs"""
    from lamina.ddp import DistributedDataParallel

    DistributedDataParallel(case.net(), case.mesh, case.mesh)
    return {}


@use(F, columns=("ddp", "torch_ddp"), dtypes=("fp32",))
def ddp_with_the_model_alone(case: Case):
    """`DistributedDataParallel(model)`, as torch's"""
    from lamina.ddp import DistributedDataParallel

    wraps = {"ddp": DistributedDataParallel, "torch_ddp": torch.nn.parallel.DistributedDataParallel}
    model = wraps.get(case.column, lambda model: model)(case.net())
    return case.train(model, sgd(model.parameters()))


@wrong("device_ids|process_group|find_unused|gradient_as_bucket_view", "mesh", columns=("ddp",))
def ddp_with_torchs_names(case: Case):
    """`DistributedDataParallel(model, device_ids=[0])`"""
    from lamina.ddp import DistributedDataParallel

    DistributedDataParallel(case.net(), device_ids=[0])
    return {}


@wrong("find_unused_parameters", columns=("ddp",))
def ddp_find_unused_parameters(case: Case):
    """`DistributedDataParallel(model, config, mesh, find_unused_parameters=True)`"""
    from lamina.ddp import DistributedDataParallel, DistributedDataParallelConfig

    config = DistributedDataParallelConfig()
    DistributedDataParallel(case.net(), config, case.mesh, find_unused_parameters=True)
    return {}


@wrong("device_mesh", "mesh", columns=("shard_module",))
def shard_module_with_fully_shards_mesh(case: Case):
    """`shard_module(block, device_mesh=mesh)`"""
    per_module(case.net(), device_mesh=case.mesh)
    return {}


@wrong("zero_dp_strategy", "fully_shard", columns=("shard_module",))
def shard_module_with_a_strategy(case: Case):
    """`shard_module(block, zero_dp_strategy=2)`"""
    per_module(case.net(), case.mesh, zero_dp_strategy=2)
    return {}


@wrong("optimizer", "shard_module|mesh", columns=("shard_module",))
def shard_module_with_an_optimizer(case: Case):
    """`shard_module(model, optimizer)`"""
    net = case.net()
    per_module(net, sgd(net.parameters()))
    return {}


@wrong("ModuleList", "forward|block", columns=("shard_module",))
def shard_module_of_a_container(case: Case):
    """`shard_module(model.blocks)`: a ModuleList"""
    per_module(case.net().blocks, case.mesh)
    return {}


@wrong("before|optimizer", "shard_module", columns=("shard_module",))
def optimizer_made_before_shard_module(case: Case):
    """The optimizer is made before `shard_module`, as one may with `fully_shard`"""
    net = case.net()
    optimizer = sgd(net.parameters())
    model = case.wrap_model(net)
    for step in range(2):
        case.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {}


@wrong("optimizer", columns=("shard_module",))
def blocks_sharded_after_the_optimizer(case: Case):
    """The root is sharded, the optimizer made, and then a block sharded"""
    net = case.net()
    per_module(net, case.mesh)
    optimizer = sgd(net.parameters())
    per_module(net.blocks[0], case.mesh)
    case.loss(net, 0).backward()
    optimizer.step()
    return {}
