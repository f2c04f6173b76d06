"""Every MXFP8 backend that the oracle accepts on this GPU, through vLLM's MoE layer, against a float32 reference.

    python tests/gpu/mxfp8_table.py --json table.json            every layer, each in a process of its own
    python tests/gpu/mxfp8_table.py --layer qwen3_silu --json -   one layer, in this process

For each layer the same random weights go through stock vLLM's own method first (``--moe-backend`` marlin and humming;
stock's MXFP8 method drops expert biases, so its class is given them as vLLM gives them in other formats), then through
the plugin's method with each accepted backend, eager and under a CUDA graph that was captured on other inputs. An error
is the relative L2 distance of all tokens' outputs from the reference, which shares no code with the package; for
backends that quantise activations, as ModelOpt's MXFP8 declares, the reference does so too. Also measured: peak memory
beyond what was there before while weights are converted.

`PASS` asks at most 6e-3, at most 1.2 times the error of the stock class that the backend wraps, where it wraps one and
stock could run the layer, and at most one expert plus 64 MiB for the conversion.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_PLUGINS", "")  # registered by hand, after stock has run
os.environ.setdefault("MOE_ORACLE_SELF_CHECK", "off")

import torch

TOKENS = (1, 7, 64, 513)
LIMIT = 6e-3
RATIO = 1.2
CONVERSION_SLACK = 64 * 2**20


@dataclass(frozen=True)
class Case:
    """One MoE layer; `activation` in vLLM's words."""

    name: str
    experts: int
    top_k: int
    hidden: int
    inner: int
    activation: str
    bias: bool = False
    alpha: float | None = None
    beta: float | None = None
    limit: float | None = None

    @property
    def gated(self) -> bool:
        """Two halves of rows in the first product."""
        return not self.activation.endswith("_no_mul")

    @property
    def expert_bytes(self) -> int:
        """Codes, scales and biases of one expert as the checkpoint has them."""
        rows = self.inner * (2 if self.gated else 1)
        codes = rows * self.hidden + self.hidden * self.inner
        return codes + codes // 32 + (2 * (rows + self.hidden) if self.bias else 0)


_QWEN3, _NEMOTRON = (128, 8, 2048, 768), (128, 6, 2688, 1856)
CASES = {
    case.name: case
    for case in (
        Case("qwen3_silu", *_QWEN3, "silu"),
        Case("qwen3_silu_bias", *_QWEN3, "silu", bias=True),
        Case("qwen3_relu2", *_QWEN3, "relu2_no_mul"),
        Case("qwen3_relu2_bias", *_QWEN3, "relu2_no_mul", bias=True),
        Case("nemotron_silu", *_NEMOTRON, "silu"),
        Case("nemotron_relu2", *_NEMOTRON, "relu2_no_mul"),
        Case("nemotron_relu2_bias", *_NEMOTRON, "relu2_no_mul", bias=True),
        Case("qwen3_swigluoai_bias", *_QWEN3, "swigluoai_uninterleave", bias=True, alpha=1.702, beta=1.0, limit=7.0),
        Case("tiny_silu", 8, 2, 256, 96, "silu"),
        Case("tiny_swigluoai", 8, 2, 256, 96, "swigluoai_uninterleave", bias=True, alpha=1.702, beta=1.0, limit=7.0),
    )
}
STOCK = {"marlin_mxfp8": "marlin", "humming_mxfp8": "humming"}
"""vLLM's ``--moe-backend`` for the class that a backend wraps."""


# --- The reference --------------------------------------------------------------------------------------------------


def reference(
    case: Case, raw: dict[str, torch.Tensor], x: torch.Tensor, weights: Any, ids: Any, quantised: bool = False
) -> torch.Tensor:
    """The layer in float32: `[M, hidden]`.

    Args:
        case: the layer.
        raw: the checkpoint's tensors by their parameter names.
        x: `[M, hidden]` bfloat16.
        weights: `[M, top_k]` float32.
        ids: `[M, top_k]`.
        quantised: both products' inputs are rounded to MXFP8 first.
    """
    enter = _mxfp8 if quantised else lambda values: values
    out = torch.zeros(x.shape[0], case.hidden, dtype=torch.float32, device=x.device)
    for expert in ids.unique().tolist():
        token, choice = (ids == expert).nonzero(as_tuple=True)
        hidden = enter(x[token].float()) @ _matrix(raw, "w13", expert).T
        if case.bias:
            hidden += raw["w13_bias"][expert].float()
        result = enter(_activate(case, hidden)) @ _matrix(raw, "w2", expert).T
        if case.bias:
            result += raw["w2_bias"][expert].float()
        out.index_add_(0, token, result * weights[token, choice].unsqueeze(-1))
    return out


