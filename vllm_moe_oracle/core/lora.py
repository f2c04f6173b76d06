"""Which MoE layers LoRA adapters may reach, and which of these vLLM serves with them."""

from __future__ import annotations

from collections.abc import Iterable

from .capabilities import WITHOUT_LORA, Rule
from .problem import Problem


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


def _misplaced(problem: Problem) -> str:
    """Why a rank may hold other experts than vLLM cuts out of an adapter for it; "" where it holds the same ones."""
    parallel = problem.parallel
    if parallel.ep == 1:
        return ""
    if parallel.placement == "round_robin":
        return f"holds every {parallel.ep}-th expert instead"
    spare = problem.num_experts % parallel.ep
    return f"{problem.num_experts} experts over {parallel.ep} ranks leave {spare}, which shift them" if spare else ""


_WITHOUT_DP = f"serve without --data-parallel-size, for example by a server for each rank; or {WITHOUT_LORA}"

LORA_RULES = (
    Rule(
        "lora.device",
        lambda problem, device: problem.lora and device.kind == "cpu",
        lambda problem, device: "LoRA on experts is requested, and vLLM has no kernels for it on a CPU",
        WITHOUT_LORA,
    ),
    Rule(
        "lora.format",
        lambda problem, device: problem.lora and problem.parallel.is_batched,
        lambda problem, device: (
            "LoRA on experts needs tokens in the standard format: of rows sorted by expert, vLLM knows no adapter"
        ),
        _WITHOUT_DP,
    ),
    Rule(
        # With and without expert parallelism: vLLM gathers which adapter a token has, but asks the rank's own batch
        # which adapters to compute (`LoRAKernelMeta.active_lora_ids`, `no_lora_flag_cpu`).
        "lora.dp",
        lambda problem, device: problem.lora and problem.parallel.dp > 1,
        lambda problem, device: (
            "of tokens that come from other data-parallel ranks, vLLM's LoRA kernels do not know the adapters for sure"
        ),
        _WITHOUT_DP,
    ),
    Rule(
        "lora.eplb",
        lambda problem, device: problem.lora and problem.eplb,
        lambda problem, device: "vLLM moves experts (EPLB) and leaves their adapters where they are",
        f"serve without --enable-eplb; or {WITHOUT_LORA}",
    ),
    Rule(
        "lora.placement",
        lambda problem, device: problem.lora and bool(_misplaced(problem)),
        lambda problem, device: (
            f"vLLM gives rank r the adapters of experts r * n to (r + 1) * n - 1, of the n experts that it holds: "
            f"{_misplaced(problem)}"
        ),
        "expert parallelism over ranks that divide the experts, with --expert-placement-strategy linear, or none; "
        f"or {WITHOUT_LORA}",
    ),
    Rule(
        "lora.batch_invariant",
        lambda problem, device: problem.lora and problem.batch_invariant,
        lambda problem, device: "vLLM's LoRA kernels for experts change with the number of tokens",
        f"unset VLLM_BATCH_INVARIANT; or {WITHOUT_LORA}",
    ),
    Rule(
        "lora.shards",
        lambda problem, device: problem.lora and bool(problem.ragged_intermediate_size),
        lambda problem, device: (
            f"adapters are cut into equal shards; {problem.unsharded_intermediate_size} features over "
            f"{problem.parallel.tp} ranks are {problem.intermediate_size} and less on the last"
        ),
        f"expert parallelism over ranks that divide the experts; or {WITHOUT_LORA}",
    ),
)
"""What vLLM's LoRA layer does not do, whatever kernel runs the experts. `Backend.check` asks these of every backend
that takes adapters."""

MISAPPLIED_BY_VLLM = frozenset({"lora.format", "lora.dp", "lora.eplb", "lora.placement"})
"""Codes of rules for which stock vLLM's own kernels compute with wrong adapters, too, or its LoRA layer ends the
start."""
