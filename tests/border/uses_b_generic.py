"""B: code written for torch's own tensors meets the wrapped model's."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from border.case import OURS, SHARDED, Case, sgd
from border.judge import use
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

B = "Generic torch code meets the model's tensors"


def adam(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05, eps=0.05)  # smooth in the gradients


def whole(value) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def plain_tensors(state: dict) -> bool:
    return all(type(v) in (Tensor, nn.Parameter) for v in state.values() if isinstance(v, Tensor))


@use(B)
def full_model_state_dict(case: Case):
    """`get_model_state_dict(full_state_dict=True)`: whole plain tensors"""
    model, optimizer = case.setup()
    case.train(model, optimizer, 1)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return {"plain": plain_tensors(state), **_named(state)}


def _named(state: dict) -> dict:
    return {k.removeprefix("module."): v.detach().float().clone() for k, v in state.items()}


@use(B)
def full_model_state_dict_on_one_rank(case: Case):
    """`get_model_state_dict(full_state_dict=True, cpu_offload=True)`: on rank 0 alone"""
    model, optimizer = case.setup()
    case.train(model, optimizer, 1)
    options = StateDictOptions(full_state_dict=True, cpu_offload=not case.plain)
    state = get_model_state_dict(model, options=options)
    if case.plain or case.rank == 0:
        return {"plain": plain_tensors(state), **_named(state)}
    return {"plain": True, **_first_step(case, case.net())} if not state else {"rank 1": len(state)}


def _first_step(case: Case, model: nn.Module) -> dict:
    """What one process would have after the first step."""
    plain = Case("plain", "fp32", 0, None, case.directory)  # the oracle again
    plain.train(model, sgd(model.parameters()), 1)
    return _named(model.state_dict())


@use(B)
def full_optimizer_state_dict(case: Case):
    """`get_optimizer_state_dict(full_state_dict=True)`: whole plain tensors under names"""
    model, optimizer = case.setup(None, adam)
    case.train(model, optimizer, 1)
    options = StateDictOptions(full_state_dict=True)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    first = {k: v for of in state["state"].values() for k, v in of.items()}
    return {
        "names": sorted(n.removeprefix("module.") for n in state["state"]),
        "plain": plain_tensors(first),
        **{
            f"{n.removeprefix('module.')} {key}": v.detach().float().clone()
            for n, of in state["state"].items()
            for key, v in of.items()
            if key == "exp_avg"
        },
    }


@use(B)
def full_state_dicts_are_loaded(case: Case):
    """Full states of model and optimizer, set on another wrapped model, which trains on"""
    model, optimizer = case.setup(None, adam)
    case.train(model, optimizer, 1)
    options = StateDictOptions(full_state_dict=True)
    weights = get_model_state_dict(model, options=options)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    weights, state = copy.deepcopy(weights), copy.deepcopy(state)
    torch.manual_seed(5)
    other, again = case.setup(type(case.net())(), adam)
    set_model_state_dict(other, weights, options=options)
    set_optimizer_state_dict(other, again, state, options=options)
    return case.train(other, again, 2, begin=1)


@use(B)
def states_are_broadcast_from_rank_0(case: Case):
    """`broadcast_from_rank0=True`: the full states are on rank 0 alone"""
    model, optimizer = case.setup(None, adam)
    case.train(model, optimizer, 1)
    options = StateDictOptions(full_state_dict=True, cpu_offload=not case.plain)
    weights = get_model_state_dict(model, options=options)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    weights, state = copy.deepcopy(weights), copy.deepcopy(state)
    torch.manual_seed(5)
    other, again = case.setup(type(case.net())(), adam)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=not case.plain)
    if not case.plain and case.rank:
        weights, state = {}, {}
    set_model_state_dict(other, weights, options=options)
    set_optimizer_state_dict(other, again, state, options=options)
    return case.train(other, again, 2, begin=1)


@use(B)
def sharded_state_dicts_are_loaded(case: Case):
    """`get_state_dict` without options, set on another wrapped model"""
    model, optimizer = case.setup(None, adam)
    case.train(model, optimizer, 1)
    weights, state = get_state_dict(model, optimizer)
    weights, state = copy.deepcopy((weights, state)) if case.plain else (weights, state)
    torch.manual_seed(5)
    other, again = case.setup(type(case.net())(), adam)
    set_model_state_dict(other, weights)
    set_optimizer_state_dict(other, again, state)
    return case.train(other, again, 2, begin=1)


@use(B)
def flattened_optimizer_state(case: Case):
    """`flatten_optimizer_state_dict=True`, saved and set again"""
    model, optimizer = case.setup(None, adam)
    case.train(model, optimizer, 1)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    names = sorted(k.replace("module.", "") for k in state if k.startswith("state."))
    set_optimizer_state_dict(model, optimizer, state, options=options)
    return {"names": names, **case.train(model, optimizer, 2, begin=1)}


@use(B)
def cpu_offloaded_state(case: Case):
    """`cpu_offload=True` without `full_state_dict`, set again"""
    model, optimizer = case.setup(None, adam)
    case.train(model, optimizer, 1)
    options = StateDictOptions(cpu_offload=True)
    weights, state = get_state_dict(model, optimizer, options=options)
    set_model_state_dict(model, weights)
    set_optimizer_state_dict(model, optimizer, state)
    return case.train(model, optimizer, 2, begin=1)


@use(B)
def state_without_frozen_parameters(case: Case):
    """`ignore_frozen_params=True`"""
    model = case.net()
    model.enter.requires_grad_(False)
    model, optimizer = case.wrap(model, lambda ps: sgd([p for p in ps if p.requires_grad]))
    options = StateDictOptions(ignore_frozen_params=True)
    del optimizer
    state = get_model_state_dict(model, options=options)
    return {"names": sorted(n.removeprefix("module.") for n in state)}


@use(B)
def state_that_is_not_strict(case: Case):
    """`set_model_state_dict(strict=False)` with half of the names"""
    model, optimizer = case.setup()
    state = get_model_state_dict(model)
    half = {n: v for n, v in state.items() if "blocks" in n}
    set_model_state_dict(model, half, options=StateDictOptions(strict=False))
    return case.train(model, optimizer, 1)


@use(B)
def distributed_checkpoint_round_trip(case: Case):
    """`torch.distributed.checkpoint` saves and loads what `get_state_dict` gives"""
    import torch.distributed.checkpoint as dcp

    model, optimizer = case.setup(None, adam)
    case.train(model, optimizer, 1)
    weights, state = get_state_dict(model, optimizer)
    at = str(case.directory / "saved")
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=at, no_dist=case.plain)
    torch.manual_seed(5)
    other, again = case.setup(type(case.net())(), adam)
    case.train(other, again, 1)
    weights, state = get_state_dict(other, again)
    loaded = {"model": weights, "optimizer": state}
    dcp.load(loaded, checkpoint_id=at, no_dist=case.plain)
    set_model_state_dict(other, loaded["model"])
    set_optimizer_state_dict(other, again, loaded["optimizer"])
    return case.train(other, again, 2, begin=1)


@use(B)
def torch_save_of_the_state(case: Case):
    """`torch.save(model.state_dict())` on each rank, and `load_state_dict` of what was saved"""
    model, optimizer = case.setup()
    case.train(model, optimizer, 1)
    file = Path(case.directory, f"state{case.rank}")
    torch.save(model.state_dict(), file)
    model.load_state_dict(torch.load(file, weights_only=True))
    return case.train(model, optimizer, 1, begin=1)


@use(B, says=("ShardedTensor", "get_model_state_dict"))
def safetensors_of_the_state(case: Case):
    """`safetensors.torch.save_file(model.state_dict())`"""
    from safetensors.torch import load_file, save_file

    model, optimizer = case.setup()
    case.train(model, optimizer, 1)
    state = {n.removeprefix("module."): v for n, v in model.state_dict().items()}
    file = case.directory / f"weights{case.rank}.safetensors"
    save_file(state, file)
    return {n: v.float() for n, v in load_file(file).items()}


@use(B, says=("full_tensor|get_model_state_dict",))
def data_pointers(case: Case):
    """`data_ptr()` and `untyped_storage()` of the model's parameters between steps"""
    model, optimizer = case.setup()
    case.train(model, optimizer, 1)
    found = [(p.data_ptr() != 0, p.untyped_storage().nbytes() > 0) for p in model.parameters()]
    return {"all": all(a and b for a, b in found)}


