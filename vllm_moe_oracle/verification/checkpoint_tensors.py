"""The experts of a checkpoint's layer, read from its safetensors files by name, one expert at a time.

vLLM's loaders are not involved, and nothing is kept: an expert costs its own bytes. Names follow from what the package
knows of checkpoints: the layer's names (`quantization.types.LayerNames`), and each scheme's parameter names, which end
as the file's tensors do. Two kinds of files differ: gpt-oss's tensors hold all experts of a layer, and some formats end
the name of a tensor otherwise.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from .. import schemes
from ..checkpoint.hub_cache import name_of_snapshot
from ..checkpoint.tensor_headers import differing_tensor, indexed_names
from ..core.problem import Parallel, Problem, Routing
from ..errors import CheckpointError, DamagedCheckpointError, short_repr
from ..layouts.byte_views import cat_bytes
from ..quantization.types import GATED_PROJECTIONS, UNGATED_PROJECTIONS, LayerNames
from ..schemes import _wna16_checkpoint as wna16_files
from ..schemes import _wna16_parameters as wna16_parameters
from ..schemes._checks import dtype_name, refuse_bias
from ..schemes._mx import as_parameter
from ..untrusted import boundary

_MAX_FILES = 4096

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": getattr(torch, "float8_e8m0fnu", torch.uint8), "F4": getattr(torch, "float4_e2m1fn_x2", torch.uint8),
}  # fmt: skip
"""torch's dtype by the name in a file's header."""

_OTHER_ENDINGS = {"weight": ("weight_packed",), "weight_scale": ("weight_scale_inv", "scale")}
"""Endings of MX tensors in some formats, by the ending of vLLM's parameter: MiniMax's and DeepSeek-V4's scales."""

_FUSED_ENDINGS = {
    "w13": "gate_up_proj_blocks", "w13_scale": "gate_up_proj_scales", "w13_bias": "gate_up_proj_bias",
    "w2": "down_proj_blocks", "w2_scale": "down_proj_scales", "w2_bias": "down_proj_bias",
}  # fmt: skip
"""Endings of gpt-oss's tensors, which hold all experts of a layer, by canonical name."""

Shards = Mapping[str, str]
"""Name of the file's tensor by shard: ``w1`` (gate, or the only matrix before the activation), ``w3`` (up), ``w2``."""


class TensorFiles:
    """The tensors in a checkpoint's safetensors files, by name. Files stay open, and are mapped, not read.

    Attributes:
        folder: the checkpoint's.
        identity: of each file its name, its size in bytes, and when its content and its entry were last changed, in
            nanoseconds. A tool that writes into a file and puts its time of change back does not reach the last one.
        repeated: the further file of a tensor that two files hold with the same bytes, as a server loads it, by name.
    """

    def __init__(self, folder: Path) -> None:
        """
        Args:
            folder: the checkpoint's.

        Raises:
            DamagedCheckpointError: a file is missing, truncated or not in the format, or two hold other values of one
                tensor.
            CheckpointError: there are no such files, or one may not be read.
        """
        from safetensors import safe_open

        self.folder = folder
        self._open = contextlib.ExitStack()
        self._files: dict[str, Any] = {}
        self._paths: dict[str, Path] = {}
        self.repeated: dict[str, Path] = {}
        with boundary(CheckpointError, "cannot be read", where=str(folder)):
            paths = _files_of(folder)
            self.identity = tuple(map(_file_identity, paths))
        try:
            for path in paths:
                with boundary(CheckpointError, "cannot be read", where=str(path)):
                    path.open("rb").close()  # `safe_open` says of every file that it cannot open that there is none
                _require_utf8(path)
                remedy = "Fetch the file itself again (git lfs pull, or hf download)"
                with boundary(DamagedCheckpointError, "is damaged, or no safetensors file", remedy, str(path)):
                    file = self._open.enter_context(safe_open(path, framework="pt"))
                    names = list(file.keys())
                self._compare_repeated(path, [name for name in names if name in self._paths])
                for name in names:
                    if name not in self._paths:
                        self._files[name], self._paths[name] = file, path
        except BaseException:
            self.close()
            raise

    def _compare_repeated(self, path: Path, names: Sequence[str]) -> None:
        """Compares tensors of a file with those of earlier files by the same names."""
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self._paths[name], []).append(name)
        for earlier, held in by_file.items():
            if name := differing_tensor(earlier, path, held):
                rule = f"{short_repr(name)} is in {earlier.name}, too, with other values: vLLM would load both"
                remedy = "Remove the file that does not belong to the model; if both do, fetch or write the model again"
                raise DamagedCheckpointError(rule, remedy, str(path))
        self.repeated.update(dict.fromkeys(names, path))

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def names(self) -> Iterator[str]:
        """Names of all tensors."""
        return iter(self._files)

    def names_in(self, module: str) -> list[str]:
        """Names of the tensors of a module and those inside it, sorted."""
        first, last = (bisect.bisect_left(self._sorted, module + end) for end in (".", "/"))  # "/" follows "."
        return self._sorted[first:last]

    @functools.cached_property
    def _sorted(self) -> list[str]:
        return sorted(self._files)

    def stored(self, name: str) -> str:
        """A tensor's name with that of the file that has it, for messages; of a tensor that is missing its name."""
        return f"{name} ({self._paths[name].name})" if name in self._paths else name

    def close(self) -> None:
        """Closes the files."""
        self._open.close()

    def meta(self, name: str) -> Tensor:
        """A tensor on torch's meta device: dtype and shape from the header.

        Raises:
            CheckpointError: the dtype is unknown.
        """
        found = self._files[name].get_slice(name)
        word = str(found.get_dtype())
        if word not in _DTYPES:
            raise CheckpointError(
                f"{name} is stored as {short_repr(word)}, which is not read", where=str(self._paths[name])
            )
        return torch.empty(found.get_shape(), dtype=_DTYPES[word], device="meta")

    def read(self, name: str, index: int | None = None) -> Tensor:
        """A tensor, or one entry of its first dimension, on the CPU.

        Raises:
            CheckpointError: the bytes cannot be read.
        """
        with boundary(CheckpointError, f"{name} cannot be read", where=str(self._paths[name])):
            if index is None:
                return self._files[name].get_tensor(name)  # type: ignore[no-any-return]  # safetensors has no types
            return self._files[name].get_slice(name)[index : index + 1][0]  # type: ignore[no-any-return]  # safetensors has no types


