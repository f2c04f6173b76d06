"""Renews the kernels' fingerprint in shipped profiles: ``python -m tests.tools.restamp_profiles [BEFORE.json
AFTER.json]``.

A profile's figures of our kernels count only for the kernel sources that were measured (`kernel_sources_hash`). After a
change that does not change what is compiled, such as a rename, the profiles may take the new fingerprint: BEFORE and
AFTER are digests of both trees by `tests.tools.kernel_digests`. Without them it reports whether profiles are current.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from vllm_moe_oracle.measurements.environment import kernel_sources_hash

PROFILES = Path(__file__).resolve().parents[2] / "vllm_moe_oracle" / "profiles"
FINGERPRINT = re.compile(r'(^"environment": .*"kernels": ?)"[0-9a-f]{16}"', re.MULTILINE)


def restamped(text: str, fingerprint: str) -> str:
    """A profile with another fingerprint of the kernels in its environment."""
    return FINGERPRINT.sub(rf'\g<1>"{fingerprint}"', text)


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("digests", nargs="*", type=Path, metavar="DIGESTS")
    args = parser.parse_args()
    fingerprint = kernel_sources_hash()
    stale = [path for path in PROFILES.glob("*.json") if restamped(path.read_text(), fingerprint) != path.read_text()]
    if not args.digests:
        print("\n".join(f"{path.name} was measured with other kernels" for path in stale) or "every profile is current")
        return int(bool(stale))
    before, after = (json.loads(path.read_text()) for path in args.digests)
    if made_by := [name for name in ("tool", "triton") if before[name] != after[name]]:
        print(f"the digests cannot be compared: made by another {' and another '.join(made_by)}")
        return 1
    if before != after:
        print("the kernels compile to something else, or other configurations are chosen: measure again")
        return 1
    for path in stale:
        path.write_text(restamped(path.read_text(), fingerprint))
        print(f"{path.name}: {fingerprint}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
