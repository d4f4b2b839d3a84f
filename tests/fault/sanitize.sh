#!/usr/bin/env bash
# The whole core under AddressSanitizer and UBSanitizer, with the CPU tests: prints every report, and fails if there is one.
#     bash tests/fault/sanitize.sh                      tests of the core, and of ranks that train (half an hour, most of it
#                                                       the build; the second time only the tests)
#     bash tests/fault/sanitize.sh tests/unit -x        these tests, with arguments of pytest
# It builds a copy of the checkout in build/sanitized, whose core is not the one that you use. Needs g++.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python="${BMTRAIN_PYTHON:-python}"
copy="$PWD/build/sanitized"
reports="$copy/reports"
mkdir -p "$copy"
tar --exclude=./build --exclude=./.git --exclude='*.so' -cf - . | tar -C "$copy" -xf -
cd "$copy"
BMTRAIN_SANITIZE=address,undefined BMTRAIN_WERROR=0 "$python" setup.py --quiet build_ext --inplace

if [ $# = 0 ]; then
    set -- -m "not slow" tests/unit/test_{ops,comm,flight_recorder,watchdog,adam,sgd_lion,loss}.py \
        tests/unit/test_kernels_{reduce,convert,momentum,adam}.py \
        tests/multiproc/test_{comm_shm,comm_core,blocks,adam_ranks,offload_overlap}.py
fi
rm -rf "$reports"
mkdir "$reports"
compiler="${CXX:-g++}"
# Python itself is not built with sanitizers, and torch throws through the library that they have to know first. What
# torch and Python keep until their end is no leak of ours.
preload="$("$compiler" -print-file-name=libasan.so) $("$compiler" -print-file-name=libstdc++.so)"
status=0
LD_PRELOAD="$preload" ASAN_OPTIONS="detect_leaks=0:log_path=$reports/asan" \
    UBSAN_OPTIONS="print_stacktrace=1:log_path=$reports/ubsan" "$python" -m pytest -p no:cacheprovider "$@" || status=$?
if [ -n "$(ls -A "$reports")" ]; then
    tail -n +1 "$reports"/*
    echo "sanitize.sh: $(ls "$reports" | wc -l) processes had reports, see above" >&2
    exit 1
fi
exit "$status"
