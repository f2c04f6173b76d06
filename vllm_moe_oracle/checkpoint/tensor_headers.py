"""Reads what a config does not say from safetensors files: whether experts have biases, their tensors' dtypes, and how
many experts there are.

No field of a GPTQ or AWQ config speaks of biases. AutoGPTQ wrote one of zeros for every matrix, which counts as none. A
file begins with eight bytes, the length of a JSON object with dtype, shape and offsets of each tensor; their bytes
follow.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import msgspec

from ..errors import CheckpointError, DamagedCheckpointError, short_repr
from ..untrusted import boundary, check_values, exists, read_file

MAX_HEADER_BYTES = 32 << 20
"""Largest header that is read. The format allows 100 MB; a header of 20,000 tensors has 3 MB."""

MAX_BIAS_BYTES = 256 << 20
"""Most bytes of biases that a file is read for. Biases of 128 experts in 48 layers have 75 MB."""

INDEX_NAME = "model.safetensors.index.json"
"""The file that says in which file of a checkpoint a tensor is."""

_MAX_INDEX_BYTES = 64 << 20

_PIECE_BYTES = 1 << 20

_EXPERT_BIAS = re.compile(r"\bexperts\.(\d+\..*\.bias|\w+_proj_bias)$")
_DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_MATRICES = ("weight", "gate_up_proj", "down_proj")
"""How names of matrices in 16 bits end: an expert's, and those of all experts together."""


def is_expert_bias(name: str) -> bool:
    """Whether a tensor of that name is a bias of routed experts."""
    return _EXPERT_BIAS.search(name) is not None


def has_nonzero_expert_biases(folder: Path) -> bool:
    """Whether the safetensors files of a checkpoint (`tensor_files`) hold a bias of routed experts that is not zero.
    Nothing else of them is read, and the first such bias ends it.

    Raises:
        CheckpointError: a file cannot be read, or is not in the safetensors format.
    """
    return any(map(_has_nonzero_bias, tensor_files(folder)))


def tensor_files(folder: Path) -> list[Path]:
    """The safetensors files in a folder that vLLM loads, in order: those of the index where it has one.

    Files that are not there yet are left out. Where none of them is, all others count: a state that vLLM saved lies
    beside the index of the checkpoint that it was made from.

    Raises:
        CheckpointError: as by `indexed_names`.
    """
    found, names = sorted(folder.glob("*.safetensors")), indexed_names(folder)
    return found if names is None else [path for path in found if path.name in names] or found


def has_all_files(folder: Path) -> bool:
    """Whether all safetensors files of a checkpoint are there, as far as its index or their names tell.

    Raises:
        CheckpointError: as by `indexed_names`.
    """
    if (names := indexed_names(folder)) is not None:
        with boundary(CheckpointError, "cannot be read", where=str(folder)):
            return all(exists(folder / name) for name in names)
    numbers: dict[tuple[str, int], set[int]] = {}
    for path in folder.glob("*.safetensors"):
        if match := _PART.fullmatch(path.name):
            numbers.setdefault((match["stem"], int(match["total"])), set()).add(int(match["number"]))
    return all(len(found) >= total for (_, total), found in numbers.items())


def missing_files(folder: Path) -> list[str]:
    """The names of files of the index that the folder lacks, in order, such as while it is downloaded. None where it
    has no index, or other files instead of all of the index; see `tensor_files`.

    Raises:
        CheckpointError: as by `indexed_names`.
    """
    names = indexed_names(folder) or []
    if any(path.name not in names for path in tensor_files(folder)):
        return []
    with boundary(CheckpointError, "cannot be read", where=str(folder)):
        return [name for name in names if not exists(folder / name)]


_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{1,6})-of-(?P<total>\d{1,6})\.safetensors", re.ASCII)


