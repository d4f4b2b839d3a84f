"""Files of ``torch.save``: verification of every byte, and a list of the contents."""

from __future__ import annotations

import errno
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pickle import UnpicklingError
from typing import Any

import torch

from ..errors import UnreadableFileError

_SLICE = 1 << 20


def read_archive(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """The state dict in a file of ``torch.save``, mapped to memory; no code from the file is executed.

    A file in the format before torch 1.6 cannot be mapped, and has no checksums: it is read whole.

    Raises:
        UnreadableFileError: it is damaged, or holds anything but a state dict of tensors and plain values.
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        is_zip = file.read(4) == b"PK\x03\x04"
    if is_zip:
        check_archive(path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except OSError:
        raise
    except Exception as error:
        raise UnreadableFileError(f"{path}: not a readable file of tensors: {_reason(error)}") from None
    if not isinstance(state, Mapping):
        raise UnreadableFileError(
            f"{path}: expected a state dict (names to tensors), got {type(state).__name__}"
        )
    return state


def _reason(error: Exception) -> str:
    """Returns the error without the advice to set ``weights_only=False`` or to allow classes, which run code."""
    text = str(error)
    if found := re.search(r"(?:GLOBAL|global|class) (\S+)", text):
        return (
            f"it contains {found[1]}, which could only be restored by running code from the file; save tensors and "
            "plain values, for example torch.save(model.state_dict(), file)"
        )
    if "Unsupported" in text and "operand" not in text:
        named = [line.strip() for line in text.splitlines() if "Unsupported" in line]
        return f"{type(error).__name__}: {named[0]}"
    if isinstance(error, (LookupError, EOFError, UnicodeDecodeError, UnpicklingError)):
        return f"torch.save has not written it, or it is damaged ({type(error).__name__})"
    return f"{type(error).__name__}: {(text.splitlines() or [''])[0].strip()}"


def check_archive(path: str | os.PathLike[str]) -> None:
    """Reads an archive once and compares the checksum of each record; an error names the damaged one."""
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
    except OSError as error:
        if error.errno == errno.EINVAL:  # a record that begins before the file does
            raise UnreadableFileError(f"{path}: damaged: {error}") from error
        raise


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
