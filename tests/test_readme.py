"""README.md says what the code does: its generated parts are up to date, the files and commands that it names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.lib import readme_sections
from tests.tools import generate
from vllm_moe_oracle.releases.supported import NEWEST, RELEASES

TEXT = generate.README.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", list(generate.PARTS))
def test_a_generated_part_is_up_to_date(name: str) -> None:
    assert readme_sections.part(TEXT, name) == generate.PARTS[name](), "run: python -m tests.tools.generate --write"


def test_every_script_and_folder_that_it_names_exists() -> None:
    named = set(re.findall(r"(?:bash|python) ((?:examples|tests)/\S+?\.(?:sh|py))", TEXT))
    named |= set(re.findall(r"`(vllm_moe_oracle/\S+?/)`", TEXT))
    assert named
    assert [name for name in sorted(named) if not (generate.ROOT / name).exists()] == []


def test_every_setting_that_it_names_exists() -> None:
    from vllm_moe_oracle import settings

    variables = {settings.env_var(name) for name in settings.FIELDS}
    assert set(re.findall(r"MOE_ORACLE_[A-Z0-9_]+", TEXT)) <= variables
    # In this section a name in backticks is a setting or a command.
    section = TEXT.partition("## Let it measure")[2].partition("\n## ")[0]
    assert set(re.findall(r"`([a-z_]+)`", section)) - {"tune", "bench"} <= set(settings.FIELDS)


@pytest.mark.parametrize("path", [each for each in generate.FILES if each != generate.README], ids=str)
def test_a_generated_file_is_up_to_date(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert generate.FILES[path](text) == text, "run: python -m tests.tools.generate --write"


def test_the_golden_decisions_are_of_the_newest_release() -> None:
    assert generate.stale_decisions() == [], "run: python -m tests.tools.generate --write"


def test_a_stale_or_lost_list_of_releases_is_noticed() -> None:
    text = generate.WORKFLOW.read_text(encoding="utf-8")
    assert set(re.findall(r'"(0\.\d\d\.\d)"', text)) == set(RELEASES)
    assert generate.workflow(text.replace(f', "{NEWEST}"', "")) == text
    with pytest.raises(ValueError, match=r"0 lines match .* # served releases"):
        generate.workflow(text.replace("# served releases", ""))
    text = generate.SETUP.read_text(encoding="utf-8")
    assert generate.setup(text.replace(NEWEST, "0.1.0")) != text.replace(NEWEST, "0.1.0")
