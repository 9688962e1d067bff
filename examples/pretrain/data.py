"""The data: prepared once, then read in an order that is a function of (seed, step) alone.

Tokens are `.npy` files, which every rank maps into memory: opening a terabyte takes as long as
opening a kilobyte, and ranks of a machine share the pages. Beside a file of tokens lie the
checksums of its blocks. A block is compared when it is first read.

The order does not depend on how many ranks there are, nor on where a run was interrupted: step s
takes samples s*B .. s*B+B-1 of an endless shuffled sequence, and the ranks cut them among
themselves, evenly or not (`lamina.checkpoint.cut_batch`). So there is no loader state to save.
"""

from __future__ import annotations

import hashlib
import json
import sys
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from build import Shape
from config import DataConfig
from run import Run

from lamina.checkpoint import BatchPart, shuffled
from lamina.mesh import ParallelMesh

BLOCK = 1 << 16  # bytes: reading so many costs little more than reading one window
_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


class ByteTokenizer:
    """Every byte is a token. Byte 0, which no text has, separates documents."""

    vocab_size, separator = 256, 0

    def encode(self, text: bytes) -> np.ndarray:
        """Return the bytes themselves."""
        return np.frombuffer(text, dtype=np.uint8)

    def decode(self, ids: list[int]) -> str:
        """Decode UTF-8; what is not UTF-8 becomes a replacement character."""
        return bytes(i for i in ids if 0 < i < 256).decode("utf-8", errors="replace")


class HuggingFaceTokenizer:
    """A `tokenizer.json` from disk, as the `tokenizers` library writes it."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as Loaded

        loaded = Loaded.from_file(str(path))
        self.vocab_size, self.decode = loaded.get_vocab_size(with_added_tokens=True), loaded.decode
        self._encode = loaded.encode
        names = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "[SEP]")
        found = [i for i in map(loaded.token_to_id, names) if i is not None]
        if not found:
            raise ValueError(f"{path} has no end-of-text token: none of {', '.join(names)}")
        self.separator = found[0]

    def encode(self, text: bytes) -> np.ndarray:
        """Encode without special tokens; bytes that are not UTF-8 are replaced."""
        encoded = self._encode(text.decode("utf-8", "replace"), add_special_tokens=False)
        return np.array(encoded.ids, dtype=np.uint32)


Tokenizer = ByteTokenizer | HuggingFaceTokenizer


def load_tokenizer(name: str) -> Tokenizer:
    """Return the byte tokenizer for "bytes", else the one in a `tokenizer.json`."""
    if name == "bytes":
        return ByteTokenizer()
    path = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
    if not path.is_file():
        raise FileNotFoundError(f"--data.tokenizer {name}: neither 'bytes' nor a tokenizer.json")
    return HuggingFaceTokenizer(path)


def find_documents(source: str, pattern: str) -> dict[str, Path]:
    """Find the text files of "stdlib", of a file, or of a directory (those that match the glob).

    Returns:
        The path of each by its name within the source, which decides whether it is held out.

    Raises:
        FileNotFoundError: there is nothing at that place.
    """
    root = Path(source)
    if root.is_file():
        return {root.name: root}
    found: Iterable[Path]
    if source == "stdlib":
        root, pattern, skipped = Path(sysconfig.get_paths()["stdlib"]), "**/*.py", _SKIPPED
        # All that was ever installed lies beneath it too, and need not be listed.
        kept = (path for path in root.iterdir() if path.is_dir() and path.name not in skipped)
        found = chain(root.glob("*.py"), *(path.glob(pattern) for path in kept))
    else:
        found, skipped = root.glob(pattern), set()
    paths = [p for p in found if p.is_file() and not skipped & {*p.relative_to(root).parts}]
    if not paths:
        raise FileNotFoundError(
            f"--data.path {source}: no file matches {pattern!r} in {root}; "
            "set --data.path to text and --data.pattern to which files of it to read"
        )
    return dict(sorted((path.relative_to(root).as_posix(), path) for path in paths))


def _tokens_of(documents: Iterable[Path], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Yield the ids of every document, each followed by the separator."""
    for path in documents:
        yield tokenizer.encode(path.read_bytes())
        yield np.array([tokenizer.separator])


