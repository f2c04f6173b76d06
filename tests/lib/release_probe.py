"""Runs in a process of its own, on the sources of one vLLM release: is the plugin the one that vLLM would use?

    PYTHONPATH=SOURCES:REPOSITORY python -m tests.lib.release_probe RESULTS.json

Every check stands alone; the result is ``{"version": ..., "checks": {name: "ok" or a traceback}}``. The environment's
torch and other packages are used, whatever release they were installed for. Replaced by stand-ins is only what cannot
be there: the compiled extensions of the release (its own import of them is allowed to fail), and packages that an
older release imports at the top of a module and that newer environments no longer bring.
"""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import tempfile
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from tests.lib import mxfp4_probe

os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
for variable in [each for each in os.environ if each.startswith(("MOE_ORACLE_", "VLLM_PLUGINS"))]:
    del os.environ[variable]

STAND_INS = {"gguf": "vLLM 0.22 and 0.23 import it for a file format that has nothing to do with this project"}
NAME = "model.layers.3.mlp.experts"
EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, TOKENS = 4, 2, 64, 32, 5


class _Anything(type):
    """Classes whose every attribute is another such class."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Empty modules in place of packages that are not installed."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        known = name.partition(".")[0] in STAND_INS
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec: Any) -> ModuleType:
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: getattr(_Anything("module", (), {}), name)  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


def start() -> None:
    """vLLM on its CPU platform, which a release without compiled extensions does not find by itself."""
    sys.meta_path.append(StandIns())  # last: what is installed is taken
    import vllm.platforms as platforms
    from vllm.platforms.cpu import CpuPlatform

    platforms._current_platform = CpuPlatform()


def load_plugins() -> None:
    """What every process of vLLM does."""
    import vllm.plugins

    vllm.plugins.plugins_loaded = False
    vllm.plugins.load_general_plugins()


# --- The whole of vLLM, by identity -------------------------------------------------------------------------------


def photograph() -> dict[tuple[str, str], Any]:
    """Every name in every module of vLLM, and in every class defined there."""
    found: dict[tuple[str, str], Any] = {}
    for module_name, module in list(sys.modules.items()):
        if module_name != "vllm" and not module_name.startswith("vllm."):
            continue
        for name, value in list(vars(module).items()):
            found[module_name, name] = value
            if isinstance(value, type) and value.__module__ == module_name:
                found[f"{module_name}.{name}", "metaclass"] = type(value)
                for key, member in list(vars(value).items()):
                    found[f"{module_name}.{name}", key] = member
            if isinstance(value, dict):
                for key, member in list(value.items()):
                    found[f"{module_name}.{name}[]", str(key)] = member
    return found


_OWN_BUSINESS = {("vllm.plugins", "plugins_loaded")}
"""Counters and flags that vLLM itself changes."""


def same(before: dict[tuple[str, str], Any]) -> None:
    """Everything is the very object that it was; what was imported in the meantime is new, and nothing else."""
    now = photograph()
    changed = [
        key
        for key, value in before.items()
        if key not in _OWN_BUSINESS and "__abc" not in key[1] and "_abc_" not in key[1] and now.get(key) is not value
    ]
    owners = {owner for owner, _ in before}
    added = [
        key
        for key in now
        if key not in before
        and key[0] in owners
        and f"{key[0]}.{key[1]}" not in sys.modules
        and not key[1].startswith("__")
    ]
    assert not changed, f"changed: {changed[:10]}"
    assert not added, f"added: {added[:10]}"


# --- Checkpoints and layers ---------------------------------------------------------------------------------------


def quant_config(checkpoint: dict[str, Any] | None, quantization: str | None = None) -> Any:
    """The config object that vLLM makes for a checkpoint's ``quantization_config`` and ``--quantization``."""
    from vllm.config.load import LoadConfig
    from vllm.config.model import ModelConfig
    from vllm.config.quantization import resolve_quantization_config
    from vllm.model_executor.model_loader.weight_utils import get_quant_config

    hf = SimpleNamespace(model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], num_attention_heads=4)
    hf.num_key_value_heads = 2
    if checkpoint is not None:
        hf.quantization_config = _normalized(checkpoint)
    model = SimpleNamespace(
        model=tempfile.gettempdir(),
        revision=None,
        quantization=quantization,
        quantization_config=resolve_quantization_config(quantization, None),
        model_arch_config=SimpleNamespace(
            quantization_config=getattr(hf, "quantization_config", None),
            total_num_attention_heads=4,
            total_num_kv_heads=2,
        ),
        hf_config=hf,
        hf_text_config=hf,
        hf_overrides={},
        allow_deprecated_quantization=False,
    )
    ModelConfig._verify_quantization(model)
    return get_quant_config(model, LoadConfig())


