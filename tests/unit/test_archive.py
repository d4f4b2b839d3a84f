"""Model files that are damaged or hostile: refused before anything of them is used."""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from harness import run_ranks

import bmtrain as bmt
from bmtrain._files.archive import check_archive, read_archive
from bmtrain.errors import UnreadableFileError


def write(path: Path) -> bytes:
    torch.save({"weight": torch.arange(600.0), "bias": torch.ones(3)}, path)
    return path.read_bytes()


def test_an_intact_archive_passes(tmp_path: Path) -> None:
    write(tmp_path / "a.pt")
    check_archive(tmp_path / "a.pt")


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    data = write(tmp_path / "a.pt")
    for size in range(4, len(data), len(data) // 64):
        (tmp_path / "a.pt").write_bytes(data[:size])
        with pytest.raises(UnreadableFileError, match="damaged"):
            check_archive(tmp_path / "a.pt")


def test_every_flipped_bit_in_a_record_is_noticed_and_named(tmp_path: Path) -> None:
    data = write(tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        record = next(info for info in archive.infolist() if info.file_size == 2400)
    begin = data.index(torch.arange(600.0).numpy().tobytes())
    for byte in range(begin, begin + 2400, 97):
        changed = bytearray(data)
        changed[byte] ^= 1 << byte % 8
        (tmp_path / "a.pt").write_bytes(changed)
        with pytest.raises(UnreadableFileError, match=record.filename):
            check_archive(tmp_path / "a.pt")


def test_compressed_and_repeated_records_are_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/0", bytes(10_000_000))
    with pytest.raises(UnreadableFileError, match="compressed"):
        check_archive(tmp_path / "bomb.pt")
    with zipfile.ZipFile(tmp_path / "twice.pt", "w") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("archive/data/0", b"1")
        archive.writestr("archive/data/0", b"2")
    with pytest.raises(UnreadableFileError, match="there twice"):
        check_archive(tmp_path / "twice.pt")


# ---- hostile pickles


class Calls:
    """Pickled, it is a call of ``function``."""

    def __init__(self, function: object, *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> object:
        return self.call


def hostile(marker: str) -> dict[str, object]:
    """Objects that make a file or run code where a pickle is loaded without care."""
    import builtins
    import importlib
    import operator
    import runpy
    import shutil
    import subprocess
    import types

    touch = f"open({marker!r}, 'w').close()"
    return {
        "os.system": Calls(os.system, f"touch {marker}"),
        "os.mkdir": Calls(os.mkdir, marker),
        "open": Calls(open, marker, "w"),
        "eval": Calls(eval, touch),
        "exec": Calls(exec, touch),
        "subprocess": Calls(subprocess.call, ["touch", marker]),
        "popen": Calls(subprocess.Popen, ["touch", marker]),
        "import": Calls(importlib.import_module, "antigravity"),
        "builtin import": Calls(builtins.__import__, "os"),
        "attrgetter": Calls(operator.attrgetter, "system"),
        "copy": Calls(shutil.copy, "/etc/hostname", marker),
        "run": Calls(runpy.run_path, "/etc/hostname"),
        "class": Calls(types.SimpleNamespace),
        "nested pickle": Calls(pickle.loads, pickle.dumps(Calls(os.system, f"touch {marker}"))),
        "torch.load": Calls(torch.load, "/etc/hostname"),
        "torch.hub": Calls(torch.hub.load, "/tmp", "model"),
    }  # fmt: skip


@pytest.mark.parametrize("data", [b"", b"hello", b"{}"])
def test_what_is_no_model_file_is_said_to_be_none(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_bytes(data)
    with pytest.raises(UnreadableFileError, match="torch.save has not written it, or it is damaged"):
        read_archive(tmp_path / "notes.txt")


@pytest.mark.parametrize("legacy", [False, True])
def test_hostile_files_are_refused_and_nothing_is_run(legacy: bool, tmp_path: Path) -> None:
    names = list(hostile(str(tmp_path / "marker")))
    assert len(names) >= 12
    for name in names:
        attack = hostile(str(tmp_path / "marker"))[name]
        torch.save({"weight": attack}, tmp_path / f"{name}.pt", _use_new_zipfile_serialization=not legacy)
    run_ranks(1, check_refused, str(tmp_path), names)
    assert not (tmp_path / "marker").exists()


def check_refused(folder: str, names: list[str]) -> None:
    model = bmt.BMTrainModelWrapper(torch.nn.Linear(3, 2))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    for name in names:
        with pytest.raises(UnreadableFileError, match="not a readable file of tensors"):
            bmt.load(model, f"{folder}/{name}.pt")
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("world", [1, 2])
def test_a_file_that_does_not_fit_changes_nothing(world: int, tmp_path: Path) -> None:
    good = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2)).state_dict()
    torch.save({**good, "1.weight": torch.zeros(3, 3)}, tmp_path / "shape.pt")
    torch.save({**good, "1.weight": [1.0, 2.0]}, tmp_path / "kind.pt")
    torch.save({**good, "1.weight": good["1.weight"].to(torch.complex64)}, tmp_path / "dtype.pt")
    torch.save({key: value for key, value in good.items() if key != "1.bias"}, tmp_path / "missing.pt")
    torch.save(good, tmp_path / "flipped.pt")
    data = bytearray((tmp_path / "flipped.pt").read_bytes())
    data[data.index(good["1.weight"].numpy().tobytes())] ^= 1
    (tmp_path / "flipped.pt").write_bytes(data)
    run_ranks(world, check_unchanged, str(tmp_path))


def check_unchanged(folder: str) -> None:
    model = bmt.BMTrainModelWrapper(torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2)))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    for name, error, text in (
        ("shape", RuntimeError, "size mismatch for 1.weight"),
        ("kind", RuntimeError, "expected torch.Tensor"),
        ("dtype", RuntimeError, "dtype mismatch for 1.weight"),
        ("missing", RuntimeError, 'Missing key.*"1.bias"'),
        ("flipped", UnreadableFileError, "damaged.*archive|flipped/data/"),
    ):
        with pytest.raises(error, match=text):
            bmt.load(model, f"{folder}/{name}.pt")
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items()), name
