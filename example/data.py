"""Real text as byte tokens: files in, batches out.

Without a path the text is the source code of the standard library of the Python that runs. A whole file goes
either to training or to validation, so that nothing of the one is in the other.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from agree import UserError, together

import bmtrain as bmt

__all__ = ["END_OF_FILE", "VOCAB_SIZE", "Batch", "Corpus", "Sampler", "load_corpus", "validation_batches"]

END_OF_FILE = 256  # the token after the 256 byte values
VOCAB_SIZE = 264  # these 257, rounded up to a multiple of 8: odd widths make slow matrix products on GPUs

# Folders of the standard library that are left out: tests, what pip installed, the character tables of `encodings`
# (so much alike that one held out would still be known) and `pydoc_data`, which is prose.
_SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data", "__pycache__"}
)
_HELD_OUT = 10  # one file in ten is for validation


@dataclass(frozen=True)
class Corpus:
    """Tokens of the training and of the validation files, each file followed by END_OF_FILE."""

    train: torch.Tensor
    validation: torch.Tensor
    description: str
    digest: str


@dataclass(frozen=True)
class Batch:
    """One rank's part of a batch.

    Args:
        enc_input: ids, ``(batch, seq_len)``.
        targets: the same, one token later.
        enc_length: tokens in each row that are not padding, ``(batch,)``.
    """

    enc_input: torch.Tensor
    targets: torch.Tensor
    enc_length: torch.Tensor


# ---------------------------------------------------------------------------------------------------- reading


def load_corpus(path: str | None = None) -> Corpus:
    """Read the text on every rank and make sure that all have read the same. Collective.

    Args:
        path: a file or a folder of text; None for the source code of the standard library.

    Raises:
        UserError: nothing usable is there.
    """
    corpus = together(lambda: _read(path), "--data")
    digest = torch.frombuffer(bytearray.fromhex(corpus.digest), dtype=torch.uint8).to(bmt.config["device"])
    digests = bmt.distributed.all_gather(digest)
    different = [rank for rank, other in enumerate(digests) if not torch.equal(other, digests[0])]
    if different:
        raise UserError(
            f"--data: expected the same text on every rank, but it differs from rank 0's on {different}"
        )
    return corpus


def _read(path: str | None) -> Corpus:
    if path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        names = [
            p for p in root.rglob("*.py") if not _SKIPPED_FOLDERS.intersection(p.relative_to(root).parts)
        ]
    else:
        root = Path(path)
        if not root.exists():
            raise UserError(f"--data: expected a file or a folder of text, but {path} does not exist")
        if root.is_file():
            return _cut_one_file(root)
        names = [p for p in root.rglob("*") if p.is_file() and not _is_hidden(p.relative_to(root))]
    files: dict[str, bytes] = {}
    seen: set[bytes] = set()
    # Sorted, so that the order of the text does not depend on the file system.
    for relative, name in sorted((p.relative_to(root).as_posix(), p) for p in names):
        text = name.read_bytes()
        digest = hashlib.sha256(text).digest()
        if text and b"\0" not in text[:4096] and digest not in seen:  # neither binary files nor copies
            seen.add(digest)
            files[relative] = text
    if not files:
        raise UserError(f"--data: expected text, but no file in {root} is readable text that is not empty")
    if len(files) == 1:
        return _cut_one_file(root / next(iter(files)))
    return _split_by_file(files, f"Python source code in {root}" if path is None else str(root))


def _is_hidden(relative: Path) -> bool:
    return any(part.startswith(".") for part in relative.parts)


def _split_by_file(files: dict[str, bytes], where: str) -> Corpus:
    """A file's name alone says where it goes, so that adding files moves none across."""
    hashes = {name: int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") for name in files}
    held_out = {name for name, value in hashes.items() if value % _HELD_OUT == 0}
    if not held_out or len(held_out) == len(files):  # can only happen with few files
        held_out = {min(files, key=hashes.__getitem__)}
    train = [text for name, text in files.items() if name not in held_out]
    validation = [text for name, text in files.items() if name in held_out]
    return _corpus(train, validation, f"{where}: {len(train)} files to train on, {len(validation)} held out")


def _cut_one_file(path: Path) -> Corpus:
    """There is no other file to hold out: the last tenth of this one is."""
    text = path.read_bytes()
    if not text:
        raise UserError(f"--data: expected text, but {path} is empty")
    cut = len(text) - len(text) // _HELD_OUT
    return _corpus([text[:cut]], [text[cut:]], f"{path}: its last tenth is held out")


def _corpus(train: list[bytes], validation: list[bytes], description: str) -> Corpus:
    digest = hashlib.sha256()
    for texts in (train, validation):
        digest.update(len(texts).to_bytes(8, "big"))
        for text in texts:
            digest.update(len(text).to_bytes(8, "big"))
            digest.update(text)
    return Corpus(_tokens(train), _tokens(validation), description, digest.hexdigest())


def _tokens(texts: list[bytes]) -> torch.Tensor:
    pieces = []
    for text in texts:
        if text:
            # int16 holds every id, in a quarter of the memory of the int64 that an embedding looks up.
            pieces.append(torch.frombuffer(bytearray(text), dtype=torch.uint8).to(torch.int16))
        pieces.append(torch.tensor([END_OF_FILE], dtype=torch.int16))
    return torch.cat(pieces)


# --------------------------------------------------------------------------------------------------- batching


class Sampler:
    """The order of the training text: a function of the seed and the step alone.

    The text is cut into windows of ``seq_len`` tokens, each epoch from another offset and in another order.
    Step ``s`` takes windows ``s * batch_size`` to ``(s + 1) * batch_size`` of that endless sequence and each
    rank its slice of them: neither an interruption nor the number of ranks changes what a step sees.

    Args:
        tokens: the training text.
        seq_len: tokens in a sample.
        batch_size: samples in a step, over all ranks; a multiple of their number.
        seed: of the order.

    Raises:
        UserError: the text is too short, or the batch cannot be divided among the ranks.
    """

    def __init__(self, tokens: torch.Tensor, seq_len: int, batch_size: int, seed: int) -> None:
        self.tokens = tokens
        self.seq_len = seq_len
        self.batch_size = batch_size
        self.seed = seed
        self.num_windows = (len(tokens) - 1) // seq_len - 1  # one less than fit leaves room for the offset
        if self.num_windows < 1:
            raise UserError(
                f"--data: expected at least {2 * seq_len + 1} tokens to train on with --seq-len {seq_len}, "
                f"got {len(tokens)}"
            )
        self._mine = _share_of_rank(batch_size)
        self._epoch = -1
        self._starts = torch.empty(0, dtype=torch.int64)

    def batch(self, step: int) -> Batch:
        """This rank's part of the batch of ``step``, counted from 0, on the run device."""
        first = step * self.batch_size
        return _batch(self.tokens, [self._start(first + i) for i in self._mine], self.seq_len)

    def _start(self, index: int) -> int:
        epoch, window = divmod(index, self.num_windows)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            offset = int(torch.randint(self.seq_len, (1,), generator=generator))
            self._starts = torch.randperm(self.num_windows, generator=generator) * self.seq_len + offset
            self._epoch = epoch
        return int(self._starts[window])


def validation_batches(tokens: torch.Tensor, seq_len: int, batch_size: int, num_batches: int) -> list[Batch]:
    """This rank's part of at most ``num_batches`` fixed batches, spread evenly over the validation text.

    Raises:
        UserError: the text does not fill one batch, or the batch cannot be divided among the ranks.
    """
    num_windows = (len(tokens) - 1) // seq_len
    num_batches = min(num_batches, num_windows // batch_size)
    if num_batches < 1:
        raise UserError(
            f"--data: expected at least {batch_size * seq_len + 1} held-out tokens with --batch-size "
            f"{batch_size} and --seq-len {seq_len}, got {len(tokens)}"
        )
    stride = num_windows // (num_batches * batch_size) * seq_len
    mine = _share_of_rank(batch_size)
    return [
        _batch(tokens, [(number * batch_size + i) * stride for i in mine], seq_len)
        for number in range(num_batches)
    ]


def _share_of_rank(batch_size: int) -> range:
    # The ranks of a tensor-parallel or sequence group work on the same samples: the batch is divided among the groups.
    part, parts = bmt.config["dp_rank"], bmt.config["dp_size"]
    if batch_size < 1 or batch_size % parts:
        raise UserError(
            f"--batch-size: expected a multiple of {parts}, the number of ranks, got {batch_size}"
        )
    share = batch_size // parts
    least = bmt.config["micros"] if bmt.config["pipe_enabled"] else 1  # micro-batches of all stages' samples
    if share * bmt.config["pipe_size"] < least:
        raise UserError(
            f"--batch-size: expected at least {parts * least // bmt.config['pipe_size']}, a sample for each of "
            f"{least} micro-batches, got {batch_size}"
        )
    return range(part * share, (part + 1) * share)


def _batch(tokens: torch.Tensor, starts: list[int], seq_len: int) -> Batch:
    device = bmt.config["device"]
    windows = torch.stack([tokens[start : start + seq_len + 1] for start in starts]).long().to(device)
    lengths = torch.full((len(starts),), seq_len, device=device)
    return Batch(windows[:, :-1].contiguous(), windows[:, 1:].contiguous(), lengths)