@use(B, says=("full_tensor|get_model_state_dict",))
def numpy_of_parameters(case: Case):
    """`p.detach().float().numpy()` and `p.tolist()` of parameters between steps"""
    model, optimizer = case.setup()
    case.train(model, optimizer, 1)
    first = case.core(model).leave.bias
    return {"values": torch.tensor(first.detach().float().numpy().tolist())}


@use(B)
def clip_by_norm(case: Case):
    """`torch.nn.utils.clip_grad_norm_` on the model's parameters"""
    model, optimizer = case.setup()
    start = case.parameters(model)
    norms = []
    for step in range(3):
        case.loss(model, step).backward()
        norms.append(whole(nn.utils.clip_grad_norm_(model.parameters(), 0.1)).clone())
        optimizer.step()
        optimizer.zero_grad()
    return {**case.moved(model, start), "norms": torch.stack(norms)}


@use(B)
def clip_by_value(case: Case):
    """`torch.nn.utils.clip_grad_value_` on the model's parameters"""
    model, optimizer = case.setup()
    start = case.parameters(model)
    for step in range(3):
        case.loss(model, step).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    return case.moved(model, start)


@use(B)
def parameters_to_vector(case: Case):
    """`torch.nn.utils.parameters_to_vector(model.parameters())`"""
    model, optimizer = case.setup()
    case.train(model, optimizer, 1)
    return {"vector": whole(nn.utils.parameters_to_vector(model.parameters())).detach().float()}


