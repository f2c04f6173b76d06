"""`report`: one page from measurements and decisions, whoever wrote the files; a browser looks at it."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import itertools
import json
import operator
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest

from tests.gpu.unlisted_layers import HELD_OUT, LAYERS
from tests.lib import golden_files
from tests.lib.cli import Run
from tests.lib.missing_packages import without
from vllm_moe_oracle.devices import catalog
from vllm_moe_oracle.errors import MeasurementError
from vllm_moe_oracle.measurements import model_shapes, profile
from vllm_moe_oracle.measurements.environment import Environment
from vllm_moe_oracle.measurements.kernel_shape import Sample, Timing, kernel_shape_of
from vllm_moe_oracle.oracle.registry import default_registry
from vllm_moe_oracle.releases.supported import NEWEST
from vllm_moe_oracle.report import html_report, page_data, plots
from vllm_moe_oracle.settings import Settings, load

pytest.importorskip("matplotlib", reason="the extra plot")
pytest.importorskip("jinja2", reason="the extra plot")

COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
HOSTILE = '</style><script>document.title = "owned"</script><img src=x onerror=alert(1)> & "quoted" $x_1$'
_PROFILE = profile.read(profile.SHIPPED_FOLDER / "nvidia_h200.json")
ENVIRONMENT: dict[str, Any] = {"gpu": "NVIDIA H200", "packages": {"vllm": _PROFILE.environment.packages["vllm"]}}
"""Where the shipped profile is valid: choices are decided again with it."""

HEAD = {"conditions": {"command": "bench", "environment": ENVIRONMENT, "note": HOSTILE}}


def record(name: str, tokens: int, us: dict[str, float], choice: str, **more: Any) -> dict[str, Any]:
    problem = model_shapes.parse(name)
    return {
        "layer": model_shapes.to_json(problem) | more.pop("layer", {}),
        "kernel_shape": msgspec.to_builtins(kernel_shape_of(problem)),
        "tokens": tokens,
        "us": us,
        "quartiles": {name: [0.9 * each, 1.1 * each] for name, each in us.items()},
        "stock": {"stock:auto": "HummingIndexedExperts"},
        "roofline_us": 5.0 * tokens**0.5,
        "choice": {"backend": choice, "why": "measured"},
        **more,
    }


def write(path: Path, *objects: Any) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in objects), encoding="utf-8")
    return path


def bench_file(path: Path, **more: Any) -> Path:
    rows = [
        record(
            layer,
            count,
            {f"hopper_{scheme}": 10.0 * count**0.5, f"marlin_{scheme}": 20.0, "stock:auto": 30.0},
            choice,
            **more,
        )
        for layer, scheme in (("mxfp8:qwen3-30b-a3b", "mxfp8"), ("mxfp4:gpt-oss-20b", "mxfp4"))
        for count in (1, 4, 16)
        for choice in [f"hopper_{scheme}"]
    ]
    return write(path, HEAD, *rows)


def profile_file(path: Path) -> Path:
    h200 = catalog.known_device("nvidia-h200")
    h200 = dataclasses.replace(h200, packages={**h200.packages, **ENVIRONMENT["packages"]})
    problem = model_shapes.parse("mxfp8:qwen3-30b-a3b")
    samples = [
        Sample(backend, "16bit", count, "uniform", us * count, us * count, us * count, 5)
        for backend, us in (("marlin_mxfp8", 10.0), ("humming_mxfp8", 20.0), ("hopper_mxfp8", 30.0))
        for count in COUNTS
    ]
    samples = [msgspec.structs.replace(each, activations=_activations(each.backend, problem)) for each in samples]
    made = profile.make(Environment.of(h200), {kernel_shape_of(problem): samples}, {"command": "tune"})
    profile.write(made, path)
    return path


def _activations(backend: str, problem: Any) -> str:
    return default_registry()[backend].activations(problem)


def page(*paths: Path) -> str:
    content = page_data.ReportContent()
    for path in paths:
        content += page_data.read(path, Settings())
    return html_report.render(content, "report")[0]


# --- What is said ---------------------------------------------------------------------------------------------------


def test_figures_are_those_of_the_records(tmp_path: Path) -> None:
    content = page_data.read(bench_file(tmp_path / "b.jsonl"), Settings())
    first = content.panels[0]
    assert first.speedup(1) == pytest.approx(3.0) and first.speedup(16) == pytest.approx(0.75)
    assert first.slowdown(4) == pytest.approx(0.0) and first.slowdown(16) == pytest.approx(1.0)
    assert first.rooflines_us == {1: 5.0, 4: 10.0, 16: 20.0}
    figures = dict(html_report.headline_figures(content.panels))
    assert figures["choices within 3% of the fastest backend"] == "66.7%"
    assert figures["largest slowdown against the fastest"] == "100.0%"
    spans = dict(html_report.speedups_by_span(content.panels))
    assert spans == {"1 token": "3.00×", "2 to 4 tokens": "1.50×", "8 to 64 tokens": "0.75×"}
    assert figures["speedup over stock's default, geometric mean"] == "1.50×"
    assert figures["cells slower than stock by more than 3%"] == "2 of 6"
    assert first.lead(1) == pytest.approx(2.0) and first.floor_share(4) == pytest.approx(0.5)
    heads, rows = html_report.times_table(first)
    assert heads[:5] == ["tokens", "floor", "hopper_mxfp8", "marlin_mxfp8", "stock:auto"]
    assert rows[2] == ["16", "20.0", "40.0", "20.0", "30.0", "hopper_mxfp8", "100.0%", "0.75×"]


def test_backends_with_other_numerics_are_not_compared(tmp_path: Path) -> None:
    """A backend with other numerics may be faster: no measurement could choose it."""
    rows = [record("mxfp8:qwen3-30b-a3b", 16, {"hopper_mxfp8": 40.0, "hopper_mxfp8_w8a8": 10.0}, "hopper_mxfp8")]
    (panel,) = page_data.read(write(tmp_path / "b.jsonl", HEAD, *rows), Settings()).panels
    assert panel.chosen == {16: "hopper_mxfp8"} and "hopper_mxfp8" in panel.compared_with
    assert panel.slowdown(16) == 0.0


def test_skewed_routing_is_shown_and_not_mixed_with_uniform(tmp_path: Path) -> None:
    skewed = {"conditions": HEAD["conditions"] | {"routing": "skewed"}}
    us = {"hopper_mxfp8": 77.0, "marlin_mxfp8": 88.0}
    rows = [record("mxfp8:qwen3-30b-a3b", count, us, "hopper_mxfp8") for count in (1, 4, 16)]
    content = page_data.read(bench_file(tmp_path / "b.jsonl"), Settings())
    content += page_data.read(write(tmp_path / "s.jsonl", skewed, *rows), Settings())
    panels = page_data.deduplicate(content).panels
    assert [panel.environment.endswith("skewed routing") for panel in panels] == [False, False, True]
    given = profile_file(tmp_path / "p.json")
    data = json.loads(given.read_text())
    for timing in data["entries"][0]["backends"].values():
        timing["times"]["skewed"] = {"1": [123.0, 122.0, 124.0, 5]}
    given.write_text(json.dumps(data))
    (panel,) = page_data.read(given, Settings()).panels
    assert html_report.skewed_times_table(panel)[1] == [["1", "123", "123", "123"]]
    assert "skewed routing" in page(given) and "123" not in {
        cell for row in html_report.times_table(panel)[1] for cell in row
    }
    (both,) = [
        each for each in page_data.deduplicate(content + page_data.read(given, Settings())).panels if each.skewed
    ]
    assert "stock:auto" in both.times or len(both.times) == 3


def test_a_heat_map_has_every_layer_and_names_its_worst_cells(tmp_path: Path) -> None:
    panels = page_data.read(bench_file(tmp_path / "b.jsonl"), Settings()).panels
    silent = page_data.LayerPanel("mxfp8:gpt-oss-20b", "c", "p", {}, failures={"stock:auto": "bias is required"})
    families = html_report.machines([*(dataclasses.replace(each, environment="p") for each in panels), silent])[
        0
    ].families
    assert [name for name, _ in families] == ["gpt-oss", "Qwen3"]
    found = html_report.heat_map("over stock", families, page_data.LayerPanel.speedup)
    assert found is not None and found.counts == (1, 4, 16)
    assert found.mean == "1.50×" and found.measured == "6 measured cells of 2 layers"
    (_, (one, other)), (_, (third,)) = found.groups
    assert (one.label, [each.words for each in one.cells]) == ("gpt-oss-20b mxfp4", ["3.00", "1.50", "0.75"])
    assert (other.label, other.cells, other.remark) == ("gpt-oss-20b mxfp8", (), "no time of stock: its layer failed")
    assert [each.level for each in third.cells] == ["f4", "f3", "s3"]
    assert found.worst[0] == "0.75× gpt-oss-20b mxfp4, 16 tokens"
    assert html_report.heat_map("over stock", (("gpt-oss", (silent,)),), page_data.LayerPanel.speedup) is None


def test_what_holds_at_one_number_of_tokens_is_no_range() -> None:
    stock, own = ({count: Timing(us, us, us) for count, us in points} for points in ([(1, 3.0), (4, 3.0)], [(1, 2.0)]))
    panel = page_data.LayerPanel("x", "s", "p", {"stock:auto": stock, "a": own}, chosen={1: "a", 4: "b", 16: "b"})
    facts = dict(html_report.card_facts(panel))
    assert (facts["decision"], facts["over stock"]) == ("a (1 token) and b (4 to 16 tokens)", "1.50×")
    wide = dataclasses.replace(panel, times=panel.times | {"b": {4: Timing(1.0, 1.0, 1.0)}})
    assert dict(html_report.card_facts(wide))["over stock"] == "2.12× (1.50× to 3.00×)"


def test_ratios_have_the_class_of_their_range() -> None:
    found = [html_report._cell(each).level for each in (0.5, 0.8, 0.9, 0.97, 1.03, 1.15, 1.4, 1.8, 1e9)]
    assert found == ["s3", "s2", "s1", "even", "f1", "f2", "f3", "f4", "f4"]


def test_a_choice_is_judged_by_other_runs_alone(tmp_path: Path) -> None:
    """Times that made the choice say nothing about it; the same times moved by a tenth of a microsecond do."""
    path = profile_file(tmp_path / "p.json")
    given = dataclasses.replace(Settings(), profile=str(path))
    (own,) = page_data.read(path, given).panels
    assert own.circular == set(COUNTS)
    labels = dict(html_report.headline_figures([own]))
    assert not any("within" in label or "slowdown" in label for label in labels)
    names = {"marlin_mxfp8": 10.0, "humming_mxfp8": 20.0, "hopper_mxfp8": 30.0}
    rows = [
        record(
            "mxfp8:qwen3-30b-a3b", count, {k: v * count + (count > 4) * 0.1 for k, v in names.items()}, "marlin_mxfp8"
        )
        for count in COUNTS
    ]
    (other,) = page_data.read(write(tmp_path / "b.jsonl", HEAD, *rows), given).panels
    assert other.circular == {1, 2, 4}
    judged = dict(html_report.headline_figures([other]))
    assert judged["cells that judge choices, of runs that did not make them"] == str(len(COUNTS) - 3)


def test_stock_s_times_are_shipped() -> None:
    """The page of an installation without files has them, each layer once, and figures that other code computes."""
    content = page_data.from_shipped_profiles(Settings())
    assert len({(each.shape, each.environment) for each in content.panels}) == len(content.panels) >= 48
    beside = [each for each in content.panels if each.speedup(1) is not None]
    assert len(beside) >= 36 and all(each.stock["stock:auto"] for each in beside)
    refused = [each for each in content.panels if "stock:auto" in each.failures]
    assert {each.name for each in refused} >= {"mxfp8:gpt-oss-20b", "int4_g32:gpt-oss-120b"}
    table = (golden_files.FOLDER / "h200" / "choice.md").read_text(encoding="utf-8")
    own_run = table.partition("Choices by shipped times of another run")[2].partition("\n\nChoices")[0]
    # The table is of the runs of choices, all under one Triton.
    files = (golden_files.FOLDER / "h200").glob("choice*.jsonl")
    lines = [line for file in files for line in file.read_text().splitlines()]
    names = {record["layer"]["name"] for record in map(json.loads, lines) if "layer" in record}
    first = min(each.environment for each in content.panels if each.environment.startswith("NVIDIA H200,"))
    h200 = [each for each in content.panels if each.environment == first and each.name in names]
    figures = dict(html_report.headline_figures(h200))
    assert figures["choices within 3% of the fastest backend"] in own_run
    assert figures["largest slowdown against the fastest"] in own_run
    assert f"of {figures['cells that judge choices, of runs that did not make them']} choices" in own_run


def test_a_cache_is_shown_with_the_shipped_times_of_stock() -> None:
    found = next(each for each in profile.shipped_comparisons() if each.environment.gpu == "NVIDIA H200")
    shape = next(each.kernel_shape for each in found.entries if "stock:auto" in found.stock_classes(each.kernel_shape))
    own = [each for each in found.samples(shape) if each.backend.startswith("hopper")]
    content = page_data.from_cache({shape: own}, found.environment, Settings())
    (panel,) = content.panels
    assert panel.stock["stock:auto"].endswith(", shipped") and panel.speedup(1) is not None
    assert "another machine with the same GPU" in content.notes[-1]
    elsewhere = msgspec.structs.replace(found.environment, packages=found.environment.packages | {"vllm": "0.1"})
    part = msgspec.structs.replace(found.environment, sm_count=found.environment.sm_count // 2)
    described = page_data._described_device(part)
    assert described is not None and described.sm_count == part.sm_count
    assert page_data.from_cache({shape: own}, part, Settings()).panels[0].stock == {}
    (panel,) = page_data.from_cache({shape: own}, elsewhere, Settings()).panels
    assert panel.stock == {} and panel.speedup(1) is None


def test_failures_are_reported_beside_times(tmp_path: Path) -> None:
    given = profile_file(tmp_path / "p.json")
    data = json.loads(given.read_text())
    data["entries"][0]["backends"]["marlin_mxfp8"]["failures"] = {"skewed": {"4": "relative error 3.0e-01"}}
    given.write_text(json.dumps(data))
    (panel,) = page_data.read(given, Settings()).panels
    assert "relative error" in panel.failures["marlin_mxfp8"] and panel.times["marlin_mxfp8"]
    assert set(panel.chosen.values()) == {"humming_mxfp8"} and "relative error 3.0e-01" in page(given)


@pytest.mark.parametrize("fails_later", [True, False])
def test_a_later_run_of_a_file_replaces_what_it_measured_again(fails_later: bool, tmp_path: Path) -> None:
    head, line = golden_files.newest("choice").read_text().splitlines()[:2]
    good, bad = json.loads(line), json.loads(line)
    name = next(each for each in good["activations"] if each != good["choice"]["backend"])
    del bad["us"][name]
    bad["failures"] = {name: "RuntimeError: a defect"}
    runs = [good, bad] if fails_later else [bad, good]
    path = tmp_path / "bench.jsonl"
    path.write_text("".join(f"{head}\n{json.dumps(each)}\n" for each in runs))
    (panel,) = page_data.read(path, Settings()).panels
    assert (name in panel.times) is not fails_later
    assert panel.failures == ({name: "RuntimeError: a defect"} if fails_later else {})


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """``report`` without files and measurements, and the page: the largest that the package makes by itself."""
    folder = tmp_path_factory.mktemp("shipped")
    cache = {"MOE_ORACLE_CACHE": str(folder / "cache")}
    ended = without(("torch", "triton", "vllm"), "report", "-o", "page.html", cwd=folder, **cache)
    return ended, folder / "page.html"


@pytest.fixture(scope="module")
def shipped_page(written: tuple[subprocess.CompletedProcess[str], Path]) -> str:
    return written[1].read_text(encoding="utf-8")


@pytest.mark.full
def test_the_report_needs_neither_torch_nor_vllm(written: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    ended, file = written
    lines = ended.stderr.splitlines()
    assert ended.returncode == 0 and re.fullmatch(r"note: drawing plots of \d+ layers", lines[0])
    assert len(lines) == 2 and lines[1].startswith("note: nothing was measured on this machine")
    assert file.stat().st_size > 1000


@pytest.mark.full
def test_every_class_of_a_plot_has_one_rule(shipped_page: str) -> None:
    head = shipped_page[: shipped_page.index("</style>")]
    rules = dict(re.findall(r"\.(p\d+) { ([^}]*) }", head))
    assert len(rules) == len(re.findall(r"\.p\d+ {", head)) == len(set(rules.values())) > 10
    assert set(re.findall(r'class="(p\d+)"', shipped_page)) == set(rules)


def test_a_label_becomes_no_style_of_the_page() -> None:
    label = 'm style="}body{display:none}x{"'
    svg = f'<svg width="1"><text style="fill: red">{label}</text></svg>'
    classes: dict[str, str] = {}
    assert label in plots.embedded_svg(svg, "a", classes) and classes == {"fill: red": "p0"}


@pytest.mark.full
def test_a_page_of_shipped_times_says_so_below_its_title(shipped_page: str) -> None:
    head = shipped_page[shipped_page.index("<header>") : shipped_page.index("</header>")]
    assert "<p>Nothing was measured on this machine" in head and "the times that this package ships.</p>" in head


@pytest.mark.full
def test_families_have_a_list_of_links(shipped_page: str) -> None:
    links = re.findall(r'href="#(machine-\d+-family-\d+)"', shipped_page)
    assert len(links) > 6 and all(f'id="{each}"' in shipped_page for each in links)


@pytest.mark.full
def test_the_largest_page_is_below_two_megabytes(shipped_page: str) -> None:
    assert len(shipped_page.encode()) < 2_000_000


def test_groups_without_attributes_are_left_out() -> None:
    """Those with some stay, with what is in them, in balance."""
    drawn = '<svg><g><g clip-path="url(#a)"><g><path d="M 0 1.0 2 3"/></g></g></g><g>\n</g></svg>'
    expected = '<svg><g clip-path="url(#t-0)"><path d="M 0 1 2 3"/></g></svg>'
    assert plots.embedded_svg(drawn, "t", {}) == expected


def test_the_page_has_both_stacks_of_a_gpu() -> None:
    """Which are one machine but for Triton."""
    panels = page_data.from_shipped_profiles(load({})).panels
    stacks = {each.environment for each in panels if each.name == "mxfp4:gpt-oss-20b" and "H200" in each.environment}
    assert {each.rpartition(", ")[2] for each in stacks} == {"Triton 3.6", "Triton 3.8"}


def test_a_path_is_drawn_with_fewer_letters() -> None:
    """A parser of paths that takes a letter for each command sees the same segments."""

    def segments(path: str) -> list[tuple[str, tuple[str, ...]]]:
        points = {"M": 2, "L": 2, "C": 6, "z": 0}
        found: list[tuple[str, tuple[str, ...]]] = []
        words, command = path.split(), ""
        while words:
            command = words.pop(0) if words[0].isalpha() else {"M": "L"}.get(command, command)
            found.append((command, tuple(words[: points[command]])))
            del words[: points[command]]
        return found

    full = "M 0 1 L 2 3 L 4 5 C 1 1 2 2 3 3 C 4 4 5 5 6 6 L 7 7 z M 8 8 L 9 9 M 1 1 M 2 2 L 3 3"
    (short,) = re.findall(r'd="([^"]*)"', plots.embedded_svg(f'<svg><path d="{full}"/></svg>', "a", {}))
    assert short == "M 0 1 2 3 4 5 C 1 1 2 2 3 3 4 4 5 5 6 6 L 7 7 z M 8 8 9 9 M 1 1 M 2 2 3 3"
    assert segments(short) == segments(full)


@pytest.mark.full
def test_tables_and_figures_say_what_they_are(shipped_page: str) -> None:
    """For a screen reader: every table has a caption and heads with a scope, every plot and scrolling part a name."""
    tables = re.findall(r"<table.*?</table>", shipped_page, flags=re.DOTALL)
    assert len(tables) > 50
    assert all("<caption" in each for each in tables)
    assert all("scope=" in head for each in tables for head in re.findall(r"<th[^>]*>", each.replace("<thead>", "")))
    assert all("aria-label=" in each for each in re.findall(r'<figure[^>]*|<div class="scroll"[^>]*', shipped_page))
    levels = [int(each) for each in re.findall(r"<h([1-6])", shipped_page)]
    assert levels[0] == 1 and all(after <= before + 1 for before, after in itertools.pairwise(levels))


def test_a_profile_is_shown_with_the_choice_that_the_oracle_makes_of_it(tmp_path: Path) -> None:
    content = page_data.read(profile_file(tmp_path / "p.json"), Settings())
    (panel,) = content.panels
    assert set(panel.chosen.values()) == {"marlin_mxfp8"} and panel.why == "measured"
    assert "less time than" in panel.explanation
    assert any(name == "trtllm_mxfp8" and "100" in " ".join(reasons) for name, reasons in panel.rejected)
    assert panel.rooflines_us and panel.environment.startswith("NVIDIA H200")


def test_choices_of_a_benchmark_are_decided_again() -> None:
    golden = Path(__file__).parents[1] / "golden/h200"
    every = [page_data.read(path, Settings()) for path in sorted(golden.glob("choice-*.jsonl"))]
    content = page_data.deduplicate(functools.reduce(operator.add, every))
    recorded = {
        str(kernel_shape_of(layer)): "static" if layer.scheme.act_order == "group" else "predicted"  # one backend alone
        for layer in HELD_OUT
    }
    # Its 22 experts a token were outside of what the model was fitted to then.
    (unlike,) = (layer for layer in LAYERS if layer.layer == "mxfp8:nemotron-3-super@tp4")
    recorded[str(kernel_shape_of(unlike))] = "static"
    assert all(panel.explanation and panel.why == recorded.get(panel.shape, "measured") for panel in content.panels)


def test_a_profile_on_one_line_is_one_too(tmp_path: Path) -> None:
    given = profile_file(tmp_path / "p.json")
    before = page_data.read(given, Settings())
    given.write_text(json.dumps(json.loads(given.read_text())))
    assert page_data.read(given, Settings()) == before and len(before.panels) == 1


def test_a_layer_in_several_files_counts_once(tmp_path: Path) -> None:
    one = page_data.read(profile_file(tmp_path / "p.json"), Settings())
    both = page_data.deduplicate(one + one)
    assert len(both.panels) == 1 and "mxfp8:qwen3-30b-a3b" in both.notes[0]
    assert page_data.deduplicate(one) == one


def test_the_report_omits_rejections_for_missing_packages(tmp_path: Path) -> None:
    content = page_data.read(golden_files.newest("choice"), Settings())
    reasons = [each for panel in content.panels for _, found in panel.rejected for each in found]
    assert reasons and not [each for each in reasons if "not installed" in each]


def test_a_layer_of_no_known_model_is_shown_without_a_choice(tmp_path: Path) -> None:
    path = profile_file(tmp_path / "p.json")
    path.write_text(path.read_text().replace('"hidden":2048', '"hidden":2080'))
    content = page_data.read(path, Settings())
    assert content.panels[0].chosen == {} and "no known model has the layer" in content.notes[0]
    assert "H2080" in page(path)


def test_a_server_s_decisions_and_reasons_are_shown(tmp_path: Path) -> None:
    group = {
        "layers": ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"],
        "count": 2,
        "problem": {"scheme": {"name": "wna16", "bits": 4}},
        "decision": {"backend": "hopper_wna16", "why": "measured", "explanation": "takes 11.0% less time than marlin"},
        "candidates": [
            {"backend": "trtllm_x", "accepted": False, "reasons": [{"detail": "needs 100", "remedy": "a B200"}]}
        ],
    }
    server = {"moe_oracle": "1", "vllm": NEWEST, "device": {"name": "NVIDIA H200"}, "groups": [group]}
    html = page(write(tmp_path / "d.jsonl", server | {"served": 2, "moe_layers": 3}, server | {"rank": 1, "ranks": 2}))
    assert "2 of 3 MoE layers run through the oracle" in html and "rank 1 of 2" in html
    assert "model.layers.0.mlp.experts and 1 more" in html and "int4" in html
    assert "takes 11.0% less time than marlin" in html and "needs 100 (a B200)" in html


def test_a_record_of_another_release_is_shown_as_far_as_it_goes(tmp_path: Path) -> None:
    group = {"layers": ["model.layers.0.mlp.experts"], "decision": {"backend": "hopper_x", "new": 1}, "new": {}}
    html = page(write(tmp_path / "d.jsonl", {"moe_oracle": "9", "groups": [group], "new": []}))
    assert "model.layers.0.mlp.experts" in html and "hopper_x" in html


def test_the_last_record_of_a_process_with_a_drafting_layer_is_shown(tmp_path: Path) -> None:
    group = {"problem": {"scheme": {"name": "mxfp8"}}, "decision": {"backend": "x", "why": "static", "explanation": ""}}
    server = {"moe_oracle": "1", "vllm": NEWEST, "device": {"name": "NVIDIA H200"}, "host": "here"}
    loads = [
        server
        | {"process": process, "served": count, "moe_layers": count}
        | {"groups": [group | {"count": count, "layers": ["a", "b"][:count]}]}
        for count in (1, 2)
        for process in (7, 8)
    ]
    html = page(write(tmp_path / "d.jsonl", *loads))
    assert html.count("2 of 2 MoE layers run through the oracle") == 2 and "1 of 1 MoE" not in html
    # Another server with the first one's number, as in a container: its load is another one.
    html = page(write(tmp_path / "e.jsonl", *loads, *loads))
    assert html.count("2 of 2 MoE layers run through the oracle") == 4


# --- The page -------------------------------------------------------------------------------------------------------


class _Page(HTMLParser):
    """Ids, tags that could run or load something, and links."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.handlers: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("href", "src", "xlink:href", "action"):
                self.links.append(value or "")
            if name.startswith("on"):
                self.handlers.append(name)


