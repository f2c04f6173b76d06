"""The files that describe a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import CheckpointError, LeftToStockError, short_repr
from ..quantization import has_expert_biases
from ..untrusted import boundary, exists, parse_json, read_file
from . import mistral_params
from .hub_cache import cached_snapshot, is_hub_name
from .missing_fields import with_defaults
from .tensor_headers import has_nonzero_expert_biases

MAX_CONFIG_BYTES = 32 << 20
"""Largest file that is taken for a config and not for a damaged or hostile one."""


class QuantizationConfig(NamedTuple):
    """A checkpoint's quantization config, and the file and field that it is from."""

    fields: Mapping[str, Any]
    where: str


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """The files that describe a checkpoint.

    Attributes:
        path: the config.json, or Mistral's params.json.
        full_config: its content, params.json's in the fields of a config.json.
        model_config: the part that describes the language model: all of it, or its ``text_config``; with the fields
            that it leaves out, as a server reads them.
        has_text_config: `model_config` is such a part.
        quantization: the quantization config; None when there is none.
        expert_biases: a folder's tensors have biases of experts, where the quantization leaves that to them.
        folder: the folder, where it was given and not the config alone: its tensors may be looked at.
        notes: what a user should know about how the files were read, one sentence each.
        is_cached: the folder is the Hub's local cache of a model that was given by name: a server fetches what it
            lacks.
    """

    path: Path
    full_config: Mapping[str, Any]
    model_config: Mapping[str, Any]
    has_text_config: bool
    quantization: QuantizationConfig | None
    expert_biases: bool = False
    folder: Path | None = None
    notes: tuple[str, ...] = ()
    is_cached: bool = False

    @property
    def where(self) -> str:
        """The file, for messages."""
        return str(self.path)

    @property
    def model_type(self) -> str:
        """The ``model_type`` of the language model; "" where the config has none."""
        return str(self.model_config.get("model_type") or self.full_config.get("model_type") or "")

    @property
    def architectures(self) -> list[str]:
        """The model's classes, as its config names them; none where it does not.

        Raises:
            CheckpointError: they are not a list of names, which vLLM refuses.
        """
        found = self.full_config.get("architectures")
        if found is None:
            return []
        if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
            rule = f"architectures is {short_repr(found)}, not a list of names: a server does not start"
            raise CheckpointError(rule, 'Write the model\'s class, such as ["Qwen3MoeForCausalLM"]', self.where)
        return found


def read_checkpoint(path: Path | str, needs_tensors: bool = False) -> CheckpointFiles:
    """Reads the files that describe a checkpoint.

    Args:
        path: the checkpoint's folder, or its config.json under any name; or, where nothing has this path, the name of a
            model of the Hugging Face Hub that lies in its local cache.
        needs_tensors: an error asks for a folder with tensors; a config alone is read all the same.

    Raises:
        LeftToStockError: it is GGUF.
        CheckpointError: a file that is missing, cannot be read, is too large, or holds no JSON object.
    """
    with boundary(CheckpointError, "cannot be read", where=str(path)):
        return _read_checkpoint(Path(path), needs_tensors)


def _read_checkpoint(path: Path, needs_tensors: bool) -> CheckpointFiles:
    found = exists(path)
    if not found and is_hub_name(str(path)) and (snapshot := cached_snapshot(str(path))) is not None:
        return replace(_read_checkpoint(snapshot, needs_tensors), is_cached=True)
    if not found:
        remedy = f"Give a checkpoint's folder{'' if needs_tensors else ' or its config.json'}; nothing is downloaded"
        if is_hub_name(str(path)):
            files = "" if needs_tensors else " --include '*config.json' 'params.json'"
            remedy += f". A model of the Hugging Face Hub is read where its cache has it: hf download {path}{files}"
        if address := re.match(r"https?:/+huggingface\.co/([\w.-]+/[\w.-]+)", str(path), re.ASCII):
            remedy = f"Give the model's name, {address[1]}, where the Hub's local cache has it; nothing is downloaded"
        raise CheckpointError("no such file or folder", remedy, str(path))
    file = path / "config.json" if path.is_dir() else path
    if path.is_dir() and not exists(file) and exists(path / mistral_params.FILE_NAME):
        file = path / mistral_params.FILE_NAME
    if not exists(file):
        raise _missing_config_error(path)
    notes: list[str] = []
    top = _read_json_object(file, notes)
    if file.name == mistral_params.FILE_NAME:
        top = mistral_params.as_model_config(top, str(file))
    model, nested = _text_config(top, file)
    quantization = _quantization_config(top, model, file, notes)
    if file.name != mistral_params.FILE_NAME:  # which vLLM reads by itself
        model = with_defaults(model, str(model.get("model_type") or top.get("model_type") or ""))
    told = quantization is not None and has_expert_biases(quantization.fields)
    folder = path if path.is_dir() else None
    biases = told and folder is not None and has_nonzero_expert_biases(folder)
    return CheckpointFiles(file, top, model, nested, quantization, biases, folder, tuple(notes))


