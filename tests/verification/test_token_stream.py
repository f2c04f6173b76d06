"""The inputs of `verify`: tokens of ordinary size, whatever the files hold, and blame where it belongs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm", reason="reads weights for vLLM's layers")

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers import layernorm

from tests.lib.checkpoints import Size, rewrite_tensors, write_checkpoint
from vllm_moe_oracle import settings
from vllm_moe_oracle.checkpoint.files import read_checkpoint
from vllm_moe_oracle.core.problem import Routing
from vllm_moe_oracle.devices import detect
from vllm_moe_oracle.errors import CheckpointError
from vllm_moe_oracle.measuring import verifying
from vllm_moe_oracle.releases.gemma_norms import has_gemma_norms
from vllm_moe_oracle.verification import routing
from vllm_moe_oracle.verification.token_stream import TOKENS, LayerInputs, TokenStream

EMBEDDING = "model.embed_tokens.weight"
NORM = "model.layers.0.post_attention_layernorm.weight"
ROUTER = "model.layers.0.mlp.gate.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("stream") / "model", size=Size(layers=1, experts=4, top_k=2))


def inputs(folder: Path) -> LayerInputs:
    """The inputs of the first layer."""
    with verifying.Verification(read_checkpoint(folder), detect.detect(), settings.load({})) as made:
        (plan,) = made.plans
        assert plan.tensors is not None
        return TokenStream(made.files, plan.problem.hidden_size, made.gemma_norms).inputs(plan.tensors)


def changed(model: Path, target: Path, name: str, change: Callable[[Tensor], Tensor]) -> LayerInputs:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[name] = change(tensors[name])

    return inputs(rewrite_tensors(model, target, edit))


def sizes(found: LayerInputs) -> Tensor:
    return found.x.double().square().mean(-1).sqrt()


RIGHT = "embedding, the layer's norm, the layer's router"


def half_zero(rows: Tensor) -> Tensor:
    return torch.cat((rows[: len(rows) // 2], 0 * rows[len(rows) // 2 :]))


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (EMBEDDING, lambda rows: 0 * rows, f"random numbers for {TOKENS} of {TOKENS} tokens: their rows are"),
        (EMBEDDING, lambda rows: 1e-30 * rows, f"random numbers for {TOKENS} of {TOKENS} tokens"),
        (EMBEDDING, half_zero, "(random numbers for 1"),
        (
            EMBEDDING,
            lambda rows: rows[:0],
            f"random numbers ({EMBEDDING} is bfloat16 [0, 128], not floats [tokens, 128])",
        ),
        (EMBEDDING, lambda rows: rows.to(torch.int8), f"({EMBEDDING} is int8 ["),
        (NORM, lambda norm: norm.to(torch.int8), f"no norm ({NORM} is int8 [128], not floats [128])"),
        (NORM, lambda norm: norm[:1], f"no norm ({NORM} is bfloat16 [1], not floats [128])"),
        (ROUTER, lambda router: router[:3], f"random routing ({ROUTER} is bfloat16 [3, 128], not floats [4, 128])"),
        (
            ROUTER,
            lambda router: router.T.contiguous(),
            f"random routing ({ROUTER} is bfloat16 [128, 4], not floats [4, 128]: it is transposed)",
        ),
        (EMBEDDING, lambda rows: rows.T.contiguous(), ", not floats [tokens, 128]: it is transposed)"),
        (ROUTER, lambda router: router.to(torch.int8), f"({ROUTER} is int8 [4, 128], not floats [4, 128])"),
        (NORM, lambda norm: 0 * norm, f"norm (not for {TOKENS} of {TOKENS} tokens: it makes them nearly 0)"),
        (NORM, lambda norm: norm.float() * 1e-30, "the layer's norm (not for"),
        (EMBEDDING, lambda rows: torch.full_like(rows, 3e38), RIGHT),
        (NORM, lambda norm: norm * 1e-2, RIGHT),
        (ROUTER, lambda router: 0 * router, RIGHT),
    ],
    ids=[
        "zeros",
        "tiny",
        "some zeros",
        "no rows",
        "integers",
        "norm of integers",
        "short norm",
        "few experts",
        "transposed router",
        "transposed embedding",
        "router of integers",
        "norm of zeros",
        "tiny norm",
        "huge",
        "small norm",
        "router",
    ],
)
def test_every_token_has_an_ordinary_size(
    model: Path, tmp_path: Path, name: str, change: Callable[[Tensor], Tensor], words: str
) -> None:
    found = changed(model, tmp_path / "changed", name, change)
    assert words in found.source
    assert bool((sizes(found) > 2e-3).all()) and bool((sizes(found) < 100).all())
    assert bool(found.weights.isfinite().all())


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (NORM, lambda norm: norm.float() * 1e30, "it makes inputs whose root mean square is"),
        (NORM, lambda norm: norm.float() * 1e6, "more than 65536"),
        (ROUTER, lambda router: router.float().sign() * 3e38, "values are NaN or infinite"),
    ],
    ids=["norm", "large norm", "router"],
)
def test_a_huge_norm_or_router_is_named_and_no_expert(
    model: Path, tmp_path: Path, name: str, change: Callable[[Tensor], Tensor], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words) as raised:
        changed(model, tmp_path / "changed", name, change)
    assert raised.value.where.startswith(name) and "expert" not in f"{raised.value.rule}{raised.value.remedy}"


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [
        ("Qwen3MoeForCausalLM", layernorm.RMSNorm),
        ("Qwen3NextForCausalLM", layernorm.GemmaRMSNorm),
        ("MiniMaxM3SparseForConditionalGeneration", layernorm.GemmaRMSNorm),
        ("Step3p5ForCausalLM", layernorm.GemmaRMSNorm),
    ],
)
@pytest.mark.parametrize("weight", [torch.linspace(-0.5, 1.0, 128), torch.full((128,), 2.0**-20)])
def test_norms_compute_what_those_of_vllm_do(
    model: Path, tmp_path: Path, architecture: str, kind: type[Any], weight: Tensor
) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[NORM] = weight

    folder = rewrite_tensors(model, tmp_path / "model", edit)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "architectures": [architecture]}))
    with set_current_vllm_config(VllmConfig()):
        norm = kind(128, eps=1e-6)
    norm.weight.data.copy_(weight)
    with verifying.Verification(read_checkpoint(folder), detect.detect(), settings.load({})) as made:
        stream = TokenStream(made.files, 128, made.gemma_norms)
        (plan,) = made.plans
        assert plan.tensors is not None
        found = stream.inputs(plan.tensors)
        if kind is layernorm.RMSNorm and float(weight[0]) > 0:  # tokens that are nearly 0 are replaced
            assert "(not for 32 of 32 tokens" in found.source
            return
        assert found.source == RIGHT
        torch.testing.assert_close(found.x.float(), norm.forward_native(stream._states), rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("nested", [False, True])
def test_a_part_of_the_config_may_name_the_architecture(tmp_path: Path, nested: bool) -> None:
    language = {"model_type": "step3p5", "num_hidden_layers": 1, "architectures": ["Step3p5ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": language} if nested else language))
    assert has_gemma_norms(verifying._architectures(read_checkpoint(tmp_path)))
    assert not has_gemma_norms(["Qwen3MoeForCausalLM", None, 3, ["Step3p5ForCausalLM"]])


def test_routing_weights_that_no_layer_can_have(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits are finite where the weights made of them are not."""
    raw = routing.RoutingReference(lambda logits: logits)
    monkeypatch.setattr(routing, "routing_reference", lambda how: raw)
    with pytest.raises(CheckpointError, match="routing weights that are NaN, infinite or larger than 65536") as raised:
        changed(model, tmp_path / "changed", ROUTER, lambda router: router * 1e8)
    assert raised.value.where.startswith(ROUTER)


