"""What `explain` reads from a config is what vLLM builds from it: the same layers, names, shapes and routing.

Published configs are made small; vLLM constructs each model with the plugin, in a process of its own, and the problems
that the model's MoE layers hand to the oracle are compared with `find_moe_layers`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from vllm_moe_oracle.checkpoint.files import read_checkpoint
from vllm_moe_oracle.checkpoint.moe_layers import find_moe_layers
from vllm_moe_oracle.core.problem import Problem

pytestmark = pytest.mark.full  # vLLM builds ten models, which takes minutes.

CONFIGS = Path(__file__).parents[1] / "golden" / "configs"

# Not here: nemotron-3-nano, whose experts without a gate vLLM refuses on a CPU; multimodal models, whose code imports
# torchvision.
NAMES = [
    "qwen3-30b-a3b", "mixtral-8x7b", "minimax-m2", "glm-4.5", "deepseek-v3", "kimi-k2-thinking", "gpt-oss-20b",
]  # fmt: skip

ONLINE = {"qwen3-30b-a3b": "mxfp8", "glm-4.5": "mxfp8"}
"""Models in 16 bits besides, with vLLM's ``--quantization``; for MXFP4 it has no linear layers on a CPU."""
MTP_MODELS = ["deepseek-v3", "glm-4.5"]
"""Models whose modules for multi-token prediction are built besides, as vLLM's speculative decoding does it."""

SMALL = {
    "vocab_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "hidden_size": 128,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MLA = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}


def small(name: str) -> dict[str, Any]:
    """The config with its structure kept and its sizes reduced, quantized to MXFP8."""
    data: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    data |= SMALL
    for field, most in (
        ("num_hidden_layers", 5), ("num_experts", 8), ("num_local_experts", 8), ("n_routed_experts", 8),
        ("num_experts_per_tok", 2), ("experts_per_token", 2), ("intermediate_size", 96), ("moe_intermediate_size", 64),
        ("n_group", 4), ("topk_group", 2), ("num_nextn_predict_layers", 0), ("num_mtp_modules", 0),
    ):  # fmt: skip
        if field in data:
            data[field] = min(data[field], most)
    if data["model_type"] in ("deepseek_v3", "kimi_k2"):
        # transformers does not know kimi_k2, which is deepseek_v3 under another name.
        data |= MLA | {"num_key_value_heads": 4, "model_type": "deepseek_v3"}
    if data["model_type"] == "minimax_m2":
        data |= {"rotary_dim": 16, "use_qk_norm": True, "qk_norm_type": "per_layer", "attn_type_list": [1] * 5}
    data["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ["lm_head"]}
    return data


def build(folder: Path) -> None:
    """Constructs every model under the folder in vLLM and writes the problems that the oracle was asked, by name.

    A folder's name ends with ``--quantization``'s value, or ``mtp``, after a colon.
    """
    from vllm.config import set_current_vllm_config
    from vllm.config.utils import replace
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    from vllm_moe_oracle import plugin
    from vllm_moe_oracle.oracle import selection

    plugin.register()
    assert plugin.state().active, plugin.state()
    import vllm_moe_oracle.methods.base as base

    asked: list[Any] = []

    def decide(problem: Any, *arguments: Any, **more: Any) -> Any:
        asked.append(problem)
        # gpt-oss's rows are refused in MXFP8; what is asked here is only how vLLM describes the layers.
        halves = dataclasses.replace(problem.activation, interleaved=False)
        return selection.decide(dataclasses.replace(problem, activation=halves), *arguments, **more)

    base.decide = decide
    found = {}
    for index, path in enumerate(sorted(folder.iterdir())):
        how = path.name.partition(":")[2]
        more: dict[str, Any] = {"quantization": how} if how else {}
        if how == "mtp":
            more = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
        config = EngineArgs(
            model=str(path), load_format="dummy", skip_tokenizer_init=True, max_model_len=64, enforce_eager=True, **more
        ).create_engine_config()
        if how == "mtp":
            config = replace(config, model_config=config.speculative_config.draft_model_config)
        asked.clear()
        with set_current_vllm_config(config):
            if index == 0:
                init_distributed_environment(1, 0, f"file://{folder.parent}/rendezvous", 0, backend="gloo")
                ensure_model_parallel_initialized(1, 1)
            initialize_model(config)
        found[path.name] = list(asked)
    (folder.parent / "problems.json").write_bytes(msgspec.json.encode(found))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of small checkpoints, and the problems that vLLM asked about, by model."""
    pytest.importorskip("vllm")
    root = tmp_path_factory.mktemp("agreement")
    configs = {name: small(name) for name in NAMES}
    configs |= {f"{name}:{how}": small(name) | {"quantization_config": None} for name, how in ONLINE.items()}
    configs |= {f"{name}:mtp": small(name) | {"num_nextn_predict_layers": 2} for name in MTP_MODELS}
    for name, config in configs.items():
        (root / "models" / name).mkdir(parents=True)
        (root / "models" / name / "config.json").write_text(json.dumps(config))
    clean = {key: value for key, value in os.environ.items() if not key.startswith("MOE_ORACLE_")}
    clean |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1", "MOE_ORACLE_MEASURE_AT_START": "0"}
    ended = subprocess.run(
        [sys.executable, __file__, str(root / "models")], env=clean, capture_output=True, text=True, timeout=600
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    return root / "models", json.loads((root / "problems.json").read_bytes())


@pytest.mark.parametrize("name", NAMES)
def test_vllm_asks_about_the_layers_that_explain_reads(name: str, built: tuple[Path, dict[str, Any]]) -> None:
    folder, asked = built
    assert len(asked[name]) > 1
    assert msgspec.convert(asked[name], tuple[Problem, ...]) == find_moe_layers(read_checkpoint(folder / name)).problems


@pytest.mark.parametrize(("name", "how"), ONLINE.items())
def test_explain_agrees_on_online_quantization(name: str, how: str, built: tuple[Path, dict[str, Any]]) -> None:
    folder, asked = built
    problems = msgspec.convert(asked[f"{name}:{how}"], tuple[Problem, ...])
    assert (
        len(problems) > 1
        and problems == find_moe_layers(read_checkpoint(folder / f"{name}:{how}"), online=how).problems
    )


@pytest.mark.parametrize("name", MTP_MODELS)
def test_explain_agrees_on_mtp_layers(name: str, built: tuple[Path, dict[str, Any]]) -> None:
    folder, asked = built
    found = find_moe_layers(read_checkpoint(folder / f"{name}:mtp"))
    problems = msgspec.convert(asked[f"{name}:mtp"], tuple[Problem, ...])
    assert len(problems) == 2 and problems == found.mtp_problems
    assert not {each.layer for each in problems} & {each.layer for each in found.problems}


if __name__ == "__main__":
    build(Path(sys.argv[1]))
