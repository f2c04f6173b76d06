"""Layers whose kernels' tensors are padded, with garbage in the padding: outputs stay what they are.

What is padded for which kernel, and what must not be in there, is in ``tests/lib/padding_checks.py``. Each layer is
built three times through the plugin's method: as it is, with garbage, and with garbage in a few rows or columns of its
own, which must show.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.gpu import backend_table, table_mxfp4, table_mxfp8, table_wna16
from tests.gpu.backend_table import Case, Table
from tests.gpu.table_mxfp4 import _OAI, _SILU, GPT_OSS, OTHERS
from tests.gpu.table_mxfp8 import SCHEME
from tests.gpu.table_wna16 import CT
from tests.lib.cases import int_scheme
from tests.lib.padding_checks import Cut, Dirty
from vllm_moe_oracle import plugin

SMALL, EVEN = (8, 2, 160, 96), (8, 2, 256, 96)
"""Experts, top-k, hidden and intermediate size: of the first, Humming pads both matrices' rows and columns, and this
project's kernels all that they ever pad but rows of an ungated first product; the second is what Marlin and Triton
take, who pad its 96 to 128."""
TOKENS = (7, 64)
MANY = (7, 513)
"""With kernels for many tokens."""


@dataclass(frozen=True)
class Padded:
    """A layer, the backend that pads it, and by how many tokens it is called."""

    backend: str
    table: Table
    case: Case
    tokens: tuple[int, ...] = TOKENS

    def __str__(self) -> str:
        return f"{self.backend}-{self.case.name}"


def integers(backend: str, case: Case, tokens: tuple[int, ...] = TOKENS) -> Padded:
    return Padded(backend, table_wna16.TABLE, case, tokens)


INT4 = int_scheme(CT, 4, 32)
ZEROS = int_scheme(CT, 4, 32, zeros=True)
CHANNEL = int_scheme(CT, 4, -1)
LAYERS = (
    integers("humming_wna16", Case("int4", INT4, *SMALL)),
    integers("humming_wna16", Case("zeros_relu2", ZEROS, *SMALL, "relu2_no_mul")),
    integers("humming_wna16", Case("int8_channel", int_scheme(CT, 8, -1), *SMALL)),
    integers("humming_wna16_grouped", Case("int4_ep2", INT4, *SMALL, ep=2)),
    Padded("humming_mxfp8", table_mxfp8.TABLE, Case("mxfp8", SCHEME, *SMALL)),
    Padded("humming_mxfp4", table_mxfp4.TABLE, Case("oai", GPT_OSS, *SMALL, **_OAI)),
    integers("marlin_wna16", Case("int4_bias", int_scheme("gptq", 4, 32), *EVEN, bias=True)),
    integers("marlin_wna16", Case("channel", CHANNEL, *EVEN)),
    integers("marlin_wna16", Case("zeros", ZEROS, *EVEN)),
    Padded("marlin_mxfp8", table_mxfp8.TABLE, Case("mxfp8", SCHEME, *EVEN)),
    Padded("marlin_mxfp4", table_mxfp4.TABLE, Case("oai", GPT_OSS, *EVEN, **_OAI)),
    integers("triton_wna16", Case("int4", INT4, *EVEN)),
    integers("triton_wna16", Case("zeros", ZEROS, *EVEN)),
    integers("triton_wna16", Case("channel", CHANNEL, *EVEN)),
    integers("hopper_wna16", Case("int4", INT4, *SMALL)),
    integers("hopper_wna16", Case("zeros_relu2", ZEROS, *SMALL, "relu2_no_mul")),
    integers("hopper_wna16", Case("channel", CHANNEL, *EVEN), MANY),
    Padded("hopper_mxfp8", table_mxfp8.TABLE, Case("relu2", SCHEME, *SMALL, "relu2_no_mul")),
    Padded("hopper_mxfp4", table_mxfp4.TABLE, Case("oai", GPT_OSS, *SMALL, **_OAI)),
    Padded("hopper_mxfp4", table_mxfp4.TABLE, Case("silu", OTHERS, *EVEN, **_SILU), MANY),
)


@pytest.fixture(scope="module", autouse=True)
def registered(one_rank: None) -> Iterator[None]:
    plugin.register()
    yield
    plugin.unregister()


def outputs(layer: Padded, checkpoint: Any, calls: dict[int, list[Any]], cut: Cut | None) -> dict[int, torch.Tensor]:
    """What the layer gives for calls by number of tokens; with no cut, of the backend's own conversion."""
    built = backend_table.build(layer.table, layer.case, checkpoint, "cuda", "auto", own=layer.backend)
    assert built.method.backend.name == layer.backend
    garbage = Dirty(built.method.backend, cut)
    if cut is not None:
        built.method.backend = garbage.installed()
    built.convert()
    assert bool(garbage.filled) == (cut is not None)
    found = {count: backend_table.outputs(built, each) for count, each in calls.items()}
    built.close()
    return found


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_garbage_in_the_padding_changes_nothing(layer: Padded) -> None:
    """To the bit, but for Humming, whose blocks add their sums to the output in any order."""
    humming = layer.backend.startswith("humming")
    checkpoint = layer.table.checkpoint(layer.case, "cuda")
    calls = {count: backend_table.drawn(layer.case, count, "cuda") for count in layer.tokens}
    rows = backend_table.rows_called(layer.case, layer.tokens)
    with backend_table.FewKernels(rows) if humming else nullcontext():
        clean = outputs(layer, checkpoint, calls, None)
        dirty = outputs(layer, checkpoint, calls, Cut())
        shown = [outputs(layer, checkpoint, calls, cut) for cut in (Cut(rows=16), Cut(columns=32))]
    for count, each in calls.items():
        mine = [backend_table.seen(layer.case, call) for call in each]
        expected = torch.cat(backend_table.reference(layer.case, checkpoint, mine))
        # Small layers have few values to average over.
        allowed = 4 / 3 * backend_table.LIMIT
        assert backend_table.relative_error(clean[count], expected) <= allowed, count
        assert backend_table.relative_error(dirty[count], expected) <= allowed, count
        assert humming or torch.equal(dirty[count], clean[count]), count
        for wrong in shown:
            assert not backend_table.relative_error(wrong[count], expected) <= 4 * allowed, count
