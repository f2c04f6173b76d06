"""Part of `release_probe`: every way by which vLLM arrives at MXFP4 experts, and at AutoRound's MXFP8.

Each check makes a layer as a model does, through the release's own config class, loads it through the layer's own
loaders and runs it. `probe` is the module `release_probe`, as it runs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

_STOCK = "vllm.model_executor.layers.quantization"
_INPUTS = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": True}
"""What compressed-tensors declares for activations with W4A4."""

Checks = dict[str, Callable[[], None]]


def checks(probe: Any) -> Checks:
    """The checks by name."""
    return {
        "compressed_tensors_mxfp4": lambda: _compressed_tensors(probe),
        "compressed_tensors_mxfp4_with_fp8": lambda: _compressed_tensors_with_fp8(probe),
        "fp8_with_mxfp4_experts": lambda: _fp8(probe),
        "deepseek_v4": lambda: _deepseek_v4(probe),
        "situ": lambda: _activation(probe, "situ"),
        "swiglustep": lambda: _activation(probe, "swiglustep"),
        "inc_mxfp4": lambda: _inc(probe, 4),
        "inc_mxfp8": lambda: _inc(probe, 8),
        "online_mxfp4": lambda: _online(probe),
        "quark": lambda: _quark(probe),
        "quark_others": lambda: _quark_others(probe),
        "requested_activations": lambda: _activations_asked(probe),
        "gpt_oss_cut_between_blocks": lambda: _gpt_oss_cut(probe),
        "experts_over_ranks": lambda: _expert_parallel(probe, "linear", 2, "linear"),
        "experts_by_turns": lambda: _expert_parallel(probe, "round_robin", 2, "round_robin"),
        "experts_in_one_group": lambda: _expert_parallel(probe, "round_robin", 1, "linear"),
        "experts_without_groups": lambda: _expert_parallel(probe, "round_robin", 0, "linear"),
    }


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(f"{_STOCK}.{module}") is not None
    except ModuleNotFoundError:
        return False


def _group(bits: int, inputs: Any) -> dict[str, Any]:
    arguments = {"num_bits": bits, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**arguments, "dynamic": False},
                "input_activations": inputs,
                "format": "mxfp4-pack-quantized",
            }
        },
        "ignore": [],
    }


def _compressed_tensors(probe: Any) -> None:
    """Weights alone, and W4A4: the same class of stock vLLM."""
    for given, expected in ((None, "16bit"), (_INPUTS, "mxfp4")):
        with probe.engine(backend="emulation"):
            layer = probe.moe_layer(probe.quant_config(_group(4, given)))
            probe.ours(layer)
            scheme = layer.quant_method.decision.problem.scheme
            assert (scheme.name, scheme.packing) == ("mxfp4", "compressed-tensors")
            assert scheme.activations == expected, scheme
            if given is None:
                _runs(probe, layer, "_packed")


def _compressed_tensors_with_fp8(probe: Any) -> None:
    """FP8 activations of a token: read since 0.32; before, vLLM took such checkpoints for W4A4."""
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
    with probe.engine(backend="emulation"):
        layer = probe.moe_layer(probe.quant_config(_group(4, inputs)))
        probe.ours(layer)
        method = layer.quant_method
        known = _exists("compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w4a8_mxfp4")
        assert ("W4A8" in type(method).__name__) == known
        assert method.decision.problem.scheme.activations == "fp8_token", method.decision.problem
        _runs(probe, layer, "_packed", loads_only=True)


def _activation(probe: Any, name: str) -> None:
    """Activations with numbers of their own: Kimi-K3's, whose numbers vLLM is given, and Step-3.5's, which it knows."""
    import torch
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    if name not in [each.value for each in MoEActivation]:
        return  # no model of the release has it
    situ = name == "situ"
    keywords = {"activation_situ_beta": 1.5, "activation_situ_linear_beta": 2.5} if situ else {}

    def function(gate: Any, up: Any) -> Any:
        if situ:
            return 1.5 * (gate / 1.5).tanh() * gate.sigmoid() * 2.5 * (up / 2.5).tanh()
        return (gate * gate.sigmoid()).clamp(max=7.0) * up.clamp(-7.0, 7.0)

    with probe.engine(backend="emulation"):
        layer = probe.moe_layer(probe.quant_config(_group(4, None)), activation=name, **keywords)
        probe.ours(layer)
        found = layer.quant_method.decision.problem.activation
        numbers = (1.5, 2.5, None) if situ else (None, None, 7.0)
        assert (found.name, found.gated, found.alpha, found.beta, found.limit) == (name, True, *numbers), found
        weights = _load_experts(probe, layer, "_packed")
        layer.quant_method.process_weights_after_loading(layer)
        x = torch.randn(probe.TOKENS, probe.HIDDEN, generator=torch.Generator().manual_seed(4)) * 4
        ids = torch.arange(probe.TOP_K).repeat(probe.TOKENS, 1)
        shares = torch.full(ids.shape, 0.5)
        given = {"shared_experts": None, "shared_experts_input": None}
        said = layer.quant_method.apply(layer=layer, x=x.clone(), topk_weights=shares, topk_ids=ids.int(), **given)
    expected = torch.zeros_like(x)
    for expert in range(probe.TOP_K):
        gate, up = x @ weights["gate"][expert].T, x @ weights["up"][expert].T
        assert gate.max() > 7 and up.abs().max() > 7
        expected += 0.5 * function(gate, up) @ weights["down"][expert].T
    assert (said - expected).norm() / expected.norm() < 1e-5


def _activations_asked(probe: Any) -> None:
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

    engine = Adapter.engine
    gpt_oss = probe._mxfp4_config("gpt_oss_mxfp4")
    w4a4 = probe.quant_config(_group(4, _INPUTS))
    for config, ours, expected, said in (
        (gpt_oss, "checkpoint", "mxfp8", "activations are mxfp8 by --quantization-config's moe.activation"),
        (w4a4, "16bit", "16bit", "activations are 16bit by"),
        (w4a4, "checkpoint", None, "declares mxfp4 for the experts' inputs"),
    ):
        with (
            probe.engine(backend="emulation", activations=ours),
            mock.patch.object(Adapter, "engine", lambda self: Engine(engine(self))),
        ):
            try:
                decision = probe.moe_layer(config).quant_method.decision
            except SettingError as error:
                assert expected is None and said in str(error), error
            else:
                assert decision.problem.scheme.activations == expected, decision
                assert said in decision.summary(), decision.summary()


def _fp8(probe: Any) -> None:
    """An FP8 config that constructs the stock method for MXFP4 itself, since 0.24."""
    config = probe.quant_config(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    )
    if not hasattr(config, "store_dtype"):
        from vllm_moe_oracle.compat import current_adapter

        assert current_adapter().version() < "0.24"
        return
    config.store_dtype = "mxfp4"
    for settings, expected in (({}, "fp8"), ({"activations": "16bit"}, "16bit")):
        with probe.engine(backend="emulation", **settings):
            layer = probe.moe_layer(config)
            probe.ours(layer)
            assert layer.quant_method.decision.problem.scheme.activations == expected
            if settings:
                _runs(probe, layer, "")


def _deepseek_v4(probe: Any) -> None:
    """DeepSeek-V4's own config, wherever the release keeps it."""
    config = _deepseek_config().from_config(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    )
    with probe.engine(backend="emulation"):
        layer = probe.moe_layer(config)
        probe.ours(layer)
        problem = layer.quant_method.decision.problem
        assert (problem.scheme.name, problem.scheme.activations) == ("mxfp4", "fp8"), problem


