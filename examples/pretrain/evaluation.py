"""Held-out loss and samples. Both are collective: every rank runs the model equally often."""

from __future__ import annotations

import torch
import torch.distributed as dist
from build import Shape, Sharded
from data import Corpus, Windows, held_out_batches
from run import Run

from lamina.collectives.engine import all_reduce_small
from lamina.mesh.engine import MeshAxis
from lamina.models import PipelineRunner, generate


class Evaluator:
    """Measures a model on text that it was not trained on."""

    def __init__(self, run: Run, model: Sharded, shape: Shape, corpus: Corpus, dp: MeshAxis):
        self.corpus, self._shape, self._model, self._dp = corpus, shape, model, dp
        self._config, self._device = run.config, run.runtime.device
        self._windows = Windows(corpus.held_out, run.config.model.sequence_length)

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Return the mean loss over the held-out text, in nats per token."""
        dp, pipelined = self._dp, isinstance(self._model, PipelineRunner)
        # A pipeline takes whole batches only, of at least a sequence per microbatch.
        passes = 1 if pipelined else len(self._config.parts(0, dp.size))
        batch = max(1, self._config.train.batch_size // dp.size // passes)
        sums = torch.zeros(2, dtype=torch.float64)  # losses, tokens
        self._model.eval()
        for inputs, labels in held_out_batches(
            self._windows, self._config.eval.tokens, batch, dp.rank, dp.size, self._device,
            whole=pipelined,
        ):  # fmt: skip
            loss = self._model(**self._shape.arguments(inputs, labels))
            sums += torch.tensor([loss.item() * labels.numel(), labels.numel()], dtype=sums.dtype)
        self._model.train()
        all_reduce_small([sums], dist.group.WORLD)
        return float(sums[0] / sums[1])

    def samples(self) -> list[tuple[str, str]]:
        """Pairs of a prompt or held-out text and what the model writes next; none of a pipeline."""
        config = self._config.eval
        if config.samples == 0 or isinstance(self._model, PipelineRunner):
            return []
        count, length = 2 * config.samples, self._windows.length
        decode, ids = self.corpus.tokenizer.decode, self.corpus.tokenizer.encode
        if config.prompt:
            prompt = torch.from_numpy(ids(config.prompt.encode()).astype("int64"))
            given = prompt.to(self._device).expand(config.samples, -1)
        else:
            chosen = [k * len(self._windows) // count for k in range(1, count, 2)]
            given = self._windows.batch(chosen, self._device)[0][:, : max(1, length // 4)]
        written = generate(
            self._model, given, config.sample_tokens, context_length=length,
            temperature=config.temperature,
            generator=torch.Generator(self._device).manual_seed(self._config.run.seed),
        )  # fmt: skip
        cut = given.shape[1]
        return [(decode(row[:cut]), decode(row[cut:])) for row in written.tolist()]
