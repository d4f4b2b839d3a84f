#!/usr/bin/env bash
# Set up, lint, and run every test that this machine can run.
#     bash tests/run.sh [--fast] [pytest arguments]
# --fast leaves out the tests marked slow. Environment: BMTRAIN_PYTHON (tests/env.sh), BMTRAIN_CUDA, MAX_JOBS (setup.py).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

arguments=()
for argument in "$@"; do
    if [ "$argument" = --fast ]; then
        arguments+=(-m "not slow")
    else
        arguments+=("$argument")
    fi
done

export BMTRAIN_WERROR="${BMTRAIN_WERROR:-1}" # warnings in our own files are errors here, and warnings only where users build
. tests/env.sh test examples docs
"$PYTHON" -c 'import bmtrain, json; print("build:", json.dumps(bmtrain.build_info(), indent=1))'

status=0
check() { # runs a linter, says how long it took, remembers its failure
    local started=$SECONDS
    if "$@"; then
        echo "passed in $((SECONDS - started)) s: ${*:1:5}"
    else
        echo "FAILED: ${*:1:5}" >&2
        status=1
    fi
}
mapfile -t cpp < <(find csrc tests -name '*.cpp' -o -name '*.h' -o -name '*.inl' -o -name '*.cu' -o -name '*.cuh')
check "$PYTHON" -m ruff check --quiet .
check "$PYTHON" -m ruff format --quiet --check .
check "$PYTHON" -m mypy --no-error-summary
check "$(dirname "$PYTHON")/clang-format" --dry-run -Werror "${cpp[@]}"

"$PYTHON" -m pytest --durations=15 "${arguments[@]}" </dev/null || status=$?
[ "$status" -eq 0 ] || echo "tests/run.sh: something failed, see above" >&2
exit "$status"
