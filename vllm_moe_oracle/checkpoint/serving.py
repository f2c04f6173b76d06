"""What vLLM refuses of a layer under a server's options, and the precision that settings ask of its inputs."""

from __future__ import annotations

from typing import get_args

from ..core.capabilities import WITHOUT_LORA
from ..core.problem import Placement, Problem
from ..errors import NoBackendError, SettingError
from ..releases.all2all import DEFAULT_ALL2ALL, rounded_hidden_size, why_vllm_refuses
from ..settings import Settings


def is_round_robin(expert_placement_strategy: str, eplb: bool, spread: bool) -> bool:
    """Whether vLLM is asked to place experts round-robin.

    Args:
        expert_placement_strategy: as vLLM's option.
        eplb: experts may move between ranks.
        spread: the experts are spread over several ranks.

    Raises:
        SettingError: an unknown strategy, or an option that needs expert parallelism without it.
    """
    if expert_placement_strategy not in get_args(Placement):
        rule = f"{expert_placement_strategy!r} is not one of {', '.join(get_args(Placement))}"
        raise SettingError(rule, where="expert_placement_strategy")
    round_robin = expert_placement_strategy == "round_robin"
    for name, requested in (("eplb", eplb), ("expert_placement_strategy", round_robin)):
        if requested and not spread:
            raise SettingError("this needs expert parallelism over 2 ranks or more", where=name)
    return round_robin


def why_eplb_is_refused(num_experts: int, ranks: int, device_kind: str) -> str:
    """Why vLLM does not start with ``--enable-eplb``, as `ParallelConfig` and its MoE layer check it; "" if it does.

    Args:
        num_experts: experts of a layer on all ranks; 0 where there are none.
        ranks: ranks with different experts.
        device_kind: `Device.kind` of the ranks.
    """
    if device_kind == "cpu":
        return "vLLM moves experts between ranks (EPLB) on GPUs only"
    if num_experts % ranks:
        rule = f"vLLM moves experts between ranks (EPLB) with equally many on each: {num_experts} over {ranks}"
        return f"{rule} ranks leave {num_experts % ranks}, unless --eplb-config adds redundant ones"
    return ""


_WITHOUT_ALL2ALL = f"Leave out --all2all-backend; or {WITHOUT_LORA}"


def why_lora_is_refused(problem: Problem, all2all: str) -> str:
    """Why vLLM's LoRA layer ends the start, as its `FusedMoEWithLoRA` checks it; "" if it does not.

    Args:
        problem: the layer.
        all2all: vLLM's ``--all2all-backend``, also where no tokens are exchanged.
    """
    if not problem.lora or problem.parallel.ep == 1 or all2all == DEFAULT_ALL2ALL:
        return ""
    rule = f"vLLM applies LoRA adapters to experts of several ranks with the all-to-all {DEFAULT_ALL2ALL} alone"
    return f"{rule}, also where ranks exchange no tokens; the option says {all2all}"


def require_lora(problem: Problem, all2all: str) -> None:
    """Ends a start that vLLM's LoRA layer would end after the weights are loaded.

    Args:
        problem: the layer.
        all2all: as for `why_lora_is_refused`.

    Raises:
        SettingError: the option contradicts the adapters; stock vLLM does not run the layer either.
    """
    if rule := why_lora_is_refused(problem, all2all):
        raise SettingError(rule, _WITHOUT_ALL2ALL, "--all2all-backend")


def exchange_refusal(problem: Problem, all2all: str, device_kind: str) -> NoBackendError | None:
    """The error of a layer whose tokens vLLM does not exchange between data-parallel ranks, whose experts it does not
    move between ranks, or whose adapters contradict the all-to-all; None where a server starts.

    Args:
        problem: the layer.
        all2all: from `releases.all2all.effective_all2all`.
        device_kind: `Device.kind` of the ranks.
    """
    parallel = problem.parallel
    eplb_rule = why_eplb_is_refused(problem.num_experts, parallel.ep, device_kind) if problem.eplb else ""
    for rule, remedy in (
        (
            why_vllm_refuses(all2all, device_kind, parallel.exchanges_tokens, parallel.dp),
            "Use --tp instead of --dp" if device_kind == "cpu" else "Choose another --all2all-backend",
        ),
        (eplb_rule, "Serve without --enable-eplb"),
        (why_lora_is_refused(problem, all2all), _WITHOUT_ALL2ALL),
    ):
        if rule:
            return NoBackendError(rule, remedy, problem.layer)
    return None


def check_exchange(problem: Problem, all2all: str, device_kind: str) -> None:
    """Refuses a layer that a backend here would run, and a server does not.

    Raises:
        NoBackendError: that of `exchange_refusal`, or as `check_hidden_size`.
    """
    if (error := exchange_refusal(problem, all2all, device_kind)) is not None:
        raise error
    check_hidden_size(problem, all2all)


def check_hidden_size(problem: Problem, all2all: str) -> None:
    """Refuses a layer whose hidden size an all-to-all does not carry as it is.

    Args:
        problem: the layer.
        all2all: as for `exchange_refusal`; not used where no tokens are exchanged.

    Raises:
        NoBackendError: vLLM rounds the size up, and its own classes alone load such a layer; or it is too large.
    """
    size = carried_hidden_size(problem, all2all)
    if size != problem.hidden_size:
        instead = f"vLLM rounds it up to {size}, and no backend here loads such a layer" if size else "it is too large"
        rule = f"the all-to-all {all2all} does not carry hidden size {problem.hidden_size}: {instead}"
        raise NoBackendError(rule, "Choose another --all2all-backend", problem.layer)


def carried_hidden_size(problem: Problem, all2all: str) -> int:
    """The hidden size with which a layer's tokens are exchanged, which vLLM may round up; 0 where it is too large."""
    if not problem.parallel.exchanges_tokens:
        return problem.hidden_size
    return rounded_hidden_size(all2all, problem.hidden_size, 4 if problem.dtype == "float32" else 2)


def with_activations(problem: Problem, settings: Settings) -> Problem:
    """The layer with the activation precision of the settings."""
    if settings.activations == "checkpoint":
        return problem
    return problem.with_activations(settings.activations)
