"""Which of racecheck's hazards are Triton's dispatch of warps: on what it reported of two kernels, and their code.

The report is of the fp8 products on an H200 (CUDA 13.0, Triton 3.6), three hazards for each place; the code is what
nvdisasm prints of these kernels, without instructions that neither jump, nor wait, nor touch the dispatch's bytes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu import dispatch

FOLDER = Path(__file__).parents[1] / "golden" / "racecheck"
REPORT = (FOLDER / "report.txt").read_text()
SHARED = {"first": 201992, "second": 202520}
CODE = {name: (FOLDER / f"product-{name}.sass").read_text() for name in SHARED}
LOAD = "        /*0100*/ BAR.SYNC.DEFER_BLOCKING 0x1 ;\n        /*0130*/ LDS.U8 R3, [R3+UR39+0x314fc] ;\n"
LAST = "        /*16690*/ STS.64 [UR4+0x31500], R2 ;\n        /*166a0*/ BAR.SYNC.DEFER_BLOCKING 0x1 ;\n"


def proven(name: str, code: str | None = None) -> object:
    return dispatch.dispatch_of("product", CODE[name] if code is None else code, SHARED[name], 12)


def test_the_dispatch_is_found_and_proven():
    first, second = proven("first"), proven("second")
    assert first.words == range(0x31900, 0x31908) and second.words == range(0x31B10, 0x31B18)
    assert first.writes == {0xC3D0, 0x16690} and second.writes == {0x7F70, 0xE3A0}
    assert first.reads == second.reads == {0x130}


def test_hazards_of_the_dispatch_alone_are_ok_and_counted():
    hazards = dispatch.hazards_of(REPORT)
    assert len(hazards) == 12 and {hazard.kind for hazard in hazards} == {"RAW"}
    kernels = [proven("first"), proven("second")]
    verdict = dispatch.verdict_of(REPORT, kernels)
    assert verdict == "ok, 12 hazards of Triton's warp dispatch, proven for 2 kernels"
    assert dispatch.verdict_of("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", []) == "ok"


def test_without_the_kernel_nothing_is_put_aside():
    verdict = dispatch.verdict_of(REPORT, [proven("first")], ["product: why"])
    assert verdict.startswith("6 hazards in 2 classes; 3 x RAW product+0xe3a0 product+0x130; 3 x RAW product+0x7f70 ")
    assert verdict.endswith("; 6 hazards of Triton's warp dispatch, proven for 1 kernels; product: why")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("__shared__ 0x31b14 in", "__shared__ 0x31b18 in"),  # a byte behind the dispatch's
        ("__shared__ 0x31b14 in", "__shared__ 0x31900 in"),  # the other kernel's bytes
        ("product+0xe3a0 in fp8_products.py:309\n=========     Read", "product+0xe390 in a.py:309\n=========     Read"),
        ("at product+0x130 in fp8_products.py:290\n=========     Current", "at product+0x140\n=========     Current"),
        ("product+0xe3a0 in fp8_products.py:309\n=========     Read", "down+0xe3a0 in a.py:309\n=========     Read"),
        ("Potential RAW", "Potential WAW"),
    ],
)
def test_a_hazard_elsewhere_fails(old: str, new: str):
    assert old in REPORT
    verdict = dispatch.verdict_of(REPORT.replace(old, new, 1), [proven("first"), proven("second")])
    assert verdict.startswith("1 hazards in 1 classes; 1 x ") and "; 11 hazards of Triton's warp dispatch" in verdict


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("SUMMARY: 14", "SUMMARY: 15", "15 hazards, but 12 with two places and 2 groups are shown"),
        ("Read Thread", "Access of Thread", "14 hazards, but 11 with two places and 2 groups are shown"),
        ("RACECHECK SUMMARY", "SUMMARY", "no summary of racecheck"),
    ],
)
def test_a_report_that_is_not_whole_fails(old: str, new: str, reason: str):
    assert reason in dispatch.verdict_of(REPORT.replace(old, new, 1), [proven("first"), proven("second")])


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        # The load before the barrier: also between the barriers where the first store is.
        (LOAD, "".join(reversed(LOAD.splitlines(keepends=True))), "1 loads .* behind \\[0\\] and \\[0\\] barriers"),
        # The last store behind its barrier: with the load.
        (LAST, "".join(reversed(LAST.splitlines(keepends=True))), "behind \\[0, 1\\] and \\[1\\] barriers"),
        # A barrier less in one part, or of fewer threads than all, or only for some.
        ("        /*01b0*/ BAR.SYNC.DEFER_BLOCKING 0x1 ;\n", "", "behind \\[0\\] and \\[0, 1, 2\\] barriers"),
        ("/*0100*/ BAR.SYNC.DEFER_BLOCKING 0x1 ;", "/*0100*/ BAR.SYNC 0x1, 0x100 ;", "0x100: .* all 384"),
        ("/*0100*/ BAR.SYNC.DEFER_BLOCKING 0x1 ;", "/*0100*/ @P0 BAR.SYNC.DEFER_BLOCKING 0x1 ;", "and \\[0, 1, 2\\] b"),
        ("/*0100*/ BAR.SYNC.DEFER_BLOCKING 0x1 ;", "/*0100*/ BAR.ARV 0x1, 0x180 ;", "0x100: .* all 384 threads"),
        # Code that this does not understand.
        ("/*0070*/ @!P0 BRA `(.L_x_0) ;", "/*0070*/ BRX R2 -0x10 ;", "0x70: BRX R2 -0x10 is not understood"),
        ("LDS.U8 R3, [R3+UR39+0x314fc]", "LDS.U8 R3, [R3+UR39+0x314f8]", "2 stores and 0 loads"),
    ],
)
def test_code_without_the_barriers_is_not_proven(old: str, new: str, reason: str):
    assert old in CODE["first"]
    with pytest.raises(ValueError, match=reason):
        proven("first", CODE["first"].replace(old, new, 1))


def test_barriers_and_a_jump_may_have_one_guard():
    """As Triton 3.9 has them, for a part that there is not: there it is two barriers, then the next load."""
    old = """        /*a3b0*/ @!P0 EXIT ;
        /*a3c0*/ BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*a3d0*/ BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*a3e0*/ BRA `(.L_x_17) ;
"""
    new = """        /*a3b0*/ @P0 BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*a3c0*/ @P0 BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*a3d0*/ @P0 BRA `(.L_x_17) ;
        /*a3e0*/ EXIT ;
"""
    assert old in CODE["first"]
    assert proven("first", CODE["first"].replace(old, new)) == proven("first")
    for line in ("/*a3c0*/ @P1", "/*a3b8*/ ISETP.NE.AND P0, PT, R3, RZ, PT ;\n  /*a3c0*/ @P0"):
        with pytest.raises(ValueError, match="behind \\[0\\] and \\[0, 1, 2\\] barriers"):
            proven("first", CODE["first"].replace(old, new.replace("/*a3c0*/ @P0", line)))


def test_a_barrier_of_all_threads_may_say_so():
    code = CODE["first"].replace("BAR.SYNC.DEFER_BLOCKING 0x1 ;", "BAR.SYNC.DEFER_BLOCKING 0x1, 0x180 ;")
    assert proven("first", code) == proven("first")
