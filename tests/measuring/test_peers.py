"""Kernels of other projects beside the backends: how they are found, imported, skipped, converted and timed.

Stand-ins of their packages compute with torch: no test here needs a GPU or one of the packages.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from tests.lib.cases import GPT_OSS, problem
from tests.lib.fake_backends import FAST, HERE, LAYERS, MXFP4, Slowed, chosen
from vllm_moe_oracle.backends.emulation import forward
from vllm_moe_oracle.core.problem import Activation, Device, Problem
from vllm_moe_oracle.devices.catalog import known_device
from vllm_moe_oracle.errors import MeasurementError
from vllm_moe_oracle.measurements import bench_records
from vllm_moe_oracle.measuring import benchmarks, peers
from vllm_moe_oracle.measuring.peers import _private_import
from vllm_moe_oracle.measuring.peers.tokenspeed_mxfp4 import TokenspeedMxfp4
from vllm_moe_oracle.measuring.peers.triton_kernels_mxfp4 import TritonKernelsMxfp4, TritonKernelsMxfp4FourWarps
from vllm_moe_oracle.measuring.random_weights import random_experts, random_tokens

H200 = known_device("nvidia-h200")
LAYER = problem(experts=8, top_k=2, hidden_size=320, intermediate_size=192, scheme=MXFP4)
GPT_OSS_LAYER = dataclasses.replace(LAYER, activation=GPT_OSS, has_bias=True)


def with_triton(version: str) -> Device:
    return dataclasses.replace(H200, packages={**H200.packages, "triton": version})


def package(folder: Path, **files: str) -> Path:
    """A folder with the package `toy`; names have ``__`` for a folder."""
    for name, text in files.items():
        path = folder / "toy" / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


# --- Imports ----------------------------------------------------------------------------------------------------------


def test_a_private_copy_leaves_the_packages_name_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(
        tmp_path,
        init="",
        numbers="from toy.deep.other import SEVEN\nimport toy.deep.other as o\nimport toy\n"
        "def late():\n    import toy.deep.third\n    return toy.deep.third.EIGHT, toy.__name__",
        deep__other="from .third import EIGHT\nSEVEN = EIGHT - 1",
        deep__third="EIGHT = 8",
    )
    stranger = object()
    monkeypatch.setitem(sys.modules, "toy", stranger)  # type: ignore[arg-type]
    found = _private_import.find_package("toy", tmp_path)
    assert found is not None and found.has("deep.other") and not found.has("absent")
    numbers = _private_import.module(found, "numbers")
    assert numbers.SEVEN == 7 == numbers.o.SEVEN and numbers.late()[0] == 8
    assert numbers.__name__ != "toy.numbers" and numbers.__file__ == str(tmp_path / "toy" / "numbers.py")
    assert sys.modules["toy"] is stranger and "toy.deep" not in sys.modules
    assert not list(tmp_path.rglob("*.pyc")), "byte code of the copy would be the original's"
    with pytest.raises(ImportError):
        _private_import.module(found, "absent")


def test_packages_may_stay_empty(tmp_path: Path) -> None:
    package(tmp_path, __init____="", deep__leaf="X = 1")
    for name in ("toy", "toy/deep"):
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('heavy')")
    found = _private_import.find_package("toy", tmp_path)
    assert found is not None
    assert _private_import.module(found, "deep.leaf", run_parents=False).X == 1
    with pytest.raises(RuntimeError, match="heavy"):
        _private_import.module(found, "deep.leaf")


def test_a_version_names_the_distribution_and_the_sources(tmp_path: Path) -> None:
    package(tmp_path, __init____="")
    info = tmp_path / "toys-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toys\nVersion: 1.2\n")
    (info / "RECORD").write_text("toy/thing.py,,\n")
    first = _private_import.PackageFolder("toy", tmp_path / "toy").version
    assert first.startswith("toys 1.2, sources ")
    package(tmp_path, more="X = 1")
    assert _private_import.PackageFolder("toy", tmp_path / "toy").version != first


# --- What is skipped --------------------------------------------------------------------------------------------------


def test_a_missing_package_has_its_reason(tmp_path: Path) -> None:
    found = peers.discover(with_triton("3.8.0"), tmp_path)
    assert not list(found.registry) and not found.versions
    assert found.skipped["peer:triton_kernels"] == f"the package triton_kernels is not in {tmp_path}"
    assert found.skipped["peer:tokenspeed"] == f"the package tokenspeed_kernel is not in {tmp_path}"
    with pytest.raises(MeasurementError, match="is not a folder"):
        peers.discover(H200, tmp_path / "absent")


@pytest.mark.parametrize(
    ("device", "words"),
    [
        (with_triton("3.6.0"), "needs triton>=3.8; 3.6.0 is installed"),
        (dataclasses.replace(with_triton("3.8.0"), capability=100), "needs compute capability"),
        (HERE, "runs on cuda"),
    ],
    ids=["triton", "gpu", "cpu"],
)
def test_a_machine_that_does_not_fit_is_named_before_an_import(device: Device, words: str, tmp_path: Path) -> None:
    (tmp_path / "triton_kernels").mkdir()
    (tmp_path / "triton_kernels" / "matmul.py").write_text("raise SystemError")
    assert words in peers.discover(device, tmp_path).skipped["peer:triton_kernels"]


def test_another_generation_and_a_broken_package_are_skipped(tmp_path: Path) -> None:
    folder = tmp_path / "triton_kernels"
    folder.mkdir()
    (folder / "matmul_ogs.py").write_text("")
    found = peers.discover(with_triton("3.8.0"), tmp_path, [TritonKernelsMxfp4])
    assert "has no module matmul: it is another release" in found.skipped["peer:triton_kernels"]
    (folder / "matmul.py").write_text("from triton import no_such_name")
    found = peers.discover(with_triton("3.8.0"), tmp_path, [TritonKernelsMxfp4])
    assert found.skipped["peer:triton_kernels"].startswith("cannot be imported: ImportError: ")


def test_every_file_is_a_peer_and_every_listed_kernel_has_a_reason() -> None:
    names = [each.name for each in peers.peer_classes()]
    assert len(names) == len(set(names)) and all(name.startswith(bench_records.PEER_PREFIX) for name in names)
    assert {"TurboMind", "QuACK", "SGLang"} <= {each.name for each in peers.LISTED}
    assert all(each.package and each.reason for each in peers.LISTED)


# --- Layers of stand-ins ----------------------------------------------------------------------------------------------


class FunctionBuilder:
    """A builder whose experts are the function itself."""

    def from_function(self, function: Any) -> Any:
        return function


TRITON_KERNELS = {
    "matmul": """
