#!/usr/bin/env bash
# Train the example until it predicts held-out text with a loss of 2.3 nats per byte, and report what that took.
#     bash example/speedrun.sh [options of train.py, which replace those of the record below]
# Data: the standard library of the Python that runs. Environment: NPROC (ranks: as many as GPUs, or 2 without any), and
# what tests/env.sh takes. docs/results/speedrun.md has the table of records, and the rules.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. tests/env.sh examples

RECORD=(--num-layers 2 --dim-model 128 --lr 4e-3 --warmup 40 --steps 400 --no-recompute --dtype bf16)
RULES=(--seq-len 256 --batch-size 8 --validation-batches 8 --validate-every 20)

NPROC=${NPROC:-$("$PYTHON" -c 'import torch; print(torch.cuda.device_count() or 2)')}
cores=$(nproc)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > NPROC ? cores / NPROC : 1))}
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

echo "commit $(git rev-parse --short HEAD), options ${RECORD[*]} $*"
TIMEFORMAT='processor time of the whole run, start and validation included: %U s user, %S s system'
time "$PYTHON" -m torch.distributed.run --standalone --nproc_per_node "$NPROC" example/train.py --out "$out" \
    "${RECORD[@]}" "$@" "${RULES[@]}" --save-every 1000000 --no-tensorboard --no-plot >"$out/output" ||
    { cat "$out/output" >&2 && exit 1; }

"$PYTHON" - "$out/metrics.jsonl" "$NPROC" <<'PROGRAM'
import json
import platform
import sys

import torch

TARGET, TOKENS = 2.3, 8 * 256  # nats per byte; tokens in a step
path, ranks = sys.argv[1:]
device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
print(f"{ranks} ranks on {device}, Python {platform.python_version()}, torch {torch.__version__}")
seconds = 0.0
for line in open(path):
    record = json.loads(line)
    if "loss" in record:
        seconds += TOKENS / record["tokens_per_second"]
    elif "validation_loss" in record:
        step, loss = record["step"], record["validation_loss"]
        print(f"step {step:>4}  held-out loss {loss:.4f}  {seconds:7.1f} s of training")
        if loss <= TARGET:
            print(f"reached {TARGET}: {step} steps, {step * TOKENS:,} tokens, {seconds:.1f} s of training")
            break
else:
    sys.exit(f"{TARGET} was not reached")
PROGRAM
