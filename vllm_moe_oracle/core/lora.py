"""Which MoE layers LoRA adapters may reach."""

from __future__ import annotations

from collections.abc import Iterable


def targets_experts(target_modules: Iterable[str], layer: str) -> bool:
    """Whether vLLM's ``--lora-target-modules`` names the experts of a layer.

    vLLM compares full names and last parts of names. A name with ``expert`` in it counts, too: it may be another name
    of the experts.

    Args:
        target_modules: names of modules, or their last parts.
        layer: the layer's name.
    """
    own = {layer, *layer.split(".")[-2:]}
    return any(
        target in own or target.startswith(f"{layer}.") or "expert" in target.lower() for target in target_modules
    )
