"""The activations of experts: one table of what the rest of the package needs to know about each.

A new activation is an entry of `ACTIVATIONS` and its formula in torch (`kernels/activations.py`), which the emulation
and the kernels' reference compute. If this project's kernels implement it, the entry names it in `kernel` or, for
experts without a gate, in `ungated_kernel`, and its formula for them is in `kernels/epilogue.py`. A backend declares
the names that it supports in its `Capabilities`: the emulation supports the whole table, the Hopper backends every
formula that has such a name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from .problem import Activation

_LARGEST_FLOAT32, _SMALLEST_FLOAT32 = (2.0 - 2.0**-23) * 2.0**127, 2.0**-149
"""The largest number of float32 and its smallest above 0."""

_SWIGLU_FIELDS = MappingProxyType({"alpha": "swiglu_alpha", "beta": "swiglu_beta", "limit": "swiglu_limit"})


@dataclass(frozen=True, slots=True)
class ActivationSpec:
    """One activation.

    Attributes:
        name: vLLM's name without its suffixes ``_no_mul`` and ``_uninterleave``.
        formula: the function of ``gate`` and ``up``; of ``x`` when there is no gate.
        parameters: which of alpha, beta and limit the formula names. A limit that it does not name clamps gate and up
            before it, unless `bounds_outputs`.
        required: the parameters without which the formula has no value.
        gated: some models use it with a gate.
        ungated: some models use it without a gate.
        alpha: what the formula uses where the layer states no alpha.
        beta: what the formula uses where the layer states no beta.
        limit: the limit that vLLM's kernels have built in; None when they have none.
        aliases: other names in model configs (``hidden_act``).
        model_types: models (``model_type``) whose code computes it whatever their ``hidden_act`` says.
        config_fields: the field of a model's config, and of vLLM's layer config, that sets each parameter.
        quant_config_params: vLLM's quantization config carries alpha, beta and limit to the kernels. Otherwise kernels
            have them built in, or read them from the layer's config.
        bounds_outputs: alpha bounds the gate and beta bounds ``up``, as a limit does.
        halves_name: vLLM's name for rows in two halves, gate then up, where `name` means rows that alternate; "" where
            `name` means halves.
        kernel: the name of the formula with a gate in our kernels; "" when they do not implement it.
        ungated_kernel: the same of the formula without a gate.
    """

    name: str
    formula: str
    parameters: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    gated: bool = True
    ungated: bool = False
    alpha: float = 1.0
    beta: float = 0.0
    limit: float | None = None
    aliases: tuple[str, ...] = ()
    model_types: frozenset[str] = frozenset()
    config_fields: Mapping[str, str] = field(default_factory=lambda: _SWIGLU_FIELDS)
    quant_config_params: bool = True
    bounds_outputs: bool = False
    halves_name: str = ""
    kernel: str = ""
    ungated_kernel: str = ""

    def kernel_for(self, gated: bool) -> str:
        """The name of the formula in our kernels for experts with or without a gate; "" when they have none."""
        return self.kernel if gated else self.ungated_kernel


_SILU_MODELS = frozenset(
    {"afmoe", "aria_text", "axk1", "cohere2_moe", "dbrx", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1",
     "ernie4_5_moe", "exaone_moe", "flex_olmo", "glm4_moe", "glm4_moe_lite", "glm4v_moe_text", "glm_moe_dsa",
     "granitemoe", "hunyuan_v1_moe", "hy_v3", "jamba", "kimi_k2", "laguna", "lfm2_moe", "llama4_text", "longcat_flash",
     "mellum", "mimo_v2_flash", "minimax", "minimax_m2", "mixtral", "olmoe", "pangu_ultra_moe", "param2moe", "phimoe",
     "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next", "qwen3_vl_moe_text", "sarvam_mla", "step3_text"}
)  # fmt: skip
"""Models for whose experts vLLM's code names no activation: its layer takes silu. Where their config has another, some
refuse it where they make dense layers."""

_TABLE = (
    ActivationSpec(
        "silu",
        "gate * sigmoid(alpha * gate) * (up + beta)",
        parameters=("alpha", "beta"),
        ungated=True,
        aliases=("swish",),
        model_types=_SILU_MODELS,
        kernel="swiglu",
    ),
    ActivationSpec("gelu", "gelu(gate) * up", ungated=True, model_types=frozenset({"grok-1"}), kernel="gelu"),
    ActivationSpec(
        "gelu_tanh",
        "gelu(gate, approximate='tanh') * up",
        ungated=True,
        aliases=("gelu_pytorch_tanh", "gelu_new"),
        model_types=frozenset({"gemma4_text"}),
        kernel="gelu_tanh",
    ),
    ActivationSpec(  # gpt-oss's modeling code
        "swigluoai",
        "gate * sigmoid(alpha * gate) * (up + beta)",
        parameters=("alpha", "beta"),
        alpha=1.702,
        beta=1.0,
        limit=7.0,
        model_types=frozenset({"gpt_oss", "minimax_m3", "minimax_m3_text"}),
        halves_name="swigluoai_uninterleave",
        kernel="swiglu",
    ),
    ActivationSpec(  # Kimi-K3's modeling code; without a beta, up enters as it is
        "situ",
        "alpha * tanh(gate / alpha) * sigmoid(gate) * beta * tanh(up / beta)",
        parameters=("alpha", "beta"),
        required=("alpha",),
        config_fields=MappingProxyType({"alpha": "activation_situ_beta", "beta": "activation_situ_linear_beta"}),
        quant_config_params=False,
        bounds_outputs=True,
    ),
    ActivationSpec(  # Step-3.5's modeling code: the limit clamps silu(gate), not gate
        "swiglustep",
        "min(silu(gate), limit) * clamp(up, -limit, limit)",
        parameters=("limit",),
        required=("limit",),
        limit=7.0,
        model_types=frozenset({"step3p5", "step5"}),
        quant_config_params=False,
    ),
    ActivationSpec(
        "relu2", "relu(x) ** 2", gated=False, ungated=True, aliases=("relu_squared",), ungated_kernel="relu2"
    ),
)

ACTIVATIONS: Mapping[str, ActivationSpec] = MappingProxyType({spec.name: spec for spec in _TABLE})
"""Every known activation by name. A checkpoint may have others: no backend accepts them."""

GATED = tuple(spec.name for spec in _TABLE if spec.gated)
"""Names of activations that experts with a gate use."""

UNGATED = tuple(spec.name for spec in _TABLE if spec.ungated)
"""Names of activations that experts without a gate use."""

_ALIASES = {alias: spec.name for spec in _TABLE for alias in spec.aliases}
_BY_MODEL_TYPE = {kind: spec.name for spec in _TABLE for kind in spec.model_types}
_HALVES = {spec.halves_name: spec.name for spec in _TABLE if spec.halves_name}


def spec_of(activation: Activation) -> ActivationSpec:
    """The table's entry for a layer's activation; for an unknown name, an entry without parameters of its own."""
    return ACTIVATIONS.get(activation.name) or ActivationSpec(activation.name, "unknown")


def with_defaults(activation: Activation) -> Activation:
    """The activation with the parameters that its formula has built in, where the layer states none.

    ``swigluoai`` gets alpha 1.702, beta 1 and limit 7, ``swiglustep`` limit 7. Alpha 1 and beta 0, which change
    nothing, stay None.
    """
    spec = spec_of(activation)
    return dataclasses.replace(
        activation,
        alpha=spec.alpha if activation.alpha is None and spec.alpha != 1.0 else activation.alpha,
        beta=spec.beta if activation.beta is None and spec.beta != 0.0 else activation.beta,
        limit=spec.limit if activation.limit is None else activation.limit,
    )


def without_empty_bounds(activation: Activation) -> Activation:
    """The activation without bounds of zero or less, which models write for none.

    A bound that the formula cannot do without stays as it is: it makes the activation one that no backend takes.
    """
    spec = spec_of(activation)
    optional = [name for name in spec.parameters if spec.bounds_outputs and name not in spec.required]
    without: dict[str, Any] = {name: None for name in optional if not (getattr(activation, name) or 0.0) > 0}
    return dataclasses.replace(activation, **without)


def alpha_beta(activation: Activation) -> tuple[float, float]:
    """Alpha and beta that the formula uses: the layer's, else those of the table."""
    spec = spec_of(activation)
    return (
        spec.alpha if activation.alpha is None else activation.alpha,
        spec.beta if activation.beta is None else activation.beta,
    )


