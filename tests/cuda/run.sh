#!/usr/bin/env bash
# On a machine with a GPU: build with CUDA, run the tests that need one, measure. Less than ten minutes.
#     bash tests/cuda/run.sh [FOLDER]
# Results go to FOLDER (default: docs/results/gpu), to be committed: environment.txt, gpu-tests.txt, doctor.txt, bench.txt,
# bench.json, offload.json; gpu-ranks.txt, sanitizer.txt and tests.txt if there is time.
# Uses the interpreter BMTRAIN_PYTHON (default: python3), which has torch with CUDA, pytest, ninja and setuptools >= 77;
# installs nothing. BMTRAIN_GPU_SECONDS (default: 570) ends what would take longer: what matters most comes first.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

python=${BMTRAIN_PYTHON:-python3}
folder=${1:-docs/results/gpu}
seconds=${BMTRAIN_GPU_SECONDS:-570}
status=0
export BMTRAIN_CUDA=1 MAX_JOBS="${MAX_JOBS:-$(nproc)}" PYTHONUNBUFFERED=1
TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-$(
    "$python" -W ignore -c 'import torch; torch.cuda.init(); print("%d.%d" % torch.cuda.get_device_capability())' 2>/dev/null
)} || {
    echo "tests/cuda/run.sh: $python sees no usable GPU: try $python -c 'import torch; torch.cuda.init()'" >&2
    exit 1
}
export TORCH_CUDA_ARCH_LIST
mkdir -p "$folder"
rm -f "$folder"/{environment,build,gpu-tests,gpu-ranks,doctor,bench,sanitizer,tests}.txt "$folder"/{bench,offload}.json

part() { # part SECONDS FILE COMMAND...: runs it, keeps its output, remembers its failure, and goes on
    local limit=$1 file=$2 started=$SECONDS
    shift 2
    echo "== ${*:1:6}"
    [ "$limit" -le $((seconds - started)) ] || limit=$((seconds - started))
    if [ "$limit" -le 5 ]; then
        echo "== LEFT OUT: $seconds s are over"
        status=1
        return 1
    fi
    timeout --signal=INT --kill-after=10 "$limit" "$@" 2>&1 | tee -a "$folder/$file" | tail -n 60
    local result=${PIPESTATUS[0]}
    echo "== $([ "$result" -eq 0 ] && echo passed || echo "FAILED ($result)") in $((SECONDS - started)) s"
    [ "$result" -eq 0 ] || status=1
    return "$result"
}

part 30 environment.txt sh -c 'nvidia-smi; nvcc --version; git rev-parse HEAD 2>/dev/null; date -u'
part 300 build.txt "$python" setup.py --quiet build_ext --inplace || exit 1
rm -f "$folder/build.txt"
tests=("$python" -m pytest -q --maxfail=20 --durations=10 -p no:cacheprovider)
part 100 gpu-tests.txt "${tests[@]}" tests/cuda/test_gpu_kernels.py
part 60 doctor.txt "$python" -m bmtrain doctor --gpus
part 120 bench.txt "$python" -m bmtrain bench gpu --parts adam,norm,cross-entropy,step,policies,tiers --json "$folder/bench.json"
part 90 bench.txt "$python" -m bmtrain bench gpu --parts offload --layers 12 --tokens 16384 --json "$folder/offload.json"
part 60 gpu-tests.txt "${tests[@]}" tests/cuda/test_gpu_tiers.py
part 240 gpu-tests.txt "${tests[@]}" tests/cuda/test_gpu_step.py
# What CPU ranks show of models, optimizers and checkpoints, on ranks that share the card.
part 120 gpu-ranks.txt env BMTRAIN_TEST_CUDA=1 BMTRAIN_BACKEND=gloo "${tests[@]}" -m "not slow" \
    tests/multiproc/test_{blocks,policies,optim_manager_state,checkpoint}.py
if command -v compute-sanitizer >/dev/null; then
    part 60 sanitizer.txt compute-sanitizer --error-exitcode 9 "${tests[@]}" tests/cuda/test_gpu_kernels.py \
        -k "(test_cast and 255) or (test_adam_has and 3.0) or (test_cross_entropy and shape1)"
fi
# The rest runs over stand-ins for a GPU, and has been run without one.
part 240 tests.txt "${tests[@]}" tests/cuda -m "not slow" \
    --ignore=tests/cuda/test_gpu_kernels.py --ignore=tests/cuda/test_gpu_step.py
echo "tests/cuda/run.sh: $([ "$status" -eq 0 ] && echo "all passed" || echo "something failed, see above") after $SECONDS s; results in $folder"
exit "$status"
