"""The README's picture shows the shipped times, and a stale one is noticed."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("matplotlib", reason="the extra plot")

from tests.tools import readme_plots
from vllm_moe_oracle.releases.supported import NEWEST
from vllm_moe_oracle.report import plots


@pytest.fixture(scope="module")
def found() -> readme_plots.Gains:
    return readme_plots.gains()


def test_the_pictures_are_up_to_date(found: readme_plots.Gains) -> None:
    assert readme_plots.stale() == [], "run: python -m tests.tools.readme_plots --write"
    assert all(machines for machines in found.values())


def test_a_stale_picture_is_noticed(found: readme_plots.Gains, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(readme_plots, "FOLDER", tmp_path)
    monkeypatch.setattr(readme_plots, "gains", lambda: found)
    assert len(readme_plots.stale()) == 2
    for theme in readme_plots.THEMES:
        (tmp_path / f"speedup-{theme}.svg").write_text(readme_plots.draw(found, theme))
    assert readme_plots.stale() == []
    counts = next(iter(found["mxfp8"].values()))
    monkeypatch.setattr(readme_plots, "gains", lambda: {**found, "mxfp8": {"another GPU": counts}})
    assert len(readme_plots.stale()) == 2


@pytest.mark.parametrize("theme", readme_plots.THEMES)
def test_a_picture_is_in_the_colors_of_its_theme_and_says_its_figures(found: readme_plots.Gains, theme: str) -> None:
    counts = {1: [2.0, 0.5], 8: [1.5]}
    drawn = readme_plots.draw({**found, "mxfp4": {f"NVIDIA H200, vLLM {NEWEST}": counts, "another GPU": counts}}, theme)
    width = float(ElementTree.fromstring(drawn).attrib["viewBox"].split()[2])
    # On a telephone the picture is 400 pixels wide.
    sizes = [float(each) * 400 / width for each in re.findall(r"font(?:-size)?: ?(?:\w+ )?([\d.]+)px", drawn)]
    assert sizes and min(sizes) >= 10
    assert 'role="img"' in drawn and "<title>" in drawn
    assert "MXFP4 on another GPU, geometric mean of up to 2 layers by tokens: 1: 1.00, 8: 1.50." in drawn
    index = readme_plots.THEMES[theme]
    used = [pair[index] for pair in (plots.INK_COLORS, *plots.SERIES_COLORS[:2])]
    assert all(color in drawn for color in used)
    assert not any(pair[1 - index] in drawn for pair in (plots.INK_COLORS, *plots.SERIES_COLORS[:2]))
