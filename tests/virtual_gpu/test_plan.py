"""Plans on meta tensors beside the virtual GPU: its allocator, and constants measured on it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs/how-to/plan.md"


def command_of_page(option: str) -> list[str]:
    """The page's command with this option, for a process."""
    command = rf"^python (-m lamina.models.plan .*--{option}.*)$"
    (words,) = re.findall(command, PAGE.read_text(), re.MULTILINE)
    return [sys.executable, *words.split()]


def test_a_plan_has_what_the_real_allocator_allocates():
    command = [*command_of_page("device"), "--json"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    planned = json.loads(answer.stdout)
    allocated = planned["device"]["allocated"]
    assert abs(planned["allocated_bytes"] / allocated - 1) < 0.02, planned
    assert planned["device"]["reserved"] >= allocated


LLAMA = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5504,
    "num_hidden_layers": 3, "num_attention_heads": 16, "num_key_value_heads": 8,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize("strategy", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("recompute", "batch", "microbatches"),
    [("none", 2, 1), ("none", 4, 2), ("selective", 2, 1), ("selective", 4, 2), ("full", 2, 1)],
)
def test_a_plan_counts_each_tensor_of_the_device(
    recompute, batch, microbatches, strategy, tmp_path
):
    """A small model, where what is missing or counted twice is a large part."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    words = ["--sequence", "4096", "--recompute", recompute, "--strategy", str(strategy)]
    words += ["--batch", str(batch), "--microbatches", str(microbatches), "--model", str(tmp_path)]
    command = [sys.executable, "-m", "lamina.models.plan", *words, "--device", "--json"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    planned = json.loads(answer.stdout)
    off = planned["allocated_bytes"] / planned["device"]["allocated"] - 1
    assert abs(off) < 0.02, (off, planned)
    # Fragments of so small a model are a large part. Too low a plan would say that a job fits.
    off = planned["reserved_bytes"] / planned["device"]["reserved"] - 1
    assert -0.05 < off < 0.15, (off, planned)


def check_beside_device(command: list[str]) -> None:
    """The whole plan of a command allocates and reserves what the device does."""
    answer = subprocess.run(
        [*command, "--whole", "--device", "--json"], capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr
    planned = json.loads(answer.stdout)
    for what, near in (("allocated", 0.02), ("reserved", 0.06)):
        off = planned[f"{what}_bytes"] / planned["device"][what] - 1
        assert abs(off) < near, (what, off, planned)


@pytest.mark.parametrize(
    "words",
    [
        "--compiled --recompute none",
        "--compiled --recompute selective",
        "--compiled --recompute full",
        "--compiled --recompute selective --mesh tp=2,dp_shard=-1",
        "--recompute selective --mesh cp=2,dp_shard=-1",
        "--recompute offload",
        "--precision fp8 --recompute none",
        "--precision fp8 --recompute none --compiled",
        "--precision fp8 --recompute selective --compiled --mesh tp=2,dp_shard=-1",
    ],
)
def test_a_deep_plan_counts_each_tensor_and_what_is_reserved(words, tmp_path):
    """Inductor compiles blocks there."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 8}))
    words = ["--sequence", "4096", "--batch", "2", *words.split()]
    command = [sys.executable, "-m", "lamina.models.plan", *words, "--model", str(tmp_path)]
    check_beside_device(command)


SPARSE = {
    "model_type": "deepseek_v32", "vocab_size": 32000, "hidden_size": 1024, "num_hidden_layers": 3,
    "intermediate_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 16,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "q_lora_rank": 256, "kv_lora_rank": 128, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "index_topk": 512, "index_n_heads": 16, "index_head_dim": 128,
    "mlp_layer_types": ["dense"] * 3, "layer_types": ["indexed_attention"] * 3,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512,
}  # fmt: skip


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_a_plan_of_chosen_keys_has_the_device_s_kernel_for_masks(recompute, tmp_path):
    """A kernel that stored all scores would take half as much again."""
    (tmp_path / "config.json").write_text(json.dumps(SPARSE))
    words = ["--ranks", "2", "--batch", "1", "--sequence", "4096", "--recompute", recompute]
    command = [sys.executable, "-m", "lamina.models.plan", "--model", str(tmp_path), *words]
    check_beside_device(command)


def test_constants_are_measured_once_and_read_after(tmp_path):
    """The first run measures. The second one reads what is in the file."""
    for _ in range(2):
        answer = subprocess.run(
            command_of_page("calibrate"), cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert answer.returncode == 0, answer.stderr
        written = json.loads((tmp_path / "constants.json").read_text())
        limit = 79.18 - written["context"] / 2**30
        assert f" of {limit:.2f} GiB of h100-80gb: fits" in answer.stdout
        measured = ("product", "attention", "attention_backward", "memory", "launch")
        assert all(written[name] > 0 for name in measured)
        (tmp_path / "constants.json").write_text(json.dumps({**written, "context": 3 << 30}))


@pytest.mark.parametrize(
    "words",
    [
        ("--recompute", "none"),
        ("--recompute", "selective"),
        ("--recompute", "full"),
        ("--recompute", "selective", "--strategy", "2"),
        ("--recompute", "full", "--mesh", "dp_replicate=2,dp_shard=-1"),
        ("--recompute", "none", "--compiled"),
        ("--recompute", "selective", "--compiled"),
    ],
    ids=" ".join,
)
def test_a_plan_of_torchs_fsdp2_counts_each_tensor_of_the_device(words, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 8}))
    words = [*words, "--sequence", "4096", "--batch", "2", "--model", str(tmp_path)]
    command = [sys.executable, "-m", "lamina.models.plan", "--engine", "fsdp2", *words]
    check_beside_device(command)


PIPELINE = """
import json, sys
from dataclasses import replace
from importlib.metadata import entry_points
from torchtitan_recipe import by_fsdp2
from lamina.mesh import ParallelLayout
from lamina.models import preset
from lamina.models.plan import Job, plan
from lamina.models.plan.measured import on_device

schedule, stages = sys.argv[1], int(sys.argv[2])
job = Job(
    config=replace(preset("llama3-8b"), num_layers=2 * stages), ranks=4, batch=4, sequence=8192,
    microbatches=4, layout=ParallelLayout(pp=2), schedule=schedule, stage=(2,) * stages,
    recompute="full",
)
job = by_fsdp2(job, "8b")
planned = plan(job, whole=True).stages[0].allocated
(measured,) = entry_points(group="lamina.plan")
print(json.dumps([planned, on_device(job, measured.load())["allocated"]]))
"""


@pytest.mark.parametrize(("schedule", "stages"), [("1f1b", 2), ("interleaved_1f1b", 4)])
def test_a_plan_of_torchs_pipeline_counts_each_tensor_of_the_device(schedule, stages):
    """Of the first rank: the last one would wait for the id of a communicator that it shares."""
    answer = subprocess.run(
        [sys.executable, "-c", PIPELINE, schedule, str(stages)],
        cwd=PAGE.parents[2] / "benchmarks", capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    planned, device = json.loads(answer.stdout.splitlines()[-1])
    assert abs(planned / device - 1) < 0.02, (planned, device)
