"""Held-out loss of Adam and Muon over the same tokens; minutes on one CPU.

    python example/compare_optimizers.py --json docs/results/muon.json && python docs/draw.py

Each optimizer is tuned once: short runs of train.py with several learning rates, of which the lowest held-out loss
decides. Then it trains for longer with that rate. Everything else is equal: model, seed, text, order of the samples.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

OPTIMIZERS = ("adam", "muon")
TRAIN = Path(__file__).with_name("train.py")
MODEL = ["--num-layers", "2", "--dim-model", "64", "--seq-len", "128", "--batch-size", "8"]
QUIET = ["--no-plot", "--no-tensorboard"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--rates", default="1e-3,2e-3,4e-3,8e-3,1.6e-2,3.2e-2", help="learning rates to try")
    parser.add_argument("--tune-steps", type=int, default=150, help="steps of a run for tuning")
    parser.add_argument("--steps", type=int, default=600, help="steps of the runs that are compared")
    parser.add_argument("--data", help="as of train.py")
    parser.add_argument("--json", type=Path, default=Path("muon.json"), help="file for the results")
    options = parser.parse_args()
    data = [] if options.data is None else ["--data", options.data]
    rates = [float(rate) for rate in options.rates.split(",")]
    result: dict[str, Any] = {"tokens_per_step": 8 * 128, "tuning": {}, "rate": {}, "losses": {}}
    for optimizer in OPTIMIZERS:
        ends = {rate: train(optimizer, rate, options.tune_steps, data)[-1][1] for rate in rates}
        best = min(ends, key=lambda rate: ends[rate])
        result["tuning"][optimizer] = list(ends.items())
        result["rate"][optimizer] = best
        result["losses"][optimizer] = train(optimizer, best, options.steps, data)
        print(f"{optimizer}: learning rate {best:g}, held-out loss {result['losses'][optimizer][-1][1]:.4f}")
    options.json.write_text(json.dumps(result) + "\n")


def train(optimizer: str, rate: float, steps: int, data: list[str]) -> list[tuple[int, float]]:
    """Returns held-out losses by step of one run of train.py; inf if it ended in NaN."""
    with tempfile.TemporaryDirectory() as folder:
        chosen = ["--optimizer", optimizer, "--lr", str(rate), "--steps", str(steps), "--out", folder]
        every = ["--validate-every", str(max(steps // 12, 1))]
        command = [sys.executable, str(TRAIN), *MODEL, *QUIET, *chosen, *every, *data]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        lines = Path(folder, "metrics.jsonl").read_text().splitlines() if done.returncode == 0 else []
    if not lines:
        print(f"{optimizer} at {rate:g} failed:\n{done.stderr[-500:]}", file=sys.stderr)
        return [(steps, float("inf"))]
    records = map(json.loads, lines)
    return [(r["step"], round(r["validation_loss"], 4)) for r in records if "validation_loss" in r]


if __name__ == "__main__":
    main()
