"""TurboMind's peers. A stand-in of its package computes with torch: no test here needs a GPU or the package."""

from __future__ import annotations

import dataclasses
import importlib.machinery
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.lib import peer_layers
from tests.lib.cases import GPT_OSS, INT4_G128, problem
from tests.lib.fake_backends import MXFP4
from vllm_moe_oracle.core.problem import Activation, Problem
from vllm_moe_oracle.devices.catalog import known_device
from vllm_moe_oracle.measuring import peers
from vllm_moe_oracle.measuring.peers import _private_import
from vllm_moe_oracle.measuring.peers.turbomind_int4 import TurboMindInt4
from vllm_moe_oracle.measuring.peers.turbomind_mxfp4 import TurboMindMxfp4, TurboMindMxfp4Fp8

H200 = known_device("nvidia-h200")
LAYER = problem(experts=8, top_k=2, hidden_size=256, intermediate_size=384, scheme=MXFP4)
INT4 = dataclasses.replace(LAYER, scheme=INT4_G128)
INT4_ASYMMETRIC = dataclasses.replace(LAYER, scheme=dataclasses.replace(INT4_G128, group_size=64, zero_points=True))

PACKAGE = {
    "__init__": "raise RuntimeError('must not run')",
    "turbomind/__init__": "raise RuntimeError('must not run')",
    "turbomind/_turbomind": """
import contextlib
import torch

seen = []

def from_dlpack(tensor):
    assert tensor.is_contiguous()
    return tensor

def create_device_context(stream_ptr):
    assert stream_ptr == 0
    return contextlib.nullcontext()

def invokeMoeCombine(out, src, scales, en2f, experts_per_token):
    top_k, tokens = en2f.shape
    assert scales.shape == en2f.shape and scales.dtype == torch.float32 and en2f.dtype == torch.int32
    assert experts_per_token == top_k and src.shape[0] == top_k * tokens
    rows = src.float()[en2f.clamp(min=0).long()] * scales[:, :, None]
    out.copy_(torch.where(en2f[:, :, None] >= 0, rows, 0).sum(0))
""",
    "turbomind/weight_format": """
import torch
from . import _tm
from vllm_moe_oracle.schemes import mxfp4

class CompressedTensorFormat:
    def __init__(self, *, block_in):
        self.block_in = block_in

    def dense(self, weight, scales, zeros=None):
        assert weight.dtype == torch.int32 and scales.dtype == torch.bfloat16
        codes = torch.stack([weight >> shift & 15 for shift in range(0, 32, 4)], -1).flatten(-2)
        zeros = torch.full_like(scales, 8) if zeros is None else zeros
        assert codes.shape[-1] == scales.shape[-1] * self.block_in and zeros.shape == scales.shape
        spread = [each.float().repeat_interleave(self.block_in, -1) for each in (zeros, scales)]
        return (codes - spread[0]) * spread[1]

class MXFP4Format:
    def dense(self, weight, scales):
        assert weight.shape == (*scales.shape, 16)
        return mxfp4.dequantize(weight.flatten(-2), scales, torch.float32)
""",
    "turbomind/linear": """
import torch
from dataclasses import dataclass
from . import _tm

@dataclass
class Weight:
    experts: list
    silu: bool

class Linear:
    def get_weight_plan(self, *, weight_format, dtype, input_dtype, grouped, fusion_type):
        assert grouped and dtype == torch.bfloat16 and input_dtype in (None, torch.float8_e4m3fn)
        return weight_format, fusion_type

    def prepare_weight(self, weight, *, plan, **rest):
        assert plan[1] is None
        return Weight(self._dense(plan, weight, rest), False)

    def fuse_weight(self, weight, *, plan, **rest):
        assert plan[1] == "silu"
        halves = [self._dense(plan, weight[half], {k: v[half] for k, v in rest.items()}) for half in (0, 1)]
        return Weight([torch.cat(pair) for pair in zip(*halves)], True)

    def _dense(self, plan, weight, rest):
        return [plan[0].dense(each, **{k: v[at] for k, v in rest.items()}) for at, each in enumerate(weight)]

    def tune(self, x, weight, *, offsets, indices, input_scales):
        _tm.seen.append(x.shape[0])
        return (x.shape[0], weight.silu), None, None

    def forward_moe(self, x, weight, *, exec_plan, offsets, indices, input_scales):
        assert exec_plan == (x.shape[0], weight.silu) and offsets.shape == (len(weight.experts) + 1,)
        assert offsets.dtype == torch.int32 and (indices is None or indices.dtype == torch.int32)
        gathered = x if indices is None else x[indices.long()]
        out = torch.full((gathered.shape[0], weight.experts[0].shape[0] // (1 + weight.silu)), torch.nan)
        for expert, (start, end) in enumerate(zip(offsets.tolist(), offsets.tolist()[1:])):
            y = gathered[start:end].float() @ weight.experts[expert].T
            out[start:end] = torch.nn.functional.silu(y.chunk(2, -1)[0]) * y.chunk(2, -1)[1] if weight.silu else y
        return out.to(torch.bfloat16), None

linear = Linear()

def get_linear():
    return linear
""",
}


