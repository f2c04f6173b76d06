"""MXFP8 layers for `backend_table` whose weights are normal numbers, as trained ones nearly are.

`hopper_mxfp8_w8a8_token` keeps one scale a row, and refuses weights of which that would lose too much: those of
`table_mxfp8`, where every code is as likely as any other, so that of millions of blocks of 32 some have small codes
only. It has rows where `MOE_ORACLE_ALLOW_ACTIVATION_QUANTIZATION=1` is set.
"""

from __future__ import annotations

import dataclasses

import torch

from tests.gpu import table_mxfp8
from tests.gpu.backend_table import Case, Checkpoint, by_name

NAMES = (
    "qwen3_silu",
    "qwen3_silu_bias",
    "nemotron_relu2",
    "nemotron_relu2_bias",
    "nemotron_relu2_tp2",
    "qwen3_swigluoai_bias",
    "qwen3_silu_ep2",
    "tiny_silu",
    "tiny_silu_ep2",
    "tiny_swigluoai",
)


def checkpoint(case: Case, device: str) -> Checkpoint:
    """`table_mxfp8`'s, but for the weights: codes of normal numbers, most blocks' largest between 224 and 448, under
    scales that go over eight binades, of 2**-16 to 2**-9. Products are about as large as there."""
    generator = torch.Generator(device=device).manual_seed(0)
    made = table_mxfp8.checkpoint(case, device)
    for which, rows in case.rows.items():
        columns = case.columns[which]
        numbers = torch.randn((case.experts, rows, columns), device=device, generator=generator)
        # `Checkpoint.matrix` reads what is here when it is asked.
        made.raw[f"{which}_weight"] = numbers.mul_(128).clamp_(-448, 448).to(torch.float8_e4m3fn)
        made.raw[f"{which}_weight_scale"] = torch.randint(
            111, 119, (case.experts, rows, columns // 32), dtype=torch.uint8, device=device, generator=generator
        )
    return made


TABLE = dataclasses.replace(
    table_mxfp8.TABLE, cases=by_name(tuple(table_mxfp8.TABLE.cases[name] for name in NAMES)), checkpoint=checkpoint
)
