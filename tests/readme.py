"""The generated parts of README.md and of the CI's workflow: ``python tests/readme.py [--write]``.

Without ``--write`` it says whether they are up to date.

A part stands between ``<!-- name -->`` and ``<!-- /name -->`` and is made here from the code, or from committed
measurements. In the workflow, the lists of releases in front of ``# supported releases`` and ``# served releases`` are
the adapters'. `tests/cpu/test_readme.py` fails when anything is stale.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import marked

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"
EXAMPLE = "examples/qwen3-30b-a3b-mxfp8.json"
KERNELS = ROOT / "tests" / "golden" / "h200" / "kernels-vllm-0.33.0.json"
COSTS = ROOT / "tests" / "golden" / "costs.json"


def explain() -> str:
    """A real output of `explain`."""
    words = ["explain", EXAMPLE, "--device", "nvidia-h200"]
    code = "from vllm_moe_oracle.cli.main import main; main()"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MOE_ORACLE_")}
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=ROOT,
        env={**environment, "COLUMNS": "118", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    output = "\n".join(line.rstrip() for line in done.stdout.strip().splitlines())
    return f"```\n$ vllm-moe-oracle {' '.join(words)}\n{output}\n```"


def support_table() -> str:
    """The supported vLLM releases."""
    from vllm_moe_oracle.compat.eras import table

    return table().strip()


def settings() -> str:
    """Every setting with its environment variable, values, default and help."""
    from vllm_moe_oracle import settings as module

    lines = ["| setting | variable | values | default | what it does |", "|---|---|---|---|---|"]
    for name, field in module.FIELDS.items():
        default = field.default
        shown = "" if default in ((), "") else str(int(default)) if isinstance(default, bool) else str(default)
        values = str(field.metadata["metavar"]).replace("|", " \\| ")
        help_text = str(field.metadata["help"]).replace("|", "\\|")
        cell = f"`{shown}`" if shown else "none"
        lines.append(f"| `{name}` | `{module.variable(name)}` | {values} | {cell} | {help_text} |")
    return "\n".join(lines)


def numbers() -> str:
    """What the plugin costs, from the committed measurement."""
    costs = json.loads(COSTS.read_text())
    lines = ["| what | measured |", "|---|---|"]
    lines += [f"| {row['what']} | {row['value']:g} {row['unit']} |" for row in costs["rows"]]
    return "\n".join([*lines, "", f"{costs['conditions']}. Repeat with `{costs['command']}`."])


def kernels() -> str:
    """Our kernels against stock's default, from the committed benchmark."""
    data = json.loads(KERNELS.read_text())
    spans = {"1": (1, 1), "2 to 4": (2, 4), "8 to 64": (8, 64), "128 to 512": (128, 512),
             "1024 to 16384": (1024, 16384)}  # fmt: skip
    lines = [
        "| weights | layers | " + " | ".join(f"{span} token{'s' * (span != '1')}" for span in spans) + " |",
        "|---" * (2 + len(spans)) + "|",
    ]
    for name in ("int4", "int8", "mxfp8", "mxfp4"):
        rows = [row["us"] for row in data["rows"] if row["cell"].startswith(name)]
        compared = [row for row in rows if any("auto" in us for us in row.values())]
        cells = []
        for low, high in spans.values():
            # Stock's own layer may be what cannot run.
            ratios = [
                us["auto"] / us["ours"]
                for row in rows
                for tokens, us in row.items()
                if low <= int(tokens) <= high and "auto" in us
            ]
            mean = f"{statistics.geometric_mean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""
            cells.append(mean)
        lines.append(f"| {name} | {len(compared)} | {' | '.join(cells)} |")
    return "\n".join(
        [
            *lines,
            "",
            "Stock's default time over ours: geometric mean (worst to best layer and token count). Stock's default for "
            "MXFP4 includes softmax and top-k.",
        ]
    )


def integers() -> str:
    """Which backend runs which kind of integer experts, from the product that the tests go through."""
    sys.path.insert(0, str(Path(__file__).parent))
    from wna16_product import table

    return table()


PARTS: dict[str, Callable[[], str]] = {
    "explain": explain,
    "integers": integers,
    "support-table": support_table,
    "settings": settings,
    "numbers": numbers,
    "kernels": kernels,
}


def workflow(text: str) -> str:
    """The workflow with the adapters' lists of releases.

    Raises:
        ValueError: a list is missing.
    """
    from vllm_moe_oracle.compat.eras import CPU_RELEASES, RELEASES

    for mark, releases in {"supported releases": RELEASES, "served releases": CPU_RELEASES}.items():
        text, found = re.subn(rf"release: \[.*?\] # {mark}", f"release: {json.dumps(list(releases))} # {mark}", text)
        if found != 1:
            raise ValueError(f"{WORKFLOW.name} has {found} lists of {mark}; it needs one")
    return text


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="bring the page up to date")
    write = parser.parse_args().write
    text = README.read_text(encoding="utf-8")
    stale = []
    for name, make in PARTS.items():
        made = make()
        if marked.part(text, name) != made:
            stale.append(name)
            text = marked.with_part(text, name, made)
    jobs = WORKFLOW.read_text(encoding="utf-8")
    if workflow(jobs) != jobs:
        stale.append(WORKFLOW.name)
        if write:
            WORKFLOW.write_text(workflow(jobs), encoding="utf-8")
    if write and stale:
        README.write_text(text, encoding="utf-8")
    print(f"{'written' if write else 'stale'}: {', '.join(stale)}" if stale else "up to date")
    return int(bool(stale) and not write)


if __name__ == "__main__":
    sys.exit(main())
