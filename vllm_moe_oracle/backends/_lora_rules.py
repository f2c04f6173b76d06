"""What keeps LoRA adapters from the experts of backends over functions, whose adapters vLLM's kernels apply."""

from __future__ import annotations

from ..core.capabilities import WITHOUT_LORA, Rule

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
        "another --all2all-backend, or --lora-target-modules without experts",
    ),
    Rule(
        "lora.dp",
        lambda problem, device: problem.lora and problem.parallel.exchanges_tokens,
        lambda problem, device: (
            "of tokens that come from other data-parallel ranks, vLLM's LoRA kernels do not know the adapters for sure"
        ),
        f"serve without --enable-expert-parallel or --data-parallel-size; or {WITHOUT_LORA}",
    ),
    Rule(
        "lora.eplb",
        lambda problem, device: problem.lora and problem.eplb,
        lambda problem, device: "vLLM moves experts (EPLB) and leaves their adapters where they are",
        f"serve without --enable-eplb; or {WITHOUT_LORA}",
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
        f"expert parallelism; or {WITHOUT_LORA}",
    ),
)
"""For backends whose functions take `Adapters`."""
