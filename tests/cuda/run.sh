#!/usr/bin/env bash
# On a machine with a GPU: build with CUDA, run the tests that need one, measure. Less than ten minutes.
#     bash tests/cuda/run.sh [FOLDER]
# Results go to FOLDER (default: docs/results/gpu), to be committed: environment.txt, tests.txt, doctor.txt, bench.json, offload.json.
# Uses the interpreter BMTRAIN_PYTHON (default: python3), which has torch with CUDA, pytest and ninja; installs nothing.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

python=${BMTRAIN_PYTHON:-python3}
folder=${1:-docs/results/gpu}
mkdir -p "$folder"
status=0
export BMTRAIN_CUDA=1 BMTRAIN_WERROR=0 MAX_JOBS="${MAX_JOBS:-$(nproc)}" PYTHONUNBUFFERED=1
TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-$("$python" -c 'import torch; print("%d.%d" % torch.cuda.get_device_capability())')} || {
    echo "tests/cuda/run.sh: $python sees no usable GPU" >&2
    exit 1
}
export TORCH_CUDA_ARCH_LIST

part() { # part SECONDS FILE COMMAND...: runs it, keeps its output, remembers its failure, and goes on
    local limit=$1 file=$2 started=$SECONDS
    shift 2
    echo "== ${*:1:6}"
    timeout "$limit" "$@" 2>&1 | tee "$folder/$file" | tail -n 60
    local result=${PIPESTATUS[0]}
    echo "== $([ "$result" -eq 0 ] && echo passed || echo "FAILED ($result)") in $((SECONDS - started)) s"
    [ "$result" -eq 0 ] || status=1
    return "$result"
}

part 30 environment.txt sh -c 'nvidia-smi; nvcc --version; git rev-parse HEAD 2>/dev/null; date -u'
part 300 build.txt "$python" setup.py --quiet build_ext --inplace || exit 1
# The tests first that need little time, so that a run that is cut short has them.
part 240 tests.txt "$python" -m pytest -q --maxfail=20 --durations=10 tests/cuda -m "not slow" -p no:cacheprovider
part 60 doctor.txt "$python" -m bmtrain doctor --gpus
part 200 bench.txt "$python" -m bmtrain bench gpu --parts adam,norm,cross-entropy,step --json "$folder/bench.json"
part 240 offload.txt "$python" -m bmtrain bench gpu --parts offload --json "$folder/offload.json"
if command -v compute-sanitizer >/dev/null; then
    part 120 sanitizer.txt compute-sanitizer --error-exitcode 9 "$python" -m pytest -q -p no:cacheprovider \
        tests/cuda/test_gpu_kernels.py -k "(test_cast and 255) or (test_adam_has and 3.0) or (test_cross_entropy and shape1)"
fi
rm -f "$folder/build.txt"
echo "tests/cuda/run.sh: $([ "$status" -eq 0 ] && echo "all passed" || echo "something failed, see above") after $SECONDS s; results in $folder"
exit "$status"