def _deepseek_config() -> Any:
    from vllm.model_executor.layers.quantization import get_quantization_config

    return get_quantization_config("deepseek_v4_fp8")


def _inc(probe: Any, bits: int) -> None:
    """AutoRound through vLLM's INC config: MXFP4's experts since 0.27.1, MXFP8's since 0.30."""
    if not _exists(f"inc.schemes.inc_mxfp{bits}_moe"):
        from vllm_moe_oracle.compat import current_adapter

        assert current_adapter().version() < ("0.27" if bits == 4 else "0.30")
        return
    checkpoint = {
        "quant_method": "auto-round", "bits": bits, "group_size": 32, "data_type": "mx_fp", "sym": True,
        "packing_format": "auto_round:llm_compressor", "act_bits": bits, "act_data_type": "mx_fp",
        "act_group_size": 32, "act_sym": True, "act_dynamic": True,
    }  # fmt: skip
    from vllm.model_executor.layers.quantization import get_quantization_config

    config = get_quantization_config("inc").from_config(checkpoint)
    with probe.engine(backend="emulation", activations="16bit"):
        layer = probe.moe_layer(config)
        probe.ours(layer)
        scheme = layer.quant_method.decision.problem.scheme
        assert (scheme.name, scheme.packing) == (f"mxfp{bits}", "auto-round"), scheme
        if bits == 4:
            _runs(probe, layer, "_packed")
    with probe.engine(backend="emulation"):
        scheme = probe.moe_layer(config).quant_method.decision.problem.scheme
        assert scheme.activations == f"mxfp{bits}", scheme


