#!/usr/bin/env bash
# The whole core under AddressSanitizer and UBSanitizer, with the CPU tests: prints every report, and fails if there is one.
#     bash tests/fault/sanitize.sh                      all parts below (a quarter of an hour, and the build the first time)
#     bash tests/fault/sanitize.sh core blocks          these parts
#     bash tests/fault/sanitize.sh tests/unit -x        these tests, with arguments of pytest
# It builds a copy of the checkout in build/sanitized, whose core is not the one that you use. Needs g++.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# What compiles programs of its own (some with a sanitizer), measures memory or time, or reads texts and no more.
left_out="$(echo tests/unit/test_{benchmark_adam,compiler_import,convert_layouts,cpu_run,docs,doctests,doctor,harness,launch}.py \
    tests/unit/test_{launch_doctest,newcomer,packaging,plan,terminal,topology,update_queue,*_races}.py \
    tests/multiproc/test_{benchmarks,compiled_*,doctor,host_cost}.py tests/examples/test_readme.py)"
declare -A parts=(
    [core]="$(echo tests/unit/test_*.py)"
    [arguments]="tests/multiproc/test_wrong_arguments.py"
    [exchange]="$(echo tests/multiproc/test_{comm_*,in_place,init_*,synchronize,two_hosts,traffic}.py)"
    [optimizers]="$(echo tests/multiproc/test_{adam_*,optim_*,offload_*,virtual_shards}.py)"
    [models]="$(echo tests/multiproc/test_{nn,loss,pipeline*,parity_*,random_programs,soak,unusual_models,wrapper*}.py \
        tests/{models,examples}/test_*.py)"
    [files]="$(echo tests/multiproc/test_{checkpoint,store*,weights}.py tests/fault/test_checkpoint_*.py)"
    [faults]="$(echo tests/fault/test_{ends,faults,fuzz,link_cut,lost_replica}.py)"
)
without() { # those of the first list that are not in the second one, line by line
    grep -vxFf <(tr ' ' '\n' <<<"$2") <(tr ' ' '\n' <<<"$1")
}
# What no other part has, so that a new test is in one.
parts[blocks]="$(without "$(echo tests/multiproc/test_*.py)" "${parts[*]}" | xargs)"
python="${BMTRAIN_PYTHON:-python}"
copy="$PWD/build/sanitized"
reports="$copy/reports"
mkdir -p "$copy"
find "$copy" -mindepth 1 -maxdepth 1 ! -name build -exec rm -rf {} + # what the checkout has no longer
tar --exclude=./build --exclude=./.git --exclude='*.so' -cf - . | tar -C "$copy" -xf -
cd "$copy"
BMTRAIN_SANITIZE=address,undefined "$python" setup.py --quiet build_ext --inplace
compiler="${CXX:-g++}"
# Python itself is not built with sanitizers, and torch throws through the library that they have to know first. What
# torch and Python keep until their end is no leak of ours.
preload="$("$compiler" -print-file-name=libasan.so) $("$compiler" -print-file-name=libstdc++.so)"

status=0
check() { # runs tests; the name of a part first
    local name="$1" started=$SECONDS
    shift
    rm -rf "${reports:?}/$name"
    mkdir -p "$reports/$name"
    LD_PRELOAD="$preload" ASAN_OPTIONS="detect_leaks=0:log_path=$reports/$name/asan" \
        UBSAN_OPTIONS="print_stacktrace=1:log_path=$reports/$name/ubsan" \
        "$python" -m pytest -p no:cacheprovider "$@" || status=$?
    if [ -n "$(ls -A "$reports/$name")" ]; then
        tail -n +1 "$reports/$name"/*
        status=1
    fi
    echo "sanitize.sh: $name: $(ls "$reports/$name" | wc -l) processes had reports, $((SECONDS - started)) s"
}

if [ $# = 0 ]; then
    set -- core arguments exchange blocks optimizers models files faults
fi
if [ -z "${parts[$1]:-}" ]; then
    check chosen "$@"
    exit "$status"
fi
for name in "$@"; do
    mapfile -t files < <(without "${parts[$name]:?no such part: $name}" "$left_out")
    check "$name" -m "not slow" "${files[@]}"
done
exit "$status"
