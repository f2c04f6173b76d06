"""What tests of backends share: stock's expert classes and functions of each release, built from their sources by
`stock_code`, random experts, and what a backend makes of them."""

from __future__ import annotations

import ast
import dataclasses
import functools
import itertools
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import pytest
import torch

from tests.lib.cases import GPT_OSS as HALVES
from tests.lib.cases import MXFP8_W8A8, SILU, problem
from tests.lib.releases import every_release as every_release
from tests.lib.stock_code import (
    FUSED_MOE,
    QUANTIZATION,
    Platform,
    UncachedFunctools,
    bases_elsewhere,
    exists,
    load,
    tree,
)
from vllm_moe_oracle import schemes
from vllm_moe_oracle.backends import Backend
from vllm_moe_oracle.backends._stock import StockBackend, StockDifference
from vllm_moe_oracle.core.problem import (
    Activation,
    ActivationPrecision,
    ActOrder,
    Device,
    Problem,
    Routing,
    Scheme,
    SchemeName,
)
from vllm_moe_oracle.errors import did_you_mean
from vllm_moe_oracle.layouts.mma_tiles import pack_nibbles, pack_tiles
from vllm_moe_oracle.oracle.checked_backend import unchecked
from vllm_moe_oracle.oracle.registry import default_registry
from vllm_moe_oracle.releases.supported import DEFAULT_PACKAGES, NEWEST, RELEASES

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


class Wrapped(NamedTuple):
    """What a backend over a class of vLLM says of it.

    Attributes:
        path: of the class's file, below a release's folder.
        class_name: the class.
        kernel: its kernel's name in vLLM's oracle for the scheme.
        stock_differences: where the backend differs from what vLLM claims.
    """

    path: str
    class_name: str
    kernel: str
    stock_differences: tuple[StockDifference, ...]

    @property
    def stock_class(self) -> str:
        """As `Backend.stock_class`."""
        return f"{self.path.removesuffix('.py').replace('/', '.')}:{self.class_name}"


def _wrapped(own: StockBackend) -> Wrapped:
    module, _, class_name = own.stock_class.partition(":")
    return Wrapped(f"{module.replace('.', '/')}.py", class_name, own.stock_kernel, own.stock_differences)


CLASSES = {
    each.name: _wrapped(own)
    for each in default_registry()
    if isinstance(own := unchecked(each), StockBackend)
}  # fmt: skip
"""Of each backend over a class of vLLM, by its name."""


def wrappers(*schemes: SchemeName) -> list[str]:
    """Names of the backends over classes of vLLM for some schemes."""
    return [name for name in CLASSES if set(backend(name).schemes) & set(schemes)]


def differs(name: str, what: str, release: str) -> bool:
    """Whether a backend says that it differs in a release from what vLLM claims.

    Args:
        name: the backend's.
        what: one of `StockDifference.what`; "" for every layer.
        release: vLLM's version.
    """
    return any(
        (what in each.what if what else not each.what) and (not each.before or number(release) < number(each.before))
        for each in CLASSES[name].stock_differences
    )


def disagreement(name: str, what: str, release: str, codes: Collection[str], claimed: bool) -> str:
    """What is wrong where a backend takes something else than its class claims, and what to change; "" where it agrees.

    Args:
        name: the backend's.
        what: one of `StockDifference.what`.
        release: vLLM's version.
        codes: the backend's reasons against it; empty where it takes it.
        claimed: whether the class claims it.
    """
    taken, declared = not codes, differs(name, what, release)
    stock = f"{CLASSES[name].class_name} of vLLM {release}"
    refusing = "takes it" if taken else f"refuses it ({', '.join(sorted(codes))})"
    said = f"{name}, {what}: the backend {refusing}, and {stock} {'claims' if claimed else 'does not claim'} it"
    if declared and taken:
        return f"{said}. Its stock_differences name what it takes: remove {what!r} from them"
    if taken and not claimed:
        return f"{said}. Take it out of the backend's capabilities"
    if claimed and not taken and not declared:
        difference = f"StockDifference(({what!r},), 'why')"
        return f"{said}. Add it to the backend's capabilities, or {difference} to its stock_differences"
    return ""


def unknown_differences(stock_differences: Iterable[StockDifference], known: Collection[str]) -> list[str]:
    """What is wrong with a backend's differences from stock: each that names nothing that is compared, with the nearest
    word, that has no reason, or a release that is not supported."""
    found = []
    for each in stock_differences:
        found += [
            f"the difference {what!r} is of nothing that is compared. {did_you_mean(what, known)}"
            f"Known are {', '.join(sorted(known))}"
            for what in each.what
            if what not in known
        ]
        if not each.why:
            found.append(f"the difference {each.what} has no reason: give its `why`")
        if each.before and each.before not in RELEASES:
            rule = f"the difference {each.what} ends before {each.before!r}, which is no supported release"
            found.append(f"{rule}. Known are {', '.join(RELEASES)}")
        if not each.before and not {*each.what} - {"unlisted"}:
            found.append(f"the difference {each.what} holds for every layer of every release: give `before`")
    return found


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
    """A compute capability on which a backend runs, Hopper's or else Blackwell's if it has one; 0 for those of CPUs."""
    limits = backend(name).capabilities
    if "cuda" not in limits.devices:
        return 0
    ranges = limits.compute_capabilities or ((0, 1000),)
    able = [each for each in (90, 100, *CAPABILITIES) if any(low <= each < high for low, high in ranges)]
    assert able, f"{name} names no compute capability of {CAPABILITIES}"
    return able[0]


