"""Load a Llama from Hugging Face's files into `fully_shard`: streamed, and whole on each rank.

    python benchmarks/loading.py [--model 1b|tiny] [--rounds 3] [--ranks 2] [--dtype float32]

Writes a model of random weights (the shape of Llama 3.2 1B, in bf16) into a temporary directory, in
shards of one layer. Then two systems take turns, each time in fresh processes, so that no memory of
the one before is counted:

- streamed: the model is made on the meta device, `fully_shard` cuts it without drawing weights, and
  `import_huggingface` lets each rank read its own part;
- whole: `from_pretrained` on each rank, then `fully_shard`, as a transformers script does.

Both make parameters of `--dtype`, and must end with the same bits in every rank's shard. Reported
of the worst rank: seconds from the first line of the model to the last barrier, seconds of a CPU,
which a busy machine changes less, and how far memory rose meanwhile at its peak. "All" is the
resident set (VmHWM), with the mapped pages of the files, which ranks of one machine share.
"Private" is without those, as sampled every 2 ms. The ratios are to all parameters. The files are
in the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

MODELS = {
    "1b": {
        "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 64,
    },
    "tiny": {
        "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 256,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 32,
    },
}  # fmt: skip
SYSTEMS = ("streamed", "whole")


def write(directory: Path, model: str) -> int:
    """Write config and weights in bf16, a layer at a time; return the bytes of the weights."""
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**MODELS[model], tie_word_embeddings=True, dtype=torch.bfloat16)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(directory)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in LlamaForCausalLM(config).named_parameters()}
    torch.manual_seed(0)
    noise = torch.randn(1 << 20, dtype=torch.bfloat16) * 0.02
    shards: dict[str, list[str]] = {}
    for name in shapes:
        layer = name.split(".")[2] if ".layers." in name else "rest"
        shards.setdefault(f"model-{layer}.safetensors", []).append(name)
    size = 0
    for file, names in shards.items():
        tensors = {}
        for name in names:
            count = shapes[name].numel()
            shift = int(torch.randint(noise.numel(), ()))  # no two tensors begin alike
            cut = noise.roll(shift).repeat(-(-count // noise.numel()))[:count]
            tensors[name] = cut.view(shapes[name]).clone()
            size += tensors[name].nbytes
        save_file(tensors, directory / file, metadata={"format": "pt"})
    weight_map = {name: file for file, names in shards.items() for name in names}
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return size


def status(field: str) -> int:
    """Bytes of a line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


class Peak:
    """How far memory rises inside, at most."""

    def __enter__(self) -> Peak:
        self._ended = threading.Event()
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins at VmRSS again
        self._all, self._private = status("VmRSS"), status("RssAnon")
        self._highest = self._private
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._ended.wait(0.002):
            self._highest = max(self._highest, status("RssAnon"))

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        self.all = status("VmHWM") - self._all
        self.private = max(self._highest, status("RssAnon")) - self._private


def load(system: str, directory: Path, dtype: torch.dtype) -> None:
    """Load on this rank, and print what it took."""
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM
    from transformers.utils import logging

    from lamina.checkpoint import import_huggingface
    from lamina.fsdp import MixedPrecisionPolicy, fully_shard
    from lamina.mesh import ParallelLayout, init_distributed

    logging.disable_progress_bar()
    assert LlamaForCausalLM is not None  # imported lazily: not within what is timed
    with init_distributed("gloo") as runtime:
        mesh = ParallelLayout().build("cpu")
        policy = MixedPrecisionPolicy(main_params_dtype=None)  # the weights alone
        dist.barrier()
        with Peak() as peak:
            began, used = time.perf_counter(), time.process_time()
            if system == "streamed":
                with torch.device("meta"):
                    config = AutoConfig.from_pretrained(directory)
                    model = AutoModelForCausalLM.from_config(config, dtype=dtype)

                def init(module: torch.nn.Module) -> None:  # the files have the weights
                    weights = list(module.parameters(recurse=False))
                    for weight in weights:
                        torch.nn.init.zeros_(weight)
                    if not weights:
                        model._init_weights(module)

                model = fully_shard(
                    model, device_mesh=mesh, mixed_precision_policy=policy, init_module=init
                )
                import_huggingface(model, directory)
            else:
                model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
                model = fully_shard(model, device_mesh=mesh, mixed_precision_policy=policy)
            dist.barrier()
            seconds, used = time.perf_counter() - began, time.process_time() - used
        found = 0
        for parameter in model.parameters():
            held = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            for place, piece in enumerate(held.detach().view(torch.uint8).split(1 << 24)):
                found += int(piece.sum(dtype=torch.int64)) * (place + 1)
        result = {
            "rank": runtime.rank, "seconds": seconds, "cpu": used, "all": peak.all,
            "private": peak.private, "digest": found,
        }  # fmt: skip
        print(json.dumps(result), flush=True)


def run(system: str, directory: Path, settings: argparse.Namespace) -> list[dict[str, float]]:
    """Load in fresh processes; the ranks' results in order."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words += [f"--nproc-per-node={settings.ranks}", __file__, "--dtype", settings.dtype]
    words += ["--load", system, str(directory)]
    threads = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, env=threads)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return sorted(lines, key=lambda line: line["rank"])


def table(results: dict[str, list[list[dict[str, float]]]], size: int) -> str:
    """A row for each system: medians over rounds of the worst rank."""

    def worst(system: str, what: str) -> float:
        return statistics.median(max(r[what] for r in ranks) for ranks in results[system])

    lines = [
        "| | seconds | / whole | of a CPU | private, MiB | / the weights | all, MiB | / them |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for system in SYSTEMS:
        seconds = worst(system, "seconds")
        row = [system, f"{seconds:.2f}", f"{seconds / worst('whole', 'seconds'):.2f}"]
        row.append(f"{worst(system, 'cpu'):.1f}")
        for what in ("private", "all"):
            row += [f"{worst(system, what) / 2**20:,.0f}", f"{worst(system, what) / size:.2f}"]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="1b")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32")
    parser.add_argument("--load", nargs=2, help=argparse.SUPPRESS)
    settings = parser.parse_args()
    dtype = getattr(torch, settings.dtype)
    if settings.load:
        load(settings.load[0], Path(settings.load[1]), dtype)
        return
    with tempfile.TemporaryDirectory() as root:
        size = write(Path(root), settings.model) * dtype.itemsize // 2
        results: dict[str, list[list[dict[str, float]]]] = {system: [] for system in SYSTEMS}
        for number in range(settings.rounds):
            for system in SYSTEMS:
                found = run(system, Path(root), settings)
                results[system].append(found)
                print(f"round {number + 1} of {settings.rounds}, {system}: {found}", flush=True)
    digests = {tuple(r["digest"] for r in ranks) for rows in results.values() for ranks in rows}
    if len(digests) != 1:
        raise SystemExit(f"the systems hold different weights: {digests}")
    print(f"{size / 2**20:,.0f} MiB of weights, {settings.ranks} ranks")
    print(table(results, size))


if __name__ == "__main__":
    main()