def _file_identity(path: Path) -> tuple[str, int, int, int]:
    found = path.stat()
    return path.name, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _require_utf8(path: Path) -> None:
    """Refuses a path that the library safetensors cannot read.

    Raises:
        CheckpointError: it holds a byte that is not UTF-8.
    """
    try:
        os.fsencode(path).decode()
    except UnicodeDecodeError as error:
        rule = f"the path is not in UTF-8 (byte {error.start}), and safetensors reads no other; the file may be good"
        raise CheckpointError(rule, "Rename the folder, or give a link to it whose path is", str(path)) from error


def _files_of(folder: Path) -> list[Path]:
    """The files that hold a checkpoint's tensors: those of its index where it has one, as vLLM reads them."""
    names = indexed_names(folder)
    if names is None:
        # Not `Path.glob`, for which a folder that may not be listed is an empty one.
        names = sorted(name for name in os.listdir(folder) if name.endswith(".safetensors"))
    if not names:
        rule = "the folder has no safetensors files"
        name = name_of_snapshot(folder)
        fetch = f": hf download {name}" if name else ""
        raise CheckpointError(
            rule, f"Give the folder with the model's tensors, not its config alone{fetch}", str(folder)
        )
    if len(names) > _MAX_FILES:
        raise CheckpointError(f"{len(names)} files are more than {_MAX_FILES}", where=str(folder))
    for name in names:
        if not (folder / name).is_file():  # a pipe or a device would block
            rule = "the file is missing, or is not a regular one"
            raise DamagedCheckpointError(rule, "Fetch it again: the download is not complete", str(folder / name))
    return [folder / name for name in names]


