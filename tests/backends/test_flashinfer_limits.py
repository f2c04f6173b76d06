"""Limits of TRTLLM-gen's MXFP8 kernels that vLLM leaves to FlashInfer, against the FlashInfer of each release."""

from __future__ import annotations

import re

from tests.lib.releases import flashinfer, some_releases
from vllm_moe_oracle.backends import _flashinfer_trtllm, trtllm_mxfp8_monolithic
from vllm_moe_oracle.releases import min_versions
from vllm_moe_oracle.releases.supported import RELEASES


def questions(release: str) -> str:
    """What the launcher for block scales asks about routing, in one line without messages."""
    _, source = flashinfer(release)
    launcher = source[source.index("class Fp8BlockScaleLauncher") :]
    body = launcher[launcher.index("void check_routing() const override") :]
    body = re.sub(r"//[^\n]*", "", body[: body.index("void prepare_routing()")])
    return re.sub(r"\s+", " ", re.sub(r'<<\s*(?:"[^"]*"|[\w>.-]+)\s*', "", body))


@some_releases(*(each for each in RELEASES if each >= min_versions.TRTLLM_MXFP8))
def test_numbers_of_experts_and_of_choices(release: str) -> None:
    asked = questions(release)
    ours = trtllm_mxfp8_monolithic
    assert f"num_experts % {_flashinfer_trtllm.EXPERTS_MULTIPLE}, 0)" in asked
    assert "TVM_FFI_ICHECK_GT(args->num_experts, args->top_k)" in asked
    assert f"top_k <= {_flashinfer_trtllm.MAX_TOP_K} &&" in asked
    # With groups.
    assert f"kNumKimiK2Experts = {ours._MANY_EXPERTS};" in asked
    assert f"num_experts <= kNumKimiK2Experts ? {ours._GROUPED_TOP_K} : {ours._GROUPED_TOP_K_MANY};" in asked
    assert f"topk_group <= {ours._MAX_TOP_K_GROUPS} &&" in asked
    assert "num_experts % args->n_group, 0)" in asked
    assert "TVM_FFI_ICHECK_LT(args->top_k, (args->topk_group * args->num_experts / args->n_group))" in asked
    # Every number that is asked for stands above.
    numbers = {int(each) for each in re.findall(r"(?<![\w>])\d+\b", asked.replace("int32_t", ""))} - {0, 1, 2}
    ours_numbers = {
        _flashinfer_trtllm.EXPERTS_MULTIPLE,
        _flashinfer_trtllm.MAX_TOP_K,
        ours._MANY_EXPERTS,
        ours._GROUPED_TOP_K,
    }
    assert numbers == ours_numbers | {ours._GROUPED_TOP_K_MANY, ours._MAX_TOP_K_GROUPS}