def test_the_page_is_one_file_with_sound_ids(tmp_path: Path) -> None:
    found = _Page(page(bench_file(tmp_path / "b.jsonl"), profile_file(tmp_path / "p.json")))
    assert len(found.ids) == len(set(found.ids)) and len(found.ids) > 20
    assert found.tags.isdisjoint({"script", "link", "img", "iframe", "object", "form", "base"})
    assert found.links and all(each.startswith("#") for each in found.links)
    assert {each[1:] for each in found.links} <= set(found.ids)


def test_nothing_in_a_file_becomes_part_of_the_page(tmp_path: Path) -> None:
    path = bench_file(
        tmp_path / "b.jsonl",
        layer={"name": HOSTILE},
        failures={HOSTILE: HOSTILE},
        stock={"stock:auto": HOSTILE},
    )
    found = _Page(page(path))
    assert found.tags.isdisjoint({"script", "img"}) and found.handlers == []


def test_each_plot_stands_by_itself_in_both_themes(run: Run, tmp_path: Path) -> None:
    result = run("report", bench_file(tmp_path / "b.jsonl"), "-o", tmp_path / "r.html", "--svg", tmp_path / "svg")
    assert result.status == 0 and "written: " in result.text
    files = sorted(each.name for each in (tmp_path / "svg").iterdir())
    assert files == ["speed-up.svg", "times-01.svg", "times-02.svg"]
    for each in (tmp_path / "svg").iterdir():
        text = each.read_text(encoding="utf-8")
        ElementTree.fromstring(text)
        used = set(re.findall(r"var\((--[\w-]+)\)", text))
        light, dark = (set(re.findall(r"(--[\w-]+):", part)) for part in text.split("prefers-color-scheme: dark"))
        assert used and used <= light and used <= dark
        # No color is left that only one theme can bear; white and black would be matplotlib's defaults.
        drawn = text[text.index("</style>") :]
        assert re.findall(r"(?:fill|stroke): ?#\w+", drawn) == []