import torch
from dataclasses import dataclass
from typing import Any
from triton_kernels.tensor import dense

@dataclass(frozen=True)
class FnSpecs:
    name: str
    fn: Any
    fn_arg_names: tuple = ()
    reduction_n: int = 1

@dataclass(frozen=True)
class FusedActivation:
    specs: Any
    fn_args: tuple = ()

@dataclass
class PrecisionConfig:
    b_mx_scale: Any
    b_microblock_size: int

def matmul(a, b, bias, a_ragged_metadata, gather_indx=None, scatter_indx=None, precision_config=None,
           fused_activation=None):
    assert precision_config.b_microblock_size == 32 and (bias is None or bias.dtype == torch.float32)
    weights, rows, start = dense(b, precision_config.b_mx_scale), [], 0
    for expert, size in enumerate(a_ragged_metadata.tolist()):
        places = slice(start, start + size)
        x = a[gather_indx[places].long()] if gather_indx is not None else a[places]
        y = x.float() @ weights[expert]
        rows.append(y if bias is None else y + bias[expert])
        start += size
    y = torch.cat(rows)
    if fused_activation is not None:
        gate, up = y[:, ::2], y[:, 1::2]
        if fused_activation.specs.name == "swiglu":
            alpha, limit = fused_activation.fn_args
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            y = gate * torch.sigmoid(alpha * gate) * (up + 1)
        else:
            assert fused_activation.specs.name == "silu" and fused_activation.specs.reduction_n == 2
            y = torch.nn.functional.silu(gate) * up
    y = y.to(torch.bfloat16)
    if scatter_indx is None:
        return y
    out = y.new_full((scatter_indx.shape[0], y.shape[1]), torch.nan)
    out[scatter_indx[:start].long()] = y
    return out