def _normalized(checkpoint: dict[str, Any]) -> dict[str, Any]:
    from vllm.transformers_utils import model_arch_config_convertor as convertors

    holder = SimpleNamespace(quantization_config=json.loads(json.dumps(checkpoint)))
    convertor = object.__new__(convertors.ModelArchConfigConvertorBase)
    found: dict[str, Any] = convertor._normalize_quantization_config(holder)
    return found


@contextmanager
def engine(**settings: Any) -> Iterator[None]:
    """vLLM's current config, with settings of the plugin."""
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config

    config = VllmConfig()
    config.additional_config = {"moe_oracle": {"self_check": "off", **settings}}
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with set_current_vllm_config(config):
            _distributed()
            yield
    finally:
        torch.set_default_dtype(default)


def _distributed() -> None:
    from vllm import distributed

    if not distributed.parallel_state.model_parallel_is_initialized():
        place = tempfile.mkdtemp()
        distributed.init_distributed_environment(1, 0, f"file://{place}/rendezvous", 0, "gloo")
        distributed.initialize_model_parallel(1, 1)


def moe_layer(config: Any, **keywords: Any) -> Any:
    """A MoE layer as a model makes it; the part of it that has the experts."""
    return moe_layer_and_router(config, **keywords)[0]


def moe_layer_and_router(config: Any, **keywords: Any) -> tuple[Any, Any]:
    """The same, with the part that chooses experts."""
    import torch
    from vllm.model_executor.layers import fused_moe

    factory = getattr(fused_moe, "FusedMoEFactory", None) or fused_moe.FusedMoE
    made = factory(
        num_experts=EXPERTS,
        top_k=TOP_K,
        hidden_size=HIDDEN,
        params_dtype=torch.float32,
        quant_config=config,
        prefix=NAME,
        **{"intermediate_size": INTERMEDIATE, **keywords},
    )
    return getattr(made, "routed_experts", made), made.router


def ours(layer: Any, config: str = "") -> None:
    """A layer's method is ours, and knows its layer."""
    method = layer.quant_method
    assert type(method).__module__.startswith("vllm_moe_oracle.methods."), type(method)
    assert method.decision.problem.layer.startswith(NAME), method.decision.problem.layer
    assert method.decision.backend == "emulation", method.decision.backend


MODELOPT = {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": []}
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "modelopt": MODELOPT,
    "modelopt_mxfp8": {**MODELOPT, "quant_method": "modelopt_mxfp8"},
    "mxfp8": {"quant_method": "mxfp8", "ignored_layers": []},
    "legacy": {
        "producer": {"name": "modelopt", "version": "0.29.0"},
        "quantization": {"quant_algo": "MXFP8", "kv_cache_quant_algo": None, "exclude_modules": []},
    },
}
MIXED = {
    "quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {NAME: {"quant_algo": "MXFP8"}, f"{NAME}.0.up_proj": {"quant_algo": "MXFP8"}},
}


# --- Checks -------------------------------------------------------------------------------------------------------


def our_configs() -> dict[str, str]:
    """Our config by each name that this release knows."""
    from vllm_moe_oracle import methods
    from vllm_moe_oracle.compat.quantization_registry import available_configs

    return available_configs(methods.configs(), methods.required_modules())


