"""One answer for all ranks: what each process found out by itself is told to the others, and all conclude the same.

The ranks that hold parts of the same layers must run the same backends: another one may quantise activations before
they are sent, or want another format of them. But each rank finds out by itself what it can run: its self-check sees
its own experts, its measurements its own GPU. So whatever depends on more than the checkpoint and the settings is
decided in two steps: `gather` what every rank found, then conclude with a function that gives every rank the same.

    found = gather(group, "self-check of marlin for model.layers.3.mlp.experts", lambda: check())
    passed = all(each["passed"] for each in found)

All ranks of the group must come, in the same order, and name the same topic. Nothing waits for ever: a rank that does
not come within the group's time, that dies, that raises, or that came for something else, is an `AgreementError` on
all the others, which names it. After such an error the group cannot be used again; the engine is meant to stop.

Values are JSON: what comes back is what JSON makes of them (tuples are lists), for a rank's own value too, so that all
ranks see the same. Messages go from rank to rank over the group's CPU backend (gloo), a few hundred bytes once for
each layer group: not for use after start-up, and not inside a captured graph.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from ..errors import AgreementError

_TAG = 0x6D6F65
"""Tag of our messages (and, plus one, of what follows the first): vLLM's own on the same group use small numbers."""

_LAST_WORDS = 5.0
"""Seconds in which a rank that fails tells the others why, before it raises."""


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks that have to agree.

    Attributes:
        processes: torch's process group of them, with a CPU backend; None when this process is alone.
        seconds: how long to wait for the others at one topic.
    """

    processes: Any = None
    seconds: float = 600.0

    @property
    def rank(self) -> int:
        """This process's place in the group."""
        return 0 if self.processes is None else int(self.processes.rank())

    @property
    def size(self) -> int:
        """Number of ranks."""
        return 1 if self.processes is None else int(self.processes.size())


def gather(group: Group, topic: str, make: Callable[[], Any]) -> list[Any]:
    """What every rank has to say on a topic, in the order of ranks; the same list on all of them.

    Args:
        group: the ranks.
        topic: what it is about; the same words on every rank.
        make: this rank's value, as JSON. What it raises is told to the others and raised here as it is.

    Raises:
        AgreementError: another rank raised, died, did not come in time, or came for another topic.
    """
    try:
        value = json.loads(json.dumps(make()))
    except Exception as error:
        tell(group, topic, error)
        raise
    if group.size == 1:
        return [value]
    deadline = time.monotonic() + group.seconds
    sent = _send(group, {"topic": topic, "value": value})
    try:
        messages = {rank: _receive(group, rank, topic, deadline) for rank in sent}
    except AgreementError:
        _last_words(group, sent, topic)
        raise
    _sent(sent, group, topic, deadline)
    for rank, message in messages.items():
        if "raised" in message:
            raise AgreementError(f"rank {rank} gave up at {message['topic']}: {message['raised']}", "", topic)
        if message["topic"] != topic:
            rule = f"rank {rank} is at {message['topic']!r}, rank {group.rank} at {topic!r}"
            raise AgreementError(rule, "Give all ranks the same model, settings and version of this plugin")
    return [value if rank == group.rank else messages[rank]["value"] for rank in range(group.size)]


def same(group: Group, topic: str, value: Any) -> None:
    """Makes sure that every rank has the same value.

    Args:
        group: the ranks.
        topic: what it is about; the same words on every rank.
        value: this rank's, as JSON.

    Raises:
        AgreementError: ranks have different ones, and as for `gather`.
    """
    compare(topic, "", gather(group, topic, lambda: value))


def compare(topic: str, what: str, values: list[Any]) -> None:
    """Makes sure that what `gather` found is the same on every rank.

    Args:
        topic: what it was about.
        what: the name of what is compared, for the message.
        values: by rank.

    Raises:
        AgreementError: ranks have different ones.
    """
    other = next((rank for rank, each in enumerate(values) if each != values[0]), None)
    if other is not None:
        name = f"{what} " if what else ""
        rule = f"rank 0 has {name}{json.dumps(values[0])}, rank {other} has {name}{json.dumps(values[other])}"
        raise AgreementError(rule, "Give all ranks the same settings", topic)


def best_for_all(orders: list[list[str]]) -> str | None:
    """The first name in the first rank's order that every rank has; None when there is none.

    Args:
        orders: names by rank, best first.
    """
    return next((name for name in orders[0] if all(name in order for order in orders)), None)