""",
    "reduce": """
import torch

def reduce(x, dim, mask, scale, y):
    product = x.float() * scale
    y.copy_((product if mask is None else torch.where(mask != 0, product, 0)).sum(dim))
    return y, None
""",
    "swiglu": "swiglu_fn = None",
    "tensor": """
import torch
from dataclasses import dataclass
from typing import Any
from tests.lib.bit_moves import undone
from vllm_moe_oracle.layouts.triton_kernels import swizzle_hopper_codes, swizzle_hopper_scales
from vllm_moe_oracle.schemes import mxfp4

UINT8, FP4 = "uint8", "fp4"

@dataclass
class Storage:
    data: Any
    layout: Any

@dataclass
class Tensor:
    storage: Any
    dtype: str
    shape: list

@dataclass
class Sorted:
    col_sum: Any
    col_sorted_indx: Any

def wrap_torch_tensor(data, dtype, shape, shape_max):
    return Tensor(Storage(data, None), dtype, shape)

def make_bitmatrix_metadata(ids, mask):
    flat, experts = ids.flatten().long(), mask.shape[1]
    order = torch.argsort(torch.where(flat < 0, experts, flat), stable=True)
    present = flat[order] >= 0
    assert mask.storage.data.dtype == torch.uint32 and mask.shape[0] == ids.shape[0]
    counts = torch.bincount(flat[flat >= 0], minlength=experts).int()
    return Sorted(counts, torch.where(present, order, -1).int())

def make_ragged_tensor_metadata(sizes, rows):
    assert sizes.dtype == torch.int32 and int(sizes.sum()) <= rows
    return sizes

