"""Held-out loss and samples. Both are collective: every rank runs the model equally often."""

from __future__ import annotations

import torch
import torch.distributed as dist
from build import Shape, Sharded
from config import Config
from data import Corpus, Windows, held_out_batches

from lamina.collectives.engine import all_reduce_small
from lamina.mesh import Runtime
from lamina.mesh.engine import MeshAxis
from lamina.models import PipelineRunner, generate


class Evaluator:
    """Measures a model on text that it was not trained on."""

    def __init__(
        self,
        model: Sharded,
        shape: Shape,
        corpus: Corpus,
        config: Config,
        dp: MeshAxis,
        runtime: Runtime,
    ) -> None:
        self.corpus, self._shape = corpus, shape
        self._model, self._config, self._dp, self._device = model, config, dp, runtime.device
        self._windows = Windows(corpus.held_out, config.model.sequence_length)

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Return the mean loss over the held-out text, in nats per token."""
        train = self._config.train
        pipelined = isinstance(self._model, PipelineRunner)
        # A pipeline takes whole batches only, of at least a sequence per microbatch.
        passes = 1 if pipelined else len(self._config.parts(0, self._dp.size))
        batch = max(1, train.batch_size // self._dp.size // passes)
        total, tokens = 0.0, 0
        self._model.eval()
        for inputs, labels in held_out_batches(
            self._windows,
            self._config.eval.tokens,
            batch,
            self._dp.rank,
            self._dp.size,
            self._device,
            whole=pipelined,
        ):
            loss = self._model(**self._shape.arguments(inputs, labels))
            total += loss.item() * labels.numel()
            tokens += labels.numel()
        self._model.train()
        sums = torch.tensor([total, tokens], dtype=torch.float64)
        all_reduce_small([sums], dist.group.WORLD)
        return float(sums[0] / sums[1])

    def samples(self) -> list[tuple[str, str]]:
        """Let the model continue pieces of held-out text; a pipeline cannot (no samples).

        Returns:
            Pairs of what was given and what the model wrote.
        """
        length, count = self._config.model.sequence_length, self._config.eval.samples
        if count == 0 or isinstance(self._model, PipelineRunner):
            return []
        chosen = [(2 * k + 1) * len(self._windows) // (2 * count) for k in range(count)]
        given, _ = self._windows.batch(chosen, self._device)
        given = given[:, : max(1, length // 4)]
        generator = torch.Generator(self._device).manual_seed(self._config.run.seed)
        with self._model.unsharded():
            written = generate(
                self._model,
                given,
                self._config.eval.sample_tokens,
                temperature=self._config.eval.temperature,
                context_length=length,
                generator=generator,
            )
        decode = self.corpus.tokenizer.decode
        return [
            (decode(row[: given.shape[1]].tolist()), decode(row[given.shape[1] :].tolist()))
            for row in written
        ]
