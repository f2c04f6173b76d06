"""What memcheck sees of a kernel that reads past a tensor: a control for `sanitize.py`.

    python tests/gpu/memcheck_control.py                # each variant under memcheck; exit status 1 unless as expected
    python tests/gpu/memcheck_control.py --past 1       # runs one without the tool

torch's allocator takes memory of the card in pieces of 2 MiB and hands out parts: a read past a tensor stays inside of
a piece, and memcheck says nothing. With `EXACT` each tensor is an allocation of its own, whose end memcheck knows.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys

import torch
import triton
import triton.language as tl

EXACT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
"""Environment in which torch asks the driver for each tensor's bytes, and for no more."""
SIZE = 1000


@triton.jit
def copy_bytes(source, target, count):
    """One byte a program."""
    place = tl.program_id(0)
    tl.store(target + place % count, tl.load(source + place))


def run(past: int) -> None:
    """Copies a tensor's bytes, and so many past its end."""
    source = torch.zeros(SIZE, dtype=torch.uint8, device="cuda")
    target = torch.empty(2 * SIZE, dtype=torch.uint8, device="cuda")
    copy_bytes[(SIZE + past,)](source, target, 2 * SIZE)
    torch.cuda.synchronize()


def errors(past: int, environment: dict[str, str]) -> int | None:
    """How many errors memcheck counts; None where it says nothing of that."""
    command = ["compute-sanitizer", "--tool", "memcheck", "--kernel-name=kernel_name=copy_bytes", sys.executable,
               __file__, "--past", str(past)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | environment)
    found = re.search(r"ERROR SUMMARY: (\d+) error", done.stdout + done.stderr)
    return int(found[1]) if found else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--past", type=int)
    args = parser.parse_args()
    if args.past is not None:
        run(args.past)
        return 0
    run(0)  # compiles
    expected = True
    for past, environment, name in ((0, EXACT, "exact"), (1, EXACT, "exact"), (1, {}, "in pieces")):
        found = errors(past, environment)
        print(f"{past} bytes past a tensor, allocations {name}: {found} errors", flush=True)
        if environment:
            expected &= found is not None and (found > 0) == (past > 0)
    return 0 if expected else 1


if __name__ == "__main__":
    sys.exit(main())
