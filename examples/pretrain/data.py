"""The data: prepared once, then read in an order that is a function of (seed, step) alone.

The order does not depend on how many ranks there are, nor on where a run was interrupted: step s
takes samples s*B .. s*B+B-1 of an endless shuffled sequence, and rank r of R takes the r-th
contiguous R-th of them. So there is no loader state to save.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from config import DataConfig
from shards import SUFFIX, open_shard, write_shard
from text import Document, Tokenizer, find_documents, load_tokenizer, tokens_of

from lamina.checkpoint import shuffled


@dataclass(frozen=True)
class Corpus:
    """Tokens to train on and tokens held out.

    Attributes:
        train: 1-D arrays of tokens, mapped into memory.
        held_out: likewise.
        tokenizer: of both.
        bytes_per_token: of the text, for comparing tokenizers.
    """

    train: list[np.ndarray]
    held_out: list[np.ndarray]
    tokenizer: Tokenizer
    bytes_per_token: float

    @property
    def tokens(self) -> int:
        """Number of training tokens."""
        return sum(part.size for part in self.train)

    def unigram_entropy(self) -> float:
        """Entropy of the held-out text's token frequencies, in nats per token.

        It is what the best guess without any context costs: a model that has learned nothing but
        frequencies has this loss.
        """
        counts = np.zeros(self.tokenizer.vocab_size, dtype=np.int64)
        for part in self.held_out:
            counts += np.bincount(part, minlength=counts.size)
        frequencies = counts[counts > 0] / counts.sum()
        return float(-(frequencies * np.log(frequencies)).sum())


def prepare(config: DataConfig, directory: Path) -> None:
    """Tokenise the source into shards in `directory`, once; on one rank only.

    A run keeps its shards, so that it continues on the same text whatever happens to the source.

    Raises:
        ValueError: the directory holds another corpus.
    """
    if _shards_given(config):
        return
    if (directory / "corpus.json").exists():
        made_of = json.loads((directory / "corpus.json").read_text())["source"]
        if made_of != asdict(config):
            raise ValueError(
                f"{directory} was made of {made_of}, now --data asks for {asdict(config)}: "
                "give the same, or another --run.directory"
            )
        return
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(config.tokenizer)
    documents = find_documents(config.path, config.pattern)
    if len(documents) == 1:
        sizes = _split_one(documents[0], tokenizer, config.held_out, directory)
    else:
        sizes = _split_many(documents, tokenizer, config.held_out, directory)
    text_bytes = sum(document.path.stat().st_size for document in documents)
    about = {
        "source": asdict(config),
        "documents": len(documents),
        "bytes": text_bytes,
        "bytes_per_token": text_bytes / sum(sizes),
    }
    (directory / "corpus.json").write_text(json.dumps(about, indent=1))


def _split_many(
    documents: list[Document], tokenizer: Tokenizer, fraction: float, directory: Path
) -> list[int]:
    """Hold out whole documents, each by a hash of its own name, at least one and never all."""
    place = {d.name: _uniform(d.name) for d in documents}
    ranked = sorted(place, key=place.__getitem__)
    held_out = {name for name in ranked[:-1] if place[name] < fraction} or {ranked[0]}
    parts = {
        "train": [d for d in documents if d.name not in held_out],
        "held-out": [d for d in documents if d.name in held_out],
    }
    return [
        write_shard(
            directory / f"{name}{SUFFIX}", tokens_of(part, tokenizer), tokenizer.vocab_size
        ).tokens
        for name, part in parts.items()
    ]


def _uniform(name: str) -> float:
    """Hash a name to a number in [0, 1)."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64


def _split_one(
    document: Document, tokenizer: Tokenizer, fraction: float, directory: Path
) -> list[int]:
    """Hold out the end of the only document."""
    tokens = np.concatenate(list(tokens_of([document], tokenizer)))
    cut = tokens.size - max(1, round(tokens.size * fraction))
    parts = {"train": tokens[:cut], "held-out": tokens[cut:]}
    return [
        write_shard(directory / f"{name}{SUFFIX}", [part], tokenizer.vocab_size).tokens
        for name, part in parts.items()
    ]


