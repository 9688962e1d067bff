"""Mixture of experts in one process, token by token, in plain PyTorch: what ranks must equal."""

from __future__ import annotations

import math

import torch
from torch import nn


def tokens_of_ranks(layout, batch, length, sequence_parallel):
    """Flat token indices of each rank of (dp, cp, tp), as ``{(dp, cp, tp): [index]}``."""
    replicas = layout.dp_replicate * layout.dp_shard
    rows_each = batch // replicas
    found = {}
    for dp in range(replicas):
        for cp in range(layout.cp):
            held = []
            for row in range(dp * rows_each, (dp + 1) * rows_each):
                chunk = length // (2 * layout.cp)
                spans = [(cp * chunk, (cp + 1) * chunk)]
                other = 2 * layout.cp - 1 - cp
                spans.append((other * chunk, (other + 1) * chunk))
                if layout.cp == 1:
                    spans = [(0, length)]
                held += [row * length + i for start, stop in spans for i in range(start, stop)]
            for tp in range(layout.tp):
                each = len(held) // layout.tp
                mine = held[tp * each : (tp + 1) * each] if sequence_parallel else held
                found[dp, cp, tp] = mine
    return found


def text(rows, seed=0):
    """Tokens, and labels of which each sequence has another number that count."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, 32, (rows, 9), generator=generator)
    labels = drawn[:, 1:].clone()
    for row in range(rows):
        labels[row, : (3 * row + seed) % 7] = -100
    return drawn[:, :-1], labels


class LoopMoE(nn.Module):
    """The layer over a whole batch ``[batch, sequence, hidden]``.

    ``senders`` are the sets of tokens within which capacity counts (a rank's), ``sets`` those over
    which losses are formed (a data-parallel rank's). ``loss`` is the mean over the sets.
    """

    def __init__(self, weights, moe, activation="swiglu"):
        super().__init__()
        self.moe = moe
        self.activation = activation
        for name, value in weights.items():
            setattr(self, name, nn.Parameter(value.detach().clone()))
        self.bias = torch.zeros(moe.num_experts, dtype=torch.float32)
        self.senders = self.sets = None
        self.padding = None
        self.end_step()

    def end_step(self):
        self.load = torch.zeros(self.moe.num_experts, dtype=torch.int64)
        self.losses = {}
        self.forwards = self.dropped = 0
        self.entropy = 0.0

    def update_bias(self):
        mean = self.load.sum().item() / self.moe.num_experts
        for expert, count in enumerate(self.load.tolist()):
            sign = (count < mean) - (count > mean)
            self.bias[expert] += torch.tensor(sign * self.moe.bias_rate, dtype=torch.float32)

    def choose(self, scores):
        moe, size = self.moe, self.moe.num_experts // self.moe.num_groups
        biased = (scores + self.bias.to(scores.dtype)).tolist()
        chosen = []
        for row in biased:
            allowed = range(moe.num_experts)
            if moe.num_groups > 1:
                groups = [row[g * size : (g + 1) * size] for g in range(moe.num_groups)]
                value = [sum(sorted(group)[-moe.group_best :]) for group in groups]
                best = sorted(range(moe.num_groups), key=lambda g: -value[g])[: moe.groups_kept]
                allowed = [g * size + i for g in best for i in range(size)]
            chosen.append(sorted(allowed, key=lambda e: -row[e])[: moe.top_k])
        return chosen

    def forward(self, x, *_):
        moe, flat = self.moe, x.flatten(0, -2)
        logits = flat @ self.router.t() + getattr(self, "router_bias", 0.0)
        scores = logits.softmax(-1) if moe.scores == "softmax" else logits.sigmoid()
        chosen = self.chosen = self.choose(scores.detach())
        weights = torch.stack([scores[t][chosen[t]] for t in range(len(chosen))])
        if moe.normalize_weights:
            weights = weights / (weights.sum(-1, keepdim=True) + moe.weights_eps)
        weights = weights * moe.weight_scale
        real = [t for t in range(len(chosen)) if self.padding is None or not self.padding[t]]
        kept = self.kept_copies(chosen, weights, set(real))
        places, nowhere = set(kept), moe.num_experts
        self.decided = [
            [e if (t, j) in places else nowhere for j, e in enumerate(row)]
            for t, row in enumerate(chosen)
        ]
        self.dropped += len(real) * moe.top_k - len(kept)
        out = torch.zeros_like(flat)
        for expert in range(moe.num_experts):
            pairs = [(t, j) for t, j in kept if chosen[t][j] == expert]
            if pairs:
                index = torch.tensor([t for t, _ in pairs])
                weight = torch.stack([weights[t, j] for t, j in pairs])
                biases = (
                    [x[expert, :, 0] for x in (self.up_bias, self.down_bias)] if moe.bias else []
                )
                result = self.mlp(flat[index], self.up[expert], self.down[expert], *biases)
                out = out.index_add(0, index, result * weight[:, None])
        if hasattr(self, "shared_up"):
            beside = self.mlp(flat, self.shared_up, self.shared_down)
            if hasattr(self, "shared_gate"):
                beside = beside / (1.0 + (-(flat @ self.shared_gate.t())).exp())
            out = out + beside
        self.add_losses(logits, scores, chosen, set(real), x.shape)
        for t in real:
            for expert in chosen[t]:
                self.load[expert] += 1
        return out.view(x.shape)

    def mlp(self, x, up, down, up_bias=0.0, down_bias=0.0):
        inner = x @ up.t() + up_bias
        if self.activation == "gelu":
            return nn.functional.gelu(inner) @ down.t() + down_bias
        gate, inner = inner.chunk(2, dim=-1)
        if self.activation == "swiglu_clamped":
            gate, inner = gate.clamp(max=7.0), inner.clamp(-7.0, 7.0) + 1.0
            return (gate / (1.0 + (-1.702 * gate).exp()) * inner) @ down.t() + down_bias
        return (gate * torch.sigmoid(gate) * inner) @ down.t() + down_bias

    def kept_copies(self, chosen, weights, real):
        every = [(t, j) for t in sorted(real) for j in range(self.moe.top_k)]
        if self.moe.capacity_factor is None:
            return every
        kept = []
        for sender in self.senders:
            mine = set(sender)
            share = self.moe.top_k * len(sender) / self.moe.num_experts
            capacity = max(1, math.ceil(self.moe.capacity_factor * share))
            for expert in range(self.moe.num_experts):
                wanted = [(t, j) for t, j in every if t in mine and chosen[t][j] == expert]
                if self.moe.drop == "weight":
                    wanted.sort(key=lambda copy: -weights[copy].item())
                else:
                    wanted.sort(key=lambda copy: sender.index(copy[0]))
                kept += wanted[:capacity]
        return kept

    def add_losses(self, logits, scores, chosen, real, shape):
        moe = self.moe
        probabilities = scores
        if moe.scores == "sigmoid":
            probabilities = scores / scores.sum(-1, keepdim=True)
        everyone = [t for held in self.sets for t in held if t in real]
        seen = probabilities[everyone].detach()
        self.entropy -= (seen * seen.log()).sum().item()
        before = getattr(self, "loads_before", None)
        loads = self.count(everyone, chosen)
        loads = loads if before is None or self.forwards == 0 else loads + before
        self.loads_before = loads
        parts = []
        for held in self.sets:
            mine = [t for t in held if t in real]
            found = {}
            if moe.switch_loss:
                own = self.count(mine, chosen)
                found["switch"] = moe.switch_loss * self.balance(own, probabilities[mine].mean(0))
            if moe.global_loss:
                found["global"] = moe.global_loss * self.balance(loads, probabilities[mine].mean(0))
            if moe.sequence_loss:
                rows = sorted({t // shape[1] for t in held})
                values = []
                for row in rows:
                    own = [t for t in mine if t // shape[1] == row]
                    values.append(self.balance(self.count(own, chosen), probabilities[own].mean(0)))
                found["sequence"] = moe.sequence_loss * torch.stack(values).mean()
            if moe.z_loss:
                found["z"] = moe.z_loss * logits[mine].exp().sum(-1).log().square().mean()
            parts.append(found)
        self.parts = parts
        self.loss = sum(sum(found.values()) for found in parts) / len(parts) + logits.sum() * 0
        for name in parts[0]:
            value = sum(found[name].item() for found in parts) / len(parts)
            self.losses[name] = self.losses.get(name, 0.0) + value
        self.forwards += 1

    def count(self, tokens, chosen):
        loads = torch.zeros(self.moe.num_experts, dtype=torch.float64)
        for t in tokens:
            for expert in chosen[t]:
                loads[expert] += 1
        return loads

    def balance(self, loads, mean):
        return self.moe.num_experts * ((loads / loads.sum()).to(mean.dtype) * mean).sum()


def weights_of(layer):
    """A whole MoELayer's weights under the oracle's names."""
    found = {
        "router": layer.router.weight,
        "up": layer.experts.up,
        "down": layer.experts.down,
    }
    if layer.shared is not None:
        found["shared_up"] = layer.shared.up.weight
        found["shared_down"] = layer.shared.down.weight
    if layer.experts.up_bias is not None:
        found |= {"up_bias": layer.experts.up_bias, "down_bias": layer.experts.down_bias}
    if layer.router.bias is not None:
        found["router_bias"] = layer.router.bias
    if layer.shared_gate is not None:
        found["shared_gate"] = layer.shared_gate.weight
    return found


NAMES = {
    "router": "router.weight",
    "up": "experts.up",
    "down": "experts.down",
    "up_bias": "experts.up_bias",
    "down_bias": "experts.down_bias",
    "router_bias": "router.bias",
    "shared_up": "shared.up.weight",
    "shared_down": "shared.down.weight",
    "shared_gate": "shared_gate.weight",
}
