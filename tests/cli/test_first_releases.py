"""Formats that not every supported release of vLLM loads: what `explain` says of one that a release does not load, and
that the releases' sources say the same."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lib.cli import Run, Write
from tests.lib.configs import AUTO_ROUND, GPTQ, INT4, compressed, group, mixed
from tests.lib.configs import PACKED as PACK_QUANTIZED
from tests.lib.releases import every_release, sources
from vllm_moe_oracle import cli, methods
from vllm_moe_oracle.quantization import FIRST_RELEASES
from vllm_moe_oracle.releases import min_versions
from vllm_moe_oracle.releases.supported import RELEASES

PACKED = {"packing_format": "auto_round:llm_compressor", "group_size": 32, "data_type": "mx_fp"}
AWQ = {"bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
CASES: dict[tuple[str, str], tuple[dict[str, Any] | None, str]] = {
    ("inc", "mxfp4"): (AUTO_ROUND | PACKED, ""),
    ("inc", "mxfp8"): (AUTO_ROUND | PACKED | {"bits": 8}, ""),
    ("modelopt_mixed", "mxfp8"): (mixed(**{"*experts*": "MXFP8"}), ""),
    ("auto_awq", "wna16"): (AWQ | {"quant_method": "auto_awq"}, ""),
    ("online", "mxfp4"): (None, "mxfp4"),
}
"""A checkpoint's quantization_config and ``--quantization``, by the cases of the table."""

LOADED_BY = {
    ("inc", "mxfp4"): ("inc/schemes/inc_mxfp4_moe.py", "INCMxfp4MoEMethod"),
    ("inc", "mxfp8"): ("inc/schemes/inc_mxfp8_moe.py", "INCMxfp8MoEMethod"),
    ("modelopt_mixed", "mxfp8"): ("modelopt.py", "mxfp8_config"),
    ("auto_awq", "wna16"): ("__init__.py", '"auto_awq"'),
    ("online", "mxfp4"): ("online/mxfp4.py", "Mxfp4OnlineMoEMethod"),
}
"""The file in vLLM's quantization package, and what it holds, that load each case."""


def words(case: tuple[str, str], write: Write) -> list[Any]:
    config, online = CASES[case]
    options = ("--quantization", online) if online else ()
    return [write(quantization_config=config), "--device", "nvidia-h200", *options]


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("case", FIRST_RELEASES)
def test_a_release_that_does_not_load_a_format_is_named(
    case: tuple[str, str], release: str, run: Run, write: Write
) -> None:
    result, first = run("explain", *words(case, write), "--vllm", release), FIRST_RELEASES[case]
    if RELEASES.index(release) >= RELEASES.index(first):
        assert (result.status, result.err) == (0, "") and "48 layers" in result.out
    else:
        assert (result.status, result.out) == (cli.EXIT_NO_BACKEND, "")
        assert f"from {first} on. Serve it with vLLM {first} or newer" in result.err


@every_release
def test_the_sources_say_from_which_release(release: str) -> None:
    package = sources(release) / "vllm" / "model_executor" / "layers" / "quantization"
    for case, (name, held) in LOADED_BY.items():
        file, first = package / name, FIRST_RELEASES[case]
        loaded = file.exists() and held in file.read_text(encoding="utf-8")
        assert loaded is (RELEASES.index(release) >= RELEASES.index(first)), case
    assert LOADED_BY.keys() == FIRST_RELEASES.keys() == CASES.keys()


@every_release
def test_methods_that_a_release_lacks_are_of_formats_in_the_table(release: str) -> None:
    """A server gives our methods to the stock classes that a release has."""
    folder, late = sources(release), set()
    for module, stock in methods.required_modules().items():
        place = folder / stock.replace(".", "/")
        if not (place.with_suffix(".py").exists() or (place / "__init__.py").exists()):
            late.add(module.rpartition(".")[2])
    by_module = {"inc_mxfp4": ("inc", "mxfp4"), "inc_mxfp8": ("inc", "mxfp8"), "awq": ("auto_awq", "wna16"),
                 "online_mxfp4": ("online", "mxfp4")}  # fmt: skip
    at = RELEASES.index(release)
    # Others have the format under another class: awq_marlin before auto_awq, W4A4's for activations in FP8.
    others = {"awq_marlin", "compressed_tensors_mxfp4_fp8"}
    assert late - others == {name for name, case in by_module.items() if at < RELEASES.index(FIRST_RELEASES[case])}