@dataclass(frozen=True)
class Corpus:
    """Tokens to train on and tokens held out: 1-D arrays, mapped into memory."""

    train: list[np.ndarray]
    held_out: list[np.ndarray]
    tokenizer: Tokenizer
    bytes_per_token: float  # of the text, for comparing tokenizers

    def unigram_entropy(self) -> float:
        """Entropy of the held-out text's token frequencies, in nats per token.

        It is what the best guess without any context costs: a model that has learned nothing but
        frequencies has this loss.
        """
        size = self.tokenizer.vocab_size
        counts = sum(np.bincount(verified(part), minlength=size) for part in self.held_out)
        frequencies = counts[counts > 0] / counts.sum()
        return float(-(frequencies * np.log(frequencies)).sum())


def prepare(config: DataConfig, directory: Path) -> None:
    """Tokenise the source into `directory`, once; on one rank only.

    A run keeps its tokens, so that it continues on the same text whatever happens to the source.
    """
    about = directory / "corpus.json"
    if _token_files(config):
        return
    if about.exists():
        if (made_of := json.loads(about.read_text())["source"]) != asdict(config):
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
        write_tokens(directory / f"{name}.npy", chunks, tokenizer.vocab_size)
        for name, chunks in parts.items()
    )
    per_token = sum(path.stat().st_size for path in documents.values()) / size
    about.write_text(json.dumps({"source": asdict(config), "bytes_per_token": per_token}, indent=1))


def _split(
    documents: dict[str, Path], tokenizer: Tokenizer, fraction: float
) -> dict[str, Iterable[np.ndarray]]:
    """Hold out whole documents, each by a hash of its own name, at least one and never all.

    Of the only document the end is held out.
    """
    if len(documents) == 1:
        tokens = np.concatenate(list(_tokens_of(documents.values(), tokenizer)))
        cut = tokens.size - max(1, round(tokens.size * fraction))
        return {"train": [tokens[:cut]], "held-out": [tokens[cut:]]}
    hashes = {name: hashlib.sha256(name.encode()).digest()[:8] for name in documents}
    first, *ranked = sorted(documents, key=hashes.__getitem__)
    below = {name for name in ranked[:-1] if int.from_bytes(hashes[name]) / 2**64 < fraction}
    chosen = {"train": documents.keys() - below - {first}, "held-out": below | {first}}
    return {
        part: _tokens_of([documents[name] for name in documents if name in names], tokenizer)
        for part, names in chosen.items()
    }


def write_tokens(path: Path, chunks: Iterable[np.ndarray], vocab_size: int) -> int:
    """Write tokens as a 1-D `.npy` of the smallest dtype, and return their number.

    Chunks go to the disk as they come, so the text need not fit into memory.
    """
    dtype, size = np.min_scalar_type(vocab_size - 1), 0
    about = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False}
    with open(path, "wb") as file:
        np.lib.format.write_array_header_1_0(file, about | {"shape": (0,)})
        for chunk in chunks:
            _check_tokens(chunk, vocab_size, "the text")
            chunk.astype(dtype).tofile(file)
            size += chunk.size
        file.seek(0)  # numpy leaves room for the digits of any size
        np.lib.format.write_array_header_1_0(file, about | {"shape": (size,)})
    write_checksums(path)
    return size


def _check_tokens(tokens: np.ndarray, vocab_size: int, where: object) -> None:
    if tokens.size and int(tokens.max()) >= vocab_size:
        raise ValueError(
            f"{where} has token {int(tokens.max())} in a vocabulary of {vocab_size}: name the "
            "--data.tokenizer that made it"
        )


def checksums_of(path: Path) -> Path:
    """The file beside a file of tokens that has the CRC-32 of each block of its data."""
    return path.with_name(f"{path.name}.crc32")


def write_checksums(path: Path) -> None:
    """Write the checksums of a file of tokens."""
    data = np.load(path, mmap_mode="r").view(np.uint8)
    sums = [zlib.crc32(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)]
    checksums_of(path).write_bytes(np.array(sums, "<u4").tobytes())


class Tokens(np.memmap):
    """Tokens of a file with checksums, or a slice of them."""

    checks: Checks | None = None

    def __array_finalize__(self, whole: object) -> None:
        super().__array_finalize__(whole)
        self.checks = getattr(whole, "checks", None)


