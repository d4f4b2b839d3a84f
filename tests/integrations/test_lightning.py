"""The Trainer and Fabric of Lightning with a sharding strategy on 2 ranks, beside the plain ones in one process."""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_ranks

if (
    importlib.util.find_spec("lightning") is None
):  # whose import takes longer than the collection of all tests
    pytest.skip("needs lightning", allow_module_level=True)

PRELOAD = ("lightning",)
SCRIPT = Path(__file__).with_name("lightning_script.py")
VARIANTS = ("plain", "accumulated", "fp16", "bf16", "averaged")  # of the script
#: Of sums in another order: 1e-5 in fp32, and more where autocast rounds to 16 bits.
TOLERANCE = {"bf16": 2e-2, "fp16": 2e-3}


def run_plain(folder: str) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    sys.argv = [str(SCRIPT), "plain", folder]
    runpy.run_path(str(SCRIPT), run_name="__main__")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of a plain run and of a sharded one."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("plain", "sharded")}
    run_ranks(1, run_plain, str(folders["plain"]), init=False, fresh=True, timeout=600)
    command = [sys.executable, str(SCRIPT), "sharded", str(folders["sharded"]), str(folders["plain"])]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-8000:]
    return folders


def seen(runs: dict[str, Path], kind: str) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((runs[kind] / "log.json").read_text())
    return told


@pytest.mark.slow
@pytest.mark.parametrize("name", (*VARIANTS, "fabric", "fabric-ours"))
def test_figures_are_those_of_one_process(runs: dict[str, Path], name: str) -> None:
    expected, got = seen(runs, "plain")[name], seen(runs, "sharded")[name]
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        assert got[key] == pytest.approx(value, abs=TOLERANCE.get(name, 1e-5)), key
    assert len(got["losses"]) == 12 and got["losses"][-1] < got["losses"][0]


@pytest.mark.slow
def test_a_resumed_run_continues_loss_by_loss(runs: dict[str, Path]) -> None:
    for name in VARIANTS:
        found = seen(runs, "sharded")[name]
        assert found["resumed"] == found["losses"][6:]
    found = seen(runs, "sharded")["fabric"]
    assert found["again"] == found["losses"][6:]


@pytest.mark.slow
def test_a_file_of_a_plain_run_resumes_sharded(runs: dict[str, Path]) -> None:
    assert seen(runs, "sharded")["of-plain"] == pytest.approx(
        seen(runs, "plain")["plain"]["resumed"], abs=1e-5
    )


def make_one_file(sharded: str, plain: str, one: str) -> None:
    from integrations import lightning_script

    sys.argv = ["consolidate_checkpoint", sharded, "--output_file", one]
    runpy.run_module("lightning.pytorch.utilities.consolidate_checkpoint", run_name="__main__")
    modules = [lightning_script.Module.load_from_checkpoint(path) for path in (one, plain)]
    for got, want in zip(*(module.parameters() for module in modules), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_lightning_makes_one_file_of_a_checkpoint(runs: dict[str, Path], tmp_path: Path) -> None:
    sharded, plain = (str(runs[kind] / "plain" / "last.ckpt") for kind in ("sharded", "plain"))
    run_ranks(1, make_one_file, sharded, plain, str(tmp_path / "one.ckpt"), init=False, fresh=True)


def test_a_checkpoint_replaces_what_a_killed_run_has_left(tmp_path: Path) -> None:
    from bmtrain.integrations.lightning import _Folder

    new = tmp_path / ".last.ckpt.new"
    for place in (tmp_path / "last.ckpt", tmp_path / ".last.ckpt.old", new):
        place.mkdir()
        (place / "meta.pt").write_text(place.name)
    _Folder(tmp_path / "last.ckpt", "model", "optim")._replace(new)
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]
    assert (tmp_path / "last.ckpt" / "meta.pt").read_text() == new.name


def refused_optimizers(folder: str) -> list[str]:
    import lightning
    from integrations import lightning_script

    from bmtrain.integrations.lightning import BMTrainFabricStrategy

    class Module(lightning_script.Module):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adafactor(self.parameters())

    def by_trainer() -> None:
        lightning_script.trainer_of("sharded", 1, Path(folder), {}, 1).fit(Module())

    def by_fabric() -> None:
        fabric = lightning.Fabric(accelerator="cpu", devices=1, strategy=BMTrainFabricStrategy())
        fabric.launch()
        net = lightning_script.Net()
        fabric.setup(net, torch.optim.Adafactor(net.parameters()))

    said = []
    for train in (by_trainer, by_fabric):
        with pytest.raises(ValueError) as caught:
            train()
        said.append(str(caught.value))
    return said


def use_of_fabric(kind: str, folder: str) -> list[Any]:
    """Errors, a schedule and a norm, by the strategy with shards or by Lightning's own."""
    import lightning
    from integrations import lightning_script

    from bmtrain.integrations.lightning import BMTrainFabricStrategy

    strategy: Any = BMTrainFabricStrategy() if kind == "sharded" else "auto"
    fabric = lightning.Fabric(accelerator="cpu", devices=1, strategy=strategy)
    fabric.launch()
    torch.manual_seed(1)
    net = lightning_script.Net()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.5))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    state: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "schedule": schedule,
        "step": 7,
        "more": 1,
    }
    fabric.backward(model(torch.ones(2, 5)).sum())
    optimizer.step()
    schedule.step()
    fabric.save(f"{folder}/{kind}", state)
    schedule.step()
    del state["more"]
    rest = fabric.load(f"{folder}/{kind}", state)
    found: list[Any] = [rest["more"], schedule.last_epoch, schedule.get_last_lr(), state["step"]]
    with pytest.raises(KeyError):
        fabric.load(f"{folder}/{kind}", {**state, "other": 0})
    found.append(fabric.load(f"{folder}/{kind}", {**state, "other": 0}, strict=False)["more"])
    next(iter(model.parameters())).grad.fill_(torch.inf)
    with pytest.raises(RuntimeError):
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
    found.append(fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False).item())
    if kind == "sharded":
        with pytest.raises(
            ValueError, match="expected one model in a dict, got .'model', 'second'.; give each"
        ):
            fabric.save(f"{folder}/two", {"model": model, "second": torch.nn.Linear(1, 1)})
        with pytest.raises(ValueError, match="expected no filter"):
            fabric.save(f"{folder}/part", state, filter={"model": lambda name, value: True})
    return found


def test_fabric_keeps_the_rest_of_a_state_and_refuses_as_its_own_strategies(tmp_path: Path) -> None:
    plain, sharded = (
        run_ranks(1, use_of_fabric, kind, str(tmp_path), init=False, fresh=True)
        for kind in ("plain", "sharded")
    )
    assert plain == sharded


def refused_averaging(folder: str) -> str:
    from integrations import lightning_script
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    options = {"callbacks": [lambda: StochasticWeightAveraging(swa_lrs=0.1)]}
    with pytest.raises(ValueError) as caught:
        lightning_script.trainer_of("sharded", 1, Path(folder), options, 1).fit(lightning_script.Module())
    return str(caught.value)


def test_averaging_that_loses_its_schedule_is_refused(tmp_path: Path) -> None:
    [said] = run_ranks(1, refused_averaging, str(tmp_path), init=False, fresh=True)
    assert said.startswith("StochasticWeightAveraging: not with sharded models")


def test_optimizers_over_whole_tensors_are_refused(tmp_path: Path) -> None:
    for said in run_ranks(1, refused_optimizers, str(tmp_path), init=False, fresh=True)[0]:
        assert said.startswith("optimizer: Adafactor computes over whole tensors")