def _online(probe: Any) -> None:
    """``--quantization mxfp4`` on a checkpoint in 16 bits, since 0.28."""
    if not _exists("online.mxfp4"):
        from vllm_moe_oracle.compat import current_adapter

        assert current_adapter().version() < "0.28"
        return
    with probe.engine(backend="emulation"):
        layer = probe.moe_layer(probe.quant_config(None, "mxfp4"))
        probe.ours(layer)
        scheme = layer.quant_method.decision.problem.scheme
        assert (scheme.name, scheme.activations) == ("mxfp4", "mxfp4")


def _quark_config(probe: Any, **weights: Any) -> Any:
    entry = {
        "dtype": "fp4", "qscheme": "per_group", "group_size": 32, "is_dynamic": False, "ch_axis": -1,
        "scale_format": "e8m0", "scale_type": "float", "symmetric": None, "observer_cls": "PerBlockMXObserver",
        "round_method": "half_even", **weights,
    }  # fmt: skip
    checkpoint: dict[str, Any] = {
        "quant_method": "quark", "quant_mode": "eager_mode", "exclude": [], "layer_quant_config": {},
        "layer_type_quant_config": {}, "algo_config": None, "kv_cache_quant_config": {}, "kv_cache_post_rope": False,
        "softmax_quant_spec": None,
        "export": {"kv_cache_group": [], "pack_method": "order", "weight_format": "real_quantized"},
        "global_quant_config": {
            "input_tensors": None, "output_tensors": None, "weight": entry, "bias": None, "target_device": None,
        },
    }  # fmt: skip
    return checkpoint


def _quark(probe: Any) -> None:
    """Quark's OCP MXFP4: weights alone, and with dynamic MXFP4 activations."""
    for dynamic, expected in ((False, "16bit"), (True, "mxfp4")):
        checkpoint = _quark_config(probe)
        if dynamic:
            weights = checkpoint["global_quant_config"]["weight"]
            checkpoint["global_quant_config"]["input_tensors"] = {**weights, "is_dynamic": True}
        with probe.engine(backend="emulation"):
            layer = probe.moe_layer(probe.quant_config(checkpoint), has_bias=True)
            probe.ours(layer)
            scheme = layer.quant_method.decision.problem.scheme
            assert (scheme.name, scheme.packing, scheme.activations) == ("mxfp4", "quark", expected), scheme
            if not dynamic:
                _runs(probe, layer, "", biases=True)