_GGUF_REMEDY = "This plugin serves no GGUF: give the model's checkpoint in safetensors"
ADAPTER_FILE_NAME = "adapter_config.json"


def _missing_config_error(folder: Path) -> CheckpointError:
    """What a folder without a config.json is instead, and what to do."""
    where = str(folder)
    rule, remedy = "the folder has no config.json", "Give the folder that config.json and the tensors are in"
    try:
        names = sorted(each.name for each in folder.iterdir())
        found = [each for pattern in ("*", "snapshots/*") for each in folder.glob(f"{pattern}/config.json")]
    except OSError as error:
        rule = f"the folder cannot be read: {error.strerror}"
        return CheckpointError(rule, "Give this user the right to read it", where)
    if found:
        nearby = sorted(str(each.parent) for each in found)
        remedy = f"There is one in {', '.join(nearby[:3])}{', ...' if len(nearby) > 3 else ''}"
        return CheckpointError(rule, remedy, where)
    if any(name.lower().endswith(".gguf") for name in names):
        return LeftToStockError(f"{rule}, but GGUF files", _GGUF_REMEDY, where)
    if ADAPTER_FILE_NAME in names:
        return CheckpointError(f"{rule}: it holds a LoRA adapter", "Give the folder of the adapter's base model", where)
    return CheckpointError(rule if names else f"{rule}: it is empty", remedy, where)


def _non_json_error(file: Path, data: bytes) -> CheckpointError | None:
    """The kind of a file that cannot be a config; None for one that may be."""
    if data.startswith(b"GGUF"):
        return LeftToStockError("it is a GGUF file", _GGUF_REMEDY, str(file))
    if file.suffix in (".safetensors", ".bin", ".pt", ".pth"):
        return CheckpointError("holds tensors", "Give the folder that it is in, or its config.json", str(file))
    return None


_MOST_REPEATED = 3
"""Fields that are noted of a file, at most."""


def _read_json_object(file: Path, notes: list[str]) -> Mapping[str, Any]:
    """The JSON object in a file. A note is added where an object in it has a field more than once."""
    with boundary(CheckpointError, "cannot be read", where=str(file)):
        if file.is_file():  # a pipe or a device would block, or never end
            with file.open("rb") as opened:
                if (other := _non_json_error(file, opened.read(4))) is not None:
                    raise other
    repeated: list[str] = []
    data = parse_json(read_file(file, MAX_CONFIG_BYTES, CheckpointError), CheckpointError, str(file), repeated)
    notes += [
        f"{file.name} has the field {short_repr(name)} more than once in an object: the last counts, as in vLLM"
        for name in repeated[:_MOST_REPEATED]
    ]
    if not isinstance(data, dict):
        raise CheckpointError(f"holds {short_repr(data)}, not a JSON object", where=str(file))
    return data


def _text_config(top: Mapping[str, Any], file: Path) -> tuple[Mapping[str, Any], bool]:
    """The part of a config that describes the language model."""
    for name in ("text_config", "llm_config", "language_config", "thinker_config"):
        part = top.get(name)
        if part is None:
            continue
        if not isinstance(part, Mapping):
            raise CheckpointError(f"{name} is {short_repr(part)}, not an object", where=str(file))
        inner = part.get("text_config")
        return (inner if isinstance(inner, Mapping) else part), True
    return top, False


def _quantization_config(
    top: Mapping[str, Any], model: Mapping[str, Any], file: Path, notes: list[str]
) -> QuantizationConfig | None:
    """The quantization config, from the place where vLLM would take it: the first of ``quantization_config``, the file
    beside, the language model's ``quantization_config``, and ``compression_config``."""
    beside = file.with_name("hf_quant_config.json")
    has_file = file.name == "config.json" and exists(beside)
    for part, field in (
        (top, "quantization_config"),
        (model, "quantization_config"),
        (top, "compression_config"),
    ):
        found = part.get(field)
        own = part is top and field == "quantization_config"
        if found is not None and not isinstance(found, Mapping):
            raise CheckpointError(f"{field} is {short_repr(found)}, not an object", where=str(file))
        # Older ModelOpt releases write the algorithm into config.json and its layers into the other file only.
        if own and has_file and found is None:
            return QuantizationConfig(_read_json_object(beside, notes), str(beside))
        if found is None:
            continue
        if own and has_file and _lacks_layers(found):
            fields = {**_read_json_object(beside, notes), "quant_method": found.get("quant_method")}
            return QuantizationConfig(fields, str(beside))
        return QuantizationConfig(found, f"{file}, {field}")
    return None


def _lacks_layers(quantization: Mapping[str, Any]) -> bool:
    """Whether a config of ModelOpt's mixed precision does not say which layer has which."""
    mixed = str(quantization.get("quant_algo", "")).upper() == "MIXED_PRECISION"
    return mixed and "quantized_layers" not in quantization
