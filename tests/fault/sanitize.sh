#!/usr/bin/env bash
# The whole core under AddressSanitizer and UBSanitizer, with the CPU tests: prints every report, and fails if there is one.
#     bash tests/fault/sanitize.sh                      all parts below (half an hour, and the build the first time)
#     bash tests/fault/sanitize.sh core blocks          these parts
#     bash tests/fault/sanitize.sh tests/unit -x        these tests, with arguments of pytest
# It builds a copy of the checkout in build/sanitized, whose core is not the one that you use. Needs g++.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
declare -A parts=(
    [core]="$(echo tests/unit/test_{ops,comm,flight_recorder,watchdog,adam,adam_state,sgd_lion,loss}.py \
        tests/unit/test_{optim_manager,archive,lr_scheduler}.py tests/unit/test_kernels_{reduce,convert,momentum,adam,isa}.py)"
    [arguments]="tests/multiproc/test_wrong_arguments.py"
    [exchange]="$(echo tests/multiproc/test_comm_{shm,core,distributed,nccl,rooted,faults}.py \
        tests/multiproc/test_{in_place,synchronize,two_hosts,traffic}.py)"
    [blocks]="$(echo tests/multiproc/test_{blocks,block_rules,block_surface,parameters,reads,meta,policies,precision}.py \
        tests/multiproc/test_{selective,checkpointing,accumulation,level_0,hybrid,plain_holders,step_in_backward,inspect}.py)"
    [optimizers]="$(echo tests/multiproc/test_{adam_ranks,optim_manager,offload_overlap,offload_fraction,virtual_shards}.py)"
    [models]="$(echo tests/multiproc/test_{nn,loss,pipeline,parity_gpt2,wrapper,soak}.py)"
    [files]="$(echo tests/multiproc/test_{store,weights,checkpoint}.py)"
    [faults]="$(echo tests/fault/test_{faults,lost_replica}.py)"
)
python="${BMTRAIN_PYTHON:-python}"
copy="$PWD/build/sanitized"
reports="$copy/reports"
mkdir -p "$copy"
tar --exclude=./build --exclude=./.git --exclude='*.so' -cf - . | tar -C "$copy" -xf -
cd "$copy"
BMTRAIN_SANITIZE=address,undefined BMTRAIN_WERROR=0 "$python" setup.py --quiet build_ext --inplace
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
    read -ra files <<<"${parts[$name]:?no such part: $name}"
    check "$name" -m "not slow" "${files[@]}"
done
exit "$status"
