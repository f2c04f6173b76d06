"""Golden decisions for MXFP8: models, tensor-parallel sizes, compute capabilities; beside each, what stock 0.33.0 does.

    PYTHONPATH=.:tests python tests/cpu/test_golden_decisions.py --write

writes tests/golden/decisions/mxfp8.json anew. Stock's choice is computed, not copied: its function
``select_mxfp8_moe_backend`` and the expert classes that it asks run from the sources of vLLM 0.33.0, on a platform of
the capability in question on which FlashInfer, Humming and DeepGEMM are installed, as a stock install has them. What
stock raises later, when weights are created or converted, stands in ``raises``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import MXFP8_W8A8, RELU2, SILU
from releases import ReleaseUnavailable
from stock_code import FUSED_MOE, QUANTIZATION, Platform, load

from vllm_moe_oracle.errors import NoBackendError
from vllm_moe_oracle.oracle.oracle import decide
from vllm_moe_oracle.oracle.problem import Activation, Device, Parallel, Problem, Routing
from vllm_moe_oracle.oracle.registry import default_registry
from vllm_moe_oracle.settings import Settings

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests/golden/decisions/mxfp8.json"
RELEASE = "0.33.0"
PACKAGES = {
    "vllm": RELEASE,
    "torch": "2.14.0",
    "humming-kernels": "0.1.19",
    "flashinfer-python": "0.7.2.post1",
}
CARDS = {
    80: "NVIDIA A100",
    89: "NVIDIA L40S",
    90: "NVIDIA H200",
    100: "NVIDIA B200",
    103: "NVIDIA B300",
    120: "NVIDIA RTX PRO 6000",
    121: "NVIDIA GB10",
}
TP = (1, 2, 4, 8)

_NEMOTRON_ROUTING = Routing("deepseekv3", "sigmoid", True, num_groups=1, top_k_groups=1, correction_bias=True)
_DEEPSEEK_ROUTING = Routing("deepseekv3", "sigmoid", True, num_groups=8, top_k_groups=4, correction_bias=True)
# experts, top-k, hidden, intermediate of the whole layer, activation, routing: from the models' config.json.
MODELS: dict[str, tuple[int, int, int, int, Activation, Routing]] = {
    "Qwen3-30B-A3B": (128, 8, 2048, 768, SILU, Routing("renormalize")),
    "MiniMax-M2": (256, 8, 3072, 1536, SILU, Routing("minimax2", "sigmoid", True, correction_bias=True)),
    "Nemotron-3-Nano": (128, 6, 2688, 1856, RELU2, _NEMOTRON_ROUTING),
    "DeepSeek-V3": (256, 8, 7168, 2048, SILU, _DEEPSEEK_ROUTING),
}
STOCK_ACTIVATIONS = {"silu": "silu", "relu2": "relu2_no_mul"}
STOCK_ROUTING = {"renormalize": "Renormalize", "minimax2": "MiniMax2", "deepseekv3": "DeepSeekV3"}
CLASS_FILES = {
    "FLASHINFER_TRTLLM": ("trtllm_fp8_moe", ("TrtLlmFp8ExpertsMonolithic", "TrtLlmFp8ExpertsModular")),
    "DEEPGEMM": ("deep_gemm_moe", ("DeepGemmExperts",)),
    "MARLIN": ("marlin_moe", ("MarlinExperts",)),
    "HUMMING": (
        "fused_humming_moe",
        ("BatchedHummingGroupedExperts", "HummingGroupedExperts", "HummingIndexedExperts"),
    ),
    "XPU": ("xpu_moe", ("XPUExpertsFp8", "XPUExpertsMxFp8", "XPUExpertsBlockFp8")),
    "AITER_MXFP8": ("aiter_mxfp8_moe", ("AiterMxfp8Experts",)),
    "TRITON_MXFP8": ("mxfp8_native_moe", ("Mxfp8NativeTritonExperts",)),
    "EMULATION": ("mxfp8_emulation_moe", ("Mxfp8EmulationTritonExperts",)),
}
"""Files and classes behind stock's names of backends, in its own order: `backend_to_kernel_cls` in oracle/fp8.py."""

DIFFERENCES = {
    "": "the same kernel",
    "none": (
        "stock chooses this kernel and raises when the layer's weights are created: a scale group of 32 would be cut "
        "between ranks; here nothing is chosen and every candidate says so"
    ),
}
"""Why a decision is not stock's, by kind."""


def layer(model: str, tp: int) -> Problem:
    """The model's MoE layer on one of `tp` ranks."""
    experts, top_k, hidden, inner, activation, routing = MODELS[model]
    return Problem(
        layer="model.layers.0.mlp.experts",
        scheme=MXFP8_W8A8,
        num_experts=experts,
        local_experts=experts,
        top_k=top_k,
        hidden_size=hidden,
        intermediate_size=inner // tp,
        activation=activation,
        routing=routing,
        parallel=Parallel(tp=tp),
    )


