"""Independent references for the package's numbers; nothing here imports the package, or shares code with it.

Formats are decoded from their definitions, bit field by bit field, in float64. An MoE layer is a loop over tokens and
experts. `greedy` runs a whole checkpoint with transformers in float32 on weights that this file decoded.

Definitions: OCP Microscaling Formats (MX) Specification v1.0 for e8m0, e2m1 and blocks of 32; e4m3 is its e4m3, the
variant without infinities that torch calls float8_e4m3fn.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

Array = npt.NDArray[np.float64]
Codes = npt.NDArray[np.uint8]
Rule = Literal["ceil", "floor"]

BLOCK = 32


# --- Codes to numbers ------------------------------------------------------------------------------------------------


def e4m3_value(code: int) -> float:
    """Value of one e4m3 code (0 to 255): sign, 4 bits of exponent with bias 7, 3 of mantissa; 0x7f and 0xff are NaN."""
    sign, exponent, mantissa = code >> 7, code >> 3 & 0xF, code & 0x7
    if exponent == 0xF and mantissa == 0x7:
        return math.nan
    value = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -value if sign else value


def e8m0_value(code: int) -> float:
    """Value of one e8m0 code (0 to 255): 2 ** (code - 127), with no sign and no zero; 255 is NaN."""
    return math.nan if code == 0xFF else 2.0 ** (code - 127)


def e2m1_value(code: int) -> float:
    """Value of one e2m1 code (0 to 15): sign, 2 bits of exponent with bias 1, 1 of mantissa; all are finite."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 0x3, code & 0x1
    value = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -value if sign else value


_E4M3 = np.array([e4m3_value(code) for code in range(256)])
_E8M0 = np.array([e8m0_value(code) for code in range(256)])
_E2M1 = np.array([e2m1_value(code) for code in range(16)])


def decode_e4m3(codes: Codes) -> Array:
    """uint8 e4m3 codes of any shape to float64."""
    return _E4M3[_as_bytes(codes)]


def decode_e8m0(codes: Codes) -> Array:
    """uint8 e8m0 codes of any shape to float64."""
    return _E8M0[_as_bytes(codes)]


def decode_e2m1(packed: Codes) -> Array:
    """uint8 [..., K / 2], two e2m1 codes in a byte with the low nibble first, to float64 [..., K]."""
    packed = _as_bytes(packed)
    return _E2M1[np.stack([packed & 0xF, packed >> 4], axis=-1).reshape(*packed.shape[:-1], 2 * packed.shape[-1])]


def dequantize(values: Array, scales: Array, block: int = BLOCK) -> Array:
    """Decoded values [..., K] times decoded scales [..., K / block] to float64 [..., K]."""
    if values.shape != (*scales.shape[:-1], scales.shape[-1] * block):
        raise ValueError(f"values {values.shape} and scales {scales.shape} do not fit for blocks of {block}")
    return values * np.repeat(scales, block, axis=-1)


def dequantize_mxfp8(codes: Codes, scales: Codes) -> Array:
    """uint8 e4m3 codes [..., K] and uint8 e8m0 scales [..., K / 32] to float64 [..., K]."""
    return dequantize(decode_e4m3(codes), decode_e8m0(scales))


def dequantize_mxfp4(packed: Codes, scales: Codes) -> Array:
    """uint8 e2m1 pairs [..., K / 2] and uint8 e8m0 scales [..., K / 32] to float64 [..., K]."""
    return dequantize(decode_e2m1(packed), decode_e8m0(scales))


# --- Numbers to codes ------------------------------------------------------------------------------------------------


def _nearest(values: npt.ArrayLike, table: Array, sign: int) -> Codes:
    """The nearest code of each value, ties to the even code, saturating at both ends; NaN becomes the code after the
    table's last.

    Of the two neighbors in `table`, the finite values of codes without the bit `sign`, which ascend with the code.
    """
    values = np.asarray(values, dtype=np.float64)
    size = np.minimum(np.abs(values), table[-1])
    above = np.clip(np.searchsorted(table, size), 1, len(table) - 1)
    down, up = size - table[above - 1], table[above] - size
    even = np.where(above % 2 == 0, above, above - 1)
    codes = np.where(down < up, above - 1, np.where(up < down, above, even))
    codes = np.where(np.isnan(values), len(table), codes).astype(np.uint8)
    return codes | np.where(np.signbit(values), sign, 0).astype(np.uint8)


