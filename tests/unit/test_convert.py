"""Conversion of weights: every way there and back is bit for bit."""

from __future__ import annotations

import json
import resource
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from bmtrain.__main__ import main
from bmtrain._files.archive import check_archive
from bmtrain._files.safetensors import locate_tensors, write_folder
from bmtrain.convert import convert
from bmtrain.convert.sources import open_source
from bmtrain.distributed.checkpoint.layout import newest
from bmtrain.errors import UnreadableFileError


def make_state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    state = {
        str(dtype).removeprefix("torch."): torch.randn(5, 3, generator=generator).mul(20).to(dtype)
        for dtype in (
            torch.float32,
            torch.float16,
            torch.bfloat16,
            torch.float64,
            torch.int64,
            torch.uint8,
            torch.bool,
        )
    }
    state["uint32"] = torch.arange(7).to(torch.uint32)
    state["float8"] = torch.randn(9, generator=generator).to(torch.float8_e4m3fn)
    state.update(
        scalar=torch.tensor(3.5), empty=torch.zeros(0, 4), large=torch.randn(300, 301, generator=generator)
    )
    state["tied"] = state["large"]
    return state


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(actual) == list(expected)
    for name, value in expected.items():
        assert (actual[name].dtype, actual[name].shape) == (value.dtype, value.shape), name
        assert (
            actual[name]
            .contiguous()
            .view(-1)
            .view(torch.uint8)
            .equal(value.contiguous().view(-1).view(torch.uint8))
        )


@pytest.mark.parametrize("checksums", [True, False])
def test_every_way_and_back(checksums: bool, tmp_path: Path) -> None:
    state = make_state()
    torch.save(state, tmp_path / "a.pt")
    known = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(checksums)
    try:
        convert(tmp_path / "a.pt", tmp_path / "b.safetensors")
        convert(tmp_path / "b.safetensors", tmp_path / "c", "checkpoint")
        convert(tmp_path / "c", tmp_path / "d", "safetensors", max_shard_size=100_000)
        convert(tmp_path / "d", tmp_path / "f", "dcp")
        convert(tmp_path / "d", tmp_path / "e.pt")
    finally:
        torch.serialization.set_crc32_options(known)
    assert len(list((tmp_path / "d").glob("model-*.safetensors"))) > 1
    assert newest(tmp_path / "c") == tmp_path / "c" / "step-0000000"
    for mapped in (False, True):
        loaded = torch.load(tmp_path / "e.pt", weights_only=True, mmap=mapped)
        assert_same(loaded, state)
        assert loaded["tied"].data_ptr() == loaded["large"].data_ptr()
    convert(tmp_path / "f", tmp_path / "f2", "dcp")
    convert(tmp_path / "f2", tmp_path / "g.pt")
    assert_same(torch.load(tmp_path / "g.pt"), state)
    check_archive(tmp_path / "e.pt")
    with zipfile.ZipFile(tmp_path / "e.pt") as archive:
        assert archive.testzip() is None


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("key", ["model", None])
def test_a_folder_of_torch(key: str | None, tmp_path: Path) -> None:
    """A state dict under the key that FSDP2 examples use, or by itself."""
    state = {name: torch.randn(5, 3) for name in ("weight", "layers.0.weight")}
    optim = {"state": {"weight": {"exp_avg": torch.zeros(5, 3)}}}
    dcp.save({key: state, "optim": optim} if key else state, checkpoint_id=tmp_path / "a", no_dist=True)
    convert(tmp_path / "a", tmp_path / "b.pt")
    assert_same(torch.load(tmp_path / "b.pt"), state)


@pytest.mark.parametrize(
    ("target", "kind"), [("b.pt", None), ("b.safetensors", None), ("b", "checkpoint"), ("b", "dcp")]
)
def test_rows_of_a_tensor(target: str, kind: str | None, tmp_path: Path) -> None:
    value = torch.randn(7, 5, 3)
    torch.save({"other": torch.ones(4), "a": value}, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / target, kind)
    source = open_source(tmp_path / target)
    for begin, end in ((0, 7), (2, 5), (6, 7)):
        assert torch.equal(source.read_rows("a", begin, end), value[begin:end])
    assert source.read("a").shape == value.shape


