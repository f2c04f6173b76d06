"""What a user sets in vain: misspelled names, settings that others leave without effect, and contradictions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.lib.cli import CONFIGS, Run
from vllm_moe_oracle.core import env_vars
from vllm_moe_oracle.errors import SettingError
from vllm_moe_oracle.oracle.backend_names import check_backend_names, list_without_effect
from vllm_moe_oracle.oracle.registry import default_registry
from vllm_moe_oracle.settings import FIELDS, env_var, load, without_effect

EXPLAIN = ("explain", str(CONFIGS / "gpt-oss-20b.json"), "--device", "h200")


def variables(**values: str) -> dict[str, str]:
    return {env_var(name): value for name, value in values.items()}


# --- Names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("MOE_ORACLE", "MOE_ORACLE_..."),
        ("MOEORACLE_BACKEND", "MOE_ORACLE_BACKEND"),
        ("VLLM_MOE_ORACLE_BACKEND", "MOE_ORACLE_BACKEND"),
        ("VLLM_MOE_ORACLE_BACKNED", "MOE_ORACLE_BACKEND"),
        ("moe_oracle_backend", "MOE_ORACLE_BACKEND"),
        ("MOE_ORCALE_SELF_CHECK", "MOE_ORACLE_SELF_CHECK"),
        ("MOE-ORACLE-STRICT", "MOE_ORACLE_STRICT"),
    ],
)
def test_a_variable_that_is_nearly_ours_is_said(name: str, meant: str) -> None:
    chosen = load({name: "1"} | variables(backend="emulation", strict="1"))
    (error,) = without_effect(chosen)
    # It may be another program's, so that nothing ends for it.
    assert list_without_effect(chosen, "auto", default_registry()) == [str(error)]
    assert f"{name!r} is no variable of a setting. Did you mean {meant}?" in str(error)
    assert chosen == load(variables(backend="emulation", strict="1"))


@pytest.mark.parametrize(
    "name",
    [
        "ORACLE_HOME", "ORACLE_CACHE", "ORACLE_BACKEND", "VLLM_CACHE_ROOT", "MOE_BACKEND", "_MOE_ORACLE_RECORDS", "",
        # Kubernetes makes these of a service that is called vllm-moe-oracle.
        "VLLM_MOE_ORACLE_PORT", "VLLM_MOE_ORACLE_SERVICE_HOST", "VLLM_MOE_ORACLE_PORT_8000_TCP_PROTO",
        "VLLM_MOE_ORACLE", "VLLM_MOE_ORACLE_DIR", "VLLM_MOE_ORACLE_SHA", "MODEL_ORACLE", "MORE_ORACLE",
    ],
)  # fmt: skip
def test_a_variable_of_others_is_not(name: str) -> None:
    assert not load({name: "1"}).similar_variables


@pytest.mark.parametrize("name", ["ORACLE_HOME", "VLLM_CACHE_ROOT", "MOE_BACKEND", "VLLM_MOE_ORACLE_PORT", ""])
def test_a_key_of_others_is_not(name: str) -> None:
    assert not load({}, {name: "1"}).misspelled


def test_a_large_environment_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings are read for every layer."""
    compared: list[str] = []
    real = env_vars._is_slip
    monkeypatch.setattr(env_vars, "_is_slip", lambda word, meant: compared.append(word) or real(word, meant))
    large = {f"SERVICE_{index}_BACKEND": "1" for index in range(5000)}
    assert load(large) == load(large)
    assert len(compared) == len(large)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("moe_orcale", {}, 'Did you mean {"moe_oracle": ...}?'),
        ("moe-oracle", {}, 'Did you mean {"moe_oracle": ...}?'),
        ("MOE_ORACLE_BACKEND", "emulation", 'Did you mean {"moe_oracle": ...}?'),
        ("backend", "emulation", 'Did you mean {"moe_oracle": {"backend": ...}}?'),
        ("backend", {"of": "others"}, ""),
        ("enabled", True, ""),
        ("refresh", True, ""),
        ("torchair_graph_config", {}, ""),
        (7, 7, ""),
    ],
)
def test_a_key_that_is_nearly_ours_is_said(key: Any, value: object, said: str) -> None:
    found = without_effect(load({}, {"moe_oracle": {"objective": "decode"}, key: value}))
    assert [said in str(each) for each in found] == [True] * bool(said)
    if said:
        assert repr(key) in str(found[0])