def test_the_same_plot_is_the_same_file(tmp_path: Path) -> None:
    path = bench_file(tmp_path / "b.jsonl")
    one, two = (html_report.render(page_data.read(path, Settings()), "report")[1] for _ in range(2))
    assert one == two


def luminance(color: str) -> float:
    """Relative luminance by WCAG 2.2, of ``#rrggbb``."""
    parts = [int(color[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """Contrast ratio by WCAG 2.2."""
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize(("index", "backgrounds"), [(0, ("#ffffff", "#f5f7f9")), (1, ("#14171b", "#1d2127"))])
def test_lines_and_letters_can_be_told_from_the_page(index: int, backgrounds: tuple[str, str]) -> None:
    template = html_report.TEMPLATE.read_text(encoding="utf-8")
    for background in backgrounds:
        assert background in template
        assert contrast(plots.INK_COLORS[index], background) >= 7
        for pair in plots.SERIES_COLORS:
            assert contrast(pair[index], background) >= 4, pair


def test_times_are_drawn_into_one_file(tmp_path: Path) -> None:
    panels = page_data.read(bench_file(tmp_path / "b.jsonl"), Settings()).panels
    for name in ("times.svg", "times.png"):
        plots.save_picture(panels, str(tmp_path / name))
    drawn = (tmp_path / "times.svg").read_text()
    assert all(panel.name in drawn and panel.label in drawn for panel in panels) and "#0102" not in drawn
    assert ">0.75<" in drawn and ">3.00<" in drawn
    assert (tmp_path / "times.png").stat().st_size > 1000
    plots.save_picture([dataclasses.replace(each, stock={}, times={}) for each in panels], str(tmp_path / "empty.svg"))
    assert "over that of the choice" not in (tmp_path / "empty.svg").read_text()


# --- Bad input ------------------------------------------------------------------------------------------------------

GOOD = record("mxfp8:qwen3-30b-a3b", 1, {"hopper_mxfp8": 1.0}, "hopper_mxfp8")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is empty"),
        ("{}\n", "is neither records nor a profile"),
        ("[1]\n", "is not a profile"),
        ("\x00\xff", "is not a profile"),
        ("[" * 100_000, "is not a profile"),
        (json.dumps(HEAD) + "\n{", "line 2 is not a record"),
        (json.dumps(HEAD) + "\n" + json.dumps(GOOD | {"us": {"hopper_mxfp8": -1.0}}), "invalid measurement"),
        (json.dumps(HEAD) + "\n" + json.dumps(GOOD | {"us": {"hopper_mxfp8": 1e300}}), "invalid measurement"),
        (json.dumps(HEAD) + "\n" + json.dumps(GOOD | {"roofline_us": 0}), "invalid measurement"),
        (json.dumps(HEAD) + "\n" + json.dumps(GOOD | {"tokens": 0}), "invalid measurement"),
        (json.dumps(HEAD) + "\n" + json.dumps(GOOD | {"tokens": 10**30}), "invalid measurement"),
        (json.dumps(HEAD) + "\n" + json.dumps(GOOD | {"us": {"\x1b[2J": 1.0}}), "has an invalid name"),
        (json.dumps(HEAD) + "\n" + json.dumps(GOOD | {"layer": {"name": "x" * 5000}}), "has an invalid name"),
        (json.dumps(HEAD) + "\n" + json.dumps(GOOD | {"us": 3}), "line 2 is not a record"),
        (json.dumps(HEAD) + "\n" + json.dumps(GOOD)[:-1] + ', "us": {}}', "line 2: has the field 'us' more than once"),
        ('{"moe_oracle": "1", "groups": [], "served": 1, "served": 0}', "line 1: has the field 'served' more than"),
        ('{"moe_oracle": "1", "groups": [3]}', "line 1 is not a record"),
        (f'{{"moe_oracle": "1", "groups": [{{"{"x" * 70_000}": 3}}]}}', "line 1 is not a record"),
        ('{"format": "vllm-moe-oracle measurements", "version": 99}', "version 99"),
    ],
)
def test_what_is_no_measurement_is_refused(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "file"
    path.write_text(content, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(MeasurementError, match=words) as refused:
        page_data.read(path, Settings())
    assert len(str(refused.value)) < 2000


def test_a_record_that_cannot_be_read_costs_itself(run: Run, tmp_path: Path) -> None:
    file, page = tmp_path / "b.jsonl", tmp_path / "page.html"
    other = record("mxfp8:gpt-oss-20b", 1, {"hopper_mxfp8": 2.0}, "hopper_mxfp8")
    lines = [json.dumps(HEAD), "", json.dumps(GOOD | {"tokens": 0}), json.dumps(GOOD), "{" * 8, json.dumps(other)]
    file.write_text("\n".join(lines))
    content = page_data.read(file, Settings())
    assert {each.name: each.counts for each in content.panels} == {GOOD["layer"]["name"]: [1], "mxfp8:gpt-oss-20b": [1]}
    invalid, broken = content.notes
    assert invalid == f"left out: {file}: line 3 has an invalid measurement"
    assert broken.startswith(f"left out: {file}: line 5 is not a record: JSON is malformed")
    result = run("report", file, "-o", page)
    assert result.status == 0 and f"note: {invalid}" in result.err and invalid in page.read_text()
    file.write_text("\n".join([*lines, *9 * ["{"]]))
    assert page_data.read(file, Settings()).notes[-1] == f"left out: 6 more lines of {file}"


@pytest.mark.parametrize("broken", ['{"conditions": {"envi', '{"conditions": {}, "conditions": {}}'])
def test_records_after_unreadable_conditions_are_of_no_machine(broken: str, tmp_path: Path) -> None:
    """They are not taken for records of the run before."""
    file = tmp_path / "b.jsonl"
    rows = [record("mxfp8:qwen3-30b-a3b", count, {"hopper_mxfp8": 9.0}, "hopper_mxfp8") for count in (1, 4)]
    file.write_text("\n".join([json.dumps(HEAD), json.dumps(rows[0]), broken, json.dumps(rows[1])]))
    content = page_data.read(file, Settings())
    places = {each.environment: each.counts for each in content.panels}
    assert places.pop("an unknown machine") == [4] and list(places.values()) == [[1]] and len(content.notes) == 1
    file.write_text("\n".join([broken, json.dumps(rows[1])]))
    (panel,) = page_data.read(file, Settings()).panels
    assert panel.environment == "an unknown machine"


def test_decisions_beside_one_that_cannot_be_read_are_shown(tmp_path: Path) -> None:
    group = {"layers": ["model.layers.0.mlp.experts"], "decision": {"backend": "hopper_x"}}
    servers = [{"moe_oracle": "1", "groups": [group], "process": process} for process in (7, 8)]
    file, unknown = tmp_path / "d.jsonl", {"moe_oracle": "9", "groups": [], "record_version": 99}
    file.write_text("\n".join(['{"moe_oracle": "1", "gro', *map(json.dumps, (*servers, unknown))]))
    content = page_data.read(file, Settings())
    assert [(each.rank, each.ranks, each.process) for each in content.servers] == [(0, 1, 7), (0, 1, 8)]
    broken, newer = content.notes
    assert (
        "line 1 is not a record" in broken and "line 4 is not a record: " in newer and "record_version is 99" in newer
    )


def test_errors_of_the_command_are_one_line(run: Run, tmp_path: Path) -> None:
    bench = bench_file(tmp_path / "b.jsonl")
    for arguments, words in (
        ((tmp_path / "none",), "No such file"),
        ((tmp_path,), "directory"),
        (("/dev/zero",), "is not a regular file"),
        ((tmp_path / "none", "-o", tmp_path / "none" / "r.html"), "--output: "),  # before files are read
        ((tmp_path / "none", "-o", "r.html", "--svg", "/proc/x"), "--svg: /proc/x cannot be made or written in"),
        ((bench, "-o", tmp_path), "cannot be written"),
        ((write(tmp_path / "h.jsonl", HEAD),), f"{tmp_path / 'h.jsonl'}: holds no measurement. Measure: "),
        ((write(tmp_path / "x.jsonl", {}),), "Give a file of bench --jsonl, of tune --export, or the one that MOE_OR"),
    ):
        result = run("report", *arguments)
        assert result.status == 2 and words in result.err and result.err.count("\n") == 1


def test_a_file_without_measurements_is_named_beside_others(run: Run, tmp_path: Path) -> None:
    empty, full = write(tmp_path / "h.jsonl", HEAD), bench_file(tmp_path / "b.jsonl")
    result = run("report", empty, full, "-o", tmp_path / "page.html")
    assert result.status == 0 and f"note: {empty} holds no measurement" in result.err
    result = run("report", empty, empty, "-o", tmp_path / "none.html")
    assert result.status == 2 and not (tmp_path / "none.html").exists()


def test_without_its_libraries_it_says_how_to_get_them(
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else found(name, *rest)
    )
    result = run("report", bench_file(tmp_path / "b.jsonl"))
    assert result.status == 2 and result.err.startswith("error: matplotlib is not installed. pip install")


# --- In a browser ---------------------------------------------------------------------------------------------------

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.full
@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_a_browser_shows_it_in_both_themes_and_on_a_phone(tmp_path: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    html = tmp_path / "report.html"
    html.write_text(page(bench_file(tmp_path / "b.jsonl"), profile_file(tmp_path / "p.json")), encoding="utf-8")
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=BROWSER, args=arguments)
        seen = {}
        for scheme in ("light", "dark"):
            view = browser.new_page(color_scheme=scheme, viewport={"width": 1280, "height": 900})
            said: list[str] = []
            asked: list[str] = []
            view.on("console", lambda message, said=said: said.append(message.text))
            view.on("pageerror", lambda error, said=said: said.append(str(error)))
            view.on("request", lambda request, asked=asked: asked.append(request.url))
            view.goto(html.as_uri())
            assert said == [] and asked == [html.as_uri()]
            release = ENVIRONMENT["packages"]["vllm"]
            assert view.title() == f"MoE kernels on NVIDIA H200, vLLM {release}: measured"
            # Text, in the page and in its plots, as it is drawn: its color against the background that is under it.
            colors = view.evaluate(
                """() => {
                  const under = node => {
                    for (; node; node = node.parentElement) {
                      const found = getComputedStyle(node).backgroundColor;
                      if (!found.startsWith('rgba(0, 0, 0, 0')) return found;
                    }
                    return 'rgb(255, 255, 255)';
                  };
                  const names = 'h1, h2, h3, h4, p, span, caption, dt, dd, th, td, summary';
                  const texts = [...document.querySelectorAll(names)];
                  const drawn = [...document.querySelectorAll('svg text')];
                  return [...texts.map(each => [getComputedStyle(each).color, under(each)]),
                          ...drawn.map(each => [getComputedStyle(each).fill, under(each)])];
                }"""
            )
            assert len(colors) > 200
            for ink, paper in colors:
                assert contrast(_hex(ink), _hex(paper)) >= 4.5, (scheme, ink, paper)
            sizes = view.evaluate(
                "() => [...document.querySelectorAll('svg')].map(e => [e.clientWidth, e.clientHeight])"
            )
            assert len(sizes) == 3 and all(width > 200 and height > 60 for width, height in sizes)
            seen[scheme] = view.screenshot()
        assert seen["light"] != seen["dark"]
        for width in (1280, 400):
            view = browser.new_page(viewport={"width": width, "height": 800})
            view.goto(html.as_uri())
            assert view.evaluate("() => document.documentElement.scrollWidth") <= width
            _check_reading(view, width)
        _check_shipped_on_a_phone(browser, tmp_path / "shipped.html")
        browser.close()


def _check_shipped_on_a_phone(browser: Any, path: Path) -> None:
    """The widest heat map there is can be read without moving it, the last number of tokens with it."""
    content = page_data.from_shipped_profiles(load({}))
    # The map's width does not depend on the number of rows.
    panels = [each for each in content.panels if "qwen3-30b" in each.name]
    content = dataclasses.replace(content, panels=tuple(panels[:3]))
    path.write_text(html_report.render(content, "report")[0], encoding="utf-8")
    view = browser.new_page(viewport={"width": 400, "height": 800})
    view.goto(path.as_uri())
    measure = """() => { const map = document.querySelector('.heat'), cell = map.querySelector('td');
      return [map.scrollWidth, map.parentElement.clientWidth, parseFloat(getComputedStyle(cell).fontSize),
        [...map.querySelectorAll('thead th')].filter(each => each.offsetWidth).map(each => each.textContent)]; }"""
    needed, there, size, heads = view.evaluate(measure)
    assert needed <= there and size >= 12
    assert heads[0] == "tokens" and heads[-1] == str(max(content.panels[0].counts))


def test_the_title_is_that_of_the_data(tmp_path: Path) -> None:
    content = page_data.from_shipped_profiles(load({}))
    content = dataclasses.replace(
        content, panels=tuple(each for each in content.panels if each.environment == content.panels[0].environment)
    )
    assert html_report.page_title(content) == f"MoE kernels on {content.panels[0].environment}: measured"
    other = dataclasses.replace(content.panels[0], environment="GPU A, vLLM 0.30.0")
    both = dataclasses.replace(content, panels=(other, *content.panels))
    assert html_report.page_title(both).startswith("MoE kernels on GPU A, vLLM 0.30.0 and NVIDIA")


def _check_reading(view: Any, width: int) -> None:
    """The gain is in sight, letters are large enough, and the keyboard reaches what can be opened or scrolled."""
    gain = view.get_by_text("speedup over stock's default, geometric mean", exact=True).bounding_box()
    assert gain is not None and gain["y"] < 400, width
    small = view.evaluate(
        """() => [...document.querySelectorAll('h1, h2, h3, h4, p, dt, dd, th, td, summary, svg text')].map(each => {
          const scale = each.closest('svg') ? each.getCTM().a : 1;
          return [parseFloat(getComputedStyle(each).fontSize) * scale, each.textContent.slice(0, 40)];
        }).filter(([size]) => size > 0 && size < 10)"""
    )
    assert small == [], (width, small)
    reached = []
    for _ in range(12):
        view.keyboard.press("Tab")
        reached.append(view.evaluate("() => document.activeElement.className || document.activeElement.tagName"))
    assert reached[0] == "skip" and {"scroll", "SUMMARY", "A"} <= set(reached), reached


def _hex(color: str) -> str:
    return "#" + "".join(f"{int(float(each)):02x}" for each in re.findall(r"[\d.]+", color)[:3])