def encode_e4m3(values: npt.ArrayLike) -> Codes:
    """The nearest e4m3 code of each value, ties to the even code, saturating at +-448; NaN becomes 0x7f."""
    return _nearest(values, _E4M3[:127], 0x80)


def encode_e2m1(values: npt.ArrayLike) -> Codes:
    """The nearest e2m1 code of each value, one a byte, ties to the even code, saturating at +-6; NaN is refused."""
    if np.isnan(values).any():
        raise ValueError("e2m1 has no NaN")
    return _nearest(values, _E2M1[:8], 8)


def _exponent(amax: npt.ArrayLike, largest: float, rule: Rule) -> npt.NDArray[np.int64]:
    """The exponents of blocks' scales from their largest magnitudes, from -127 to 127; a block of zeros has -127.

    "ceil": the smallest with amax / 2**exponent <= largest; "floor": floor(log2(amax)) - floor(log2(largest)).
    """
    if rule not in ("ceil", "floor"):
        raise ValueError(f"rule is {rule!r}; valid: ceil, floor")
    # amax = mantissa * 2**exponent with 0.5 <= mantissa < 1: exact, unlike a logarithm or a quotient.
    mantissa, exponent = np.frexp(np.asarray(amax, dtype=np.float64))
    limit, power = np.frexp(largest)
    chosen = exponent.astype(np.int64) - int(power)
    if rule == "ceil":
        chosen += mantissa > limit
    return np.where(mantissa == 0.0, -127, np.clip(chosen, -127, 127))


def mxfp8_exponent(amax: npt.ArrayLike, rule: Rule = "ceil") -> npt.NDArray[np.int64]:
    """The exponents of scales, from the largest magnitude of each block; e4m3's largest number is 448.

    By the rule "ceil" no element saturates; by "floor", as in the MX specification's example, those above 448 do.
    """
    return _exponent(amax, 448.0, rule)


