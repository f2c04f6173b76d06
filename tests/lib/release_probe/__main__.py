"""Runs every check and writes the results; see the package."""

from __future__ import annotations

import gc
import importlib
import json
import sys
from pathlib import Path

import torch
import transformers

from tests.lib.release_probe import frame, registration

assert torch.__version__ and transformers.__version__  # imported here, the child need not

SHIMS = {
    "bias_loader": "layer_runs",
    "modular_kernel": "layer_runs",
    "is_monolithic": "layer_routes",
    "activation_fields": "activation_parameters",
    "hash_routing": "hash_routing",
}
"""Methods of the adapters that are different in older releases, and the check that needs each."""


def without_shims() -> dict[str, str]:
    """The outcome of each check of `SHIMS` with the newest release's method in its adapter: ``ok``, or the error."""
    from vllm_moe_oracle.compat import current_adapter
    from vllm_moe_oracle.compat.adapter import Adapter
    from vllm_moe_oracle.methods import base

    found = {}
    for method, check in SHIMS.items():
        without = type("Without", (type(current_adapter()),), {method: getattr(Adapter, method)})()
        base.current_adapter = lambda without=without: without
        try:
            frame.CHECKS[check]()
            found[method] = "ok"
        except Exception as error:
            found[method] = f"{type(error).__name__}: {error}"
        finally:
            base.current_adapter = current_adapter
        gc.collect()
    return found


def main(results: str) -> None:
    """Runs the checks on a new process's vLLM, then on all its modules without the plugin, then with it."""
    frame.start()
    unloaded = registration.nothing_is_imported_for_it
    checks = {unloaded.__name__: frame.run_in_child(unloaded)}
    import vllm

    from vllm_moe_oracle import methods, plugin
    from vllm_moe_oracle.compat.registration import patches_for

    version = str(vllm.__version__)
    for each in patches_for(version, methods.configs(), methods.replacements(), methods.required_modules()):
        importlib.import_module(getattr(each, "module", "vllm"))
    importlib.import_module("vllm.model_executor.layers.quantization").get_quantization_config("mxfp8")
    for path in (*registration.our_configs().values(), *registration.our_methods().values()):
        importlib.import_module(path.partition(":")[0])
    for check in (registration.switched_off, registration.stood_down, registration.undo):
        checks[check.__name__] = frame.run(check)
    frame.load_plugins()
    for module in ("mxfp8", "integers", "mxfp4"):
        importlib.import_module(f"tests.lib.release_probe.{module}")
    for name, function in frame.CHECKS.items():
        checks[name] = frame.run(function)
    result = {
        "version": version,
        "file": vllm.__file__,
        "checks": checks,
        "patches": plugin.state().patches,
        "without_shims": without_shims(),
    }
    Path(results).write_text(json.dumps(result, indent=1))


main(sys.argv[1])