@dataclass(frozen=True, slots=True)
class StoredExperts:
    """Where a layer's experts are in a checkpoint's files.

    Attributes:
        files: the files.
        problem: the layer with all of its experts, on one rank.
        module: the name of the experts' module in the checkpoint.
        projections: names of an expert's matrices; empty where one tensor holds all experts.
        endings: the ending of a tensor's name, by canonical suffix (``""``, ``_scale``, ...) or, where one tensor holds
            all experts, by canonical name.
        first: the number that the files give to the layer's first expert.
        transposed_router: see `LayerNames`.
    """

    files: TensorFiles
    problem: Problem
    module: str
    projections: tuple[str, ...]
    endings: Mapping[str, str]
    first: int = 0
    transposed_router: bool = False

    def expert(self, index: int) -> dict[str, Tensor]:
        """Canonical tensors of one expert on the CPU, checked as a server checks them.

        Args:
            index: the expert's number.

        Raises:
            CheckpointError: the bytes cannot be read, or are damaged: NaN, infinite, or too large for any kernel. The
                message names layer, expert, tensor, file and place.
        """
        raw = {name: each[0] for name, each in self.raw_expert(index).items()}
        found: dict[str, Tensor] = self._module.canonical_expert(raw, self._one())
        return found

    def raw_expert(self, index: int) -> dict[str, Tensor]:
        """The same before conversion, as the scheme's ``read`` returns it, `[1, ...]` each."""
        names = self._tensor_names(index)
        try:
            return self._read_checked(index, names, self._one())
        except CheckpointError as error:
            rule, remedy = error.rule, error.remedy
            for canonical, parameter in self._module.parameter_names(self.problem).items():
                word = re.compile(rf"\b{parameter}\b")
                if canonical in names and word.search(f"{rule} {remedy}"):
                    name, own = self._find_damaged(index, names, canonical, word)
                    rule = own.rule if own is not None and word.search(rule) else rule
                    stored = self.files.stored(name)
                    rule, remedy = word.sub(stored, rule), word.sub(stored, remedy)
            # The scheme saw a layer of one expert.
            rule = rule.replace("local expert 0", f"expert {index}").replace("expert 0", f"expert {index}")
            layer = self.problem.layer
            where = f"{layer}, expert {index}" if error.where == layer else error.where
            raise DamagedCheckpointError(rule, remedy, where) from error

    def _read_checked(self, index: int, names: Mapping[str, Shards], problem: Problem) -> dict[str, Tensor]:
        """What `raw_expert` returns, from tensors of these names."""
        raw = self._read(index, problem, names)
        self._module.check_values(raw, problem)
        return raw

    def _find_damaged(
        self, index: int, names: Mapping[str, Shards], canonical: str, parameter: re.Pattern[str]
    ) -> tuple[str, CheckpointError | None]:
        """Which of the files' tensors that fill a refused parameter is damaged, and the error with the place in it.

        Gate and up are one parameter. Each is read alone, as the only matrix of an expert without a gate; where none is
        refused then, it is the last one without an error.
        """
        *others, last = names[canonical].values()
        ungated = replace(self._one(), activation=replace(self.problem.activation, gated=False))
        for shard, name in names[canonical].items() if others else ():
            alone = {each: {"w1": own[shard]} if shard in own else own for each, own in names.items()}
            try:
                self._read_checked(index, alone, ungated)
            except CheckpointError as error:
                if parameter.search(f"{error}"):
                    return name, error
        return last, None

    def check_headers(self) -> None:
        """Checks names, dtypes and shapes of all experts' tensors; nothing but headers is read.

        Raises:
            CheckpointError: a tensor is missing, has another dtype or shape than the config says, or an expert has one
                that the format does not have.
        """
        for index in range(self.problem.num_experts):
            tensors = self._tensor_names(index)
            self._check_extra(index, tensors)
            for canonical, shards in tensors.items():
                for shard, name in shards.items():
                    where = f"{self.problem.layer}, expert {index}, {self.files.stored(name)}"
                    if name not in self.files:
                        if self._may_lack(canonical):
                            continue
                        remedy = "The checkpoint lacks it, names it differently, or a shard was not downloaded"
                        raise CheckpointError("the tensor is missing", remedy, where)
                    if self.projections or index == 0:
                        self._check(self.files.meta(name), canonical, shard, where)

    def _may_lack(self, canonical: str) -> bool:
        """Whether an expert may lack a tensor of that canonical name, which is zero then: a bias beside integers. No
        config declares it, and some other expert has one."""
        return self.problem.scheme.name == "wna16" and canonical.endswith("_bias")

    def _check_extra(self, index: int, tensors: Mapping[str, Shards]) -> None:
        """Refuses tensors of an expert that no server has a place for."""
        if not self.projections:
            return
        expert = f"{self.module}.{self.first + index}"
        known = {name for shards in tensors.values() for name in shards.values()}
        known |= {f"{expert}.{each}.{ending}" for each in self.projections for ending in self._unread_endings}
        for name in self.files.names_in(expert):
            if name not in known:
                scheme = self.problem.scheme
                rule = f"experts in {scheme.name} of the packing {scheme.packing} have no such tensor"
                remedy = "Most releases of vLLM end at it: remove it, or fetch the files that belong to this config"
                raise CheckpointError(rule, remedy, f"{self.problem.layer}, expert {index}, {self.files.stored(name)}")

    @property
    def _unread_endings(self) -> tuple[str, ...]:
        """Last parts of the names of tensors that an expert may have and nothing reads."""
        scheme = self.problem.scheme
        known = wna16_parameters.optional_endings(scheme.packing) if scheme.name == "wna16" else ("bias",)
        return tuple(ending for ending in known if ending not in self.endings.values())

    def check_unread(self) -> list[str]:
        """Checks the tensors that experts have and nothing reads, as a server does when it loads them, how the model's
        dtype rounds scales, whether all experts have a bias where some have one, and whether two files have a tensor.

        Returns:
            What to warn of, each with the first tensor of which it is said, and how many there are.

        Raises:
            DamagedCheckpointError: one would have an effect. The message names expert, tensor and file.
        """
        warned: dict[str, list[str]] = {}
        for name in filter(self.files.repeated.__contains__, self.files.names_in(self.module)):
            words = f"in {self.files.repeated[name].name}, too, with the same values, which a server loads twice"
            warned.setdefault(words, []).append(self.files.stored(name))
        for index in range(self.problem.num_experts if self.projections else 0):
            for shard, projection in zip(self._shards, self.projections, strict=True):
                for ending in (*self._unread_endings, self.endings["_scale"]):
                    name = f"{self.module}.{self.first + index}.{projection}.{ending}"
                    if name in self.files and (words := self._check_unread_tensor(name, ending, shard, index)):
                        warned.setdefault(words, []).append(self.files.stored(name))
            for canonical, shards in self._tensor_names(index).items():
                if self._may_lack(canonical):
                    lacking = [name for name in shards.values() if name not in self.files]
                    warned.setdefault("not in the files, as others are: it is zero", []).extend(lacking)
        return [
            f"{stored[0]}{f' and {len(stored) - 1} more' if stored[1:] else ''}: {words}"
            for words, stored in warned.items()
            if stored
        ]

    def _check_unread_tensor(self, name: str, ending: str, shard: str, index: int) -> str:
        """What to warn of in a tensor that is not read, or in scales; "" for nothing."""
        problem = self._one()
        is_integer, is_scale = problem.scheme.name == "wna16", ending == self.endings["_scale"]
        if is_scale and (not is_integer or self.files.meta(name).dtype == getattr(torch, problem.dtype)):
            return ""
        tensor = self.files.read(name)
        if is_scale:
            return wna16_files.rounding_warning(tensor, getattr(torch, problem.dtype))
        where = f"{self.problem.layer}, expert {index}, {self.files.stored(name)}"
        try:
            if is_integer:
                packing = problem.scheme.packing
                return wna16_files.check_unread_tensor(tensor, ending, shard, problem, packing, where)
            refuse_bias(tensor, where)
        except CheckpointError as error:
            raise DamagedCheckpointError(error.rule, error.remedy, error.where) from error
        return ""

    @property
    def _shards(self) -> tuple[str, ...]:
        """vLLM's names of an expert's projections, in the order of `projections`."""
        return ("w1", "w3", "w2") if len(self.projections) == 3 else ("w1", "w2")

    @property
    def _module(self) -> Any:
        """The scheme's module."""
        return schemes.module(self.problem.scheme.name)

    def _one(self) -> Problem:
        """A layer of one of the experts."""
        return replace(self.problem, num_experts=1, local_experts=1, top_k=1, parallel=Parallel(), routing=Routing())

    def _tensor_names(self, index: int) -> dict[str, Shards]:
        """Names of an expert's tensors by canonical name and shard."""
        if not self.projections:
            return {
                canonical: {canonical[: 3 if canonical.startswith("w13") else 2]: f"{self.module}.{ending}"}
                for canonical, ending in self.endings.items()
            }
        expert = f"{self.module}.{self.first + index}"
        found: dict[str, Shards] = {}
        for suffix, ending in self.endings.items():
            names = [f"{expert}.{projection}.{ending}" for projection in self.projections]
            *before, down = zip(self._shards, names, strict=True)
            found |= {f"w13{suffix}": dict(before), f"w2{suffix}": dict([down])}
        return found

    def _check(self, tensor: Tensor, canonical: str, shard: str, where: str) -> None:
        """Checks dtype and shape of a file's tensor; one that holds all experts is checked as a whole."""
        suffix = canonical.removeprefix("w13").removeprefix("w2")
        if self.problem.scheme.name == "wna16":
            which = cast("wna16_files.Shard", shard)
            packing = self.problem.scheme.packing
            wna16_files.check_checkpoint_tensor(tensor, suffix, which, self._one(), packing, where)
            return
        bias, codes = suffix == "_bias", suffix == ""
        tensor = tensor if bias else as_parameter(tensor, not codes, self.problem, where)
        shape = self._module.shapes(self._one())[canonical][1:]
        if not self.projections:  # all experts; the 16 bytes of a block of codes are a dimension of their own
            shape = (
                (self.problem.num_experts, *shape[:-1], shape[-1] // 16, 16)
                if codes
                else (self.problem.num_experts, *shape)
            )
        elif shard != "w2" and len(self.projections) == 3:
            shape = (shape[0] // 2, *shape[1:])
        expected = torch.float8_e4m3fn if codes and self.problem.scheme.name == "mxfp8" else torch.uint8
        expected = tensor.dtype if bias and tensor.dtype.is_floating_point else expected
        if tensor.dtype != expected:
            rule = (
                f"the checkpoint stores it as {dtype_name(tensor.dtype)}, {self.problem.scheme.name} as "
                f"{'a floating-point type' if bias else dtype_name(expected)}"
            )
            raise CheckpointError(rule, "The checkpoint is not in the format that its config names", where)
        if tuple(tensor.shape) != shape:
            rule = f"it has shape {list(tensor.shape)}, expected {list(shape)}"
            raise CheckpointError(rule, "The file belongs to another model or format than its config", where)

    def _read(self, index: int, problem: Problem, names: Mapping[str, Shards]) -> dict[str, Tensor]:
        """An expert's parameters as vLLM's loaders would fill them from tensors of these names, read by the scheme."""
        if problem.scheme.name == "wna16":
            return self._read_wna16(index, problem, names)
        parameters: dict[str, Tensor] = {}
        shapes, own = self._module.shapes(problem), self._module.parameter_names(problem)
        for canonical, shards in names.items():
            parts = []
            for shard, name in shards.items():
                part = self._read_part(name, canonical, shard, index)
                where = f"{self.problem.layer}, expert {index}, {self.files.stored(name)}"
                is_bias, is_scale = canonical.endswith("_bias"), canonical.endswith("_scale")
                parts.append(part if is_bias else as_parameter(part, is_scale, self.problem, where))
            joined = cat_bytes(parts)
            if joined.dtype.is_floating_point and joined.dtype.itemsize > 1:
                joined = joined.to(getattr(torch, problem.dtype))
            parameters[own[canonical]] = joined.reshape(shapes[canonical])
        found: dict[str, Tensor] = self._module.read(parameters, problem, lambda *part: True)
        return found

    def _read_part(self, name: str, canonical: str, shard: str, index: int) -> Tensor:
        """An expert's tensor, checked once more: a file may have changed since its header was."""
        if not self.projections:
            return self.files.read(name, index)
        part = self.files.read(name)
        self._check(
            part.to("meta"), canonical, shard, f"{self.problem.layer}, expert {index}, {self.files.stored(name)}"
        )
        return part

    def _read_wna16(self, index: int, problem: Problem, names: Mapping[str, Shards]) -> dict[str, Tensor]:
        packing = problem.scheme.packing
        layout = wna16_files.checkpoint_layout(packing)
        shapes = wna16_parameters.parameter_shapes(problem, layout)
        parameters: dict[str, Tensor] = {}
        for parameter, canonical in wna16_parameters.canonical_names(problem).items():
            suffix = canonical.removeprefix("w13").removeprefix("w2")
            is_optional = self._may_lack(canonical)
            data = torch.zeros(shapes[canonical], dtype=getattr(torch, problem.dtype)) if is_optional else None
            for shard, name in names[canonical].items():
                if is_optional and name not in self.files:
                    continue
                part = self._read_part(name, canonical, shard, index)
                if suffix in ("_scale", "_bias"):  # as the parameter, which has the model's dtype
                    part = part.to(getattr(torch, problem.dtype))
                elif suffix == "_order":
                    part = part.to(torch.int32)
                if data is None:
                    data = torch.zeros(shapes[canonical], dtype=part.dtype)
                which = cast("wna16_files.Shard", shard)
                part = wna16_files.rank_shard(part, suffix, which, problem, packing, 0)
                place = wna16_files.destination(data[0], part, suffix, which, problem)
                if suffix == "_order" and shard == "w3":
                    wna16_parameters.check_shared_order(place, part, f"{self.problem.layer}, {name}, expert {index}")
                place.copy_(part)
            assert data is not None
            parameters[parameter] = data
        return wna16_parameters.read(parameters, problem, layout == "k_first")


def find_layer(files: TensorFiles, problem: Problem, layer: LayerNames) -> StoredExperts:
    """Finds a layer's experts among a checkpoint's tensors.

    Args:
        files: the checkpoint's.
        problem: the layer with all of its experts, on one rank.
        layer: its names.

    Raises:
        DamagedCheckpointError: there are no tensors of the layer's experts, or their names begin or end otherwise.
        CheckpointError: no tensor of the first two experts has a name that is known.
    """
    canonical = schemes.module(problem.scheme.name).parameter_names(problem)
    if problem.scheme.name != "wna16":
        for module, _ in layer.modules_in_files():
            fused = {name: _FUSED_ENDINGS[name] for name in canonical}
            if any(f"{module}.{ending}" in files for ending in (fused["w13"], fused["w2"])):
                return StoredExperts(files, problem, module, (), fused, 0, layer.transposed_router)
    endings = {name.removeprefix("w13"): own.removeprefix("w13_") for name, own in canonical.items() if name[1] == "1"}
    gated = problem.activation.gated
    others = {} if problem.scheme.name == "wna16" else _OTHER_ENDINGS
    known = {suffix: (ending, *others.get(ending, ())) for suffix, ending in endings.items()}
    conventions = dict.fromkeys((*layer.conventions(), *(GATED_PROJECTIONS if gated else UNGATED_PROJECTIONS)))
    fitting = [names for names in conventions if len(names) == (3 if gated else 2)]
    # The second expert tells where tensors of the first are missing, which `check_headers` names.
    for after, (module, number), names in itertools.product((0, 1), layer.modules_in_files(), fitting):
        first = f"{module}.{number + after}.{names[0]}."
        found = {
            suffix: next((each for each in possible if first + each in files), possible[0])
            for suffix, possible in known.items()
        }
        if first + found[""] in files:
            return StoredExperts(files, problem, module, names, found, number, layer.transposed_router)
    raise _unknown_names_error(files, problem, layer, fitting, endings[""])


_UNKNOWN_NAMES = (
    "Fetch or export the files under the names of the model's class, or report these if a server loads them"
)


def _unknown_names_error(
    files: TensorFiles, problem: Problem, layer: LayerNames, conventions: Sequence[tuple[str, ...]], ending: str
) -> CheckpointError:
    """What the files have in place of a layer's experts, none of which has a name that is known.

    Args:
        files: the checkpoint's.
        problem: the layer.
        layer: its names.
        conventions: names of an expert's matrices, for each convention.
        ending: how the name of a matrix would end.
    """
    looked = f"{layer.modules[0]}.0.{conventions[0][0]}.{ending}"
    rule = f"none of the names that its first expert may have is in the files, such as {looked}"
    inside = [name for name in files.names() if f".{_number(problem.layer)}." in name]
    near = sorted(name for name in inside if "expert" in name or ".moe." in name)
    if not near:
        remedy = "Fetch the files that belong to this config"
        return DamagedCheckpointError(f"{rule}; they have no experts of this layer", remedy, problem.layer)
    rule += f"; they have {', '.join(map(short_repr, near[:3]))}"
    _, _, module = layer.modules[0].partition(".")
    matrices = "|".join(re.escape(names[0]) for names in conventions)
    other = next(filter(re.compile(rf"\b{re.escape(module)}\.\d+\.({matrices})\.").search, near), "")
    if not other:
        return CheckpointError(rule, _UNKNOWN_NAMES, problem.layer)
    remedy = (
        f"vLLM does not take {short_repr(other)} for it: fetch the files that belong to this config, or rename them"
    )
    return DamagedCheckpointError(rule, remedy, problem.layer)


def _number(layer: str) -> str:
    """The layer's number in its name; "" where there is none."""
    return next((part for part in layer.split(".") if part.isdigit()), "")
