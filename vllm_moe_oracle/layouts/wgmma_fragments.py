"""Orders canonical quantized weights into the storage that our kernels read, and back.

One matrix `[N, K]` becomes chunks of 64 rows x 64 K (4 bit) or 64 rows x 32 K (8 bit), 2048 bytes each, in the order
`[N/64][K/chunk][warp 4][g 8][t 4][16 bytes]`. The 16 bytes of lane `4 g + t` of warp `w` are exactly its fragment of
the register operand of `wgmma.m64nNk16` (PTX ISA, "Register Fragments for wgmma": rows `16 w + g` and
`16 w + g + 8`, columns `2 t`, `2 t + 1`, `2 t + 8`, `2 t + 9` of every 16), so a 16-byte shared-memory load needs no
exchange between lanes afterwards. The same storage serves every tile size.

Within a lane's 16 bytes, `half` is the row (g or g + 8), `k8` the column's offset by 8, `par` its parity:

* integer codes, 4 bit: word = 16 columns; nibble `4 par + 2 k8 + half`.
* e2m1: word = 16 columns; halfword `par`; its 16 bits hold code `half + 2 k8` as `operand_bits` spreads them.
* integer codes, 8 bit: word = 8 columns; byte order (half, par) = (1, 0), (0, 0), (1, 1), (0, 1), so that one mask
  isolates the two values of a register.
* e4m3: word = 8 columns; halfword `par`; its 16 bits hold the codes of both rows as `operand_bits` spreads them.

Rows of a gated w13 are interleaved in eights (gate 0..7, up 0..7, gate 8..15, ...), so a lane holds a gate value and
its up value. N is zero-padded to a multiple of 64, and K to a multiple of the chunk.

All functions take one expert's tensors on any device. Every `shuffle_*` has an `unshuffle_*` that restores each byte.
"""

from __future__ import annotations

import torch

from . import gate_up
from .nibbles import join_nibbles, split_nibbles
from .operand_bits import (
    gather_e2m1,
    gather_e2m1_float16,
    gather_e4m3,
    gather_e4m3_float16,
    spread_e2m1,
    spread_e2m1_float16,
    spread_e4m3,
    spread_e4m3_float16,
)

CHUNK_ROWS = 64
CHUNK_BYTES = 2048
_GATE_UP_PERIOD = 8
_CHUNKS_PER_PASS = 48
"""Chunks of rows that `shuffle_e2m1` and `shuffle_e4m3` process per pass, to bound temporaries."""


def chunk_columns(bits: int) -> int:
    """Columns (K) of one 2048-byte chunk of 64 rows: 64 for 4-bit codes, 32 for 8-bit codes."""
    if bits not in (4, 8):
        raise ValueError(f"codes have {bits} bits; the kernels store 4 or 8")
    return CHUNK_ROWS * 4 // bits