def test_progress_is_counted_in_bytes(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(5, 3), "b": torch.ones(2, dtype=torch.bfloat16)}, tmp_path / "a.pt")
    told: list[tuple[int, int]] = []
    convert(tmp_path / "a.pt", tmp_path / "b.pt", report=lambda *numbers: told.append(numbers))
    assert told == [(60, 64), (64, 64)]


def test_records_are_aligned(tmp_path: Path) -> None:
    torch.save(make_state(), tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "b.pt")
    data = (tmp_path / "b.pt").read_bytes()
    large = make_state()["large"].numpy().tobytes()
    assert data.index(large) % 64 == 0
    convert(tmp_path / "a.pt", tmp_path / "b.safetensors")
    assert int.from_bytes((tmp_path / "b.safetensors").read_bytes()[:8], "little") % 64 == 0


def test_files_of_the_reference_implementation(tmp_path: Path) -> None:
    state = {name: value for name, value in make_state().items() if name != "tied"}
    save_file(state, tmp_path / "a.safetensors", metadata={"format": "pt"})
    convert(tmp_path / "a.safetensors", tmp_path / "b.pt")
    convert(tmp_path / "b.pt", tmp_path / "c.safetensors")
    assert_same({name: load_file(tmp_path / "c.safetensors")[name] for name in state}, state)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(make_state(), tmp_path / "a.pt")
    assert main(["convert", str(tmp_path / "a.pt"), str(tmp_path / "b.safetensors")]) == 0
    assert "12 tensors" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "a.pt"), str(tmp_path / "b")]) == 1
    assert "does not determine the kind of file" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "none.pt"), str(tmp_path / "b.pt")]) == 1
    assert "none.pt" in capsys.readouterr().err


def test_the_command_on_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"a": torch.ones(50_000), "b": torch.ones(150_000)}, tmp_path / "a.pt")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["convert", str(tmp_path / "a.pt"), str(tmp_path / "b.pt")]) == 0
    line = "\rconvert:  25 %, 0.2 of 0.8 MB\rconvert: 100 %, 0.8 of 0.8 MB\n"
    assert capsys.readouterr().err == f"{line}convert: wrote {tmp_path / 'b.pt'}: 2 tensors, 0.8 MB\n"


def test_damaged_sources_are_refused_and_nothing_appears(tmp_path: Path) -> None:
    torch.save(make_state(), tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "b.safetensors")
    data = (tmp_path / "b.safetensors").read_bytes()
    for size in (0, 7, 8, 200, len(data) - 1):
        (tmp_path / "b.safetensors").write_bytes(data[:size])
        with pytest.raises(UnreadableFileError):
            convert(tmp_path / "b.safetensors", tmp_path / "out.pt")
    (tmp_path / "a.pt").write_bytes((tmp_path / "a.pt").read_bytes()[:-50])
    with pytest.raises(UnreadableFileError, match="damaged"):
        convert(tmp_path / "a.pt", tmp_path / "out.pt")
    torch.save({"weight": torch.ones(3), "step": 3}, tmp_path / "a.pt")
    with pytest.raises(UnreadableFileError, match="expected names to tensors"):
        convert(tmp_path / "a.pt", tmp_path / "out.pt")
    assert not (tmp_path / "out.pt").exists()


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("kind", "damage", "words"),
    [
        ("checkpoint", flip, "damaged at tensor model/a: .* checksum"),
        ("dcp", lambda file: file.write_bytes(file.read_bytes()[:-300]), "damaged from model.b on"),
    ],
)
def test_a_damaged_checkpoint_is_named(kind: str, damage: Any, words: str, tmp_path: Path) -> None:
    torch.save({"a": torch.randn(200), "b": torch.randn(200)}, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "b", kind)
    damage(max((tmp_path / "b").rglob("*.*"), key=lambda file: file.is_file() and file.stat().st_size))
    with pytest.raises(UnreadableFileError, match=words):
        convert(tmp_path / "b", tmp_path / "out.pt")
    assert not (tmp_path / "out.pt").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"optim": {"state": {"weight": torch.ones(2)}}}, "expected the state dict of one model"),
        ({"a": {"model": {"w": torch.ones(2)}}, "b": {"model": {"w": torch.ones(2)}}}, "of one model"),
        ({"model": {"w": torch.ones(2), "_extra_state": [1, 2]}}, "_extra_state: expected a model whose state is t"),
    ],
    ids=["none", "two", "other values"],
)  # fmt: skip
def test_a_folder_of_torch_without_one_model_of_tensors(
    state: dict[str, Any], words: str, tmp_path: Path
) -> None:
    dcp.save(state, checkpoint_id=tmp_path / "a", no_dist=True)
    with pytest.raises(UnreadableFileError, match=words):
        convert(tmp_path / "a", tmp_path / "b.pt")


