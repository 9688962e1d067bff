"""What the pages say a step enters is what it enters: each `file.py:function` of each stage.

A page names a stage by `<!-- stage: NAME -->`. The names of functions that stand between this line
and the next one of its kind, or the end of the page, belong to the stage; `none` ends a stage. The
tests run all stages on two ranks under a profile hook.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
from source_trees import ROOT

PAGES = ("docs/walkthrough.md", "docs/fsdp.md")
STAGES = ("shard", "forward", "backward", "finalize", "clip", "step", "save", "restore")


def stages_of(text: str) -> dict[str, set[str]]:
    """Map each stage of a page to what it names, as `file.py:function`."""
    found: dict[str, set[str]] = defaultdict(set)
    _, *pieces = re.split(r"<!-- stage: (\w+) -->", text)
    for stage, piece in zip(pieces[::2], pieces[1::2], strict=True):
        found[stage].update(re.findall(r"([\w/]+\.py:[\w.]+)", piece))
    return {stage: names for stage, names in found.items() if stage != "none"}


def entered_by_stage(tmp_path: Path, ranks: int) -> dict[str, set[str]]:
    """Train a model of four units under strategy 3, save and restore; what each stage entered."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh

    from lamina.checkpoint import CheckpointManager
    from lamina.ddp import clip_grad_norm, finalize_grads
    from lamina.fsdp import fully_shard
    from lamina_testing.walk import Profile, path_in_lamina

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(torch.relu(self.up(x)))

    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp_shard",))
    plain = nn.Sequential(*(Block() for _ in range(4)))
    adamw = torch.optim.AdamW(plain.parameters())
    manager = CheckpointManager(tmp_path)
    entered: dict[str, set[str]] = {}
    with Profile(lambda file: bool(path_in_lamina(file))) as profile:

        def run(stage: str, call: Callable[[], object]) -> object:
            with profile.walk() as walk:
                result = call()
            named = {f"{path_in_lamina(f.file)}:{f.name}" for f in walk.calls}
            entered[stage] = {name.replace("<locals>.", "") for name in named}
            return result

        model, optimizer = run(
            "shard",
            lambda: fully_shard(
                plain, adamw, device_mesh=mesh, fsdp_unit_modules=[Block], zero_dp_strategy=3
            ),
        )
        for _ in range(2):  # the first step learns the order of units
            loss = run("forward", lambda: model(torch.randn(4, 8)).square().mean())
            run("backward", loss.backward)
            run("finalize", lambda: finalize_grads(model, mesh))
            run("clip", lambda: clip_grad_norm(model, 1.0, mesh))
            run("step", optimizer.step)
            optimizer.zero_grad()
        run("save", lambda: manager.save(1, {"model": model, "optimizer": optimizer}))
        run("restore", lambda: manager.restore({"model": model, "optimizer": optimizer}))
    return entered


@pytest.mark.ranks(2)
def test_every_function_that_a_page_names_is_entered_in_its_stage(ranks, tmp_path):
    import torch.distributed as dist

    entered = entered_by_stage(tmp_path, ranks.world_size)
    others: list[dict[str, set[str]]] = [{} for _ in range(ranks.world_size)]
    dist.all_gather_object(others, entered)  # what commits a checkpoint is on the first rank only
    entered = {stage: set.union(*(one[stage] for one in others)) for stage in STAGES}
    wrong = [
        f"{page}, {stage}: {name} is not entered"
        for page in PAGES
        for stage, named in stages_of((ROOT / page).read_text()).items()
        for name in sorted(named - entered[stage])
    ]
    assert not wrong, "\n" + "\n".join(wrong)


def test_the_walkthrough_goes_through_every_stage():
    named = stages_of((ROOT / "docs/walkthrough.md").read_text())
    assert tuple(named) == STAGES
    assert all(named.values())


def test_the_reader_of_pages_sees_stages_and_functions():
    page = "`a.py:f`\n<!-- stage: one -->\nin `x/b.py:C.g`, then\n<!-- stage: two -->\n`c.py:h`"
    assert stages_of(page) == {"one": {"x/b.py:C.g"}, "two": {"c.py:h"}}
