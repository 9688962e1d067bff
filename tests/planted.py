"""Bugs that other systems had, planted here one at a time: which test finds each?

    python tests/planted.py [--findings] [--only WORDS] [--write]

A bug is one change of a line in a copy of a layer's sources. The test that is to find it then runs
over the copy, and must fail. `--write` writes docs/records/planted.md. `test_planted.py` holds that
every line is still there to be changed.

`--findings` plants the public findings of silently wrong gradients in Megatron-Core's compositions
(Megatron-LM, issue 7452), each in the place of Lamina that does the same. Two tests run over each:
the types of parallelism, and one that compares numbers with one process. `--write` then writes
docs/records/findings.md.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import inspect
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

from source_trees import commit

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "records" / "planted.md"
FINDINGS_PAGE = ROOT / "docs" / "records" / "findings.md"
TYPES = "models/tests/test_parallel_types.py::test_models_fit"


@dataclass(frozen=True)
class Bug:
    """A bug: what goes wrong, the line, what it becomes, and the test that is to find it."""

    what: str
    file: str  # below packages/, without src/lamina
    line: str
    becomes: str
    test: str  # below packages/
    only: str = ""  # which cases of the test, as pytest's -k
    typed: str = ""  # the case of TYPES that is to find it, or could

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
        "ddp/wrapper/buckets.py",
        "groups.append(ParameterGroup(members, axes, dtypes, settings, scratch))",
        "groups.append(ParameterGroup(members, axes, dtypes, __import__('dataclasses').replace("
        "settings, scale=settings.scale and 1 / axes.size), scratch))",
        "ddp/tests/test_finalize.py::test_experts_have_buffers_of_their_own_and_the_dense_scale",
    ),
    Bug(
        "under HSDP gradients are averaged twice",
        "ddp/gradients/reduction.py",
        "yield inner.start(partial, wire, accumulate=adds, statistics=False)",
        "yield inner.start(partial, wire, scale=self.scale, accumulate=adds, statistics=False)",
        "ddp/tests/test_ddp.py::test_ddp_equals_the_bit_oracle_and_one_process_on_the_whole_batch",
    ),
    Bug(
        "only the last microbatch counts",
        "ddp/gradients/group_gradients.py",
        "accumulate=before is not GradientState.EMPTY,",
        "accumulate=False,",
        "fsdp/tests/test_parity.py::test_every_strategy_equals_the_bit_oracle",
    ),
    Bug(
        "a module that runs twice keeps the gradient of its last run",
        "ddp/gradients/group_gradients.py",
        "self._views[index].add_(gradient)",
        "self._views[index].copy_(gradient)",
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
        'all_reduce_small(message, axis.sibling("reduce"), op=norm.op)',
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
        "group, _same, partial(_sum, reduction=reduction))",
        "group, _same, _same)",
        "collectives/tests/test_autograd_regions.py::test_copy_to_keeps_values_and_sums_gradients",
    ),
    Bug(
        "a gather whose gradients are partial keeps a piece, and sums nothing",
        "collectives/autograd_regions.py",
        'if grad == "reduce_scatter":',
        "if False:",
        "collectives/tests/test_autograd_regions.py::test_gather_from_can_sum_partial_gradients",
    ),
    Bug(
        "a forward does not wait for updated weights (overlapped gathers)",
        "ddp/execution/engine.py",
        "        if not all(group.weights.ready for group in unit.groups):",
        "        if False:",
        "ddp/tests/test_weight_gathers.py",
    ),
    Bug(
        "ranks gather weights that stay whole in the order in which each runs its units",
        "ddp/execution/engine.py",
        "        self._begin_to(last + 1)",
        "        pass",
        "fsdp/tests/test_layer_drop.py::test_whole_weights_train_as_one_process_whatever_units_each_rank_runs",
    ),
    Bug(
        "ranks do not compare the order of their gathers",
        "ddp/backward/agreement.py",
        "        if order[0]:",
        "        if False:",
        "fsdp/tests/test_layer_drop.py::test_collectives_that_do_not_pair_are_refused_before_a_step",
    ),
    Bug(
        "ranks do not compare the order of their reductions",
        "ddp/backward/agreement.py",
        "            self._collectives(self._over).require([sums])",
        "            pass",
        "fsdp/tests/test_layer_drop.py::test_replicas_that_run_different_units_are_refused_before_a_step",
    ),
    Bug(
        "weights go after a forward whose backward nothing announces",
        "ddp/execution/unit.py",
        "        if (self.stays_whole or self.calls.come_back_unannounced) and not even_if_kept:",
        "        if self.stays_whole and not even_if_kept:",
        "fsdp/tests/test_unannounced_backwards.py::test_they_train_as_one_process",
    ),
    Bug(
        "written weights are not installed",
        "ddp/group/group.py",
        "        if not news:",
        "        if True:",
        "fsdp/tests/test_border_writes.py::test_what_is_written_between_steps_is_what_all_ranks_compute_with",
    ),
    Bug(
        "the loss of a closure is dropped",
        "ddp/optimizer/sharded_optimizer.py",
        "return self.optimizer.step() if closure is None else self.optimizer.step(closure)",
        "self.optimizer.step() if closure is None else self.optimizer.step(closure)",
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
        "if expected is None or expected.crc32 != crc or expected.bytes != length:",
        "if expected is None:",
        "checkpoint/tests/test_damage.py::test_a_flipped_bit_anywhere_is_found_named_and_loads_nothing",
    ),
]


# A group of the same size as the right one, over other ranks, if the mesh has one.
OTHER = (
    "next((g for (_, r), g in __import__('lamina.mesh.groups.process_groups', fromlist=['x'])"
    ".current_world().groups.items() if len(r) == {0}.size() and list(r) != "
    "__import__('torch').distributed.get_process_group_ranks({0})), {0})"
)
EXPERTS = "models/tests/test_moe_parity.py::test_four_ranks_equal_one_process[ranks4-ep 2, tp 2]"
IMAGES = (
    "models/tests/test_vision_ranks.py::"
    "test_images_and_positions_are_cut_over_tp_and_not_over_another_axis_of_its_size"
)

FINDINGS = [
    Bug(
        "1 (label smoothing sums over this rank's vocabulary): the sum of the exponentials does",
        "models/layers/loss.py",
        "all_reduce_small([total, chosen], group)",
        "all_reduce_small([chosen], group)",
        "models/tests/test_tensor_parallel.py::test_cross_entropy_over_ranks_equals_torch",
        typed="plain-8",
    ),
    Bug(
        "2 (the loss over cut vocabularies is given gathered logits): so is the head's",
        "models/layers/embedding.py",
        "        total = linear_cross_entropy(",
        "        total = (lambda x, w, labels, axis, **_: "
        "__import__('lamina.models', fromlist=['x']).vocab_parallel_cross_entropy("
        "gather_from(x @ w.t(), axis.group, dim=-1) if axis else "
        "x @ w.t(), labels, axis).sum())(",
        "models/tests/test_tensor_parallel.py::test_training_equals_one_process_in_float64",
        typed="plain-8",
    ),
    Bug(
        "3 (a loss per token is divided by the tokens of this rank): so is the whole gradient",
        "ddp/finalize/finalize.py",
        'all_reduce_small([count], mesh.axis("dp_cp").sibling("reduce"))',
        "pass",
        "ddp/tests/test_finalize.py::test_unequal_token_counts_on_the_last_stage_weigh_tokens_and_not_ranks",
        typed="plain-8",
    ),
    Bug(
        "4 (saved activations are gathered over another tp group): those that backward gathers",
        "models/layers/linear.py",
        "arriving = start_all_gather(x, cut.group)",
        f"arriving = start_all_gather(x, {OTHER.format('cut.group')})",
        EXPERTS,
        typed="experts-8",
    ),
    Bug(
        "5 (the experts' padding mask is cut over another tp group): the same",
        "models/moe/losses.py",
        "padding = scatter_to(padding, axes.tokens_tp.group)",
        f"padding = scatter_to(padding, {OTHER.format('axes.tokens_tp.group')})",
        EXPERTS,
        typed="experts-8",
    ),
    Bug(
        "6 (queries, keys and values of cross-attention are gathered over another tp group): the "
        "input of every layer that is cut by its output",
        "models/layers/linear.py",
        "return live_group(self.ref)",
        "return live_group(self.ref) if self.side == 'input' or self.ref is None else "
        f"{OTHER.format('live_group(self.ref)')}",
        EXPERTS,
        typed="experts-8",
    ),
    Bug(
        "6 and 7, of their kind: learned positions are cut over another tp group",
        "models/decoder/gpt.py",
        "positions = scatter_to(positions.expand_as(tokens).flatten(), self.axis.group)",
        "positions = scatter_to(positions.expand_as(tokens).flatten(), "
        f"{OTHER.format('self.axis.group')})",
        IMAGES,
        typed="learned positions-8",
    ),
    Bug(
        "7 (embeddings with images are cut over another tp group): which images they are",
        "models/decoder/splice.py",
        "index = scatter_to(index.flatten(), scattered_over.group)",
        f"index = scatter_to(index.flatten(), {OTHER.format('scattered_over.group')})",
        IMAGES,
        typed="vision-8",
    ),
    Bug(
        "8 (a parameter per head is not marked as cut: the norm misses it): Mamba's decay rates",
        "models/mamba/block.py",
        "for parameter in (self.A_log, self.dt_bias, self.D):",
        "for parameter in ():",
        "models/tests/test_mamba_ranks.py::test_heads_cut_over_ranks_train_like_one_process",
        typed="mamba-8",
    ),
    Bug(
        "9 (the loss is the mean over cp of the means of the ranks' own labels): the same",
        "models/decoder/gpt.py",
        "return total * parts / (labels != IGNORED).sum().clamp(min=1)",
        "return total / (cut_sequence(labels, self.cp) != IGNORED).sum().clamp(min=1)",
        "models/tests/test_context_parallel.py::test_packed_documents_train_like_in_one_process",
        only="ring",
        typed="context-8",
    ),
    Bug(
        "10 (the load of this rank's tokens is summed over ranks once more): the same",
        "models/moe/losses.py",
        "    for axis in axes:",
        "    for axis in (*axes, *axes):",
        EXPERTS,
        typed="experts-8",
    ),
    Bug(
        "11 (a norm that tp ranks share for their heads gets no sum of gradients): that of queries",
        "models/attention/attention.py",
        "self.query_norm = norm.make(width, config.norm_eps, partial=sharded)",
        "self.query_norm = norm.make(width, config.norm_eps, partial=False)",
        "models/tests/test_tensor_parallel.py::test_training_equals_one_process_in_float64",
        only="qwen",
        typed="stages-8",
    ),
]

WHY = (
    "Types see forwards, so they do not find 3 and 4, which are in the engine and in a backward.",
    "They take a loss for one function, so they do not find 1, which is inside of it. A type says",
    "that ranks differ, and not which piece each has: so 6 and 9 fit. In the test of the positions",
    "every rank has whole sequences, whose positions are the same.",
)


@dataclass(frozen=True)
class Verdict:
    """Whether the test failed, what it said, and how long it took."""

    found: bool
    said: str
    seconds: float


def plant(bug: Bug, test: str, only: str = "") -> Verdict:
    """Change the line in a copy, and run the test (or some cases of it) over that."""
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
            [*command, f"packages/{test}", *(("-k", only) if only else ())],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
            capture_output=True,
            text=True,
            check=False,
        )
        last = (ended.stdout.strip().splitlines() or ["nothing"])[-1]
        return Verdict(ended.returncode == 1, last, time.perf_counter() - begin)


@contextmanager
def in_this_process(bug: Bug) -> Iterator[None]:
    """Inside, the functions that hold the line do what the changed line says.

    Only their code is exchanged, so objects that were made before and references to the functions
    stay what they are.
    """
    path = bug.source.partition("/src/")[2].removesuffix(".py").replace("/", ".")
    module = importlib.import_module(path)
    text = (ROOT / "packages" / bug.source).read_text()
    if text.count(bug.line) != 1:
        raise SystemExit(f"{bug.source} has {text.count(bug.line)} times: {bug.line}")
    changed = {code.co_qualname: code for code in _functions(compile(
        text.replace(bug.line, bug.becomes), module.__file__ or path, "exec"))}  # fmt: skip
    before: list[tuple[Any, CodeType]] = []
    for code in _functions(compile(text, module.__file__ or path, "exec")):
        new = changed[code.co_qualname]
        nested = "<locals>" in code.co_qualname or not code.co_flags & inspect.CO_OPTIMIZED
        if nested or _same(code, new):
            continue
        function: Any = module
        for name in code.co_qualname.split("."):
            function = inspect.getattr_static(function, name)
        function = getattr(function, "fget", getattr(function, "__func__", function))
        function = inspect.unwrap(function)
        before.append((function, function.__code__))
        function.__code__ = new
    if not before:
        raise SystemExit(f"{bug.source}: no function holds {bug.line}")
    try:
        yield
    finally:
        for function, code in before:
            function.__code__ = code


def _functions(code: CodeType) -> Iterator[CodeType]:
    """Yield all code below a module's."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _functions(constant)