def at_home(name: str) -> Device:
    """A machine of the newest release on which a backend runs."""
    return machine(NEWEST, home(name))


def wna16_scheme(
    bits: int = 4, group: int = 128, zeros: bool = False, order: ActOrder = "none", packing: str = "gptq"
) -> Scheme:
    """A format of integers."""
    return Scheme("wna16", bits, group, packing, zeros, order)


_GPT_OSS_20B: dict[str, Any] = {
    "scheme": Scheme("mxfp4", 4, 32, "gpt_oss"), "experts": 32, "top_k": 4, "hidden_size": 2880,
    "intermediate_size": 2880, "activation": GPT_OSS, "has_bias": True, "routing": Routing("renormalize"),
}  # fmt: skip


def gpt_oss_layer(**changes: Any) -> Problem:
    """gpt-oss-20b's layer."""
    return problem(**_GPT_OSS_20B | changes)


_RENORMALIZED: dict[str, Any] = {"routing": Routing("renormalize")}
_HOME_LAYERS: dict[str, tuple[dict[str, Any], ...]] = {
    "mxfp8": ({"scheme": MXFP8_W8A8, **_RENORMALIZED},),
    "mxfp4": (
        _GPT_OSS_20B,
        _GPT_OSS_20B | {"scheme": Scheme("mxfp4", 4, 32, "mxfp4"), "activation": SILU, "has_bias": False},
    ),
    "wna16": tuple({"scheme": wna16_scheme(group=group), **_RENORMALIZED} for group in (128, 32)),
}
"""By scheme, layers of which every backend takes one; over four ranks if it is made for expert parallelism."""


@functools.cache
def _home_layer(name: str) -> Mapping[str, Any]:
    """The first of `_HOME_LAYERS` that a backend takes at home, as arguments of `_layer`.

    Raises:
        AssertionError: it takes none.
    """
    own, said = backend(name), list[str]()
    for fields, ep in itertools.product(_HOME_LAYERS[own.schemes[0]], (1, 4)):
        found = fields | ({"ep": ep} if ep > 1 else {})
        found |= {"format": own.capabilities.formats[0]} if own.capabilities.formats[0] != "standard" else {}
        reasons = own.check(_layer(**found), at_home(name)).reasons
        if not reasons:
            return found
        said.append("; ".join(map(str, reasons)))
    raise AssertionError(f"{name} takes no usual layer of {own.schemes[0]} at home: {said}")


