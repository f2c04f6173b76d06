"""The kernels for weights and activations in fp8 on a GPU, each against arithmetic that shares no code with them.

Codes and scales must be equal. Products are checked on the very codes that they read, and against sums as Hopper's
matrix unit adds them (`lossy`): one rounding to the activations' dtype (UNIT) is all that may be between the two.

The unit adds 32 products and the sum so far at a time. It cuts each of these 33 numbers off 13 bits behind the point of
the largest of them, and the new sum 13 bits behind its own (arXiv 2511.10909): with the bit before the point, 14 bits.
How much is lost so depends on the numbers. A product of two e4m3 numbers has up to 8 bits, 7 of them behind the leading
one: within six binades of the largest number it loses nothing; one of e2m1's numbers has two bits less, and two binades
more. A sum over K columns of products of either sign is sqrt(K) times as large as they are, 5.7 binades for 2880: most
products lose nothing, or little, which no formula of K alone knows. Such a formula (`sums_of`) takes every one of them
for cut anywhere, and is an upper bound; it serves whole layers, where the rounding of h to e4m3 is several times more.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from tests.gpu.fp8_reference import codes_of, error, reference, scales_of
from tests.gpu.kernel_cases import UNIT, Case, Layer, activated, e4m3, half_elsewhere, inputs, make_layer, poisoned
from vllm_moe_oracle.kernels import fp8_moe, fp8_quantize
from vllm_moe_oracle.kernels.fp8_weights import Fp8Matrix, Fp8Weights, pack_fp8_expert
from vllm_moe_oracle.kernels.weights import PackedWeights, allocate_weights, pack_expert

_BASE = Case("oai", "mxfp4", 32, "swigluoai", bias=True, limit=7.0, experts=16, top_k=4, hidden=320, inner=160)
CASES = (
    _BASE,
    Case("silu", "mxfp4", 32, "silu", experts=8, top_k=2, hidden=256, inner=192),
    Case("gelu-narrow", "mxfp4", 32, "gelu", bias=True, experts=8, top_k=3, hidden=96, inner=32),
    Case("gelu-tanh", "mxfp4", 32, "gelu_tanh", experts=8, top_k=2, hidden=544, inner=416),
    replace(_BASE, name="long", experts=4, top_k=2, hidden=2880, inner=2880),
    Case("mxfp8-gelu-fp16", "mxfp8", 32, "gelu_tanh", experts=8, top_k=2, hidden=544, inner=416, dtype=torch.float16),
    Case("mxfp8-silu", "mxfp8", 32, "silu", experts=16, top_k=4, hidden=416, inner=224),
    Case("mxfp8-relu2", "mxfp8", 32, "relu2", bias=True, experts=8, top_k=3, hidden=352, inner=288),
)
CASES = tuple(replace(case, spread=(114, 122) if case.format == "mxfp4" else (112, 116)) for case in CASES)
Weights = Fp8Weights | PackedWeights
_layers: dict[str, tuple[Layer, Weights]] = {}


def layer_of(case: Case) -> tuple[Layer, Weights]:
    """The case's layer, canonical and stored."""
    if case.name not in _layers and case.format == "mxfp4":
        layer = make_layer(case)
        packed = allocate_weights(case.format, case.experts, case.hidden, case.inner, bias=case.bias, device="cuda")
        for which, e in itertools.product(("w13", "w2"), range(case.experts)):
            bias = layer.bias[which]
            pack_expert(packed, which, e, layer.codes[which][e].cuda(), layer.scales[which][e].cuda(), None,
                        None if bias is None else bias[e].cuda())  # fmt: skip
        _layers[case.name] = layer, packed
    if case.name not in _layers:
        layer = make_layer(case)
        matrices = []
        for which in ("w13", "w2"):
            bias = layer.bias[which]
            made = [
                pack_fp8_expert(which, codes_of(case, layer, which)[e].cuda(), layer.scales[which][e].cuda(),
                               None if bias is None else bias[e].cuda(), case.gated)
                for e in range(case.experts)
            ]  # fmt: skip
            codes, scales, biases = zip(*made, strict=True)
            matrices.append(
                Fp8Matrix(torch.stack(codes), torch.stack(scales), None if bias is None else torch.stack(biases))
            )
        _layers[case.name] = layer, Fp8Weights(matrices[0], matrices[1], case.dtype, case.gated)
    return _layers[case.name]


