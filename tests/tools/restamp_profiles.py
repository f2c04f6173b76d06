"""Renews the kernels' fingerprint in shipped profiles and the latency model.

    python -m tests.tools.restamp_profiles [BEFORE.json AFTER.json]

A profile's figures of our kernels count only for the kernel sources that were measured (`kernel_sources_hash`). After a
change that does not change what is compiled, such as a rename, the profiles may take the new fingerprint: BEFORE and
AFTER are digests of both trees by `tests.tools.kernel_digests`. Without them it reports whether profiles are current.

Calls of layers in float16 may differ, as long as no profile has times of such layers, and those of kernels for fp8
activations, as long as none has times of their backends. If none in 16 bits differs, the old fingerprint joins `EQUAL`,
so that committed benchmarks which no profile has taken are still times of these kernels.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from vllm_moe_oracle.backends._hopper_fp8 import HopperFp8Backend
from vllm_moe_oracle.measurements.environment import kernel_sources_hash
from vllm_moe_oracle.oracle.registry import discover

EQUAL = Path(__file__).resolve().parents[1] / "golden" / "equal-kernels.json"
"""Earlier fingerprints of kernels that compile to the same, by the present one."""
PROFILES = Path(__file__).resolve().parents[2] / "vllm_moe_oracle" / "profiles"
_FP8_BACKENDS = [
    each.name
    for each in discover()
    if getattr(each, "activation_precision", "") == HopperFp8Backend.activation_precision
]
FLOAT16, FP8 = "in float16", "of kernels for fp8 activations"
SELDOM_TIMED = {
    FLOAT16: (re.compile(r": float16, \d+$"), re.compile(r'"dtype": ?"float16"')),
    FP8: (re.compile(r"^fp8 "), re.compile(f'"(?:{"|".join(_FP8_BACKENDS)})"')),
}
"""Kinds of times that a profile may lack: how their calls are named, and what is in a profile that has some."""
FINGERPRINT = re.compile(r'(^ *"environment": ?\{(?:[^{}]|\{[^{}]*\})*?"kernels": ?)"[0-9a-f]{16}"', re.MULTILINE)
"""In the first object of that name at the start of a line, in the form of the profiles and in that of the model."""


def restamped(text: str, fingerprint: str) -> str:
    """A profile with another fingerprint of the kernels in its environment."""
    return FINGERPRINT.sub(rf'\g<1>"{fingerprint}"', text)


def fingerprint_of(text: str) -> str:
    """The fingerprint of the kernels in a profile's environment."""
    found = FINGERPRINT.search(text)
    assert found is not None
    return text[found.end(1) + 1 : found.end() - 1]


def earlier_fingerprints(present: str) -> frozenset[str]:
    """Fingerprints of earlier kernel sources that compile to the same as the present ones, shown by digests."""
    return frozenset(json.loads(EQUAL.read_text()).get(present, ()))


def join_equal(before: str, present: str) -> None:
    """Records that the kernels of two fingerprints compile to the same, the earlier ones' earlier ones included."""
    known = earlier_fingerprints(before) | earlier_fingerprints(present) | {before}
    EQUAL.write_text(json.dumps({present: sorted(known - {present})}, indent=1) + "\n")


def changed_calls(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Names of the calls that compile to something else, and of the layers with other choices."""
    return [
        name
        for part in ("compiled", "choices")
        for name in sorted(before[part].keys() | after[part].keys())
        if before[part].get(name) != after[part].get(name)
    ]


def stale_profiles() -> list[Path]:
    """Profiles whose times of our kernels were taken with other kernel sources than the present ones."""
    present = kernel_sources_hash()
    return [path for path in sorted(PROFILES.glob("*.json")) if restamped(text := path.read_text(), present) != text]


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("digests", nargs="*", type=Path, metavar="DIGESTS")
    args = parser.parse_args()
    fingerprint = kernel_sources_hash()
    stale = stale_profiles()
    if not args.digests:
        print("\n".join(f"{path.name} was measured with other kernels" for path in stale) or "every profile is current")
        return int(bool(stale))
    before, after = (json.loads(path.read_text()) for path in args.digests)
    if made_by := [name for name in ("tool", "triton") if before[name] != after[name]]:
        print(f"the digests cannot be compared: made by another {' and another '.join(made_by)}")
        return 1
    changed = changed_calls(before, after)
    kinds = {kind: [name for name in changed if call.search(name)] for kind, (call, _) in SELDOM_TIMED.items()}
    texts = [path.read_text() for path in stale]
    missing = [
        name
        for kind, names in kinds.items()
        if not any(SELDOM_TIMED[kind][1].search(text) for text in texts)
        for name in names
    ]
    if others := [name for name in changed if name not in missing]:
        print("the kernels compile to something else, or other configurations are chosen: measure again")
        print("\n".join(others[:9]))
        return 1
    for kind, names in kinds.items():
        if names:
            print(f"no profile has times {kind}, where {len(names)} calls differ: {'; '.join(names)}")
    if not kinds[FLOAT16]:
        for before_hash in sorted(set(map(fingerprint_of, texts))):
            join_equal(before_hash, fingerprint)
    for path in stale:
        path.write_text(restamped(path.read_text(), fingerprint))
        print(f"{path.name}: {fingerprint}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