def indexed_names(folder: Path) -> list[str] | None:
    """The names of files in a checkpoint's index, in order; None where it has no index. vLLM fails at a name that is no
    file of the folder, and where there is none.

    Raises:
        CheckpointError: the index cannot be read.
        DamagedCheckpointError: it has no ``weight_map``, or one that names no file or another one than a safetensors
            file of the folder.
    """
    index = folder / INDEX_NAME
    with boundary(CheckpointError, "cannot be read", where=str(index)):
        if not exists(index):
            return None
    data = read_file(index, _MAX_INDEX_BYTES, CheckpointError)
    check_values(data, CheckpointError, str(index))
    remedy = "Fetch the file again, or remove it where all files of the folder belong to the model"
    with boundary(DamagedCheckpointError, "has no weight_map from names to files", remedy, str(index)):
        names = sorted({*_INDEX.decode(data).weight_map.values()})
    if not names:
        raise DamagedCheckpointError("names no file of tensors: its weight_map is empty", remedy, str(index))
    for name in names:
        if Path(name).name != name or "\0" in name or not name.endswith(".safetensors"):
            rule = f"names {short_repr(name)}, which is no safetensors file of its folder"
            raise DamagedCheckpointError(rule, remedy, str(index))
    return names


TensorKinds = Collection[tuple[str, str]]
"""The last part of the name and the dtype, as files write it, of each kind of tensor that a layer's experts have;
without biases."""


@dataclass(slots=True)
class ExpertTensors:
    """What the files hold of a layer's experts.

    Attributes:
        kinds: see `TensorKinds`.
        numbers: the experts that have tensors of their own, besides biases.
        quantized: those of them that have another tensor than a matrix in 16 bits or more, such as a scale.
        counts: how many experts the tensors have that hold those of all.
    """

    kinds: set[tuple[str, str]] = field(default_factory=set)
    numbers: set[int] = field(default_factory=set)
    quantized: set[int] = field(default_factory=set)
    counts: set[int] = field(default_factory=set)

    @property
    def size(self) -> int:
        """How many experts there are."""
        return max(len(self.numbers), *self.counts, 0)

    def add(self, rest: str, kind: tuple[str, str], tensor: _Tensor) -> None:
        """Adds a tensor; `rest` is what follows the module in its name, and may be cut at its end."""
        self.kinds.add(kind)
        first, _, others = rest.partition(".")
        if others and first.isdecimal() and first.isascii() and len(first) <= _MAX_DIGITS:
            self.numbers.add(int(first))
            if not _is_plain(kind):
                self.quantized.add(int(first))
        elif first in _ALL_EXPERTS and tensor.shape:
            self.counts.add(tensor.shape[0])


_MAX_DIGITS = 6
_ALL_EXPERTS = frozenset(
    f"{matrix}{ending}" for matrix in ("gate_up_proj", "down_proj") for ending in ("", "_blocks", "_scales")
)
"""Endings of tensors that hold all experts of a layer, `[experts, ...]`. States that vLLM saved have other names, and
hold the experts of one rank."""


class _Tensor(msgspec.Struct, frozen=True):
    """What is read of a tensor; the entry of metadata has none of it."""

    dtype: str = ""
    shape: tuple[int, ...] = ()
    data_offsets: tuple[int, int] | None = None


_TYPES = msgspec.json.Decoder(dict[str, _Tensor])


class _Index(msgspec.Struct, frozen=True):
    """What is read of a checkpoint's index: the file of each tensor."""

    weight_map: dict[str, str]


_INDEX = msgspec.json.Decoder(_Index)


def expert_tensors(folder: Path, modules: Collection[str]) -> dict[str, ExpertTensors]:
    """What the safetensors files of a checkpoint (`tensor_files`) hold of experts, under each name that has any. Only
    the files' headers are read, each once.

    Args:
        folder: the checkpoint's, or that of a state which vLLM saved.
        modules: names of modules of experts in files.

    Raises:
        RefusedFileError: the tensors of a file do not lie in it as vLLM's reader wants them.
        DamagedCheckpointError: a file is not in the safetensors format.
        CheckpointError: a file cannot be read.
    """
    longest = max(map(len, modules), default=0)
    wanted = frozenset(modules)
    found: dict[str, ExpertTensors] = {}
    for tensors in _headers(folder):
        for name, tensor in tensors.items():
            # Truncated first: rpartition copies, and a name in a file may have megabytes.
            if not name.endswith("bias") and (module := _module_of(name[: longest + 1], wanted)):
                layer = found.setdefault(module, ExpertTensors())
                rest = name[len(module) + 1 : len(module) + _MOST_CHARS]
                layer.add(rest, (name.rpartition(".")[2], tensor.dtype), tensor)
    return found


