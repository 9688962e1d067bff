"""The data: prepared once, then read in an order that is a function of (seed, step) alone.

Tokens are `.npy` files, which every rank maps into memory: opening a terabyte takes as long as
opening a kilobyte, and ranks of a machine share the pages.

The order does not depend on how many ranks there are, nor on where a run was interrupted: step s
takes samples s*B .. s*B+B-1 of an endless shuffled sequence, and the ranks cut them among
themselves, evenly or not (`lamina.checkpoint.cut_batch`). So there is no loader state to save.

Beside a file of tokens lie the checksums of its blocks. A block is compared when it is first read.
"""

from __future__ import annotations

import hashlib
import json
import sys
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from config import DataConfig
from text import Document, Tokenizer, find_documents, load_tokenizer, tokens_of

from lamina.checkpoint import shuffled

SUFFIX = ".npy"
BLOCK = 1 << 16  # bytes: reading so many costs little more than reading one window


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
            counts += np.bincount(verified(part), minlength=counts.size)
        frequencies = counts[counts > 0] / counts.sum()
        return float(-(frequencies * np.log(frequencies)).sum())


def prepare(config: DataConfig, directory: Path) -> None:
    """Tokenise the source into `directory`, once; on one rank only.

    A run keeps its tokens, so that it continues on the same text whatever happens to the source.

    Raises:
        ValueError: the directory holds another corpus.
    """
    if _tokens_given(config):
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
    parts = _split(documents, tokenizer, config.held_out)
    size = sum(
        write_tokens(directory / f"{name}{SUFFIX}", chunks, tokenizer.vocab_size)
        for name, chunks in parts.items()
    )
    text_bytes = sum(document.path.stat().st_size for document in documents)
    about = {
        "source": asdict(config),
        "documents": len(documents),
        "bytes": text_bytes,
        "bytes_per_token": text_bytes / size,
    }
    (directory / "corpus.json").write_text(json.dumps(about, indent=1))


def _split(
    documents: list[Document], tokenizer: Tokenizer, fraction: float
) -> dict[str, Iterable[np.ndarray]]:
    """Hold out whole documents, each by a hash of its own name, at least one and never all.

    Of the only document the end is held out.
    """
    if len(documents) == 1:
        tokens = np.concatenate(list(tokens_of(documents, tokenizer)))
        cut = tokens.size - max(1, round(tokens.size * fraction))
        return {"train": [tokens[:cut]], "held-out": [tokens[cut:]]}
    place = {d.name: _uniform(d.name) for d in documents}
    ranked = sorted(place, key=place.__getitem__)
    held_out = {name for name in ranked[:-1] if place[name] < fraction} or {ranked[0]}
    return {
        "train": tokens_of([d for d in documents if d.name not in held_out], tokenizer),
        "held-out": tokens_of([d for d in documents if d.name in held_out], tokenizer),
    }


