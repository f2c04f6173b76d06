"""What tests of backends share: stock's expert classes and functions of each release, built from their sources by
`stock_code`, random experts, and what a backend makes of them."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.lib import vllm_configs
from tests.lib.cases import GPT_OSS as HALVES
from tests.lib.cases import MXFP8_W8A8, SILU, problem
from tests.lib.releases import every_release as every_release
from tests.lib.stock_code import FUSED_MOE, QUANTIZATION, Platform, UncachedFunctools, exists, load, tree
from vllm_moe_oracle import schemes
from vllm_moe_oracle.backends import Backend
from vllm_moe_oracle.core.problem import Activation, ActOrder, Device, Problem, Routing, Scheme
from vllm_moe_oracle.layouts.mma_tiles import pack_nibbles, pack_tiles
from vllm_moe_oracle.oracle.registry import default_registry
from vllm_moe_oracle.releases.supported import DEFAULT_PACKAGES

CAPABILITIES = (70, 75, 80, 86, 89, 90, 100, 103, 110, 120, 121)
GPT_OSS = dataclasses.replace(HALVES, interleaved=True)
ACTIVATIONS = {
    "silu": Activation("silu"),
    "gelu": Activation("gelu"),
    "gelu_tanh": Activation("gelu_tanh"),
    "swigluoai": GPT_OSS,
    "swigluoai_uninterleave": HALVES,
    "situ": Activation("situ", alpha=4.0, beta=25.0),
    "swiglustep": Activation("swiglustep", limit=7.0),
    "silu_no_mul": Activation("silu", gated=False),
    "gelu_no_mul": Activation("gelu", gated=False),
    "gelu_tanh_no_mul": Activation("gelu_tanh", gated=False),
    "relu2_no_mul": Activation("relu2", gated=False),
}
"""By vLLM's names."""
IN_HALVES = {name: activation for name, activation in ACTIVATIONS.items() if not activation.interleaved}
"""Those of gate rows, then up rows, as all layers have them but those of MXFP4: rows that alternate are put apart while
they are loaded."""

_OWN = "the library's own kernel for it, of which nobody has run one"
UNTRIED = {
    **dict.fromkeys([(f"humming_{scheme}{kind}", name) for scheme in ("mxfp8", "mxfp4", "wna16")
                     for kind in ("", "_grouped") for name in ("situ", "swiglustep")], _OWN),
    **dict.fromkeys([(f"trtllm_mxfp4{kind}", "situ") for kind in ("", "_monolithic", "_a8", "_a8_monolithic")],
                    "a kernel that FlashInfer does not give to everybody"),
    **dict.fromkeys([(f"deep_gemm_{scheme}", name) for scheme in ("mxfp8", "mxfp4") for name in ("situ", "swiglustep")],
                    "activated apart and rounded once more, which nobody has run"),
    ("triton_mxfp4_unfused", "swiglustep"): "nobody has run it between these products",
}  # fmt: skip
"""Activations that a backend refuses although the class of some release claims them, by vLLM's name, and why."""


