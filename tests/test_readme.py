"""README.md says what the code does: its generated parts are up to date, the files and commands that it names exist."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.lib import readme_sections
from tests.lib.golden_decisions import GENERATE, GoldenTable
from tests.lib.golden_tables import TABLES
from tests.tools import generate, restamp_profiles
from vllm_moe_oracle.backends import _contract, _stock
from vllm_moe_oracle.releases.supported import NEWEST, RELEASES

README = generate.ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")
PAGES = [README, *sorted((generate.ROOT / "vllm_moe_oracle").rglob("*.md")), generate.ROOT / "tests" / "README.md"]
"""The pages for readers."""

PARTS = [(page, name) for page, parts in generate.PAGES.items() for name in parts]


@pytest.mark.parametrize(("page", "name"), PARTS, ids=[name for _, name in PARTS])
def test_a_generated_part_is_up_to_date(page: str, name: str) -> None:
    text = (generate.ROOT / page).read_text(encoding="utf-8")
    made = generate.PAGES[page][name]()
    assert readme_sections.part(text, name) == made, "run: python -m tests.tools.generate --write"


def test_a_page_without_the_marks_of_a_part_is_an_error() -> None:
    with pytest.raises(ValueError, match="there is no one part <!-- gain -->"):
        readme_sections.with_part("<!-- gain -->\n<!-- gain -->\n<!-- /gain -->", "gain", "")


@pytest.mark.parametrize("name", generate.WRITTEN)
def test_no_line_of_running_text_is_too_long(name: str) -> None:
    lines = readme_sections.prose((generate.ROOT / name).read_text(encoding="utf-8"))
    assert [number + 1 for number, line in lines if len(line) > readme_sections.WIDTH] == []


def test_running_text_is_put_into_full_lines() -> None:
    """Paragraphs and items of lists; not what is made from data, tables, headings and code."""
    long, kept = "word " * 30, "| cell " * 30
    page = f"# A\n\n{kept}\n\nA line\nthat breaks.\n\n* {long}`a b` 1. - {long}\n  more\n3. x\n\n```\n{long}\n{long}\n"
    page += f"```\n<!-- part -->\n{long}\n{long}\n<!-- /part -->\n"
    made = readme_sections.filled(page)
    assert made == readme_sections.filled(made)
    lines = made.splitlines()
    item = lines.index("A line that breaks.") + 2
    assert lines[:item] == ["# A", "", kept, "", "A line that breaks.", ""]
    end = lines.index("3. x")
    assert " ".join(lines[item:end]).split() == f"* {long}`a b` 1. - {long} more".split()
    assert all(line.startswith("  ") and line.split()[0] not in ("1.", "-") for line in lines[item + 1 : end])
    nexts = [line.split()[0] for line in lines[item + 1 : end]]
    assert all(
        len(line) <= 120 < len(line) + 1 + len(word) for line, word in zip(lines[item : end - 1], nexts, strict=True)
    )
    assert made.count(f"{long}\n{long}\n") == 2


def test_page_one_is_short_and_begins_with_a_picture() -> None:
    lines = TEXT.splitlines()
    assert len(lines) <= 150
    assert 0 < next(number for number, line in enumerate(lines) if "<picture>" in line) < 10
    for name in re.findall(r'(?:src|srcset)="([^"]+)"', TEXT):
        assert (generate.ROOT / name).is_file(), name


def test_every_script_and_folder_that_it_names_exists() -> None:
    named = set(re.findall(r"(?:bash|python) ((?:examples|tests)/\S+?\.(?:sh|py))", TEXT))
    assert {"examples/serve.sh", "tests/run.sh"} <= named
    assert [name for name in sorted(named) if not (generate.ROOT / name).exists()] == []


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(generate.ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), target
        assert not anchor or anchor in _anchors(found), target


@pytest.mark.parametrize("name", generate.WRITTEN)
def test_every_path_that_a_page_names_exists(name: str) -> None:
    """Paths in backticks are relative to the page, the repository, the package or the tests; VERSION is any."""
    page = generate.ROOT / name
    folders = (page.parent, generate.ROOT, generate.ROOT / "vllm_moe_oracle", generate.ROOT / "tests")
    spans = re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8"))
    words = [re.match(r"[\w.*-]+(?:/[\w.*-]+)+", word.lstrip("(")) for span in spans for word in span.split()]
    others = {".venv/bin/pytest", "vllm/vllm-openai"}  # made by tests/run.sh; an image
    named = {word[0] for word in words if word} - others
    assert [path for path in sorted(named) if not any(
        any(folder.glob(path.replace("VERSION", "*"))) for folder in folders
    )] == []  # fmt: skip


def test_what_decides_is_where_the_map_says() -> None:
    """`file` (`name`): the file has a function or a class of that name."""
    text = (generate.ROOT / "vllm_moe_oracle" / "README.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]+\.py)` \(`(\w+)`", text)
    assert len(named) > 9
    for path, name in named:
        code = (generate.ROOT / "vllm_moe_oracle" / path).read_text(encoding="utf-8")
        assert re.search(rf"^ *(?:def|class) {name}\b", code, re.MULTILINE), (path, name)


@pytest.mark.parametrize("of", [_contract.Backend, _stock.StockBackend, _contract.Builder], ids=lambda of: of.__name__)
def test_all_of_the_contract_is_on_its_page(of: type) -> None:
    """Attributes and methods have rows in tables, what a builder offers is named as `builder.name`."""
    text = (generate.ROOT / "vllm_moe_oracle" / "backends" / "README.md").read_text(encoding="utf-8")
    own = vars(of) | vars(of).get("__annotations__", {})
    public = {name for name in own if not name.startswith("_")}
    pattern = r"`builder\.(\w+)" if of is _contract.Builder else r"^\| `(\w+)"
    assert public and public <= set(re.findall(pattern, text, re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(generate.ROOT)))
def test_every_setting_that_a_page_names_exists(page: Path) -> None:
    from vllm_moe_oracle import settings

    variables = {settings.env_var(name) for name in settings.FIELDS}
    assert set(re.findall(r"MOE_ORACLE_[A-Z0-9_]*[A-Z0-9]", page.read_text(encoding="utf-8"))) <= variables


def test_every_setting_that_measured_choices_depend_on_exists() -> None:
    """In this section a name in backticks is a setting or a command."""
    from vllm_moe_oracle import settings

    text = (generate.ROOT / "vllm_moe_oracle" / "cli" / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z_]+)`", text.partition("## Measuring")[2].partition("\n## ")[0]))
    assert named and named - {"tune", "bench"} <= set(settings.FIELDS)


def test_the_extras_on_the_command_lines_page_are_the_metadatas() -> None:
    text = (generate.ROOT / "vllm_moe_oracle" / "cli" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?) \|", text.partition("| extra |")[2].partition("\n\n")[0], re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([\w-]+)`", row)}
    extras = tomllib.loads(generate.PROJECT.read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert named == set(extras) - {"test"}


def test_every_command_is_on_the_page_of_the_command_line() -> None:
    from vllm_moe_oracle.cli import commands

    text = (generate.ROOT / "vllm_moe_oracle" / "cli" / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `(\w+)", text.partition("## ")[0], re.MULTILINE))
    modules = {path.stem for path in Path(commands.__file__).parent.glob("[a-z]*.py")}
    assert modules <= named


def test_the_values_of_the_settings_on_page_one_are_valid() -> None:
    from vllm_moe_oracle import settings

    section = TEXT.partition("## Five settings")[2].partition("\n## ")[0]
    given = dict(re.findall(r"`(MOE_ORACLE_\w+)=(\w+)`", section)) | {"MOE_ORACLE_BACKEND": "marlin_mxfp4"}
    assert len(given) == 5
    settings.load(given)


def test_the_releases_on_page_one_are_the_supported_ones() -> None:
    assert f"vllm-openai:v{NEWEST}" in TEXT and f"[vLLM {RELEASES[0]} to {NEWEST}](" in TEXT
    stale = TEXT.replace(f"vllm-openai:v{NEWEST}", "vllm-openai:v0.1.0").replace(f" to {NEWEST}](", " to 0.1.0](")
    assert stale != TEXT and generate.with_releases(stale) == TEXT


@pytest.mark.parametrize("path", list(generate.FILES), ids=str)
def test_a_generated_file_is_up_to_date(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert generate.FILES[path](text) == text, "run: python -m tests.tools.generate --write"


def test_nothing_is_written_while_the_kernels_are_not_the_measured_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert restamp_profiles.stale_profiles() == [], "run: python -m tests.tools.restamp_profiles"
    monkeypatch.setattr(restamp_profiles, "kernel_sources_hash", lambda: "0" * 16)
    monkeypatch.setattr(generate, "FILES", {})
    monkeypatch.setattr("sys.argv", ["generate", "--write"])
    assert generate.main() == 2 and "run tests.tools.restamp_profiles, or measure" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["generate", "--write", "--as-predictions"])
    assert generate.main() == 0


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_the_golden_decisions_are_of_the_newest_release(table: GoldenTable) -> None:
    """Without its sources: a file of another release is stale although they cannot be had."""
    head = json.loads(table.path.read_text(encoding="utf-8"))["conditions"]
    assert head["stock"] == f"vLLM {NEWEST}", f"run: {GENERATE}"


def test_generate_counts_the_decisions_that_it_changes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = TABLES[0]
    text = table.path.read_text(encoding="utf-8")
    backend = table.rows()[0]["ours"]["backend"]
    made = text.replace(f'"backend": "{backend}"', '"backend": "another"', 1)
    monkeypatch.setattr(generate, "FILES", {table.path: lambda _: made})
    monkeypatch.setattr(generate.evidence, "is_stale", lambda: False)
    monkeypatch.setattr(generate.release_names, "is_stale", lambda: False)
    monkeypatch.setattr(generate.config_defaults, "is_stale", lambda: False)
    monkeypatch.setattr("sys.argv", ["generate"])
    assert generate.main() == 1
    first, second = capsys.readouterr().out.splitlines()
    name = table.path.relative_to(generate.ROOT)
    assert first == f"stale: {name} (1 of {len(table.rows())} decisions)"
    assert second == f"{table.name} {table.place(table.rows()[0])}: another, was {backend}"
    assert table.path.read_text(encoding="utf-8") == text


def test_a_stale_or_lost_list_of_releases_is_noticed() -> None:
    text = generate.WORKFLOW.read_text(encoding="utf-8")
    assert set(re.findall(r'"(0\.\d\d\.\d)"', text)) == set(RELEASES)
    assert generate.workflow(text.replace(f', "{NEWEST}"', "")) == text
    with pytest.raises(ValueError, match=r"0 lines match .* # served releases"):
        generate.workflow(text.replace("# served releases", ""))
    text = generate.SETUP.read_text(encoding="utf-8")
    assert generate.setup(text.replace(NEWEST, "0.1.0")) != text.replace(NEWEST, "0.1.0")


# --- Where a release may stand --------------------------------------------------------------------------------------

CONDITIONS = {
    "CHANGELOG.md": "what a release of this package supports",
    "README.md": "figures of served models",
    "vllm_moe_oracle/ACCURACY.md": "the price of the self-check on a GPU",
    "vllm_moe_oracle/OPERATIONS.md": "what was served over several GPUs, and what that release does",
    "vllm_moe_oracle/kernels/EXPERIMENTS.md": "what that release does not offer",
    "vllm_moe_oracle/kernels/README.md": "the release beside which kernels were timed",
    "vllm_moe_oracle/kernels/RESULTS.md": "figures",
    "vllm_moe_oracle/measurements/environment.py": "the two releases that an error was measured between",
    "vllm_moe_oracle/measuring/ERRORS.md": "figures",
    "vllm_moe_oracle/measuring/README.md": "figures",
    "vllm_moe_oracle/releases/min_versions.py": "what that release has first",
    "vllm_moe_oracle/releases/supported.py": "the line of the release",
}
"""Files that name the newest release outside what is generated, and why: a figure belongs to its release."""
NOT_READ = (
    "tests/golden/",
    "vllm_moe_oracle/profiles/",
    "vllm_moe_oracle/releases/vllm_names.py",
    "examples/plots/",
    "examples/recipes/",
)
"""Measurements, and files that are generated as a whole."""


def after_a_release(path: Path, text: str) -> str:
    """What stays of a file's text when all that is generated is made for a newer release; `generate` is patched."""
    name = path.relative_to(generate.ROOT).as_posix()
    if name in generate.PAGES:
        for part in generate.PAGES[name]:
            text = readme_sections.with_part(text, part, "")
        return generate.with_releases(text) if name == "README.md" else text
    return generate.FILES[path](text) if path in generate.FILES else text


