"""Ranks agree, and none waits for ever: processes over gloo, of which one is wrong, slow, dead or elsewhere."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest

from tests.lib import gloo_ranks
from tests.lib.tiers import sampled
from vllm_moe_oracle.errors import RankSyncError
from vllm_moe_oracle.methods.rank_sync import (
    RankGroup,
    all_gather,
    first_common_name,
    notify_on_failure,
)

SHORT = 1.5


def values(processes: Any) -> Any:
    group = RankGroup(processes, 60.0)
    first = all_gather(group, "first", lambda: {"rank": group.rank, "shape": (group.rank, 7), "long": "x" * 70000})
    second = all_gather(group, "second", lambda: None)
    return [[each["rank"], each["shape"], len(each["long"])] for each in first], second


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.full)])
def test_every_rank_gets_what_every_rank_said_in_the_same_order(tmp_path: Path, size: int) -> None:
    expected = [[[rank, [rank, 7], 70000] for rank in range(size)], [None] * size]
    assert gloo_ranks.run(values, size, tmp_path) == [expected] * size


def one_raises(processes: Any) -> Any:
    group = RankGroup(processes, 60.0)
    all_gather(group, "before", lambda: 1)

    def make() -> int:
        if group.rank == 1:
            raise MemoryError("no room for it")
        return 1

    return all_gather(group, "the check of layer 3", make)


def test_a_rank_that_raises_is_named_on_the_others(tmp_path: Path) -> None:
    first, second, third = gloo_ranks.run(one_raises, 3, tmp_path)
    assert second == {"raised": "MemoryError", "message": "no room for it"}
    for other in (first, third):
        assert other["raised"] == "RankSyncError"
        for word in ("rank 1 gave up", "the check of layer 3", "MemoryError: no room for it"):
            assert word in other["message"]


class Panic(BaseException):
    """What an extension module in Rust raises is no `Exception`."""


class Unreadable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


STRANGE = {
    "a panic": (lambda: Panic("index out of bounds"), "Panic: index out of bounds"),
    "an exit": (lambda: SystemExit(3), "SystemExit: 3"),
    "no text": (Unreadable, "Unreadable: a message that cannot be read (ValueError)"),
    "a terminal's codes": (lambda: RuntimeError("red \x1b[31m\nline\ud800"), "RuntimeError: red [31m line"),
    "a long text": (lambda: RuntimeError("x" * 10**6), "RuntimeError: xxx"),
}


def one_raises_strangely(processes: Any, kind: str, between: bool, folder: str) -> Any:
    group = RankGroup(processes, 60.0)

    def make() -> None:
        if group.rank == 1:
            raise STRANGE[kind][0]()

    begin = time.monotonic()
    try:
        with notify_on_failure(group, "the load"):
            make() if between else None
        all_gather(group, "the check", make)
    except RankSyncError as error:
        return {"message": str(error), "seconds": time.monotonic() - begin}
    except BaseException as error:
        gloo_ranks.wait_for_result(0, folder)  # in a process that stays, no connection is lost
        return type(error).__name__


@pytest.mark.parametrize("between", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", sampled(STRANGE, 2))
def test_whatever_a_rank_raises_the_others_hear_in_time_and_in_print(tmp_path: Path, kind: str, between: bool) -> None:
    words = STRANGE[kind][1]
    first, second = gloo_ranks.run(one_raises_strangely, 2, tmp_path, kind, between, str(tmp_path))
    assert second == words.partition(":")[0]
    assert f"rank 1 gave up at the {'load' if between else 'check'}: {words}" in first["message"]
    assert len(first["message"]) < 2000 and first["message"].isprintable() and first["seconds"] < 50


def gathered(group: RankGroup, make: Any) -> Any:
    """What a rank gets, or the error and when it came."""
    begin = time.monotonic()
    try:
        return all_gather(group, "the check", make)
    except RankSyncError as error:
        return {"message": str(error), "seconds": time.monotonic() - begin}


def one_raises_while_another_is_silent(processes: Any, folder: str) -> Any:
    group = RankGroup(processes, 600.0)
    all_gather(group, "before", lambda: 1)
    if group.rank == 0:
        return gloo_ranks.wait_for_result(1, folder)

    def make() -> None:
        raise MemoryError("no room for it")

    begin = time.monotonic()
    try:
        all_gather(group, "the check", make)
    except MemoryError:
        return time.monotonic() - begin


def test_a_rank_that_raises_does_not_wait_for_a_silent_one(tmp_path: Path) -> None:
    _, seconds = gloo_ranks.run(one_raises_while_another_is_silent, 2, tmp_path, str(tmp_path))
    assert seconds is not None and seconds < 30  # it tells the other for 5 s at most


def one_dies(processes: Any, when: str) -> Any:
    group = RankGroup(processes, 60.0)
    all_gather(group, "before", lambda: 1)

    def make() -> int:
        if group.rank == 1 and when == "inside":
            gloo_ranks.die()
        return 1

    if group.rank == 1 and when == "before":
        gloo_ranks.die()
    return gathered(group, make)


@pytest.mark.parametrize("when", [pytest.param("before", marks=pytest.mark.full), "inside"])
def test_a_rank_that_dies_is_noticed_at_once(tmp_path: Path, when: str) -> None:
    first, second, third = gloo_ranks.run(one_dies, 3, tmp_path, when)
    assert second is None
    for other in (first, third):
        assert "the connection to rank 1 was lost" in other["message"] and "the check" in other["message"]
        assert other["seconds"] < 30.0


def one_is_slow(processes: Any, folder: str) -> Any:
    all_gather(RankGroup(processes, 60.0), "before", lambda: 1)
    group = RankGroup(processes, SHORT)

    def make() -> None:
        if group.rank == 1:
            gloo_ranks.wait_for_result(0, folder)

    return gathered(group, make)


def test_waiting_ranks_time_out_after_the_setting(tmp_path: Path) -> None:
    first, second = gloo_ranks.run(one_is_slow, 2, tmp_path, str(tmp_path))
    assert "rank 1 did not answer within 1.5 s" in first["message"]
    assert "MOE_ORACLE_RANK_SYNC_TIMEOUT" in first["message"]
    assert SHORT - 0.5 <= first["seconds"] < SHORT + 5.0
    assert "message" in second  # the first one is gone by then


def elsewhere(processes: Any, explained: bool) -> Any:
    def explain(group: RankGroup) -> str:
        return f"layers are {all_gather(dataclasses.replace(group, explain=None), 'layers', lambda: group.rank)}"

    group = RankGroup(processes, 60.0, explain if explained else None)
    return all_gather(group, f"the check of layer {3 + 2 * group.rank}", lambda: 1)


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (2, ("'the check of layer 3'", "'the check of layer 5'")),
        (3, ("ranks differ: layers are [0, 1, 2]",)),  # where somebody can say what differs
    ],
)
def test_ranks_at_different_topics_fail_with_both_or_what_differs(
    size: int, words: tuple[str, ...], tmp_path: Path
) -> None:
    for each in gloo_ranks.run(elsewhere, size, tmp_path, size == 3):
        assert each["raised"] == "RankSyncError" and all(word in each["message"] for word in words)


def test_a_single_process_does_not_communicate() -> None:
    alone = RankGroup()
    assert (alone.rank, alone.size) == (0, 1)
    assert all_gather(alone, "x", lambda: {"shape": (1, 2)}) == [{"shape": [1, 2]}]
    with pytest.raises(ZeroDivisionError):
        all_gather(alone, "x", lambda: 1 // 0)


def one_is_told_of_twice(processes: Any) -> Any:
    group = RankGroup(processes, 60.0)
    with notify_on_failure(group, "the model"), notify_on_failure(group, "the loaded weights of layer 3"):
        if group.rank == 1:
            raise MemoryError("no room for it")
    try:
        all_gather(group, "the check", lambda: 1)
    except RankSyncError as error:
        return str(error)


def test_ranks_hear_of_an_exception_between_topics_once(tmp_path: Path) -> None:
    before = time.monotonic()
    first, second = gloo_ranks.run(one_is_told_of_twice, 2, tmp_path)
    assert time.monotonic() - before < 50
    assert "rank 1 gave up at the loaded weights of layer 3: MemoryError: no room for it" in first
    assert second == {"raised": "MemoryError", "message": "no room for it"}


@pytest.mark.parametrize(
    ("orders", "name"),
    [
        ([["a", "b"]], "a"),
        ([["a", "b"], ["b", "a"]], "a"),
        ([["a", "b", "c"], ["c", "b"]], "b"),
        ([["a"], ["b"]], None),
        ([["a"], []], None),
        ([[], ["a"]], None),
    ],
)
def test_the_best_for_all_is_the_first_ranks_best_that_every_rank_has(orders: list[list[str]], name: str) -> None:
    assert first_common_name(orders) == name