def _matrix(raw: dict[str, torch.Tensor], which: str, expert: int) -> torch.Tensor:
    codes, scales = raw[f"{which}_weight"][expert].float(), raw[f"{which}_weight_scale"][expert]
    exponents = scales.int().repeat_interleave(32, dim=-1) - 127
    return torch.ldexp(codes, exponents)


def _mxfp8(values: torch.Tensor) -> torch.Tensor:
    """Rounded to e4m3 under the smallest power of two, per 32, with which nothing saturates."""
    blocks = values.unflatten(-1, (-1, 32))
    largest = blocks.abs().amax(-1, keepdim=True).clamp(min=2.0**-100)
    exponent = torch.ceil(torch.log2(largest / 448))
    codes = (blocks * torch.exp2(-exponent)).to(torch.float8_e4m3fn).float()
    return (codes * torch.exp2(exponent)).flatten(-2)


def _activate(case: Case, hidden: torch.Tensor) -> torch.Tensor:
    if not case.gated:
        return hidden.clamp(min=0) ** 2
    gate, up = hidden[:, : case.inner], hidden[:, case.inner :]
    if case.limit is not None:
        gate, up = gate.clamp(max=case.limit), up.clamp(min=-case.limit, max=case.limit)
    alpha, beta = (1.0 if case.alpha is None else case.alpha), (0.0 if case.beta is None else case.beta)
    return gate / (1 + torch.exp(-alpha * gate)) * (up + beta)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative L2 distance; NaN when any value is."""
    return float((actual.float() - expected).norm() / expected.norm())


# --- Layers ---------------------------------------------------------------------------------------------------------


def checkpoint(case: Case, device: str) -> dict[str, torch.Tensor]:
    """Random weights by parameter name: every finite code up to 240, scales around 2**-8, biases about as large as the
    products."""
    generator = torch.Generator(device=device).manual_seed(0)
    rows = case.inner * (2 if case.gated else 1)

    def random(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, device=device, generator=generator)

    def codes(*shape: int) -> torch.Tensor:
        return (random(0, 120, *shape) | (random(0, 2, *shape) << 7)).view(torch.float8_e4m3fn)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=generator).bfloat16()

    raw = {
        "w13_weight": codes(case.experts, rows, case.hidden),
        "w2_weight": codes(case.experts, case.hidden, case.inner),
        "w13_weight_scale": random(115, 120, case.experts, rows, case.hidden // 32),
        "w2_weight_scale": random(115, 120, case.experts, case.hidden, case.inner // 32),
    }
    if case.bias:
        raw |= {"w13_bias": normal(case.experts, rows) * 3, "w2_bias": normal(case.experts, case.hidden) * 30}
    return raw


def quantisation() -> Any:
    """vLLM's config of ModelOpt's MXFP8: stock's own, or the plugin's once that is registered."""
    from vllm.model_executor.layers.quantization import get_quantization_config

    algo = {"quant_algo": "MXFP8", "kv_cache_quant_algo": None, "exclude_modules": []}
    return get_quantization_config("modelopt_mxfp8").from_config({"quantization": algo})


@dataclass
class Built:
    """A converted layer."""

    layer: Any
    config: Any
    context: Any
    seconds: float
    peak: int

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Runs the layer's method on routed tokens."""
        from vllm.forward_context import set_forward_context

        with set_forward_context(None, self.config, num_tokens=x.shape[0]):
            output: torch.Tensor = self.layer.quant_method.apply(self.layer, x, weights, ids, None, None)
        return output

    def close(self) -> None:
        """Leaves vLLM's config context and frees the layer."""
        self.context.__exit__(None, None, None)
        self.layer = None


def give_biases(built: Built, raw: dict[str, torch.Tensor]) -> None:
    """Gives stock's Marlin experts the biases that stock's MXFP8 method drops, in the order that they ask for.

    The layer must be one that stock need not pad.
    """
    from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_permute_bias

    quant_config = built.layer.quant_method.moe_kernel.fused_experts.quant_config
    for slot, name in ((quant_config._w1, "w13_bias"), (quant_config._w2, "w2_bias")):
        slot.bias = torch.stack([marlin_permute_bias(each) for each in raw[name]])


