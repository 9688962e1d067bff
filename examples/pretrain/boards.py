"""Where a run's numbers and samples go beside its own files: TensorBoard, Weights & Biases."""

from __future__ import annotations

import textwrap
import uuid
from collections.abc import Mapping
from typing import Any

from run import Run


class Boards:
    """Those that the settings ask for; on the first rank alone.

    Args:
        run: its directory and settings.
        done: steps so far; what TensorBoard has of later ones is about to be repeated.
    """

    def __init__(self, run: Run, done: int) -> None:
        self._events: Any = None
        self._wandb: Any = None
        if run.config.log.tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # here, for it takes a second

            self._events = SummaryWriter(str(run.directory / "tensorboard"), purge_step=done + 1)
        if run.config.log.wandb:
            import wandb

            name = run.directory / "wandb-id"  # a run that goes on is the same one there
            if not name.exists():
                name.write_text(uuid.uuid4().hex[:12])
            self._wandb = wandb.init(
                project=run.config.log.wandb,
                name=run.directory.name,
                id=name.read_text(),
                resume="allow",
                dir=str(run.directory),
                config=run.settings(),
            )
            # Steps are a number like others: wandb's own may not go back, as a run does.
            self._wandb.define_metric("*", step_metric="step")

    def add(self, values: Mapping[str, Any]) -> None:
        """Add the numbers and texts of a step, which is one of them."""
        for name, value in values.items() if self._events else ():
            if isinstance(value, str):  # four spaces are Markdown's sign for text as it is
                text = textwrap.indent(value, "    ", lambda line: True)
                self._events.add_text(name, text, values["step"])
            elif name != "step":
                self._events.add_scalar(name, value, values["step"])
        if self._wandb:
            self._wandb.log(values)

    def close(self) -> None:
        """Write what is left."""
        if self._events:
            self._events.close()
        if self._wandb:
            self._wandb.finish()
