"""A Llama in torchtitan's order trains under `shard_module` by changing the import alone.

The model and the functions that are applied to it are written like torchtitan's (models/llama3):
meta device, `parallelize_module`, selective recomputation, compilation of each block, `fully_shard`
of each block and of the root, `to_empty`, `init_weights`. The oracle is torch's own `fully_shard`.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from lamina.ddp import full_parameters
from lamina.fsdp import shard_module
from lamina_testing import device_type

VOCAB, WIDTH, HEADS, KV_HEADS, TOKENS = 32, 16, 4, 2, 8


def precompute_freqs_cis(dim: int, end: int) -> Tensor:
    freqs = 1.0 / (10000.0 ** (torch.arange(0, dim, 2).float() / dim))
    freqs = torch.outer(torch.arange(end).float(), freqs)
    return torch.polar(torch.ones_like(freqs), freqs)


def apply_rotary_emb(x: Tensor, freqs_cis: Tensor) -> Tensor:
    paired = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    turned = paired * freqs_cis[: x.shape[1], None, :]
    return torch.view_as_real(turned).flatten(3).type_as(x)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head_dim = WIDTH // HEADS
        self.wq = nn.Linear(WIDTH, HEADS * self.head_dim, bias=False)
        self.wk = nn.Linear(WIDTH, KV_HEADS * self.head_dim, bias=False)
        self.wv = nn.Linear(WIDTH, KV_HEADS * self.head_dim, bias=False)
        self.wo = nn.Linear(HEADS * self.head_dim, WIDTH, bias=False)

    def forward(self, x: Tensor, freqs_cis: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        # -1, as tensor parallelism leaves fewer heads here
        xq = self.wq(x).view(batch, tokens, -1, self.head_dim)
        xk = self.wk(x).view(batch, tokens, -1, self.head_dim)
        xv = self.wv(x).view(batch, tokens, -1, self.head_dim)
        xq, xk = apply_rotary_emb(xq, freqs_cis), apply_rotary_emb(xk, freqs_cis)
        repeats = HEADS // KV_HEADS
        xk, xv = (t.repeat_interleave(repeats, dim=2) for t in (xk, xv))
        out = F.scaled_dot_product_attention(
            xq.transpose(1, 2), xk.transpose(1, 2), xv.transpose(1, 2), is_causal=True
        )
        return self.wo(out.transpose(1, 2).reshape(batch, tokens, -1))

    def init_weights(self, std: float) -> None:
        for linear in (self.wq, self.wk, self.wv):
            nn.init.trunc_normal_(linear.weight, mean=0.0, std=0.02)
        nn.init.trunc_normal_(self.wo.weight, mean=0.0, std=std)


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.w2 = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.w3 = nn.Linear(WIDTH, 2 * WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))

    def init_weights(self, std: float) -> None:
        nn.init.trunc_normal_(self.w1.weight, mean=0.0, std=0.02)
        for linear in (self.w2, self.w3):
            nn.init.trunc_normal_(linear.weight, mean=0.0, std=std)


class TransformerBlock(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH, 1e-5), nn.RMSNorm(WIDTH, 1e-5)
        self.std = 0.02 / (2 * (number + 1)) ** 0.5

    def forward(self, x: Tensor, freqs_cis: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x), freqs_cis)
        return h + self.feed_forward(self.ffn_norm(h))

    def init_weights(self) -> None:
        for norm in (self.attention_norm, self.ffn_norm):
            norm.reset_parameters()
        self.attention.init_weights(self.std)
        self.feed_forward.init_weights(self.std)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, WIDTH)
        freqs_cis = precompute_freqs_cis(WIDTH // HEADS, TOKENS)
        self.register_buffer("freqs_cis", freqs_cis, persistent=False)
        self.layers = nn.ModuleDict({str(n): TransformerBlock(n) for n in range(2)})
        self.norm = nn.RMSNorm(WIDTH, 1e-5)
        self.output = nn.Linear(WIDTH, VOCAB, bias=False)

    def init_weights(self, buffer_device: str = "cpu") -> None:
        with torch.device(buffer_device):
            self.freqs_cis = precompute_freqs_cis(WIDTH // HEADS, TOKENS)
        nn.init.normal_(self.tok_embeddings.weight)
        for layer in self.layers.values():
            layer.init_weights()
        self.norm.reset_parameters()
        nn.init.trunc_normal_(self.output.weight, mean=0.0, std=WIDTH**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h, self.freqs_cis)
        return self.output(self.norm(h))


def apply_tp(model: Transformer, tp_mesh) -> None:
    parallelize_module(
        model,
        tp_mesh,
        {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    for block in model.layers.values():
        plan = {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(
                input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
            ),
            **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(),
            "feed_forward": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            ),
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
            "feed_forward.w3": ColwiseParallel(),
        }
        parallelize_module(block, tp_mesh, plan)


def apply_ac(model: Transformer) -> None:
    saved = {torch.ops.aten.mm.default, torch.ops.aten._scaled_dot_product_flash_attention.default}

    def policy(_, func, *args, **kwargs):
        kept = func in saved
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    for name, block in model.layers.named_children():
        context = partial(create_selective_checkpoint_contexts, policy)
        wrapped = checkpoint_wrapper(block, context_fn=context, preserve_rng_state=False)
        model.layers.register_module(name, wrapped)


def apply_compile(model: Transformer) -> None:
    for block in model.layers.values():
        block.compile(backend="aot_eager", fullgraph=True)


def apply_fsdp(model: Transformer, dp_mesh, fully_shard) -> None:
    config = {"mesh": dp_mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=torch.float32)}
    fully_shard(model.tok_embeddings, **config, reshard_after_forward=True)
    for block in model.layers.values():
        fully_shard(block, **config, reshard_after_forward=True)
    fully_shard([model.norm, model.output], **config, reshard_after_forward=False)
    fully_shard(model, **config)


def parallelize_llama(mesh, fully_shard, *, compiled: bool) -> Transformer:
    """Everything that torchtitan does to a model, in its order."""
    with torch.device("meta"):
        model = Transformer()
    if mesh["tp"].size() > 1:
        apply_tp(model, mesh["tp"])
    apply_ac(model)
    if compiled:
        apply_compile(model)
    apply_fsdp(model, mesh["dp_shard"], fully_shard)
    model.to_empty(device=device_type())
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(buffer_device=device_type())
    model.train()
    return model


def train(model: Transformer, rank: int, steps: int = 3) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * step + rank)
        tokens = torch.randint(VOCAB, (2, TOKENS + 1), generator=generator)
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def plain_name(name: str) -> str:
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def whole_values() -> dict[str, Tensor]:
    model = Transformer()
    torch.manual_seed(0)
    model.init_weights()
    return model.state_dict()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_torchtitans_llama_trains_by_changing_the_import(compiled, ranks):
    mesh = init_device_mesh(device_type(), (2, 1), mesh_dim_names=("dp_shard", "tp"))
    values = whole_values()
    found, losses = {}, {}
    for name, fully_shard in (("torch", torch_fully_shard), ("lamina", shard_module)):
        model = parallelize_llama(mesh, fully_shard, compiled=compiled)
        if name == "lamina":
            for key, value in full_parameters(model).items():
                assert torch.equal(value, values[plain_name(key)]), "not drawn as in one process"
        set_model_state_dict(model, dict(values), options=StateDictOptions(full_state_dict=True))
        losses[name] = train(model, ranks.rank)
        whole = model.named_parameters() if name == "torch" else full_parameters(model).items()
        found[name] = {
            plain_name(n): (p.full_tensor() if isinstance(p, DTensor) else p).detach()
            for n, p in whole
        }
        torch._dynamo.reset()
    assert losses["lamina"] == pytest.approx(losses["torch"], rel=1e-5)
    assert found["lamina"].keys() == found["torch"].keys() == values.keys()
    for name, value in found["torch"].items():
        moved = (value - values[name]).norm()
        assert moved > 1e-3, name
        assert (found["lamina"][name] - value).norm() < 1e-4 * moved, name


@pytest.mark.ranks(2)
def test_a_buffer_that_no_init_weights_has_written_is_named_by_the_first_forward(ranks):
    mesh = init_device_mesh(device_type(), (2, 1), mesh_dim_names=("dp_shard", "tp"))
    with torch.device("meta"):
        model = Transformer()
    apply_fsdp(model, mesh["dp_shard"], shard_module)
    model.to_empty(device=device_type())
    with pytest.raises(ValueError, match="gave freqs_cis first values"):
        model(torch.zeros(2, TOKENS, dtype=torch.int64))