def sort_slots(ids: Tensor, weights: Tensor, expert_map: Tensor | None, experts: int) -> object:
    """What the kernel that sorts does, which needs a GPU; see test_peers_sort.py."""
    from vllm_moe_oracle.measuring.peers._by_expert import SortedSlots

    local = ids if expert_map is None else expert_map[ids.clamp(min=0).long()].where(ids >= 0, -1)
    flat, (count, top_k) = local.flatten().long(), ids.shape
    order = torch.argsort(torch.where(flat < 0, experts, flat), stable=True)[: int((flat >= 0).sum())]
    rows, tokens = torch.full_like(flat, -1), torch.zeros_like(flat)
    rows[order], tokens[: len(order)] = torch.arange(len(order)), order // top_k
    counts = torch.bincount(flat[flat >= 0], minlength=experts).cumsum(0)
    offsets = torch.cat((torch.zeros(1), counts))
    by_choice = rows.view(count, top_k).T.contiguous()
    return SortedSlots(tokens.int(), offsets.int(), by_choice.int(), weights.T.contiguous())


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the stand-in."""
    from vllm_moe_oracle.measuring.peers import _by_expert

    monkeypatch.setattr(_by_expert, "sort_slots", sort_slots)
    for name, text in PACKAGE.items():
        path = tmp_path / "lmdeploy" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("kind", "layer"),
    [(TurboMindInt4, INT4), (TurboMindInt4, INT4_ASYMMETRIC), (TurboMindMxfp4, LAYER), (TurboMindMxfp4Fp8, LAYER)],
    ids=["int4", "zero points", "mxfp4", "fp8"],
)
def test_a_peer_computes_the_layer(kind: type[peers.PeerBackend], layer: Problem, ranks: int, package: Path) -> None:
    found = peers.discover(H200, package, [TurboMindInt4, TurboMindMxfp4, TurboMindMxfp4Fp8])
    assert set(found.versions) == {"peer:turbomind_int4", "peer:turbomind", "peer:turbomind_a8"}
    peer_layers.assert_computes(found.registry[kind.name], layer, ranks, H200)
    # Both products were tuned, with 7 tokens and 14 slots.
    assert kind(package).module("turbomind._turbomind").seen == [7, 14]


def test_without_tokens_nothing_is_called(package: Path) -> None:
    peer = peers.discover(H200, package, [TurboMindInt4]).registry[TurboMindInt4.name]
    plan = peer.plan(INT4, H200)
    tensors = {
        "w13": torch.zeros(8, 768, 128, dtype=torch.uint8), "w13_scale": torch.ones(8, 768, 2, dtype=torch.bfloat16),
        "w2": torch.zeros(8, 256, 192, dtype=torch.uint8), "w2_scale": torch.ones(8, 256, 3, dtype=torch.bfloat16),
    }  # fmt: skip
    run = peer.build_experts(tensors, INT4, plan, peer_layers.FunctionBuilder())  # type: ignore[arg-type]
    none = torch.empty(0, 256, dtype=torch.bfloat16)
    run(none, none, torch.empty(0, 2), torch.empty(0, 2, dtype=torch.int32), None)


def test_the_extension_of_this_python_is_found(package: Path) -> None:
    folder = package / "lmdeploy" / "turbomind"
    (folder / "_turbomind.py").unlink()
    (folder / "_turbomind.cpython-30-x86_64-linux-gnu.so").write_bytes(b"")
    found = peers.discover(H200, package, [TurboMindMxfp4])
    assert "cannot be imported: ModuleNotFoundError" in found.skipped["peer:turbomind"]
    (folder / f"_turbomind{importlib.machinery.EXTENSION_SUFFIXES[0]}").write_bytes(b"no library")
    name = _private_import.find_package("lmdeploy", package)
    assert name is not None and name.has("turbomind._turbomind")
    found = peers.discover(H200, package, [TurboMindMxfp4])
    assert "cannot be imported: ImportError" in found.skipped["peer:turbomind"]


def test_what_a_peer_cannot_compute_is_refused() -> None:
    changes: dict[str, dict[str, object]] = {
        "top_k.compiled": {"top_k": 3},
        "shape.minimum": {"intermediate_size": 64},
        "activation.parameters": {"activation": Activation("silu", limit=7.0)},
    }
    for code, change in changes.items():
        for kind in (TurboMindInt4, TurboMindMxfp4):
            layer = dataclasses.replace(INT4 if kind is TurboMindInt4 else LAYER, **change)  # type: ignore[arg-type]
            layer = dataclasses.replace(layer, scheme=dataclasses.replace(layer.scheme, group_size=32))
            assert code in {each.code for each in kind().check(layer, H200).reasons}
    assert TurboMindMxfp4().check(dataclasses.replace(LAYER, activation=GPT_OSS, has_bias=True), H200).reasons
    assert not TurboMindMxfp4().check(dataclasses.replace(LAYER, intermediate_size=192), H200).reasons
    assert TurboMindMxfp4Fp8().check(dataclasses.replace(LAYER, intermediate_size=192), H200).reasons