def build(case: Case, raw: dict[str, torch.Tensor], device: str, moe_backend: str, own: str = "") -> Built:
    """A layer of vLLM with the checkpoint's weights.

    Args:
        case: the layer.
        raw: the checkpoint.
        device: ``cuda`` or ``cpu``.
        moe_backend: vLLM's ``--moe-backend``.
        own: the plugin's backend; "" when stock's method is meant.
    """
    from vllm.config import DeviceConfig, KernelConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fused_moe import layer as moe_layer

    factory = getattr(moe_layer, "FusedMoEFactory", None) or moe_layer.FusedMoE
    extra = {"additional_config": {"moe_oracle": {"backend": own}}} if own else {}
    config = VllmConfig(
        device_config=DeviceConfig(device=device), kernel_config=KernelConfig(moe_backend=moe_backend), **extra
    )
    context = set_current_vllm_config(config)
    context.__enter__()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        runner = factory(
            num_experts=case.experts, top_k=case.top_k, hidden_size=case.hidden, intermediate_size=case.inner,
            params_dtype=torch.bfloat16, renormalize=True, quant_config=quantisation(),
            prefix="model.layers.0.mlp.experts", activation=case.activation, has_bias=case.bias,
            ckpt_names=("gate_proj", "down_proj", "up_proj") if case.gated else ("up_proj", "down_proj", None),
            swiglu_limit=case.limit, swiglu_alpha=case.alpha, swiglu_beta=case.beta,
        )  # fmt: skip
    layer = getattr(runner, "routed_experts", runner)
    if case.bias and moe_backend == "humming":  # stock's conversion takes them when they are there
        for name in ("w13_bias", "w2_bias"):
            layer.register_parameter(name, torch.nn.Parameter(torch.empty_like(raw[name]), requires_grad=False))
    parameters = dict(layer.named_parameters())
    for name, tensor in raw.items():
        if name in parameters:
            parameters[name].data.copy_(tensor)
    parameters.clear()
    before = 0
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    with torch.device(device):
        layer.quant_method.process_weights_after_loading(layer)
    peak = 0
    if device == "cuda":
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
    return Built(layer, config, context, time.perf_counter() - start, peak)


