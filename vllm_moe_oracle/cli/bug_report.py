"""Where a bug is reported, and what belongs to the report."""

from __future__ import annotations

from importlib import metadata

_DISTRIBUTION = "vllm-moe-oracle"
_CONTENTS = "with status --json, explain CHECKPOINT --json and the server's log lines with moe_oracle"


def where_to_report() -> str:
    """The address of the package's metadata and what to send there, as a sentence without its period.

    Sources that are not installed have no metadata: then the maintainers are those who the sources are from.
    """
    try:
        found = metadata.metadata(_DISTRIBUTION).get_all("Project-URL") or []
    except metadata.PackageNotFoundError:
        found = []
    addresses = dict(each.split(", ", 1) for each in found if ", " in each)
    return f"{addresses.get('Issues', 'to the maintainers of these sources')}, {_CONTENTS}"
