"""What only a checkpoint's tensors tell of experts: biases, of which no field of a GPTQ or AWQ config speaks, and
experts in 16 bits that a config does not leave out.

AutoGPTQ wrote a bias of zeros for every matrix; those are none. The format of the files is that of safetensors: eight
bytes with the length of a JSON object, which has type, shape and place of each tensor, then the tensors' bytes.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import CheckpointError
from ..quantization.fields import short_repr
from ..untrusted import boundary, parse_json

MAX_HEADER_BYTES = 32 << 20
"""Largest header that is read. The format allows 100 MB; a header of 20,000 tensors has 3 MB."""

MAX_BIAS_BYTES = 256 << 20
"""Most bytes of biases that a file is read for. Biases of 128 experts in 48 layers have 75 MB."""

_PIECE_BYTES = 1 << 20

_EXPERT_BIAS = re.compile(r"\bexperts\.(\d+\..*\.bias|\w+_proj_bias)$")
_DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


def is_expert_bias(name: str) -> bool:
    """Whether a tensor of that name is a bias of routed experts."""
    return _EXPERT_BIAS.search(name) is not None


def has_nonzero_expert_biases(folder: Path) -> bool:
    """Whether the safetensors files in a folder hold a bias of routed experts that is not zero. Nothing else of them is
    read, and the first such bias ends it.

    Raises:
        CheckpointError: a file cannot be read, or is not in the safetensors format.
    """
    return any(_has_nonzero_bias(file) for file in sorted(folder.glob("*.safetensors")))


def are_in_16_bits(folder: Path, modules: Collection[str]) -> bool:
    """Whether the safetensors files in a folder hold experts under one of these names, all matrices as floating-point
    numbers of 16 bits or more. Only the files' headers are read.

    Args:
        folder: the checkpoint's.
        modules: names of the module of one layer's experts in files.

    Raises:
        CheckpointError: a file cannot be read, or is not in the safetensors format.
    """
    tensors = dict(_matrices(folder, modules))
    return bool(tensors) and all(name.endswith(".weight") and dtype in _DTYPE_BYTES for name, dtype in tensors.items())


def has_codes(folder: Path, modules: Collection[str]) -> bool:
    """Whether the safetensors files in a folder hold tensors under one of these names that are no floating-point
    numbers of 16 bits or more.

    Args:
        folder: the checkpoint's, or that of a state which vLLM saved.
        modules: names of the module of one layer's experts in files.

    Raises:
        CheckpointError: a file cannot be read, or is not in the safetensors format.
    """
    return any(dtype not in _DTYPE_BYTES for _, dtype in _matrices(folder, modules))


def _matrices(folder: Path, modules: Collection[str]) -> Iterator[tuple[str, object]]:
    """Names and types of the tensors under some names, but for biases, by the files' headers."""
    starts = tuple(f"{module}." for module in modules)
    for path in sorted(folder.glob("*.safetensors")):
        with _opened(path) as file:
            tensors, _ = _read_header(file, str(path))
        for name, tensor in tensors.items():
            if name.startswith(starts) and not name.endswith("bias"):
                yield name, tensor.get("dtype") if isinstance(tensor, dict) else None


def _has_nonzero_bias(path: Path) -> bool:
    with _opened(path) as file:
        return any(_any_nonzero(data, width) for data, width in _read_biases(file, str(path)))


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """A file of tensors; what goes wrong with its content is an error of the checkpoint."""
    if not path.is_file():  # a pipe or a device would block, or never end
        raise CheckpointError("is not a regular file", where=str(path))
    with boundary(CheckpointError, "cannot be read", where=str(path)):
        file = path.open("rb")
    remedy = "Fetch the file itself (git lfs pull), or give the config.json: no tensor is looked at then"
    with file, boundary(CheckpointError, "is not a safetensors file", remedy, str(path)):
        yield file


def _read_header(file: BinaryIO, where: str) -> tuple[dict[str, Any], int]:
    """What the file says of each tensor, by name, and the header's bytes."""
    length = os.fstat(file.fileno()).st_size
    size = int.from_bytes(file.read(8), "little")
    if not 0 < size <= min(MAX_HEADER_BYTES, length - 8):
        raise ValueError(f"its header would have {size} bytes")
    tensors = parse_json(file.read(size), CheckpointError, where)
    if not isinstance(tensors, dict):
        raise ValueError(f"its header is {short_repr(tensors)}, not an object")
    return tensors, size


def _read_biases(file: BinaryIO, where: str) -> Iterator[tuple[bytes, int]]:
    """Yields the bytes of each expert bias in pieces, and the bytes per number."""
    length = os.fstat(file.fileno()).st_size
    tensors, size = _read_header(file, where)
    total = 0
    for name, tensor in tensors.items():
        if name == "__metadata__" or not is_expert_bias(name):
            continue
        first, last, width = _place_and_width(name, tensor)
        if not 0 <= first <= last <= length - 8 - size:
            raise ValueError(f"{name} would be bytes {first} to {last} of {length - 8 - size}")
        total += last - first
        if total > MAX_BIAS_BYTES:
            raise ValueError(f"its biases of experts have more than {MAX_BIAS_BYTES} bytes")
        file.seek(8 + size + first)
        for at in range(first, last, _PIECE_BYTES):
            piece = min(_PIECE_BYTES, last - at)
            data = file.read(piece)
            if len(data) != piece:
                raise ValueError(f"it ends before {name} does")
            yield data, width


def _place_and_width(name: str, tensor: object) -> tuple[int, int, int]:
    """Where a tensor begins and ends among the bytes of a file, and the bytes per number, from its entry in the
    header."""
    fields = tensor if isinstance(tensor, dict) else {}
    place, dtype = fields.get("data_offsets"), fields.get("dtype")
    if not isinstance(place, list) or [type(each) for each in place] != [int, int] or not isinstance(dtype, str):
        raise ValueError(f"{name} is {short_repr(tensor)}, without a dtype and two data_offsets")
    return place[0], place[1], _DTYPE_BYTES.get(dtype, 1)


def _any_nonzero(data: bytes, width: int) -> bool:
    """Whether a number is neither zero nor minus zero; little-endian, so that the sign is in each one's last byte."""
    signs = data[width - 1 :: width]
    return any(data[place::width].strip(b"\0") for place in range(width - 1)) or bool(signs.strip(b"\0\x80"))