def our_methods() -> dict[str, str]:
    """Our class or function by the stock one, of this release."""
    from vllm_moe_oracle import methods
    from vllm_moe_oracle.compat.quantization_registry import matches_release

    return {
        stock: ours
        for stock, ours in methods.replacements().items()
        if matches_release(ours, methods.required_modules())
    }


def check_nothing_is_imported_for_it() -> None:
    """Registering imports none of vLLM's quantization methods; the patches fall into place when they are imported."""
    load_plugins()
    from vllm_moe_oracle import plugin

    state = plugin.state()
    assert state.active, state
    assert state.waiting and not state.failed, state
    assert "vllm.model_executor.layers.quantization.modelopt" not in sys.modules
    assert "vllm.model_executor.layers.fused_moe" not in sys.modules
    from vllm.model_executor.layers.quantization import get_quantization_config

    for name, path in our_configs().items():
        found = get_quantization_config(name)
        assert f"{found.__module__}:{found.__qualname__}" == path, found
    for path in our_methods():
        importlib.import_module(path.partition(":")[0])
    state = plugin.state()
    assert not state.failed, state.failed
    assert set(state.methods) == set(our_configs())
    for path in our_methods():
        assert f"every {path.partition(':')[2]}" in state.patches, state
    plugin.unregister()
    assert not [each for each in sys.meta_path if type(each).__module__.startswith("vllm_moe_oracle")]
    for path in our_methods():
        module, _, names = path.partition(":")
        stock = functools.reduce(getattr, names.split("."), sys.modules[module])
        assert not type(stock).__module__.startswith("vllm_moe_oracle")
        assert stock.__module__ == module, stock


def check_switched_off() -> None:
    """``VLLM_PLUGINS=`` keeps vLLM as it is."""
    before = photograph()
    os.environ["VLLM_PLUGINS"] = ""
    import vllm.envs

    try:
        load_plugins()
    finally:
        del os.environ["VLLM_PLUGINS"]
    from vllm_moe_oracle import plugin

    assert not plugin.state().active
    same(before)
    assert vllm.envs.VLLM_PLUGINS is None


def check_stood_down() -> None:
    """So do the setting and a release that is not supported."""
    from vllm_moe_oracle import plugin

    before = photograph()
    os.environ["MOE_ORACLE_ENABLED"] = "0"
    load_plugins()
    del os.environ["MOE_ORACLE_ENABLED"]
    assert not plugin.state().active and "switched off" in plugin.state().reason, plugin.state()
    same(before)
    version = plugin._vllm_version
    plugin._vllm_version = lambda: "99.0.0"
    load_plugins()
    plugin._vllm_version = version
    assert not plugin.state().active and "newer than the newest" in plugin.state().reason, plugin.state()
    same(before)


def check_undo() -> None:
    """Registering again and undoing gives the very objects back."""
    from vllm.model_executor.layers.quantization import get_quantization_config

    from vllm_moe_oracle import plugin

    stock = {name: get_quantization_config(name) for name in our_configs()}
    before = photograph()
    for _ in range(2):
        load_plugins()
        state = plugin.state()
        assert state.active and not state.failed and not state.waiting, state
        for name, path in our_configs().items():
            found = get_quantization_config(name)
            assert f"{found.__module__}:{found.__qualname__}" == path, found
        load_plugins()
        assert plugin.state() == state
        plugin.unregister()
        assert {name: get_quantization_config(name) for name in stock} == stock
        same(before)


def check_checkpoints() -> None:
    """A layer of each kind of checkpoint gets our method, with vLLM's own way from config to layer."""
    for tag, checkpoint in CHECKPOINTS.items():
        with engine(backend="emulation"):
            try:
                ours(moe_layer(quant_config(checkpoint)))
            except Exception as error:
                raise AssertionError(f"checkpoint {tag}") from error


