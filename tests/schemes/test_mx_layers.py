"""Reading a layer in MXFP8 or MXFP4 from the parameters that vLLM's loaders filled: the same rules for both."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.lib.cases import RELU2
from tests.lib.mx_layers import APART, MXFP4_LAYER, MXFP8_LAYER, mxfp4_parameters, mxfp8_parameters
from vllm_moe_oracle.core.problem import Problem
from vllm_moe_oracle.errors import CheckpointError
from vllm_moe_oracle.schemes import mxfp4, mxfp8
from vllm_moe_oracle.schemes._checks import WasLoaded

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FLOATS = "bfloat16 or float16 or float32"
NAMES = ("w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale", "w13_bias", "w2_bias")


@dataclasses.dataclass(frozen=True)
class Form:
    """A scheme with a layer of it."""

    scheme: ModuleType
    layer: Problem
    make: Callable[[Problem], dict[str, Tensor]]

    def given(self) -> dict[str, Tensor]:
        """The layer's parameters."""
        return self.make(self.layer)

    def refused(
        self, given: Mapping[str, Tensor], match: str | None = None, was_loaded: WasLoaded | None = None
    ) -> CheckpointError:
        """The error that these parameters are, which names the layer."""
        with pytest.raises(CheckpointError, match=match) as caught:
            self.scheme.read(given, self.layer, was_loaded)
        assert caught.value.where == self.layer.layer
        return caught.value

    def canonical(self) -> dict[str, str]:
        """Canonical names by those of parameters."""
        if self.scheme is mxfp8:
            return dict(mxfp8.CANONICAL_NAMES)
        return {name: canonical for canonical, name in mxfp4.parameter_names(self.layer).items()}


PACKED = dataclasses.replace(APART, scheme=dataclasses.replace(APART.scheme, packing="compressed-tensors"))
MXFP8, MXFP4 = Form(mxfp8, MXFP8_LAYER, mxfp8_parameters), Form(mxfp4, MXFP4_LAYER, mxfp4_parameters)
FORMS = {
    "mxfp8": MXFP8, "gpt-oss": MXFP4, "apart": Form(mxfp4, APART, mxfp4_parameters),
    "compressed-tensors": Form(mxfp4, PACKED, mxfp4_parameters),
}  # fmt: skip
each_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
both = pytest.mark.parametrize("form", [MXFP8, MXFP4], ids=["mxfp8", "mxfp4"])


@each_form
def test_a_layer_is_read_without_a_copy(form: Form) -> None:
    given, names = form.given(), form.canonical()
    read = form.scheme.read(given, form.layer)
    assert {name: tuple(tensor.shape) for name, tensor in read.items()} == form.scheme.shapes(form.layer)
    assert set(read) == set(names.values()) == {"w13", "w2", "w13_scale", "w2_scale", "w13_bias", "w2_bias"}
    for name, canonical in names.items():
        assert read[canonical].data_ptr() == given[name].data_ptr()


@both
def test_what_the_layer_does_not_have_is_not_asked_for(form: Form) -> None:
    layer = dataclasses.replace(form.layer, has_bias=False, activation=RELU2)
    assert layer.w13_rows == layer.intermediate_size
    given = {name: tensor for name, tensor in form.make(layer).items() if "bias" not in name}
    assert set(form.scheme.read(given, layer)) == {"w13", "w2", "w13_scale", "w2_scale"}


@each_form
@pytest.mark.parametrize("index", range(len(NAMES)), ids=NAMES)
def test_a_missing_tensor_is_named(form: Form, index: int) -> None:
    given = form.given()
    name = list(given)[index]
    del given[name]
    assert "w13_input_scale" in form.refused(given, f"{name} is missing").remedy


@pytest.mark.parametrize(
    ("form", "name", "dtype", "stored"),
    [
        (MXFP8, "w13_weight", torch.bfloat16, "MXFP8 stores it as float8_e4m3fn"),
        (MXFP8, "w2_weight", torch.uint8, "MXFP8 stores it as float8_e4m3fn"),
        (MXFP8, "w2_weight", torch.float8_e5m2, "MXFP8 stores it as float8_e4m3fn"),
        (MXFP8, "w2_weight_scale", torch.int8, "MXFP8 stores it as uint8"),
        (MXFP8, "w2_bias", torch.float8_e4m3fn, f"MXFP8 stores it as {FLOATS}"),
        (MXFP4, "w13_weight", torch.bfloat16, "MXFP4 stores it as uint8"),
        (MXFP4, "w2_weight", torch.int8, "MXFP4 stores it as uint8"),
        *((form, "w13_weight_scale", torch.float32, "stores it as uint8") for form in (MXFP8, MXFP4)),
        *((form, "w13_bias", torch.int32, f"stores it as {FLOATS}") for form in (MXFP8, MXFP4)),
    ],
)
def test_a_wrong_dtype_is_named_with_the_right_one(form: Form, name: str, dtype: torch.dtype, stored: str) -> None:
    given = form.given()
    given[name] = torch.zeros(given[name].shape).to(dtype)
    form.refused(given, f"{name} is {dtype}, .*{stored}")


