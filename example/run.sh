#!/usr/bin/env bash
# Set up, train the example GPT-2 on every rank, then sample from its checkpoint in a fresh process.
#     bash example/run.sh [options of train.py]
# Environment: NPROC (ranks: as many as GPUs, or 2 without any), STEPS, DATA (a file or folder of text), OUT (folder
# for results: out/gpt2 in the checkout), and what tests/env.sh takes. Paths are relative to where you are.
set -euo pipefail
here=$PWD
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
. tests/env.sh examples
cd "$here"

NPROC=${NPROC:-$("$PYTHON" -c 'import torch; print(torch.cuda.device_count() or 2)')}
cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > NPROC ? cores / NPROC : 1))}

options=(--out "${OUT:-$root/out/gpt2}" ${STEPS:+--steps "$STEPS"} ${DATA:+--data "$DATA"} "$@")
echo "example/run.sh: starting $NPROC ranks"
"$PYTHON" -m torch.distributed.run --standalone --nproc_per_node "$NPROC" "$root/example/train.py" "${options[@]}"

out=
for ((i = 0; i < ${#options[@]}; i++)); do # the last --out wins, as it does in train.py
    case ${options[i]} in
    --out) out=${options[i + 1]} ;;
    --out=*) out=${options[i]#--out=} ;;
    esac
done
echo "example/run.sh: sampling from the checkpoint in a fresh process"
"$PYTHON" "$root/example/generate.py" --out "$out"
