"""Settings: types, sources, precedence; anything that is not understood is an error with what would be."""

from __future__ import annotations

import re
import time
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_moe_oracle.core.overrides import Override, first_match, unused_override_errors
from vllm_moe_oracle.errors import SettingError
from vllm_moe_oracle.settings import FIELDS, Settings, env_var, get_env, is_strict, load

BOOLEANS = [name for name, field in FIELDS.items() if field.type in ("bool", bool)]


def test_the_defaults_use_the_plugin_and_decide_nothing_for_the_user() -> None:
    assert load({}) == Settings()
    chosen = Settings()
    assert chosen.enabled and chosen.backend == "auto" and chosen.on_unavailable == "error"
    assert not (chosen.force or chosen.strict or chosen.allow_activation_quantization)
    assert chosen.source("backend") == "default"


@pytest.mark.parametrize("name", FIELDS)
def test_every_setting_has_a_help_text_and_a_variable(name: str) -> None:
    assert FIELDS[name].metadata["help"] and FIELDS[name].metadata["metavar"]
    assert env_var(name) == f"MOE_ORACLE_{name.upper()}"


# --- Types -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BOOLEANS)
@pytest.mark.parametrize(
    ("word", "value"),
    [("1", True), ("TRUE", True), (" yes ", True), ("on", True), ("0", False), ("False", False), ("no", False),
     ("off", False), (True, True), (False, False), (1, True), (0, False)],
)  # fmt: skip
def test_truth_values(name: str, word: object, value: bool) -> None:
    if not FIELDS[name].metadata["startup_only"]:
        assert getattr(load({}, {"moe_oracle": {name: word}}), name) is value
    if isinstance(word, str):
        assert getattr(load({env_var(name): word}), name) is value


GOOD: list[tuple[str, object, object]] = [
    ("backend", " emulation ", "emulation"),
    ("disable", "a, b,,", ("a", "b")),
    ("disable", "", ()),
    ("disable", ["a", " b"], ("a", "b")),
    ("on_unavailable", "Fallback", "fallback"),
    ("activations", "16bit", "16bit"),
    ("report", "some/file.jsonl", "some/file.jsonl"),
    ("rank_sync_timeout", "90", 90.0),
    ("rank_sync_timeout", " 5\n", 5.0),
    ("report", " some/file.jsonl ", "some/file.jsonl"),
    ("rank_sync_timeout", 0.5, 0.5),
    ("overrides", "", ()),
    ("overrides", r"re:layers\.[0-9]\.=marlin", (Override(r"layers\.[0-9]\.", "marlin"),)),
    ("overrides", "re:a=b; re:c= d;", (Override("a", "b"), Override("c", "d"))),
    # The last "=" separates the halves: a pattern may hold one, here as a lookahead.
    ("overrides", r"re:layers\.(?=1).*=x", (Override(r"layers\.(?=1).*", "x"),)),
    ("overrides", "re:re:x=b", (Override("re:x", "b"),)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "given_value", "expected"), GOOD)
def test_values_are_read(name: str, given_value: object, expected: object) -> None:
    assert getattr(load({}, {"moe_oracle": {name: given_value}}), name) == expected
    if isinstance(given_value, str):
        assert getattr(load({env_var(name): given_value}), name) == expected
        assert getattr(load({}, None, {name: given_value}), name) == expected