# --- Settings beside others ------------------------------------------------------------------------------------------

NO_TIMES = {"use_measurements": "0"}
NAMED = {"backend": "emulation"}
IN_VAIN: list[tuple[dict[str, str], dict[str, str]]] = [
    (NO_TIMES, {"objective": "decode"}),
    (NO_TIMES, {"min_time_saving": "0.1"}),
    (NO_TIMES, {"min_time_saving": "0"}),
    (NO_TIMES, {"allow_second_layout": "1"}),
    (NO_TIMES, {"measure_at_start": "5"}),
    (NO_TIMES, {"profile": "/nonexistent"}),
    (NO_TIMES, {"cache": "/tmp"}),
    (NAMED, {"measure_at_start": "5"}),
    (NAMED, {"allow_second_layout": "1"}),
    ({}, {"on_unavailable": "fallback"}),
]


@pytest.mark.parametrize(("others", "given"), IN_VAIN)
def test_a_setting_that_others_leave_without_effect_is_said(others: dict[str, str], given: dict[str, str]) -> None:
    registry, (name,) = default_registry(), given
    (said,) = list_without_effect(load(variables(**others, **given)), "auto", registry)
    assert said.startswith(f"environment variable {env_var(name)}: has no effect: ")
    assert all(
        f"environment variable {env_var(each)}" in said for each in others if each in ("use_measurements", *NAMED)
    )
    with pytest.raises(SettingError, match=f"{env_var(name)}: has no effect"):
        list_without_effect(load(variables(**others, **given, strict="1")), "auto", registry)
    assert not list_without_effect(load(variables(**others, **given, strict="1", enabled="0")), "auto", registry)


def test_every_setting_that_needs_others_is_tried() -> None:
    assert {name for _, given in IN_VAIN for name in given} == {
        name for name, each in FIELDS.items() if each.metadata["needs"]
    }


@pytest.mark.parametrize(
    ("values", "moe_backend"),
    [
        (NO_TIMES | {"measure_at_start": "0"}, "auto"),
        (NO_TIMES | {"objective": "balanced", "allow_second_layout": "0"}, "auto"),
        (NAMED | {"measure_at_start": "0"}, "auto"),
        (NAMED | {"measure_at_start": "5", "on_unavailable": "fallback"}, "auto"),
        (NAMED | {"measure_at_start": "5", "overrides": "re:a=auto"}, "auto"),
        (NAMED | {"objective": "decode", "profile": "x", "disable": "marlin"}, "auto"),  # tiles are of measurements
        ({"on_unavailable": "fallback"}, "marlin"),
        ({"on_unavailable": "fallback"}, None),
        ({"on_unavailable": "fallback", "overrides": "re:a=emulation"}, "auto"),
        (
            {"on_unavailable": "fallback", "overrides": "re:a=auto"},
            "auto",
        ),  # by these a layer is not left to stock vLLM
        ({"on_unavailable": "fallback", "disable": "marlin"}, "auto"),  # by this, too
        ({"mxfp4_scale_rule": "ceil", "ragged_shards": "1"}, "auto"),  # the model decides
    ],
)
def test_a_setting_that_may_have_an_effect_is_not(values: dict[str, str], moe_backend: str | None) -> None:
    assert not list_without_effect(load(variables(strict="1", **values)), moe_backend, default_registry())


# --- Contradictions --------------------------------------------------------------------------------------------------

CONTRADICTIONS = [
    ({"backend": "emulation", "disable": "emulation"}, "auto", "emulation"),
    ({"backend": "marlin_mxfp4", "disable": "hopper_mxfp4,marlin"}, "auto", "marlin_mxfp4"),
    ({"backend": "marlin", "disable": "marlin"}, "auto", "marlin"),
    ({"overrides": "re:a=emulation", "disable": "emulation"}, "auto", "emulation"),
    ({"disable": "marlin"}, "marlin", "marlin"),
]