def check_mixed() -> None:
    """ModelOpt's mixed precision, which constructs the stock class itself; MXFP8 is known there since 0.25."""
    from vllm_moe_oracle.compat import current_adapter

    config = quant_config(MIXED)
    if not hasattr(config, "mxfp8_config"):
        assert current_adapter().version() < "0.25"
        return
    with engine(backend="emulation"):
        ours(moe_layer(config))


def check_online() -> None:
    """``--quantization mxfp8`` on a checkpoint in 16 bits."""
    from vllm_moe_oracle import methods

    if not any(":Mxfp8OnlineMoEMethod" in path for path in methods.replacements().values()):
        return
    with engine(backend="emulation"):
        ours(moe_layer(quant_config(None, "mxfp8")))


def check_compressed_tensors() -> None:
    """llm-compressor's MXFP8, whose config class constructs the stock method itself."""
    from vllm_moe_oracle import methods

    if not any(":CompressedTensorsW8A8Mxfp8MoEMethod" in path for path in methods.replacements().values()):
        return
    arguments = {
        "num_bits": 8,
        "type": "float",
        "strategy": "group",
        "group_size": 32,
        "symmetric": True,
        "scale_dtype": "torch.uint8",
        "zp_dtype": "torch.uint8",
    }
    group = {
        "targets": ["Linear"],
        "weights": {**arguments, "dynamic": False},
        "input_activations": {**arguments, "dynamic": True},
        "format": "mxfp8-quantized",
    }
    checkpoint = {
        "quant_method": "compressed-tensors",
        "format": "mxfp8-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [],
    }
    with engine(backend="emulation"):
        ours(moe_layer(quant_config(checkpoint)))


def check_layer_runs() -> None:
    """Loaded through vLLM's loaders, biases too, converted and run through vLLM's kernel: the right numbers."""
    import torch

    from vllm_moe_oracle.compat import current_adapter

    generator = torch.Generator().manual_seed(0)
    with engine(backend="emulation", activations="16bit"):
        layer = moe_layer(quant_config(CHECKPOINTS["mxfp8"]), has_bias=True)
        method = layer.quant_method
        assert method.decision.problem.has_bias
        weights = _load(layer, generator)
        method.process_weights_after_loading(layer)
        x = torch.randn(TOKENS, HIDDEN, generator=generator)
        ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(TOKENS)]).int()
        shares = torch.rand(TOKENS, TOP_K, generator=generator)
        given = {"shared_experts": None, "shared_experts_input": None}
        found = method.apply(layer=layer, x=x.clone(), topk_weights=shares, topk_ids=ids, **given)
        _close(found, weights, x, ids, shares)
        assert current_adapter().moe_layer_names()


def check_layer_routes() -> None:
    """From router logits on, as vLLM's runner does it: through its router, or in the method where that routes."""
    import torch

    generator = torch.Generator().manual_seed(1)
    with engine(backend="emulation", activations="16bit"):
        layer, router = moe_layer_and_router(quant_config(CHECKPOINTS["mxfp8"]), has_bias=True)
        method = layer.quant_method
        weights = _load(layer, generator)
        method.process_weights_after_loading(layer)
        x = torch.randn(TOKENS, HIDDEN, generator=generator)
        logits = torch.randn(TOKENS, EXPERTS, generator=generator)
        if method.is_monolithic:
            found = method.apply_monolithic(layer=layer, x=x.clone(), router_logits=logits, input_ids=None)
        else:
            shares, ids = router.select_experts(hidden_states=x, router_logits=logits)
            given = {"shared_experts": None, "shared_experts_input": None}
            found = method.apply(layer=layer, x=x.clone(), topk_weights=shares, topk_ids=ids, **given)
        shares, ids = logits.softmax(-1).topk(TOP_K)
        _close(found, weights, x, ids, shares / shares.sum(-1, keepdim=True))