# --- integers of other widths than 4 and 8 bits, which stock vLLM runs ------------------------------------------------

SYMMETRIC = INT4 | {"num_bits": 3}
LOW: dict[str, tuple[dict[str, Any], str]] = {
    "symmetric": (compressed(group(SYMMETRIC), format=PACK_QUANTIZED), min_versions.COMPRESSED_LOW_BITS),
    "zero points": (
        compressed(group(SYMMETRIC | {"symmetric": False}), format=PACK_QUANTIZED),
        min_versions.COMPRESSED_LOW_BITS_ZERO_POINTS,
    ),
    "auto-round": (AUTO_ROUND | {"bits": 2}, min_versions.AUTO_ROUND_LOW_BITS),
    "auto-round, experts alone": (
        AUTO_ROUND | {"extra_config": {r".*\.mlp\.experts.*": {"bits": 3}}},
        min_versions.AUTO_ROUND_LOW_BITS,
    ),
}


@pytest.mark.parametrize("case", LOW)
def test_low_bits_are_left_to_the_releases_that_load_them(case: str, run: Run, write: Write) -> None:
    config, first = LOW[case]
    words = ["explain", write(quantization_config=config), "--device", "nvidia-h200", "--vllm"]
    loaded = run(*words, first)
    assert loaded.status == 0 and "48 MoE layers have experts in" in loaded.text and "left to stock vLLM" in loaded.text
    older = run(*words, RELEASES[RELEASES.index(first) - 1])
    assert (older.status, older.out) == (cli.EXIT_NO_BACKEND, "") and f"from {first} on. Serve it with" in older.err


@pytest.mark.parametrize(
    ("config", "said"),
    [
        *((GPTQ | {"bits": bits}, f"bits is {bits}; vLLM's classes for GPTQ refuse any width") for bits in (2, 3, 5)),
        (
            GPTQ | {"dynamic": {r".*\.mlp\.experts.*": {"bits": 3}}},
            "bits is 3; vLLM's classes for GPTQ refuse any width",
        ),
        (compressed(group(SYMMETRIC), format="int-quantized"), "experts in 3-bit integers in the format int-quantized"),
        (
            compressed(group(INT4 | {"num_bits": 9}), format=PACK_QUANTIZED),
            "experts in 9-bit integers in the format pack",
        ),
    ],
)
@pytest.mark.parametrize("release", [RELEASES[0], RELEASES[-1]])
def test_widths_that_no_release_loads(config: dict[str, Any], said: str, release: str, run: Run, write: Write) -> None:
    result = run("explain", write(quantization_config=config), "--device", "nvidia-h200", "--vllm", release)
    assert (result.status, result.out) == (cli.EXIT_NO_BACKEND, "") and said in result.err


@every_release
def test_the_sources_say_which_widths_experts_may_have(release: str) -> None:
    package, at = sources(release) / "vllm" / "model_executor" / "layers", RELEASES.index(release)
    humming = package / "fused_moe" / "experts" / "fused_humming_moe.py"
    takes_low = humming.exists() and "_is_supported_wna16_weight_key" in humming.read_text(encoding="utf-8")
    assert takes_low is (at >= RELEASES.index(min_versions.COMPRESSED_LOW_BITS))
    types = (package / "quantization/compressed_tensors/schemes/compressed_tensors_wNa16.py").read_text()
    with_zeros = types.partition("WNA16_ZP_SUPPORTED_TYPES_MAP = {")[2].partition("}")[0]
    assert ("3:" in with_zeros) is (at >= RELEASES.index(min_versions.COMPRESSED_LOW_BITS_ZERO_POINTS))
    inc = package / "quantization" / "inc" / "schemes" / "inc_wna16_scheme.py"
    low = inc.exists() and "_build_humming_moe_method" in inc.read_text(encoding="utf-8")
    assert low is (at >= RELEASES.index(min_versions.AUTO_ROUND_LOW_BITS))
    gptq = (package / "quantization" / "auto_gptq.py").read_text(encoding="utf-8")
    listed = gptq.partition("TYPE_MAP = {")[2].partition("}")[0]
    assert [line.split(":")[0].strip() for line in listed.strip().splitlines()] == ["(4, True)", "(8, True)"]
