#!/usr/bin/env bash
# Set up, lint, and run every test that this machine can run.
#     bash tests/run.sh [--fast] [pytest arguments]
# --fast leaves out the tests marked slow, clang-tidy, and what only they need; it skips tests of libraries that are not
# installed, and mypy without these. It tests before it lints.
# Environment: BMTRAIN_PYTHON (tests/env.sh), BMTRAIN_CUDA, MAX_JOBS (setup.py).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

arguments=()
fast=
for argument in "$@"; do
    if [ "$argument" = --fast ]; then
        fast=1
        arguments+=(-m "not slow")
    else
        arguments+=("$argument")
    fi
done

# On a machine of CI: the launchers that tests/launchers starts, what tests/unit/test_aarch64.py runs, and filesystems
# with reflinks. Elsewhere their tests are skipped where one is missing.
if [ "${CI:-}" = true ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null &&
    ! { command -v slurmctld && command -v mpirun && command -v qemu-aarch64 && command -v aarch64-linux-gnu-g++ &&
        command -v mkfs.xfs && command -v mkfs.btrfs; } >/dev/null; then
    export DEBIAN_FRONTEND=noninteractive
    { apt-get update -qq && apt-get install -qq --no-install-recommends \
        slurmctld slurmd slurm-client openmpi-bin qemu-user g++-aarch64-linux-gnu xfsprogs btrfs-progs >/dev/null; } ||
        echo "tests/run.sh: Slurm, Open MPI, the emulator of Arm and filesystems could not be installed" >&2
fi

if [ -n "$fast" ]; then
    . tests/env.sh test examples
else
    . tests/env.sh test test-slow examples docs deepspeed
fi
"$PYTHON" -c 'import bmtrain, json; print("build:", json.dumps(bmtrain.build_info(), indent=1))'

status=0
linters=()
check() { # starts a linter, which says how long it took
    {
        local started=$SECONDS
        if "$@"; then
            echo "passed in $((SECONDS - started)) s: ${*:1:5}"
        else
            echo "FAILED: ${*:1:5}" >&2
            false
        fi
    } &
    linters+=($!)
}
lint() {
    local cpp clock linter
    check "$PYTHON" -c 'import bmtrain, sys
sys.exit("\n".join(bmtrain.build_info()["warnings"]) or None)' # of the compiler, in our own files
    mapfile -t cpp < <(find csrc tests -name '*.cpp' -o -name '*.h' -o -name '*.inl' -o -name '*.cu' -o -name '*.cuh')
    check "$PYTHON" tests/budget.py
    check "$PYTHON" -m ruff check --quiet .
    check "$PYTHON" -m ruff format --quiet --check .
    check "$(dirname "$PYTHON")/lint-imports" --no-cache
    if [ -z "$fast" ] || "$PYTHON" -c 'from importlib.metadata import version as v; v("mypy"), v("lightning")' 2>/dev/null; then
        check "$PYTHON" -m mypy --no-error-summary
    fi
    check "$(dirname "$PYTHON")/clang-format" --dry-run -Werror "${cpp[@]}"
    [ -n "$fast" ] || check "$PYTHON" tests/tidy.py
    while sleep 8 >/dev/null && kill -0 $$; do echo "linters: $SECONDS s since the start"; done 2>/dev/null &
    clock=$!
    for linter in "${linters[@]}"; do
        wait "$linter" || status=1
    done
    kill "$clock"
    wait "$clock" 2>/dev/null || true
}
[ -n "$fast" ] || lint

# A worker more than processors, as many tests wait. -n 0 among the arguments runs all in one process, as --pdb needs it.
workers=(-n "$(($(nproc) + 1))" --maxprocesses 8 --no-loadscope-reorder)
result=0
"$PYTHON" -u -m pytest "${workers[@]}" --durations=15 "${arguments[@]}" </dev/null || result=$?
[ -z "$fast" ] || [ "$result" -eq 5 ] || lint
if [ "$status" -ne 0 ] || { [ "$result" -ne 0 ] && [ "$result" -ne 5 ]; }; then
    echo "tests/run.sh: something failed, see above" >&2
    exit 1
elif [ "$result" -eq 5 ]; then # pytest's status for this, and ours
    echo "tests/run.sh: no test matched: $*" >&2
fi
exit "$result"