def entry(begin: int, end: int, *shape: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": (begin, end)}


def write_table(path: Path, table: dict[str, Any], num_bytes: int = 16) -> None:
    header = json.dumps(table).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(range(num_bytes)))


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"a": entry(0, 8, 2), "b": entry(12, 16, 1)}, "does not follow the one before it"),
        ({"a": entry(0, 12, 3), "b": entry(8, 16, 2)}, "does not follow the one before it"),
        ({"a": entry(0, 8, 2)}, "bytes, got .*: cut short"),
        ({"a": entry(0, 20, 5)}, "bytes, got .*: cut short"),
        ({"a": entry(0, 16, 3)}, "tensor a: 16 bytes for shape"),
        ({"a": entry(0, 16, -2, -2)}, "tensor a: 16 bytes for shape"),
        ({"a": entry(0, 16, 4, dtype="F4")}, "not a safetensors file: 'F4'"),
        ({"a": {"dtype": "F32"}}, "not a safetensors file: 'shape'"),
        ([], "not a safetensors file"),
    ],
)
def test_a_table_of_safetensors_that_does_not_fit_is_refused(table: Any, words: str, tmp_path: Path) -> None:
    write_table(tmp_path / "a.safetensors", table)
    with pytest.raises(UnreadableFileError, match=words):
        convert(tmp_path / "a.safetensors", tmp_path / "b.pt")


def test_a_table_of_safetensors_in_any_order(tmp_path: Path) -> None:
    write_table(
        tmp_path / "a.safetensors", {"a": entry(8, 16, 2, dtype="I32"), "b": entry(0, 8, 8, dtype="U8")}
    )
    convert(tmp_path / "a.safetensors", tmp_path / "b.pt")
    found = torch.load(tmp_path / "b.pt")
    assert found["b"].tolist() == list(range(8)) and found["a"].view(torch.uint8).tolist() == list(
        range(8, 16)
    )


