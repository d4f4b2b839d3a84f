"""Small helpers: printing, memory, averages, versions, the scratch store of `bmtrain.debug`."""

from __future__ import annotations

import io
import re

import pytest
import torch
from harness import run_ranks

import bmtrain
from bmtrain import debug, utils


def test_round_up() -> None:
    assert [utils.round_up(x, 4) for x in (0, 1, 4, 5)] == [0, 4, 4, 8]


def test_average_recorder() -> None:
    average = utils.AverageRecorder(alpha=0.9, start_value=7)
    assert average.value == 7
    expected = 0.0
    for count, value in enumerate([3, 0.5, torch.tensor(2.0), torch.tensor([4])], start=1):
        average.record(value)
        expected = 0.9 * expected + 0.1 * float(value)
        assert average.value == pytest.approx(expected / (1 - 0.9**count), rel=1e-12)
    constant = utils.AverageRecorder()
    for _ in range(5):
        constant.record(2)
        assert constant.value == pytest.approx(2)
    with pytest.raises(ValueError, match="alpha: expected 0 <= alpha < 1, got 1"):
        utils.AverageRecorder(alpha=1)


def test_check_torch_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu121")
    older, newer = ("1.10.0", "2.9.9", "2.11.0", "2.11"), ("2.11.1", "2.12.0", "3.0.0")
    assert all(utils.check_torch_version(version) >= 0 for version in older)
    assert all(utils.check_torch_version(version) < 0 for version in newer)
    with pytest.raises(ValueError, match="got 'new'"):
        utils.check_torch_version("new")


def test_a_printed_line_is_written_whole() -> None:
    """Under torchrun several ranks write to one terminal: what is between two of a line's calls may be another's."""

    class Calls(io.StringIO):
        def __init__(self) -> None:
            super().__init__()
            self.written: list[str] = []

        def write(self, text: str) -> int:
            self.written.append(text)
            return len(text)

    out = Calls()
    utils.print_rank("loss", 0.5, sep=": ", file=out, flush=True)
    utils.print_rank("of another rank", rank=1, file=out)
    assert out.written == ["loss: 0.5\n"]


def test_print_block() -> None:
    out = io.StringIO()
    utils.print_block("title", "text", file=out)
    utils.print_block("alone", file=out)
    first, text, second = out.getvalue().splitlines()
    assert (len(first), len(second), text) == (60, 60, "text")
    assert re.fullmatch("=+ title =+", first)


def test_print_dict_aligns_and_wraps(capsys: pytest.CaptureFixture[str]) -> None:
    utils.print_dict("sizes", {"a": 1, "longer": "word " * 30, "none": None, "empty": ""})
    banner, *lines = capsys.readouterr().out.splitlines()
    assert len(banner) == 60
    assert max(map(len, lines)) <= 60
    assert lines[0] == "a      : 1"
    assert {line.index(":") for line in lines if ":" in line} == {7}
    assert " ".join(lines).count("word") == 30


def test_see_memory_reports_the_process_before_init(capsys: pytest.CaptureFixture[str]) -> None:
    bmtrain.see_memory("after the model", detail=True)
    message, report = capsys.readouterr().out.splitlines()
    assert message == "after the model"
    assert re.fullmatch(r"resident memory: \d+\.\d{3} GB, peak: \d+\.\d{3} GB", report)


def test_load_nccl_pypi_loads_a_library_or_names_the_remedy() -> None:
    try:
        bmtrain.load_nccl_pypi()
    except ImportError as error:
        assert "pip install nvidia-nccl" in str(error)


def test_wait_loader_and_tp_split_need_init() -> None:
    for call in (bmtrain.wait_loader, bmtrain.synchronize, lambda: utils.tp_split_tensor(torch.ones(2), 0)):
        with pytest.raises(RuntimeError, match=r"not initialized: call bmtrain\.init_distributed\(\) before"):
            call()


def split() -> tuple[list[float], bool, str]:
    tensor = torch.arange(12.0).reshape(3, 4)
    part = utils.tp_split_tensor(tensor, -1)
    with pytest.raises(ValueError, match=r"divides by tp_size 2, got shape \(3, 4\)") as caught:
        utils.tp_split_tensor(tensor, 0)
    own = part.is_contiguous() and part.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
    return part.flatten().tolist(), own, str(caught.value)


def test_tp_split_tensor() -> None:
    left, right = run_ranks(2, split, init={"tp_size": 2})
    assert left[0] == [0, 1, 4, 5, 8, 9]
    assert right[0] == [2, 3, 6, 7, 10, 11]
    assert left[1] and right[1]


def test_debug_store() -> None:
    tensor = torch.ones(2, requires_grad=True)
    debug.set("x", tensor)
    stored = debug.get("x")
    assert not stored.requires_grad
    assert stored.data_ptr() != tensor.data_ptr()
    assert debug.get("nothing") is None
    assert debug.get("nothing", 3) == 3
    debug.append("list", 1)
    debug.extend("list", [2, tensor])
    assert debug.get("list")[:2] == [1, 2]
    with pytest.raises(TypeError, match="key 'x': expected a list stored there, got Tensor"):
        debug.append("x", 1)
    debug.clear("x")
    assert debug.get("x") is None
    debug.clear()
    assert debug.get("list") is None


def test_synchronize_is_the_function_and_the_module_path_works() -> None:
    import bmtrain.synchronize as attribute
    from bmtrain.synchronize import gather_result, sum_loss, synchronize, wait_loader

    assert attribute is bmtrain.synchronize is synchronize
    assert (gather_result, sum_loss, wait_loader) == (
        bmtrain.gather_result,
        bmtrain.sum_loss,
        bmtrain.wait_loader,
    )
    assert bmtrain.synchronize.gather_result is gather_result