def _uniform(name: str) -> float:
    """Hash a name to a number in [0, 1)."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64


def write_tokens(path: Path, chunks: Iterable[np.ndarray], vocab_size: int) -> int:
    """Write tokens as a 1-D `.npy` of the smallest dtype, and return their number.

    Chunks go to the disk as they come, so the text need not fit into memory.

    Raises:
        ValueError: a token is outside the vocabulary.
    """
    dtype = np.min_scalar_type(vocab_size - 1)
    chunked, size = path.with_suffix(".writing"), 0
    with open(chunked, "wb") as file:
        for chunk in chunks:
            check_tokens(chunk, vocab_size, "the text")
            chunk.astype(dtype).tofile(file)
            size += chunk.size
    written = np.lib.format.open_memmap(path, "w+", dtype, (size,))
    if size:
        written[:] = np.memmap(chunked, dtype, mode="r")
    written.flush()
    checksums_of(path).write_bytes(_sums(written).tobytes())
    chunked.unlink()
    return size


def check_tokens(tokens: np.ndarray, vocab_size: int, where: object) -> None:
    """Raise ValueError for a token outside the vocabulary."""
    if tokens.size and int(tokens.max()) >= vocab_size:
        raise ValueError(
            f"{where} has token {int(tokens.max())} in a vocabulary of {vocab_size}: name the "
            "--data.tokenizer that made it"
        )


def checksums_of(path: Path) -> Path:
    """The file beside a file of tokens that has the CRC-32 of each block of its data."""
    return path.with_name(f"{path.name}.crc32")


def _sums(tokens: np.ndarray) -> np.ndarray:
    data = memoryview(tokens).cast("B") if tokens.size else b""
    return np.array([zlib.crc32(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)], "<u4")


class Tokens(np.memmap):
    """Tokens of a file with checksums, or a slice of them."""

    checks: Checks | None = None

    def __array_finalize__(self, whole: object) -> None:
        super().__array_finalize__(whole)
        self.checks = getattr(whole, "checks", None)


class Checks:
    """Compares blocks of a file of tokens with their checksums, each when it is first read.

    Raises:
        ValueError: there are other checksums than of that many blocks.
    """

    def __init__(self, path: Path, tokens: np.ndarray) -> None:
        self._path, self._data = path, memoryview(tokens).cast("B") if tokens.size else b""
        self._begin, self._itemsize = tokens.ctypes.data, tokens.itemsize
        self._sums = np.fromfile(checksums_of(path), "<u4")
        self._known = np.zeros(len(self._sums), dtype=bool)
        if len(self._sums) != -(-len(self._data) // BLOCK):
            raise ValueError(
                f"{checksums_of(path)} has {len(self._sums)} checksums, of another file than "
                f"{path}: delete it if that file was meant to change"
            )

    def require(self, part: np.ndarray) -> None:
        """Compare the blocks of a part that were not read before.

        Raises:
            ValueError: one is damaged.
        """
        begin = part.ctypes.data - self._begin
        first, last = begin // BLOCK, -(-(begin + part.nbytes) // BLOCK)
        for block in first + np.flatnonzero(~self._known[first:last]):
            at = int(block) * BLOCK
            held = self._data[at : at + BLOCK]
            if zlib.crc32(held) != self._sums[block]:
                tokens = f"{at // self._itemsize} to {(at + len(held)) // self._itemsize - 1}"
                raise ValueError(
                    f"{self._path} is damaged: block {block} (tokens {tokens}) does not have its "
                    f"checksum. Write the file again, or delete {checksums_of(self._path)} to "
                    "train on it as it is"
                )
            self._known[block] = True


def verified(tokens: np.ndarray) -> np.ndarray:
    """The tokens, once their blocks have been compared with their checksums, if they have any.

    Raises:
        ValueError: a block is damaged; it names file and block.
    """
    if isinstance(tokens, Tokens) and tokens.checks is not None and tokens.size:
        tokens.checks.require(tokens)
    return np.asarray(tokens)


def open_tokens(path: Path) -> np.ndarray:
    """Map tokens into memory. What is read of them is to pass `verified`.

    Raises:
        ValueError: it is no whole `.npy` file of a 1-D array of unsigned integers, or its checksums
            are those of another file.
    """
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is no whole .npy file: {error}") from None
    if tokens.ndim != 1 or tokens.dtype.kind != "u":
        raise ValueError(f"{path} has {tokens.dtype}{tokens.shape}: 1-D unsigned integers needed")
    if checksums_of(path).exists():
        checks, tokens = Checks(path, tokens), tokens.view(Tokens)
        tokens.checks = checks
    return tokens


def _tokens_given(config: DataConfig) -> bool:
    path = Path(config.path)
    return path.suffix == SUFFIX or (path.is_dir() and any(path.glob(f"*{SUFFIX}")))


def open_corpus(config: DataConfig, directory: Path) -> Corpus:
    """Map what `prepare` made, or the files of tokens that the config names.

    Of the latter, those called held-out* are held out; without any, the end of the last is.

    Raises:
        ValueError: a file is none of tokens, or has one that the tokenizer does not have.
    """
    tokenizer = load_tokenizer(config.tokenizer)
    if not _tokens_given(config):
        about = json.loads((directory / "corpus.json").read_text())
        parts = [[open_tokens(directory / f"{name}{SUFFIX}")] for name in ("train", "held-out")]
        return Corpus(*parts, tokenizer, about["bytes_per_token"])
    given = Path(config.path)
    files = {path: open_tokens(path) for path in sorted(given.glob(f"*{SUFFIX}")) or [given]}
    for path, tokens in files.items():
        # Another tokenizer's ids show early, and reading all of a large file would take minutes.
        check_tokens(verified(tokens[: 1 << 24]), tokenizer.vocab_size, path)
    held_out = [t for path, t in files.items() if path.name.startswith("held-out")]
    train = [t for path, t in files.items() if not path.name.startswith("held-out")]
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
        return verified(self._parts[part][start : start + self.length + 1]).astype(np.int64)


def slice_of_step(step: int, seed: int, size: int, batch: int, places: Iterable[int]) -> list[int]:
    """Return the samples at some places of a step's batch.

    Args:
        step: from 0.
        seed: of the order.
        size: number of samples in the corpus.
        batch: samples per step over all ranks.
        places: in the batch, from 0.
    """
    return [shuffled(step * batch + place, size, seed) for place in places]


def held_out_batches(
    windows: Windows,
    tokens: int,
    batch: int,
    rank: int,
    ranks: int,
    device: torch.device,
    *,
    whole: bool = False,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield this rank's batches of the held-out text, equally many on every rank.

    The windows are spread evenly over the text, about `tokens` tokens in all. With `whole`
    all batches are full: the last is left out, or filled up if there is no other.
    """
    wanted = min(len(windows), max(1, tokens // windows.length))
    chosen = [k * len(windows) // wanted for k in range(wanted)]
    if wanted < ranks:  # too little text to go round: every rank takes all of it
        mine = chosen
    else:
        share = wanted // ranks
        mine = chosen[rank * share : (rank + 1) * share]
    if whole:
        mine = (mine * batch)[: max(batch, len(mine) // batch * batch)]
    for first in range(0, len(mine), batch):
        yield windows.batch(mine[first : first + batch], device)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        checksums_of(Path(name)).write_bytes(_sums(np.load(name, mmap_mode="r")).tobytes())
