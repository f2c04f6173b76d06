"""README.md says what the code does: its generated parts are up to date, the files and commands that it names exist."""

from __future__ import annotations

import re

import marked
import pytest
import readme

from vllm_moe_oracle.compat.eras import RELEASES

TEXT = readme.README.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", list(readme.PARTS))
def test_a_generated_part_is_up_to_date(name: str) -> None:
    assert marked.part(TEXT, name) == readme.PARTS[name](), "run: python tests/readme.py --write"


def test_every_script_and_folder_that_it_names_exists() -> None:
    named = set(re.findall(r"(?:bash|python) ((?:examples|tests)/\S+?\.(?:sh|py))", TEXT))
    named |= set(re.findall(r"`(vllm_moe_oracle/\S+?/)`", TEXT))
    assert named
    assert [name for name in sorted(named) if not (readme.ROOT / name).exists()] == []


def test_every_setting_that_it_names_exists() -> None:
    from vllm_moe_oracle import settings

    variables = {settings.variable(name) for name in settings.FIELDS}
    assert set(re.findall(r"MOE_ORACLE_[A-Z0-9_]+", TEXT)) <= variables


def test_the_ci_runs_the_adapters_releases() -> None:
    text = readme.WORKFLOW.read_text(encoding="utf-8")
    assert readme.workflow(text) == text, "run: python tests/readme.py --write"
    listed = set(re.findall(r'"(0\.\d\d\.\d)"', text))
    assert listed == set(RELEASES)


def test_a_stale_or_lost_list_of_releases_is_noticed() -> None:
    text = readme.WORKFLOW.read_text(encoding="utf-8")
    assert readme.workflow(text.replace(f', "{RELEASES[-1]}"', "")) == text
    with pytest.raises(ValueError, match="0 lists of served releases"):
        readme.workflow(text.replace("# served releases", ""))
