"""Bytes for tests of code layouts."""

from __future__ import annotations

import itertools

import torch


def every_byte_value() -> torch.Tensor:
    """Fours of bytes: each of the four takes all values while the others are random. uint8 `[4 * 256 * 8, 4]`."""
    generator = torch.Generator().manual_seed(0)
    four = torch.randint(0, 256, (4 * 256 * 8, 4), dtype=torch.uint8, generator=generator)
    for index, (byte, value) in enumerate(itertools.product(range(4), range(256))):
        four[8 * index : 8 * index + 8, byte] = value
    return four