@both
@pytest.mark.parametrize("dtype", DTYPES)
def test_biases_may_be_any_float_of_a_model(form: Form, dtype: torch.dtype) -> None:
    given = form.given()
    given["w2_bias"] = given["w2_bias"].to(dtype)
    assert form.scheme.read(given, form.layer)["w2_bias"].dtype == dtype


@both
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dimension", [0, -1])
def test_a_wrong_shape_is_named_with_the_right_one(form: Form, name: str, dimension: int) -> None:
    given = form.given()
    right = list(given[name].shape)
    wrong = right.copy()
    wrong[dimension] += 1
    given[name] = torch.zeros(wrong).to(given[name].dtype)
    assert f"{name} has shape {wrong}, expected {right}" in str(form.refused(given))


@both
@pytest.mark.parametrize(
    ("name", "bad", "words"),
    [
        *((f"{each}_weight_scale", 255, r"scales in {} are NaN \(e8m0 code 255\)") for each in ("w13", "w2")),
        # The self-check would not notice: it puts biases of its own in the place of the checkpoint's.
        *(
            (f"{each}_bias", bad, "biases in {} are NaN or infinite")
            for each in ("w13", "w2")
            for bad in (torch.nan, torch.inf, -torch.inf)
        ),
    ],
)
def test_what_is_nan_is_named_and_counted(form: Form, name: str, bad: float, words: str) -> None:
    given = form.given()
    given[name].flatten(1)[1, 3:5] = bad
    total = given[name].numel()
    assert form.refused(given, f"2 of {total} {words.format(name)}").remedy


MATRICES: dict[str, tuple[str, Callable[[Tensor, bool], Tensor]]] = {
    "gate": ("w13", lambda rows, interleaved: rows[0::2] if interleaved else rows[: rows.shape[0] // 2]),
    "up": ("w13", lambda rows, interleaved: rows[1::2] if interleaved else rows[rows.shape[0] // 2 :]),
    "down": ("w2", lambda rows, interleaved: rows),
}


SHARDS = {"gate": "w1", "up": "w3", "down": "w2"}
KINDS = {
    "": ("", "was", "it"),
    "_scale": ("the scales of ", "were", "them"),
    "_bias": ("the biases of ", "were", "them"),
}
each_part = pytest.mark.parametrize(("matrix", "kind"), list(itertools.product(MATRICES, KINDS)))


def with_sentinel(form: Form, matrix: str, kind: str) -> tuple[dict[str, Tensor], str]:
    """Parameters of which a part of the experts 1 and 2 holds what fills memory before loading, and the one's name."""
    given, (canonical, part) = form.given(), MATRICES[matrix]
    name = next(name for name, each in form.canonical().items() if each == canonical + kind)
    for expert in (1, 2):
        bits = given[name][expert].view(torch.int16 if kind == "_bias" else torch.uint8)
        code = -1 if kind == "_bias" else form.scheme.UNLOADED[canonical + kind]
        part(bits, form.layer.activation.interleaved).fill_(code)
    return given, name


@each_form
@each_part
def test_what_was_never_loaded_is_named_and_counted(form: Form, matrix: str, kind: str) -> None:
    given, name = with_sentinel(form, matrix, kind)
    what, were, it = KINDS[kind]
    said = f"{what}the {matrix} projection of local expert 1 {were} never loaded"
    remedy = f"The checkpoint lacks {it}, or names {it} differently (2 such in {name})"
    assert form.refused(given, said).remedy == remedy
    assert form.refused(given, said, lambda *part: False).remedy == remedy
    # Other parts were brought by a loader.
    brought: WasLoaded = lambda *part: part != (name, SHARDS[matrix], 2)  # noqa: E731
    assert "(1 such in" in form.refused(given, said.replace("expert 1", "expert 2"), brought).remedy


@each_form
@each_part
def test_a_file_that_holds_such_bytes_is_damaged_where_they_are_nan(form: Form, matrix: str, kind: str) -> None:
    given, name = with_sentinel(form, matrix, kind)
    if form.scheme is mxfp4 and not kind:  # negative zeros: a pruned expert
        assert set(form.scheme.read(given, form.layer, lambda *part: True))
        return
    what = {"": rf"codes in {name} of 2 of 3 local experts are NaN \(e4m3 codes 127 and 255\)",
            "_scale": f"scales in {name} are NaN", "_bias": f"biases in {name} are NaN"}  # fmt: skip
    found = form.refused(given, what[kind], lambda *part: True)
    assert found.remedy.startswith("The checkpoint is damaged") and "never loaded" not in str(found)
    assert "of local expert 1 at" in str(found)


@each_form
def test_one_row_of_such_bytes_is_a_row_like_any_other(form: Form) -> None:
    given = form.given()
    for name, canonical in form.canonical().items():
        if canonical in ("w13", "w2"):
            given[name].view(torch.uint8)[:, 0] = form.scheme.UNLOADED[canonical]
    form.scheme.read(given, form.layer)


def test_interleaved_gate_up_rows_of_mxfp8_are_refused() -> None:
    interleaved = dataclasses.replace(MXFP8.layer.activation, interleaved=True)
    with pytest.raises(CheckpointError, match="alternate gate and up"):
        mxfp8.read(MXFP8.given(), dataclasses.replace(MXFP8.layer, activation=interleaved))
