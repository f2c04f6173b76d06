"""Times layers that `shapes.json` does not list, other models, ranks, packings and dtypes, for profiles and to fit and
judge the latency model (`tests.tools.fit_latency`).

    python -m tests.gpu.unlisted_layers --jsonl unlisted.jsonl [--budget SECONDS] [--jobs N] [--only WORDS]

One H200 with vLLM and 16 cores: seven layers took 510 s at the eleven numbers of tokens, eighteen took 430 s at six;
most of it is compilation, in `--jobs` processes. With ``--tiles N`` the times of our kernels are those of the fastest
of N other tile configurations where one is faster, and `tests.tools.merge_times` takes both into the profile of this
GPU alone. Exit status 4 when a backend failed.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import msgspec

from tests.lib import cases
from tests.lib.cases import INT4_G32, RELU2, SILU, int_scheme, problem
from vllm_moe_oracle.core.problem import Activation, Problem, Routing, Scheme
from vllm_moe_oracle.devices import detect
from vllm_moe_oracle.measurements import model_shapes
from vllm_moe_oracle.measurements.kernel_shape import KernelShape, kernel_shape_of
from vllm_moe_oracle.measuring.benchmarks import BenchOptions, bench, conditions
from vllm_moe_oracle.settings import Settings

COUNTS = (1, 3, 8, 16, 48, 128, 300, 512, 1500, 4096, 8192)

SWIGLUOAI = replace(cases.GPT_OSS, interleaved=True)
MXFP8, INT4 = cases.MXFP8_W8A8, cases.INT4_G128
MXFP4 = Scheme("mxfp4", 4, 32, "compressed-tensors")
GPT_OSS = Scheme("mxfp4", 4, 32, "gpt_oss")
AWQ = int_scheme("awq", 4, 128, zeros=True)
GPTQ_ACT_ORDER = int_scheme("gptq", 4, 128, order="group")
CT = "compressed-tensors"


def layer_of(
    name: str, scheme: Scheme, experts: int, top_k: int, hidden: int, inner: int, ep: int = 1, tp: int = 1,
    activation: Activation = SILU, **more: object,
) -> Problem:  # fmt: skip
    """A layer on one of `ep` expert-parallel or `tp` tensor-parallel ranks; `inner` is one rank's."""
    return problem(
        layer=name, scheme=scheme, num_experts=experts, local_experts=experts // ep, top_k=top_k, hidden_size=hidden,
        intermediate_size=inner, activation=activation, routing=Routing(method="renormalize"), tp=tp, ep=ep, **more,
    )  # fmt: skip