class Checks:
    """Compares blocks of a file of tokens with their checksums, each when it is first read."""

    def __init__(self, path: Path, tokens: np.ndarray) -> None:
        self._path, self._data, self._itemsize = path, tokens.view(np.uint8), tokens.itemsize
        self._begin, self._sums = tokens.ctypes.data, np.fromfile(checksums_of(path), "<u4")
        self._known = np.zeros(len(self._sums), dtype=bool)
        if len(self._sums) != -(-len(self._data) // BLOCK):
            raise ValueError(
                f"{checksums_of(path)} has {len(self._sums)} checksums, of another file than "
                f"{path}: delete it if that file was meant to change"
            )

    def require(self, part: np.ndarray) -> None:
        """Compare the blocks of a part that were not read before."""
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
    """The tokens, once their blocks have been compared with their checksums, if they have any."""
    if isinstance(tokens, Tokens) and tokens.checks is not None and tokens.size:
        tokens.checks.require(tokens)
    return np.asarray(tokens)


def open_tokens(path: Path) -> np.ndarray:
    """Map tokens into memory. What is read of them is to pass `verified`."""
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


def _token_files(config: DataConfig) -> list[Path]:
    path = Path(config.path)
    return [path] if path.suffix == ".npy" else sorted(path.glob("*.npy"))


def open_corpus(config: DataConfig, directory: Path) -> Corpus:
    """Map what `prepare` made, or the files of tokens that the config names.

    Of the latter, those called held-out* are held out; without any, the end of the last is.
    """
    tokenizer, given = load_tokenizer(config.tokenizer), _token_files(config)
    if not given:
        about = json.loads((directory / "corpus.json").read_text())
        parts = [[open_tokens(directory / f"{name}.npy")] for name in ("train", "held-out")]
        return Corpus(*parts, tokenizer, about["bytes_per_token"])
    train, held_out = [], []
    for path in given:
        tokens = open_tokens(path)
        # Another tokenizer's ids show early, and reading all of a large file would take minutes.
        _check_tokens(verified(tokens[: 1 << 24]), tokenizer.vocab_size, path)
        (held_out if path.name.startswith("held-out") else train).append(tokens)
    if not held_out:
        last = train.pop()
        share = sum(part.size for part in [*train, last]) * config.held_out
        cut = last.size - max(1, round(share))
        train, held_out = [*train, last[:cut]], [last[cut:]]
    return Corpus(train, held_out, tokenizer, bytes_per_token=float("nan"))


class Windows:
    """Non-overlapping windows of a length over several arrays; a window never crosses two.

    Window k of an array is its tokens k*length .. k*length+length, one more than the length: the
    last token of one window is the first of the next, so every token is predicted once.
    """

    def __init__(self, parts: list[np.ndarray], length: int) -> None:
        self.length, self._parts = length, parts
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
        start = (index - (int(self._ends[part - 1]) if part else 0)) * self.length
        return verified(self._parts[part][start : start + self.length + 1]).astype(np.int64)


def slice_of_step(step: int, seed: int, size: int, batch: int, places: Iterable[int]) -> list[int]:
    """Return the samples at some places of the batch of a step, both from 0.

    There are `size` samples in the corpus and `batch` in a step of all ranks.
    """
    return [shuffled(step * batch + place, size, seed) for place in places]


class Batch(NamedTuple):
    """What this rank takes of a batch: the samples of its parts, one after the other."""

    parts: list[BatchPart]
    arguments: dict[str, torch.Tensor]  # of the model

    def passes(self) -> Iterator[tuple[BatchPart, dict[str, torch.Tensor]]]:
        """Each part with its samples."""
        sizes = [len(part.samples) for part in self.parts]
        cut = [tensor.split(sizes) for tensor in self.arguments.values()]
        for part, *tensors in zip(self.parts, *cut, strict=True):
            yield part, dict(zip(self.arguments, tensors, strict=True))


def read_batch(run: Run, samples: Windows, shape: Shape, mesh: ParallelMesh, number: int) -> Batch:
    """Read this rank's share of a batch; batches are counted from 0."""
    parts = run.config.parts(mesh.axis("dp").rank, mesh.axis("dp").size)
    places = [place for part in parts for place in part.samples]
    seed, size = run.config.run.seed, run.config.train.batch_size
    mine = slice_of_step(number, seed, len(samples), size, places)
    return Batch(parts, shape.arguments(*samples.batch(mine, run.runtime.device)))


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
    mine = [k * len(windows) // wanted for k in range(wanted)]
    if share := wanted // ranks:  # else too little text to go round: every rank takes all of it
        mine = mine[rank * share : (rank + 1) * share]
    if whole:
        mine = (mine * batch)[: max(batch, len(mine) // batch * batch)]
    for first in range(0, len(mine), batch):
        yield windows.batch(mine[first : first + batch], device)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        write_checksums(Path(name))
