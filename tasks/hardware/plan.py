"""What the tasks `gpu` and `validate` run, in order: correctness first, then rows of figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tasks.bootstrap import LAYERS

# The first word of a command, and what stands for it. `python` is the one that has torch. Without
# an address torchrun's ranks look for each other under the machine's name, for minutes where a
# machine without a network has none for it.
TOOLS = {
    "python": "python",
    "pytest": "python -m pytest -p lamina_testing.plugin -v",
    "torchrun": "python -m torch.distributed.run --standalone --local-addr=127.0.0.1",
}


@dataclass(frozen=True)
class Step:
    """One command of a plan.

    Args:
        part: the part of the plan by which a person chooses it.
        name: what it shows, in a few words; no two steps of a plan share one.
        run: the command; its first word is one of TOOLS, and `{out}` is the reports' folder.
        rehearse: the same with sizes and devices that any CPU has; "": the same command.
        limit: seconds after which it is stopped.
        figures: whether it measures; otherwise it checks that numbers are right.
        gpus: how many GPUs it needs.
        arithmetic: whether it fails without right numbers, and is no test: on a virtual GPU the
            tiny command is rehearsed, and computed.
    """

    part: str
    name: str
    run: str
    rehearse: str = ""
    limit: int = 60
    figures: bool = False
    gpus: int = 1
    arithmetic: bool = False

    @property
    def is_pytest(self) -> bool:
        """Whether the output names tests and their outcomes."""
        return self.run.startswith("pytest ")

    def command(self, rehearsal: bool, python: str, out: str) -> list[str]:
        """Return the words to run."""
        tool, *words = ((rehearsal and self.rehearse) or self.run).split()
        return [
            python if word == "python" else word.replace("{out}", out)
            for word in (*TOOLS[tool].split(), *words)
        ]


STEP = "python benchmarks/gpu_step.py"
BILLION = f"{STEP} --layers 18 --batch 2"  # with the other defaults 1.04 billion parameters
DRY_STEP = (
    f"{STEP} --device cpu --layers 1 --width 128 --batch 1 --sequence 16 "
    "--rounds 1 --steps 1 --warmup 1"
)
EXPERTS = (
    "benchmarks/moe.py --device cuda --dtype bfloat16 --tokens 8192 --hidden 1024 --inner 2048 "
    "--rounds 5"
)
DRY_EXPERTS = (
    "torchrun --nproc-per-node=1 benchmarks/moe.py --tokens 32 --hidden 16 --inner 16 --rounds 1"
)
DRY_SAVES = "torchrun --nproc-per-node=1 benchmarks/checkpoint.py --model tiny --rounds 1"
JOB = "examples/pretrain/train.py --run.directory {out}/"
DRY_JOB = (
    f"torchrun --nproc-per-node=1 {JOB}rehearsal --train.steps 2 --train.batch-size 2 "
    "--model.num-layers 1 --model.hidden-size 64 --model.num-heads 2 --model.sequence-length 32"
)

CHECKS = (
    Step(
        "kernels",
        "collectives of ranks that share a GPU, and of a world of one on NCCL",
        "python packages/collectives/tests/cuda_ranks.py",
        "python packages/collectives/tests/cuda_ranks.py cpu",
        limit=120,  # seven worlds, each with processes of its own
    ),
    Step(
        "step",
        "strategies 0 to 3 equal the bit oracle",
        "pytest tests/test_gpu.py --deselect tests/test_gpu.py::test_the_same_holds_on_a_cpu",
        "pytest tests/test_gpu.py",
        limit=150,
    ),
    Step(
        "models",
        "attention, FP8, offload, recomputation",
        "pytest packages/models/tests/test_on_gpu.py",
        limit=90,
    ),
    Step("order", "every wait orders its streams", "pytest tests/test_order.py", limit=75),
    Step(
        "order",
        "the streams of this GPU have the order that was recorded on a CPU, and on a virtual GPU",
        "python tests/order_on_gpu.py --beside order.json",
        "python tests/order_on_gpu.py --stand-in",
        limit=75,
    ),
    Step("models", "experts", "pytest packages/models/tests/test_moe_on_gpu.py"),
    Step("models", "Mamba", "pytest packages/models/tests/test_mamba_on_gpu.py"),
    Step(
        "models",
        "invariant=True: one set of bits for layouts of ranks that share the GPU",
        "python packages/models/tests/invariant_on_gpu.py --models grouped hybrid --steps 2",
        "python packages/models/tests/invariant_on_gpu.py --device cpu --models grouped --steps 1 "
        "--worlds 1",
        limit=240,
        arithmetic=True,
    ),
    Step(
        "kernels",
        "memory registered for NCCL",
        "pytest packages/collectives/tests/test_registration.py",
        "pytest packages/collectives/tests/test_registration.py -k without_cuda",
        limit=45,
    ),
    Step(
        "kernels",
        "candidate kernels equal torch's operators",
        "pytest tests/test_candidate_kernels.py",
        "pytest tests/test_candidate_kernels.py --collect-only -q",
    ),
)

ROWS = (
    Step(
        "kernels",
        "the Triton sum beside a device copy",
        "python benchmarks/kernels.py --mib 64 256",
        "python benchmarks/kernels.py --rehearse",
        limit=120,  # some 200 kernels are compiled, each in 0.4 s on a CPU of 2026
        figures=True,
        arithmetic=True,
    ),
    Step(
        "step",
        "a step of 1b in a world of one",
        f"{BILLION} --rounds 2 --steps 6",
        DRY_STEP,
        limit=75,
        figures=True,
    ),
    Step(
        "step",
        "a step of 1b on 8 simulated ranks, and the price of ordered bits",
        f"{BILLION} --rounds 2 --steps 6 --ranks 8",
        f"{DRY_STEP} --ranks 8",
        limit=90,
        figures=True,
    ),
    Step(
        "models",
        "blocks beside plain PyTorch, MFU, FP8",
        "python benchmarks/blocks.py --size block-8b --batch 2 --rounds 3",
        "python benchmarks/blocks.py --batch 1 --sequence 32 --rounds 1 --steps 1 --systems lamina",
        limit=100,
        figures=True,
    ),
    Step(
        "models",
        "attention by each backend",
        "python benchmarks/attention.py",
        "python benchmarks/attention.py --rehearse",
        figures=True,
    ),
    Step(
        "models",
        "experts beside a loop and transformers",
        f"torchrun --nproc-per-node=1 {EXPERTS}",
        DRY_EXPERTS,
        figures=True,
        arithmetic=True,  # rows of an expert are counted on the host
    ),
    Step(
        "checkpoint",
        "the main job",
        f"torchrun --nproc-per-node=1 {JOB}main-job --train.steps 40 --checkpoint.every 20",
        DRY_JOB,
        limit=75,
        figures=True,
        arithmetic=True,  # its report has the losses
    ),
    Step(
        "checkpoint",
        "checkpoints beside DCP and torch.save",
        "torchrun --nproc-per-node=1 benchmarks/checkpoint.py",
        DRY_SAVES,
        limit=100,
        figures=True,
    ),
    Step(
        "kernels",
        "candidate kernels beside Inductor",
        "python benchmarks/blocks.py --kernels --rounds 3",
        "python benchmarks/blocks.py --kernels --rounds 1 --threads 1",
        limit=75,
        figures=True,
    ),
    Step(
        "models",
        "the head with its loss",
        "python benchmarks/losses.py --width 4096",
        "python benchmarks/losses.py --tokens 32 --width 16 --vocabulary 64 --steps 1",
        limit=45,
        figures=True,
    ),
    Step(
        "step",
        "a step of 1b on 64 simulated ranks",
        f"{BILLION} --rounds 1 --steps 5 --ranks 64",
        f"{DRY_STEP} --ranks 64",
        figures=True,
    ),
)


def gpu(count: int = 1) -> list[Step]:
    """Return the plan for a machine with one GPU. What matters most stands first."""
    return [*CHECKS, *ROWS]


def validate(count: int) -> list[Step]:
    """Return the plan for a host of `count` GPUs: NCCL between them, then the plan of one GPU."""
    worlds = [world for world in (2, 4, 8) if world <= max(count, 2)]
    most = max(worlds)
    ranks = f"torchrun --nproc-per-node={most}"
    checks = [
        Step(
            "nccl",
            "collectives of one rank per GPU",
            "python packages/collectives/tests/cuda_ranks.py nccl",
            "python packages/collectives/tests/cuda_ranks.py cpu",
            limit=180,
            gpus=2,
        )
    ]
    for world in worlds:
        for layer in LAYERS:
            words = f"pytest packages/{layer}/tests --backend nccl --world-size {world}"
            name = f"tests of {layer} on {world} ranks"
            checks.append(
                Step("nccl", name, words, f"{words} --collect-only -q", limit=1200, gpus=world)
            )
    rows = [
        Step(
            "nccl",
            "collectives beside NCCL's own",
            "python benchmarks/collectives.py --backend nccl",
            "python benchmarks/collectives.py --ranks 2 --mib 1 --repeat 2",
            limit=300,
            figures=True,
            gpus=2,
        ),
        Step("nccl", "experts over GPUs", f"{ranks} {EXPERTS}", DRY_EXPERTS, 180, True, most, True),
        Step(
            "nccl",
            "checkpoints over GPUs",
            f"{ranks} benchmarks/checkpoint.py --model 1b",
            DRY_SAVES,
            limit=600,
            figures=True,
            gpus=most,
            arithmetic=True,  # on a virtual GPU a billion parameters take the host's time
        ),
        Step(
            "nccl",
            "the main job over GPUs",
            f"{ranks} {JOB}main-job-nccl --train.steps 200",
            DRY_JOB.replace("/rehearsal ", "/rehearsal-nccl "),
            limit=300,
            figures=True,
            gpus=most,
            arithmetic=True,
        ),
    ]
    return [*checks, *rows, *gpu()]


def parts(plan: Iterable[Step]) -> list[str]:
    """Return the names of a plan's parts, each once, in order."""
    return list(dict.fromkeys(step.part for step in plan))


def choose(plan: Sequence[Step], words: Sequence[str]) -> list[Step]:
    """Return the steps of the named parts, or with these numbers, counted from 1; or else all.

    Raises:
        ValueError: if a word names no part and no step.
    """
    numbered = {str(number): step for number, step in enumerate(plan, 1)}
    if unknown := set(words) - set(parts(plan)) - set(numbered):
        names, last = ", ".join(sorted(unknown)), len(plan)
        raise ValueError(
            f"{names}: no such part; there are {', '.join(parts(plan))}, and steps 1 to {last}"
        )
    chosen = [numbered[word] for word in words if word in numbered]
    return [step for step in plan if step.part in words or step in chosen or not words]