CORRECTED = Routing("minimax2", "sigmoid", correction_bias=True)
BLOCK = "model.layers.0.mlp"
CORRECTIONS = [
    ("gate.e_score_correction_bias", "DeepSeek-V3"), ("e_score_correction_bias", "MiniMax-M2"),
    ("gate.bias", "DeepSeek-V4"), ("expert_bias", "AFMoE, LFM2"), ("gate.expert_bias", "Ling, Param2MoE"),
    ("experts.e_score_correction_bias", "Laguna"), ("router.e_score_correction_bias", "LongCat-Flash"),
    ("moe_statics.e_score_correction_bias", "ERNIE-4.5"), ("router_bias", "Step-3.5"),
]  # fmt: skip


def corrected(model: Path, target: Path, name: str, bias: Tensor | None, how: Routing = CORRECTED) -> LayerInputs:
    """The inputs of the first layer, whose routing is corrected by a bias of some name; None: the files have none."""

    def edit(tensors: dict[str, Tensor]) -> None:
        if bias is not None:
            tensors[f"{BLOCK}.{name}"] = bias

    folder = rewrite_tensors(model, target, edit)
    with verifying.Verification(read_checkpoint(folder), detect.detect(), settings.load({})) as made:
        (plan,) = made.plans
        assert plan.tensors is not None
        layer = dataclasses.replace(plan.tensors, problem=dataclasses.replace(plan.problem, routing=how))
        return TokenStream(made.files, plan.problem.hidden_size, made.gemma_norms).inputs(layer)


@pytest.mark.parametrize("name", [name for name, _ in CORRECTIONS])
@pytest.mark.parametrize("leading", [(), (1,)])
def test_the_routers_correction_bias_is_found(model: Path, tmp_path: Path, name: str, leading: tuple[int, ...]) -> None:
    for expert in range(4):
        bias = torch.zeros(*leading, 4)
        bias[..., expert] = 5.0
        found = corrected(model, tmp_path / str(expert), name, bias)
        assert bool((found.ids == expert).any(-1).all())
        assert bool((found.weights < 1).all())  # weights have no bias in them


@pytest.mark.parametrize("how", [CORRECTED, Routing("custom", "sigmoid", correction_bias=True)])
@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_a_damaged_correction_bias_is_named(model: Path, tmp_path: Path, how: Routing, value: float) -> None:
    name = "gate.expert_bias"
    with pytest.raises(CheckpointError, match="1 of 4 values are NaN or infinite") as raised:
        corrected(model, tmp_path / "model", name, torch.tensor([0.0, value, 0.0, 0.0]), how)
    assert raised.value.where.startswith(f"{BLOCK}.{name} (model.safetensors), router")


def test_files_without_a_correction_bias_are_routed_as_by_zeros(model: Path, tmp_path: Path) -> None:
    """As by vLLM's Param2MoE."""
    without = corrected(model, tmp_path / "without", "", None)
    zeros = corrected(model, tmp_path / "zeros", "gate.expert_bias", torch.zeros(4))
    assert torch.equal(without.ids, zeros.ids) and torch.equal(without.weights, zeros.weights)


def test_scores_of_large_logits_are_finite() -> None:
    weights, _ = routing.route(Routing("deepseekv4"), 2, torch.tensor([[200.0, 100.0, -200.0]]))
    torch.testing.assert_close(weights, torch.tensor([[2.0**0.5, 1.0]]) / (1 + 2.0**0.5))