def call(case: Case, weights: Weights, x: torch.Tensor, router: torch.Tensor, ids: torch.Tensor,
         **options: object) -> torch.Tensor:  # fmt: skip
    """fused_moe_fp8 with poisoned workspace and output."""
    workspace = poisoned(fp8_moe.workspace_bytes(weights, *ids.shape), ids.shape[0])
    out = torch.full_like(x, float("nan"))
    fp8_moe.fused_moe_fp8(x, weights, router, ids, activation=case.activation, limit=case.limit, workspace=workspace,
                          out=out, **options)  # fmt: skip
    return out


def lossy(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """x @ matrix.T as the matrix unit adds it up, float64 `[m, n]`.

    x: e4m3 codes, `[m, K]`. matrix: `[n, K]`, its rows held as e4m3 with a power of two each, which for MXFP8 may lose
    subnormal bits. A product's exponent is the sum of its factors', of which subnormal ones have the least normal one.
    """
    x, matrix = x.double(), matrix.double()
    factor = torch.exp2(torch.ceil(torch.log2(matrix.abs().amax(-1, keepdim=True) / 448)))
    codes = e4m3(matrix / factor)

    def exponent(values: torch.Tensor, least: int) -> torch.Tensor:
        """That of zeros is that of nothing."""
        found = torch.floor(torch.log2(values.abs().clamp(min=2.0**least)))
        return torch.where(values == 0, -100.0, found)

    def cut(values: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
        bit = torch.exp2(exponent - 13)
        return torch.trunc(values / bit) * bit

    of_x, of_codes = exponent(x, -6), exponent(codes, -6)
    total = torch.zeros(x.shape[0], codes.shape[0], dtype=torch.float64, device=x.device)
    for k in range(0, x.shape[1], 32):
        step = slice(k, k + 32)
        largest = (of_x[:, None, step] + of_codes[None, :, step]).amax(-1)
        largest = torch.maximum(largest, exponent(total, -100))
        total = cut(x[:, None, step] * codes[None, :, step], largest[..., None]).sum(-1) + cut(total, largest)
        total = cut(total, exponent(total, -100))
    return total * factor.T


def tolerance(case: Case) -> float:
    """Of a layer against its reference: roundings to the dtype, the sums of both products, and two roundings of h to
    e4m3 that need not agree: numbers that differ in the last bit may have different codes, or a row another scale. A
    code's spacing is between 2**-4 and 2**-3 of the number, so a rounding's root mean square at most 2**-3 / sqrt(12).
    Rows of MXFP8 may lose 2**-13 each, and a square has twice the error.
    """
    lost = 3 * 2.0**-13 if case.format == "mxfp8" else 0.0
    sums = (2 if case.gated else 3) * sums_of(max(case.hidden, case.inner))
    return 2 * UNIT[case.dtype] + sums + lost + 2**0.5 * 2.0**-3 / 12**0.5


def sums_of(columns: int) -> float:
    """Root mean square error of a product's sums, relative to theirs, at most.

    Of products of either sign, mean squares add up. What is cut off a number lies between nothing and a bit that is at
    most 2**-13 of the largest number, whose mean square is no more than that of the sum with its 32 products added: of
    the whole sum, at most. A third of its square, then, for each product, and for the sum before and after each 32.
    """
    return (columns * 34 / 32 / 3) ** 0.5 * 2.0**-13


def check(case: Case, out: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.isfinite(out).all()
    if not expected.any():
        assert not out.any()
        return
    found = error(out, expected)
    print(f"{case.name} {out.shape[0]} tokens: {found:.2e} of {tolerance(case):.2e}")
    assert found <= tolerance(case)


def precise(case: Case, x: torch.Tensor, weights: Weights) -> tuple[torch.Tensor, Weights]:
    """Activations and weights for float16 results, where the kernels have them."""
    return (x.half(), replace(weights, dtype=torch.float16)) if case.format == "mxfp8" else (x, weights)


def in_order(case: Case, codes: torch.Tensor) -> torch.Tensor:
    """Codes `[m, K]` with their columns in order. For MXFP4, 16 are stored as 2t + 1, 2t + 9, 2t, 2t + 8 for each t."""
    if case.format == "mxfp8":
        return codes
    places = [column for t in range(4) for column in (2 * t + 1, 2 * t + 9, 2 * t, 2 * t + 8)]
    ordered = torch.empty_like(codes).unflatten(-1, (-1, 16))
    ordered[..., places] = codes.unflatten(-1, (-1, 16))
    return ordered.flatten(-2)


def compare(name: str, found: torch.Tensor, summed: torch.Tensor, exact: torch.Tensor) -> None:
    """A product's 16-bit results against float64 with the matrix unit's sums, and, to be told, with exact ones."""
    measured, allowed = error(found, summed), UNIT[found.dtype]
    print(
        f"{name} {measured:.2e} of {allowed:.2e}; sums {error(summed, exact):.2e}, with both {error(found, exact):.2e}"
    )
    assert measured <= allowed


@pytest.mark.parametrize("case", [case for case in CASES if case.format == "mxfp8"], ids=lambda case: case.name)
def test_weights_are_folded_as_on_a_cpu(case: Case) -> None:
    layer, weights = layer_of(case)
    for which, matrix in (("w13", weights.w13), ("w2", weights.w2)):
        codes, scales, _ = pack_fp8_expert(
            which, codes_of(case, layer, which)[0], layer.scales[which][0], None, case.gated
        )
        assert torch.equal(matrix.codes[0].view(torch.uint8).cpu(), codes.view(torch.uint8))
        assert torch.equal(matrix.row_scale[0].cpu(), scales)


@pytest.mark.parametrize("tokens", (1, 3, 17, 65, 129, 513, 2200))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_matches_reference(case: Case, tokens: int) -> None:
    layer, weights = layer_of(case)
    x, router, ids = inputs(case, tokens)
    out = call(case, weights, x, router, ids)
    check(case, out, reference(case, layer, x, router, ids))
    assert torch.equal(out, call(case, weights, x, router, ids))


def test_no_tokens() -> None:
    _, weights = layer_of(CASES[0])
    x, router, ids = inputs(CASES[0], 1)
    assert call(CASES[0], weights, x[:0], router[:0], ids[:0]).shape == (0, CASES[0].hidden)


@pytest.mark.parametrize("routing", ("one", "negative", "none"))
@pytest.mark.parametrize("tokens", (3, 129, 700))
@pytest.mark.parametrize("case", CASES[:2], ids=lambda case: case.name)
def test_degenerate_routings(case: Case, tokens: int, routing: str) -> None:
    layer, weights = layer_of(case)
    x, router, ids = inputs(case, tokens, routing)
    check(case, call(case, weights, x, router, ids), reference(case, layer, x, router, ids))


def test_every_number_of_tokens_of_a_block() -> None:
    case = CASES[0]
    layer, weights = layer_of(case)
    for tokens in (31, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 321):
        x, router, ids = inputs(case, tokens)
        ids = torch.arange(case.top_k, device="cuda", dtype=torch.int32).expand(tokens, -1).contiguous()
        check(case, call(case, weights, x, router, ids), reference(case, layer, x, router, ids))


def test_expert_map_and_weights_on_input() -> None:
    case = CASES[0]
    layer, weights = layer_of(case)
    x, router, _ = inputs(case, 300)
    expert_map, ids, local = (each.cuda() for each in half_elsewhere(case, 300))
    out = call(case, weights, x, router, ids, expert_map=expert_map)
    check(case, out, reference(case, layer, x, router, local))
    out = call(case, weights, x, router, local.int(), apply_router_weight_on_input=True)
    check(case, out, reference(case, layer, x, router, local, apply_router_weight_on_input=True))


def quantize(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, ordered: torch.Tensor, totals: torch.Tensor,
             *, gather: bool, format: str) -> None:  # fmt: skip
    """`quantize_rows` of two choices a token."""
    slots, columns = codes.shape
    block, rows, warps = fp8_quantize.launch_shape(columns)
    fp8_quantize.quantize_rows[(-(-slots // rows),)](
        x, codes, scales, ordered, totals, slots, columns, columns, TOP_K=2, GATHER=gather, EP=16, BLOCK=block,
        ROWS=rows, PDL=False, FRAGMENT_ORDER=format == "mxfp4" or None, num_warps=warps,
    )  # fmt: skip


@pytest.mark.parametrize("format", ("mxfp8", "mxfp4"))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("columns", (32, 96, 736, 2880, 5120, 14336))
def test_rows_are_quantized_to_the_bit(columns: int, dtype: torch.dtype, format: str) -> None:
    generator = torch.Generator().manual_seed(columns)
    x = torch.randn(40, columns, generator=generator) * torch.logspace(-6, 4, 40)[:, None]
    x[3] = 0
    x[5] = 1
    x = x.to("cuda", dtype)
    ordered = torch.randperm(80, generator=generator).to("cuda", torch.int32)
    totals = torch.tensor([30, 20, 0, 25] + [0] * 12, dtype=torch.int32, device="cuda")
    codes = torch.full((80, columns), 0x7F, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    scales = torch.full((80,), -7.0, device="cuda")
    quantize(x, codes, scales, ordered, totals, gather=True, format=format)
    picked = x[(ordered[:75] // 2).long()].float()
    amax = picked.abs().amax(1)
    scale, inverse = scales_of(amax)
    assert torch.equal(scales[:75], scale) and (scales[75:] == -7).all()
    found = in_order(replace(CASES[0], format=format), codes[:75].float().double())
    assert torch.equal(found, e4m3((picked * inverse[:, None]).clamp(-448, 448)))
    assert (codes[75:].view(torch.uint8) == 0x7F).all()
    # In the order of positions, where what was never written may be anything, the same rows become the same codes.
    stale = torch.full((5, columns), float("nan"), dtype=dtype, device="cuda")
    again, again_scales = torch.empty_like(codes), torch.empty_like(scales)
    quantize(torch.cat((picked.to(dtype), stale)), again, again_scales, ordered, totals, gather=False, format=format)
    assert torch.equal(again[:75].view(torch.uint8), codes[:75].view(torch.uint8))
    assert torch.equal(again_scales[:75], scales[:75])


@pytest.mark.parametrize("bad", (float("nan"), float("inf")))
def test_what_is_not_finite_is_not_hidden(bad: float) -> None:
    case = CASES[1]
    _, weights = layer_of(case)
    x, router, ids = inputs(case, 40)
    clean = call(case, weights, x, router, ids)
    x[7, 3] = bad
    out = call(case, weights, x, router, ids)
    assert not torch.isfinite(out[7]).any()
    others = torch.arange(40, device="cuda") != 7
    assert torch.equal(out[others], clean[others])


@pytest.mark.parametrize("case", [case for case in CASES if case.name in ("oai", "long")], ids=lambda case: case.name)
def test_second_product_on_the_codes_that_it_reads(case: Case) -> None:
    """Nothing but one rounding is between the kernel and the matrix unit's sums here."""
    layer, weights = layer_of(case)
    x, router, ids = inputs(case, 300)
    x, weights = precise(case, x, weights)
    workspace = torch.empty(fp8_moe.workspace_bytes(weights, *ids.shape), dtype=torch.uint8, device="cuda")
    fp8_moe.fused_moe_fp8(x, weights, router, ids, activation=case.activation, limit=case.limit, workspace=workspace,
                          out=torch.empty_like(x))  # fmt: skip
    parts = fp8_moe._buffers(weights, ids.shape[0], ids.shape[1], workspace)
    slots = ids.numel()
    h, scales = parts["codes"][: slots * case.inner].view(slots, case.inner).double(), parts["scales"].double()[:, None]
    h = in_order(case, h)
    partial = parts["wide"][: slots * case.hidden].view(slots, case.hidden)
    ordered = parts["sorted"].long()
    experts = ids.flatten()[ordered].long()
    found, summed, exact = [], [], []
    for expert in range(case.experts):
        mine = experts == expert
        matrix, bias = layer.matrix["w2"][expert].cuda().double(), layer.bias["w2"][expert].cuda()
        factor = router.flatten()[ordered[mine]].double()[:, None]
        exact.append((h[mine] @ matrix.T * scales[mine] + bias) * factor)
        summed.append((lossy(h[mine], matrix) * scales[mine] + bias) * factor)
        found.append(partial[ordered[mine]])
    compare(f"{case.name}: second product", torch.cat(found), torch.cat(summed), torch.cat(exact))


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.name in ("silu", "long", "mxfp8-silu", "mxfp8-relu2")],
    ids=lambda case: case.name,
)  # fmt: skip
def test_first_product_on_the_codes_that_it_reads(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    """As above, after the activation."""
    layer, weights = layer_of(case)
    x, router, ids = inputs(case, 300)
    x, weights = precise(case, x, weights)
    seen: list[torch.Tensor] = []
    original = fp8_quantize.quantize_rows

    class Watched:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            def run(source: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, ordered: torch.Tensor,
                    *rest: object, **options: object) -> None:  # fmt: skip
                if not options["GATHER"]:
                    seen.extend(each.clone() for each in (source, codes, scales, ordered))
                original[grid](source, codes, scales, ordered, *rest, **options)

            return run

    monkeypatch.setattr(fp8_quantize, "quantize_rows", Watched())
    call(case, weights, x, router, ids)
    wide, codes, scales, ordered = seen
    slots = ids.numel()
    rows, scales = codes[: slots * case.hidden].view(slots, case.hidden).double(), scales.double()[:, None]
    rows = in_order(case, rows)
    experts = ids.flatten()[ordered.long()].long()
    found = wide[: slots * case.inner].view(slots, case.inner)
    exact = torch.zeros(slots, case.inner, dtype=torch.float64, device="cuda")
    summed = torch.zeros_like(exact)
    for expert in range(case.experts):
        mine = experts == expert
        matrix = layer.matrix["w13"][expert].cuda().double()
        bias = layer.bias["w13"][expert].cuda() if case.bias else 0.0
        exact[mine] = activated(case, rows[mine] @ matrix.T * scales[mine] + bias)
        summed[mine] = activated(case, lossy(rows[mine], matrix) * scales[mine] + bias)
    compare(f"{case.name}: first product", found, summed, exact)


@pytest.mark.parametrize("case", (*CASES[:2], *CASES[-2:]), ids=lambda case: case.name)
def test_a_token_does_not_depend_on_its_company(case: Case) -> None:
    _, weights = layer_of(case)
    x, router, ids = inputs(case, 257)
    alone = call(case, weights, x[:1], router[:1], ids[:1])
    for tokens in (4, 16, 64, 257):
        out = call(case, weights, x[:tokens], router[:tokens], ids[:tokens])
        assert torch.equal(out[:1], alone)


def test_a_graph_replays_the_same_bits() -> None:
    case = CASES[0]
    _, weights = layer_of(case)
    x, router, ids = inputs(case, 200)
    expected = call(case, weights, x, router, ids)
    workspace = torch.empty(fp8_moe.workspace_bytes(weights, *ids.shape), dtype=torch.uint8, device="cuda")
    out = torch.empty_like(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fp8_moe.fused_moe_fp8(x, weights, router, ids, activation=case.activation, limit=case.limit,
                              workspace=workspace, out=out)  # fmt: skip
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)
