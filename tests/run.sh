#!/usr/bin/env bash
# Makes the environment of examples/setup.sh with the test tools, then runs ruff, mypy and pytest.
#
#   bash tests/run.sh [PYTEST ARGUMENTS...]
#   bash tests/run.sh --matrix [PYTEST ARGUMENTS...]    the tests that need other vLLM releases
#
# Exit status 0 only if every tool is content. pytest comes last, so that its closing line is the last one.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
bash "$root/examples/setup.sh" --test
cd "$root"
PATH=$root/.venv/bin:$PATH
export PATH

if [ "${1:-}" = --matrix ]; then
    shift
    # By file: their tests of the oldest and the newest release run by default, and are no "matrix" by their mark.
    exec pytest -m "not gpu and not slow" --durations=5 \
        tests/cpu/test_surface.py tests/cpu/test_registration.py tests/e2e/test_matrix.py "$@"
fi

failed=""
check() {
    printf '== %s\n' "$*"
    "$@" || failed="$failed '$*'"
}
check ruff check .
check ruff format --check .
check mypy
if [ -n "$failed" ]; then printf '== FAILED before pytest:%s\n' "$failed"; fi
printf '== pytest %s\n' "$*"
pytest "$@" || failed="$failed 'pytest'"
[ -z "$failed" ]