def _layer(**fields: Any) -> Problem:
    made = problem(**fields)
    if made.parallel.ep == 1 or "local_experts" in fields:
        return made
    return dataclasses.replace(made, local_experts=made.num_experts // made.parallel.ep)


def usual(name: str, **changes: Any) -> Problem:
    """A layer that a backend takes at home: of the backends for MXFP4 one of gpt-oss-20b's."""
    return _layer(**{**_home_layer(name), **changes})


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


def stock_of(release: str, name: str, capability: int) -> tuple[Any, dict[str, Any]]:
    """The class behind a backend, and the names of its file, on CUDA of a compute capability, or on a CPU if that is 0.

    Every package that the class asks for is there.
    """
    path, class_name, *_ = CLASSES[name]
    assert has_class(release, path, class_name), f"vLLM {release} has no {class_name} in {path}"
    platform = Platform(capability)
    # `CudaPlatform.support_deep_gemm`.
    deep_gemm = platform.support_deep_gemm() or (number(release) >= (0, 24) and capability // 10 == 12)
    activation = load(release, f"{FUSED_MOE}/activation.py", current_platform=platform)
    asked = ("MoEActivation", "apply_moe_activation_supported", "apply_moe_activation_masked_supported")
    names = load(
        release, path, current_platform=platform, functools=UncachedFunctools,
        is_deep_gemm_supported=lambda: deep_gemm, has_flashinfer=lambda: True,
        has_flashinfer_cutlass_fused_moe=lambda: True, has_triton_kernels=lambda: True,
        get_triton_kernels_version=lambda: None,
        # It also reads an environment variable.
        is_flashinfer_mxint4_moe_available=lambda: platform.is_device_capability_family(100),
        **{key: activation[key] for key in asked if key in activation},
    )  # fmt: skip
    found = names[class_name]
    missing = [each for each in _ASKED if not hasattr(found, each)]
    stock = f"{CLASSES[name].stock_class} of vLLM {release}"
    assert not missing, (
        f"{name}: {stock} has no {', '.join(missing)}: it is no class of experts. Name in `stock_class` the class that "
        "derives from mk.FusedMoEExpertsModular or mk.FusedMoEExpertsMonolithic"
    )
    return found, names


_ASKED = ("activation_format", "_supports_current_device", "_supports_quant_scheme", "_supports_activation")
"""What vLLM asks every class of experts, and tests compare."""


def has_class(release: str, path: str, class_name: str) -> bool:
    """Whether a file of a release has a class."""
    return exists(release, path) and class_name in [getattr(each, "name", "") for each in tree(release, path).body]


def bases_of(release: str, name: str) -> list[str]:
    """Names of the classes that a stock class is made of, in its file and in other files of experts."""
    path, class_name, *_ = CLASSES[name]
    found, waiting = [], [(path, class_name)]
    while waiting:
        file, derived = waiting.pop()
        nodes = {node.name: node for node in tree(release, file).body if isinstance(node, ast.ClassDef)}
        files = dict.fromkeys(nodes, file) | bases_elsewhere(release, file)
        for base in nodes[derived].bases:
            found.append(base.id if isinstance(base, ast.Name) else ast.unparse(base))
            waiting += [(files[found[-1]], found[-1])] if found[-1] in files else []
    return found


_WEIGHTS = {"mxfp8": "kMxfp8Static", "mxfp4": "kMxfp4Static", "wna16": "kInt4Static"}
_INPUTS: dict[ActivationPrecision, str] = {
    "mxfp8": "kMxfp8Dynamic", "fp8": "kFp8Dynamic128Sym", "mxfp4": "kMxfp4Dynamic"
}  # fmt: skip


def quant_keys(name: str, names: Mapping[str, Any]) -> tuple[Any, Any]:
    """The keys of weights and activations by which stock's oracle asks the class behind a backend."""
    own = backend(name)
    # The oracle for MXFP8 asks every class about MXFP8 activations, the one for integers about none.
    inputs = {"mxfp8": "kMxfp8Dynamic", "mxfp4": _INPUTS.get(own.activations(usual(name))), "wna16": None}
    found = inputs[own.schemes[0]]
    return names[own.stock_weight_key or _WEIGHTS[own.schemes[0]]], found and names[found]


_ORACLES = {"mxfp8": "mxfp8", "mxfp4": "mxfp4", "wna16": "int_wna16"}
_KERNELS = {"mxfp4": "Mxfp4MoeBackend", "wna16": "WNA16MoEBackend"}


def oracle_of(release: str, scheme: SchemeName, **given: Any) -> dict[str, Any]:
    """The names of stock's oracle for a scheme, in which expert classes are texts, ``module:Class``.

    Args:
        release: vLLM's version.
        scheme: the oracle's.
        given: other names that the file would have imported.
    """
    path = f"{FUSED_MOE}/oracle/{_ORACLES[scheme]}.py"
    return load(release, path, **{**_imported_classes(release, path), **given})


def _imported_classes(release: str, path: str) -> dict[str, str]:
    """Expert classes that a file imports anywhere, as ``module:Class``, by the name that it gives them."""
    found: dict[str, str] = {}
    for node in ast.walk(tree(release, path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(FUSED_MOE.replace("/", ".")):
            for each in node.names:
                stock_class, name = f"{node.module}:{each.name}", each.asname or each.name
                if "Experts" in each.name and each.name != "RoutedExperts":
                    assert found.setdefault(name, stock_class) == stock_class, f"{path}: {name} has two meanings"
    return found


@functools.cache
def stock_kernels(release: str, scheme: SchemeName) -> Mapping[str, list[str]]:
    """Of each kernel of stock's oracle for a scheme, its classes, ``module:Class``, as the oracle finds them."""
    if scheme == "mxfp8":
        # Its kernels are among those for FP8, and so are the classes of most.
        path = f"{FUSED_MOE}/oracle/fp8.py"
        fp8 = load(release, path, **_imported_classes(release, path))
        borrowed = {key: fp8[key] for key in ("Fp8MoeBackend", "backend_to_kernel_cls")}
        oracle = oracle_of(release, scheme, **borrowed)
        classes = oracle.get("_mxfp8_backend_to_kernel_cls", fp8["backend_to_kernel_cls"])
        return {each.name: classes(each) for each in oracle["_SUPPORTED_BACKENDS"]}
    oracle = oracle_of(release, scheme)
    found = {}
    for each in oracle[_KERNELS[scheme]]:
        with suppress(ValueError):  # of a member that stands for no kernel
            found[each.name] = oracle["backend_to_kernel_cls"](each)
    return found


def offered(release: str, name: str) -> bool:
    """Whether stock's oracle for the scheme knows the kernel behind a backend, and finds the backend's class for it."""
    return CLASSES[name].stock_class in stock_kernels(release, backend(name).schemes[0]).get(CLASSES[name].kernel, ())


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
