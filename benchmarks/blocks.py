"""Blocks of lamina.models beside `transformers` and plain PyTorch: tokens per second, in one run.

    python benchmarks/blocks.py                # one Llama-shaped block, small
    python benchmarks/blocks.py --size 0.5b    # a whole model
    python benchmarks/blocks.py --kernels      # what a kernel of ours would have to beat (GPU)

Forward plus backward. Contestants: `transformers`' Llama with sdpa; the same model in some sixty
lines of plain PyTorch, as it is and under `torch.compile` (which needs a C++ compiler on the CPU:
the line is left out, and says so, where there is none), block by block and as a whole; Lamina as it
is, and compiled both ways. Ratios are to the faster of the two compiled plain ones. All start from
the same weights and their losses are compared first. They take turns, a few steps each, several
times over; the median step counts. On a busy CPU `--processor-time --threads 1` counts the
seconds that this process computed in place of those that passed. Beside them the model FLOP
utilisation: the share of the rate of a large matrix product measured in the same run.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from operations import compare_kernels, has_compiler, synchronise, turn
from torch import Tensor, nn

from lamina.models import GPTModel, Precision, TransformerConfig, training_flops_per_token

Clock = Callable[[], float]
BLOCK = TransformerConfig(
    vocab_size=2048, hidden_size=512, num_layers=1, num_heads=8, num_kv_heads=4, ffn_size=1408,
    max_sequence_length=4096,
)  # fmt: skip
SIZES = {
    "block": BLOCK,
    "block-8b": replace(
        BLOCK, hidden_size=4096, num_heads=32, num_kv_heads=8, ffn_size=14336, vocab_size=1024
    ),
    "0.1b": replace(
        BLOCK, vocab_size=16_000, hidden_size=768, num_layers=12, num_heads=12, ffn_size=2048
    ),
    "0.5b": replace(
        BLOCK, vocab_size=32_000, hidden_size=1024, num_layers=32, num_heads=16, num_kv_heads=8,
        ffn_size=3584,
    ),
    "1b": replace(
        BLOCK, vocab_size=32_000, hidden_size=2048, num_layers=20, num_heads=16, num_kv_heads=8,
        ffn_size=5632,
    ),
}  # fmt: skip


# The same model in plain PyTorch: what somebody would write who reads the Llama paper.


class PlainBlock(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        hidden, ffn, width = config.hidden_size, config.ffn_width, config.head_width
        self.heads, self.kv_heads, self.width = config.num_heads, config.kv_heads, width
        self.norm1, self.norm2 = (nn.RMSNorm(hidden, eps=config.norm_eps) for _ in range(2))
        self.qkv = nn.Linear(hidden, (self.heads + 2 * self.kv_heads) * width, bias=False)
        self.output = nn.Linear(self.heads * width, hidden, bias=False)
        self.up = nn.Linear(hidden, 2 * ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, -1, self.width).transpose(1, 2)
        q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        q, k = turn(q, cos, sin), turn(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.output(mixed.transpose(1, 2).reshape(batch, length, -1))
        gate, up = self.up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class PlainModel(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(PlainBlock(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.width, self.theta = config.head_width, config.rope_theta

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        pairs = torch.arange(0, self.width, 2, device=x.device) / self.width
        angles = torch.arange(tokens.shape[1], device=x.device)[:, None] / self.theta**pairs
        cos, sin = angles.cos(), angles.sin()
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def plain_model(config: TransformerConfig, lamina: GPTModel) -> nn.Module:
    model = PlainModel(config)
    names = {"norm1": "attention_norm", "norm2": "mlp_norm", "qkv": "attention.qkv",
             "output": "attention.output", "up": "mlp.up", "down": "mlp.down"}  # fmt: skip
    ours = dict(lamina.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("blocks."):
                _, index, kind, _ = name.split(".")
                source = f"blocks.{index}.{names[kind]}.weight"
            else:
                source = name.replace("norm.weight", "final_norm.weight")
            parameter.copy_(ours[source])
    return model


class FromTransformers(nn.Module):
    def __init__(self, config: TransformerConfig, lamina: GPTModel) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        from lamina.models import to_huggingface

        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=config.vocab_size, hidden_size=config.hidden_size,
                intermediate_size=config.ffn_width, num_hidden_layers=config.num_layers,
                num_attention_heads=config.num_heads, num_key_value_heads=config.kv_heads,
                rms_norm_eps=config.norm_eps, rope_theta=config.rope_theta,
                max_position_embeddings=config.max_sequence_length, attn_implementation="sdpa",
                tie_word_embeddings=False, use_cache=False,
            )
        )  # fmt: skip
        self.model.load_state_dict(to_huggingface(lamina), strict=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self.model(input_ids=tokens).logits.float()
        loss: Tensor = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return loss


def contestants(
    config: TransformerConfig, device: torch.device, dtype: torch.dtype, chosen: list[str]
) -> dict[str, nn.Module]:
    """All models on the device, from the same weights."""
    compiler = has_compiler(device)
    if not compiler:
        print("no C++ compiler found: what is compiled is left out")
    make: dict[str, Callable[[], nn.Module]] = {
        "transformers, sdpa": lambda: FromTransformers(config, source),
        "plain PyTorch": lambda: plain_model(config, source),
        "plain, compiled": lambda: compiled(plain_model(config, source)),
        "plain, compiled whole": lambda: compiled_whole(plain_model(config, source)),
        "lamina": lambda: GPTModel(config, seed=0),
        "lamina, compiled": lambda: compiled(GPTModel(config, seed=0)),
        "lamina, compiled whole": lambda: compiled_whole(GPTModel(config, seed=0)),
        "lamina, fp8": lambda: GPTModel(fp8, seed=0),
        "lamina, fp8, compiled": lambda: compiled(GPTModel(fp8, seed=0)),
    }
    fp8 = replace(config, precision=Precision(backend="torch-fp8"))
    source = GPTModel(config, seed=0)
    found = {}
    for name, build in make.items():
        if chosen and name not in chosen:
            continue
        if ("fp8" in name and device.type != "cuda") or ("compiled" in name and not compiler):
            continue
        try:
            found[name] = build().to(device, dtype)
        except ImportError as error:
            print(f"{name} is left out: {error}")
    return found


def compiled(model: nn.Module) -> nn.Module:
    for block in model.blocks:  # type: ignore[union-attr]
        block.compile(fullgraph=True)
    return model


def compiled_whole(model: nn.Module) -> nn.Module:
    model.compile(fullgraph=True)
    return model


def step(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    model.zero_grad()
    loss: Tensor = model(tokens, labels)
    loss.backward()
    return loss.detach()


def matrix_rate(device: torch.device, dtype: torch.dtype, clock: Clock) -> float:
    """Floating-point operations per second of a large matrix product."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    times = []
    for _ in range(10):
        synchronise(device)
        begin = clock()
        a @ b
        synchronise(device)
        times.append(clock() - begin)
    return 2.0 * size**3 / statistics.median(times)


