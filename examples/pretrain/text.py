"""Where text comes from, and how it becomes tokens."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

STDLIB = "stdlib"
BYTES = "bytes"
_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


class ByteTokenizer:
    """Every byte is a token. Byte 0, which no text has, separates documents."""

    vocab_size = 256
    separator = 0  # the token between two documents

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

        self._tokenizer = Loaded.from_file(str(path))
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        names = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "[SEP]")
        found = [i for i in map(self._tokenizer.token_to_id, names) if i is not None]
        if not found:
            raise ValueError(f"{path} has no end-of-text token: none of {', '.join(names)}")
        self.separator = found[0]

    def encode(self, text: bytes) -> np.ndarray:
        """Encode without special tokens; bytes that are not UTF-8 are replaced."""
        encoded = self._tokenizer.encode(text.decode("utf-8", "replace"), add_special_tokens=False)
        return np.array(encoded.ids, dtype=np.uint32)

    def decode(self, ids: list[int]) -> str:
        """Decode ids; special tokens are left out."""
        return self._tokenizer.decode(ids)


Tokenizer = ByteTokenizer | HuggingFaceTokenizer


def load_tokenizer(name: str) -> Tokenizer:
    """Return the byte tokenizer for "bytes", else the one in a `tokenizer.json`.

    Raises:
        FileNotFoundError: there is no such file.
    """
    if name == BYTES:
        return ByteTokenizer()
    path = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
    if not path.is_file():
        raise FileNotFoundError(f"--data.tokenizer {name}: neither 'bytes' nor a tokenizer.json")
    return HuggingFaceTokenizer(path)


class Document(NamedTuple):
    """A text file: its name within the corpus (which decides whether it is held out) and place."""

    name: str
    path: Path


def find_documents(source: str, pattern: str) -> list[Document]:
    """List the text files of a source, in the order of their names.

    Args:
        source: "stdlib", a file or a directory.
        pattern: which files of a directory, as a glob, such as "**/*.txt".

    Raises:
        FileNotFoundError: there is nothing at that place.
    """
    if source == STDLIB:
        root, pattern = Path(sysconfig.get_paths()["stdlib"]), "**/*.py"
    else:
        root = Path(source)
        if root.is_file():
            return [Document(root.name, root)]
    paths = [
        path
        for path in root.glob(pattern)
        if path.is_file() and not (source == STDLIB and _SKIPPED & set(path.parts))
    ]
    if not paths:
        raise FileNotFoundError(
            f"--data.path {source}: no file matches {pattern!r} in {root}; "
            "set --data.path to text and --data.pattern to which files of it to read"
        )
    return sorted(Document(path.relative_to(root).as_posix(), path) for path in paths)


def tokens_of(documents: list[Document], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Yield the ids of every document, each followed by the separator."""
    separator = np.array([tokenizer.separator])
    for document in documents:
        yield tokenizer.encode(document.path.read_bytes())
        yield separator