def _headers(folder: Path) -> Iterator[dict[str, _Tensor]]:
    """The tensors of each file, by name; see `expert_tensors`."""
    for path in tensor_files(folder):
        with _opened(path) as file:
            tensors, begin = _read_header(file, str(path))
            _check_places(tensors, os.fstat(file.fileno()).st_size - begin, str(path))
        yield tensors


_ATTENTION = re.compile(r"(?!base_model\.)(.*\.)?layers\.\d+\.\w*(attn|attention)\.", re.ASCII)
"""In the names of a model's layers, but not of an adapter for them."""

_MAYBE_EXPERTS = re.compile(r"(?<!shared_)expert|moe", re.IGNORECASE)


def holds_no_experts(folder: Path) -> bool:
    """Whether all safetensors files of a checkpoint are there and hold layers of a model, and none of their tensors may
    be a routed expert's, whatever its name. Errors are those of `expert_tensors`."""
    names = [name for tensors in _headers(folder) for name in tensors] if has_all_files(folder) else []
    return any(map(_ATTENTION.match, names)) and not any(map(_MAYBE_EXPERTS.search, names))


class RefusedFileError(DamagedCheckpointError):
    """A file of tensors whose header is read, and which vLLM's reader refuses."""


def _check_places(tensors: Mapping[str, _Tensor], size: int, where: str) -> None:
    """Refuses what safetensors' reader refuses: tensors that do not lie one after the other in all `size` bytes after
    the header, or that have other bytes than dtype and shape say.

    Raises:
        RefusedFileError: naming the first that does not.
    """
    end, wrong = 0, ""
    for first, last, name in sorted((*(each.data_offsets or (-1, -1)), name) for name, each in tensors.items()):
        if first != end or last < first:
            place = f"is at bytes {first} to {last}" if first >= 0 else "has no data_offsets"
            wrong = f"{short_repr(name)} {place}, and the tensors before it end at {end}"
            break
        if _bits(tensors[name]) not in (None, (last - first) * 8):
            form = f"{short_repr(tensors[name].dtype)} {short_repr(list(tensors[name].shape))}"
            wrong = f"{short_repr(name)} is {form} in {last - first} bytes"
            break
        end = last
    if not wrong and end != size:
        wrong = f"its tensors end at byte {end} of {size}"
    if wrong:
        rule = f"{wrong}: vLLM's reader refuses the file, and a server does not start"
        raise RefusedFileError(rule, "Fetch the file again, or write it again with safetensors", where)


def _bits(tensor: _Tensor) -> int | None:
    """Bits of all its numbers by its dtype and shape; None for a dtype that is not known."""
    width = 8 if tensor.dtype == "BOOL" else int(match[1]) if (match := _WIDTH.match(tensor.dtype)) else None
    return None if width is None else width * math.prod(tensor.shape)


_WIDTH = re.compile(r"(?:[IUFC]|BF)(\d{1,2})(?:_|$)", re.ASCII)


_MOST_CHARS = 32
"""Characters after a module's name that are looked at for an expert's number, or for a tensor of all experts."""


