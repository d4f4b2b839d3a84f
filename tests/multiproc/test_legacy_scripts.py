"""Programs written for three generations of the API, run as they are, train alike and are told once what is old."""

from __future__ import annotations

import json
import re
import runpy
import sys
import warnings
from pathlib import Path

import pytest
import torch
from harness import Status, rank_outcomes

SCRIPTS = Path(__file__).parents[1] / "scripts"
WORLD = 2

# What each script is told, in the words that name the old form.
OLD_FORMS = {
    "train_0_1.py": [
        "init_distributed(SEED)",
        "sqrt=",
        "bmtrain.checkpoint",
        "WarmupLRSchduler",
        "Warmup.get_lr_warmpup",
        "FusedCrossEntropy(inplace=False)",
        "AdamOptimizer(scale=)",
        "optim_step()",
        "block_layer.CheckpointBlock",
        "optim.clip_grad_norm()",
        "sum_loss()",
        "gather_result()",
    ],
    "train_0_2.py": [
        "init_distributed(zero_level=...)",
        "FusedCrossEntropy(inplace=True)",
        "sum_loss()",
        "store.allgather_object()",
    ],
    "train_1_0.py": [],
}


def run_script(script: str, saved: str) -> None:
    """Runs it on this rank, as a launcher would."""
    warnings.simplefilter("always", DeprecationWarning)
    sys.argv = [script, saved]
    runpy.run_path(str(SCRIPTS / script), run_name="__main__")


def launched(script: str, saved: Path) -> tuple[list[float], list[str]]:
    """The losses that a script prints, and the deprecations that its ranks are told."""
    outcomes = rank_outcomes(WORLD, run_script, script, str(saved), init=False, fresh=True)
    assert all(outcome.status is Status.RETURNED for outcome in outcomes), outcomes
    output = "\n".join(outcome.output for outcome in outcomes)
    (losses,) = re.findall(r"^losses (.*)$", output, re.MULTILINE)
    warnings = re.findall(rf"{re.escape(script)}:\d+: DeprecationWarning: (.*)$", output, re.MULTILINE)
    return json.loads(losses), warnings


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[float], list[str], Path]]:
    folder = tmp_path_factory.mktemp("legacy")
    return {
        script: (*launched(script, folder / f"{script}.pt"), folder / f"{script}.pt") for script in OLD_FORMS
    }


def test_scripts_of_three_generations_train_alike(
    runs: dict[str, tuple[list[float], list[str], Path]],
) -> None:
    losses = [run[0] for run in runs.values()]
    assert losses[0] == pytest.approx(losses[2], rel=1e-6)
    assert losses[1] == pytest.approx(losses[2], rel=1e-6)
    assert losses[0][-1] < losses[0][0]
    weights = [torch.load(run[2]) for run in runs.values()]
    for other in weights[:2]:
        assert list(other) == list(weights[2])
        for name, value in other.items():
            assert torch.allclose(value, weights[2][name], rtol=0, atol=1e-5), name


@pytest.mark.parametrize("script", OLD_FORMS)
def test_each_old_form_warns_once(script: str, runs: dict[str, tuple[list[float], list[str], Path]]) -> None:
    told = runs[script][1]
    assert len(told) == len(OLD_FORMS[script]), told  # on rank 0
    for form in OLD_FORMS[script]:
        assert any(text.startswith(form) or f" {form}" in text for text in told), form
