"""The command line that measures the layers of a model as they are served."""

from __future__ import annotations

import shlex

from ..settings import AUTO, FIELDS, Settings

_SETTINGS = ("activations", "allow_activation_quantization", "ragged_shards", "cache")
"""Settings that change which layers and backends `tune` measures, and where it keeps what it finds."""


def tune_command(
    model: str,
    settings: Settings,
    *,
    tp: int = 1,
    dp: int = 1,
    ep: bool = False,
    quantization: str = "",
    dtype: str = AUTO,
    batch_invariant: bool | None = None,
) -> str:
    """The command line of `tune` for a checkpoint, quoted for a shell.

    Args:
        model: the checkpoint, as the command line or a server names it.
        settings: those of the caller; the ones that matter and are not at their default become ``--set``.
        tp: tensor-parallel ranks.
        dp: data-parallel ranks.
        ep: the ranks hold different experts.
        quantization: vLLM's ``--quantization``; "" for none.
        dtype: vLLM's ``--dtype``.
        batch_invariant: as vLLM's ``VLLM_BATCH_INVARIANT``; None leaves it to the environment of the shell.
    """
    words = ["vllm-moe-oracle", "tune", f"./{model}" if model.startswith("-") else model]
    words += ["--tp", str(tp)] * (tp != 1) + ["--dp", str(dp)] * (dp != 1) + ["--ep"] * ep
    words += ["--quantization", quantization] * bool(quantization) + ["--dtype", dtype] * (dtype != AUTO)
    if batch_invariant is not None:
        words.append("--batch-invariant" if batch_invariant else "--no-batch-invariant")
    for name in _SETTINGS:
        value = getattr(settings, name)
        if value != FIELDS[name].default:
            words += ["--set", f"{name}={int(value) if isinstance(value, bool) else value}"]
    return shlex.join(words)
