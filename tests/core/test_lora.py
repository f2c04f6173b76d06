"""Which layers LoRA adapters may reach, and which of these are served with them, by vLLM's code."""

from __future__ import annotations

import itertools
from typing import Any, get_args

import pytest
import torch

from tests.lib.cases import B200, CPU, H200, INT4_G128, MXFP8, problem
from tests.lib.releases import every_release, sources
from tests.lib.stock_code import FUSED_MOE, load
from vllm_moe_oracle.core.lora import targets_experts
from vllm_moe_oracle.core.problem import Device, Parallel, Placement, Problem, Scheme
from vllm_moe_oracle.devices.catalog import known_device
from vllm_moe_oracle.oracle.registry import default_registry
from vllm_moe_oracle.oracle.selection import evaluate_candidates
from vllm_moe_oracle.oracle.stock_choice import choose_stock, is_loadable
from vllm_moe_oracle.settings import Settings

LAYER = "model.layers.3.mlp.experts"
MXFP4 = Scheme("mxfp4", 4, 32, "modelopt")
DEVICES = [known_device("nvidia-a100"), H200, B200, CPU]


@pytest.mark.parametrize(
    ("targets", "layer", "reached"),
    [
        *(
            ([target], LAYER, False)
            for target in ("q_proj", "qkv_proj", "o_proj", "gate_up_proj", "mlp.down_proj", "lm_head", "model", "ffn")
        ),
        # Names of experts, and names that may be theirs.
        *(
            (["q_proj", target], LAYER, True)
            for target in ("experts", LAYER, f"{LAYER}.7.down_proj", "shared_expert", "mlp", "routed_experts")
        ),
        (["ffn"], "model.layers.0.ffn", True),  # a layer of another name is known by its last part
        ([], LAYER, False),
    ],
)
def test_experts_are_reached_by_their_names(targets: list[str], layer: str, reached: bool) -> None:
    assert targets_experts(targets, layer) is reached