LAYERS = (
    layer_of("int4_g128:qwen3-30b-a3b@ep4", INT4, 128, 8, 2048, 768, ep=4),
    layer_of("mxfp4:gpt-oss-120b@ep4", GPT_OSS, 128, 4, 2880, 2880, ep=4, activation=SWIGLUOAI, has_bias=True),
    layer_of("mxfp8:qwen3-235b-a22b@ep8", MXFP8, 128, 8, 4096, 1536, ep=8),
    layer_of("awq:qwen3-30b-a3b", AWQ, 128, 8, 2048, 768),
    layer_of("awq:deepseek-v3@ep8", AWQ, 256, 8, 7168, 2048, ep=8),
    layer_of("gptq-act-order:qwen3-30b-a3b", GPTQ_ACT_ORDER, 128, 8, 2048, 768),
    layer_of("int8_g128:phi-3.5-moe@tp2", int_scheme(CT, 8, 128), 16, 2, 4096, 3200, tp=2),
    layer_of("int4_g128:olmoe fp16", INT4, 64, 8, 2048, 1024, dtype="float16"),
    layer_of("mxfp8:olmoe", MXFP8, 64, 8, 2048, 1024),
    layer_of("mxfp4:olmoe", MXFP4, 64, 8, 2048, 1024),
    layer_of("int4_g128:llama-4-scout@tp4", INT4, 16, 1, 5120, 2048, tp=4),
    layer_of("mxfp8:deepseek-v2-lite", MXFP8, 64, 6, 2048, 1408),
    layer_of("awq:deepseek-v2-lite", AWQ, 64, 6, 2048, 1408),
    layer_of("int4_g32:granite-3b-moe", INT4_G32, 40, 8, 1536, 512),
    layer_of("mxfp4:ernie-4.5-21b", MXFP4, 64, 6, 2560, 1536),
    layer_of("mxfp8:hunyuan-a13b@tp2", MXFP8, 64, 8, 4096, 1536, tp=2),
    layer_of("int4_g128:dbrx@tp4", INT4, 16, 4, 6144, 2688, tp=4),
    layer_of("mxfp4:kimi-k2@ep8", MXFP4, 384, 8, 7168, 2048, ep=8),
    layer_of("int4_g32:kimi-k2@ep8", INT4_G32, 384, 8, 7168, 2048, ep=8),
    layer_of("mxfp8:glm-4.5@ep4", MXFP8, 160, 8, 5120, 1536, ep=4),
    layer_of("int4_g128:qwen1.5-moe", INT4, 60, 4, 2048, 1408),
    layer_of("mxfp8:minimax-m2@ep8", MXFP8, 256, 8, 3072, 1536, ep=8),
    layer_of("int4_g64:glm-4.5-air@tp2", int_scheme(CT, 4, 64), 128, 8, 4096, 704, tp=2),
    layer_of("mxfp8:qwen3-next", MXFP8, 512, 10, 2048, 512),
    layer_of("mxfp4:gpt-oss-20b@ep2", GPT_OSS, 32, 4, 2880, 2880, ep=2, activation=SWIGLUOAI, has_bias=True),
    layer_of("int8_channel:qwen3-30b-a3b", int_scheme(CT, 8, -1), 128, 8, 2048, 768),
    layer_of("mxfp8:qwen3-30b-a3b fp16", MXFP8, 128, 8, 2048, 768, dtype="float16"),
    layer_of("mxfp4:qwen3-30b-a3b fp16", MXFP4, 128, 8, 2048, 768, dtype="float16"),
    layer_of("mxfp4:qwen3-235b-a22b@tp4", MXFP4, 128, 8, 4096, 384, tp=4),
    layer_of("awq:mixtral-8x22b@tp4", AWQ, 8, 2, 6144, 4096, tp=4),
    layer_of("int4_g128:qwen3-coder-480b@ep8", INT4, 160, 8, 6144, 2560, ep=8),
    layer_of("int4_g128:mixtral-8x7b@ep8", INT4, 8, 2, 4096, 14336, ep=8),
    layer_of("mxfp8:mixtral-8x7b@ep4", MXFP8, 8, 2, 4096, 14336, ep=4),
    layer_of("mxfp4:mixtral-8x7b@ep8", MXFP4, 8, 2, 4096, 14336, ep=8),
    layer_of("awq:mixtral-8x7b@ep4", AWQ, 8, 2, 4096, 14336, ep=4),
    layer_of("mxfp8:qwen3-235b-a22b@ep2", MXFP8, 128, 8, 4096, 1536, ep=2),
    layer_of("int4_g128:qwen3-235b-a22b@ep2", INT4, 128, 8, 4096, 1536, ep=2),
    layer_of("int4_g32:kimi-k2@ep2", INT4_G32, 384, 8, 7168, 2048, ep=2),
    layer_of("mxfp4:gpt-oss-120b@ep2", GPT_OSS, 128, 4, 2880, 2880, ep=2, activation=SWIGLUOAI, has_bias=True),
    layer_of("mxfp8:qwen3-235b-a22b@tp2", MXFP8, 128, 8, 4096, 768, tp=2),
    layer_of("int4_g128:qwen3-235b-a22b@tp2", INT4, 128, 8, 4096, 768, tp=2),
    layer_of("int4_g32:kimi-k2@tp2", INT4_G32, 384, 8, 7168, 1024, tp=2),
    layer_of("mxfp8:qwen3-30b-a3b@ep2", MXFP8, 128, 8, 2048, 768, ep=2),
    layer_of("int4_g128:qwen3-30b-a3b@ep2", INT4, 128, 8, 2048, 768, ep=2),
    layer_of("mxfp8:glm-4.5-air@ep4", MXFP8, 128, 8, 4096, 1408, ep=4),
    layer_of("int4_g128:deepseek-v3@ep8", INT4, 256, 8, 7168, 2048, ep=8),
    layer_of("int4_g128:dbrx@ep8", INT4, 16, 4, 6144, 10752, ep=8),
    layer_of("mxfp8:mixtral-8x22b@ep8", MXFP8, 8, 2, 6144, 16384, ep=8),
    layer_of("mxfp4:phi-3.5-moe@ep8", MXFP4, 16, 2, 4096, 6400, ep=8),
    layer_of("mxfp8:llama-4-scout@ep8", MXFP8, 16, 1, 5120, 8192, ep=8),
    layer_of("awq:jamba-mini@ep8", AWQ, 16, 2, 4096, 14336, ep=8),
    layer_of("int4_g128:mixtral-8x7b@ep4", INT4, 8, 2, 4096, 14336, ep=4),
    layer_of("mxfp4:mixtral-8x22b@ep4", MXFP4, 8, 2, 6144, 16384, ep=4),
    layer_of("mxfp8:phi-3.5-moe@ep8", MXFP8, 16, 2, 4096, 6400, ep=8),
    layer_of("int4_g128:nemotron-3-super", INT4, 512, 22, 1024, 2688, activation=RELU2),
    layer_of("mxfp4:nemotron-3-super@tp2", MXFP4, 512, 22, 1024, 1344, tp=2, activation=RELU2),
    layer_of("mxfp8:nemotron-3-super@tp4", MXFP8, 512, 22, 1024, 672, tp=4, activation=RELU2),
)
HELD_OUT = (
    layer_of("int4_g128:grok-2@tp8", INT4, 8, 2, 8192, 2048, tp=8),
    layer_of("mxfp4:glm-4.7-flash", MXFP4, 64, 4, 2048, 1536),
    layer_of("mxfp8:ling-1t@tp8", MXFP8, 256, 8, 8192, 256, tp=8),
    layer_of("mxfp8:longcat-flash@ep8", MXFP8, 512, 12, 6144, 2048, ep=8),
    layer_of("awq:qwen3-next@tp2", AWQ, 512, 10, 2048, 256, tp=2),
    layer_of("mxfp4:arctic@tp4", MXFP4, 128, 2, 7168, 1216, tp=4),
    layer_of("int4_g32:step-3@tp8", INT4_G32, 48, 3, 7168, 640, tp=8),
    layer_of("int8_channel:hunyuan-large@tp4", int_scheme(CT, 8, -1), 16, 1, 6400, 4576, tp=4),
    layer_of("int4_g128:llama-4-maverick@tp8", INT4, 128, 1, 5120, 1024, tp=8),
    layer_of("awq:grok-2@ep4", AWQ, 8, 2, 8192, 16384, ep=4),
    layer_of("int4_g128:ernie-4.5-300b@tp4", INT4, 64, 8, 8192, 896, tp=4),
    layer_of("mxfp4:qwen3-coder-480b@tp8", MXFP4, 160, 8, 6144, 320, tp=8),
    layer_of("mxfp8:hunyuan-a13b@ep2", MXFP8, 64, 8, 4096, 3072, ep=2),
    layer_of("awq:deepseek-v3@tp8", AWQ, 256, 8, 7168, 256, tp=8),
    layer_of("gptq-act-order:mixtral-8x7b@ep4", GPTQ_ACT_ORDER, 8, 2, 4096, 14336, ep=4),
    layer_of("int8_g128:qwen3-235b-a22b@ep4", int_scheme(CT, 8, 128), 128, 8, 4096, 1536, ep=4),
    layer_of("int4_g64:phi-3.5-moe fp16@tp4", int_scheme(CT, 4, 64), 16, 2, 4096, 1600, tp=4, dtype="float16"),
    layer_of("mxfp8:granite-3b-moe", MXFP8, 40, 8, 1536, 512),
    layer_of("mxfp4:dots1@ep2", MXFP4, 128, 6, 4096, 1408, ep=2),
    layer_of("mxfp8:llama-4-maverick@ep8", MXFP8, 128, 1, 5120, 8192, ep=8),
)
"""Layers that `fit_latency` and `merge_times` refuse, timed only if `--only` names them. Their times judge the choices
of `tests.tools.oracle_quality`."""