def check_mxfp4() -> None:
    """Both methods, loaded as models do it: gpt-oss's experts at once and with alternating rows, others one by one."""
    import torch

    halves = [*range(0, 2 * INTERMEDIATE, 2), *range(1, 2 * INTERMEDIATE, 2)]
    for name, order in (("gpt_oss_mxfp4", halves), ("mxfp4", list(range(2 * INTERMEDIATE)))):
        generator = torch.Generator().manual_seed(2)
        with engine(backend="emulation"):
            at_once = name == "gpt_oss_mxfp4"
            layer = moe_layer(_mxfp4_config(name), has_bias=True, activation="swigluoai" if at_once else "silu")
            ours(layer)
            method = layer.quant_method
            weights = _load_mxfp4(layer, at_once, order, generator)
            method.process_weights_after_loading(layer)
            x = torch.randn(TOKENS, HIDDEN, generator=generator)
            ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(TOKENS)]).int()
            shares = torch.rand(TOKENS, TOP_K, generator=generator)
            given = {"shared_experts": None, "shared_experts_input": None}
            found = method.apply(layer=layer, x=x.clone(), topk_weights=shares, topk_ids=ids, **given)
            _close(found, weights, x, ids, shares, oai=at_once)


def _mxfp4_config(name: str) -> Any:
    from vllm.model_executor.layers.quantization import get_quantization_config

    return get_quantization_config(name).from_config({"quant_method": "mxfp4"})


