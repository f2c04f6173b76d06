"""Values of vLLM's ``--all2all-backend``: how data-parallel ranks with expert parallelism exchange tokens.

No supported release reads the environment variable ``VLLM_ALL2ALL_BACKEND``.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import SettingError, did_you_mean
from .min_versions import vllm_at_least
from .supported import RELEASES

DEFAULT_ALL2ALL = "allgather_reducescatter"
"""vLLM's default in every supported release."""

_OPTION = "--all2all-backend"
_OLDEST = RELEASES[0]


@dataclass(frozen=True, slots=True)
class _Exchange:
    """One value of the option.

    Attributes:
        since: the first tested release that has it.
        before: the first tested release that no longer has it; "" while all later ones do.
        batched: it delivers `[experts, tokens, hidden]`, not `[tokens, hidden]`.
        row_bytes: bytes of which a hidden state must be a multiple; vLLM rounds the hidden size up. 1 for no such rule.
        rocm: vLLM runs it on AMD GPUs only, over AITER's kernels.
        unquantized: vLLM refuses to serve quantized models with it.
        hidden_sizes: the hidden sizes that it carries, ascending; vLLM rounds up to one of them. Empty for any.
        wide_ids: it delivers expert ids as int64, not as int32.
    """

    since: str = _OLDEST
    before: str = ""
    batched: bool = False
    row_bytes: int = 1
    rocm: bool = False
    unquantized: bool = False
    hidden_sizes: tuple[int, ...] = ()
    wide_ids: bool = False


_LOW_LATENCY_SIZES = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)

_EXCHANGES = {
    DEFAULT_ALL2ALL: _Exchange(),
    "deepep_high_throughput": _Exchange(row_bytes=512, wide_ids=True),
    "deepep_low_latency": _Exchange(batched=True, hidden_sizes=_LOW_LATENCY_SIZES, wide_ids=True),
    "deepep_v2": _Exchange(since="0.24.0", row_bytes=512, wide_ids=True),
    "mori": _Exchange(before="0.23.0", rocm=True),
    "mori_high_throughput": _Exchange(since="0.23.0", rocm=True),
    "mori_low_latency": _Exchange(since="0.23.0", rocm=True),
    "moonep": _Exchange(since="0.31.0", unquantized=True),
    "nixl_ep": _Exchange(batched=True, hidden_sizes=_LOW_LATENCY_SIZES, wide_ids=True),
    "flashinfer_all2allv": _Exchange(),
    "flashinfer_nvlink_two_sided": _Exchange(),
    "flashinfer_nvlink_one_sided": _Exchange(),
}

REMOVED_ALL2ALL = ("naive", "pplx")
"""Values that every supported release still takes, with a warning, for `DEFAULT_ALL2ALL`."""

BOUND_ALL2ALL = "passthrough"
"""What vLLM sets by itself for some values of ``--moe-backend``; the option refuses it."""


def all2all_names(vllm: str | None) -> tuple[str, ...]:
    """The values that a release takes and follows.

    Args:
        vllm: vLLM's version. None, or one that cannot be parsed, counts as the newest.
    """
    return tuple(name for name, each in _EXCHANGES.items() if _has(each, vllm))


def _has(exchange: _Exchange, vllm: str | None) -> bool:
    gone = exchange.before and vllm_at_least(vllm, minimum=exchange.before)
    return not gone and vllm_at_least(vllm, minimum=exchange.since)


def effective_all2all(word: str, vllm: str | None) -> str:
    """What a release makes of a value of the option: the value, or the default for one that was removed.

    Args:
        word: the value.
        vllm: vLLM's version; see `all2all_names`.

    Raises:
        SettingError: the release does not take it.
    """
    if word in REMOVED_ALL2ALL:
        return DEFAULT_ALL2ALL
    valid = all2all_names(vllm)
    if word in valid:
        return word
    if word == BOUND_ALL2ALL:
        rule = f"{word!r} is set by vLLM itself, for values of --moe-backend that exchange tokens on their own"
        raise SettingError(rule, f"Leave it out. Valid are {', '.join(valid)}", _OPTION)
    known = _EXCHANGES.get(word)
    remedy = f"{did_you_mean(word, valid)}Valid are {', '.join(valid)}"
    if known is None:
        raise SettingError(f"{word!r} is not an all-to-all of vLLM", remedy, _OPTION)
    gone = known.before and vllm_at_least(vllm, minimum=known.before)
    when = f"no longer has it: {known.before} has others" if gone else f"does not have it: it came with {known.since}"
    raise SettingError(f"{word!r}: vLLM {vllm or RELEASES[-1]} {when}", remedy, _OPTION)


def is_batched(name: str) -> bool:
    """Whether an all-to-all delivers tokens by expert, `[experts, tokens, hidden]`.

    Args:
        name: from `effective_all2all`.
    """
    return _EXCHANGES[name].batched


def delivers_wide_ids(name: str) -> bool:
    """Whether an all-to-all delivers expert ids as int64, not as int32.

    Args:
        name: any; one that is not in the table delivers what vLLM's routers make, int32.
    """
    return name in _EXCHANGES and _EXCHANGES[name].wide_ids


def why_vllm_refuses(name: str, device_kind: str, exchanges_tokens: bool, dp: int = 1, quantized: bool = True) -> str:
    """Why a server of a model with experts and an all-to-all would not start; "" if it would.

    Args:
        name: from `effective_all2all`.
        device_kind: `Device.kind`.
        exchanges_tokens: whether the all-to-all runs.
        dp: data-parallel ranks. They exchange tokens without an all-to-all, too, by collectives for different numbers
            of tokens (`all_gatherv`, `reduce_scatterv`), which vLLM's communicator for CPUs lacks.
        quantized: whether vLLM has a quantization method for the model.
    """
    exchange = _EXCHANGES[name]
    if device_kind == "cpu" and dp > 1:
        return "vLLM cannot exchange tokens between data-parallel ranks on a CPU"
    if exchange.unquantized and quantized:
        return f"vLLM serves only models in 16 bits with the all-to-all {name}"
    if exchange.rocm and exchanges_tokens and device_kind != "rocm":
        return f"vLLM runs the all-to-all {name} on AMD GPUs only"
    return ""


def rounded_hidden_size(name: str, hidden_size: int, element_bytes: int) -> int:
    """The hidden size to which vLLM rounds a layer up for an all-to-all; 0 if it is too large for it.

    Args:
        name: from `effective_all2all`.
        hidden_size: of the layer.
        element_bytes: bytes of one number of the model's dtype.
    """
    exchange = _EXCHANGES[name]
    if exchange.hidden_sizes:
        return next((size for size in exchange.hidden_sizes if size >= hidden_size), 0)
    units = -(-hidden_size * element_bytes // exchange.row_bytes)
    return units * exchange.row_bytes // element_bytes