CLASSES = {
    "marlin_mxfp8": ("marlin_moe", "MarlinExperts", "MARLIN"),
    "humming_mxfp8": ("fused_humming_moe", "HummingIndexedExperts", "HUMMING"),
    "humming_mxfp8_grouped": ("fused_humming_moe", "HummingGroupedExperts", "HUMMING"),
    "trtllm_mxfp8": ("trtllm_fp8_moe", "TrtLlmFp8ExpertsModular", "FLASHINFER_TRTLLM"),
    "trtllm_mxfp8_monolithic": ("trtllm_fp8_moe", "TrtLlmFp8ExpertsMonolithic", "FLASHINFER_TRTLLM"),
    "deep_gemm_mxfp8": ("deep_gemm_moe", "DeepGemmExperts", "DEEPGEMM"),
    "marlin_mxfp4": ("marlin_moe", "MarlinExperts", "MARLIN"),
    "marlin_mxfp4_batched": ("marlin_moe", "BatchedMarlinExperts", "BATCHED_MARLIN"),
    "humming_mxfp4": ("fused_humming_moe", "HummingIndexedExperts", "HUMMING"),
    "humming_mxfp4_grouped": ("fused_humming_moe", "HummingGroupedExperts", "HUMMING"),
    "triton_mxfp4": ("gpt_oss_triton_kernels_moe", "OAITritonExperts", "TRITON"),
    "triton_mxfp4_monolithic": ("gpt_oss_triton_kernels_moe", "OAITritonMxfp4ExpertsMonolithic", "TRITON"),
    "triton_mxfp4_unfused": ("gpt_oss_triton_kernels_moe", "UnfusedOAITritonExperts", "TRITON_UNFUSED"),
    "trtllm_mxfp4": ("trtllm_mxfp4_moe", "TrtLlmMxfp4ExpertsModular", "FLASHINFER_TRTLLM_MXFP4_BF16"),
    "trtllm_mxfp4_monolithic": ("trtllm_mxfp4_moe", "TrtLlmMxfp4ExpertsMonolithic", "FLASHINFER_TRTLLM_MXFP4_BF16"),
    "trtllm_mxfp4_a8": ("trtllm_mxfp4_moe", "TrtLlmMxfp4ExpertsModular", "FLASHINFER_TRTLLM_MXFP4_MXFP8"),
    "trtllm_mxfp4_a8_monolithic": ("trtllm_mxfp4_moe", "TrtLlmMxfp4ExpertsMonolithic", "FLASHINFER_TRTLLM_MXFP4_MXFP8"),
    "cutlass_mxfp4": ("flashinfer_cutlass_moe", "FlashInferExperts", "FLASHINFER_CUTLASS_MXFP4_BF16"),
    "cutlass_mxfp4_a8": ("flashinfer_cutlass_moe", "FlashInferExperts", "FLASHINFER_CUTLASS_MXFP4_MXFP8"),
    "deep_gemm_mxfp4": ("deep_gemm_moe", "DeepGemmFP4Experts", "DEEPGEMM_MXFP4"),
    "marlin_wna16": ("marlin_moe", "MarlinExperts", "MARLIN"),
    "marlin_wna16_batched": ("marlin_moe", "BatchedMarlinExperts", "BATCHED_MARLIN"),
    "humming_wna16": ("fused_humming_moe", "HummingIndexedExperts", "HUMMING"),
    "humming_wna16_grouped": ("fused_humming_moe", "HummingGroupedExperts", "HUMMING"),
    "triton_wna16": ("triton_moe", "TritonWNA16Experts", "TRITON"),
    "trtllm_mxint4": ("trtllm_mxint4_moe", "TrtLlmMxint4ExpertsMonolithic", "FLASHINFER_TRTLLM"),
    "cpu_int4": ("cpu_moe", "CPUExpertsInt4", "CPU"),
}
"""Of each backend over a class of vLLM: the module in the folder of experts, the class, the kernel in vLLM's oracle."""


TRITON = ("triton_mxfp4", "triton_mxfp4_monolithic", "triton_mxfp4_unfused")
"""Backends of vLLM's package triton_kernels."""


def gpu(capability: int, **packages: str) -> Device:
    """A GPU with every package that the newest release requires, or with other versions."""
    packages = dict(DEFAULT_PACKAGES["cuda"]) | packages
    return Device("cuda", f"a card of sm_{capability}", capability, packages=packages)


def machine(release: str, capability: int) -> Device:
    """A machine with a release of vLLM: `gpu`, or a CPU where the capability is 0."""
    if capability:
        return gpu(capability, vllm=release)
    return Device("cpu", "a CPU", features=("avx2", "avx512f", "avx512_bf16"), packages={"vllm": release})


def home(name: str) -> int:
    """A compute capability on which a backend runs; 0 for those of CPUs."""
    if name.startswith("cpu"):
        return 0
    if name.startswith(("trtllm", "deep_gemm")) or name == "cutlass_mxfp4_a8":
        return 100
    return 80 if name.startswith("marlin_mxfp") else 90


def wna16_scheme(
    bits: int = 4, group: int = 128, zeros: bool = False, order: ActOrder = "none", packing: str = "gptq"
) -> Scheme:
    """A format of integers."""
    return Scheme("wna16", bits, group, packing, zeros, order)


def gpt_oss_layer(**changes: Any) -> Problem:
    """gpt-oss-20b's layer."""
    usual = {
        "scheme": Scheme("mxfp4", 4, 32, "gpt_oss"), "experts": 32, "top_k": 4, "hidden_size": 2880,
        "intermediate_size": 2880, "activation": GPT_OSS, "has_bias": True, "routing": Routing("renormalize"),
    }  # fmt: skip
    return problem(**usual | changes)


