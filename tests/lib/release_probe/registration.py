"""Checks of registering and undoing: what vLLM is before, with and after the plugin, object by object."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from typing import Any

from tests.lib.release_probe.frame import load_plugins


def snapshot() -> dict[tuple[str, str], Any]:
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


_CHANGED_BY_VLLM = {("vllm.plugins", "plugins_loaded")}


def assert_unchanged(before: dict[tuple[str, str], Any]) -> None:
    """Asserts that every name is still the same object; only names of modules that were imported since are new."""
    now = snapshot()
    changed = [
        key
        for key, value in before.items()
        if key not in _CHANGED_BY_VLLM and "__abc" not in key[1] and "_abc_" not in key[1] and now.get(key) is not value
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


def our_configs() -> dict[str, str]:
    """Our config by each name that this release knows."""
    from vllm_moe_oracle import methods
    from vllm_moe_oracle.compat.quantization_registry import available_configs

    return available_configs(methods.configs(), methods.required_modules())


def our_methods() -> dict[str, str]:
    """Our class or function by the stock one, of this release."""
    from vllm_moe_oracle import methods
    from vllm_moe_oracle.compat.quantization_registry import matches_release

    required = methods.required_modules()
    return {stock: ours for stock, ours in methods.replacements().items() if matches_release(ours, required)}


def _assert_configs_are_ours() -> None:
    from vllm.model_executor.layers.quantization import get_quantization_config

    for name, path in our_configs().items():
        found = get_quantization_config(name)
        assert f"{found.__module__}:{found.__qualname__}" == path, found


def nothing_is_imported_for_it() -> None:
    """Registering imports none of vLLM's quantization methods; the patches are applied when they are imported."""
    load_plugins()
    from vllm_moe_oracle import plugin

    state = plugin.state()
    assert state.active, state
    assert state.deferred and not state.failed, state
    assert "vllm.model_executor.layers.quantization.modelopt" not in sys.modules
    assert "vllm.model_executor.layers.fused_moe" not in sys.modules
    _assert_configs_are_ours()
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


def switched_off() -> None:
    """``VLLM_PLUGINS=`` keeps vLLM as it is."""
    before = snapshot()
    os.environ["VLLM_PLUGINS"] = ""
    import vllm.envs

    try:
        load_plugins()
    finally:
        del os.environ["VLLM_PLUGINS"]
    from vllm_moe_oracle import plugin

    assert not plugin.state().active
    assert_unchanged(before)
    assert vllm.envs.VLLM_PLUGINS is None


def stood_down() -> None:
    """So do the plugin's own setting, and a release that is not supported."""
    from vllm_moe_oracle import plugin

    before = snapshot()
    os.environ["MOE_ORACLE_ENABLED"] = "0"
    load_plugins()
    del os.environ["MOE_ORACLE_ENABLED"]
    assert not plugin.state().active and "switched off" in plugin.state().reason, plugin.state()
    assert_unchanged(before)
    version = plugin._vllm_version
    plugin._vllm_version = lambda: "99.0.0"
    load_plugins()
    plugin._vllm_version = version
    assert not plugin.state().active and "newer than the newest" in plugin.state().reason, plugin.state()
    assert_unchanged(before)


def undo() -> None:
    """Registering again and undoing gives the same objects back."""
    from vllm.model_executor.layers.quantization import get_quantization_config

    from vllm_moe_oracle import plugin

    importlib.import_module("vllm.v1.worker.gpu_worker")  # the last module that a patch waits for
    stock = {name: get_quantization_config(name) for name in our_configs()}
    before = snapshot()
    for _ in range(2):
        load_plugins()
        state = plugin.state()
        assert state.active and not state.failed and not state.deferred, state
        _assert_configs_are_ours()
        load_plugins()
        assert plugin.state() == state
        plugin.unregister()
        assert {name: get_quantization_config(name) for name in stock} == stock
        assert_unchanged(before)
