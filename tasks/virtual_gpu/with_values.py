"""All tests of ours on the virtual GPU that computes: values are asserted, and races fail a test.

`python3 noxfile.py -s virtual-gpu -- tests` runs the files marked for GPUs, and the cells of NCCL
of all layers on 1, 2 and 4 ranks, at once and under an adversary whose seed is the commit's. It
ends after 60 minutes (`--minutes`); every part has its turn, and the next run goes on where this
one ended. `-- tests --slow` has five seeds and 8 ranks too. `-- tests --ci` is a sample in both
orders, of some two minutes. `-- tests ranks-2 models` chooses parts, and `-- tests ddp-2` one
layer's. `--keep` writes the section "With values" of `docs/records/virtual-gpu.md`, and enters the
cells that ran whole in `docs/records/cells.json`; the task then writes `cells.md` anew.
"""

from __future__ import annotations

import argparse
import functools
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tasks.bootstrap import LAYERS
from tasks.matrix.cells import Cell, Torch
from tasks.matrix.history import OUTCOMES, VIRTUAL, Run, commit_of, load, merge, save, state_of
from tasks.matrix.record import Result, read_results
from tasks.virtual_gpu.everything import MARKED, RECORD, RESULTS, ROOT, Part, run

CELLS = RECORD.with_name("cells.json")
HEADING = "## With values\n"
END = "<!-- end of the section that `-- tests --keep` writes -->\n"
WORLDS, SLOW_WORLDS = (1, 2, 4), (1, 2, 4, 8)
SEEDS, SLOW_SEEDS = 1, 5
# What a few minutes hold: a sharded optimizer, and every strategy of one axis.
SAMPLE = (
    "packages/ddp/tests/test_optimizers.py::"
    "test_what_users_change_between_steps_is_what_the_next_step_uses",
    "packages/fsdp/tests/test_strategies.py::"
    "test_every_combination_over_one_axis_equals_the_bit_oracle",
)


@dataclass(frozen=True)
class Computed(Part):
    """A part whose values are computed, in an order and under a seed; a race fails its test."""

    seed: int = 0

    @property
    def kind(self) -> str:
        """Return its order, with the seed of an adversary."""
        return f"{self.order}-{self.seed}" if self.order == "adversarial" else self.order

    @property
    def results(self) -> Path:
        """Return the file that has each test's result at this state of the sources."""
        return RESULTS / state() / f"{self.name}-{self.kind}.jsonl"

    @property
    def whole(self) -> Path:
        """Return the file that is there once the part has come to its end on these sources."""
        return self.results.with_suffix(".whole")

    @property
    def settings(self) -> dict[str, str]:
        """Return the device's settings."""
        return {**super().settings, "VGPU_SEED": str(self.seed), "VGPU_RACES": "fail"}


@functools.cache
def state() -> str:
    """Return a digest of the sources: what has passed on others runs again."""
    return state_of(ROOT, ["packages", "testing", "tests/test_gpu.py"])[:12]


def commit() -> str:
    """Return the commit that is tested."""
    git = ["git", "rev-parse", "HEAD"]
    return subprocess.run(git, capture_output=True, text=True, cwd=ROOT).stdout.strip() or "0"


def orders(seeds: int) -> list[tuple[str, int]]:
    """Return the orders with their seeds: at once, and adversaries whose seeds are the commit's."""
    first = int(commit()[:7], 16) % 10_000
    return [("at-once", 0), *(("adversarial", first + number) for number in range(seeds))]


def words_of(worlds: Sequence[int]) -> dict[str, tuple[str, ...]]:
    """Return each part's words for pytest: marked files, then the cells of NCCL by their ranks.

    The layers' cells are one part, because each pytest takes a quarter of a minute to begin.
    """
    folders = [f"packages/{layer}/tests" for layer in LAYERS]
    return {**MARKED, **{f"ranks-{world}": (*folders, *nccl(world)) for world in worlds}}


def cells_of(worlds: Sequence[int]) -> dict[str, tuple[str, ...]]:
    """Return the words of each cell by itself, for those who name it."""
    return {
        f"{layer}-{world}": (f"packages/{layer}/tests", *nccl(world))
        for world in worlds
        for layer in LAYERS
    }


def nccl(world: int) -> tuple[str, ...]:
    """Return the words for a cell."""
    return ("--backend", "nccl", "--world-size", str(world))


def parts(slow: bool = False, names: Collection[str] = ()) -> list[Computed]:
    """Return the named parts, or all, in the order in which they have their turn."""
    worlds = SLOW_WORLDS if slow else WORLDS
    named = words_of(worlds)
    if names:
        named = {name: w for name, w in {**named, **cells_of(worlds)}.items() if name in names}
    kinds = orders(SLOW_SEEDS if slow else SEEDS)
    return [Computed(name, words, *kind) for name, words in named.items() for kind in kinds]


def sample() -> list[Computed]:
    """Return what CI runs, in every order."""
    return [Computed("sample", (*SAMPLE, *nccl(2)), *kind) for kind in orders(SEEDS)]