def machine(capability: int) -> Device:
    """A card of the capability with a stock install."""
    return Device("cuda", CARDS[capability], capability, packages=PACKAGES)


def stock(problem: Problem, capability: int) -> dict[str, str]:
    """What stock does for the layer: the backend and class it chooses, and what it raises later."""
    platform = Platform(capability)
    moe = f"{FUSED_MOE}/modular_kernel.py"
    activation = load(RELEASE, f"{FUSED_MOE}/activation.py", current_platform=platform)
    kinds = load(RELEASE, moe, current_platform=platform, envs=SimpleNamespace(VLLM_BATCH_INVARIANT=False))
    env = SimpleNamespace(VLLM_HUMMING_MOE_GEMM_TYPE=None, VLLM_BATCH_INVARIANT=False)
    methods = type("Methods", (), {name: name for name in (*STOCK_ROUTING.values(), *_OTHER_METHODS)})
    weights, inputs = (SimpleNamespace(dtype=object(), scale=object(), scale2=None) for _ in range(2))
    given = {
        "current_platform": platform, "mk": SimpleNamespace(**kinds), "envs": env, "RoutingMethodType": methods,
        "MoEActivation": activation["MoEActivation"],
        "apply_moe_activation_supported": activation["apply_moe_activation_supported"],
        "kMxfp8Static": weights, "kMxfp8Dynamic": inputs, "has_humming": lambda: True,
        "has_flashinfer_trtllm_fused_moe": lambda: True, "is_deep_gemm_supported": platform.support_deep_gemm,
        "HummingGemmType": SimpleNamespace(
            INDEXED=SimpleNamespace(value="indexed"), GROUPED_CONTIGUOUS=SimpleNamespace(value="grouped_contiguous"),
            GROUPED_MASKED=SimpleNamespace(value="grouped_masked"),
        ),
    }  # fmt: skip

    def classes(backend: Any) -> list[Any]:
        file, names = CLASS_FILES[backend.name]
        found = load(RELEASE, f"{FUSED_MOE}/experts/{file}.py", **given)
        return [_whole(found[name], kinds) for name in names]

    priority = load(RELEASE, f"{QUANTIZATION}/utils/humming/priority.py", current_platform=platform)
    backends = load(RELEASE, f"{FUSED_MOE}/oracle/fp8.py")["Fp8MoeBackend"]
    oracle = load(
        RELEASE, f"{FUSED_MOE}/oracle/mxfp8.py", Fp8MoeBackend=backends, mk=SimpleNamespace(**kinds),
        prioritize_humming=priority["prioritize_humming"], kMxfp8Static=weights, kMxfp8Dynamic=inputs,
    )  # fmt: skip
    oracle["_mxfp8_backend_to_kernel_cls"] = classes
    name = STOCK_ACTIVATIONS[problem.activation.name]
    chosen, found = oracle["select_mxfp8_moe_backend"](config=_config(problem, activation["MoEActivation"](name)))
    result = {"backend": chosen.value, "class": found.__name__}
    inner = problem.intermediate_size
    if inner % 32:
        # ModelOptMxFp8FusedMoE.create_weights in quantization/modelopt.py.
        result["raises"] = (
            f"ValueError: MXFP8 MoE requires intermediate_size_per_partition divisible by 32, got {inner}"
        )
    elif found.__name__ == "MarlinExperts" and not problem.activation.gated and inner % 64:
        # _moe_pad_shard_rows in quantization/utils/marlin_utils_fp8.py takes the rows for two halves.
        result["raises"] = f"RuntimeError: {inner} rows of non-gated experts are padded as if they were twice as many"
    return result


_OTHER_METHODS = ("RenormalizeNaive", "SigmoidRenorm", "Sigmoid", "Llama4")


def _whole(found: Any, kinds: dict[str, Any]) -> Any:
    """A class with the base class in another file that it has in vLLM."""
    base = kinds["FusedMoEExpertsMonolithic" if "Monolithic" in found.__name__ else "FusedMoEExpertsModular"]
    return type(found.__name__, (found, base), {})