def _quark_others(probe: Any) -> None:
    """MXFP6 is not read here: the stock class is asked to serve it, as if nothing were installed."""
    from vllm.model_executor.layers.quantization.quark import quark_moe

    with probe.engine():
        try:
            made = probe.moe_layer(probe.quant_config(_quark_config(probe, dtype="fp6_e3m2"))).quant_method
        except Exception as error:  # stock's own: it needs what is not here
            assert "moe_oracle" not in str(error)
            frames, trace = [], error.__traceback__
            while trace is not None:
                frames.append(trace.tb_frame.f_code.co_filename)
                trace = trace.tb_next
            assert any(frame.endswith("quark_moe.py") and "/vllm/" in frame for frame in frames), frames
        else:
            assert type(made) is quark_moe.QuarkOCP_MX_MoEMethod


def _gpt_oss_cut(probe: Any) -> None:
    """96 features over 2 ranks are 64 and 32: the second rank's parameters are larger than what it loads."""
    import torch
    from vllm.model_executor.layers.fused_moe import config as configs

    inner, ranks = 96, 2
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(probe.TOKENS, probe.HIDDEN, generator=generator)
    ids = torch.stack([torch.randperm(probe.EXPERTS, generator=generator)[: probe.TOP_K] for _ in range(probe.TOKENS)])
    shares = torch.rand(probe.TOKENS, probe.TOP_K, generator=generator)
    whole = _gpt_oss_tensors(probe, inner, generator)
    found = torch.zeros(probe.TOKENS, probe.HIDDEN)
    original = configs.get_tensor_model_parallel_rank
    kept = probe.INTERMEDIATE
    try:
        probe.INTERMEDIATE = inner
        for rank in range(ranks):
            configs.get_tensor_model_parallel_rank = lambda rank=rank: rank
            with probe.engine(backend="emulation"):
                from vllm.model_executor.layers.quantization import get_quantization_config

                config = get_quantization_config("gpt_oss_mxfp4").from_config({"quant_method": "mxfp4"})
                layer = probe.moe_layer(config, has_bias=True, activation="swigluoai", tp_size=ranks)
                method = layer.quant_method
                problem = method.decision.problem
                assert (problem.intermediate_size, problem.full_intermediate_size) == (64, 96), problem
                _load_gpt_oss(layer, whole, inner, ranks, rank)
                method.process_weights_after_loading(layer)
                given = {"shared_experts": None, "shared_experts_input": None}
                found += method.apply(layer=layer, x=x.clone(), topk_weights=shares, topk_ids=ids.int(), **given)
    finally:
        configs.get_tensor_model_parallel_rank = original
        probe.INTERMEDIATE = kept
    dense = _dense(whole, inner)
    probe._close(found, dense, x, ids, shares, oai=True)


