"""Orders MXFP4 codes for vLLM's expert kernel on x86 CPUs.

Rows are in blocks of 32. A vector instruction takes 16 rows x 2 columns: row ``32 a + 16 h + r``, column ``2 p + c``
goes to block ``a``, pair ``p``, byte ``2 r + c``, in the low nibble for ``h`` = 0. Scales are in `row_blocks` of 32.

Source: vLLM's operator ``convert_weight_packed`` (of uint8).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .nibbles import transpose_nibbles

BLOCK_ROWS = 32


def pack_row_pairs(codes: Tensor) -> Tensor:
    """Orders 4-bit codes.

    Args:
        codes: uint8 `[N, K/2]`, low nibble first; N a multiple of 32.

    Returns:
        uint8 `[N, K/2]`; every 32 rows are one block.

    Raises:
        ValueError: N is not a multiple of 32.
    """
    if remainder := codes.shape[0] % BLOCK_ROWS:
        raise ValueError(f"{codes.shape[0]} rows are not a multiple of {BLOCK_ROWS} (remainder {remainder})")
    first, second = codes.view(-1, 2, 16, codes.shape[1]).transpose(2, 3).unbind(1)
    pairs = torch.stack(transpose_nibbles(first, second), dim=-1)
    return pairs.reshape(codes.shape)