def _module_of(name: str, modules: Collection[str]) -> str:
    """The module, one of some, that a name begins with; "" for none of them."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name


def are_floating_point(kinds: TensorKinds) -> bool:
    """Whether there are experts, all matrices of which are floating-point numbers of 16 bits or more."""
    return bool(kinds) and all(map(_is_plain, kinds))


def has_quantized_tensor(kinds: TensorKinds) -> bool:
    """Whether a tensor has another dtype than floating-point numbers of 16 bits or more."""
    return any(dtype not in _DTYPE_BYTES for _, dtype in kinds)


def are_quantized(kinds: TensorKinds) -> bool:
    """Whether there are experts, all matrices of which are quantized."""
    return has_quantized_tensor(kinds) and not any(map(_is_plain, kinds))


def _is_plain(kind: tuple[str, str]) -> bool:
    name, dtype = kind
    return name in _MATRICES and dtype in _DTYPE_BYTES


def _has_nonzero_bias(path: Path) -> bool:
    with _opened(path) as file:
        tensors, begin = _read_header(file, str(path))
        places = {name: each.data_offsets or (0, 0) for name, each in tensors.items() if is_expert_bias(name)}
        if sum(last - first for first, last in places.values()) > MAX_BIAS_BYTES:
            raise ValueError(f"its biases of experts have more than {MAX_BIAS_BYTES} bytes")
        _check_places(tensors, os.fstat(file.fileno()).st_size - begin, str(path))
        return any(
            _is_nonzero(file, begin + first, begin + last, _DTYPE_BYTES.get(tensors[name].dtype, 1))
            for name, (first, last) in places.items()
        )


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """A file of tensors; what goes wrong with its content is an error of the checkpoint."""
    if not path.is_file():  # a pipe or a device would block, or never end
        raise CheckpointError("is not a regular file", where=str(path))
    with boundary(CheckpointError, "cannot be read", where=str(path)):
        file = path.open("rb")
    remedy = "Fetch the file itself (git lfs pull), or give the config.json: no tensor is looked at then"
    with file, boundary(DamagedCheckpointError, "is not a safetensors file", remedy, str(path)):
        yield file


def _read_header(file: BinaryIO, where: str) -> tuple[dict[str, _Tensor], int]:
    """The tensors of a file, by name, of equal names the last as in vLLM's reader; and where their bytes begin."""
    length = os.fstat(file.fileno()).st_size
    size = int.from_bytes(file.read(8), "little")
    if not 0 < size <= min(MAX_HEADER_BYTES, length - 8):
        raise ValueError(f"its header would have {size} bytes")
    data = file.read(size)
    check_values(data, CheckpointError, where)
    tensors = _TYPES.decode(data)
    tensors.pop("__metadata__", None)
    return tensors, 8 + size


def differing_tensor(one: Path, other: Path, names: Iterable[str]) -> str:
    """The first of some tensors that two files hold with other bytes, dtypes or shapes; "" where all are alike.

    Args:
        one: a safetensors file.
        other: likewise.
        names: names of tensors that both hold.

    Raises:
        DamagedCheckpointError: a file is not in the safetensors format.
        CheckpointError: a file cannot be read.
    """
    with _opened(one) as first, _opened(other) as second:
        files = (first, second)
        headers = [_read_header(file, str(path)) for file, path in zip(files, (one, other), strict=True)]
        for name in names:
            own, its = (tensors[name] for tensors, _ in headers)
            if (own.dtype, own.shape) != (its.dtype, its.shape) or own.data_offsets is None or its.data_offsets is None:
                return name
            for file, (_, begin), (start, _) in zip(files, headers, (own.data_offsets, its.data_offsets), strict=True):
                file.seek(begin + start)
            left = own.data_offsets[1] - own.data_offsets[0]
            while left > 0:
                pieces = {file.read(min(_PIECE_BYTES, left)) for file in files}
                if len(pieces) > 1 or pieces == {b""}:
                    return name
                left -= _PIECE_BYTES
    return ""


def _is_nonzero(file: BinaryIO, first: int, last: int, width: int) -> bool:
    """Whether one of the numbers of `width` bytes from byte `first` to `last` is neither zero nor minus zero; read in
    pieces."""
    file.seek(first)
    return any(_any_nonzero(file.read(min(_PIECE_BYTES, last - at)), width) for at in range(first, last, _PIECE_BYTES))


def _any_nonzero(data: bytes, width: int) -> bool:
    """Whether a number is neither zero nor minus zero; little-endian, so that the sign is in each one's last byte."""
    signs = data[width - 1 :: width]
    return any(data[place::width].strip(b"\0") for place in range(width - 1)) or bool(signs.strip(b"\0\x80"))
