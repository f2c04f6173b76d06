#!/usr/bin/env bash
# Runs the kernels' tests on one Hopper card with torch, Triton and what the package depends on; vLLM is not needed.
# About 6 minutes on 16 cores.
#
#   bash tests/gpu/kernels.sh [PYTEST ARGUMENTS...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-python3}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-/tmp/kernels-triton-cache}
"$python" -c 'import torch, triton; print("torch", torch.__version__, "triton", triton.__version__, torch.cuda.get_device_name())'
files="tests/gpu/test_kernels.py tests/gpu/test_prefill.py tests/gpu/test_fp8.py"
# Compiling takes most of the time: several processes share the GPU and Triton's cache.
workers=()
if "$python" -c 'import xdist' 2>/dev/null; then workers=(-n "${WORKERS:-8}" --dist worksteal); fi
# shellcheck disable=SC2086
exec "$python" -m pytest -q -m gpu -p no:cacheprovider -p no:benchmark --import-mode=importlib "${workers[@]}" "$@" $files