def page(chosen: Sequence[Computed], words: Sequence[str]) -> Iterator[str]:
    """Yield the section of the record in Markdown; `words` are those of the command."""
    command = " ".join(("python3 noxfile.py -s virtual-gpu -- tests", *words))
    yield f"`{command}` on {time.strftime('%Y-%m-%d')} at"
    yield f"`{commit()[:8]}`. Values are asserted, and a race fails its test.\n"
    yield "| part | order | seed | passed | skipped | failed |"
    yield "| --- | --- | --- | --- | --- | --- |"
    failures: list[tuple[Computed, Result]] = []
    unrun = []
    for part in chosen:
        for name, results in by_layer(part).items():
            if not results:  # a layer without tests of so many ranks
                continue
            counts = Counter(result.outcome for result in results)
            failures += [(part, each) for each in results if each.outcome == "failed"]
            figures = (counts[outcome] for outcome in ("passed", "skipped", "failed"))
            yield f"| {name} | {part.order} | {part.seed} | {' | '.join(map(str, figures))} |"
        if not part.whole.exists():
            unrun.append(f"{part.name} {part.order}")
    yield f"\nNot at their end: {', '.join(unrun) or 'none'}."
    yield f"\nFailed: {len(failures)}.\n"
    for part, result in failures:
        reason = (result.reason or "no reason").splitlines()[0][:150].replace("`", "'")
        yield f"- `{result.case}` ({part.order}, {part.seed}): `{reason}`"


def runs_of(chosen: Sequence[Computed]) -> list[Run]:
    """Return what the cells have shown that came to their end, for the page of cells.

    A test that failed in one order has failed.
    """
    torch = Torch.of(Path(sys.executable))
    if torch is None:
        return []
    orders_of: dict[str, list[Computed]] = defaultdict(list)
    results_in: dict[str, list[Result]] = defaultdict(list)
    for part in chosen:
        if part.whole.exists():
            for name, results in by_layer(part).items():
                orders_of[name].append(part)
                results_in[name] += results
    runs = []
    for name, parts_of in orders_of.items():
        layer, _, world = name.rpartition("-")
        if layer not in LAYERS or not world.isdecimal():
            continue  # marked files are no cell
        results = results_in[name]
        worst: dict[str, str] = {}
        for result in results:
            if worst.get(result.case) != "failed":
                worst[result.case] = result.outcome
        in_orders = ", ".join(part.kind for part in parts_of)
        runs.append(
            Run(
                Cell(layer, "nccl", int(world), torch.minor),
                state(),
                commit_of(ROOT),
                time.strftime("%Y-%m-%d"),
                round(sum(result.seconds for result in results), 1),
                {outcome: list(worst.values()).count(outcome) for outcome in OUTCOMES},
                f"{VIRTUAL}, {in_orders}",
                torch.versions,
            )
        )
    return runs


def by_layer(part: Part) -> dict[str, list[Result]]:
    """Return the results of a part, those of each layer under a name such as `ddp-2`."""
    if not part.words[0].endswith("/tests"):  # files, or a sample
        return {part.name: results_of(part)}
    of_layer: dict[str, list[Result]] = {layer: [] for layer in LAYERS}
    for result in results_of(part):
        of_layer[result.case.split("/")[1]].append(result)
    return {f"{layer}-{part.words[-1]}": results for layer, results in of_layer.items()}


def results_of(part: Part) -> list[Result]:
    """Return the last result of each test of a part."""
    return list(read_results(part.results).values())


def main(words: Sequence[str]) -> int:
    """Run the parts that the words choose; return 1 if a test of them failed."""
    parser = argparse.ArgumentParser("noxfile.py -s virtual-gpu -- tests", allow_abbrev=False)
    parser.add_argument(
        "names", nargs="*", metavar="PART", help="such as ranks-2 or ddp-2; all if none"
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="for all together")
    parser.add_argument("--slow", action="store_true", help="five seeds, and 8 ranks too")
    parser.add_argument("--ci", action="store_true", help="a sample of some two minutes")
    parser.add_argument("--keep", action="store_true", help="write the record")
    options = parser.parse_args(words)
    chosen = sample() if options.ci else parts(options.slow, options.names)
    if not chosen:
        print("there is no such part; there are", *words_of(SLOW_WORLDS), *cells_of(SLOW_WORLDS))
        return 1
    end = time.monotonic() + 60 * options.minutes
    left: Sequence[Computed] = chosen
    while left and time.monotonic() < end:
        for place, part in enumerate(left):
            # An even share of what is left, so that every part has its turn. What does not end in
            # its share has another one of the time that the others did not need.
            seconds = (end - time.monotonic()) / (len(left) - place)
            part.results.parent.mkdir(parents=True, exist_ok=True)
            if seconds > 0 and run(part, seconds):
                part.whole.touch()
        left = [part for part in left if not part.whole.exists()]
    if options.keep:
        save(CELLS, merge(load(CELLS), runs_of(chosen)))
        before, _, rest = RECORD.read_text().partition(HEADING)
        kept = rest.partition(END)[2]
        RECORD.write_text(
            f"{before}{HEADING}\n" + "\n".join(page(chosen, words)) + f"\n\n{END}{kept}"
        )
    ended = [result for part in chosen for result in results_of(part)]
    counts = Counter(result.outcome for result in ended)
    print(", ".join(f"{n} {outcome}" for outcome, n in sorted(counts.items())))
    return int(bool(counts["failed"] or not ended))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