TIMEOUT = "rank_sync_timeout"
ODD_NUMBERS = ("\u0665\u0665", "\uff15", "1_0", "+5", "0x10", "1e1", "5.", ".5", "5,0", "--5")
"""What Python reads as numbers, or other languages do, and a setting does not."""
BAD: list[tuple[str, object, str]] = [
    *[(name, "maybe", "'maybe' is not a boolean. Write one of 0, 1, false, no, off, on, true") for name in BOOLEANS],
    ("enabled", 2, "2 is not a boolean"),
    ("enabled", None, "None is not a boolean"),
    ("enabled", [], r"\[\] is not a boolean"),
    *[
        (TIMEOUT, value, r"is not a time in seconds\. Write a number of seconds from 0\.1 to 86400")
        for value in ("0", -1, "inf", "-inf", "nan", "soon", True, None, "1e10", 1e300, "1e-9", 86401, [600],
                      *ODD_NUMBERS)
    ],
    *[
        ("min_time_saving", value, r"is not in \[0, 1\)\. Write a number from 0 to 0\.999, or a percentage: 3%")
        for value in ("1", "-0.1", "nan", "inf%", "100%", 1e300, True, None, {}, "%", "3%%", "\u0663%", "1_0%",
                      "0.0_1", "1e-2", "\uff10.\uff11")
    ],
    *[
        ("objective", f"8:{weight},16:1", "is not an objective")
        for weight in ("0", "-1", "nan", "inf", "1e7", "1e-7", "1e300", *ODD_NUMBERS)
    ],
    *[("objective", f"16:1,{tokens}:1", "is not TOKENS:WEIGHT") for tokens in (*ODD_NUMBERS, "9" * 5000)],
    *[("measure_at_start", value, "is not a time in seconds") for value in ODD_NUMBERS],
    ("objective", "0:1", "'0:1' is not TOKENS:WEIGHT"),
    ("objective", "1e3:1", "'1e3:1' is not TOKENS:WEIGHT"),
    ("objective", {8: 1e300}, "is not TOKENS:WEIGHT"),
    ("objective", "8:10000000", "the weight 10000000 is not in 0.000001 to 1000000"),
    ("backend", 3, "3 is not a name"),
    ("backend", ["a"], r"\['a'\] is not a name"),
    ("disable", 3, "3 is not a list of names. Separate names with commas"),
    ("disable", ["a", 3], "3 is not a name"),
    ("disable", {"a": 1}, "is not a list of names"),
    ("on_unavailable", "ignore", "'ignore' is not one of error, fallback"),
    ("activations", "fp8", "'fp8' is not one of checkpoint, 16bit"),
    ("report", 3, "3 is not a path"),
    ("overrides", "marlin", "an override needs a pattern and a backend"),
    ("overrides", "=marlin", "an override needs a pattern and a backend"),
    ("overrides", "re:=marlin", "an override needs a pattern and a backend"),
    ("overrides", "re:a=", "an override needs a pattern and a backend"),
    ("overrides", "re:a= ;re:b=c", "'re:a=': an override needs a pattern and a backend"),
    ("overrides", r"re:layers\.[0-9=x", r"re:layers\\.\[0-9 is not a regular expression: unterminated character set"),
    ("overrides", "re:(=x", r"re:\( is not a regular expression: missing \)"),
    ("overrides", "re:a{99999999999999999999}=x", "is not a regular expression: the repetition number is too large"),
    ("overrides", "re:a=b;layers=c", r"'layers=c': the pattern of an override begins with re:. Write re:"),
    ("overrides", "re:((((a?){40}){40}){40}){40}x=b", "repeats a part more than 10000 times"),
    ("overrides", f"re:{'a' * 20_001}=b", "has 20001 characters, more than 20000"),
    ("overrides", 3, "3 is not a text of overrides"),
    ("overrides", ["re:a=b"], r"\['re:a=b'\] is not a text of overrides. Write re:layers\\.\[0-9\]\\.=marlin, several"),
    ("overrides", {"re:a": "b"}, "is not a text of overrides. Write re:"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "message"), BAD)
def test_values_that_cannot_be_taken_are_errors_that_name_the_place(name: str, value: object, message: str) -> None:
    if not FIELDS[name].metadata["startup_only"]:
        with pytest.raises(SettingError, match=message) as caught:
            load({}, {"moe_oracle": {name: value}})
        assert caught.value.where == f"--additional-config moe_oracle.{name}"
    if isinstance(value, str):
        with pytest.raises(SettingError, match=message) as caught:
            load({env_var(name): value})
        assert caught.value.where == f"environment variable {env_var(name)}"
        with pytest.raises(SettingError, match=message) as caught:
            load({}, None, {name: value})
        assert caught.value.where == f"assignments.{name}"


@pytest.mark.parametrize("text", ["", " ", "\t\n"])
@pytest.mark.parametrize("name", FIELDS)
def test_empty_variable_counts_as_unset(name: str, text: str) -> None:
    chosen = load({env_var(name): text})
    assert getattr(chosen, name) == getattr(Settings(), name) and chosen.source(name) == "default"
    # Said by hand to one run, nothing is a value like others, which most settings cannot take.
    if name in ("disable", "overrides", "cache", "profile", "report"):
        assert load({}, None, {name: text}).source(name) == f"assignments.{name}"
    else:
        with pytest.raises(SettingError):
            load({}, None, {name: text})


# --- Unknown names ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sources", "words"),
    [
        (({"MOE_ORACLE_BACKENDS": "x"},), "unknown setting 'MOE_ORACLE_BACKENDS'. Did you mean MOE_ORACLE_BACKEND?"),
        (({"MOE_ORACLE_BACKNED": ""},), "Did you mean MOE_ORACLE_BACKEND?"),  # also when it is empty
        (({}, {"moe_oracle": {"bakend": "x"}}), "unknown setting 'bakend'. Did you mean backend?"),
        (({}, None, {"bakend": "x"}), "unknown setting 'bakend'. Did you mean backend?"),
        (({}, {"moe_oracle": {"sources": {}}}), "unknown setting 'sources'"),
    ],
)
def test_an_unknown_name_is_an_error_with_a_guess_and_the_valid_ones(sources: Any, words: str) -> None:
    with pytest.raises(SettingError, match=re.escape(words)) as caught:
        load(*sources)
    valid = map(env_var, FIELDS) if sources[0] else FIELDS
    assert all(name in str(caught.value) for name in valid)


