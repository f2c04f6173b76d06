"""Checks of every way by which vLLM arrives at MXFP4 experts, and at AutoRound's MXFP8.

Each makes a layer as a model does, through the release's own config class; most load and run it.
"""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import Any

import torch

from tests.lib.release_probe import layers
from tests.lib.release_probe.frame import CHECKS, check, has_since

_WEIGHTS = {**layers.MX_GROUP, "num_bits": 4, "dynamic": False}
_INPUTS = {**layers.MX_GROUP, "num_bits": 4, "dynamic": True}
_GPT_OSS = ("gpt_oss_mxfp4", {"quant_method": "mxfp4"})
_TAGGED = ("mxfp4", {"quant_method": "mxfp4"})
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(f"vllm.model_executor.layers.quantization.{module}") is not None
    except ModuleNotFoundError:
        return False


def _compressed(inputs: dict[str, Any] | None) -> Any:
    return layers.quant_config(layers.compressed_tensors(_WEIGHTS, inputs, "mxfp4-pack-quantized"))


def _assert_scheme(layer: Any, name: str, packing: str, activations: str) -> None:
    scheme = layers.our_problem(layer).scheme
    assert (scheme.name, scheme.packing, scheme.activations) == (name, packing, activations), scheme


@check
def tagged_mxfp4() -> None:
    """Experts that are loaded one by one, gate and up apart, with biases."""
    with layers.engine():
        layer = layers.moe_layer(layers.named_config(*_TAGGED), has_bias=True)
        layers.our_problem(layer)
        layers.assert_runs(layer, biases=True)


def _gpt_oss(inner: int, ranks: int, local: int) -> None:
    """gpt-oss's experts, loaded at once and with alternating rows; the sum over ranks is the whole layer's output.

    Args:
        inner: intermediate size.
        ranks: tensor-parallel size.
        local: intermediate size of a rank, which has whole blocks.
    """
    experts = layers.random_experts(inner=inner, biases=True, alternating=True)
    tokens, found = layers.routed_tokens(), torch.zeros(layers.TOKENS, layers.HIDDEN)
    for rank in range(ranks):
        with layers.tensor_rank(rank), layers.engine():
            config, sizes = layers.named_config(*_GPT_OSS), {"intermediate_size": inner, "tp_size": ranks}
            layer = layers.moe_layer(config, has_bias=True, activation="swigluoai", **sizes)
            problem = layers.our_problem(layer)
            assert (problem.intermediate_size, problem.unsharded_intermediate_size) == (local, inner), problem
            _load_gpt_oss(layer, experts, inner, ranks, rank)
            layer.quant_method.process_weights_after_loading(layer)
            found += layers.run_experts(layer, tokens)
    layers.assert_close(found, experts.exact, tokens, activation="swigluoai")


