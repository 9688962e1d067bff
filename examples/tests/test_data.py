"""The order of samples, the shards, the split."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from config import DataConfig
from data import (
    ByteTokenizer,
    Windows,
    find_documents,
    held_out_batches,
    open_corpus,
    open_tokens,
    prepare,
    shuffled,
    slice_of_step,
    write_tokens,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.checkpoint import cut_batch

CPU = torch.device("cpu")


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 600), st.integers(0, 2**40), st.integers(0, 3))
def test_every_epoch_is_a_permutation_of_the_samples(size, seed, epoch):
    order = [shuffled(epoch * size + place, size, seed) for place in range(size)]
    assert sorted(order) == list(range(size))


def test_epochs_and_seeds_differ_and_the_order_is_shuffled():
    def order(epoch, seed):
        return [shuffled(epoch * 1000 + place, 1000, seed) for place in range(1000)]

    assert order(0, 1) != order(1, 1)
    assert order(0, 1) != order(0, 2)
    # Neighbours land far apart: a shuffle's mean distance is a third of the size.
    steps = np.abs(np.diff(order(0, 1)))
    assert 280 < steps.mean() < 390


@given(st.integers(0, 10_000), st.integers(0, 99), st.integers(1, 500), st.integers(12, 72))
def test_ranks_take_contiguous_slices_of_one_order(step, seed, size, batch):
    whole = slice_of_step(step, seed, size, batch, range(batch))
    for ranks in (1, 2, 3, 5, 12):
        places = [cut_batch(batch, rank, ranks)[0].samples for rank in range(ranks)]
        slices = [slice_of_step(step, seed, size, batch, mine) for mine in places]
        assert [index for part in slices for index in part] == whole


@given(
    st.lists(st.integers(0, 70), min_size=1, max_size=5).filter(lambda n: max(n) > 8),
    st.integers(1, 8),
)
def test_windows_predict_every_token_once_and_never_cross_two_parts(sizes, length):
    parts, start = [], 0
    for size in sizes:
        parts.append(np.arange(start, start + size, dtype=np.uint16))
        start += size + 1000
    windows = Windows(parts, length)
    inputs, labels = windows.batch(list(range(len(windows))), CPU)
    assert torch.equal(labels, inputs + 1)
    expected = [t for part in parts for t in part[1 : (part.size - 1) // length * length + 1]]
    assert labels.flatten().tolist() == expected


@pytest.mark.parametrize("vocab_size", [2, 256, 257, 65_536, 65_537])
def test_tokens_come_back_as_written(tmp_path, vocab_size):
    tokens = np.random.default_rng(0).integers(0, vocab_size, 1000)
    path = tmp_path / "a.npy"
    assert write_tokens(path, [tokens[:10], tokens[10:10], tokens[10:]], vocab_size) == 1000
    back = open_tokens(path)
    assert isinstance(back, np.memmap)
    assert np.array_equal(back, tokens)
    assert back.dtype.itemsize == {2: 1, 256: 1, 257: 2, 65_536: 2, 65_537: 4}[vocab_size]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.npy", "a.npy.crc32"]


def test_a_file_that_is_cut_or_holds_no_tokens_is_refused(tmp_path):
    path = tmp_path / "a.npy"
    write_tokens(path, [np.arange(100)], 256)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"no whole \.npy file"):
        open_tokens(path)
    path.write_bytes(b"some text, not tokens")
    with pytest.raises(ValueError, match=r"no whole \.npy file"):
        open_tokens(path)
    np.save(path, np.ones((2, 2)))
    with pytest.raises(ValueError, match=r"float64.*1-D unsigned integers"):
        open_tokens(path)
    with pytest.raises(ValueError, match="token 300 in a vocabulary of 256"):
        write_tokens(path, [np.array([300])], 256)


def library(root, files=50):
    for number in range(files):
        name = root / f"d{number % 3}" / f"f{number}.txt"
        name.parent.mkdir(exist_ok=True, parents=True)
        name.write_text(f"<{number}> " + "words and words. " * 20)
    return DataConfig(path=str(root), pattern="**/*.txt", held_out=0.1)


def decode(parts):
    return ByteTokenizer().decode([int(t) for part in parts for t in part])


def test_whole_documents_are_held_out_and_none_is_lost(tmp_path):
    config = library(tmp_path / "text")
    prepare(config, tmp_path / "data")
    corpus = open_corpus(config, tmp_path / "data")
    train, held_out = decode(corpus.train), decode(corpus.held_out)
    for number in range(50):
        assert (f"<{number}>" in train) != (f"<{number}>" in held_out)
    assert 2 <= held_out.count("<") <= 9


def test_held_out_documents_stay_held_out_when_others_come(tmp_path):
    config = library(tmp_path / "text")
    prepare(config, tmp_path / "one")
    library(tmp_path / "text", files=150)
    prepare(config, tmp_path / "two")
    for part in ("train", "held_out"):
        before = decode(getattr(open_corpus(config, tmp_path / "one"), part))
        after = decode(getattr(open_corpus(config, tmp_path / "two"), part))
        assert set(before.split("<")) <= set(after.split("<"))


def test_something_is_held_out_and_something_trained_on_whatever_the_fraction(tmp_path):
    for fraction in (1e-9, 1 - 1e-9):
        plain = library(tmp_path / "text", files=3)
        config = DataConfig(plain.path, plain.pattern, held_out=fraction)
        prepare(config, tmp_path / str(fraction))
        corpus = open_corpus(config, tmp_path / str(fraction))
        assert decode(corpus.train).count("<") in (1, 2)
        assert decode(corpus.train).count("<") + decode(corpus.held_out).count("<") == 3


def test_a_run_keeps_its_text_and_refuses_another(tmp_path):
    config = library(tmp_path / "text")
    prepare(config, tmp_path / "data")
    before = decode(open_corpus(config, tmp_path / "data").train)
    for path in (tmp_path / "text").rglob("*.txt"):
        path.write_text("changed")
    prepare(config, tmp_path / "data")
    assert decode(open_corpus(config, tmp_path / "data").train) == before
    with pytest.raises(ValueError, match=r"another --run\.directory"):
        prepare(DataConfig(path="elsewhere"), tmp_path / "data")


def test_one_file_holds_out_its_end(tmp_path):
    text = "".join(f"line {n}\n" for n in range(1000))
    (tmp_path / "a.txt").write_text(text)
    config = DataConfig(path=str(tmp_path / "a.txt"), held_out=0.1)
    prepare(config, tmp_path / "data")
    corpus = open_corpus(config, tmp_path / "data")
    assert decode(corpus.train) + decode(corpus.held_out) == text
    assert abs(len(decode(corpus.held_out)) / len(text) - 0.1) < 0.01


def test_files_of_tokens_are_read_as_they_are(tmp_path):
    write_tokens(tmp_path / "a.npy", [np.arange(200)], 256)
    write_tokens(tmp_path / "b.npy", [np.arange(100)], 256)
    corpus = open_corpus(DataConfig(path=str(tmp_path), held_out=0.1), tmp_path / "unused")
    assert [part.size for part in corpus.train] == [200, 70]
    assert corpus.held_out[0].tolist() == list(range(70, 100))
    write_tokens(tmp_path / "held-out-1.npy", [np.arange(7)], 256)
    corpus = open_corpus(DataConfig(path=str(tmp_path)), tmp_path / "unused")
    assert [part.size for part in corpus.train] == [200, 100]
    assert corpus.held_out[0].tolist() == list(range(7))
    write_tokens(tmp_path / "c.npy", [np.array([299])], 300)
    with pytest.raises(ValueError, match="token 299 in a vocabulary of 256"):
        open_corpus(DataConfig(path=str(tmp_path)), tmp_path / "unused")


def test_a_hugging_face_tokenizer_is_read_from_disk(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["words and words. <1> " * 50], trainer)
    made.save(str(tmp_path / "tokenizer.json"))

    plain = library(tmp_path / "text")
    config = DataConfig(plain.path, plain.pattern, str(tmp_path / "tokenizer.json"), 0.1)
    prepare(config, tmp_path / "data")
    corpus = open_corpus(config, tmp_path / "data")
    ids = [int(t) for t in corpus.train[0]]
    assert corpus.train[0].dtype == np.uint16
    documents = ids.count(corpus.tokenizer.separator)
    assert documents >= 40
    assert corpus.tokenizer.decode(ids).count("words and words. ") == documents * 20
    assert corpus.bytes_per_token > 2
    with pytest.raises(FileNotFoundError, match="neither 'bytes' nor"):
        open_corpus(DataConfig(tokenizer="gpt17"), tmp_path / "data")


def test_a_flipped_bit_is_named_with_file_and_block_when_it_is_read(tmp_path):
    write_tokens(path := tmp_path / "a.npy", [np.arange(100_000) % 50_000], 50_000)
    with open(path, "r+b") as file:  # in the third block of 64 KiB
        file.seek(-200_000 + 2 * 65536 + 77, 2)
        (byte,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 4]))
    windows = Windows([open_tokens(path)[:99_000]], 1000)
    assert windows._window(64)[0] == 64_000 % 50_000  # the first two blocks are whole
    with pytest.raises(ValueError, match=r"a\.npy is damaged: block 2 \(tokens 65536 to 98303\)"):
        windows._window(65)
    write_tokens(tmp_path / "b.npy", [np.arange(10)], 256)
    (tmp_path / "b.npy.crc32").rename(tmp_path / "a.npy.crc32")
    with pytest.raises(ValueError, match="has 1 checksums, of another file"):
        open_tokens(path)
    (tmp_path / "a.npy.crc32").unlink()  # as of `numpy.save`
    assert open_tokens(path).size == 100_000


def test_the_unigram_entropy_is_that_of_the_frequencies(tmp_path):
    write_tokens(tmp_path / "a.npy", [np.arange(4)], 256)
    write_tokens(tmp_path / "held-out.npy", [np.array([1, 1, 2, 3] * 10)], 256)
    corpus = open_corpus(DataConfig(path=str(tmp_path)), tmp_path)
    assert corpus.unigram_entropy() == pytest.approx(1.5 * np.log(2))


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_every_rank_evaluates_equally_many_batches(ranks):
    windows = Windows([np.arange(500)], 10)
    per_rank = [
        [tuple(inputs.shape) for inputs, _ in held_out_batches(windows, 300, 4, r, ranks, CPU)]
        for r in range(ranks)
    ]
    assert all(shapes == per_rank[0] for shapes in per_rank)
    assert per_rank[0]


def test_the_default_text_is_the_standard_library_without_its_tests():
    names = list(find_documents("stdlib", ""))
    assert "argparse.py" in names
    assert not any("site-packages" in name or name.startswith("test/") for name in names)