def _expert_parallel(probe: Any, asked: str, groups: int, placement: str) -> None:
    """4 experts over 3 ranks are 2, 1 and 1: each rank computes what is its own, by vLLM's map of global ids, and an
    empty slot nothing. The oracle knows how experts are dealt out, which is not always as was asked for.

    Args:
        probe: see the module.
        asked: ``--expert-placement-strategy``.
        groups: the router's groups of experts; 0 for a router without.
        placement: what the release makes of that.
    """
    import torch
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers.fused_moe import config as configs
    from vllm.model_executor.layers.quantization import get_quantization_config

    ranks = 3
    generator = torch.Generator().manual_seed(8)
    x = torch.randn(probe.TOKENS, probe.HIDDEN, generator=generator)
    ids = torch.stack([torch.randperm(probe.EXPERTS, generator=generator)[: probe.TOP_K] for _ in range(probe.TOKENS)])
    shares = torch.rand(probe.TOKENS, probe.TOP_K, generator=generator)
    ids[1, 0] = ids[3, 1] = -1
    found, held = torch.zeros(probe.TOKENS, probe.HIDDEN), []
    grouped = {"use_grouped_topk": True, "num_expert_group": groups, "topk_group": 1} if groups else {}
    original = configs.get_tensor_model_parallel_rank
    dense: dict[str, Any] = {}
    try:
        for rank in range(ranks):
            configs.get_tensor_model_parallel_rank = lambda rank=rank: rank
            with probe.engine(backend="emulation"):
                get_current_vllm_config().parallel_config.enable_expert_parallel = True
                get_current_vllm_config().parallel_config.expert_placement_strategy = asked
                config = get_quantization_config("mxfp4").from_config({"quant_method": "mxfp4"})
                layer = probe.moe_layer(config, tp_size=ranks, **grouped)
                # By turns, the first rank's second expert is the first one after everybody's first.
                held_by_map = [expert for expert, slot in enumerate(layer._expert_map.tolist()) if slot >= 0]
                turns = [[0, 3], [1], [2]] if placement == "round_robin" else [[0, 1], [2], [3]]
                assert held_by_map == turns[rank], held_by_map
                method = layer.quant_method
                problem = method.decision.problem
                assert (problem.parallel.ep, problem.num_experts) == (ranks, probe.EXPERTS), problem
                assert problem.parallel.placement == placement, problem
                held.append(problem.local_experts)
                dense = _load_experts(probe, layer, partly=True)
                method.process_weights_after_loading(layer)
                given = {"shared_experts": None, "shared_experts_input": None}
                found += method.apply(layer=layer, x=x.clone(), topk_weights=shares, topk_ids=ids.int(), **given)
    finally:
        configs.get_tensor_model_parallel_rank = original
    assert held == [2, 1, 1], held
    # An empty slot weighs nothing in the formula.
    probe._close(found, dense, x, ids.clamp(min=0), shares.masked_fill(ids < 0, 0.0))


