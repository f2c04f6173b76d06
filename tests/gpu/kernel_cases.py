"""Random canonical MoE weights, calls, and a float32 reference for the kernels' GPU tests.

Shares no code with `vllm_moe_oracle.kernels` or `vllm_moe_oracle.layouts`: weights are built from their values' bits
with tables and arithmetic of this file's own, and the layer is a plain loop over slots' experts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
UNIT = {dtype: torch.finfo(dtype).eps / 12**0.5 for dtype in (torch.bfloat16, torch.float16)}
"""Root mean square of a rounding, relative to the number, at most: that of a number just above a power of two."""


def e4m3_table() -> torch.Tensor:
    """The 256 values of e4m3fn from its definition: bias 7, subnormals, no infinities."""
    values = []
    for code in range(256):
        exponent, mantissa = code >> 3 & 15, code & 7
        value = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        values.append(-value if code & 128 else value)
    return torch.tensor(values, dtype=torch.float64)


@dataclass(frozen=True)
class Case:
    """One layer to test. group 0: one scale per row; spread: exponents of the e8m0 scales (low, high)."""

    name: str
    format: str
    group: int = 32
    activation: str = "silu"
    zero_points: bool = False
    bias: bool = False
    experts: int = 8
    top_k: int = 2
    hidden: int = 256
    inner: int = 128
    dtype: torch.dtype = torch.bfloat16
    limit: float | None = None
    spread: tuple[int, int] = (110, 124)

    @property
    def gated(self) -> bool:
        return self.activation != "relu2"


@dataclass
class Layer:
    """Canonical tensors per projection ("w13", "w2") and the same matrices in float32, as the format defines them."""

    codes: dict[str, torch.Tensor] = field(default_factory=dict)
    scales: dict[str, torch.Tensor] = field(default_factory=dict)
    zeros: dict[str, torch.Tensor | None] = field(default_factory=dict)
    bias: dict[str, torch.Tensor | None] = field(default_factory=dict)
    matrix: dict[str, torch.Tensor] = field(default_factory=dict)


def make_layer(case: Case, seed: int = 0) -> Layer:
    """Random canonical weights on the CPU: every code (NaN codes of e4m3 excepted), scales over the case's spread."""
    generator = torch.Generator().manual_seed(seed)
    layer = Layer()

    def integers(low: int, high: int, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int64)

    four = case.format in ("int4", "mxfp4")
    for which in ("w13", "w2"):
        rows, columns = (case.hidden, case.inner) if which == "w2" else (case.inner * (1 + case.gated), case.hidden)
        shape = (case.experts, rows, columns)
        codes = integers(0, 16 if four else 256, shape)
        if case.format == "mxfp8":
            codes = torch.where(codes & 127 == 127, codes - 1, codes)
        group = case.group or columns
        groups = (case.experts, rows, columns // group)
        zeros = None
        if case.format.startswith("mx"):
            scales = integers(*case.spread, groups).to(torch.uint8)
            factor = torch.exp2(scales.double() - 127)
            table = torch.tensor(E2M1 + [-v for v in E2M1], dtype=torch.float64) if four else e4m3_table()
            values = table[codes]
        else:
            middle = 8 if four else 128
            scales = ((torch.rand(groups, generator=generator) * 0.16 + 0.016) / middle).to(case.dtype)
            factor = scales.double()
            zero = torch.full(groups, middle)
            if case.zero_points:
                zero = integers(0, 2 * middle, groups)
                zero[:, :2] = torch.tensor([0, 2 * middle - 1])[None, :, None]
                zeros = zero.to(torch.uint8)
            values = (codes - zero.repeat_interleave(group, 2)).double()
        layer.matrix[which] = (values * factor.repeat_interleave(group, 2)).float()
        layer.codes[which] = (codes[..., 0::2] | codes[..., 1::2] << 4 if four else codes).to(torch.uint8)
        layer.scales[which] = scales
        layer.zeros[which] = zeros
        layer.bias[which] = torch.randn(case.experts, rows, generator=generator) if case.bias else None
    return layer


def inputs(
    case: Case, tokens: int, routing: str = "random", outliers: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, router weights and int32 ids of a call, on the GPU.

    routing: "random", all to "one" expert, some "negative" and the first token's all, or "none". outliers: 1 % of x's
    channels are 50 times larger.
    """
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, case.hidden, generator=generator)
    if outliers:
        x[:, torch.randperm(case.hidden, generator=generator)[: max(1, case.hidden // 100)]] *= 50
    ids = torch.rand(tokens, case.experts, generator=generator).argsort(1)[:, : case.top_k]
    if routing == "one":
        ids = torch.full_like(ids, case.experts - 1)
    elif routing == "negative":
        ids = torch.where(torch.rand(ids.shape, generator=generator) < 0.4, -1, ids)
        ids[0] = -1
    elif routing == "none":
        ids = torch.full_like(ids, -1)
    router = torch.rand(tokens, case.top_k, generator=generator) + 0.1
    return x.to("cuda", case.dtype), router.cuda(), ids.to("cuda", torch.int32)


def half_elsewhere(case: Case, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A map of twice the case's experts of which half are elsewhere, int32; ids of them, one of them negative, int64;
    and the local ids that these mean. On the CPU."""
    generator = torch.Generator().manual_seed(5)
    expert_map = torch.full((2 * case.experts,), -1, dtype=torch.int32)
    mine = torch.randperm(2 * case.experts, generator=generator)[: case.experts]
    expert_map[mine] = torch.arange(case.experts, dtype=torch.int32)
    ids = torch.rand(tokens, 2 * case.experts, generator=generator).argsort(1)[:, : case.top_k]
    ids[tokens // 2, 0] = -1
    return expert_map, ids, torch.where(ids >= 0, expert_map[ids.clamp(min=0)], -1)


def poisoned(nbytes: int, tokens: int) -> torch.Tensor:
    """A workspace on the GPU. As floats both bytes are NaN or huge; as integers one is negative, the other far out of
    range."""
    return torch.full((nbytes,), (0xFF, 0x7F)[tokens % 2], dtype=torch.uint8, device="cuda")


def e4m3(values: torch.Tensor) -> torch.Tensor:
    """Nearest numbers of e4m3 in float64, ties to even, of what is at most 448.

    Spaced 2**(floor(log2 |v|) - 3), at least its subnormals' spacing.
    """
    values = values.double()
    spacing = torch.exp2(torch.floor(torch.log2(values.abs().clamp(min=2.0**-6))) - 3)
    return torch.round(values / spacing) * spacing


def mxfp8_values(x: torch.Tensor) -> torch.Tensor:
    """x (float32) as MXFP8-dynamic activations: nearest e4m3 of x / 2**ceil(log2(amax / 448)), in float64, per 32."""
    groups = x.double().reshape(*x.shape[:-1], -1, 32)
    amax = groups.abs().amax(-1, keepdim=True)
    mantissa, exponent = torch.frexp(amax / 448)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(-127, 127)
    unit = torch.exp2(exponent.double())
    return (e4m3(groups / unit) * unit).float().reshape(x.shape)


def activated(case: Case, y: torch.Tensor) -> torch.Tensor:
    """The case's activation of `[m, 2 * inner]` (`[m, inner]` if not gated), in y's dtype: `[m, inner]`."""
    if case.activation == "relu2":
        return torch.relu(y) ** 2
    gate, up = y[:, : case.inner], y[:, case.inner :]
    if case.limit is not None:
        gate, up = torch.clamp(gate, max=case.limit), torch.clamp(up, -case.limit, case.limit)
    if case.activation == "swigluoai":
        return gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)
    if case.activation == "silu":
        return gate / (1 + torch.exp(-gate)) * up
    if case.activation == "gelu":
        return 0.5 * gate * (1 + torch.erf(gate / 2**0.5)) * up
    if case.activation != "gelu_tanh":
        raise ValueError(f"no formula for {case.activation!r}")
    return 0.5 * gate * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))) * up