def held(experts: int, ranks: int, rank: int, placement: Placement) -> list[int]:
    """The experts of a rank, as vLLM's `determine_expert_map` places them."""
    if placement == "round_robin":
        return [*range(rank, experts, ranks)]
    start = sum(experts // ranks + (other < experts % ranks) for other in range(rank))
    return [*range(start, start + experts // ranks + (rank < experts % ranks))]


def gets_its_adapters(layer: Problem) -> bool:
    """Whether each rank computes with the adapters of its experts and of all tokens, by vLLM's code: it cuts adapters
    at ``ep_rank * local_num_experts``, moves none, and computes those of its own batch."""
    parallel = layer.parallel
    owned = [held(layer.num_experts, parallel.ep, rank, parallel.placement) for rank in range(parallel.ep)]
    cut = all(each == [*range(rank * len(each), (rank + 1) * len(each))] for rank, each in enumerate(owned))
    return cut and not layer.eplb and parallel.dp == 1 and not parallel.is_batched


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
@pytest.mark.parametrize("scheme", [MXFP8, MXFP4, INT4_G128], ids=lambda scheme: scheme.name)
def test_no_backend_gets_adapters_that_vllm_misplaces(scheme: Scheme, device: Device) -> None:
    """Of all registered backends, over functions and over vLLM's classes, and of stock vLLM."""
    registry, runs = default_registry(), False
    for tp, dp, use_ep, eplb, experts, placement in itertools.product(
        (1, 2, 3), (1, 2), (False, True), (False, True), (12, 13), get_args(Placement)
    ):
        ep = tp * dp if use_ep else 1
        if ep == 1 and (use_ep or eplb or placement == "round_robin"):
            continue  # vLLM has these among several ranks with different experts alone
        parallel = Parallel(tp=1 if use_ep else tp * dp, ep=ep, dp=dp, placement=placement)
        local = -(-experts // ep)
        layer = problem(
            scheme=scheme, num_experts=experts, local_experts=local, parallel=parallel, eplb=eplb, lora=True
        )
        candidates = evaluate_candidates(layer, device, Settings())
        takers = [each.name for each in registry.for_scheme(scheme.name) if not each.check(layer, device).reasons]
        if gets_its_adapters(layer):
            assert is_loadable(candidates), layer
            runs = runs or bool(takers)
            continue
        assert not takers and not is_loadable(candidates), layer
        stock = choose_stock(layer, device, registry)
        assert stock is not None and stock.refusal, layer
    assert runs == (device.kind == "cuda")


REMEDIES = {
    "serve without --data-parallel-size": {"dp": 1},
    "serve without --enable-eplb": {"eplb": False},
    "expert parallelism over ranks that divide the experts, with --expert-placement-strategy linear": {
        "ep": 4, "placement": "linear",
    },
    "or none; or ": {"ep": 1, "tp": 4, "placement": "linear"},
}  # fmt: skip
"""What a remedy changes, by its words."""


@pytest.mark.parametrize("experts", [12, 13])
def test_a_remedy_leads_to_a_layer_that_is_served(experts: int) -> None:
    """Each reason's remedy takes this reason away, brings no other, and all of them together leave none."""

    def made(asked: dict[str, Any]) -> Problem:
        parallel = {name: asked[name] for name in ("tp", "ep", "dp", "placement")}
        return problem(
            num_experts=experts, local_experts=-(-experts // asked["ep"]), parallel=Parallel(**parallel),
            eplb=asked["eplb"], lora=True,
        )  # fmt: skip

    def reasons(asked: dict[str, Any]) -> dict[str, str]:
        found = default_registry()["hopper_mxfp8"].check(made(asked), H200).reasons
        return {reason.code: reason.remedy for reason in found}

    for ep, dp, eplb, placement in itertools.product((1, 3, 5), (1, 2), (False, True), get_args(Placement)):
        asked = {"tp": 2 if ep == 1 else 1, "ep": ep, "dp": dp, "eplb": eplb, "placement": placement}
        seen = reasons(asked)
        for code, remedy in seen.items():
            changes = [change for words, change in REMEDIES.items() if words in remedy]
            fits = [change for change in changes if change.get("ep", 1) == 1 or experts % change["ep"] == 0]
            assert changes and all(reasons(asked | change).keys() <= seen.keys() - {code} for change in fits), remedy
            asked = asked | fits[-1]
        assert not reasons(asked), asked


@every_release
def test_vllm_places_experts_as_this_file_says(release: str) -> None:
    place = load(release, f"{FUSED_MOE}/expert_map_manager.py", torch=torch)["determine_expert_map"]
    for experts, ranks, placement in itertools.product((12, 13), (2, 3, 5), get_args(Placement)):
        for rank in range(ranks):
            local, places, _ = place(ranks, rank, experts, placement)
            owned = held(experts, ranks, rank, placement)
            assert len(owned) == local and places[owned].tolist() == [*range(local)]


@every_release
def test_vllm_leaves_adapters_where_the_rules_say(release: str) -> None:
    """What the rules rest on. A release that changes one of these lines may serve more than they allow."""
    folder = sources(release) / "vllm" / "lora"
    code = {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*.py")}
    assert not [name for name, text in code.items() if "eplb" in text.lower()]
    manager, layer = code["model_manager.py"], code["layers/fused_moe.py"]
    assert "expert_start = ep_rank * local_num_experts" in manager and "expert_map" not in manager + layer
    assert 'assert all2all_backend == "allgather_reducescatter"' in layer
    kernels, metadata = code["punica_wrapper/punica_gpu.py"], code["ops/triton_ops/lora_kernel_metadata.py"]
    assert "token_lora_mapping" in kernels and "self.token_mapping_meta.meta_args" in kernels
    assert "torch.unique(" in metadata and "all_reduce" not in metadata + kernels