@use(B)
def averaged_model(case: Case):
    """`torch.optim.swa_utils.AveragedModel(model)`"""
    from torch.optim.swa_utils import AveragedModel

    model, optimizer = case.setup()
    averaged = AveragedModel(model)
    case.train(model, optimizer, 1)
    averaged.update_parameters(model)
    case.train(model, optimizer, 1, begin=1)
    averaged.update_parameters(model)
    with torch.no_grad():
        return {"loss": case.mean(case.loss(averaged, 9))}


@use(B, says=("full_tensor",))
def weights_read_by_a_plain_model(case: Case):
    """A plain model of the same class loads `model.state_dict()`"""
    model, optimizer = case.setup()
    case.train(model, optimizer, 1)
    other = case.net()
    state = model.state_dict()
    other.load_state_dict({n.removeprefix("module."): v for n, v in state.items()})
    return {n: whole(p).detach().float() for n, p in other.named_parameters()}


@use(B)
def plain_state_is_loaded(case: Case):
    """`model.load_state_dict` of a plain model's state, then training goes on"""
    model, optimizer = case.setup()
    state = _fresh_state()
    if case.column == "torch_ddp":
        state = {f"module.{n}": v for n, v in state.items()}
    model.load_state_dict(state)
    return case.train(model, optimizer)


def _fresh_state() -> dict:
    from border.case import Net

    torch.manual_seed(7)
    return Net().state_dict()


@use(B)
def optimizer_state_round_trip(case: Case):
    """`optimizer.load_state_dict(optimizer.state_dict())` between steps"""
    model, optimizer = case.setup(None, adam)
    start = case.parameters(model)
    for step in range(3):
        case.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return case.moved(model, start)


@use(
    B,
    columns=(*OURS, "fsdp2"),
    slow=True,
    says=("ShardedTensor|save_pretrained", "get_model_state_dict|export"),
)
def transformers_save_pretrained(case: Case):
    """transformers' `save_pretrained` of a wrapped model, read back"""
    model, optimizer = case.wrap(_llama(case))
    del optimizer
    before = case.parameters(model)
    if case.plain:
        return before
    from safetensors.torch import load_file

    case.core(model).save_pretrained(case.directory)  # rank 0 writes
    case.barrier()
    saved = load_file(case.directory / "model.safetensors")
    return {n: v.float() for n, v in saved.items()}


def _llama(case: Case) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    return case.net(LlamaForCausalLM, config)


@use(B, columns=(*OURS, "fsdp2"), slow=True, dtypes=("fp32",))
def transformers_generate(case: Case):
    """transformers' `generate` of a wrapped model"""
    model, optimizer = case.wrap(_llama(case))
    del optimizer
    prompt = torch.tensor([[1, 2, 3]])
    model.eval()
    out = case.core(model).generate(prompt, max_new_tokens=4, do_sample=False)
    return {"tokens": out.tolist()}


@use(
    B,
    columns=(*OURS, "fsdp2"),
    slow=True,
    says=("ShardedTensor|save_pretrained", "get_model_state_dict|export"),
)
def peft_save_pretrained(case: Case):
    """peft's `save_pretrained` of a wrapped model with adapters"""
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file

    model = get_peft_model(_llama(case), LoraConfig(target_modules=["q_proj"], r=2))
    with torch.no_grad():
        generator = torch.Generator().manual_seed(3)
        for n, p in model.named_parameters():
            if "lora_" in n:
                p.copy_(torch.randn(p.shape, generator=generator))
    model, optimizer = case.wrap(model, lambda ps: sgd([p for p in ps if p.requires_grad]))
    del optimizer
    if case.plain:
        named = ((n.replace(".default", ""), p.detach()) for n, p in model.named_parameters())
        return {n: p for n, p in named if "lora_" in n}
    if case.rank == 0 or case.column in (*SHARDED, "shard_module", "fsdp2"):
        case.core(model).save_pretrained(case.directory / f"peft{case.rank}")
    case.barrier()
    saved = load_file(case.directory / "peft0" / "adapter_model.safetensors")
    return {n: v.float() for n, v in saved.items()}