def _config(problem: Problem, activation: Any) -> Any:
    """The fields of vLLM's `FusedMoEConfig` that its classes ask; tensor parallelism alone."""
    parallel = SimpleNamespace(
        use_ep=False, use_all2all_kernels=False, use_ag_rs_all2all_kernels=False, enable_eplb=False,
        is_sequence_parallel=False, use_fi_nvl_two_sided_kernels=False, use_fi_nvl_one_sided_kernels=False,
        use_batched_activation_format=False, use_deepep_v2_kernels=False,
    )  # fmt: skip
    return SimpleNamespace(
        moe_backend="auto", activation=activation, is_act_and_mul=problem.activation.gated,
        moe_parallel_config=parallel, has_hash_routing=False, require_decomposed_backend=False,
        routing_method=STOCK_ROUTING[problem.routing.method], router_logits_dtype=torch.float32,
        hidden_dim=problem.hidden_size, is_lora_enabled=False, num_experts=problem.num_experts, swiglu_limit=None,
        swiglu_alpha=None, swiglu_beta=None,
    )  # fmt: skip


def ours(problem: Problem, capability: int) -> dict[str, Any]:
    """The decision, with every candidate's every reason."""
    try:
        decision = decide(problem, machine(capability), Settings())
    except NoBackendError as error:
        found: dict[str, Any] = {"backend": "none", "class": ""}
        candidates = error.candidates
    else:
        plan = decision.plan
        found = {
            "backend": decision.backend,
            "class": default_registry()[decision.backend].stock_class,
            "why": decision.why,
            "kernel_sizes": [plan.hidden_size, plan.intermediate_size],
            "numerics": str(decision.numerics),
        }
        candidates = decision.candidates
    found["candidates"] = {each.backend: [str(reason) for reason in each.reasons] for each in candidates}
    return found


def table(with_stock: bool) -> list[dict[str, Any]]:
    """All rows; the golden file's are used for stock's part when it cannot be computed here."""
    rows = []
    for capability in CARDS:
        for model in MODELS:
            for tp in TP:
                problem = layer(model, tp)
                row: dict[str, Any] = {"sm": capability, "model": model, "tp": tp, "ours": ours(problem, capability)}
                if with_stock:
                    row["stock"] = stock(problem, capability)
                    same = row["ours"]["class"] == row["stock"]["class"]
                    row["difference"] = "" if same else DIFFERENCES[row["ours"]["backend"]]
                rows.append(row)
    return rows


def golden() -> list[dict[str, Any]]:
    """The rows of the golden file."""
    rows: list[dict[str, Any]] = json.loads(GOLDEN.read_text())["rows"]
    return rows


def _key(row: dict[str, Any]) -> tuple[int, str, int]:
    return row["sm"], row["model"], row["tp"]


AGAIN = "PYTHONPATH=.:tests python tests/cpu/test_golden_decisions.py --write shows and keeps the change"


def test_decisions_are_the_golden_ones() -> None:
    expected = {_key(row): row["ours"] for row in golden()}
    for row in table(with_stock=False):
        assert row["ours"] == expected.pop(_key(row)), f"{_key(row)}: {AGAIN}"
    assert not expected


@pytest.mark.parametrize("capability", CARDS)
def test_stocks_choices_are_the_golden_ones(capability: int) -> None:
    for row in golden():
        if row["sm"] != capability:
            continue
        try:
            found = stock(layer(row["model"], row["tp"]), capability)
        except ReleaseUnavailable as error:
            pytest.skip(str(error))
        assert found == row["stock"], f"{_key(row)}: {AGAIN}"


def test_every_difference_has_its_reason_beside_it() -> None:
    for row in golden():
        same = row["ours"]["class"] == row["stock"]["class"]
        assert bool(row["difference"]) != same, _key(row)
    kinds = {row["ours"]["backend"] for row in golden() if row["difference"]}
    assert kinds == DIFFERENCES.keys() - {""}


def test_every_rejection_says_why_and_the_winner_has_no_reason() -> None:
    for row in golden():
        candidates = row["ours"]["candidates"]
        assert len(candidates) > 6
        accepted = [name for name, reasons in candidates.items() if not reasons]
        assert (row["ours"]["backend"] in accepted) or (row["ours"]["backend"] == "none" and not accepted)


def main() -> None:
    """Writes the golden file."""
    if sys.argv[1:] != ["--write"]:
        raise SystemExit(__doc__)
    conditions = {"stock": f"vLLM {RELEASE}", "packages": PACKAGES, "cards": CARDS, "scheme": str(MXFP8_W8A8)}
    rows = table(with_stock=True)
    GOLDEN.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(row) for row in rows)
    GOLDEN.write_text(f'{{"conditions": {json.dumps(conditions)},\n"rows": [\n{lines}\n]}}\n')
    for row in rows:
        print(row["sm"], row["model"], f"TP{row['tp']}", row["ours"]["backend"], "| stock:", row["stock"]["class"],
              row["stock"].get("raises", ""), "|", row["difference"])  # fmt: skip


if __name__ == "__main__":
    main()
