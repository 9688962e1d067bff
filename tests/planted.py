"""Bugs that other systems had, planted here one at a time: which test finds each?

    python tests/planted.py [--only WORDS] [--write]

A bug is one change of a line in a copy of a layer's sources. The test that is to find it then runs
over the copy, and must fail. `--write` writes docs/records/planted.md. `test_planted.py` holds that
every line is still there to be changed.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "records" / "planted.md"


@dataclass(frozen=True)
class Bug:
    """A bug: what goes wrong, the line, what it becomes, and the test that is to find it."""

    what: str
    file: str  # below packages/, without src/lamina
    line: str
    becomes: str
    test: str  # below packages/

    @property
    def layer(self) -> str:
        return self.file.partition("/")[0]

    @property
    def source(self) -> str:
        """Where the line is, below a folder of packages."""
        return f"{self.layer}/src/lamina/{self.file}"


BUGS = [
    Bug(
        "gradients are doubled where the data-parallel group has one rank",
        "collectives/transport/transport.py",
        "return _Rows([input], nothing_left)",
        "return _Rows([input, input], nothing_left)",
        "ddp/tests/test_ddp.py::test_ddp_equals_the_bit_oracle_and_one_process_on_the_whole_batch",
    ),
    Bug(
        "gradients of experts are averaged over the ranks that hold copies, not over all",
        "ddp/wrapper/wrapper.py",
        "groups.append(ParameterGroup(members, axes, dtypes, settings, scratch))",
        "groups.append(ParameterGroup(members, axes, dtypes, __import__('dataclasses').replace("
        "settings, scale=settings.scale and 1 / axes.size), scratch))",
        "ddp/tests/test_finalize.py::test_experts_have_buffers_of_their_own_and_the_dense_scale",
    ),
    Bug(
        "under HSDP gradients are averaged twice",
        "ddp/gradients/sums.py",
        "yield inner.start(partial, wire, accumulate=adds, statistics=False)",
        "yield inner.start(partial, wire, scale=self.scale, accumulate=adds, statistics=False)",
        "ddp/tests/test_ddp.py::test_ddp_equals_the_bit_oracle_and_one_process_on_the_whole_batch",
    ),
    Bug(
        "only the last microbatch counts",
        "ddp/gradients/sums.py",
        "accumulate=before is not GradientState.EMPTY,",
        "accumulate=False,",
        "fsdp/tests/test_parity.py::test_every_strategy_equals_the_bit_oracle",
    ),
    Bug(
        "a module that runs twice keeps the gradient of its last run",
        "ddp/gradients/group_gradients.py",
        "self.view(index).add_(gradient)",
        "self.view(index).copy_(gradient)",
        "ddp/tests/test_ddp.py::test_gradients_that_come_several_times_in_a_backward_are_added_in_fp32",
    ),
    Bug(
        "ranks are summed one after the other, not in the tree",
        "collectives/reduction/summation.py",
        "        split = 1 << (len(ranks) - 1).bit_length() - 1",
        "        split = 1",
        "collectives/tests/test_order_of_summation.py",
    ),
    Bug(
        "the norm counts replicas (HSDP) several times",
        "ddp/norm/shares.py",
        "[axis for axis in axes if axis.ranks not in parts]",
        "[]",
        "ddp/tests/test_finalize.py::test_the_norm_counts_every_parameter_once",
    ),
    Bug(
        "the norm counts parameters that every tp rank holds several times",
        "ddp/norm/shares.py",
        "if role.tp_shard_dim is None:",
        "if role.tp_shard_dim == -1:",
        "ddp/tests/test_finalize.py::test_the_norm_counts_every_parameter_once",
    ),
    Bug(
        "the norm is that of one rank's shard",
        "ddp/norm/clip.py",
        'all_reduce_small([value], axis.sibling("reduce"), op=norm.op)',
        "pass",
        "ddp/tests/test_finalize.py::test_the_norm_counts_every_parameter_once",
    ),
    Bug(
        "clipping takes no notice of max_norm",
        "ddp/norm/clip.py",
        "factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)",
        "factor = (1.0 / (norm + 1e-6)).clamp(max=1.0)",
        "ddp/tests/test_ddp.py::test_clipping_uses_the_global_norm",
    ),
    Bug(
        "gradients over tp are summed in bf16 where fp32 was promised",
        "ddp/finalize/role_sums.py",
        "dtype = torch.promote_types(values.dtype, torch.float32)",
        "dtype = torch.bfloat16",
        "ddp/tests/test_finalize.py::test_gradients_equal_one_process",
    ),
    Bug(
        "gradients of norms under sequence parallelism are not summed over tp",
        "ddp/finalize/role_sums.py",
        "_all_reduce(sums, axis, None)",
        "pass",
        "ddp/tests/test_finalize.py::test_gradients_equal_one_process",
    ),
    Bug(
        "gradients of a tied embedding are not summed over pipeline stages",
        "ddp/finalize/role_sums.py",
        "_all_reduce(alone, axis, None)",
        "pass",
        "ddp/tests/test_finalize.py::test_gradients_equal_one_process",
    ),
    Bug(
        "losses per token are divided by this rank's count of tokens",
        "ddp/finalize/finalize.py",
        'all_reduce_small([count], mesh.axis("dp_cp").sibling("reduce"))',
        "pass",
        "ddp/tests/test_finalize.py::test_unequal_token_counts_on_the_last_stage_weigh_tokens_and_not_ranks",
    ),
    Bug(
        "entering a column-parallel layer does not sum gradients",
        "collectives/autograd_regions.py",
        "group, _same, partial(_sum, group=group, reduction=reduction))",
        "group, _same, _same)",
        "collectives/tests/test_autograd_regions.py::test_copy_to_keeps_values_and_sums_gradients",
    ),
    Bug(
        "a gather whose gradients are partial keeps a piece, and sums nothing",
        "collectives/autograd_regions.py",
        'whole_gradient = grad == "split"',
        "whole_gradient = True",
        "collectives/tests/test_autograd_regions.py::test_gather_from_can_sum_partial_gradients",
    ),
    Bug(
        "a forward does not wait for updated weights (overlapped gathers)",
        "ddp/wrapper/param_gathers.py",
        "            if not weights.ready:",
        "            if False:",
        "ddp/tests/test_weight_gathers.py",
    ),
    Bug(
        "loaded weights are not installed",
        "ddp/group/group.py",
        "        if self.mains_written:",
        "        if False:",
        "fsdp/tests/test_interrupted.py::test_a_part_of_the_model_may_be_loaded_by_itself",
    ),
    Bug(
        "the loss of a closure is dropped",
        "ddp/optimizer/sharded_optimizer.py",
        "return self.optimizer.step(closure)",
        "self.optimizer.step(closure)",
        "ddp/tests/test_optimizers.py::test_a_closure_gives_its_loss_and_the_step_is_the_same",
    ),
    Bug(
        "all data-parallel ranks drop the same elements",
        "mesh/rng.py",
        'training_seed=derive_seed(seed, "training", stage, context, *data),',
        'training_seed=derive_seed(seed, "training", stage, context),',
        "mesh/tests/test_rng.py::test_ranks_draw_the_same_exactly_where_they_should",
    ),
    Bug(
        "a flipped bit in a checkpoint is loaded",
        "checkpoint/load/reader.py",
        "if expected is None or expected.crc32 != found or expected.bytes != length:",
        "if expected is None:",
        "checkpoint/tests/test_damage.py::test_a_flipped_bit_anywhere_is_found_named_and_loads_nothing",
    ),
]


@dataclass(frozen=True)
class Verdict:
    """Whether the test failed, what it said, and how long it took."""

    found: bool
    said: str
    seconds: float


def plant(bug: Bug) -> Verdict:
    """Change the line in a copy, and run the test over it."""
    with tempfile.TemporaryDirectory() as folder:
        copies = Path(folder)
        shutil.copytree(ROOT / "packages" / bug.layer / "src", copies / bug.layer / "src")
        source = copies / bug.source
        text = source.read_text()
        if text.count(bug.line) != 1:
            raise SystemExit(f"{bug.source} has {text.count(bug.line)} times: {bug.line}")
        source.write_text(text.replace(bug.line, bug.becomes))
        layers = sorted(path for path in (ROOT / "packages").iterdir() if path.is_dir())
        paths = [(copies if p.name == bug.layer else p.parent) / p.name / "src" for p in layers]
        paths.append(ROOT / "testing" / "src")
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        begin = time.perf_counter()
        ended = subprocess.run(
            [*command, f"packages/{bug.test}"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
            capture_output=True,
            text=True,
            check=False,
        )
        last = (ended.stdout.strip().splitlines() or ["nothing"])[-1]
        return Verdict(ended.returncode == 1, last, time.perf_counter() - begin)


def page(verdicts: dict[Bug, Verdict]) -> str:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    found = sum(one.found for one in verdicts.values())
    lines = [
        "# Planted bugs",
        "",
        f"{found} of {len(verdicts)} were found. Written by `python tests/planted.py --write` at "
        f"{commit}, {datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}.",
        "",
        "| bug | in | test | found |",
        "| --- | --- | --- | --- |",
    ]
    for bug, verdict in verdicts.items():
        name = bug.test.rpartition("::")[2]
        word = "yes" if verdict.found else f"**no**: {verdict.said}"
        lines.append(f"| {bug.what} | `{bug.file}` | `{name}` | {word} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--only", nargs="+", default=[""], help="bugs whose words hold one of these"
    )
    parser.add_argument("--write", action="store_true", help="write docs/records/planted.md")
    settings = parser.parse_args()
    verdicts = {}
    for bug in (one for one in BUGS if any(text in one.what for text in settings.only)):
        verdicts[bug] = plant(bug)
        word = "found" if verdicts[bug].found else "NOT FOUND"
        print(
            f"{word} in {verdicts[bug].seconds:.0f} s: {bug.what} ({verdicts[bug].said})",
            flush=True,
        )
    if settings.write:
        PAGE.write_text(page(verdicts))
    if not all(one.found for one in verdicts.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