def reference(case: Case, layer: Layer, x: torch.Tensor, router: torch.Tensor, ids: torch.Tensor, *,
              apply_router_weight_on_input: bool = False, quantize: bool = False, addend: torch.Tensor | None = None,
              slot_h: torch.Tensor | None = None) -> torch.Tensor:  # fmt: skip
    """The layer in float32 for local ids (negative: nothing), h rounded to the activations' dtype or to MXFP8.

    addend: added to the first product, by slot; slot_h: gets h by slot, where there is an expert.
    """
    rows = x.float()
    if quantize:
        rows = mxfp8_values(rows)
    out = torch.zeros_like(rows)
    w13, w2 = (layer.matrix[which].to(x.device) for which in ("w13", "w2"))
    for choice in range(ids.shape[1]):
        for expert in range(case.experts):
            picked = (ids[:, choice] == expert).nonzero()[:, 0]
            if not len(picked):
                continue
            scale = router[picked, choice].float()[:, None]
            y = (rows[picked] * scale if apply_router_weight_on_input else rows[picked]) @ w13[expert].T
            if case.bias:
                y = y + layer.bias["w13"][expert].to(x.device)
            slot = picked * ids.shape[1] + choice
            if addend is not None:
                y = y + addend[slot].float()
            h = activated(case, y)
            h = mxfp8_values(h) if quantize else h.to(x.dtype).float()
            if slot_h is not None:
                slot_h[slot] = h.to(slot_h.dtype)
            y = h @ w2[expert].T
            if case.bias:
                y = y + layer.bias["w2"][expert].to(x.device)
            out[picked] += y if apply_router_weight_on_input else y * scale
    return out