def changed_parameters(activation: Activation, formula: str = "") -> tuple[str, ...]:
    """Which of alpha, beta and limit the layer has otherwise than a formula has them built in.

    Where the layer states no alpha or beta, it has the formula's; where it states no limit, it has none.

    Args:
        activation: the layer's.
        formula: the name in the table of what a kernel computes; the layer's own activation by default.
    """
    spec = ACTIVATIONS[formula] if formula else spec_of(activation)
    changed = [name for name in ("alpha", "beta") if getattr(activation, name) not in (None, getattr(spec, name))]
    return (*changed, *["limit"] * (activation.limit != spec.limit))


def undefined_parameters(activation: Activation) -> tuple[str, ...]:
    """What the layer states of alpha, beta and limit, but its formula does not use, and no reference could check.

    Alpha 1 and beta 0, which change nothing, are not among them where the table has no others. A number that is not
    finite in float32, in which kernels take it, is among them, and so is a limit that is not above 0: it would leave
    nothing.
    """
    spec = spec_of(activation)
    used = spec.parameters if activation.gated else ()
    alone = {"alpha": 1.0, "beta": 0.0} if (spec.alpha, spec.beta) == (1.0, 0.0) and not spec.bounds_outputs else {}
    found = [
        name
        for name in ("alpha", "beta")
        if (value := getattr(activation, name)) is not None and name not in used and value != alone.get(name)
    ]
    # A limit clamps the gate and up of any formula but those that have bounds of their own.
    if activation.limit is not None and (not activation.gated or spec.bounds_outputs):
        found.append("limit")
    for name in ("alpha", "beta", "limit"):
        value = getattr(activation, name)
        if value is None or name in found:
            continue
        if not abs(value) <= _LARGEST_FLOAT32 or (name == "limit" and value < _SMALLEST_FLOAT32):
            found.append(name)
    return tuple(found)