def inputs(case: Case, tokens: int, device: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random tokens with their experts: x, weights that sum to one, int32 ids."""
    generator = torch.Generator(device=device).manual_seed(1000 * seed + tokens)
    x = (torch.randn(tokens, case.hidden, device=device, generator=generator) * 0.5).bfloat16()
    logits = torch.randn(tokens, case.experts, device=device, generator=generator)
    weights, ids = torch.topk(torch.softmax(logits.float(), -1), case.top_k, dim=-1)
    return x, weights / weights.sum(-1, keepdim=True), ids.to(torch.int32)


def captured(built: Built, case: Case, tokens: int, real: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The output of a CUDA graph that was captured on other inputs of the same shapes."""
    static = inputs(case, tokens, "cuda", seed=1)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            built(*static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = built(*static)
    for target, source in zip(static, real, strict=True):
        target.copy_(source)
    graph.replay()
    torch.cuda.synchronize()
    return output.clone()


# --- The table ------------------------------------------------------------------------------------------------------


def accepted(case: Case, machine: Any) -> dict[str, bool]:
    """The backends that the oracle accepts for the layer on a machine, and whether they quantise activations."""
    from vllm_moe_oracle import settings
    from vllm_moe_oracle.oracle.oracle import candidates
    from vllm_moe_oracle.oracle.problem import Activation, Problem, Scheme
    from vllm_moe_oracle.oracle.registry import default_registry

    name = case.activation.removesuffix("_no_mul").removesuffix("_uninterleave")
    problem = Problem(
        layer="model.layers.0.mlp.experts",
        scheme=Scheme("mxfp8", bits=8, group_size=32, packing="modelopt", activations="mxfp8"),
        num_experts=case.experts, local_experts=case.experts, top_k=case.top_k, hidden_size=case.hidden,
        intermediate_size=case.inner, has_bias=case.bias,
        activation=Activation(name, case.gated, case.alpha, case.beta, case.limit),
    )  # fmt: skip
    return {
        each.backend: default_registry()[each.backend].activations(problem) != "16bit"
        for each in candidates(problem, machine, settings.load())
        if each.accepted
    }


def join_alone(device: str) -> None:
    """vLLM's process groups for this process alone, and its workspaces."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.v1.worker.workspace import init_workspace_manager

    torch.backends.cuda.matmul.allow_tf32 = False
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device=device))):
        store = f"file://{tempfile.mkdtemp()}/store"
        init_distributed_environment(1, 0, store, 0, "nccl" if device == "cuda" else "gloo")
        initialize_model_parallel(1, 1)
    init_workspace_manager(torch.device(f"{device}:0" if device == "cuda" else device))


def rows_of(
    case: Case,
    device: str,
    only: set[str],
    tokens: tuple[int, ...],
    keep: Callable[[list[dict[str, Any]]], None] = lambda rows: None,
) -> list[dict[str, Any]]:
    """The rows of one layer; `join_alone` must have been called.

    Args:
        case: the layer.
        device: ``cuda`` or ``cpu``.
        only: backends; all accepted ones when empty.
        tokens: how many tokens a call has.
        keep: called with the rows so far after each: a kernel may take the process down.
    """
    import vllm

    import vllm_moe_oracle.device as machine
    from vllm_moe_oracle import plugin

    plugin.unregister()
    raw = checkpoint(case, device)
    real = {count: inputs(case, count, device) for count in tokens}
    targets = {
        quantised: {count: reference(case, raw, *real[count], quantised=quantised) for count in tokens}
        for quantised in (False, True)
    }

    backends = {name: rounds for name, rounds in accepted(case, machine.detect()).items() if not only or name in only}
    stock: dict[str, dict[int, float]] = {}
    stock_errors: dict[str, str] = {}
    for name, moe_backend in STOCK.items():
        if name not in backends:
            continue
        try:
            built = build(case, raw, device, moe_backend)
            if case.bias and name == "marlin_mxfp8":
                give_biases(built, raw)
            stock[name] = {count: relative_error(built(*real[count]), targets[False][count]) for count in tokens}
            stock[name][0] = built.peak
            built.close()
        except Exception as error:  # that stock cannot run a layer is a result
            stock_errors[name] = f"{type(error).__name__}: {error}"[:200]

    plugin.register()
    state = plugin.state()
    if not state.active:
        raise SystemExit(f"the plugin stands down: {state.reason}")
    rows = []
    for name, quantised in backends.items():
        expected = targets[quantised]
        row: dict[str, Any] = {"layer": case.name, "backend": name, "vllm": vllm.__version__}
        row["activations"] = "mxfp8" if quantised else "16bit"
        try:
            built = build(case, raw, device, "auto", own=name)
            method = built.layer.quant_method
            row["experts"] = type(method.moe_kernel.fused_experts).__name__
            row["convert_seconds"], row["convert_peak_mib"] = round(built.seconds, 3), round(built.peak / 2**20, 1)
            row["one_expert_mib"] = round(case.expert_bytes / 2**20, 1)
            kernel_bytes = sum(each.untyped_storage().nbytes() for each in built.layer.parameters())
            checkpoint_bytes = sum(each.nbytes for each in raw.values())
            row["kernel_mib"], row["checkpoint_mib"] = round(kernel_bytes / 2**20), round(checkpoint_bytes / 2**20)
            row["error"] = {}
            for count in tokens:
                eager = built(*real[count])
                found = {"eager": relative_error(eager, expected[count])}
                if device == "cuda":
                    found["graph"] = relative_error(captured(built, case, count, real[count]), expected[count])
                row["error"][count] = {mode: float(f"{value:.3e}") for mode, value in found.items()}
            if name in stock:
                row["stock_error"] = {count: float(f"{stock[name][count]:.3e}") for count in tokens}
                row["stock_convert_peak_mib"] = round(stock[name][0] / 2**20, 1)
            if name in stock_errors:
                row["stock_failure"] = stock_errors[name]
            row["pass"] = passes(row)
            built.close()
        except Exception as error:
            row |= {"failure": f"{type(error).__name__}: {error}"[:400], "pass": False}
        rows.append(row)
        print_row(row)
        keep(rows)
        if device == "cuda":
            torch.cuda.empty_cache()
    plugin.unregister()
    return rows


def passes(row: dict[str, Any]) -> bool:
    """Whether a row keeps the rules of the module."""
    ok = row["convert_peak_mib"] <= row["one_expert_mib"] + CONVERSION_SLACK / 2**20
    for count, modes in row["error"].items():
        stock = row.get("stock_error", {}).get(count)
        allowed = LIMIT if stock is None else min(LIMIT, RATIO * stock)
        ok &= all(error <= allowed for error in modes.values())
    return bool(ok)


def print_row(row: dict[str, Any]) -> None:
    """One line of the table."""
    if "failure" in row:
        print(f"{row['layer']:22} {row['backend']:24} FAIL {row['failure']}", flush=True)
        return
    errors = "  ".join(
        f"{count}: {'/'.join(f'{value:.2e}' for value in modes.values())}"
        + (f" (stock {row['stock_error'][count]:.2e})" if "stock_error" in row else "")
        for count, modes in row["error"].items()
    )
    mark = "PASS" if row["pass"] else "FAIL"
    memory = f"peak {row['convert_peak_mib']} of {row['one_expert_mib']}+64 MiB"
    print(f"{row['layer']:22} {row['backend']:24} {mark} {errors}  {memory}", flush=True)


def conditions() -> dict[str, Any]:
    """What the numbers depend on."""
    from vllm_moe_oracle import device

    found = device.detect()
    return {
        "gpu": found.name, "capability": found.capability, "packages": dict(found.packages), "torch": torch.__version__,
        "cuda": torch.version.cuda, "limit": LIMIT, "ratio_to_stock": RATIO, "dtype": "bfloat16",
        "error": "relative L2 over all tokens against float32", "date": time.strftime("%Y-%m-%d"),
        "command": "python tests/gpu/mxfp8_table.py --json FILE",
    }  # fmt: skip


def in_processes(names: list[str], only: set[str], extra: list[str]) -> list[dict[str, Any]]:
    """Runs each layer in processes of its own, all at once: kernels are compiled on many cores, and one that writes
    where it must not harms no other backend."""
    import vllm_moe_oracle.device as machine

    folder = Path(tempfile.mkdtemp())
    running = {}
    for name in names:
        found = [each for each in accepted(CASES[name], machine.detect()) if not only or each in only]
        together = [each for each in found if each in STOCK or each == "emulation"]
        for group in filter(None, (together, *([each] for each in found if each not in together))):
            key = f"{name}.{group[0]}"
            command = [sys.executable, __file__, "--layer", name, "--json", str(folder / f"{key}.json"), *extra]
            command += [word for each in group for word in ("--backend", each)]
            log = (folder / f"{key}.log").open("w")
            running[name, group[0]] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    rows: list[dict[str, Any]] = []
    for (name, first), process in running.items():
        process.wait()
        text = (folder / f"{name}.{first}.log").read_text()
        print("\n".join(line for line in text.splitlines() if line.startswith(f"{name} ")), flush=True)
        file = folder / f"{name}.{first}.json"
        if file.exists():
            rows += json.loads(file.read_text())["rows"]
        else:
            print(f"{name} {first}: no result\n{text[-2000:]}", flush=True)
            rows.append({"layer": name, "backend": first, "failure": text[-400:], "pass": False})
    return rows


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layer", action="append", choices=sorted(CASES))
    parser.add_argument("--backend", action="append", default=[])
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", help="file to write; - for none")
    args = parser.parse_args()
    tokens = tuple(int(each) for each in args.tokens.split(","))

    def keep(rows: list[dict[str, Any]]) -> None:
        if args.json and args.json != "-":
            Path(args.json).write_text(json.dumps({"conditions": conditions(), "rows": rows}, indent=1) + "\n")

    names = args.layer or [name for name in CASES if not name.startswith("tiny")]
    if len(names) == 1:
        join_alone(args.device)
        rows = rows_of(CASES[names[0]], args.device, set(args.backend), tokens, keep)
    else:
        rows = in_processes(names, set(args.backend), ["--tokens", args.tokens, "--device", args.device])
    keep(rows)
    failed = [f"{row['layer']} {row['backend']}" for row in rows if not row["pass"]]
    print(
        f"{len(rows) - len(failed)} of {len(rows)} rows pass{'; not ' if failed else ''}{', '.join(failed)}", flush=True
    )
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