CASES = [
    Case("int4-g128", "int4", 128, hidden=384, inner=256),
    Case("int4-g64-zero-gelu", "int4", 64, "gelu", zero_points=True, hidden=320, inner=192),
    Case("int4-g32-zero-bias", "int4", 32, zero_points=True, bias=True, hidden=288, inner=96, top_k=3),
    Case("int4-g32", "int4", 32, hidden=288, inner=96, experts=16, top_k=4),
    Case("int4-row", "int4", 0, "gelu_tanh", hidden=256, inner=160),
    Case("int4-row-zero", "int4", 0, zero_points=True),
    Case("int4-g128-fp16-zero", "int4", 128, zero_points=True, dtype=torch.float16),
    Case("int8-g128-relu2", "int8", 128, "relu2", hidden=384, inner=256),
    Case("int8-g32-zero", "int8", 32, zero_points=True, hidden=288, inner=96),
    Case("int8-row", "int8", 0, hidden=256, inner=160),
    Case("int8-row-zero", "int8", 0, zero_points=True),
    Case("int8-row-fp16", "int8", 0, dtype=torch.float16),
    Case("mxfp4-swigluoai", "mxfp4", 32, "swigluoai", bias=True, limit=7.0, experts=16, top_k=4, hidden=320, inner=160),
    Case("mxfp4-fp16", "mxfp4", 32, dtype=torch.float16, hidden=256, inner=192),
    Case("mxfp8", "mxfp8", 32, experts=16, top_k=4, hidden=416, inner=224),
    Case("mxfp8-relu2", "mxfp8", 32, "relu2", hidden=352, inner=288, top_k=3),
    Case("mxfp8-wide-scales", "mxfp8", 32, spread=(100, 128)),
    Case("mxfp8-fp16", "mxfp8", 32, dtype=torch.float16, spread=(105, 116)),
    # As far apart as float16 holds every weight exactly: 24 and 22 binades within a row.
    Case("mxfp4-fp16-wide", "mxfp4", 32, dtype=torch.float16, hidden=288, inner=160, spread=(98, 123)),
    Case("mxfp8-fp16-wide", "mxfp8", 32, dtype=torch.float16, hidden=288, inner=160, spread=(94, 117)),
]


def by_name(*names: str) -> list[Case]:
    """Cases of these names."""
    return [next(case for case in CASES if case.name == name) for name in names]