def _load_mxfp4(layer: Any, at_once: bool, order: list[int], generator: Any) -> dict[str, Any]:
    """Random tensors through the layer's own loaders; dequantized, with gate and up apart."""
    import torch

    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = torch.cat([values, -values])
    parameters, dense = dict(layer.named_parameters()), {}
    for stock, rows, columns in (("w13", 2 * INTERMEDIATE, HIDDEN), ("w2", HIDDEN, INTERMEDIATE)):
        codes = torch.randint(0, 256, (EXPERTS, rows, columns // 2), generator=generator).to(torch.uint8)
        scales = torch.randint(120, 125, (EXPERTS, rows, columns // 32), generator=generator).to(torch.uint8)
        bias = torch.randn(EXPERTS, rows, generator=generator).bfloat16()
        for kind, tensor in (("weight", codes), ("weight_scale", scales), ("bias", bias)):
            parameter = parameters[f"{stock}_{kind}"]
            if at_once:
                parameter.weight_loader(
                    parameter, tensor, weight_name=f"{NAME}.{stock}_{kind}", shard_id=None, expert_id=None
                )
                continue
            for expert in range(EXPERTS):
                one = tensor[expert]
                parts = {"w2": one} if stock == "w2" else {"w1": one[:INTERMEDIATE], "w3": one[INTERMEDIATE:]}
                for shard, part in parts.items():
                    parameter.weight_loader(
                        parameter, part, f"{NAME}.{stock}_{kind}", shard_id=shard, expert_id=expert, return_success=True
                    )
        pairs = torch.stack((values[(codes & 15).int()], values[(codes >> 4).int()]), -1).flatten(-2)
        matrix = pairs * (scales.float() - 127).exp2().repeat_interleave(32, dim=-1)
        if stock == "w2":
            dense |= {"down": matrix, "down_bias": bias.float()}
            continue
        matrix, biases = matrix[:, order], bias.float()[:, order]
        dense |= {"gate": matrix[:, :INTERMEDIATE], "up": matrix[:, INTERMEDIATE:]}
        dense |= {"gate_bias": biases[:, :INTERMEDIATE], "up_bias": biases[:, INTERMEDIATE:]}
    return dense


def _close(found: Any, weights: dict[str, Any], x: Any, ids: Any, shares: Any, oai: bool = False) -> None:
    """Experts' output against their formula: SiLU's, or gpt-oss's."""
    import torch

    expected = torch.zeros(TOKENS, HIDDEN)
    for token in range(TOKENS):
        for expert, share in zip(ids[token].tolist(), shares[token], strict=True):
            one = {name: values[expert] for name, values in weights.items()}
            gate = one["gate"] @ x[token] + one["gate_bias"]
            up = one["up"] @ x[token] + one["up_bias"]
            alpha = 1.0
            if oai:
                alpha, gate, up = 1.702, gate.clamp(max=7.0), up.clamp(-7.0, 7.0) + 1
            expected[token] += share * (one["down"] @ (gate * (alpha * gate).sigmoid() * up) + one["down_bias"])
    error = ((found - expected).norm() / expected.norm()).item()
    assert error < 1e-5, error


def _load(layer: Any, generator: Any) -> dict[str, Any]:
    """Random tensors, given to the layer's own loaders one by one as a model does; dequantized."""
    import torch

    parameters = dict(layer.named_parameters())
    dense: dict[str, list[Any]] = {}
    for expert in range(EXPERTS):
        for shard, projection, stock in (("w1", "gate", "w13"), ("w3", "up", "w13"), ("w2", "down", "w2")):
            rows, columns = (HIDDEN, INTERMEDIATE) if shard == "w2" else (INTERMEDIATE, HIDDEN)
            codes = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
            scales = torch.randint(120, 130, (rows, columns // 32), generator=generator, dtype=torch.uint8)
            bias = torch.randn(rows, generator=generator)
            for kind, tensor in (("weight", codes), ("weight_scale", scales), ("bias", bias)):
                parameter = parameters[f"{stock}_{kind}"]
                name = f"{NAME}.{stock}_{kind}"
                done = parameter.weight_loader(
                    parameter, tensor, name, shard_id=shard, expert_id=expert, return_success=True
                )
                assert done is True, (name, shard, done)
            exponents = (scales.float() - 127).exp2().repeat_interleave(32, dim=1)
            dense.setdefault(projection, []).append(codes.float() * exponents)
            dense.setdefault(f"{projection}_bias", []).append(bias)
    return {name: torch.stack(values) for name, values in dense.items()}


INTEGERS: tuple[tuple[str, str | None, dict[str, Any]], ...] = (
    ("gptq", None, {}),
    ("gptq", None, {"bits": 8, "act_order": "group", "zero_points": True, "bias": True}),
    ("gptq_v2", "moe_wna16", {"zero_points": True, "group": 64}),
    ("gptq", "moe_wna16", {"act_order": "group", "zero_points": True}),
    ("awq", None, {"zero_points": True, "bias": True}),
    ("awq", "moe_wna16", {"zero_points": True}),
    ("compressed-tensors", None, {"zero_points": True, "bias": True}),
    ("compressed-tensors", None, {"act_order": "group", "bits": 8}),
    ("compressed-tensors-int", None, {"group": -1, "bits": 8}),
)
"""Packing, ``--quantization``, and what the layer is like."""


def check_integers() -> None:
    """Integer experts of every tool, from config to layer, loaded and run: the numbers of the very codes."""
    for packing, quantization, kind in INTEGERS:
        try:
            _integers(packing, quantization, kind)
        except Exception as error:
            raise AssertionError(f"{packing} {quantization} {kind}") from error


def _integers(packing: str, quantization: str | None, kind: dict[str, Any]) -> None:
    import numpy as np
    import torch

    from tests.lib import reference
    from tests.lib.wna16_layers import checkpoint_of, contents_of, layer_of

    sizes = {"experts": EXPERTS, "top_k": TOP_K, "hidden_size": HIDDEN, "intermediate_size": 2 * INTERMEDIATE}
    contents = contents_of(layer_of(packing, **kind, **sizes))
    with engine(backend="emulation"):
        config = _integer_config(checkpoint_of(contents.problem), quantization)
        layer = moe_layer(config, has_bias=contents.problem.has_bias, intermediate_size=2 * INTERMEDIATE)
        ours(layer)
        parameters = dict(layer.named_parameters())
        for (expert, shard, name), tensor in contents.files().items():
            full = f"{'w2' if shard == 'w2' else 'w13'}_{name}"
            done = parameters[full].weight_loader(
                parameters[full], tensor, f"{NAME}.{full}", shard_id=shard, expert_id=expert, return_success=True
            )
            assert done is True, (full, done)
        layer.quant_method.process_weights_after_loading(layer)
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(TOKENS, HIDDEN, generator=generator)
        ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(TOKENS)]).int()
        shares = torch.rand(TOKENS, TOP_K, generator=generator)
        given = {"shared_experts": None, "shared_experts_input": None}
        found = layer.quant_method.apply(layer=layer, x=x.clone(), topk_weights=shares, topk_ids=ids, **given)
    biases = [contents.biases[name].double().numpy() if contents.biases else None for name in ("w13", "w2")]
    expected = reference.moe(
        x.numpy(), contents.weights("w13"), contents.weights("w2"), ids.numpy(), shares.numpy(),
        activation="silu", b13=biases[0], b2=biases[1],
    )  # fmt: skip
    error = np.linalg.norm(found.numpy() - expected) / np.linalg.norm(expected)
    assert error < 1e-5, error


def _integer_config(checkpoint: dict[str, Any], quantization: str | None) -> Any:
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, get_quantization_config

    if checkpoint["quant_method"] == "awq" and quantization is None and "cpu_awq" in QUANTIZATION_METHODS:
        # That release has a config class of its own for AWQ on CPUs, which takes the place of the one for GPUs here.
        config = get_quantization_config("awq_marlin").from_config(checkpoint)
        config.packed_modules_mapping = {}
        return config
    return quant_config(checkpoint, quantization)


def check_other_makers_of_integer_methods() -> None:
    """Code that constructs the stock classes itself, as Intel's AutoRound does and the fallback from one to another."""
    import importlib.util

    from vllm.model_executor.layers.quantization import auto_gptq, moe_wna16

    with engine(backend="emulation"):
        moe = moe_layer(quant_config(MODELOPT)).moe_config
        fields = {"lm_head_quantized": False, "full_config": {}}
        config = auto_gptq.AutoGPTQConfig(
            weight_bits=4, group_size=32, desc_act=False, is_sym=True, dynamic={}, **fields
        )
        methods = [auto_gptq.AutoGPTQMoEMethod(config, moe)]
        plain = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}
        methods.append(moe_wna16.MoeWNA16Method(moe_wna16.MoeWNA16Config.from_config(plain), moe))
        package = "vllm.model_executor.layers.quantization"
        if importlib.util.find_spec(f"{package}.auto_awq"):
            awq = importlib.import_module(f"{package}.auto_awq")
            config = awq.AutoAWQConfig(
                weight_bits=4, group_size=32, zero_point=True, modules_to_not_convert=[], **fields
            )
            methods.append(awq.AutoAWQMoEMethod(config, moe))
        else:
            awq = importlib.import_module(f"{package}.awq_marlin")
            config = awq.AWQMarlinConfig(
                weight_bits=4, group_size=32, zero_point=True, modules_to_not_convert=[], **fields
            )
            methods.append(awq.AWQMarlinMoEMethod(config, moe))
    for method in methods:
        assert type(method).__module__.startswith("vllm_moe_oracle.methods."), type(method)
        assert method.decision.problem.scheme.bits == 4


def check_activation_parameters() -> None:
    """A model's alpha, beta and limit reach the problem as far as the release lets a model set them."""
    import inspect

    from vllm.model_executor.layers import fused_moe

    factory = getattr(fused_moe, "FusedMoEFactory", None) or fused_moe.FusedMoE
    known = inspect.signature(factory).parameters
    keywords = {"swiglu_limit": 3.0}
    if "swiglu_alpha" in known:
        keywords |= {"swiglu_alpha": 1.5, "swiglu_beta": 0.5}
    with engine(backend="emulation"):
        layer = moe_layer(_mxfp4_config("gpt_oss_mxfp4"), has_bias=True, activation="swigluoai", **keywords)
        activation = layer.quant_method.decision.problem.activation
    expected = (1.5, 0.5, 3.0) if "swiglu_alpha" in known else (1.702, 1.0, 3.0)
    assert (activation.alpha, activation.beta, activation.limit) == expected, activation


def check_hash_routing() -> None:
    """A layer whose experts come from a table over token ids is known as such."""
    import torch

    table = torch.zeros(10, TOP_K, dtype=torch.int32)
    for given, expected in ((table, True), (None, False)):
        keywords = {"scoring_func": "sqrtsoftplus"} if expected else {}
        with engine(backend="emulation"):
            layer = moe_layer(quant_config(MODELOPT), hash_indices_table=given, **keywords)
        assert layer.quant_method.decision.problem.routing.hashed is expected


SHIMS = {
    "bias_loader": "layer_runs",
    "modular_kernel": "layer_runs",
    "is_monolithic": "layer_routes",
    "activation_parameters": "activation_parameters",
    "hashed": "hash_routing",
}
"""Methods of the adapters that are different in older releases, and the check that shows what each is for."""


def _without_shims() -> dict[str, str]:
    """What becomes of a check when one method of its adapter is the newest release's: ``ok``, or the error."""
    from vllm_moe_oracle.compat import current_adapter
    from vllm_moe_oracle.compat.adapter import Adapter
    from vllm_moe_oracle.methods import base

    found = {}
    for method, check in SHIMS.items():
        without = type("Without", (type(current_adapter()),), {method: getattr(Adapter, method)})()
        base.current_adapter = lambda without=without: without
        try:
            globals()[f"check_{check}"]()
            found[method] = "ok"
        except Exception as error:
            found[method] = f"{type(error).__name__}: {error}"
        finally:
            base.current_adapter = current_adapter
        gc.collect()
    return found


# --- Running ------------------------------------------------------------------------------------------------------


def _run(check: Callable[[], None]) -> str:
    try:
        check()
    except Exception:
        return traceback.format_exc(limit=-12)
    return "ok"


def _in_a_child(check: Callable[[], None]) -> str:
    """The outcome of a check in a copy of this process, which stays as it is."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        with os.fdopen(write, "w") as pipe:
            pipe.write(_run(check))
            pipe.flush()
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        outcome = pipe.read()
    os.waitpid(child, 0)
    return outcome or "the process died"


def main() -> None:
    """See the module."""
    import torch
    import transformers

    assert torch.__version__ and transformers.__version__  # imported here, the child need not
    start()
    checks = {"nothing_is_imported_for_it": _in_a_child(check_nothing_is_imported_for_it)}
    import vllm

    from vllm_moe_oracle import methods, plugin
    from vllm_moe_oracle.compat.registration import patches_for

    version = str(vllm.__version__)
    for each in patches_for(version, methods.configs(), methods.replacements(), methods.required_modules()):
        importlib.import_module(getattr(each, "module", "vllm"))
    importlib.import_module("vllm.model_executor.layers.quantization").get_quantization_config("mxfp8")
    for path in (*our_configs().values(), *our_methods().values()):
        importlib.import_module(path.partition(":")[0])
    for name in ("switched_off", "stood_down", "undo"):
        checks[name] = _run(globals()[f"check_{name}"])
    load_plugins()
    for name in (
        "checkpoints",
        "mixed",
        "online",
        "compressed_tensors",
        "layer_runs",
        "layer_routes",
        "mxfp4",
        "integers",
        "other_makers_of_integer_methods",
        "activation_parameters",
        "hash_routing",
    ):
        checks[name] = _run(globals()[f"check_{name}"])
        gc.collect()
    for name, check in mxfp4_probe.checks(sys.modules["__main__"]).items():
        checks[name] = _run(check)
        gc.collect()
    result = {
        "version": version,
        "file": vllm.__file__,
        "checks": checks,
        "patches": plugin.state().patches,
        "without_shims": _without_shims(),
    }
    Path(sys.argv[1]).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