def _same(one: CodeType, other: CodeType) -> bool:
    """Whether two functions do the same; lines and places in lines aside."""
    kinds = [constant for constant in one.co_consts if not isinstance(constant, CodeType)]
    others = [constant for constant in other.co_consts if not isinstance(constant, CodeType)]
    inner = zip(_functions(one), _functions(other), strict=False)
    return (one.co_code, one.co_names, kinds) == (other.co_code, other.co_names, others) and all(
        _same(a, b) for a, b in inner
    )


def page(verdicts: dict[Bug, Verdict]) -> str:
    found = sum(one.found for one in verdicts.values())
    lines = [
        "# Planted bugs",
        "",
        f"{found} of {len(verdicts)} were found. Written by `python tests/planted.py --write` at "
        f"{commit()}, {datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}.",
        "",
        "| bug | in | test | found |",
        "| --- | --- | --- | --- |",
    ]
    for bug, verdict in verdicts.items():
        name = bug.test.rpartition("::")[2]
        word = "yes" if verdict.found else f"**no**: {verdict.said}"
        lines.append(f"| {bug.what} | `{bug.file}` | `{name}` | {word} |")
    return "\n".join(lines) + "\n"


def findings_page(verdicts: dict[Bug, tuple[Verdict, Verdict]]) -> str:
    lines = [
        "# Eleven findings, planted",
        "",
        "What the public findings of issue 7452 of Megatron-LM do, planted in Lamina's code, by "
        f"`python tests/planted.py --findings --write`, "
        f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}.",
        "",
        "| finding, and what was planted | in | by types | by parity |",
        "| --- | --- | --- | --- |",
    ]
    for bug, found in verdicts.items():
        words = ["yes" if verdict.found else "no" for verdict in found]
        lines.append(f"| {bug.what} | `{bug.file}` | {' | '.join(words)} |")
    return "\n".join([*lines, "", *WHY]) + "\n"


def plant_findings(words: list[str], write: bool) -> None:
    """Plant each finding twice: for the types, and for the test that compares numbers."""
    verdicts = {}
    for bug in (one for one in FINDINGS if any(text in one.what for text in words)):
        verdicts[bug] = plant(bug, f"{TYPES}[{bug.typed}]"), plant(bug, bug.test, bug.only)
        types, parity = verdicts[bug]
        print(f"types {types.found}, parity {parity.found}: {bug.what}", flush=True)
        print(f"    ({types.said}) ({parity.said})", flush=True)
    if write:
        FINDINGS_PAGE.write_text(findings_page(verdicts))
    if not all(types.found or parity.found for types, parity in verdicts.values()):
        raise SystemExit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--only", nargs="+", default=[""], help="bugs whose words hold one of these"
    )
    parser.add_argument("--write", action="store_true", help="write the page of docs/records")
    parser.add_argument("--findings", action="store_true", help="plant those of issue 7452")
    settings = parser.parse_args()
    if settings.findings:
        plant_findings(settings.only, settings.write)
        return
    verdicts = {}
    for bug in (one for one in BUGS if any(text in one.what for text in settings.only)):
        verdicts[bug] = plant(bug, bug.test)
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
