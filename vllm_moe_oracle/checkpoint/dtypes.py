"""The dtype in which vLLM serves a model, by its ``--dtype`` and the checkpoint's config (`_get_and_verify_dtype`)."""

from __future__ import annotations

from ..core.problem import Device, Problem
from ..errors import CheckpointError, NoBackendError, SettingError, did_you_mean, short_repr
from ..settings import AUTO
from .files import CheckpointFiles

_NAMES = {
    "half": "float16",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float": "float32",
    "float32": "float32",
}
"""The dtype of each name that a config and vLLM's ``--dtype`` may have."""

DTYPE_OPTIONS = (AUTO, *_NAMES)
"""Values of vLLM's ``--dtype``."""

_BFLOAT16_CAPABILITY = 80
"""The first CUDA compute capability on which vLLM serves in bfloat16."""

_ANY_DTYPE = ("bfloat16", "float16", "float32")
# vLLM's names of quantizations whose `get_supported_act_dtypes` has bfloat16 alone, or all three dtypes; others have
# both 16-bit ones. Equal in all supported releases.
_BFLOAT16_METHODS = frozenset({"modelopt_mxfp8", "mxfp8", "mxfp4", "gpt_oss_mxfp4"})
_ANY_DTYPE_METHODS = frozenset({"compressed-tensors"})


def read_dtype_option(word: str) -> str:
    """The dtype that a value of ``--dtype`` means; "auto" for itself.

    Raises:
        SettingError: vLLM has no such value.
    """
    if word not in DTYPE_OPTIONS:
        valid = f"{did_you_mean(word, DTYPE_OPTIONS)}Valid are {', '.join(DTYPE_OPTIONS)}"
        raise SettingError(f"{short_repr(word)} is not a dtype", valid, "--dtype")
    return _NAMES.get(word, AUTO)


def served_dtype(config: CheckpointFiles, asked: str = AUTO, capability: int = 0) -> tuple[str, str]:
    """The dtype in which vLLM serves a model, and a note where it does not do so in the checkpoint's by itself.

    Args:
        config: the checkpoint's.
        asked: from `read_dtype_option`.
        capability: CUDA compute capability of the device; 0 for other devices, and where it is unknown.

    Raises:
        CheckpointError: the config names another dtype than a model may have.
    """
    parts = (config.full_config, config.model_config)
    found = next((part[name] for part in parts for name in ("dtype", "torch_dtype") if part.get(name)), None)
    stored = "float32" if found is None else _NAMES.get(str(found).removeprefix("torch."))
    if stored is None:
        raise CheckpointError(f"unknown dtype {short_repr(found)}", where=config.where)
    if asked != AUTO:
        return asked, ""
    has_bfloat16 = not 0 < capability < _BFLOAT16_CAPABILITY
    if stored == "float16" or (stored == "bfloat16" and has_bfloat16):
        return stored, ""
    taken = "bfloat16" if has_bfloat16 else "float16"
    said = "names no dtype" if found is None else f"says {stored}"
    place = "" if has_bfloat16 else f" on sm_{capability}"
    return taken, f"the config {said}: taken as {taken}{place}, as vLLM does on its own"


def dtype_refusal(problem: Problem, method: str, device: Device) -> NoBackendError | None:
    """The error of a layer with whose dtype vLLM does not start; None if it does.

    Args:
        problem: the layer.
        method: vLLM's name of the checkpoint's quantization.
        device: the machine. On a CPU this package's methods take every dtype.
    """
    if device.kind == "cpu":
        return None
    dtype, is_old = problem.dtype, 0 < device.capability < _BFLOAT16_CAPABILITY
    only = method in _BFLOAT16_METHODS and problem.scheme.packing != "online"
    taken = _ANY_DTYPE if method in _ANY_DTYPE_METHODS else _ANY_DTYPE[: 1 if only else 2]
    valid = [each for each in taken if not (is_old and each == "bfloat16")]
    if dtype in valid:
        return None
    rule = f"vLLM serves in bfloat16 from sm_{_BFLOAT16_CAPABILITY} on, and {device.name} has sm_{device.capability}"
    if dtype not in taken:
        rule = f"vLLM serves {method} checkpoints in {' or '.join(taken)}, and the model's dtype is {dtype}"
    remedy = f"Serve with --dtype {valid[0]}" if valid else f"Serve it on a GPU from sm_{_BFLOAT16_CAPABILITY} on"
    return NoBackendError(rule, remedy, problem.layer)