def _load_gpt_oss(layer: Any, experts: layers.Experts, inner: int, ranks: int, rank: int) -> None:
    """One rank's part, as `GptOssModel._load_weights_mxfp4` cuts it: shares of whole blocks, the last one smaller."""
    share = -(-(inner // 32) // ranks) * 32
    start, end = rank * share, min((rank + 1) * share, inner)
    for name, tensor in experts.stored.items():
        part = tensor
        if name.startswith("w13"):
            part = tensor[:, 2 * start : 2 * end]
        elif name == "w2_weight":
            part = tensor[..., start // 2 : end // 2]
        elif name == "w2_weight_scale":
            part = tensor[..., start // 32 : end // 32]
        elif rank:
            part = torch.zeros_like(tensor)  # as the loader does on ranks other than the first
        parameter = layer.get_parameter(name)
        parameter.weight_loader(parameter, part, weight_name=f"x.{name}", shard_id=None, expert_id=None)


CHECKS["gpt_oss"] = partial(_gpt_oss, 32, ranks=1, local=32)
# 96 features over 2 ranks are 64 and 32: the second rank's parameters are larger than what it loads.
CHECKS["gpt_oss_cut_between_blocks"] = partial(_gpt_oss, 96, ranks=2, local=64)


@check
def compressed_tensors_mxfp4() -> None:
    """Weights alone, and W4A4: the same class of stock vLLM."""
    for inputs, activations in ((None, "16bit"), (_INPUTS, "mxfp4")):
        with layers.engine():
            layer = layers.moe_layer(_compressed(inputs))
            _assert_scheme(layer, "mxfp4", "compressed-tensors", activations)
            if inputs is None:
                layers.assert_runs(layer, suffix="_packed")


@check
def compressed_tensors_mxfp4_with_fp8() -> None:
    """FP8 activations of a token: read since 0.32; before, vLLM took such checkpoints for W4A4."""
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
    with layers.engine():
        layer = layers.moe_layer(_compressed(inputs))
        known = _exists("compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w4a8_mxfp4")
        assert ("W4A8" in type(layer.quant_method).__name__) == known
        _assert_scheme(layer, "mxfp4", "compressed-tensors", "fp8_token")
        layers.assert_runs(layer, activation="", suffix="_packed")


def _activation(name: str, numbers: dict[str, float], **keywords: float) -> None:
    """Activations with numbers of their own: Kimi-K3's, whose numbers vLLM is given, and Step-3.5's, which it knows."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    if name not in [each.value for each in MoEActivation]:
        return  # no model of the release has it

    first = layers.routed_tokens(4.0)["x"].numpy() @ layers.random_experts().exact["w13"].swapaxes(1, 2)
    gate, up = first[..., : layers.INTERMEDIATE], first[..., layers.INTERMEDIATE :]
    assert gate.max((1, 2)).min() > 7 and abs(up).max((1, 2)).min() > 7, "the limits must matter"
    with layers.engine():
        layer = layers.moe_layer(_compressed(None), activation=name, **keywords)
        found = layers.our_problem(layer).activation
        wanted = (name, True, *map(numbers.get, ("alpha", "beta", "limit")))
        assert (found.name, found.gated, found.alpha, found.beta, found.limit) == wanted, found
        layers.assert_runs(layer, activation=name, suffix="_packed", magnitude=4.0, **numbers)


CHECKS["situ"] = partial(
    _activation, "situ", {"alpha": 1.5, "beta": 2.5}, activation_situ_beta=1.5, activation_situ_linear_beta=2.5
)
CHECKS["swiglustep"] = partial(_activation, "swiglustep", {"limit": 7.0})


@check
def requested_activations() -> None:
    """vLLM's own option for activations, and ours: heard, said, and refused where the checkpoint declares another."""
    from unittest import mock

    from vllm.config.quantization import QuantizationConfigArgs, QuantSpec

    from vllm_moe_oracle.compat.adapter import Adapter
    from vllm_moe_oracle.errors import SettingError

    mxfp8 = QuantizationConfigArgs(moe=QuantSpec(activation="mxfp8"))

    class Engine:
        """The engine's config with that option, which stands in a model's config."""

        def __init__(self, whole: Any) -> None:
            self.whole = whole
            self.model_config = mock.Mock(spec_set=["quantization_config"], quantization_config=mxfp8)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.whole, name)

    original = Adapter.engine
    gpt_oss, w4a4 = layers.named_config(*_GPT_OSS), _compressed(_INPUTS)
    for config, ours, expected, said in (
        (gpt_oss, "checkpoint", "mxfp8", "activations are mxfp8 by --quantization-config's moe.activation"),
        (w4a4, "16bit", "16bit", "activations are 16bit by"),
        (w4a4, "checkpoint", None, "declares mxfp4 for the experts' inputs"),
    ):
        with layers.engine(activations=ours), mock.patch.object(Adapter, "engine", lambda self: Engine(original(self))):
            try:
                decision = layers.moe_layer(config).quant_method.decision
            except SettingError as error:
                assert expected is None and said in str(error), error
            else:
                assert decision.problem.scheme.activations == expected, decision
                assert said in decision.summary(), decision.summary()


@check
def fp8_with_mxfp4_experts() -> None:
    """An FP8 config that constructs the stock method for MXFP4 itself."""
    config = layers.quant_config(_FP8)
    if not has_since("0.24", hasattr(config, "store_dtype")):
        return
    config.store_dtype = "mxfp4"
    for settings, activations in (({}, "fp8"), ({"activations": "16bit"}, "16bit")):
        with layers.engine(**settings):
            layer = layers.moe_layer(config)
            assert layers.our_problem(layer).scheme.activations == activations
            if settings:
                layers.assert_runs(layer)


@check
def deepseek_v4() -> None:
    """DeepSeek-V4's own config, wherever the release keeps it."""
    with layers.engine():
        problem = layers.our_problem(layers.moe_layer(layers.named_config("deepseek_v4_fp8", _FP8)))
        assert (problem.scheme.name, problem.scheme.activations) == ("mxfp4", "fp8"), problem


def _inc(bits: int, release: str) -> None:
    """AutoRound through vLLM's INC config."""
    if not has_since(release, _exists(f"inc.schemes.inc_mxfp{bits}_moe")):
        return
    checkpoint = {
        "quant_method": "auto-round", "bits": bits, "group_size": 32, "data_type": "mx_fp", "sym": True,
        "packing_format": "auto_round:llm_compressor", "act_bits": bits, "act_data_type": "mx_fp",
        "act_group_size": 32, "act_sym": True, "act_dynamic": True,
    }  # fmt: skip
    config = layers.named_config("inc", checkpoint)
    for settings, activations in (({"activations": "16bit"}, "16bit"), ({}, f"mxfp{bits}")):
        with layers.engine(**settings):
            layer = layers.moe_layer(config)
            _assert_scheme(layer, f"mxfp{bits}", "auto-round", activations)
            if bits == 4 and settings:
                layers.assert_runs(layer, suffix="_packed")


CHECKS["inc_mxfp4"] = partial(_inc, 4, "0.27")
CHECKS["inc_mxfp8"] = partial(_inc, 8, "0.30")


@check
def online_mxfp4() -> None:
    """``--quantization mxfp4`` on a checkpoint in 16 bits."""
    if has_since("0.28", _exists("online.mxfp4")):
        with layers.engine():
            _assert_scheme(layers.moe_layer(layers.quant_config(None, "mxfp4")), "mxfp4", "online", "mxfp4")


def _quark_config(inputs: dict[str, Any] | None = None, **weights: Any) -> Any:
    entry = {
        "dtype": "fp4", "qscheme": "per_group", "group_size": 32, "is_dynamic": False, "ch_axis": -1,
        "scale_format": "e8m0", "scale_type": "float", "symmetric": None, "observer_cls": "PerBlockMXObserver",
        "round_method": "half_even", **weights,
    }  # fmt: skip
    return layers.quant_config({
        "quant_method": "quark", "quant_mode": "eager_mode", "exclude": [], "layer_quant_config": {},
        "layer_type_quant_config": {}, "algo_config": None, "kv_cache_quant_config": {}, "kv_cache_post_rope": False,
        "softmax_quant_spec": None,
        "export": {"kv_cache_group": [], "pack_method": "order", "weight_format": "real_quantized"},
        "global_quant_config": {
            "input_tensors": None if inputs is None else {**entry, **inputs}, "output_tensors": None, "weight": entry,
            "bias": None, "target_device": None,
        },
    })  # fmt: skip


@check
def quark() -> None:
    """Quark's OCP MXFP4: weights alone, and with dynamic MXFP4 activations."""
    for inputs, activations in ((None, "16bit"), ({"is_dynamic": True}, "mxfp4")):
        with layers.engine():
            layer = layers.moe_layer(_quark_config(inputs), has_bias=True)
            _assert_scheme(layer, "mxfp4", "quark", activations)
            if inputs is None:
                layers.assert_runs(layer, biases=True)


@check
def quark_others() -> None:
    """MXFP6 is not read here: the stock class is asked to serve it, as if nothing were installed."""
    from vllm.model_executor.layers.quantization.quark import quark_moe

    with layers.engine(backend="auto"):
        try:
            made = layers.moe_layer(_quark_config(dtype="fp6_e3m2")).quant_method
        except Exception as error:  # stock's own: it needs what is not here
            assert "moe_oracle" not in str(error)
            frames, trace = [], error.__traceback__
            while trace is not None:
                frames.append(trace.tb_frame.f_code.co_filename)
                trace = trace.tb_next
            assert any(frame.endswith("quark_moe.py") and "/vllm/" in frame for frame in frames), frames
        else:
            assert type(made) is quark_moe.QuarkOCP_MX_MoEMethod


def _expert_parallel(asked: str, groups: int, placement: str) -> None:
    """4 experts over 3 ranks are 2, 1 and 1: each rank computes its own experts, by vLLM's map of global ids, and an
    empty slot adds nothing. The oracle knows the placement, which is not always the requested one.

    Args:
        asked: ``--expert-placement-strategy``.
        groups: the router's groups of experts; 0 for a router without.
        placement: what the release makes of that.
    """
    from vllm.config import get_current_vllm_config

    ranks = 3
    tokens, found = layers.routed_tokens(), torch.zeros(layers.TOKENS, layers.HIDDEN)
    tokens["topk_ids"][1, 0] = tokens["topk_ids"][3, 1] = -1
    experts, held = layers.random_experts(), []
    grouped = {"use_grouped_topk": True, "num_expert_group": groups, "topk_group": 1} if groups else {}
    for rank in range(ranks):
        with layers.tensor_rank(rank), layers.engine():
            get_current_vllm_config().parallel_config.enable_expert_parallel = True
            get_current_vllm_config().parallel_config.expert_placement_strategy = asked
            layer = layers.moe_layer(layers.named_config(*_TAGGED), tp_size=ranks, **grouped)
            # Round robin: the first rank's second expert comes after the first one of every rank.
            held_by_map = [expert for expert, slot in enumerate(layer._expert_map.tolist()) if slot >= 0]
            by_rank = [[0, 3], [1], [2]] if placement == "round_robin" else [[0, 1], [2], [3]]
            assert held_by_map == by_rank[rank], held_by_map
            problem = layers.our_problem(layer)
            assert (problem.parallel.ep, problem.num_experts) == (ranks, layers.EXPERTS), problem
            assert problem.parallel.placement == placement, problem
            held.append(problem.local_experts)
            layers.load(layer, experts.stored, partly=True)
            layer.quant_method.process_weights_after_loading(layer)
            found += layers.run_experts(layer, tokens)
    assert held == [2, 1, 1], held
    layers.assert_close(found, experts.exact, tokens)


CHECKS["experts_over_ranks"] = partial(_expert_parallel, "linear", 2, "linear")
CHECKS["experts_round_robin"] = partial(_expert_parallel, "round_robin", 2, "round_robin")
CHECKS["experts_in_one_group"] = partial(_expert_parallel, "round_robin", 1, "linear")
CHECKS["experts_without_groups"] = partial(_expert_parallel, "round_robin", 0, "linear")