def race(
    models: dict[str, nn.Module],
    tokens: Tensor,
    labels: Tensor,
    rounds: int,
    steps: int,
    clock: Clock,
) -> dict[str, list[float]]:
    """Seconds of each model's steps, models in turn."""
    times: dict[str, list[float]] = {name: [] for name in models}
    losses = {}
    for name, model in models.items():  # compiles, and warms up
        losses[name] = step(model, tokens, labels).item()
        step(model, tokens, labels)
        model.zero_grad()  # one model's gradients at a time
    first = next(iter(losses.values()))
    for name, loss in losses.items():
        tolerance = 0.05 if "fp8" in name or tokens.is_cuda else 1e-3
        assert abs(loss - first) < tolerance, f"{name} computes another loss: {losses}"
    for _ in range(rounds):
        for name, model in models.items():
            step(model, tokens, labels)
            for _ in range(steps):
                synchronise(tokens.device)
                begin = clock()
                step(model, tokens, labels)
                synchronise(tokens.device)
                times[name].append(clock() - begin)
            model.zero_grad()
    return times


def report(
    times: dict[str, list[float]], config: TransformerConfig, tokens: Tensor, rate: float
) -> None:
    count, length = tokens.numel(), tokens.shape[1]
    flops = training_flops_per_token(config, length) * count
    base = {name: statistics.median(times[name]) for name in times}
    plain = min((base[name] for name in base if name.startswith("plain, compiled")), default=None)
    hf = base.get("transformers, sdpa")
    print("| | step ms | tokens/s | / plain compiled | / transformers | of the matrix rate |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, seconds in base.items():
        ratios = [f"{other / seconds:.2f}" if other else "-" for other in (plain, hf)]
        print(
            f"| {name} | {1e3 * seconds:.0f} | {count / seconds:.0f} | {' | '.join(ratios)} | "
            f"{flops / seconds / rate:.0%} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=list(SIZES), default="block")
    # Small products leave a GPU's units waiting, whatever the code does.
    parser.add_argument("--batch", type=int, default=4 if torch.cuda.is_available() else 2)
    parser.add_argument("--sequence", type=int, default=4096 if torch.cuda.is_available() else 512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--processor-time", action="store_true", help="on a busy CPU")
    parser.add_argument("--threads", type=int, help="of the CPU; by default torch's choice")
    parser.add_argument(
        "--systems", nargs="*", default=[], help="names as in the table; all if none"
    )
    parser.add_argument("--kernels", action="store_true", help="operations instead of models")
    settings = parser.parse_args()
    if settings.threads:
        torch.set_num_threads(settings.threads)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    dtype = torch.bfloat16 if cuda else torch.float32
    name = torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads"
    print(f"{time.strftime('%Y-%m-%d')}, {name}, torch {torch.__version__}, {dtype}")
    if settings.kernels:
        compare_kernels(device, dtype, settings.rounds)
        return
    config = SIZES[settings.size]
    models = contestants(config, device, dtype, settings.systems)
    gc.collect()
    if not models:
        parser.error(f"--systems {settings.systems}: none of them can run here")
    parameters = sum(p.numel() for p in next(iter(models.values())).parameters())
    tokens = torch.randint(
        config.vocab_size, (settings.batch, settings.sequence + 1), device=device
    )
    shape = f"batch {settings.batch} x {settings.sequence}"
    print(f"{settings.size}: {parameters / 1e6:.0f}M parameters, {shape}", flush=True)
    clock = time.process_time if settings.processor_time else time.perf_counter
    rate = matrix_rate(device, dtype, clock)
    print(f"matrix products: {rate / 1e12:.2f} TFLOP/s")
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    times = race(models, inputs, labels, settings.rounds, settings.steps, clock)
    report(times, config, inputs, rate)


if __name__ == "__main__":
    main()
