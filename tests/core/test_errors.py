"""Errors: what they say, and that nothing of it is lost between processes."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest

from vllm_moe_oracle import errors, settings
from vllm_moe_oracle.errors import NoBackendError, OracleError, did_you_mean, exit_words

TYPES = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, OracleError)]


@pytest.mark.parametrize("kind", TYPES)
def test_rule_remedy_and_place_survive_pickling_and_copying(kind: type[OracleError]) -> None:
    error = kind("3 is not a multiple of 2", "Take 4", "layer 7")
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is kind
        assert (again.rule, again.remedy, again.where) == ("3 is not a multiple of 2", "Take 4", "layer 7")
        assert str(again) == str(error) == "layer 7: 3 is not a multiple of 2. Take 4"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("rule",), "rule"),
        (("rule", "Remedy"), "rule. Remedy"),
        (("rule", "", "place"), "place: rule"),
    ],
)
def test_messages_read_as_sentences(arguments: tuple[str, ...], message: str) -> None:
    assert str(OracleError(*arguments)) == message
    assert OracleError(*arguments).args == (message,)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("rule", "remedy", "where"), "where: rule. remedy"),
        (("rule", "remedy", "where", ("a candidate",), "table:\n  row"), "where: rule. remedy\ntable:\n  row"),
        (("rule", "", "", (), "table:\n  row\x1b"), "rule\ntable:\n  row "),
    ],
)
def test_candidates_stay_behind_and_the_table_does_not(arguments: tuple[Any, ...], message: str) -> None:
    error = NoBackendError(*arguments)
    again = pickle.loads(pickle.dumps(error))
    assert (again.rule, again.table, again.candidates) == (error.rule, error.table, ())
    assert error.rule == "rule" and str(error) == str(again) == message and error.args == (message,)


def test_bad_input_is_a_value_error_for_callers_that_know_nothing_of_us() -> None:
    for kind in (errors.SettingError, errors.CheckpointError, errors.NoBackendError):
        assert issubclass(kind, ValueError)
    assert issubclass(errors.LifecycleError, RuntimeError)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("hopper_mxpf4", "hopper_mxfp4"),
        ("OWN-MXFP4", "hopper_mxfp4"),
        ("h200", "nvidia-h200"),
        ("nvidia-h2000", "nvidia-h200"),
        ("marlin", ""),  # two hold it, and neither is nearly it
        ("something", ""),
        ("", ""),
    ],
)
def test_the_name_that_was_meant(name: str, said: str) -> None:
    valid = ["hopper_mxfp4", "nvidia-h200", "stock_marlin_one_way", "stock_marlin_another"]
    assert did_you_mean(name, valid) == (f"Did you mean {said}? " if said else "")


def test_words_of_hostile_files_lose_their_middle_and_paths_do_not() -> None:
    path = "/" + "/".join(["folder" * 10] * 15)
    error = errors.SettingError(f"{'x' * 60_000!r} is not a {'name ' * 20}", "Write one", path)
    assert len(str(error)) < 2000 and "is not a name" in str(error) and path in str(error)
    assert errors.CheckpointError("short", where="y" * 60_000).where.endswith("y" * 100)
    with pytest.raises(errors.SettingError) as refused:
        settings.load({}, assignments={"overrides": "z" * 60_000})
    assert len(str(refused.value)) < 2000


def test_no_part_of_a_message_moves_a_terminals_cursor() -> None:
    """vLLM logs the exceptions that reach it as they are."""
    error = OracleError("two\x1b[2J\nlines", "a remedy\x1b[31m", "a\rplace")
    assert str(error) == "a place: two [2J\nlines. a remedy [31m"
    assert error.args == (str(error),) and str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.parametrize(
    ("status", "words"), [(0, "status 0"), (3, "status 3"), (-9, "signal SIGKILL"), (-35, "signal 35")]
)
def test_the_end_of_a_process_is_said_for_every_signal(status: int, words: str) -> None:
    assert exit_words(status) == words
