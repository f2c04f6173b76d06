"""By which names vLLM asks a compressed-tensors config about the matrices of a layer's experts.

Stock's `get_moe_method` asks about expert 0's gate, up and down. Until 0.31 it calls them ``gate_proj``, ``up_proj``
and ``down_proj`` whatever the model; since then as the model's code says (``ckpt_names``), with ``None`` for the gate's
partner where experts have no gate. This project's method for integers is asked first, and goes by what the model's code
says as soon as a release has it, without the ``None``.
"""

from __future__ import annotations

from typing import NamedTuple

from packaging.version import InvalidVersion, Version

_DEFAULT = ("gate_proj", "up_proj", "down_proj")
_NUMBERED = ("w1", "w3", "w2")
_UNGATED = ("up_proj", "None", "down_proj")

_ASKED_BY_STOCK = "0.32.0"
_SAID = {
    "mixtral": (_NUMBERED, "0.25.1"),
    "minimax_m2": (_NUMBERED, "0.25.1"),
    "phimoe": (_NUMBERED, "0.25.1"),
    "lfm2_moe": (_NUMBERED, "0.26.0"),
    "nemotron_h": (_UNGATED, "0.26.0"),
    "nemotron_h_puzzle": (_UNGATED, "0.26.0"),
    "deepseek_v4": (_NUMBERED, "0.32.0"),
    "deepseek_v41": (_NUMBERED, "0.32.0"),
}
"""What the code of a kind of model says, gate, up, down, and the first release in which it does; elsewhere it is
`_DEFAULT`."""


_WIDENED_SINCE = "0.27.1"
"""Kimi-Linear's and Kimi-K3's experts are filled up with zeros: ``min_moe_intermediate_per_partition``."""


class Asked(NamedTuple):
    """Names of an expert's matrices, gate, up, down.

    Attributes:
        integers: by which this project's method for integers asks.
        stock: by which stock vLLM asks, for everything else.
    """

    integers: tuple[str, ...]
    stock: tuple[str, ...]


def asked(kind: str, vllm: str | None) -> Asked:
    """The names for a kind of model.

    Args:
        kind: its ``model_type``.
        vllm: the release; None, or what cannot be read, counts as the newest.
    """

    names, first = _SAID.get(kind, (_DEFAULT, ""))
    said = names if not first or _reached(first, vllm) else _DEFAULT
    integers = tuple(said[0] if name == "None" else name for name in said)
    return Asked(integers, said if asks_as_models_say(vllm) else _DEFAULT)


def asks_as_models_say(vllm: str | None) -> bool:
    """Whether stock vLLM asks by the names that a model's code says; else by those of gate, up and down.

    Args:
        vllm: the release; None, or what cannot be read, counts as the newest.
    """
    return _reached(_ASKED_BY_STOCK, vllm)


def least_width(kind: str, vllm: str | None) -> int:
    """Columns of an expert on one rank below which a model's code fills experts up with zeros; 0 where it does not.

    Args:
        kind: its ``model_type``.
        vllm: the release; None, or what cannot be read, counts as the newest.
    """
    return 256 if kind == "kimi_linear" and _reached(_WIDENED_SINCE, vllm) else 0


def _reached(release: str, vllm: str | None) -> bool:
    try:
        return vllm is None or Version(Version(vllm).base_version) >= Version(release)
    except InvalidVersion:
        return True
