"""The example's data: what is held out, and the order of the samples."""

from __future__ import annotations

import sys
from itertools import chain
from pathlib import Path

import pytest
import torch
from harness import run_ranks

EXAMPLE = str(Path(__file__).parents[2] / "example")


def samples(text: list[int], batch_size: int, steps: list[int]) -> list[list[list[int]]]:
    """This rank's rows of the batches of these steps, each row with its targets' last token."""
    sys.path.insert(0, EXAMPLE)
    from data import Sampler

    sampler = Sampler(torch.tensor(text, dtype=torch.int16), 4, batch_size, seed=5)
    batches = [sampler.batch(step) for step in steps]
    for batch in batches:
        assert torch.equal(batch.enc_input[:, 1:], batch.targets[:, :-1])
        assert batch.enc_length.tolist() == [4] * len(batch.enc_input)
    return [torch.cat([b.enc_input, b.targets[:, -1:]], dim=1).tolist() for b in batches]


def test_order_depends_on_the_step_alone() -> None:
    text = list(range(200))
    (forward,) = run_ranks(1, samples, text, 4, list(range(30)))
    (backward,) = run_ranks(1, samples, text, 4, list(range(29, -1, -1)))
    assert forward == backward[::-1]
    for world in (2, 4):
        parts = run_ranks(world, samples, text, 4, list(range(30)))
        joined = [list(chain.from_iterable(part[step] for part in parts)) for step in range(30)]
        assert joined == forward


def test_every_epoch_has_every_window_once() -> None:
    text = list(range(41))  # 9 windows and room for the offset
    (rows,) = run_ranks(1, samples, text, 3, list(range(6)))
    epochs = [list(chain(*rows[:3])), list(chain(*rows[3:]))]
    for epoch in epochs:
        starts = sorted(row[0] for row in epoch)
        assert [start - starts[0] for start in starts] == list(range(0, 36, 4))
        assert all(row == list(range(row[0], row[0] + 5)) for row in epoch)
    assert epochs[0] != epochs[1]


def corpus(path: str | None) -> tuple[list[int], list[int], str, str]:
    sys.path.insert(0, EXAMPLE)
    from data import load_corpus

    read = load_corpus(path)
    return read.train.tolist(), read.validation.tolist(), read.description, read.digest


def pieces(tokens: list[int]) -> set[bytes]:
    """The files in a row of tokens."""
    found, start = set(), 0
    for end, token in enumerate(tokens):
        if token == 256:
            found.add(bytes(tokens[start:end]))
            start = end + 1
    assert start == len(tokens)
    return found


def test_split_by_file(tmp_path: Path) -> None:
    texts = {f"folder{i % 3}/file{i}.txt": f"this is file {i}".encode() for i in range(40)}
    for name, content in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "copy.txt").write_bytes(b"this is file 7")
    (tmp_path / "binary").write_bytes(b"a\0b")
    (tmp_path / "empty").touch()
    (tmp_path / ".hidden").write_bytes(b"hidden")
    results = run_ranks(2, corpus, str(tmp_path))
    assert results[0] == results[1]
    train, validation = pieces(results[0][0]), pieces(results[0][1])
    assert validation
    assert len(train) + len(validation) == 40
    assert train | validation == set(texts.values())

    (tmp_path / "another").write_bytes(b"another")
    more = run_ranks(1, corpus, str(tmp_path))[0]
    assert train <= pieces(more[0])
    assert validation <= pieces(more[1])


def test_one_file_is_cut(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(bytes(range(1, 101)))
    for path in (tmp_path, tmp_path / "text"):
        train, validation, description, _ = run_ranks(1, corpus, str(path))[0]
        assert train == [*range(1, 91), 256]
        assert validation == [*range(91, 101), 256]
        assert "tenth" in description


@pytest.mark.slow
def test_standard_library() -> None:
    train, validation, description, _ = run_ranks(1, corpus, None)[0]
    assert 20 * len(train) > len(validation) > len(train) / 100
    assert "files to train on" in description
