#!/usr/bin/env bash
# Builds the wheel and the sdist, installs each in an empty environment, and uses what was installed.
#
#   bash tests/tools/check_package.sh [FOLDER]      keeps the distributions in FOLDER
#
# Environment: PYTHON (default python3). Needs a package registry that pip can reach; neither torch nor vLLM.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
dist=$work/dist
if [ -n "${1:-}" ]; then
    mkdir -p "$1"
    dist=$(cd "$1" && pwd)
fi

"$python" -m venv "$work/build"
"$work/build/bin/pip" --disable-pip-version-check install -q build twine
# From a copy: a build folder left in the tree would find its way into the next wheel.
git -C "$root" archive --format=tar HEAD | { mkdir "$work/source" && tar -x -C "$work/source"; }
"$work/build/bin/python" -m build --outdir "$dist" "$work/source" >"$work/build.log" 2>&1 || {
    tail -n 20 "$work/build.log" >&2
    exit 1
}
"$work/build/bin/twine" check --strict "$dist"/*

for file in "$dist"/*.whl "$dist"/*.tar.gz; do
    name=$(basename "$file")
    "$python" -m venv --clear "$work/empty"
    "$work/empty/bin/pip" --disable-pip-version-check install -q "$file"
    (
        cd "$work" # not the sources: what is installed is what is used
        "$work/empty/bin/vllm-moe-oracle" --version
        "$work/empty/bin/vllm-moe-oracle" explain "$root/examples/qwen3-30b-a3b-mxfp8.json" --device nvidia-h200 --json |
            "$work/empty/bin/python" -c 'import json, sys; print(json.load(sys.stdin)["groups"][0]["decision"]["backend"])'
        "$work/empty/bin/python" -W error -c 'import vllm_moe_oracle.api, importlib.metadata as m
assert [e.value for e in m.entry_points(group="vllm.general_plugins")] == ["vllm_moe_oracle.plugin:register"]'
    )
    printf 'package: %s installs and runs in an empty environment\n' "$name"
done