def _gpt_oss_tensors(probe: Any, inner: int, generator: Any) -> dict[str, Any]:
    """A checkpoint's tensors by vLLM's names: rows alternate gate and up."""
    import torch

    made = {}
    for name, rows, columns in (("w13", 2 * inner, probe.HIDDEN), ("w2", probe.HIDDEN, inner)):
        shape = (probe.EXPERTS, rows, columns)
        made[f"{name}_weight"] = torch.randint(0, 256, (*shape[:2], columns // 2), generator=generator).byte()
        made[f"{name}_weight_scale"] = torch.randint(120, 125, (*shape[:2], columns // 32), generator=generator).byte()
        made[f"{name}_bias"] = torch.randn(*shape[:2], generator=generator).bfloat16()
    return made


def _load_gpt_oss(layer: Any, whole: dict[str, Any], inner: int, ranks: int, rank: int) -> None:
    """One rank's part, as `GptOssModel._load_weights_mxfp4` cuts it: shares of whole blocks, the last one smaller."""
    share = -(-(inner // 32) // ranks) * 32
    start, end = rank * share, min((rank + 1) * share, inner)
    parameters = dict(layer.named_parameters())
    for name, tensor in whole.items():
        part = tensor
        if name.startswith("w13"):
            part = tensor[:, 2 * start : 2 * end]
        elif name == "w2_weight":
            part = tensor[..., start // 2 : end // 2]
        elif name == "w2_weight_scale":
            part = tensor[..., start // 32 : end // 32]
        elif rank:
            part = torch_zeros_like(tensor)  # as the loader does on ranks other than the first
        parameter = parameters[name]
        parameter.weight_loader(parameter, part, weight_name=f"x.{name}", shard_id=None, expert_id=None)


def torch_zeros_like(tensor: Any) -> Any:
    """Zeros of a tensor's shape."""
    return tensor.new_zeros(tensor.shape)


def _dense(whole: dict[str, Any], inner: int) -> dict[str, Any]:
    """Float32 matrices and biases, gate and up apart."""
    w13, w2 = (_values(whole[f"{name}_weight"], whole[f"{name}_weight_scale"]) for name in ("w13", "w2"))
    bias = whole["w13_bias"].float()
    return {
        "gate": w13[:, 0::2], "up": w13[:, 1::2], "down": w2,
        "gate_bias": bias[:, 0::2], "up_bias": bias[:, 1::2], "down_bias": whole["w2_bias"].float(),
    }  # fmt: skip


def _values(codes: Any, scales: Any) -> Any:
    """MXFP4 to float32, by the specification's table."""
    import torch

    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    table = torch.cat([table, -table])
    pairs = torch.stack((table[(codes & 15).int()], table[(codes >> 4).int()]), -1).flatten(-2)
    return pairs * (scales.float() - 127).exp2().repeat_interleave(32, dim=-1)


def _runs(probe: Any, layer: Any, suffix: str, biases: bool = False, loads_only: bool = False) -> None:
    """Loads a layer expert by expert, converts it and compares what it computes.

    Args:
        probe: see the module.
        layer: the layer.
        suffix: of the weights' names in the checkpoint.
        biases: the layer has them.
        loads_only: it cannot be compared in float32.
    """
    import torch

    dense = _load_experts(probe, layer, suffix, biases)
    generator = torch.Generator().manual_seed(4)
    method = layer.quant_method
    method.process_weights_after_loading(layer)
    x = torch.randn(probe.TOKENS, probe.HIDDEN, generator=generator)
    ids = torch.stack([torch.randperm(probe.EXPERTS, generator=generator)[: probe.TOP_K] for _ in range(probe.TOKENS)])
    shares = torch.rand(probe.TOKENS, probe.TOP_K, generator=generator)
    given = {"shared_experts": None, "shared_experts_input": None}
    found = method.apply(layer=layer, x=x.clone(), topk_weights=shares, topk_ids=ids.int(), **given)
    if not loads_only:
        probe._close(found, dense, x, ids, shares)
    assert torch.isfinite(found).all()


def _load_experts(
    probe: Any, layer: Any, suffix: str = "", biases: bool = False, partly: bool = False
) -> dict[str, Any]:
    """Random tensors through the layer's own loaders, expert by expert; dequantized, gate and up apart.

    Args:
        probe: see the module.
        layer: the layer.
        suffix: of the weights' names in the checkpoint.
        biases: the layer has them.
        partly: some of the experts live elsewhere.
    """
    import torch

    generator = torch.Generator().manual_seed(3)
    parameters, dense = dict(layer.named_parameters()), {}
    inner = probe.INTERMEDIATE
    for stock, rows, columns in (("w13", 2 * inner, probe.HIDDEN), ("w2", probe.HIDDEN, inner)):
        codes = torch.randint(0, 256, (probe.EXPERTS, rows, columns // 2), generator=generator).byte()
        scales = torch.randint(120, 125, (probe.EXPERTS, rows, columns // 32), generator=generator).byte()
        bias = torch.randn(probe.EXPERTS, rows, generator=generator) * biases
        for kind, tensor in ((f"weight{suffix}", codes), ("weight_scale", scales), ("bias", bias)):
            name = f"{stock}_{kind}"
            if kind == "bias" and not biases:
                continue
            for expert in range(probe.EXPERTS):
                one = tensor[expert]
                parts = {"w2": one} if stock == "w2" else {"w1": one[:inner], "w3": one[inner:]}
                for shard, part in parts.items():
                    done = parameters[name].weight_loader(
                        parameters[name], part, f"{probe.NAME}.{name}", shard_id=shard, expert_id=expert,
                        return_success=True,
                    )  # fmt: skip
                    assert done or partly, (name, shard)
        matrix = _values(codes, scales)
        if stock == "w2":
            dense |= {"down": matrix, "down_bias": bias}
        else:
            dense |= {"gate": matrix[:, :inner], "up": matrix[:, inner:]}
            dense |= {"gate_bias": bias[:, :inner], "up_bias": bias[:, inner:]}
    return dense
