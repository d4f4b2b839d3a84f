#!/usr/bin/env bash
# Put faults in and see what the ranks make of them.
#     bash tests/fault/run.sh              the short form, as in the test suite
#     bash tests/fault/run.sh --repeat 10  its fast tier so often, or until it fails
#     bash tests/fault/run.sh --long       every rank x every collective, many times; writes docs/results/faults.json
# Further arguments of --long go to tests/fault/long_form.py (--repeats, --world, --out).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python="${BMTRAIN_PYTHON:-python}"
if [ "${1:-}" = --long ]; then
    shift
    PYTHONPATH=".:tests:tests/fault${PYTHONPATH:+:$PYTHONPATH}" exec "$python" -c 'import long_form; long_form.main()' "$@" # ranks import it by its name
fi
if [ "${1:-}" = --repeat ]; then
    times="$2"
    shift 2
    for ((run = 1; run <= times; ++run)); do
        "$python" -m pytest tests/fault -m "not slow" "$@"
        echo "run.sh: passed $run of $times"
    done
    exit
fi
exec "$python" -m pytest tests/fault "$@"