def _shards_given(config: DataConfig) -> bool:
    path = Path(config.path)
    return path.suffix == SUFFIX or (path.is_dir() and any(path.glob(f"*{SUFFIX}")))


def open_corpus(config: DataConfig, directory: Path) -> Corpus:
    """Map what `prepare` made, or the shards that the config names.

    Of shards, those called held-out* are held out; without any, the end of the last shard is.

    Raises:
        ValueError: shards of different vocabularies, or a tokenizer of another.
    """
    tokenizer = load_tokenizer(config.tokenizer)
    if not _shards_given(config):
        about = json.loads((directory / "corpus.json").read_text())
        return Corpus(
            [open_shard(directory / f"train{SUFFIX}")[1]],
            [open_shard(directory / f"held-out{SUFFIX}")[1]],
            tokenizer,
            about["bytes_per_token"],
        )
    given = Path(config.path)
    paths = [given] if given.is_file() else sorted(given.glob(f"*{SUFFIX}"))
    shards = {path: open_shard(path) for path in paths}
    for path, (header, _) in shards.items():
        if header.vocab_size != tokenizer.vocab_size:
            raise ValueError(
                f"{path} has a vocabulary of {header.vocab_size}, the tokenizer "
                f"{config.tokenizer!r} one of {tokenizer.vocab_size}: name the one that made it"
            )
    held_out = [t for path, (_, t) in shards.items() if path.name.startswith("held-out")]
    train = [t for path, (_, t) in shards.items() if not path.name.startswith("held-out")]
    if not held_out:
        cut = train[-1].size - max(1, round(sum(t.size for t in train) * config.held_out))
        train, held_out = [*train[:-1], train[-1][:cut]], [train[-1][cut:]]
    return Corpus(train, held_out, tokenizer, bytes_per_token=float("nan"))


class Windows:
    """Non-overlapping windows of a length over several arrays; a window never crosses two.

    Window k of an array is its tokens k*length .. k*length+length, one more than the length: the
    last token of one window is the first of the next, so every token is predicted once.
    """

    def __init__(self, parts: list[np.ndarray], length: int) -> None:
        self.length = length
        self._parts = parts
        self._ends = np.cumsum([max(0, (part.size - 1) // length) for part in parts])
        if len(self) == 0:
            raise ValueError(
                f"the text has {sum(p.size for p in parts)} tokens: too few for one window of "
                f"{length + 1}; lower --model.sequence-length or take more text"
            )

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def batch(self, indices: list[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and labels, int64 [batch, length] each; labels are one token further."""
        rows = np.stack([self._window(index) for index in indices])
        tokens = torch.from_numpy(rows).to(device, non_blocking=True)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def _window(self, index: int) -> np.ndarray:
        part = int(np.searchsorted(self._ends, index, side="right"))
        first = index - (int(self._ends[part - 1]) if part else 0)
        start = first * self.length
        return self._parts[part][start : start + self.length + 1].astype(np.int64)


def slice_of_step(step: int, seed: int, size: int, batch: int, rank: int, ranks: int) -> list[int]:
    """Return the samples that one rank takes in one step.

    Args:
        step: from 0.
        seed: of the order.
        size: number of samples in the corpus.
        batch: samples per step over all ranks; a multiple of `ranks`.
        rank: place among the data-parallel ranks.
        ranks: how many there are.
    """
    share = batch // ranks
    first = step * batch + rank * share
    return [shuffled(position, size, seed) for position in range(first, first + share)]


def held_out_batches(
    windows: Windows, tokens: int, batch: int, rank: int, ranks: int, device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield this rank's batches of the held-out text, equally many on every rank.

    The windows are spread evenly over the text, about `tokens` tokens in all.
    """
    wanted = min(len(windows), max(1, tokens // windows.length))
    chosen = [k * len(windows) // wanted for k in range(wanted)]
    if wanted < ranks:  # too little text to go round: every rank takes all of it
        mine = chosen
    else:
        share = wanted // ranks
        mine = chosen[rank * share : (rank + 1) * share]
    for first in range(0, len(mine), batch):
        yield windows.batch(mine[first : first + batch], device)
