"""Names by which vLLM asks a compressed-tensors config about the matrices of a layer's experts.

Stock's `get_moe_method` asks about expert 0's gate, up and down. Up to 0.31 it calls them ``gate_proj``, ``up_proj``
and ``down_proj`` for every model. From 0.32 on it uses the names in the model's code (``ckpt_names``), where ``None``
stands for the gate of experts without one. This project's method for integers is asked first. It uses the names in the
model's code as soon as a release has them, without the ``None``.
"""

from __future__ import annotations

from typing import NamedTuple

from .min_versions import vllm_at_least

_GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")
_W1_W3_W2 = ("w1", "w3", "w2")
_NON_GATED = ("up_proj", "None", "down_proj")

_STOCK_USES_CKPT_NAMES = "0.32.0"
_CKPT_NAMES = {
    "mixtral": (_W1_W3_W2, "0.25.1"),
    "minimax_m2": (_W1_W3_W2, "0.25.1"),
    "phimoe": (_W1_W3_W2, "0.25.1"),
    "lfm2_moe": (_W1_W3_W2, "0.26.0"),
    "nemotron_h": (_NON_GATED, "0.26.0"),
    "nemotron_h_puzzle": (_NON_GATED, "0.26.0"),
    "deepseek_v4": (_W1_W3_W2, "0.32.0"),
    "deepseek_v41": (_W1_W3_W2, "0.32.0"),
}
"""Names of gate, up and down in the code of a model type, and the first release that has them. All other model types
have `_GATE_UP_DOWN`."""

_MIN_WIDTH_SINCE = "0.27.1"
"""First release with ``min_moe_intermediate_per_partition``, to which Kimi-Linear and Kimi-K3 pad their experts."""


class ProjectionNames(NamedTuple):
    """Names of an expert's gate, up and down.

    Attributes:
        wna16: those by which this project's method for integers asks.
        stock: those by which stock vLLM asks, for every other scheme.
    """

    wna16: tuple[str, ...]
    stock: tuple[str, ...]


def projection_names(model_type: str, vllm: str | None) -> ProjectionNames:
    """The names for a type of model.

    Args:
        model_type: as in its config.json.
        vllm: vLLM's version. None, or one that cannot be parsed, counts as the newest.
    """
    names, first = _CKPT_NAMES.get(model_type, (_GATE_UP_DOWN, ""))
    in_code = names if not first or vllm_at_least(vllm, minimum=first) else _GATE_UP_DOWN
    wna16 = tuple(in_code[0] if name == "None" else name for name in in_code)
    return ProjectionNames(wna16, in_code if stock_uses_ckpt_names(vllm) else _GATE_UP_DOWN)


def stock_uses_ckpt_names(vllm: str | None) -> bool:
    """Whether stock vLLM asks by the names in a model's code, and not by `_GATE_UP_DOWN`.

    Args:
        vllm: vLLM's version. None, or one that cannot be parsed, counts as the newest.
    """
    return vllm_at_least(vllm, minimum=_STOCK_USES_CKPT_NAMES)


def min_expert_width(model_type: str, vllm: str | None) -> int:
    """Columns to which a model's code pads the experts of one rank with zeros; 0 where it does not pad.

    Args:
        model_type: as in its config.json.
        vllm: vLLM's version. None, or one that cannot be parsed, counts as the newest.
    """
    return 256 if model_type == "kimi_linear" and vllm_at_least(vllm, minimum=_MIN_WIDTH_SINCE) else 0