def names_the_newest(text: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(NEWEST)}(?!\d)", re.sub(r"\bv(?=\d)", "", text)) is not None


@pytest.mark.skipif(not (generate.ROOT / ".git").exists(), reason="not a git checkout")
def test_only_generated_text_and_conditions_name_the_newest_release(monkeypatch: pytest.MonkeyPatch) -> None:
    later = "9.9.9"
    monkeypatch.setattr(generate, "NEWEST", later)
    monkeypatch.setattr(generate, "RELEASES", (*RELEASES[:-1], later))
    listed = subprocess.run(["git", "ls-files"], cwd=generate.ROOT, capture_output=True, text=True, check=True)
    read = [name for name in listed.stdout.splitlines() if not name.startswith(NOT_READ)]
    texts = {name: (generate.ROOT / name).read_bytes().decode(errors="replace") for name in read}
    found = {name for name, text in texts.items() if names_the_newest(after_a_release(generate.ROOT / name, text))}
    assert found <= set(CONDITIONS)


@pytest.mark.parametrize("form", ["{}", "vllm=={}", "v{}", '"{}+cu130"', "choice-1-vllm-{}.json"])
def test_the_newest_release_is_found_in_every_form(form: str) -> None:
    assert names_the_newest(form.format(NEWEST)) and not names_the_newest(form.format(f"1.{NEWEST}1"))
