"""The same weights under the names and in the shapes of another layout."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..errors import UnreadableFileError
from .layouts import LAYOUTS, Layout, Slot, recognise
from .sources import Source

__all__ = ["Relaid"]


class _Piece(NamedTuple):
    """Rows of a tensor of the source, or a whole one, perhaps to be transposed."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]  # of the piece, not transposed
    begin: int | None = None  # row; None for the whole tensor
    is_transposed: bool = False


class Relaid(Source):
    """A source in another layout; each tensor is made when it is read.

    Args:
        source: the weights, in any layout of the same family.
        target: a name of :data:`LAYOUTS`.

    Raises:
        UnreadableFileError: the source is of no known layout, or of one that cannot become the target.
    """

    def __init__(self, source: Source, target: str) -> None:
        layout = LAYOUTS[target]
        given, actual = recognise(source.order)
        if given.family != layout.family:
            raise UnreadableFileError(
                f"the source is a {given.family}, and {target} is for a {layout.family}"
            )
        self._source = source
        self._pieces: dict[str, list[_Piece]] = {}
        self.table, self.ties, self.order = {}, {}, []
        parts = dict(_parts(source, given, actual))
        known: dict[tuple[_Piece, ...], str] = {}  # pieces that already have a name
        used: set[str] = set()
        for name, slot in _numbered(layout, _count_layers(actual)):
            there = [part for part in slot.parts if part in parts]
            if not there and not slot.is_required:
                continue
            if len(there) != len(slot.parts):
                absent = next(part for part in slot.parts if part not in parts)
                raise UnreadableFileError(f"{target} needs {name}, and the source has no {absent}")
            used.update(slot.parts)
            pieces = tuple(
                parts[part]._replace(is_transposed=parts[part].is_transposed != slot.is_transposed)
                for part in slot.parts
            )
            first = known.setdefault(pieces, name)
            if first == name:
                self.table[name] = _described(name, slot, pieces)
                self._pieces[name] = list(pieces)
            elif layout.has_tied_head:
                self.ties[name] = first
            else:
                continue
            self.order.append(name)
        for part in parts.keys() - used:
            raise UnreadableFileError(f"{target} has no place for {part}")

    def read(self, name: str) -> torch.Tensor:
        pieces = self._pieces[name]
        if len(pieces) == 1:
            return self._read(pieces[0])
        dtype, shape = self.table[name]
        value = torch.empty(shape, dtype=dtype, device="cpu")
        row = 0
        for piece in pieces:
            value[row : row + piece.shape[0]] = self._read(piece)
            row += piece.shape[0]
        return value

    def _read(self, piece: _Piece) -> torch.Tensor:
        if piece.begin is None:
            value = self._source.read(piece.name)
        else:
            value = self._source.read_rows(piece.name, piece.begin, piece.begin + piece.shape[0])
        return value.t() if piece.is_transposed else value


def _count_layers(names: dict[str, str]) -> int:
    numbers = [int(part) for name in names for part in name.split(".") if part.isdecimal()]
    return max(numbers, default=-1) + 1


def _numbered(layout: Layout, num_layers: int) -> Iterator[tuple[str, Slot]]:
    """The tensors of a model of so many layers, in its order."""
    for is_layer, group in itertools.groupby(layout.slots.items(), lambda item: "{}" in item[0]):
        slots = list(group)
        for layer in range(num_layers if is_layer else 1):
            for name, slot in slots:
                parts = tuple(part.format(layer) for part in slot.parts)
                yield name.format(layer), slot._replace(parts=parts)


def _parts(source: Source, layout: Layout, actual: dict[str, str]) -> Iterator[tuple[str, _Piece]]:
    """The position of each part of the family in the source."""

    def described(name: str) -> tuple[str, torch.dtype, tuple[int, ...]]:
        stored = source.ties.get(actual[name], actual[name])
        return stored, *source.table[stored]

    for name, slot in _numbered(layout, _count_layers(actual)):
        if name not in actual:
            continue
        stored, dtype, shape = described(name)
        if len(slot.parts) == 1:
            yield slot.parts[0], _Piece(stored, dtype, shape, is_transposed=slot.is_transposed)
            continue
        out = name.replace("qkv_proj", "o_proj")  # its columns are the rows of the queries
        queries = described(out)[2][-1] if out != name and out in actual else None
        begin = 0
        for part, rows in zip(slot.parts, _rows(name, shape, len(slot.parts), queries), strict=True):
            yield part, _Piece(stored, dtype, (rows, *shape[1:]), begin)
            begin += rows


def _rows(name: str, shape: tuple[int, ...], num_parts: int, first: int | None) -> list[int]:
    """Rows of each part; all have one size, except the first if its size is given."""
    total = shape[0] if shape else 0
    rest, num_equal = (total, num_parts) if first is None else (total - first, num_parts - 1)
    if len(shape) != 2 or rest <= 0 or rest % num_equal:
        raise UnreadableFileError(f"{name}: cannot be divided into {num_parts} matrices, with shape {shape}")
    return ([] if first is None else [first]) + [rest // num_equal] * num_equal


def _described(name: str, slot: Slot, pieces: tuple[_Piece, ...]) -> tuple[torch.dtype, tuple[int, ...]]:
    """Dtype and shape of a tensor that is made of pieces."""
    dtype, shape = pieces[0].dtype, pieces[0].shape
    if any(piece.dtype != dtype or piece.shape[1:] != shape[1:] for piece in pieces):
        raise UnreadableFileError(f"{name}: its parts differ in dtype or in the number of columns")
    if len(pieces) > 1:
        shape = (sum(piece.shape[0] for piece in pieces), *shape[1:])
    if pieces[0].is_transposed:
        if len(shape) != 2:
            raise UnreadableFileError(f"{name}: expected a matrix, got shape {shape}")
        shape = (shape[1], shape[0])
    if slot.is_square and shape != (shape[0], shape[0]):
        raise UnreadableFileError(
            f"{name}: expected heads that make up the width of the model together, got shape {shape}"
        )
    return dtype, shape
