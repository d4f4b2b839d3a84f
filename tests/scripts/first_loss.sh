#!/usr/bin/env bash
# Seconds to the first loss of the example in a fresh clone and an empty environment, after torch is there.
#     bash tests/scripts/first_loss.sh          # by the first command of the README, which compiles
#     bash tests/scripts/first_loss.sh WHEEL    # by a wheel of this tree
# TORCH is what pip installs (torch==2.13.0, say). The installation of torch is timed apart.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
wheel=${1:+$(realpath "$1")}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
git clone -q "$root" "$folder/clone"
"${BMTRAIN_PYTHON:-python3}" -m venv "$folder/env"
. "$folder/env/bin/activate"
unset PYTHONPATH
export PATH=${PATH//\/usr\/lib\/ccache:/} PIP_DISABLE_PIP_VERSION_CHECK=1
SECONDS=0
pip install -q "${TORCH:-torch}" numpy
echo "torch: $SECONDS s"
cd "$folder"
SECONDS=0
{
    if [ -n "$wheel" ]; then
        pip install -q --no-deps "$wheel"
        python -m torch.distributed.run --standalone --nproc-per-node 2 clone/example/train.py --steps 2 --out out
    else
        STEPS=2 bash clone/example/run.sh
    fi
} 2>&1 | while read -r line; do
    case $line in
    *loss*)
        echo "first loss: $SECONDS s: $line"
        break
        ;;
    esac
done || true # what ran is ended by the closed pipe