def usual(name: str, **changes: Any) -> Problem:
    """A layer that a backend takes at home: of the backends for MXFP4 one of gpt-oss-20b's."""
    scheme, fields = backend(name).schemes[0], dict[str, Any]()
    if name.endswith("_batched"):
        fields["format"] = "batched"
    if name == "deep_gemm_mxfp4":
        fields = {"scheme": Scheme("mxfp4", 4, 32, "mxfp4"), "activation": SILU, "has_bias": False}
        return gpt_oss_layer(**fields | changes)
    if scheme == "mxfp4":
        if not name.endswith(("_grouped", "_batched")):
            return gpt_oss_layer(**changes)
        made = gpt_oss_layer(**fields | {"ep": 4} | changes)
        return dataclasses.replace(made, local_experts=made.num_experts // 4)
    if name.endswith("_grouped"):
        fields |= {"ep": 4, "local_experts": 32}
    fields["scheme"] = MXFP8_W8A8 if scheme == "mxfp8" else wna16_scheme(group=32 if name == "trtllm_mxint4" else 128)
    return problem(**fields | {"routing": Routing("renormalize")} | changes)


def number(release: str) -> tuple[int, ...]:
    """A release as something to compare."""
    return tuple(map(int, release.split(".")))


def backend(name: str) -> Backend:
    """One of ours."""
    return default_registry()[name]


def codes_of(name: str, layer: Problem, device: Device) -> set[str]:
    """Of the rules by which a backend refuses a layer on a device."""
    return {reason.code for reason in backend(name).check(layer, device).reasons}


def refused(name: str, release: str, capability: int | None = None, **changes: Any) -> set[str]:
    """Codes of the rules by which a backend refuses its `usual` layer, changed, in a release; at `home` by default."""
    device = machine(release, home(name) if capability is None else capability)
    return codes_of(name, usual(name, **changes), device)


def node_of(release: str, path: str, *names: str) -> Any:
    """The syntax tree of a class, a method or a function of a release."""
    found: Any = tree(release, path)
    for name in names:
        found = next(each for each in found.body if getattr(each, "name", "") == name)
    return found


def source_of(release: str, path: str, *names: str) -> str:
    """Source of a file, a class, a method or a function of a release, without spaces that do not matter."""
    return ast.unparse(node_of(release, path, *names))


def humming_conversion(release: str) -> str:
    """Source of the file in which stock converts weights for Humming."""
    files = [f"{QUANTIZATION}/utils/{each}" for each in ("humming_utils.py", "humming/moe.py")]
    return source_of(release, next(each for each in files if exists(release, each)))


def members_of(release: str, path: str, name: str) -> list[str]:
    """Members of an enumeration of a release."""
    return [
        target.id
        for statement in node_of(release, path, name).body
        if isinstance(statement, ast.Assign | ast.AnnAssign)
        for target in (statement.targets if isinstance(statement, ast.Assign) else [statement.target])
        if isinstance(target, ast.Name)
    ]


def stock_of(release: str, name: str, capability: int) -> tuple[Any, dict[str, Any]]:
    """The class behind a backend, and the names of its file, on CUDA of a compute capability, or on a CPU if that is 0.

    Every package that the class asks for is there.
    """
    file, class_name, _ = CLASSES[name]
    platform = Platform(capability)
    # `CudaPlatform.support_deep_gemm`.
    deep_gemm = platform.support_deep_gemm() or (number(release) >= (0, 24) and capability // 10 == 12)
    activation = load(release, f"{FUSED_MOE}/activation.py", current_platform=platform)
    asked = ("MoEActivation", "apply_moe_activation_supported", "apply_moe_activation_masked_supported")
    names = load(
        release, f"{FUSED_MOE}/experts/{file}.py", current_platform=platform, functools=UncachedFunctools,
        is_deep_gemm_supported=lambda: deep_gemm, has_flashinfer=lambda: True,
        has_flashinfer_cutlass_fused_moe=lambda: True, has_triton_kernels=lambda: True,
        get_triton_kernels_version=lambda: None, **{key: activation[key] for key in asked if key in activation},
    )  # fmt: skip
    return names[class_name], names


def quant_keys(name: str, names: Mapping[str, Any]) -> tuple[Any, Any]:
    """The keys of weights and activations by which stock's oracle asks the class behind a backend."""
    own = backend(name)
    if own.schemes[0] == "mxfp8":
        return names["kMxfp8Static"], names["kMxfp8Dynamic"]
    if own.schemes[0] == "wna16":
        return names["kInt4Static32" if name == "trtllm_mxint4" else "kInt4Static"], None
    inputs = {"16bit": None, "mxfp8": "kMxfp8Dynamic", "fp8": "kFp8Dynamic128Sym"}[own.activations(usual(name))]
    return names["kMxfp4Static"], inputs and names[inputs]


_ORACLES = {"mxfp8": ("oracle/mxfp8.py", ""), "mxfp4": ("oracle/mxfp4.py", "Mxfp4MoeBackend"),
            "wna16": ("oracle/int_wna16.py", "WNA16MoEBackend")}  # fmt: skip


def offered(release: str, name: str) -> bool:
    """Whether stock's oracle for the scheme knows the kernel behind a backend."""
    file, enumeration = _ORACLES[backend(name).schemes[0]]
    if enumeration:
        known = members_of(release, f"{FUSED_MOE}/{file}", enumeration)
    else:
        assigned = [node for node in tree(release, f"{FUSED_MOE}/{file}").body if isinstance(node, ast.Assign)]
        (listed,) = (node.value for node in assigned if ast.unparse(node.targets[0]) == "_SUPPORTED_BACKENDS")
        known = [each.attr for each in ast.walk(listed) if isinstance(each, ast.Attribute)]
    return CLASSES[name][2] in known


def skip_unless_taken(release: str, name: str) -> None:
    """Skips releases in which vLLM does not offer the kernel behind a backend, or the backend refuses any layer."""
    if "package" in refused(name, release) or not offered(release, name):
        pytest.skip("the release does not offer it, or the backend does not take the release")


def claims_activation(stock: Any, names: Mapping[str, Any], stock_name: str, activation: Activation) -> bool:
    """Whether an expert class takes an activation.

    Args:
        stock: the class, and `names`, of `stock_of`.
        names: see there.
        stock_name: vLLM's name of the activation.
        activation: the same by ours.
    """
    member = [each for each in names["MoEActivation"] if each.value == stock_name]
    claimed = bool(member) and bool(stock._supports_activation(member[0]))
    return claimed and (activation.gated or bool(getattr(stock, "_supports_no_act_and_mul", bool)()))


# --- Experts --------------------------------------------------------------------------------------------------------


def expert(layer: Problem, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random canonical tensors of one expert: every code, scales of different sizes."""
    generator = torch.Generator().manual_seed(seed)
    dtype, bits, integers = getattr(torch, layer.dtype), layer.scheme.bits, layer.scheme.name == "wna16"
    shapes = schemes.module(layer.scheme.name).shapes(layer)
    found: dict[str, torch.Tensor] = {}
    for name, (_, *shape) in shapes.items():
        kind = name.partition("_")[2]
        if kind == "scale" and integers:
            size = torch.rand(shape, generator=generator) + 0.25
            found[name] = (size / (2**bits * shape[0] ** 0.5)).to(dtype)
        elif kind == "bias":
            found[name] = torch.randn(shape, generator=generator).to(dtype)
        elif kind == "order":
            found[name] = torch.randperm(shape[0], generator=generator).to(torch.int32)
        elif kind == "group_index":
            groups = shapes["w2_scale"][2]
            found[name] = torch.randint(0, groups, shape, generator=generator).sort().values.to(torch.int32)
        else:
            high = {"scale": 255, "zero_point": 2**bits}.get(kind, 256)
            found[name] = torch.randint(0, high, shape, dtype=torch.uint8, generator=generator)
            if layer.scheme.name == "mxfp8" and not kind:
                found[name] = found[name].view(torch.float8_e4m3fn)
    return found


def stacked(experts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Tensors of a layer from those of its experts."""
    return {
        key: torch.stack([one[key].view(torch.uint8) for one in experts]).view(tensor.dtype)
        if tensor.element_size() == 1
        else torch.stack([one[key] for one in experts])
        for key, tensor in experts[0].items()
    }


def experts(layer: Problem, count: int = 3) -> dict[str, torch.Tensor]:
    """Random canonical tensors of a layer's first experts."""
    return stacked([expert(layer, seed) for seed in range(count)])


def converted(name: str, canonical: Mapping[str, torch.Tensor], layer: Problem, device: Device) -> dict[str, Any]:
    """What a backend makes of the canonical tensors of a layer."""
    plan = backend(name).plan(layer, device)
    count = len(next(iter(canonical.values())))
    one_by_one = [{key: tensor[index] for key, tensor in canonical.items()} for index in range(count)]
    return stacked([dict(backend(name).convert(one, layer, plan)) for one in one_by_one])


def assert_same_bits(ours: Mapping[str, torch.Tensor], theirs: Iterable[torch.Tensor | None], where: Any = "") -> None:
    """Fails unless both have the same tensors, bit for bit, whatever the shapes.

    Args:
        ours: what a backend made.
        theirs: stock's, of weights, scales and biases in the order of `_IN_ORDER`; None where there is none.
        where: says in the message which case it is.
    """
    for key, tensor in zip(_IN_ORDER, theirs, strict=False):
        assert (key in ours) == (tensor is not None), (key, where)
        if tensor is not None:
            assert ours[key].nbytes == tensor.nbytes, (key, where)
            one, other = (each.contiguous().view(torch.uint8).flatten() for each in (ours[key], tensor))
            assert torch.equal(one, other), (key, where)


_IN_ORDER = ("w13", "w2", "w13_scale", "w2_scale", "w13_bias", "w2_bias")


# --- Stand-ins for functions that stock calls -----------------------------------------------------------------------


class Operators:
    """vLLM's operators where they repack. The tests of the layouts prove these against PTX and stock's reference."""

    @staticmethod
    def gptq_marlin_repack(b_q_weight: torch.Tensor, size_k: int, size_n: int, num_bits: int, **extra: Any) -> Any:
        """Codes `[K * bits / 32, N]`, of as many columns a word as fit."""
        assert b_q_weight.shape == (size_k * num_bits // 32, size_n) and not extra.get("is_a_8bit")
        return (pack_nibbles if num_bits == 4 else pack_tiles)(b_q_weight.T.contiguous().view(torch.uint8))


class DeepGemmScales:
    """Stands for DeepGEMM's ``transform_sf_into_required_layout``, which packs float32 scales: keeps what it is asked.

    What it makes of them is in the test of `pack_ue8m0_scales`.
    """

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def __call__(self, **given: Any) -> torch.Tensor:
        """The scales as they are."""
        self.asked.append(given)
        scales: torch.Tensor = given["sf"]
        return scales

    @staticmethod
    def assert_packed(packed: torch.Tensor, floats: torch.Tensor) -> None:
        """Fails unless the packed words hold the exponents of the float32 scales."""
        assert floats.dtype == torch.float32
        exponents = (floats.contiguous().view(torch.int32) >> 23).to(torch.uint8)
        words = packed.view(torch.int32).transpose(-1, -2).flatten().view(torch.uint8)
        assert torch.equal(words, exponents.flatten())


def shuffled_rows(matrix: torch.Tensor, tile: int) -> torch.Tensor:
    """FlashInfer's order of rows for tiles of 128: ``srcToDstBlk32RowMap`` of `flashinfer/utils.py` says where each row
    of 32 goes."""
    assert tile == 128 and matrix.dim() == 2 and matrix.shape[0] % 32 == 0
    table = [8 * (row % 4) + row // 4 for row in range(32)]
    order = torch.empty(matrix.shape[0], dtype=torch.long)
    for row in range(matrix.shape[0]):
        order[row - row % 32 + table[row % 32]] = row
    return order


def alternating_rows(matrix: torch.Tensor) -> torch.Tensor:
    """FlashInfer's order of rows g0, u0, g1, u1, ..."""
    return torch.arange(matrix.shape[0]).view(2, -1).T.flatten()


def tiled_scales(scales: torch.Tensor) -> torch.Tensor:
    """FlashInfer's ``block_scale_interleave``, from its documentation: tiles of 128 rows x 4, element by element."""
    out = []
    for matrix in scales if scales.dim() == 3 else scales[None]:
        rows, columns = matrix.shape
        result = torch.empty(rows * columns, dtype=matrix.dtype)
        row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        tile = (row // 128) * (columns // 4) + column // 4
        place = tile * 512 + (row % 32) * 16 + (row % 128 // 32) * 4 + column % 4
        result[place.flatten()] = matrix.flatten()
        out.append(result)
    return torch.cat(out)


# --- Inside vLLM ----------------------------------------------------------------------------------------------------


@contextmanager
def inside_vllm(layer: Problem, routing: str = "Renormalize") -> Iterator[Any]:
    """vLLM's `FusedMoEConfig` of a layer; skips where vLLM is not installed."""
    pytest.importorskip("vllm", reason="vLLM's own classes are asked")
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig, RoutingMethodType

    parallel, activation = FusedMoEParallelConfig.make_no_parallel(), layer.activation
    if layer.parallel.ep > 1:
        parallel.ep_size, parallel.use_ep = layer.parallel.ep, True
    halves = activation.name == "swigluoai" and not activation.interleaved
    situ = {"activation_situ_beta": activation.alpha, "activation_situ_linear_beta": activation.beta}
    with set_current_vllm_config(VllmConfig()):
        yield vllm_configs.moe_config(
            layer, activation=MoEActivation("swigluoai_uninterleave" if halves else activation.name),
            routing_method=RoutingMethodType[routing], moe_parallel_config=parallel, in_dtype=torch.bfloat16,
            **(situ if activation.name == "situ" else {}),
        )  # fmt: skip
