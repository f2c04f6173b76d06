"""In which dtype a model is served, and which dtypes vLLM refuses, against the code of every release."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from tests.lib import stock_code
from tests.lib.cases import CPU, H200, INT4_G128, MXFP8_W8A8, problem
from tests.lib.configs import quantized
from tests.lib.releases import every_release
from tests.lib.stock_code import QUANTIZATION
from vllm_moe_oracle import methods
from vllm_moe_oracle.checkpoint.dtypes import DTYPE_OPTIONS, dtype_refusal, read_dtype_option, served_dtype
from vllm_moe_oracle.checkpoint.files import read_checkpoint
from vllm_moe_oracle.core.problem import Device, Scheme
from vllm_moe_oracle.errors import CheckpointError, SettingError

DTYPES = ("bfloat16", "float16", "float32")
T4 = Device("cuda", "Tesla T4", capability=75)
CAPABILITIES = (0, 70, 75, 80, 90, 120)

CLASSES = {
    ("auto_gptq.py", "AutoGPTQConfig"): ("gptq", "auto_gptq", "gptq_marlin"),
    ("compressed_tensors/compressed_tensors.py", "CompressedTensorsConfig"): ("compressed-tensors",),
    ("inc.py", "INCConfig"): ("inc",),
    ("inc/inc.py", "INCConfig"): ("inc",),
    ("modelopt.py", "ModelOptMxFp8Config"): ("modelopt_mxfp8", "mxfp8"),
    ("modelopt.py", "ModelOptMixedPrecisionConfig"): ("modelopt_mixed",),
    ("moe_wna16.py", "MoeWNA16Config"): ("moe_wna16",),
    ("mxfp4.py", "Mxfp4Config"): ("mxfp4", "gpt_oss_mxfp4"),
    ("quark/quark.py", "QuarkConfig"): ("quark",),
}
"""vLLM's names of the quantizations of a class, by file and class."""


def platform(release: str, capability: int) -> Any:
    """vLLM's platform with that compute capability, and the dtypes of its code; 0 for a CPU of x86."""
    file = f"vllm/platforms/{'cuda' if capability else 'cpu'}.py"
    tree = stock_code.tree(release, file)
    (asked,) = (each for each in ast.walk(tree) if getattr(each, "name", "") == "supported_dtypes")
    assert isinstance(asked, ast.FunctionDef)
    names: dict[str, Any] = {"torch": torch, "CpuArchEnum": MagicMock()}
    function = ast.FunctionDef(**{**vars(asked), "decorator_list": [], "returns": None})
    exec(compile(ast.Module([function], []), file, "exec"), names)
    made: Any = stock_code.Platform(capability)
    made.get_device_name = lambda: "a name"
    made.supported_dtypes = names["supported_dtypes"](made)
    return made


def config_with(folder: Path, dtype: str | None, name: str = "torch_dtype") -> Any:
    """A checkpoint whose config has this dtype."""
    changes = dict.fromkeys(("dtype", "torch_dtype")) | {name: dtype}
    (folder / "config.json").write_text(json.dumps(quantized(**changes)))
    return read_checkpoint(folder)


@every_release
def test_auto_is_what_the_release_makes_of_the_configs_dtype(release: str, tmp_path: Path) -> None:
    for capability, stored in itertools.product(CAPABILITIES, (*DTYPES, None)):
        names = stock_code.load(release, "vllm/config/model.py", current_platform=platform(release, capability))
        # A config without a dtype counts as float32 (`ModelArchConfigConvertorBase.get_torch_dtype`).
        dtype = getattr(torch, stored or "float32")
        theirs = names["_resolve_auto_dtype"]("qwen3_moe", dtype, is_pooling_model=False)
        found, note = served_dtype(config_with(tmp_path, stored), "auto", capability)
        assert getattr(torch, found) == theirs, (capability, stored)
        assert bool(note) == (theirs != dtype or stored is None)


@every_release
def test_options_are_the_releases(release: str, tmp_path: Path) -> None:
    names = stock_code.load(release, "vllm/config/model.py")
    theirs = names["_STR_DTYPE_TO_TORCH_DTYPE"]
    assert {*DTYPE_OPTIONS} == {"auto", *theirs}
    for word, dtype in theirs.items():
        for stored in (*DTYPES, None):
            found, note = served_dtype(config_with(tmp_path, stored), read_dtype_option(word), 75)
            assert (getattr(torch, found), note) == (dtype, "")


@every_release
def test_dtypes_of_quantizations_are_the_releases(release: str) -> None:
    checked = set()
    for (file, name), quantizations in CLASSES.items():
        if not stock_code.exists(release, f"{QUANTIZATION}/{file}"):
            continue
        cls = stock_code.load(release, f"{QUANTIZATION}/{file}")[name]
        asked = cls.get_supported_act_dtypes
        taken = asked() if hasattr(asked, "__self__") else asked(None)
        for quantization, dtype in itertools.product(quantizations, DTYPES):
            refused = dtype_refusal(problem(scheme=MXFP8_W8A8, dtype=dtype), quantization, H200)
            assert (refused is None) == (getattr(torch, dtype) in taken), (quantization, dtype)
            checked.add(quantization)
    # AWQ's class has another name in each release, and DeepSeek's inherits its dtypes.
    others = {"awq", "auto_awq", "awq_marlin", "deepseek_v4_fp8"}
    assert {*methods.served_schemes()} - checked <= others
    online = problem(scheme=Scheme("mxfp8", 8, 32, "online", activations="mxfp8"), dtype="float16")
    taken = stock_code.load(release, f"{QUANTIZATION}/online/base.py")["OnlineQuantizationConfig"]
    assert torch.half in taken.get_supported_act_dtypes() and dtype_refusal(online, "mxfp8", H200) is None


@pytest.mark.parametrize(
    ("scheme", "method", "dtype", "device", "said"),
    [
        (MXFP8_W8A8, "modelopt_mxfp8", "float16", H200, "checkpoints in bfloat16, and the model's dtype is float16"),
        (MXFP8_W8A8, "modelopt_mxfp8", "float16", T4, "Serve it on a GPU from sm_80 on"),
        (INT4_G128, "gptq", "float32", H200, "in bfloat16 or float16, and the model's dtype is float32"),
        (INT4_G128, "gptq", "bfloat16", T4, "vLLM serves in bfloat16 from sm_80 on, and Tesla T4 has sm_75"),
        (INT4_G128, "gptq", "bfloat16", T4, "Serve with --dtype float16"),
        (INT4_G128, "gptq", "float16", T4, ""),
        (MXFP8_W8A8, "modelopt_mxfp8", "float32", CPU, ""),
    ],
)
def test_a_refused_dtype_is_an_error_with_a_remedy(
    scheme: Scheme, method: str, dtype: str, device: Device, said: str
) -> None:
    error = dtype_refusal(dataclasses.replace(problem(scheme=scheme), dtype=dtype), method, device)
    assert said in str(error) if said else error is None


@pytest.mark.parametrize("word", ["", "fp16", "AUTO", "int8", "float64", "bfloat16 "])
def test_other_words_are_refused(word: str) -> None:
    with pytest.raises(SettingError, match=r"--dtype: .* is not a dtype\. .*Valid are auto, half, float16"):
        read_dtype_option(word)


@pytest.mark.parametrize("dtype", ["float64", "int8", 16, ["bfloat16"]])
def test_dtypes_of_configs_that_no_model_has_are_refused(dtype: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="unknown dtype"):
        served_dtype(config_with(tmp_path, dtype, "dtype"), "bfloat16")
