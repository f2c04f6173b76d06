"""Values at which MX quantization is tested: every 16-bit magnitude, every binade's edges, blocks of mixed size."""

from __future__ import annotations

from typing import Literal

import torch
from hypothesis import strategies as st
from torch import Tensor

RULES: tuple[Literal["ceil", "floor"], ...] = ("ceil", "floor")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Every positive finite number of a 16-bit format, subnormals included.
BF16 = torch.arange(1, 0x7F80, dtype=torch.int16).view(torch.bfloat16)
FP16 = torch.arange(1, 0x7C00, dtype=torch.int16).view(torch.float16)


def interesting_amax() -> Tensor:
    """float32: every power of two, 1.5 and 1.75 times it (6 is 1.5 * 2**2, 448 is 1.75 * 2**8), and their neighbors."""
    powers = torch.ldexp(torch.ones(277, dtype=torch.float64), torch.arange(-149, 128)).to(torch.float32)
    centers = torch.cat([powers, powers[30:] * 1.5, powers[30:] * 1.75])
    return torch.cat([centers, centers.nextafter(torch.tensor(torch.inf)), centers.nextafter(torch.tensor(0.0))])


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """`[1 to 3, 32 to 96]`: blocks of very different magnitude, with zeros of both signs."""
    rows, blocks = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    values = torch.randn(rows, blocks, 32, generator=generator)
    values *= torch.randint(0, 4, values.shape, generator=generator) > 0
    exponents = [draw(st.one_of(st.integers(-150, 124), st.just(-1000))) for _ in range(rows * blocks)]
    # In float64: a power of two below the smallest float32 subnormal would be zero by itself.
    exponent = torch.tensor(exponents, dtype=torch.float64).reshape(rows, blocks, 1)
    values = (values.double() * torch.exp2(exponent)).reshape(rows, blocks * 32)
    return values.to(draw(st.sampled_from(DTYPES))).nan_to_num(0.0, 1.0, -1.0)
