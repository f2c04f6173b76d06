"""What all ranks of a layer have in common, compared before they compute together.

Ranks read settings from their own environment, packages and model files from their own disk. Where these differ, ranks
would compute different things and sum them: outputs change, and nothing says so. So ranks exchange what their results
depend on, once per kind of layer before its backend is chosen, and once per load the list of all layers. A difference
is the same error on every rank, with the values and the ranks that have them.

What may differ is agreed on instead: measurements and self-checks (`backend_selection`, `backend_check`). Of settings
that order backends, rank 0's count, and a rank with others logs it.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from .. import __version__
from ..compat import current_adapter
from ..core.problem import Problem
from ..devices import detect
from ..errors import RankSyncError
from ..measurements.environment import kernel_sources_hash
from ..settings import Settings, get_env, shared_values, values_of_rank_0
from . import rank_sync
from .load_caches import per_load

logger = logging.getLogger("vllm.moe_oracle")

Properties = Mapping[str, Mapping[str, Any]]
"""Values by name, by the kind of property: a key of `_KINDS`."""

_KINDS = {
    "setting": (
        "not a setting there",
        "Give all ranks the same settings, in the environment of every host or by --additional-config",
    ),
    "variable": ("not set", "Set the variable to one value on all hosts, or on none"),
    "version": ("not installed", "Install the same versions on all hosts"),
    "layer": ("not there", "Give all ranks the same model files and the same arguments of vLLM"),
    "backend": ("not there", "Install the same version of the backend's package on all hosts"),
}
"""Words for a missing value, and the remedy, by the kind of property."""

NUMERIC_VARIABLES = (
    "VLLM_ALLREDUCE_USE_FLASHINFER",
    "VLLM_ALLREDUCE_USE_SYMM_MEM",
    "VLLM_B12X_MOE_FP4_FORCE_A16",
    "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER",
    "VLLM_CPU_INT4_W4A8",
    "VLLM_DEEPEPLL_NVFP4_DISPATCH",
    "VLLM_DEEPEP_V2_ALLOW_MULTIPLE_REDUCTION",
    "VLLM_DISABLED_KERNELS",
    "VLLM_DISABLE_DSV4_MEGAMOE_SHARED_EXPERT_FUSION",
    "VLLM_FLASHINFER_ALLREDUCE_BACKEND",
    "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE",
    "VLLM_FLOAT32_MATMUL_PRECISION",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG",
    "VLLM_HUMMING_MOE_GEMM_TYPE",
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG",
    "VLLM_HUMMING_USE_F16_ACCUM",
    "VLLM_MARLIN_INPUT_DTYPE",
    "VLLM_MARLIN_USE_ATOMIC_ADD",
    "VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE",
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY",
    "VLLM_MOE_SKIP_PADDING",
    "VLLM_MOE_USE_DEEP_GEMM",
    "VLLM_TRITON_FORCE_FIRST_CONFIG",
    "VLLM_TRITON_USE_TD",
    "VLLM_TUNED_CONFIG_FOLDER",
    "VLLM_USE_DEEP_GEMM",
    "VLLM_USE_DEEP_GEMM_E8M0",
    "VLLM_USE_DEEP_GEMM_TMA_ALIGNED_SCALES",
    "VLLM_USE_FLASHINFER_MOE_INT4",
    "VLLM_USE_FUSED_MOE_GROUPED_TOPK",
    "VLLM_USE_HW_AGNOSTIC",
    "VLLM_USE_NCCL_SYMM_MEM",
    "VLLM_USE_TRITON_AWQ",
)
"""vLLM's variables that change the numbers of its kernels for quantized experts, or of what ranks add up. What
`Problem` has is not here."""
LIBRARY_VARIABLES = ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")
"""PyTorch's and NVIDIA's variables that change the precision of products."""

_MAX_DIFFERENCES = 6
"""Differences that an error lists."""

_EXPLAIN_SECONDS = 10.0
"""Time in which ranks that met at different topics exchange their layers. A rank that cannot is not waited for."""


class _Load:
    """What this process has compared of the model that it is loading.

    Attributes:
        compared: kinds of layers whose properties are compared; None for the properties of the process alone.
        layers: properties of each layer that the plugin serves, by name.
        layers_compared: whether all ranks have the same layers.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Ends the load: what was compared does not hold for another model."""
        self.compared: set[Problem | None] = set()
        self.layers: dict[str, dict[str, Any]] = {}
        self.layers_compared = False


_load = per_load(_Load())


def make_group(timeout: float = rank_sync.DEFAULT_TIMEOUT) -> rank_sync.RankGroup:
    """The ranks that hold parts of this process's layers.

    Args:
        timeout: see `RankGroup`.
    """
    return rank_sync.RankGroup(current_adapter().peer_group(), timeout, explain_difference)


def process_properties(settings: Settings) -> dict[str, dict[str, Any]]:
    """What the numbers of every layer of this process depend on.

    Args:
        settings: the settings in force.
    """
    versions = detect.detect().packages | {
        "vllm-moe-oracle": __version__,
        "kernel sources of vllm-moe-oracle": kernel_sources_hash(),
    }
    return {
        "setting": shared_values(settings),
        "variable": {name: get_env(name) for name in (*NUMERIC_VARIABLES, *LIBRARY_VARIABLES)},
        "version": versions,
    }


def require_same_process(settings: Settings) -> None:
    """Compares what does not depend on a layer, once per load.

    Args:
        settings: the settings in force.

    Raises:
        RankSyncError: ranks differ, or another rank failed.
    """
    group = make_group(settings.rank_sync_timeout)
    _compare_once(group, None, "this model", settings, lambda: process_properties(settings))


def require_same_layer(group: rank_sync.RankGroup, problem: Problem, settings: Settings, moe_backend: Any) -> None:
    """Compares what a layer's numbers depend on, once per kind of layer of a load.

    Args:
        group: the ranks of the layer.
        problem: the layer on this rank.
        settings: the settings in force.
        moe_backend: the value of ``--moe-backend``.

    Raises:
        RankSyncError: ranks differ, or another rank failed.
    """
    fields = problem.common_fields()
    _load.layers[problem.layer] = fields
    requested = {"--moe-backend": None if moe_backend is None else str(moe_backend)}

    def properties() -> dict[str, dict[str, Any]]:
        return {**process_properties(settings), "layer": fields | requested}

    _compare_once(group, problem.key(), problem.layer, settings, properties)


def _compare_once(
    group: rank_sync.RankGroup,
    key: Problem | None,
    name: str,
    settings: Settings,
    properties: Callable[[], Properties],
) -> None:
    if group.size > 1 and key not in _load.compared:
        topic = f"settings, versions and shape of {name}"
        ordering = values_of_rank_0(settings)
        ranks = rank_sync.all_gather(group, topic, lambda: [msgspec.to_builtins(properties()), ordering])
        require_equal(topic, [compared for compared, _ in ranks])
        if not _load.compared:
            _log_overruled(group.rank, ordering, ranks[0][1])
        _load.compared.add(key)


def _log_overruled(rank: int, own: Mapping[str, Any], first: Mapping[str, Any]) -> None:
    """Logs the settings of this rank in whose place rank 0's count.

    Args:
        rank: this rank.
        own: settings by which backends are ordered, by variable.
        first: those of rank 0.
    """
    for name, value in own.items():
        if value != first[name]:
            words = "moe_oracle: %s is %s on rank %d and %s on rank 0, whose order of the backends all ranks take"
            logger.warning(words, name, json.dumps(value), rank, json.dumps(first[name]))


def require_same_layers(group: rank_sync.RankGroup) -> None:
    """Compares the layers of the whole model, once per load, when the first one is about to be converted.

    A layer of a kind that was compared before is not compared when it is made.

    Args:
        group: the ranks of the model.

    Raises:
        RankSyncError: the plugin serves different layers on different ranks, or another rank failed.
    """
    if group.size == 1 or _load.layers_compared or not _load.layers:
        return
    topic = "the MoE layers of the model"
    ranks = rank_sync.all_gather(group, topic, lambda: _load.layers)
    for name in dict.fromkeys(name for each in ranks for name in each):
        require_equal(name, [{"layer": each.get(name, {})} for each in ranks])
    _load.layers_compared = True


def explain_difference(group: rank_sync.RankGroup) -> str:
    """What differs between ranks that met at different topics; "" where their layers do not tell.

    Args:
        group: the ranks. All of them must call it.
    """
    group = dataclasses.replace(group, timeout=min(group.timeout, _EXPLAIN_SECONDS), explain=None)
    try:
        ranks = rank_sync.all_gather(group, "which layers the ranks have", lambda: _load.layers)
    except RankSyncError:  # the caller's error says more
        return ""
    for name in ranks[0]:
        if all(name in each for each in ranks):
            found = describe_differences([{"layer": each[name]} for each in ranks])
            if found:
                return f"{name}: {'; '.join(text for _, text in found[:_MAX_DIFFERENCES])}"
    return ""


def require_equal(topic: str, ranks: Sequence[Properties]) -> None:
    """Checks that all ranks have the same properties.

    Args:
        topic: the topic, for the message.
        ranks: properties by rank.

    Raises:
        RankSyncError: some differ; every rank raises the same.
    """
    found = describe_differences(ranks)
    if found:
        texts = [text for _, text in found[:_MAX_DIFFERENCES]]
        if len(found) > len(texts):
            texts.append(f"and {len(found) - len(texts)} more differences")
        remedies = dict.fromkeys(_KINDS[kind][1] for kind, _ in found)
        raise RankSyncError(f"ranks differ: {'; '.join(texts)}", ". ".join(remedies), topic)


def describe_differences(ranks: Sequence[Properties]) -> list[tuple[str, str]]:
    """The properties that are not the same on all ranks: kind, and name with each value and its ranks. The value that
    the fewest ranks have comes first.

    Args:
        ranks: properties by rank.
    """
    found = []
    for kind in dict.fromkeys(kind for each in ranks for kind in each):
        for name in dict.fromkeys(name for each in ranks for name in each.get(kind, {})):
            values: dict[str, list[int]] = {}
            for rank, each in enumerate(ranks):
                value = each.get(kind, {}).get(name)
                text = _KINDS[kind][0] if value is None else json.dumps(value)
                values.setdefault(text, []).append(rank)
            if len(values) > 1:
                rare_first = sorted(values.items(), key=lambda item: len(item[1]))
                words = (f"{value} on {_rank_words(holders)}" for value, holders in rare_first)
                found.append((kind, f"{name} is {', '.join(words)}"))
    return found


def _rank_words(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def notify_load_failure(error: BaseException) -> None:
    """Notifies the other ranks of whatever this one raises while it loads a model with layers of ours, the damaged file
    that only this rank reads included. They would wait for this rank at their next topic.

    Args:
        error: the exception.
    """
    if _load.compared and not isinstance(error, RankSyncError):
        rank_sync.notify_failure(make_group(), "loading the model", error)