def padded_rows(rows: int) -> int:
    """`rows` rounded up to whole chunks."""
    return -(-rows // CHUNK_ROWS) * CHUNK_ROWS


def chunk_shape(rows: int, columns: int, bits: int) -> tuple[int, int, int]:
    """Shape `[N/64, K/chunk, 2048]` of the shuffled codes of a matrix `[rows, columns]`."""
    return padded_rows(rows) // CHUNK_ROWS, -(-columns // chunk_columns(bits)), CHUNK_BYTES


def pair_gate_up(w13: torch.Tensor) -> torch.Tensor:
    """Alternates eight gate rows with eight up rows of a w13: codes, scales or biases, `[2 I, ...]`, I a multiple of 8.

    A thread then holds both rows of a pair, which the activation takes."""
    return gate_up.interleave_gate_up(w13, _GATE_UP_PERIOD)


def unpair_gate_up(stored: torch.Tensor) -> torch.Tensor:
    """Inverse of `pair_gate_up`."""
    return gate_up.deinterleave_gate_up(stored, _GATE_UP_PERIOD)


def _pad_matrix(matrix: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    missing = (columns - matrix.shape[1], rows - matrix.shape[0])
    if missing == (0, 0):
        return matrix
    return torch.nn.functional.pad(matrix, (0, missing[0], 0, missing[1]))


def _fragments4(codes: torch.Tensor) -> torch.Tensor:
    """Codes uint8 `[N, K]` to `[N/64, K/64, warp, g, t, word, par, k8, half]`."""
    rows, columns, _ = chunk_shape(codes.shape[0], codes.shape[1], 4)
    view = _pad_matrix(codes, rows * 64, columns * 64).view(rows, 4, 2, 8, columns, 4, 2, 4, 2)
    return view.permute(0, 4, 1, 3, 7, 5, 8, 6, 2)


def _matrix4(fragments: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    padded = fragments.permute(0, 2, 8, 3, 1, 5, 7, 4, 6).reshape(fragments.shape[0] * 64, fragments.shape[1] * 64)
    return padded[:rows, :columns]


def shuffle_int4(codes: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Orders unsigned 4-bit codes, uint8 `[N, K/2]` low nibble first, into uint8 `[N/64, K/64, 2048]`."""
    nibbles = _fragments4(split_nibbles(codes)).reshape(-1, 2)
    shuffled = (nibbles[:, 0] | (nibbles[:, 1] << 4)).view(chunk_shape(codes.shape[0], codes.shape[1] * 2, 4))
    return shuffled if out is None else out.copy_(shuffled)


def unshuffle_int4(shuffled: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Inverse of `shuffle_int4`: uint8 `[rows, columns/2]`, low nibble first."""
    fragments = split_nibbles(shuffled).view(*shuffled.shape[:2], 4, 8, 4, 4, 2, 2, 2)
    return join_nibbles(_matrix4(fragments, rows, columns))


def shuffle_e2m1(codes: torch.Tensor, out: torch.Tensor | None = None, *, float16: bool = False) -> torch.Tensor:
    """Orders e2m1 codes, uint8 `[N, K/2]` low nibble first, into bit-permuted uint8 `[N/64, K/64, 2048]`.

    float16: they are decoded to float16, not to bfloat16.
    """
    spread = spread_e2m1_float16 if float16 else spread_e2m1
    rows, columns, _ = chunk_shape(codes.shape[0], codes.shape[1] * 2, 4)
    shuffled = codes.new_empty((rows, columns, CHUNK_BYTES)) if out is None else out
    # In passes: temporaries are a small multiple of a pass.
    for first in range(0, rows, _CHUNKS_PER_PASS):
        part = codes[first * CHUNK_ROWS : (first + _CHUNKS_PER_PASS) * CHUNK_ROWS]
        blocks = chunk_shape(part.shape[0], columns, 4)[0]
        # A byte holds both parities.
        view = _pad_matrix(part, blocks * 64, columns * 32).view(blocks, 4, 2, 8, columns, 4, 2, 4)
        words = spread(view.permute(0, 4, 1, 3, 7, 5, 6, 2).reshape(-1, 4))
        shuffled[first : first + blocks] = words.view(blocks, columns, CHUNK_BYTES)
    return shuffled


def unshuffle_e2m1(shuffled: torch.Tensor, rows: int, columns: int, *, float16: bool = False) -> torch.Tensor:
    """Inverse of `shuffle_e2m1`: uint8 `[rows, columns/2]`, low nibble first."""
    gather = gather_e2m1_float16 if float16 else gather_e2m1
    four = gather(shuffled.reshape(-1, 4)).view(*shuffled.shape[:2], 4, 8, 4, 4, 2, 2)
    padded = four.permute(0, 2, 7, 3, 1, 5, 6, 4).reshape(shuffled.shape[0] * 64, shuffled.shape[1] * 32)
    return padded[:rows, : columns // 2].contiguous()


def _fragments8(codes: torch.Tensor) -> torch.Tensor:
    """Codes uint8 `[N, K]` to `[N/64, K/32, warp, g, t, word, par, half]`."""
    rows, columns, _ = chunk_shape(codes.shape[0], codes.shape[1], 8)
    view = _pad_matrix(codes, rows * 64, columns * 32).view(rows, 4, 2, 8, columns, 4, 4, 2)
    return view.permute(0, 4, 1, 3, 6, 5, 7, 2)


def _matrix8(fragments: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    padded = fragments.permute(0, 2, 7, 3, 1, 5, 4, 6).reshape(fragments.shape[0] * 64, fragments.shape[1] * 32)
    return padded[:rows, :columns].contiguous()


def shuffle_int8(codes: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Orders unsigned 8-bit codes, uint8 `[N, K]`, into uint8 `[N/64, K/32, 2048]`."""
    # Half 1 is in the lower byte.
    shuffled = _fragments8(codes).flip(-1).reshape(chunk_shape(codes.shape[0], codes.shape[1], 8))
    return shuffled if out is None else out.copy_(shuffled)


def unshuffle_int8(shuffled: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Inverse of `shuffle_int8`: uint8 `[rows, columns]`."""
    fragments = shuffled.view(*shuffled.shape[:2], 4, 8, 4, 4, 2, 2).flip(-1)
    return _matrix8(fragments, rows, columns)


def shuffle_e4m3(codes: torch.Tensor, out: torch.Tensor | None = None, *, float16: bool = False) -> torch.Tensor:
    """Orders e4m3 codes, uint8 `[N, K]`, into bit-permuted uint8 `[N/64, K/32, 2048]`; float16: see `shuffle_e2m1`."""
    spread = spread_e4m3_float16 if float16 else spread_e4m3
    rows, columns, _ = chunk_shape(codes.shape[0], codes.shape[1], 8)
    shuffled = codes.new_empty((rows, columns, CHUNK_BYTES)) if out is None else out
    for first in range(0, rows, _CHUNKS_PER_PASS):
        part = _fragments8(codes[first * CHUNK_ROWS : (first + _CHUNKS_PER_PASS) * CHUNK_ROWS])
        halves = spread(part[..., 0], part[..., 1])
        shuffled[first : first + part.shape[0]] = halves.view(part.shape[0], columns, CHUNK_BYTES)
    return shuffled


def unshuffle_e4m3(shuffled: torch.Tensor, rows: int, columns: int, *, float16: bool = False) -> torch.Tensor:
    """Inverse of `shuffle_e4m3`: uint8 `[rows, columns]`."""
    gather = gather_e4m3_float16 if float16 else gather_e4m3
    codes = torch.stack(gather(shuffled.view(*shuffled.shape[:2], 4, 8, 4, 4, 2, 2)), dim=-1)
    return _matrix8(codes, rows, columns)


def mx_scale_shape(rows: int, columns: int) -> tuple[int, int, int]:
    """Shape `[N/64, K/128, 64]` of the int32 words that hold a matrix's rebased e8m0 scales."""
    return padded_rows(rows) // CHUNK_ROWS, -(-columns // 128), CHUNK_ROWS


def shuffle_mx_scales(scales: torch.Tensor, top: int = 254) -> tuple[torch.Tensor, torch.Tensor]:
    """Rebases e8m0 scales, uint8 `[N, K/32]`, per row and orders them for the kernels.

    Returns int32 words `[N/64, K/128, 64]` (one word = the four scales of a row's 128 columns; rows in the order
    `[warp 4][g 8][half 2]`) and the rows' largest scales, uint8 `[N/64 * 64]`. A stored byte is `scale - largest +
    top`, so no product of a weight and its scale leaves bfloat16's range, whatever the checkpoint's exponents are, or
    with a top of 30 float16's. A smaller top makes bytes that would be negative 0.
    """
    largest = scales.amax(dim=1)
    rebased = scales.to(torch.int16) - largest.to(torch.int16)[:, None] + top
    rebased = (rebased if top == 254 else rebased.clamp(min=0)).to(torch.uint8)
    rows, blocks, _ = mx_scale_shape(scales.shape[0], scales.shape[1] * 32)
    padded = _pad_matrix(rebased, rows * 64, blocks * 4).view(rows, 4, 2, 8, blocks, 4)
    words = padded.permute(0, 4, 1, 3, 2, 5).contiguous().view(torch.int32).view(rows, blocks, CHUNK_ROWS)
    return words, torch.nn.functional.pad(largest, (0, rows * 64 - scales.shape[0]))


MAX_E4M3_SPREAD = 11
"""The largest `scale_spread` of a row that e4m3 holds in normal numbers.

Under the row's largest scale 6 becomes 384; 11 binades below it 0.5 becomes 2**-6, the smallest normal number.
"""


def scale_spread(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Binades from a row's largest scale down to the smallest one of a block with a code that is not zero.

    Args:
        codes: e2m1, uint8 `[N, K/2]`, K a multiple of 32.
        scales: e8m0, uint8 `[N, K/32]`.

    Returns:
        int16 `[N]`, 0 for rows of zeros.
    """
    blocks = (codes & 0x77).view(torch.int64).view(codes.shape[0], -1, 2)
    below = (scales.amax(dim=1, keepdim=True) - scales).to(torch.int16)
    return below.masked_fill((blocks == 0).all(-1), 0).amax(dim=1)


def unshuffle_mx_scales(
    words: torch.Tensor, largest: torch.Tensor, rows: int, columns: int, top: int = 254
) -> torch.Tensor:
    """Inverse of `shuffle_mx_scales`: e8m0, uint8 `[rows, columns/32]`; 0 for what a smaller top made 0."""
    fragments = words.contiguous().view(torch.uint8).view(words.shape[0], words.shape[1], 4, 8, 2, 4)
    padded = fragments.permute(0, 2, 4, 3, 1, 5).reshape(words.shape[0] * 64, words.shape[1] * 4)
    rebased = padded[:rows, : columns // 32].to(torch.int16)
    scales = rebased + largest[:rows].to(torch.int16)[:, None] - top
    return (scales if top == 254 else scales.masked_fill(rebased == 0, 0)).to(torch.uint8)


def group_scale_shape(rows: int, groups: int) -> tuple[int, int, int]:
    """Shape `[N/64, groups, 32]` of the int32 words that hold a matrix's 16-bit group scales."""
    return padded_rows(rows) // CHUNK_ROWS, groups, CHUNK_ROWS // 2


def shuffle_group_scales(scales: torch.Tensor) -> torch.Tensor:
    """Orders 16-bit values per row and group, `[N, groups]`, into int32 words `[N/64, groups, 32]`.

    One word = the values of rows `16 warp + g` (low half) and `16 warp + g + 8` (high half), in the order
    `[warp 4][g 8]`. Used for bfloat16 and float16 scales and for zero points converted to 16-bit floats.
    """
    if scales.element_size() != 2:
        raise ValueError(f"group scales have dtype {scales.dtype}; the kernels read 16-bit values")
    rows = padded_rows(scales.shape[0]) // CHUNK_ROWS
    bits = _pad_matrix(scales.contiguous().view(torch.int16), rows * 64, scales.shape[1])
    fragments = bits.view(rows, 4, 2, 8, scales.shape[1]).permute(0, 4, 1, 3, 2).contiguous()
    return fragments.view(torch.int32).view(rows, scales.shape[1], CHUNK_ROWS // 2)


def unshuffle_group_scales(words: torch.Tensor, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Inverse of `shuffle_group_scales`: `[rows, groups]` of `dtype`."""
    fragments = words.contiguous().view(torch.int16).view(words.shape[0], words.shape[1], 4, 8, 2)
    bits = fragments.permute(0, 2, 4, 3, 1).reshape(words.shape[0] * 64, words.shape[1])
    return bits[:rows].contiguous().view(dtype)