def _quantize(
    values: npt.ArrayLike, exponent: Callable[[Array], npt.NDArray[np.int64]], encode: Callable[[Array], Codes]
) -> tuple[Codes, Codes]:
    """[..., K] to one code a byte, uint8 [..., K], and uint8 e8m0 scales [..., K / 32]."""
    values = np.asarray(values, dtype=np.float64)
    if values.shape[-1] % BLOCK:
        raise ValueError(f"K is {values.shape[-1]}: not a multiple of {BLOCK}")
    blocks = values.reshape(*values.shape[:-1], values.shape[-1] // BLOCK, BLOCK)
    exponents = exponent(np.abs(blocks).max(axis=-1, initial=0.0))
    codes = encode(blocks * np.exp2(-exponents.astype(np.float64))[..., None]).reshape(values.shape)
    return codes, (exponents + 127).astype(np.uint8)


def quantize_mxfp8(values: npt.ArrayLike, rule: Rule = "ceil") -> tuple[Codes, Codes]:
    """[..., K] to uint8 e4m3 codes [..., K] and uint8 e8m0 scales [..., K / 32]."""
    return _quantize(values, partial(mxfp8_exponent, rule=rule), encode_e4m3)


def mxfp4_exponent(amax: npt.ArrayLike, rule: Rule = "ceil") -> npt.NDArray[np.int64]:
    """As `mxfp8_exponent`; e2m1's largest number is 6."""
    return _exponent(amax, 6.0, rule)


def quantize_mxfp4(values: npt.ArrayLike, rule: Rule = "ceil") -> tuple[Codes, Codes]:
    """[..., K] to uint8 e2m1 pairs [..., K / 2], low nibble first, and uint8 e8m0 scales [..., K / 32]."""
    codes, scales = _quantize(values, partial(mxfp4_exponent, rule=rule), encode_e2m1)
    return codes[..., 0::2] + 16 * codes[..., 1::2], scales


def fake_quantize_mxfp4(values: npt.ArrayLike, rule: Rule = "ceil") -> Array:
    """[..., K] rounded to what MXFP4 can hold, as float64."""
    return dequantize_mxfp4(*quantize_mxfp4(values, rule))


def fake_quantize_mxfp8(values: npt.ArrayLike, rule: Rule = "ceil") -> Array:
    """[..., K] rounded to what MXFP8 can hold, as float64."""
    return dequantize_mxfp8(*quantize_mxfp8(values, rule))


# --- Integer weights -------------------------------------------------------------------------------------------------

Integers = npt.NDArray[np.int64]

# Where AutoAWQ puts each column of a word, counted from the word's lowest bits; 8 bit as vLLM's awq_pack does it.
_AWQ_POSITIONS = {4: (0, 4, 1, 5, 2, 6, 3, 7), 8: (0, 2, 1, 3)}


def _place(
    packing: str, bits: int, row: Integers, column: Integers, zeros: bool
) -> tuple[Integers, Integers, Integers]:
    """Where the file has the code of a row (output) and column (input): index of a word in two dimensions, position in
    it. Zero points have a group in place of the column, and are packed by rows in every packed format."""
    if packing == "compressed-tensors-int":
        return row, column, np.zeros_like(row + column)
    in_word = (8 if packing == "moe_wna16" else 32) // bits
    if packing == "awq":
        return column, row // in_word, np.array(_AWQ_POSITIONS[bits])[row % in_word]
    if packing in ("gptq", "gptq_v2"):
        return (column, row // in_word, row % in_word) if zeros else (column // in_word, row, column % in_word)
    if packing in ("moe_wna16", "compressed-tensors"):
        return (row // in_word, column, row % in_word) if zeros else (row, column // in_word, column % in_word)
    raise ValueError(f"unknown packing {packing!r}")


def pack_integers(packing: str, bits: int, codes: Integers, zeros: bool = False) -> npt.NDArray[Any]:
    """The unsigned codes [N, K] of one matrix, or its zero points [N, G], as a file of that packing holds them.

    Returns int32; uint8 for "moe_wna16"; int8 in two's complement for "compressed-tensors-int", 2 ** (bits - 1) smaller
    than the codes. Zero points of "gptq" are stored one less, word by word: 2 ** 32 - 1 stands for 0, then 0.
    """
    if packing == "compressed-tensors-int":
        return (codes - 2 ** (bits - 1)).astype(np.int8)
    row, column = np.indices(codes.shape, dtype=np.int64)
    first, second, position = _place(packing, bits, row, column, zeros)
    words = np.zeros((int(first.max()) + 1, int(second.max()) + 1), dtype=np.int64)
    np.add.at(words, (first, second), codes * 2 ** (bits * position))
    if packing == "moe_wna16":
        return words.astype(np.uint8)
    if zeros and packing == "gptq":
        words = (words - sum(2 ** (bits * place) for place in range(32 // bits))) % 2**32
    return words.astype(np.uint32).view(np.int32)


def dequantize_integers(
    codes: Integers, scales: Array, bits: int, zeros: Integers | None = None, groups: Integers | None = None
) -> Array:
    """Codes [N, K], scales [N, G] and zero points [N, G] (none: 2 ** (bits - 1)) to float64 [N, K].

    groups: [K], the group of each input (GPTQ's g_idx); without, groups are of neighbors and of equal size.
    """
    inputs = codes.shape[1]
    if groups is None:
        groups = np.arange(inputs) // (inputs // scales.shape[1])
    middle = np.full(scales.shape, 2 ** (bits - 1)) if zeros is None else zeros
    return (codes - middle[:, groups]).astype(np.float64) * scales[:, groups]


# --- One MoE layer ---------------------------------------------------------------------------------------------------


def _sigmoid(x: Array) -> Array:
    # exp of a negative number only: no overflow at either end.
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, small) / (1.0 + small)


def _silu(x: Array) -> Array:
    return x * _sigmoid(x)


def _gelu(x: Array) -> Array:
    erf = np.vectorize(math.erf, otypes=[np.float64])
    return x * 0.5 * (1.0 + erf(x / math.sqrt(2.0)))


def _gelu_tanh(x: Array) -> Array:
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def _relu2(x: Array) -> Array:
    return np.square(np.maximum(x, 0.0))


_PLAIN = {"silu": _silu, "gelu": _gelu, "gelu_tanh": _gelu_tanh, "relu2": _relu2}


def is_gated(activation: str) -> bool:
    """Whether w13 holds gate and up (vLLM's names: all but those that end in `_no_mul`)."""
    return not activation.endswith("_no_mul")


_SWIGLUOAI = {"swigluoai": (1.702, 1.0, 7.0), "swigluoai_uninterleave": (1.0, 0.0, None)}
"""Alpha, beta and limit where none are given."""


def activate(
    activation: str,
    y: Array,
    *,
    alpha: float | None = None,
    beta: float | None = None,
    limit: float | None = None,
    interleaved: bool = False,
) -> Array:
    """The activation between the two products; names and meaning are those of vLLM's `MoEActivation`.

    y: [..., 2 I] for a gated activation, gate then up as halves (or alternating, gate first, if `interleaved`);
        [..., I] for a `_no_mul` one. Returns [..., I].
    Gated: act(gate) * up. `silu` with a limit clamps gate from above and up on both sides, as vLLM's kernel does.
    `swigluoai` and `swigluoai_uninterleave` are gate * sigmoid(alpha * gate) * (up + beta) on clamped halves. For the
    former vLLM has alpha 1.702, beta 1 and limit 7; for the latter alpha is 1 and beta 0 unless given, and a limit is
    required. `situ` (Kimi-K3) is alpha * tanh(gate / alpha) * sigmoid(gate) * beta * tanh(up / beta), where beta is
    vLLM's linear beta and may be missing. `swiglustep` (Step-3.5) clamps silu(gate) from above and up on both sides, to
    7 unless given. Raises ValueError for anything else, or a parameter that the activation has no use for.
    """
    name = activation.removesuffix("_no_mul")
    if not is_gated(activation):
        if name not in _PLAIN or (alpha, beta, limit) != (None, None, None):
            raise ValueError(f"activation {activation!r} with alpha={alpha}, beta={beta}, limit={limit}")
        return _PLAIN[name](y)
    half = y.shape[-1] // 2
    gate, up = (y[..., ::2], y[..., 1::2]) if interleaved else (y[..., :half], y[..., half:])
    if name == "situ" and alpha is not None and limit is None:
        up = up if beta is None else np.float64(beta) * np.tanh(up / beta)
        return np.float64(alpha) * np.tanh(gate / alpha) * _sigmoid(gate) * up
    if name == "swiglustep" and (alpha, beta) == (None, None):
        limit = 7.0 if limit is None else limit
        return np.minimum(gate * _sigmoid(gate), limit) * np.clip(up, -limit, limit)
    if name in _SWIGLUOAI:
        given = zip((alpha, beta, limit), _SWIGLUOAI[name], strict=True)
        alpha, beta, limit = (default if number is None else number for number, default in given)
        if limit is None:
            raise ValueError("swigluoai_uninterleave needs a limit")
    elif name not in _PLAIN or (alpha, beta) != (None, None) or (limit is not None and name != "silu"):
        raise ValueError(f"activation {activation!r} with alpha={alpha}, beta={beta}, limit={limit}")
    if limit is not None:
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    if name.startswith("swigluoai"):
        return gate * _sigmoid(np.asarray(alpha, np.float64) * gate) * (up + np.asarray(beta, np.float64))
    return _PLAIN[name](gate) * up


def moe(
    x: npt.ArrayLike,
    w13: npt.ArrayLike,
    w2: npt.ArrayLike,
    topk_ids: npt.ArrayLike,
    topk_weights: npt.ArrayLike,
    *,
    activation: str = "silu",
    alpha: float | None = None,
    beta: float | None = None,
    limit: float | None = None,
    b13: npt.ArrayLike | None = None,
    b2: npt.ArrayLike | None = None,
    router_weight_on_input: bool = False,
    expert_map: npt.ArrayLike | None = None,
    quantize_activations: Rule | None = None,
) -> Array:
    """One MoE layer on dequantized weights, in float64: y[t] = sum over k of weight[t, k] * expert[ids[t, k]](x[t]).

    x: [T, H]; w13: [E, 2 I, H] (gate then up) or [E, I, H] for a non-gated activation; w2: [E, H, I];
    topk_ids: [T, K], global expert numbers, -1 for a slot that holds no expert; topk_weights: [T, K];
    b13: [E, 2 I or I]; b2: [E, H], weighted by the router like the product that it is added to.
    router_weight_on_input: the weight multiplies x (and so acts through the activation) and not the output.
    expert_map: [global experts] -> index into w13 and w2, or -1 for an expert that lives on another rank and adds
        nothing here. Without it, global numbers are the indices.
    quantize_activations: rounds the inputs of both products to MXFP8 with scales by this rule, as a kernel does that
        multiplies MXFP8 by MXFP8. A router weight on the input is applied before.
    Returns [T, H].
    """
    x, w13, w2, topk_weights = (np.asarray(a, dtype=np.float64) for a in (x, w13, w2, topk_weights))
    ids = np.asarray(topk_ids, dtype=np.int64)
    experts, rows, hidden = w13.shape
    intermediate = rows // 2 if is_gated(activation) else rows
    if x.shape[1:] != (hidden,) or w2.shape != (experts, hidden, intermediate):
        raise ValueError(f"x {x.shape}, w13 {w13.shape} and w2 {w2.shape} do not fit for {activation!r}")
    if ids.shape != topk_weights.shape or len(ids) != len(x):
        raise ValueError(f"x {x.shape}, topk_ids {ids.shape} and topk_weights {topk_weights.shape} do not fit")
    local = np.arange(experts) if expert_map is None else np.asarray(expert_map, dtype=np.int64)
    first_bias = np.zeros((experts, rows)) if b13 is None else np.asarray(b13, dtype=np.float64)
    second_bias = np.zeros((experts, hidden)) if b2 is None else np.asarray(b2, dtype=np.float64)

    def rounded(a: Array) -> Array:
        return a if quantize_activations is None else fake_quantize_mxfp8(a, quantize_activations)

    y = np.zeros_like(x)
    for token in range(ids.shape[0]):
        for slot in range(ids.shape[1]):
            expert = -1 if ids[token, slot] < 0 else local[ids[token, slot]]
            if expert < 0:
                continue
            weight = topk_weights[token, slot]
            state = x[token] * weight if router_weight_on_input else x[token]
            first = w13[expert] @ rounded(state) + first_bias[expert]
            h = activate(activation, first, alpha=alpha, beta=beta, limit=limit)
            second = w2[expert] @ rounded(h) + second_bias[expert]
            y[token] += second if router_weight_on_input else second * weight
    return y


# --- A whole checkpoint ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Continuation:
    """A prompt continued greedily.

    tokens: the generated ids; logits: float32 [len(prompt) + len(tokens), V], row i predicts token i + 1.
    """

    prompt: list[int]
    tokens: list[int]
    logits: npt.NDArray[np.float32]

    @property
    def logprobs(self) -> Array:
        """[len(prompt) + len(tokens), V] natural logarithms of the probabilities."""
        logits = self.logits.astype(np.float64)
        shifted = logits - logits.max(axis=-1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))

    @property
    def token_logprobs(self) -> Array:
        """[len(tokens)] logprob of each generated token, as an HTTP completion with logprobs reports it."""
        start = len(self.prompt) - 1
        return self.logprobs[np.arange(start, start + len(self.tokens)), self.tokens]

    @property
    def margins(self) -> Array:
        """[len(tokens)] by how much each generated token's logit led the second best."""
        start = len(self.prompt) - 1
        best = np.sort(self.logits[start : start + len(self.tokens)].astype(np.float64), axis=-1)
        return best[:, -1] - best[:, -2]


def read_weights(checkpoint: Path | str) -> dict[str, npt.NDArray[Any]]:
    """All tensors of model.safetensors, MXFP8 and MXFP4 ones dequantized (their scales are gone), as float32.

    Exact: e4m3 or e2m1 times a power of two fits into float32, unless the exponent leaves its range. gpt-oss's
    `_blocks` [E, N, K / 32, 16] and `_scales` become the [E, K, N] that transformers has under the plain name.
    Raises ValueError for an e4m3 tensor without scales.
    """
    import torch
    from safetensors import safe_open

    weights: dict[str, npt.NDArray[Any]] = {}
    with safe_open(str(Path(checkpoint, "model.safetensors")), framework="pt") as file:
        names = set(file.keys())
        for name in sorted(names):
            tensor = file.get_tensor(name)
            if name.endswith((".weight_scale", "_scales")):
                continue
            if name.endswith("_blocks"):
                scales = file.get_tensor(f"{name.removesuffix('_blocks')}_scales").numpy()
                codes = tensor.numpy().reshape(*scales.shape[:2], 16 * scales.shape[2])
                values = dequantize_mxfp4(codes, scales).astype(np.float32)
                weights[name.removesuffix("_blocks")] = np.ascontiguousarray(values.swapaxes(1, 2))
            elif tensor.dtype == torch.uint8:
                plain = name.removesuffix("_packed")
                values = dequantize_mxfp4(tensor.numpy(), file.get_tensor(f"{plain}_scale").numpy())
                weights[plain] = values.astype(np.float32)
            elif tensor.dtype == torch.float8_e4m3fn:
                if f"{name}_scale" not in names:
                    raise ValueError(f"{checkpoint}: {name} is e4m3 and {name}_scale is missing")
                scales = file.get_tensor(f"{name}_scale")
                codes = tensor.view(torch.uint8).numpy()
                weights[name] = dequantize_mxfp8(codes, scales.view(torch.uint8).numpy()).astype(np.float32)
            else:
                weights[name] = tensor.float().numpy()
    return weights


def load_transformers(
    checkpoint: Path | str, *, quantize_activations: Rule | None = None, **experts: Any
) -> torch.nn.Module:
    """The checkpoint as a float32 transformers model on the CPU, with weights that `read_weights` decoded.

    quantize_activations: experts' inputs and intermediate states are rounded to MXFP8 by this rule, and nothing else
        changes.
    experts: `activation` and its parameters, as of `moe`, in place of the model's own.

    With any of these, or where experts have biases that the architecture does not, `moe` computes them. Only for gated
    SiLU experts whose own class has no biases.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    checkpoint = Path(checkpoint)
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    config.pop("quantization_config", None)
    config["dtype"] = "float32"
    with tempfile.TemporaryDirectory() as folder:
        # transformers has its own loaders for checkpoints that name a quantization: it must see plain float32.
        Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
        # Layers that draft: transformers' models have none.
        drafts = f"model.layers.{config['num_hidden_layers']}."
        tensors = {
            name: torch.from_numpy(array)
            for name, array in read_weights(checkpoint).items()
            if not name.startswith(drafts)
        }
        biases = {name: tensors.pop(name).numpy() for name in list(tensors) if _EXPERT_BIAS.search(name)}
        save_file(tensors, Path(folder, "model.safetensors"), metadata={"format": "pt"})
        if (checkpoint / "generation_config.json").exists():
            shutil.copy(checkpoint / "generation_config.json", folder)
        model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    wrong = {key: names for key, names in report.items() if names}
    if wrong:
        raise ValueError(f"{checkpoint}: transformers did not load every tensor: {wrong}")
    model.eval()
    if biases or experts or quantize_activations is not None:
        _replace_experts(model, biases, {**experts, "quantize_activations": quantize_activations})
    return model


_EXPERT_BIAS = re.compile(r"\.experts\.\d+\.(gate|up|down)_proj\.bias$")


def _replace_experts(model: torch.nn.Module, biases: dict[str, npt.NDArray[Any]], options: dict[str, Any]) -> None:
    found = 0
    for name, module in model.named_modules():
        w13, w2 = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
        if getattr(w13, "ndim", 0) != 3 or getattr(w2, "ndim", 0) != 3:
            continue
        act = getattr(getattr(module, "act_fn", None), "__class__", type(None)).__name__
        if hasattr(module, "gate_up_proj_bias") or act not in ("SiLU", "SiLUActivation"):
            raise ValueError(f"{name}: only gated SiLU experts without biases are known here, not {act}")
        if biases:
            gate, up, down = (
                np.stack([biases[f"{name}.{expert}.{part}_proj.bias"] for expert in range(len(w2))])
                for part in ("gate", "up", "down")
            )
            options = {**options, "b13": np.concatenate([gate, up], 1), "b2": down}
        module.forward = partial(_experts_forward, w13.detach().numpy(), w2.detach().numpy(), options)
        found += 1
    if not found:
        raise ValueError("the model has no experts stored as gate_up_proj [E, 2 I, H] and down_proj [E, H, I]")


def _experts_forward(
    w13: npt.NDArray[np.float32],
    w2: npt.NDArray[np.float32],
    options: dict[str, Any],
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    import torch

    y = moe(hidden_states.numpy(), w13, w2, top_k_index.numpy(), top_k_weights.float().numpy(), **options)
    return torch.from_numpy(y).to(hidden_states.dtype)


def greedy(model: torch.nn.Module, prompt: Sequence[int], max_new_tokens: int = 0) -> Continuation:
    """Continues one prompt greedily, to exactly `max_new_tokens` tokens (an end token does not stop it).

    The whole sequence is computed anew for each token: no cache that could be wrong.
    """
    import torch

    tokens = list(prompt)
    with torch.no_grad():
        for step in range(max_new_tokens + 1):
            logits = model(torch.tensor([tokens]), use_cache=False).logits[0]
            if step < max_new_tokens:
                tokens.append(int(logits[-1].argmax()))
    return Continuation(list(prompt), tokens[len(prompt) :], logits.float().numpy())


def transformers_logits(
    checkpoint: Path | str, prompts: Sequence[Sequence[int]], *, max_new_tokens: int
) -> list[Continuation]:
    """`load_transformers` and `greedy` for each of `prompts` (token ids)."""
    model = load_transformers(checkpoint)
    return [greedy(model, prompt, max_new_tokens) for prompt in prompts]


def _as_bytes(codes: Codes) -> Codes:
    codes = np.asarray(codes)
    if codes.dtype != np.uint8:
        raise TypeError(f"codes are {codes.dtype}: expected uint8")
    return codes