def canonical_name(name: str) -> str:
    """The table's name of a name in a model's config or of vLLM's, e.g. ``gelu_pytorch_tanh``, ``relu2_no_mul``."""
    name = name.strip().lower().removesuffix("_no_mul")
    return _HALVES.get(name) or _ALIASES.get(name, name)


def name_for_model_type(model_type: str) -> str:
    """The activation that a model's code computes whatever its config says; "" when its config decides."""
    return _BY_MODEL_TYPE.get(model_type, "")


def config_fields(name: str, parameter: str) -> tuple[str, ...]:
    """Fields of a model's config that may set a parameter, ``alpha``, ``beta`` or ``limit``, of an activation.

    A list has a value for each layer.
    """
    field = spec_of(Activation(name)).config_fields.get(parameter)
    return (field, f"{field}s", f"expert_{field}_list") if field else ()


def layer_fields(name: str) -> Mapping[str, str]:
    """The field of vLLM's layer config that sets each of alpha, beta and limit of an activation.

    Where its entry names no field, the one of SwiGLU does, so that a limit which a model sets is not overlooked.

    Args:
        name: the table's.
    """
    return {**_SWIGLU_FIELDS, **spec_of(Activation(name)).config_fields}


def vllm_name(activation: Activation) -> str:
    """vLLM's name of a layer's activation: the value of its ``MoEActivation`` member."""
    if not activation.gated:
        return f"{activation.name}_no_mul"
    halves_name = spec_of(activation).halves_name
    return halves_name if halves_name and not activation.interleaved else activation.name


def from_vllm(
    name: str, gated: bool = True, alpha: float | None = None, beta: float | None = None, limit: float | None = None
) -> Activation:
    """The activation of one of vLLM's layers, with `without_empty_bounds` and `with_defaults` applied.

    Args:
        name: the value of its ``MoEActivation`` member.
        gated: the experts have a gate.
        alpha: as the model set it; None when it did not.
        beta: the same.
        limit: the same.
    """
    canonical = canonical_name(name)
    known = ACTIVATIONS.get(canonical)
    interleaved = known is not None and bool(known.halves_name) and name != known.halves_name
    return with_defaults(without_empty_bounds(Activation(canonical, gated, alpha, beta, limit, interleaved)))