@pytest.mark.parametrize(
    ("sources", "words"),
    [
        *(
            (({}, {"moe_oracle": section}), r"is not a JSON object.*Write")
            for section in (5, "backend=emulation", ["backend"], None, True)
        ),
        # Even if a later source replaces it.
        (({"MOE_ORACLE_STRICT": "perhaps"}, None, {"strict": "1"}), "MOE_ORACLE_STRICT"),
    ],
)
def test_what_no_source_may_hold_is_an_error(sources: Any, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        load(*sources)


@pytest.mark.parametrize("name", ["zzzzzz", 7])
def test_a_dissimilar_name_gets_no_suggestion(name: Any) -> None:
    with pytest.raises(SettingError, match=f"unknown setting '{name}'.* Valid are ") as caught:
        load({}, {"moe_oracle": {name: 1}})
    assert "Did you mean" not in str(caught.value)


def test_variables_of_others_are_left_alone() -> None:
    assert load({"VLLM_MOE_ORACLE": "x", "ORACLE_HOME": "y", "MOE_ORACLEX": "z"}) == Settings()


@pytest.mark.parametrize("config", [None, {}, {"other_plugin": {"backend": "x"}}, object()])
def test_a_config_without_our_section_changes_nothing(config: object) -> None:
    assert load({}, config) == Settings()


@pytest.mark.parametrize("name", ["enabled", "force", "strict"])
@pytest.mark.parametrize("value", [True, False, "perhaps"])
def test_startup_settings_are_refused_in_the_engine_config(name: str, value: object) -> None:
    with pytest.raises(SettingError, match=f"Set {env_var(name)} instead") as caught:
        load({}, {"moe_oracle": {name: value}})
    assert caught.value.where == f"--additional-config moe_oracle.{name}"
    assert getattr(load({env_var(name): "1"}), name) is True


@pytest.mark.parametrize(
    ("value", "wanted"),
    [(None, False), ("0", False), ("off", False), ("1", True), ("perhaps", True), ("", False), (" ", False)],
)
def test_strict_can_be_read_whatever_the_others_are(value: str | None, wanted: bool) -> None:
    others = {"MOE_ORACLE_BAKEND": "x"}
    assert is_strict(others if value is None else others | {"MOE_ORACLE_STRICT": value}) is wanted


# --- Precedence ------------------------------------------------------------------------------------------------------


def test_precedence_is_command_line_then_config_then_environment() -> None:
    variables = {"MOE_ORACLE_BACKEND": "one", "MOE_ORACLE_DISABLE": "one", "MOE_ORACLE_REPORT": "one"}
    config = {"moe_oracle": {"backend": "two", "disable": ["two"]}}
    chosen = load(variables, config, {"backend": "three"})
    assert (chosen.backend, chosen.disable, chosen.report) == ("three", ("two",), "one")
    assert chosen.source("backend") == "assignments.backend"
    assert chosen.source("disable") == "--additional-config moe_oracle.disable"
    assert chosen.source("report") == "environment variable MOE_ORACLE_REPORT"
    assert chosen.source("strict") == "default"


def test_settings_compare_by_value_and_not_by_source() -> None:
    assert load({"MOE_ORACLE_BACKEND": "a"}) == load({}, {"moe_oracle": {"backend": "a"}})
    assert hash(load({"MOE_ORACLE_STRICT": "1"})) == hash(load({}, None, {"strict": "yes"}))


def test_the_processes_own_environment_is_read_when_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_ORACLE_BACKEND", "emulation")
    assert load().backend == "emulation"
    assert get_env("MOE_ORACLE_BACKEND") == "emulation"
    monkeypatch.setenv("MOE_ORACLE_BACKNED", "emulation")
    with pytest.raises(SettingError, match="Did you mean MOE_ORACLE_BACKEND"):
        load()
    assert get_env("NO_SUCH_VARIABLE_ANYWHERE") is None


# --- Overrides -------------------------------------------------------------------------------------------------------


def test_patterns_are_searched_anywhere_and_case_counts() -> None:
    override = Override(r"layers\.[0-9]\.", "x")
    assert override.matches("model.layers.3.mlp.experts")
    assert not override.matches("model.layers.13.mlp.experts")
    assert not override.matches("model.Layers.3.mlp.experts")


def test_the_first_match_in_the_order_given_counts() -> None:
    overrides = load({}, None, {"overrides": r"re:layers\.1\.=a;re:layers=b"}).overrides
    found = [first_match(overrides, f"model.layers.{i}.x") for i in (1, 2)]
    assert [match.backend for match in found if match] == ["a", "b"]
    assert first_match(overrides, "lm_head") is None


@pytest.mark.parametrize(
    ("pattern", "refused"),
    [
        ("(.+)+x$", False),
        ("(?:(?:.+)+)+!", False),
        (".*.*.*.*.*.*.*.*!", False),
        ("(a|aa)+$", True),
        ("(.|..)+(?<=z)$", True),
    ],
)
def test_a_pattern_that_backtracks_for_hours_ends_soon(pattern: str, refused: bool) -> None:
    overrides = load({}, None, {"overrides": f"re:{pattern}=emulation"}).overrides
    said, start = "", time.process_time()
    try:
        for layer in range(100):
            assert first_match(overrides, f"model.{'a' * 60}.layers.{layer}.mlp.experts", "--set overrides") is None
    except SettingError as error:
        said = str(error)
    assert time.process_time() - start < 1
    message = f"--set overrides: override re:{pattern} takes more than 0.1 s to match the name of one layer. Write it"
    assert said.startswith(message) if refused else not said


UNUSED = [
    ("re:layers=a", []),
    (r"re:layers\.1\.=a;re:layers=b", []),
    (r"re:layers=a;re:layers\.1\.=b", [r"layers\.1\.=b decides no layer .* by re:layers=a before it"]),
    (r"re:layers=a;re:layers\.1\.=a", [r"layers\.1\.=a decides no layer"]),
    ("re:layers=a;re:layers=a", ["re:layers=a decides no layer .* by re:layers=a before it"]),
    (r"re:s\.0=a;re:s\.[12]=b;re:layers=c", [r"layers=c decides no layer: all .* by re:s\.0=a, re:s\.[12]=b before"]),
    (r"re:s\.0=a;re:nowhere=b;re:layers=c", ["re:nowhere matches no layer: the model has 3 quantized MoE layers"]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), UNUSED)
def test_overrides_without_effect_are_errors(text: str, expected: list[str]) -> None:
    layers = [f"model.layers.{index}.mlp.experts" for index in range(3)]
    overrides = load({}, None, {"overrides": text}).overrides
    found = [str(error) for error in unused_override_errors(overrides, layers, "here", layers)]
    assert len(found) == len(expected)
    for said, words in zip(found, expected, strict=True):
        assert said.startswith("here: override re:") and all(part in said for part in words.split(" .* "))


WORDS = st.text("ab=;:,re ()[\\{}09", max_size=10)
NUMBERS = st.floats() | st.integers(-(10**400), 10**400)
VALUES = st.one_of(
    WORDS, NUMBERS, NUMBERS.map(str), st.integers(), st.none(), st.booleans(), st.lists(WORDS, max_size=3)
)


@given(st.dictionaries(st.sampled_from(sorted(FIELDS)), VALUES | st.dictionaries(WORDS, VALUES, max_size=2)))
def test_no_value_raises_anything_but_our_own_error(section: dict[str, Any]) -> None:
    try:
        chosen = load({}, {"moe_oracle": section})
    except SettingError as error:
        assert error.where.startswith("--additional-config moe_oracle.")
    else:
        assert set(chosen.sources) == set(section)


@pytest.mark.parametrize("name", FIELDS)
def test_an_integer_that_python_does_not_print_is_refused(name: str) -> None:
    config: Any = {name: 10**5000}
    with pytest.raises(SettingError, match="an integer of 16610 bits is too large for any setting"):
        load({}, assignments=config)


@given(NUMBERS | NUMBERS.map(str))
def test_a_time_that_is_taken_is_one_that_torch_can_wait(value: object) -> None:
    try:
        seconds = load({}, {"moe_oracle": {TIMEOUT: value}}).rank_sync_timeout
    except SettingError as error:
        assert error.rule
    else:
        assert 0.05 < timedelta(seconds=seconds).total_seconds() <= 86400


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("foo", "'foo' is not an objective. Write one of decode, prefill, balanced"),
        ("8:1,8:2", "'8:1,8:2' is not an objective: 8 tokens are given twice"),
        ("8:1,x", "'8:1,x' is not an objective: 'x' is not TOKENS:WEIGHT"),
    ],
)
def test_an_objective_that_is_none_says_which_part(text: str, said: str) -> None:
    with pytest.raises(SettingError, match=re.escape(said)):
        load({}, assignments={"objective": text})


def test_numbers_in_a_file_are_read_as_they_are() -> None:
    chosen = load({}, {"moe_oracle": {TIMEOUT: 5, "min_time_saving": 1e-05, "objective": {"8": 1e-05, "16": 2}}})
    assert (chosen.rank_sync_timeout, chosen.min_time_saving) == (5.0, 1e-05)
    assert chosen.objective == "8:0.000010000000,16:2"
    assert load({"MOE_ORACLE_RANK_SYNC_TIMEOUT": "12.50"}).rank_sync_timeout == 12.5