@pytest.mark.parametrize(
    ("ties", "order"),
    [({"b": "c"}, ["a", "b"]), ({"b": "a"}, ["a"]), ({"b": "a"}, ["a", "b", "c"])],
)
def test_a_note_of_ties_that_does_not_fit_is_refused(
    ties: dict[str, str], order: list[str], tmp_path: Path
) -> None:
    note = {"bmtrain.ties": json.dumps({"ties": ties, "order": order})}
    save_file({"a": torch.ones(3)}, tmp_path / "a.safetensors", metadata=note)
    with pytest.raises(UnreadableFileError, match="its note of shared tensors does not fit"):
        convert(tmp_path / "a.safetensors", tmp_path / "b.pt")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}", "not an index of safetensors files"),
        ('{"weight_map": {"a": 3}}', "expected names of files beside it"),
        ('{"weight_map": {"a": "../a.safetensors"}}', "expected names of files beside it"),
        ('{"weight_map": {"c": "a.safetensors"}}', "tensor c is not in a.safetensors"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(text: str, words: str, tmp_path: Path) -> None:
    write_table(tmp_path / "a.safetensors", {"a": entry(0, 16, 4)})
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(UnreadableFileError, match=words):
        convert(tmp_path, tmp_path / "b.pt")


@pytest.mark.parametrize("kind", ["safetensors", "dcp"])
def test_a_folder_is_not_converted_into_itself(kind: str, tmp_path: Path) -> None:
    """Its files would be replaced while others are read."""
    state = make_state()
    torch.save(state, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "b", kind, max_shard_size=100_000)
    for source in (tmp_path / "b", *(tmp_path / "b").glob("*.json")):
        with pytest.raises(ValueError, match="another folder than the source"):
            convert(source, tmp_path / "." / "b", kind, max_shard_size=200_000, overwrite=True)
    convert(tmp_path / "b", tmp_path / "c.pt")
    assert_same(torch.load(tmp_path / "c.pt"), state)


@pytest.mark.parametrize("failing", range(4))
def test_a_failed_save_to_a_folder_leaves_no_mixture(failing: int, tmp_path: Path) -> None:
    names = [f"layers.{number}" for number in range(4)]
    table = dict.fromkeys(names, (torch.float32, (25,)))

    def save(value: int, failing: int) -> None:
        def read(name: str) -> torch.Tensor:
            if name in names[failing:]:
                raise MemoryError
            return torch.full((25,), float(value))

        write_folder(tmp_path, table, read, {}, 200)

    save(0, 4)
    with pytest.raises(MemoryError):
        save(1, failing)
    if failing < 2:  # nothing has been replaced
        assert [int(file.read(name)[0]) for name, file in locate_tensors(tmp_path).items()] == [0] * 4
    else:
        with pytest.raises(OSError):
            locate_tensors(tmp_path)
    save(1, 4)
    assert [int(file.read(name)[0]) for name, file in locate_tensors(tmp_path).items()] == [1] * 4


TARGETS = [("b.pt", None), ("b.safetensors", None), ("b", "safetensors"), ("b", "checkpoint"), ("b", "dcp")]


@pytest.mark.parametrize(("target", "kind"), TARGETS)
def test_a_conversion_that_fails_leaves_what_was_there_or_nothing(
    target: str, kind: str | None, tmp_path: Path
) -> None:
    torch.save({"first": torch.ones(3), "last": torch.ones(2)}, tmp_path / "a.pt")
    torch.save({"first": torch.zeros(3), "last": torch.zeros(2)}, tmp_path / "other.pt")
    convert(tmp_path / "a.pt", tmp_path / target, kind)

    def fail(done: int, total: int) -> None:
        if done == total:
            raise MemoryError

    with pytest.raises(MemoryError):
        convert(tmp_path / "other.pt", tmp_path / target, kind, overwrite=True, report=fail)
    if kind == "dcp":
        with pytest.raises(FileNotFoundError):
            convert(tmp_path / target, tmp_path / "kept.pt")
    else:
        convert(tmp_path / target, tmp_path / "kept.pt")
        assert_same(torch.load(tmp_path / "kept.pt"), torch.load(tmp_path / "a.pt"))


@pytest.mark.parametrize(("target", "kind"), TARGETS)
def test_a_full_disk_ends_in_one_line(
    target: str, kind: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A limit on the size of files stands for the disk."""
    torch.save({"first": torch.ones(300, 1000)}, tmp_path / "a.pt")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, limits[1]))
    try:
        kinds = ["--to", kind] if kind else []
        status = main(["convert", str(tmp_path / "a.pt"), str(tmp_path / target), *kinds])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    told = capsys.readouterr().err
    assert status == 1 and "File too large" in told and len(told.splitlines()) == 1
    assert not [path for path in (tmp_path / target).rglob("*") if path.is_file()]


@pytest.mark.parametrize("options", [[], ["--max-shard-size", "12"]], ids=["one", "several"])
@pytest.mark.parametrize(("target", "kind"), TARGETS)
def test_weights_that_are_there_are_replaced_only_when_asked(
    target: str, kind: str | None, options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"weight": torch.ones(3), "bias": torch.ones(3)}, tmp_path / "a.pt")
    torch.save({"weight": torch.zeros(3), "bias": torch.zeros(3)}, tmp_path / "other.pt")
    line = ["convert", str(tmp_path / "a.pt"), str(tmp_path / target), *(["--to", kind] if kind else [])]
    line += options
    assert main(line) == 0
    with pytest.raises(FileExistsError, match="expected no weights there, found"):
        convert(tmp_path / "other.pt", tmp_path / target, kind)
    line[1] = str(tmp_path / "other.pt")
    assert main(line) == 1
    assert "--overwrite" in capsys.readouterr().err
    convert(tmp_path / target, tmp_path / "kept.pt")
    assert torch.load(tmp_path / "kept.pt", weights_only=True)["weight"].sum() == 3
    assert main([*line, "--overwrite"]) == 0
    convert(tmp_path / target, tmp_path / "kept.pt", overwrite=True)
    assert torch.load(tmp_path / "kept.pt", weights_only=True)["weight"].sum() == 0
