"""Zip archives as ``torch.save`` makes them: whether every byte of one is what was written."""

from __future__ import annotations

import os
import struct
import zipfile
import zlib

from .errors import UnreadableFileError

__all__ = ["check_archive"]

_SLICE = 1 << 20


def check_archive(path: str | os.PathLike[str]) -> None:
    """Reads an archive once and compares the checksum of each record.

    Args:
        path: a file that begins like a zip archive.

    Raises:
        UnreadableFileError: it is damaged, cut short, or packed otherwise than torch does; the record is named.
        OSError: it cannot be read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            names: set[str] = set()
            for record in archive.infolist():
                if record.filename in names:
                    raise UnreadableFileError(f"{path}: record {record.filename!r} is there twice")
                names.add(record.filename)
                if record.compress_type != zipfile.ZIP_STORED or record.flag_bits & 1:
                    raise UnreadableFileError(
                        f"{path}: record {record.filename!r} is compressed or encrypted"
                    )
                _check_record(archive, record, path)
    except UnreadableFileError:
        raise
    except (zipfile.BadZipFile, zlib.error, EOFError, struct.error, NotImplementedError, ValueError) as error:
        raise UnreadableFileError(f"{path}: damaged: {error}") from error


def _check_record(archive: zipfile.ZipFile, record: zipfile.ZipInfo, path: str | os.PathLike[str]) -> None:
    size = 0
    try:
        with archive.open(record) as opened:  # compares the checksum when it comes to the end
            while data := opened.read(_SLICE):
                size += len(data)
    except zipfile.BadZipFile as error:
        raise UnreadableFileError(
            f"{path}: damaged, or written with torch.serialization.set_crc32_options(False): {error}"
        ) from error
    if size != record.file_size:
        raise UnreadableFileError(
            f"{path}: damaged: record {record.filename!r} has {size} of {record.file_size} bytes"
        )