@pytest.mark.parametrize(("values", "moe_backend", "name"), CONTRADICTIONS)
@pytest.mark.parametrize("place", ["environment", "--additional-config", "--set "])
def test_a_choice_that_is_disabled_is_refused(values: dict[str, str], moe_backend: str, name: str, place: str) -> None:
    def chosen(**more: str) -> Any:
        given = values | more
        if place == "environment":
            return load(variables(**given))
        return (
            load({}, {"moe_oracle": given}) if place == "--additional-config" else load({}, None, given, prefix=place)
        )

    with pytest.raises(SettingError, match=f"chooses {name}, which {place}.*disables.* out of MOE_ORACLE_DISABLE"):
        check_backend_names(chosen(), moe_backend)
    falls_back = chosen(on_unavailable="fallback")
    check_backend_names(falls_back, moe_backend)
    (said,) = list_without_effect(falls_back, moe_backend, default_registry())
    assert f"chooses {name}, which" in said


def test_a_family_of_which_a_part_is_disabled_may_be_chosen() -> None:
    check_backend_names(load(variables(backend="marlin", disable="marlin_mxfp4")))


# --- Commands --------------------------------------------------------------------------------------------------------

TOOL = {
    "similar": ({"MOEORACLE_BACKEND": "emulation"}, "Did you mean MOE_ORACLE_BACKEND?"),
    "in vain": (variables(use_measurements="0", objective="decode"), "MOE_ORACLE_OBJECTIVE: has no effect"),
}


@pytest.mark.parametrize("case", TOOL)
@pytest.mark.parametrize("command", [("status",), EXPLAIN])
def test_commands_say_what_is_in_vain(
    run: Run, monkeypatch: pytest.MonkeyPatch, case: str, command: tuple[str, ...]
) -> None:
    given, words = TOOL[case]
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    ended = run(*command)
    assert ended.status == 0 and words in " ".join(f"{ended.out}{ended.err}".split())
    monkeypatch.setenv("MOE_ORACLE_STRICT", "1")
    ended = run(*command)
    if case == "similar":
        assert ended.status == 0 and words in " ".join(f"{ended.out}{ended.err}".split())
    else:
        assert ended.status == 2 and words in ended.err and ended.err.rpartition("error: ")[1]


def test_explain_says_what_additional_config_has_in_vain(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.dumps({"moe-oracle": {"backend": "emulation"}})
    words = "--additional-config: the key 'moe-oracle' is not read. Did you mean"
    ended = run(*EXPLAIN, "--additional-config", config)
    assert ended.status == 0 and words in " ".join(ended.out.split())
    monkeypatch.setenv("MOE_ORACLE_STRICT", "1")
    ended = run(*EXPLAIN, "--additional-config", config)
    assert ended.status == 2 and words in ended.err


def test_status_refuses_a_choice_that_is_disabled(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_ORACLE_BACKEND", "emulation")
    monkeypatch.setenv("MOE_ORACLE_DISABLE", "emulation")
    words = "MOE_ORACLE_BACKEND: chooses emulation, which environment variable MOE_ORACLE_DISABLE (emulation) disables"
    for command in (("status",), EXPLAIN):
        ended = run(*command)
        assert ended.status == 2 and words in ended.err


@pytest.mark.parametrize("strict", [False, True])
def test_a_profile_that_is_missing_is_said_even_if_no_times_are_read(
    run: Run, monkeypatch: pytest.MonkeyPatch, strict: bool
) -> None:
    for name, value in variables(use_measurements="0", profile="/nonexistent", strict=str(int(strict))).items():
        monkeypatch.setenv(name, value)
    ended = run("status")
    assert ended.status == 2 * strict
    assert "the profile of environment variable MOE_ORACLE_PROFILE is not used: /nonexistent" in ended.err