def by_shape() -> dict[KernelShape, Problem]:
    """The layers of `LAYERS` and of `shapes.json` by what their times depend on."""
    return {kernel_shape_of(each): each for each in (*LAYERS, *model_shapes.served_problems())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jsonl", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=540.0, help="start no further layer after these seconds")
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument("--only", default="", help="layers of these names, or whose name contains one, in their order")
    parser.add_argument("--listed", action="store_true", help="layers of shapes.json, too")
    parser.add_argument("--skip", type=int, default=0, help="leave out this many of the first layers")
    parser.add_argument("--backend", default="", help="time only these backends, comma-separated")
    parser.add_argument("--stock", action="store_true", help="with --backend, time vLLM's own layer, too")
    parser.add_argument("--tiles", type=int, default=0, help="tile configurations timed beside our kernels' choice")
    parser.add_argument("--tokens", default=",".join(map(str, COUNTS)), help="numbers of tokens")
    options = parser.parse_args()
    device = detect.detect()
    counts = tuple(map(int, options.tokens.split(",")))
    backends = tuple(filter(None, options.backend.split(",")))
    stock = () if backends and not options.stock else ("auto",)
    plan = BenchOptions(
        counts, replays=9, seconds=1.0, jobs=options.jobs, budget=options.budget, only=backends, stock=stock,
        tiles=options.tiles,
    )  # fmt: skip
    settings = Settings(cache="none")
    words = shlex.join(sys.argv[1:]).replace(str(options.jsonl), options.jsonl.name)
    command = f"python -m tests.gpu.unlisted_layers {words}"
    layers = [
        *LAYERS[options.skip :],
        *(HELD_OUT if options.only else ()),
        *(model_shapes.served_problems() if options.listed else ()),
    ]
    asked = options.only.split(",")
    exact = {word: [each for each in layers if each.layer == word] for word in asked}
    named = (each for word in asked for each in exact[word] or [one for one in layers if word in one.layer])
    layers = list({each.layer: each for each in named}.values())
    failed = False
    with options.jsonl.open("wb") as file:
        file.write(msgspec.json.encode({"conditions": conditions(device, plan, command)}) + b"\n")
        for record in bench(layers, device, settings, plan, lambda words, done, total: None):
            failed |= bool(record.failures)
            file.write(msgspec.json.encode(record) + b"\n")
            file.flush()
            print(record.layer["name"], record.tokens, {name: round(us) for name, us in record.us.items()}, flush=True)
            for name, tile in record.tiles.items():
                print(f"  {name} with {tile}", flush=True)
            if record.tokens == max(counts) and record.failures:
                print("  failures", {name: each[:160] for name, each in record.failures.items()}, flush=True)
    return 4 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
