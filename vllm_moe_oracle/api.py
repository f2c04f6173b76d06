"""The public API: what a third party's backend, a script or a notebook needs.

Names are imported on first use, and importing this module imports neither torch nor vLLM. Everything here is documented
where it is defined; other modules may change in any release.

Describing a case:
    `Problem`, `Scheme`, `Activation`, `Routing`, `Parallel`: one MoE layer on one rank.
    `Device`, `known_device`, `detect_device`: the machine.
    `Settings`, `load_settings`: the user's settings. ``load_settings({})`` ignores the environment;
    ``load_settings(assignments={"backend": "emulation"})`` sets one by name.
Deciding:
    `decide`, `Decision`, `format_candidates`, `NoBackendError`: one layer.
    `explain_checkpoint`: all layers of a checkpoint.
    `OracleError`: the base of every error that these raise.
Writing a backend:
    `Backend`, `Builder`, `Tensors`, `Capabilities`, `Rule`, `ShardPlan`, `Numerics`: the contract.
    `Forward`, `WorkspaceForward`, `Adapters`: the function that a `Builder` takes, and what it gets with LoRA.
    `discover`, `ENTRY_POINT_GROUP`: registration.
Tensors (these need torch):
    `scheme_functions`, `layout_functions`, `reference_forward`: formats, kernel layouts and the reference computation.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backends import Adapters, Backend, Builder, Forward, Tensors, WorkspaceForward
    from .backends.emulation import forward as reference_forward
    from .checkpoint.moe_layers import MoeLayers
    from .checkpoint.served_layers import Server
    from .core.capabilities import Capabilities, Rule
    from .core.decision import Decision, Numerics, ShardPlan, format_candidates
    from .core.problem import Activation, Device, Parallel, Placement, Problem, Routing, Scheme, SchemeName
    from .devices.catalog import known_device
    from .devices.detect import detect as detect_device
    from .errors import NoBackendError, OracleError
    from .oracle.registry import ENTRY_POINT_GROUP, discover
    from .oracle.selection import decide
    from .settings import Settings
    from .settings import load as load_settings

__all__ = [
    "ENTRY_POINT_GROUP",
    "Activation",
    "Adapters",
    "Backend",
    "Builder",
    "Capabilities",
    "Decision",
    "Device",
    "Forward",
    "NoBackendError",
    "Numerics",
    "OracleError",
    "Parallel",
    "Problem",
    "Routing",
    "Rule",
    "Scheme",
    "Settings",
    "ShardPlan",
    "Tensors",
    "WorkspaceForward",
    "decide",
    "detect_device",
    "discover",
    "explain_checkpoint",
    "format_candidates",
    "known_device",
    "layout_functions",
    "load_settings",
    "reference_forward",
    "scheme_functions",
]

_SOURCES = {
    "backends": ("Adapters", "Backend", "Builder", "Forward", "Tensors", "WorkspaceForward"),
    "core.capabilities": ("Capabilities", "Rule"),
    "core.decision": ("Decision", "Numerics", "ShardPlan", "format_candidates"),
    "core.problem": ("Activation", "Device", "Parallel", "Problem", "Routing", "Scheme"),
    "devices.catalog": ("known_device",),
    "errors": ("NoBackendError", "OracleError"),
    "oracle.registry": ("ENTRY_POINT_GROUP", "discover"),
    "oracle.selection": ("decide",),
    "settings": ("Settings",),
}
"""The module that defines each name under the same name."""

_MODULES = {name: (module, name) for module, names in _SOURCES.items() for name in names} | {
    "detect_device": ("devices.detect", "detect"),
    "load_settings": ("settings", "load"),
    "reference_forward": ("backends.emulation", "forward"),
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _MODULES[name]
    found = getattr(importlib.import_module(f".{module}", __package__), attribute)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)


def explain_checkpoint(
    path: Path | str,
    device: Device | str,
    *,
    tp: int = 1,
    dp: int = 1,
    ep: bool = False,
    all2all_backend: str = "",
    quantization: str = "",
    moe_backend: str = "auto",
    draft_moe_backend: str = "",
    dtype: str = "auto",
    lora: bool = False,
    lora_target_modules: Sequence[str] = (),
    eplb: bool = False,
    batch_invariant: bool = False,
    expert_placement_strategy: Placement = "linear",
    settings: Settings | None = None,
    failures: list[NoBackendError] | None = None,
) -> list[Decision]:
    """The decision for every quantized MoE layer of a checkpoint, by the shipped and the cached measurements. Those of
    multi-token prediction modules come last.

    Args:
        path: a checkpoint's directory, or a bare ``config.json``.
        device: the machine, from `known_device` or `detect_device`, or the name of a known device.
        tp: tensor-parallel ranks.
        dp: data-parallel ranks; MoE layers are distributed over ``tp * dp`` ranks.
        ep: the ranks hold whole experts, each other ones (``--enable-expert-parallel``).
        all2all_backend: vLLM's ``--all2all-backend``; "" for its default.
        quantization: vLLM's ``--quantization``, for a checkpoint that is quantized at load time; "" for none.
        moe_backend: vLLM's ``--moe-backend``.
        draft_moe_backend: ``moe_backend`` of vLLM's ``--speculative-config``, for layers of multi-token prediction
            modules; "" for `moe_backend`.
        dtype: vLLM's ``--dtype``.
        lora: LoRA adapters may be applied (``--enable-lora``).
        lora_target_modules: the modules that have adapters (``--lora-target-modules``); none for all.
        eplb: experts may move between ranks (``--enable-eplb``).
        batch_invariant: as vLLM's ``VLLM_BATCH_INVARIANT``.
        expert_placement_strategy: as vLLM's option.
        settings: the settings; None reads them from the environment.
        failures: a list that gets the error of each layer that no backend can run, where a server may leave it to stock
            vLLM; the other layers are decided. With None the first such error is raised.

    Raises:
        CheckpointError: the checkpoint cannot be read; `errors.DeploymentError` where its layers cannot be sharded so.
        NoBackendError: no backend can run a layer, and `failures` is None.
        SettingError: a setting or a number of ranks is invalid, a name of a device, a backend, a dtype or an all-to-all
            is unknown, or an argument has another type.
    """
    from . import settings as settings_module
    from .checkpoint.files import read_checkpoint
    from .checkpoint.ranks import Ranks
    from .checkpoint.served_layers import Server
    from .core.problem import Device
    from .devices.catalog import known_device
    from .releases.all2all import DEFAULT_ALL2ALL

    server = Server(
        device if isinstance(device, Device) else known_device(device),
        settings if settings is not None else settings_module.load(),
        Ranks(tp, dp, ep, all2all_backend or DEFAULT_ALL2ALL),
        moe_backend=moe_backend,
        draft_moe_backend=draft_moe_backend,
        dtype=dtype,
        batch_invariant=batch_invariant,
        lora=lora,
        lora_target_modules=lora_target_modules,  # type: ignore[arg-type]  # checked there
        eplb=eplb,
        expert_placement_strategy=expert_placement_strategy,
    )
    return _decide(server, server.find_layers(read_checkpoint(path), quantization), failures)


def _decide(server: Server, layers: MoeLayers, failures: list[NoBackendError] | None) -> list[Decision]:
    """The decisions of layers; the errors of others go to `failures`, or are raised where it is None."""
    from .checkpoint.served_layers import decide_layers
    from .core.field_checks import check_value

    check_value("failures", failures, (list, type(None)))
    decisions = []
    for layer in decide_layers(server, layers):
        if layer.decision is not None:
            decisions.append(layer.decision)
        elif layer.error is not None:
            if failures is None:
                raise layer.error
            failures.append(layer.error)
    return decisions


def scheme_functions(name: SchemeName) -> ModuleType:
    """The module of a scheme: ``read``, ``quantize``, ``dequantize`` and the shapes of its canonical weights.

    Args:
        name: ``mxfp8``, ``mxfp4`` or ``wna16``.

    Raises:
        SettingError: another name. It is a ValueError.
    """
    return _public_module("schemes", name)


def layout_functions(name: str) -> ModuleType:
    """A module of pure functions from canonical weights to a kernel's storage.

    Args:
        name: e.g. ``wgmma_fragments``, ``mma_tiles``, ``scales``; the package `vllm_moe_oracle.layouts` has them.

    Raises:
        SettingError: there is no such module. It is a ValueError.
    """
    return _public_module("layouts", name)


def _public_module(package: str, name: str) -> ModuleType:
    """A module of one of this project's packages.

    Raises:
        SettingError: there is no public module of that name.
    """
    import pkgutil

    from .core.field_checks import check_value
    from .errors import SettingError, did_you_mean

    check_value("name", name, (str,))
    folder = Path(__file__).parent / package
    names = sorted(each.name for each in pkgutil.iter_modules([str(folder)]) if not each.name.startswith("_"))
    if name not in names:
        raise SettingError(
            f"{name!r} is not one of the {package}", f"{did_you_mean(name, names)}Valid are {', '.join(names)}"
        )
    return importlib.import_module(f".{package}.{name}", __package__)
