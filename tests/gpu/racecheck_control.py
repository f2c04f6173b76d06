"""What racecheck says of Triton's dispatch of warps alone: a kernel that does nothing else, with faults and without.

    python tests/gpu/racecheck_control.py                  # every variant under racecheck: hazards of how many pairs
    python tests/gpu/racecheck_control.py --variant plain  # runs one without a tool, and checks what warps read

Each variant is the dispatch as Triton 3.6 writes it for 4 + 8 warps (`dispatch.py` says what it does), but for what
its name says. "none" has no barrier between the first store and its load: a real race, which racecheck must report.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import ctypes
import re
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAMS, LAUNCHES = 132, 8
ENTRY = """
.version 8.7
.target sm_90a
.address_size 64
.visible .entry dispatch(.param .u64 seen) .maxntid 384 .minnctapersm 1 .maxnreg 168 {
    .reg .pred %p<4>;
    .reg .b32 %r<12>;
    .reg .b64 %d<4>;
    .shared .align 8 .b8 state[8];
    mov.u32 %r0, %tid.x;
    shr.u32 %r1, %r0, 5;
    shfl.sync.idx.b32 %r1, %r1, 0, 31, -1;
    mov.u32 %r2, state;
    add.u32 %r3, %r2, %r1;
    mov.u32 %r4, %ctaid.x;
    mad.lo.u32 %r5, %r4, 12, %r1;
    ld.param.u64 %d0, [seen];
    mad.wide.u32 %d1, %r5, 4, %d0;
    mov.u32 %r8, 0;
    setp.lt.u32 %p0, %r1, 4;
    @%p0 bra FIRST;
AGAIN:
    LESS
    BEFORE_LOAD
    ld.shared.u8 %r6, [%r3+-4];
    AFTER_LOAD
    mad.lo.u32 %r8, %r8, 10, %r6;
    setp.eq.u32 %p1, %r6, 2;
    @%p1 bra END;
    MORE
    BARRIER
    BARRIER
    bra AGAIN;
END:
    st.global.u32 [%d1], %r8;
    ret;
FIRST:
    st.shared.v2.b32 [state], {0, 16843009};
    BARRIER
    BARRIER
    BARRIER
    BEFORE_LAST
    st.shared.v2.b32 [state], {33686018, 33686018};
    BARRIER
    ret;
}
"""
PLAIN = {
    "BARRIER": "barrier.sync 1;", "BEFORE_LOAD": "BARRIER", "AFTER_LOAD": "", "BEFORE_LAST": "",
    "LESS": "setmaxnreg.dec.sync.aligned.u32 120;", "MORE": "setmaxnreg.inc.sync.aligned.u32 168;",
}  # fmt: skip
VARIANTS = {
    "plain": {},
    "registers": {"LESS": "", "MORE": ""},
    "counted": {"BARRIER": "barrier.sync 1, 384;"},
    "zero": {"BARRIER": "barrier.sync 0;"},
    "late": {"BEFORE_LOAD": "BARRIER\n nanosleep.u32 20000;"},
    "none": {"BEFORE_LOAD": "nanosleep.u32 20000;", "AFTER_LOAD": "BARRIER"},
}
"""registers: none are handed over; counted, zero: the barrier named otherwise; late: 20 us from a barrier to the load
behind it; none: that time instead of the barrier."""


def source(variant: str) -> str:
    """PTX of a variant."""
    text = ENTRY
    for _ in range(2):  # what is put in may name the barrier
        for name, what in (PLAIN | VARIANTS[variant]).items():
            text = re.sub(rf"\b{name}\b", what, text)
    return text


def compiled(variant: str) -> bytes:
    """The variant's machine code, by the ptxas that Triton has."""
    import triton

    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = Path(folder) / "dispatch.ptx", Path(folder) / "dispatch.cubin"
        ptx.write_text(source(variant))
        ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
        subprocess.run([ptxas, "-arch=sm_90a", "-o", cubin, ptx], check=True)
        return cubin.read_bytes()


def run(variant: str) -> None:
    """LAUNCHES launches of PROGRAMS programs; raises AssertionError where a warp has read another part than its own."""
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *args: object) -> None:
        status = getattr(cuda, name)(*args)
        assert status == 0, f"{name} failed with {status}"

    device, context, module, function = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    seen, image = ctypes.c_uint64(), compiled(variant)
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    call("cuModuleLoadData", ctypes.byref(module), image)
    call("cuModuleGetFunction", ctypes.byref(function), module, b"dispatch")
    host = (ctypes.c_uint32 * (PROGRAMS * 12))()
    call("cuMemAlloc_v2", ctypes.byref(seen), ctypes.c_size_t(ctypes.sizeof(host)))
    arguments = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.byref(seen), ctypes.c_void_p))
    for _ in range(LAUNCHES):
        call("cuLaunchKernel", function, PROGRAMS, 1, 1, 384, 1, 1, 0, None, arguments, None)
        call("cuCtxSynchronize")
        call("cuMemcpyDtoH_v2", host, seen, ctypes.c_size_t(ctypes.sizeof(host)))
        for warp in range(12):  # the digits that it read: its part, 0 or 1, then 2, the end
            read = {host[program * 12 + warp] for program in range(PROGRAMS)}
            assert warp < 4 or read == {(warp - 4) // 4 * 10 + 2}, f"warp {warp} read {sorted(read)}"


def checked(variant: str) -> str:
    """A line on what racecheck said of a variant."""
    tool = ["compute-sanitizer", "--tool", "racecheck", "--racecheck-report", "all", "--print-limit", "100000"]
    command = [*tool, sys.executable, __file__, "--variant", variant]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=40)
    except subprocess.TimeoutExpired:
        return f"{variant:10s} did not end in 40 s"
    text = done.stdout + done.stderr
    kinds = {kind: len(re.findall(f"Potential {kind} hazard", text)) for kind in ("RAW", "WAR", "WAW")}
    ended = "ended" if "every warp read" in text else f"did not end right: {text[-300:]}"
    return f"{variant:10s} {kinds} of {PROGRAMS * LAUNCHES * 8 * 2} loads; {ended}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", choices=VARIANTS)
    args = parser.parse_args()
    if args.variant:
        run(args.variant)
        print(f"{args.variant}: every warp read its own part and the end")
        return 0
    print(subprocess.run(["compute-sanitizer", "--version"], capture_output=True, text=True).stdout.strip())
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for line in pool.map(checked, VARIANTS):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
