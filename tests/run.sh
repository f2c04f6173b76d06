#!/usr/bin/env bash
# Makes the environment of examples/setup.sh with the test tools, then runs ruff, mypy and pytest on two processes.
#
#   bash tests/run.sh [PYTEST ARGUMENTS...]             the default tier: what every change must pass
#   bash tests/run.sh --full [PYTEST ARGUMENTS...]      the tests that the default tier leaves out; no ruff, no mypy.
#                                                       Servers start beside each other there, and time out on a busy
#                                                       machine: what fails runs once more, alone
#   bash tests/run.sh --matrix [PYTEST ARGUMENTS...]    the tests of other vLLM releases, whose sources are downloaded
#   bash tests/run.sh --lint                            ruff and mypy alone
#   bash tests/run.sh --upstream SOURCES [OPTIONS...]   vLLM's own tests with and without the plugin, from the sources of
#                                                       the installed release; --upstream --help says how to get them
#
# --cov, in front of the arguments of pytest, reports line and branch coverage. Environment: WORKERS, the number of
# processes (2); LINT=0 leaves ruff and mypy out of the default tier.
# Exit status 0 only if every tool passes. pytest comes last, so that its closing line is the last one.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
tier=default
case ${1:-} in
    --full | --matrix | --lint | --upstream)
        tier=${1#--}
        shift
        ;;
    -h | --help)
        sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
        exit 0
        ;;
esac

setup=(--test)
if [ "$tier" = full ]; then setup+=(--real-model); fi # its tests would be skipped without
bash "$root/examples/setup.sh" "${setup[@]}"
cd "$root"
PATH=$root/.venv/bin:$PATH
export PATH

if [ "$tier" = upstream ]; then
    # Beside the environment: pytest-asyncio would take part in the other tiers.
    extra=$(mktemp -d)
    trap 'rm -rf "$extra"' EXIT
    python -m pip install --quiet --target "$extra" --no-deps tblib pytest-asyncio soundfile cffi pycparser
    PYTHONPATH=$extra python -m tests.tools.upstream_tests "$@"
    exit
fi

# Many tests start processes that import vLLM, and each would compile 2,600 modules again.
unset PYTHONDONTWRITEBYTECODE

# Two workers on two cores: more threads in each only make them wait for each other.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
pytest=(pytest -n "${WORKERS:-2}" --dist worksteal)
of_full=(-m "(full or slow) and not gpu and not matrix")
case $tier in
    full) pytest+=("${of_full[@]}") ;;
    matrix) pytest+=(-m "matrix and not gpu" --dist loadgroup) ;;
esac
if [ "${1:-}" = --cov ]; then
    shift
    pytest+=(--cov=vllm_moe_oracle --cov-branch --cov-report=term:skip-covered --cov-report=xml)
fi

failed=""
check() {
    printf '== %s\n' "$*"
    "$@" || failed="$failed '$*'"
}
if { [ "$tier" = default ] && [ "${LINT:-1}" = 1 ]; } || [ "$tier" = lint ]; then
    check ruff check .
    check ruff format --check .
    check mypy
    if [ -n "$failed" ]; then printf '== FAILED before pytest:%s\n' "$failed"; fi
fi
if [ "$tier" != lint ]; then
    printf '== %s\n' "${pytest[*]} $*"
    status=0
    "${pytest[@]}" "$@" || status=$?
    # 1: all tests ran, and some failed. Any other status means that some did not run.
    if [ "$tier" = full ] && [ "$status" = 1 ]; then
        printf '== once more, alone: what failed above\n'
        status=0
        pytest "${of_full[@]}" --last-failed --last-failed-no-failures none -rA --show-capture=no "$@" || status=$?
        if [ "$status" = 0 ]; then printf '== PASSED only alone: the tests of the last run\n'; fi
    fi
    if [ "$status" != 0 ]; then failed="$failed 'pytest'"; fi
fi
[ -z "$failed" ]
