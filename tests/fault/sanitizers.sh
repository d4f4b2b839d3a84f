#!/usr/bin/env bash
# Build the CPU core with AddressSanitizer and UndefinedBehaviorSanitizer in a copy of the tree, and run tests with it.
#     bash tests/fault/sanitizers.sh [FOLDER [pytest arguments]]
# FOLDER (default: build/sanitized) keeps the copy and what was compiled. Any report ends the process that made it, which
# fails its test. Left out, with reasons:
# - leaks (detect_leaks=0): Python and torch keep what they have until the process ends;
# - vptr (-fno-sanitize=vptr): the check asks for the type information of torch's classes, which torch does not export;
# - tests that start a Python without the preloaded sanitizer, or compile something for themselves.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
folder="${1:-build/sanitized}"
shift || true
python="${BMTRAIN_PYTHON:-python}"
mkdir -p "$folder"
git ls-files -z | tar -c --null -T - | tar -x -C "$folder"
cd "$folder"

checks="-fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=undefined"
CFLAGS="$checks -fno-omit-frame-pointer -O1 -g1" LDFLAGS="-fsanitize=address,undefined" BMTRAIN_CUDA=0 \
    "$python" setup.py --quiet build_ext --inplace

compiler="${CXX:-g++}"
# libstdc++ too: the sanitizer looks for its functions before Python has loaded it.
preload="$("$compiler" -print-file-name=libasan.so) $("$compiler" -print-file-name=libstdc++.so.6)"
if [ $# -eq 0 ]; then
    set -- tests/unit/test_ops.py tests/unit/test_comm.py tests/unit/test_kernels_*.py tests/unit/test_adam*.py \
        tests/multiproc/test_blocks.py tests/multiproc/test_comm_core.py tests/multiproc/test_comm_shm.py \
        tests/multiproc/test_offload_overlap.py tests/multiproc/test_virtual_shards.py
fi
LD_PRELOAD="$preload" ASAN_OPTIONS="detect_leaks=0:abort_on_error=1" UBSAN_OPTIONS="print_stacktrace=1" \
    exec "$python" -m pytest -p no:cacheprovider "$@"