def tell(group: Group, topic: str, error: Exception) -> None:
    """Tells the other ranks that this one is about to raise; `gather` does it for what is raised inside it.

    Args:
        group: the ranks. One that does not listen is not waited for beyond a few seconds.
        topic: at which the others are.
        error: what will be raised.
    """
    if group.size == 1:
        return
    try:
        sent = _send(group, {"topic": topic, "raised": f"{type(error).__name__}: {error}"})
    except AgreementError:  # the others will notice in their own time; what this rank raises matters more
        return
    _last_words(group, sent, topic, listen=True)


@contextmanager
def telling(group: Group, topic: str) -> Iterator[None]:
    """Tells the other ranks of what is raised inside, which they would wait for in vain at their next topic.

    Args:
        group: the ranks.
        topic: what this rank is doing. Not `gather`, which tells by itself.
    """
    try:
        yield
    except AgreementError:  # the others know
        raise
    except Exception as error:
        tell(group, topic, error)
        raise


def _last_words(group: Group, sent: dict[int, list[Any]], topic: str, listen: bool = False) -> None:
    """Lets every rank that listens take what it was sent, before this one raises; nobody is waited for for long.

    Args:
        group: the ranks.
        sent: from `_send`.
        topic: what it was about.
        listen: take what the others send, too: gloo takes a message off its sender only when somebody does.
    """
    deadline = time.monotonic() + min(_LAST_WORDS, group.seconds)
    for rank, works in sent.items():
        try:
            if listen:
                _receive(group, rank, topic, deadline)
            _sent({rank: works}, group, topic, deadline)
        except AgreementError:  # one that is gone, or that will notice in its own time
            continue


def _send(group: Group, message: dict[str, Any]) -> dict[int, list[Any]]:
    """Starts sending a message to every other rank: its length, then its bytes. Returns what to wait for, by rank."""
    content = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
    length = torch.tensor([content.numel()], dtype=torch.int64, device="cpu")
    sent = {}
    for rank in range(group.size):
        if rank != group.rank:
            try:
                works = [group.processes.send([length], rank, _TAG), group.processes.send([content], rank, _TAG + 1)]
            except RuntimeError as error:
                raise _lost(rank, message["topic"], error) from error
            # With the tensors, which must live until they were sent.
            sent[rank] = [(work, length, content) for work in works]
    return sent


def _sent(sent: dict[int, list[Any]], group: Group, topic: str, deadline: float) -> None:
    """Waits until what `_send` started has arrived."""
    for rank, works in sent.items():
        for work in works:
            _wait(work, group, rank, topic, deadline)


def _receive(group: Group, rank: int, topic: str, deadline: float) -> dict[str, Any]:
    length = torch.zeros(1, dtype=torch.int64, device="cpu")
    _take(group, rank, length, _TAG, topic, deadline)
    content = torch.zeros(int(length), dtype=torch.uint8, device="cpu")
    _take(group, rank, content, _TAG + 1, topic, deadline)
    message: dict[str, Any] = json.loads(bytes(content.tolist()))
    return message


def _take(group: Group, rank: int, into: Tensor, tag: int, topic: str, deadline: float) -> None:
    try:
        work = group.processes.recv([into], rank, tag)
    except RuntimeError as error:
        raise _lost(rank, topic, error) from error
    _wait((work, into), group, rank, topic, deadline)


def _wait(work: tuple[Any, ...], group: Group, rank: int, topic: str, deadline: float) -> None:
    """Waits for one message to or from a rank; `work` is torch's handle, and the tensors that it needs."""
    left = max(deadline - time.monotonic(), 0.001)
    try:
        work[0].wait(timedelta(seconds=left))
    except RuntimeError as error:
        if time.monotonic() < deadline:
            raise _lost(rank, topic, error) from error
        rule = f"rank {rank} did not come within {group.seconds:g} s"
        remedy = "Its log says what it was doing; MOE_ORACLE_AGREEMENT_SECONDS lengthens the wait"
        raise AgreementError(rule, remedy, topic) from error


def _lost(rank: int, topic: str, error: RuntimeError) -> AgreementError:
    reason = str(error).splitlines()[0]
    return AgreementError(f"the connection to rank {rank} was lost ({reason})", "Its log says why it ended", topic)