def dense(b, scale):
    _, columns, rows = b.shape
    assert (b.dtype, scale.dtype) == (FP4, UINT8) and b.storage.data.stride(-2) == 1 == scale.storage.data.stride(-2)
    warps = scale.storage.layout.num_warps
    assert b.storage.data.shape[1] % 256 == 0 and b.storage.data.shape[2] % 64 == 0
    found = []
    for codes, factors in zip(b.storage.data.mT, scale.storage.data.mT):
        wide = undone(swizzle_hopper_codes, codes, (4 * codes.shape[0], codes.shape[1] // 4))
        factors = undone(swizzle_hopper_scales, factors, (32 * factors.shape[0], factors.shape[1] // 32), warps=warps)
        own = wide[:rows, :columns // 2], factors[:rows, :columns // 32]
        found.append(mxfp4.dequantize(*own, torch.float32).T)
    return found
""",
    "tensor_details/layout": """
from dataclasses import dataclass

@dataclass(frozen=True)
class HopperMXValueLayout:
    mx_axis: int
    mma_version: int

@dataclass(frozen=True)
class HopperMXScaleLayout:
    mx_axis: int
    num_warps: int
""",
    "tensor_details/dtype": "BIT = 'bit'",
}

TOKENSPEED = """
import torch
from tokenspeed_kernel.helper import dequantize

def triton_mxfp4_precomputed_moe_apply(plan, x, w, router_logits, topk_weights, topk_ids):
    assert plan["internal_activation_dtype"] == "input" and w.w13_input_layout == "concatenated" and w.ep_size == 1
    out = torch.zeros(x.shape)
    for token, slot in (topk_ids >= 0).nonzero().tolist():
        expert = int(topk_ids[token, slot])
        y = dequantize(w.w13_weight[expert], w.w13_weight_scale[expert]) @ x[token].float()
        y = y + getattr(w, "w13_weight_bias", torch.zeros(1)).expand(w.w13_weight.shape[0], -1)[expert]
        gate, up = y.chunk(2)
        limit = w.swiglu_arg.limit
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        h = gate * torch.sigmoid(w.swiglu_arg.alpha * gate) * (up + w.swiglu_beta)
        y = dequantize(w.w2_weight[expert], w.w2_weight_scale[expert]) @ h
        y = y + getattr(w, "w2_weight_bias", torch.zeros(1)).expand(w.w2_weight.shape[0], -1)[expert]
        out[token] += topk_weights[token, slot] * y
    return out.to(x.dtype)
"""


@pytest.fixture
def stand_ins(tmp_path: Path) -> Path:
    """A folder with both packages, of which only what peers use is there."""
    for name, text in TRITON_KERNELS.items():
        path = tmp_path / "triton_kernels" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    folder = tmp_path / "tokenspeed_kernel"
    (folder / "ops/moe/triton").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('must not run')")
    helper = "import torch\nfrom vllm_moe_oracle.schemes import mxfp4\n"
    (folder / "helper.py").write_text(helper + "def dequantize(q, s): return mxfp4.dequantize(q, s, torch.float32)")
    (folder / "ops/moe/triton/mxfp4.py").write_text(TOKENSPEED)
    return tmp_path


@pytest.fixture
def packing(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's kernel that packs ids into bits, which a CPU does not have."""
    from vllm.model_executor.layers.fused_moe.experts import gpt_oss_triton_kernels_moe as module

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def run(bits: Tensor, ids: Tensor, rows: int, words: int, top_k: int, **sizes: int) -> None:
                assert bits.shape == (rows, words) and ids.shape == (rows, top_k) and ids.dtype == torch.int32
                assert ids.is_contiguous() and sizes["BLOCK_SIZE_K"] >= top_k and grid == (-(-rows // 512),)

            return run

    monkeypatch.setattr(module, "pack_bitmatrix", Kernel())


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("layer", [LAYER, GPT_OSS_LAYER], ids=["silu", "gpt-oss"])
@pytest.mark.parametrize("kind", [TritonKernelsMxfp4, TritonKernelsMxfp4FourWarps, TokenspeedMxfp4])
def test_a_peer_computes_the_layer(
    kind: type[peers.PeerBackend], layer: Problem, ranks: int, stand_ins: Path, packing: None
) -> None:
    found = peers.discover(with_triton("3.8.0"), stand_ins)
    assert set(found.versions) == {each.name for each in peers.peer_classes()} and not found.skipped
    peer = found.registry[kind.name]
    assert not peer.check(layer, with_triton("3.8.0")).reasons
    layer = dataclasses.replace(layer, local_experts=layer.num_experts // ranks)
    plan = peer.plan(layer, H200)
    canonical = random_experts(layer, "cpu", layer.local_experts)
    converted = [
        peer.convert({name: each[index] for name, each in canonical.items()}, layer, plan)
        for index in range(layer.local_experts)
    ]
    tensors = {name: torch.stack([each[name] for each in converted]) for name in converted[0]}
    run = peer.build_experts(tensors, layer, plan, FunctionBuilder())  # type: ignore[arg-type]
    batch = random_tokens(dataclasses.replace(layer, local_experts=layer.num_experts), 7, "uniform", "cpu")
    expert_map, ids = None, batch.ids.int()
    if ranks > 1:
        expert_map = torch.full((layer.num_experts,), -1, dtype=torch.int32)
        expert_map[layer.local_experts :] = torch.arange(layer.local_experts, dtype=torch.int32)
        ids[3] = -1
    out, expected = torch.empty_like(batch.x), torch.empty(batch.x.shape)
    run(out, batch.x, batch.weights, ids, expert_map)
    local = ids if expert_map is None else expert_map[ids.clamp(min=0).long()].where(ids >= 0, -1)
    small = dataclasses.replace(layer, num_experts=layer.local_experts)
    forward(canonical, small, expected, batch.x, batch.weights, local)
    assert (out.float() - expected).norm() <= 5 * 2.0**-8 * expected.norm()


def test_what_a_peer_cannot_compute_is_refused() -> None:
    device = with_triton("3.8.0")
    peer = TritonKernelsMxfp4()
    for changed in (
        dataclasses.replace(LAYER, activation=Activation("silu", limit=7.0)),
        dataclasses.replace(GPT_OSS_LAYER, activation=dataclasses.replace(GPT_OSS, beta=0.5)),
    ):
        assert [each.code for each in peer.check(changed, device).reasons] == ["activation.parameters"]
    (reason,) = peer.check(dataclasses.replace(LAYER, top_k=6), device).reasons
    assert reason.code == "top_k.power_of_two" and "6" in reason.detail
    assert (
        not TokenspeedMxfp4().check(dataclasses.replace(LAYER, activation=Activation("silu", limit=7.0)), H200).reasons
    )


# --- Benchmarks -------------------------------------------------------------------------------------------------------


def fake_discovery(monkeypatch: pytest.MonkeyPatch) -> None:
    """One peer that runs on this CPU, and one that does not."""
    found = peers.FoundPeers(versions={"peer:here": "toys 1"}, skipped={"peer:away": "is not installed"})
    found.registry.add(Slowed("peer:here", 9000.0), "a test")
    monkeypatch.setattr(peers, "discover", lambda device, folder=None: found)


def test_peers_are_timed_beside_backends_and_are_never_the_choice(
    backends: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slowed("slow", 1.0, lambda tokens: 20e-3)
    backends(slow, Slowed("other", 2.0, lambda tokens: 20e-3))
    fake_discovery(monkeypatch)
    options = benchmarks.BenchOptions((4,), replays=3, stock=(), peers=True)
    (record,) = benchmarks.bench([LAYERS["mxfp8"]], HERE, chosen(tmp_path), options)
    assert set(record.us) == {"slow", "other", "peer:here"} == set(record.errors) and not record.failures
    assert record.us["peer:here"] < record.us["slow"]
    assert record.choice is not None and record.choice.backend == "slow"
    best = min(record.us["slow"], record.us["other"])
    assert record.choice.behind_best == pytest.approx(record.us["slow"] / best - 1, abs=1e-3)
    # What `tune --import` would store, from which choices are made.
    assert {each.backend for each in record.samples("uniform")} == {"slow", "other"}
    (record,) = benchmarks.bench([LAYERS["mxfp8"]], HERE, chosen(tmp_path), dataclasses.replace(options, peers=False))
    assert set(record.us) == {"slow", "other"}


def test_a_wrong_peer_is_a_failure(
    backends: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backends(FAST)
    found = peers.FoundPeers(versions={"peer:wrong": "toys 1"})
    found.registry.add(Slowed("peer:wrong", 9000.0, fault="numbers"), "a test")
    monkeypatch.setattr(peers, "discover", lambda device, folder=None: found)
    options = benchmarks.BenchOptions((4,), replays=3, stock=(), peers=True)
    (record,) = benchmarks.bench([LAYERS["mxfp8"]], HERE, chosen(tmp_path), options)
    assert "relative error" in record.failures["peer:wrong"] and "peer:wrong" not in record.us


def test_conditions_keep_versions_and_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_discovery(monkeypatch)
    options = benchmarks.BenchOptions((4,), peers=True)
    data = json.loads(
        msgspec.json.encode(benchmarks.conditions(HERE, options, "c", benchmarks.find_peers(HERE, options)))
    )
    assert data["peers"]["timed"] == {"peer:here": "toys 1"}
    assert data["peers"]["skipped"] == {"peer:away": "is not installed"}
    assert {"name", "package", "reason"} == set(data["peers"]["listed"][0])
    assert "peers" not in benchmarks.conditions(HERE, benchmarks.BenchOptions((4,)), "c")
