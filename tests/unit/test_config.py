"""The mapping `bmtrain.config`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from harness import run_ranks

import bmtrain
from bmtrain import global_var
from bmtrain.global_var import Config

LIBRARY_KEYS = {
    *("initialized", "rank", "local_rank", "world_size", "local_size", "device"),
    *("comm", "zero_comm", "zero_rank", "zero_size", "pipe_size", "pipe_enabled", "micros", "pipe_comm"),
    *("pp_zero_comm", "tp_size", "tp_rank", "tp_comm", "tp_zero_rank", "tp_zero_size", "tp_zero_comm"),
    *("ep_size", "ep_rank", "ep_comm"),
    *("pp_tp_zero_comm", "topology", "calc_stream", "load_stream", "barrier_stream", "tp_comm_stream"),
    *("pp_comm_stream", "load_event", "save_param_to_cpu", "loss_scale_factor", "loss_scale_steps"),
    *("zero_level", "finish_save", "save_thread", "sp_size", "sp_rank", "sp_comm", "dp_size", "dp_rank"),
}
SETTINGS = {"save_param_to_cpu": True, "loss_scale_factor": 2.0, "loss_scale_steps": 1024}


def test_the_reference_has_every_key() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/environment.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?) \| ", page.partition("## `bmtrain.config`")[2], re.MULTILINE)
    assert {key for row in rows for key in re.findall(r"`(\w+)`", row)} - {"True"} == LIBRARY_KEYS


def test_bc_2_rank_and_world_size_before_init(capsys: pytest.CaptureFixture[str]) -> None:
    assert (bmtrain.rank(), bmtrain.world_size(), bmtrain.config["local_rank"]) == (0, 1, 0)
    assert not bmtrain.init.is_initialized()
    bmtrain.print_rank("hello", "there", sep="-", end="!")
    bmtrain.print_rank("silent", rank=1)
    assert capsys.readouterr().out == "hello-there!"


def test_before_init_it_holds_the_first_four_keys_and_the_settings() -> None:
    config = Config()
    assert dict(config) == {
        "initialized": False,
        "rank": 0,
        "local_rank": 0,
        "world_size": 1,
        **SETTINGS,
    }
    assert "comm" not in config
    assert config.get("comm", 5) == 5
    with pytest.raises(KeyError, match="not initialized"):
        config["comm"]


def test_bc_5_user_keys() -> None:
    assert bmtrain.config is global_var.config
    config = Config()
    value = object()
    config["my_key"] = value
    assert "my_key" in config
    assert config["my_key"] is value
    assert config.get("my_key") is value
    assert "my_key" in list(config)
    assert ("my_key", value) in config.items()
    assert config.setdefault("my_key", 1) is value
    del config["my_key"]
    assert "my_key" not in config
    with pytest.raises(KeyError, match="my_key"):
        config["my_key"]
    with pytest.raises(KeyError):
        del config["my_key"]
    config.update(a=1, b=2)
    assert config.pop("a") == 1
    assert config.pop("a", None) is None
    assert config.popitem() == ("b", 2)
    config["c"] = 3
    config.clear()
    assert "c" not in config
    assert "rank" in config
    assert len(config) == len(list(config)) == len(dict(config))


@pytest.mark.parametrize("key", sorted(LIBRARY_KEYS - SETTINGS.keys()))
def test_library_keys_refuse_assignment(key: str) -> None:
    config = Config()
    with pytest.raises(ValueError, match=f"config\\['{key}'\\] belongs to bmtrain .*got 3"):
        config[key] = 3
    with pytest.raises(ValueError, match=key):
        config.update({key: 3})
    with pytest.raises(ValueError, match=key):
        del config[key]
    with pytest.raises(ValueError, match=key):
        config.pop(key)


@pytest.mark.parametrize("key", sorted(SETTINGS))
def test_settings_can_be_written_but_not_deleted(key: str) -> None:
    config = Config()
    config[key] = 7
    assert config[key] == 7
    with pytest.raises(ValueError, match=key):
        del config[key]


def look() -> dict[str, object]:
    config = bmtrain.config
    event = object()
    for name in ("calc_stream", "load_stream", "barrier_stream", "tp_comm_stream", "pp_comm_stream"):
        stream = config[name]
        stream.synchronize()
        stream.wait_stream(config["load_stream"])
        stream.wait_event(config["load_event"])
        assert stream.record_event(event) is event
        assert stream.query()
    config["load_event"].record()
    config["load_event"].wait()
    assert config["load_event"].query()
    assert config["comm"] is config["zero_comm"]
    assert set(config) == LIBRARY_KEYS
    assert "Config(" in repr(config)
    config.set_save_state(False, "thread")
    assert (config["finish_save"], config["save_thread"]) == (False, "thread")
    config.set_save_state(True, None)
    plain = (bool, int, float, str, torch.device)
    return {key: value for key, value in config.items() if isinstance(value, plain)}


def test_after_init_of_one_process() -> None:
    [values] = run_ranks(1, look)
    assert values == {
        "initialized": True,
        "rank": 0,
        "local_rank": 0,
        "world_size": 1,
        "local_size": 1,
        "device": torch.device("cpu"),
        "zero_rank": 0,
        "zero_size": 1,
        "pipe_size": 1,
        "pipe_enabled": False,
        "micros": 1,
        "tp_size": 1,
        "tp_rank": 0,
        "tp_zero_rank": 0,
        "tp_zero_size": 1,
        "ep_size": 1,
        "ep_rank": 0,
        "sp_size": 1,
        "sp_rank": 0,
        "dp_size": 1,
        "dp_rank": 0,
        "zero_level": 3,
        "finish_save": True,
        **SETTINGS,
    }
