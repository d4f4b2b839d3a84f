# Sourced by tests/run.sh and example/run.sh from the top of the checkout: . tests/env.sh EXTRA...
#
# Leaves in $PYTHON an interpreter that has torch, this tree's bmtrain with its core built, and the named optional
# dependencies of pyproject.toml. It uses the active virtual environment, else .venv in the checkout, which it
# makes if there is none. BMTRAIN_PYTHON names the interpreter instead: used directly if it belongs to a virtual
# environment, else .venv is made from it.

_fail() {
    echo "set-up: $*" >&2
    exit 1
}

_is_virtual() { # conda environments count: they too are there to be installed into
    "$1" -c 'import os, sys
conda = os.path.isdir(os.path.join(sys.prefix, "conda-meta"))
sys.exit(sys.prefix == sys.base_prefix and not conda)' 2>/dev/null
}

_find_base() { # the interpreter to make .venv from
    local name
    for name in ${BMTRAIN_PYTHON:-python3 python3.13 python3.12 python3.11 python3.10 python}; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    _fail "${BMTRAIN_PYTHON:-python3} is not a Python >= 3.10; name one in BMTRAIN_PYTHON"
}

_make_venv() {
    local base options=()
    base=$(_find_base) || exit 1
    # An interpreter that has torch (a container made for its GPU) shares it: another build may not fit the driver.
    if "$base" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)'; then
        options=(--system-site-packages)
    fi
    echo "set-up: making .venv with $base" >&2
    rm -rf .venv
    "$base" -m venv "${options[@]}" .venv >&2 || {
        rm -rf .venv
        _fail "'$base -m venv' does not work (on Debian and Ubuntu: apt-get install python3-venv)"
    }
}

_set_up() {
    if [ -n "${BMTRAIN_PYTHON:-}" ] && _is_virtual "$BMTRAIN_PYTHON"; then
        PYTHON=$("$BMTRAIN_PYTHON" -c 'import sys; print(sys.executable)')
    elif [ -z "${BMTRAIN_PYTHON:-}" ] && [ -n "${VIRTUAL_ENV:-${CONDA_PREFIX:-}}" ] && _is_virtual python; then
        PYTHON=$(python -c 'import sys; print(sys.executable)')
    else
        # pip comes last: without it an earlier run was interrupted. Or the interpreter behind it is gone.
        { [ -x .venv/bin/pip ] && .venv/bin/python -c ''; } || _make_venv
        PYTHON=$PWD/.venv/bin/python
    fi
    "$PYTHON" tests/environment.py "$@" || _fail "failed, see above"
}

unset PYTHONDONTWRITEBYTECODE # which images of containers set: every process would compile torch's modules again
mkdir -p build
exec 9>build/set-up.lock
! command -v flock >/dev/null || flock 9 # two runs in one checkout: the second waits, then finds all done
_set_up "$@" 9>&- </dev/null
exec 9>&-
export PYTHON
