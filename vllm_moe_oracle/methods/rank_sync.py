"""Exchange between ranks: each rank gathers the results of all, and all conclude alike.

Ranks that hold parts of the same layer must run the same backend: another backend may quantize activations before they
are sent, or need another format of them. But each rank finds out by itself what it can run: its self-check sees its own
experts, its measurements belong to its own GPU. So whatever depends on more than checkpoint and settings takes two
steps: `all_gather` the results of every rank, then conclude with a function that gives the same result on every rank.

    results = all_gather(group, "self-check of marlin for model.layers.3.mlp.experts", lambda: check())
    passed = all(each["passed"] for each in results)

All ranks of the group must call it in the same order and with the same topics. Nothing waits forever: when a rank does
not answer within the group's timeout, dies, raises, or is at another topic, all other ranks raise a `RankSyncError`
that names it. The group is not usable after such an error; the engine is expected to stop.

Values are JSON: a rank's own value, too, comes back as JSON makes it (tuples become lists), so that all ranks see the
same. Messages use point-to-point sends on the group's CPU backend (gloo), some hundred bytes for a kind of layer or a
layer: not for use after start-up, and not inside a captured graph.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from ..errors import OracleError, RankSyncError, describe_error, is_interruption
from ..settings import env_var

logger = logging.getLogger("vllm.moe_oracle")

_TAG = 0x6D6F65
"""Tag of a message's length; its content has the next tag. vLLM's own messages on this group have small tags."""

DEFAULT_TIMEOUT = 600.0
"""Seconds to wait for other ranks where the settings are not known."""

_NOTIFY_SECONDS = 5.0
"""Seconds for which a failing rank tries to tell the others, before it raises."""

_LATE_SECONDS = 30.0
"""Seconds after which a rank says for whom it waits."""

_NOTIFIED_ATTRIBUTE = "moe_oracle_notified"
"""Attribute that marks an exception as reported to the other ranks."""

_NO_PLUGIN = "if it has no line of moe_oracle, the plugin is not installed, not enabled or stands down there"


@dataclass(frozen=True, slots=True)
class RankGroup:
    """The ranks that have to agree.

    Attributes:
        process_group: their torch process group, with a CPU backend; None for a single process.
        timeout: seconds to wait for the others at one topic.
        explain: called on every rank when ranks are at different topics; returns what differs between them, or "".
    """

    process_group: Any = None
    timeout: float = DEFAULT_TIMEOUT
    explain: Callable[[RankGroup], str] | None = None

    @property
    def rank(self) -> int:
        """This process's rank."""
        return 0 if self.process_group is None else int(self.process_group.rank())

    @property
    def size(self) -> int:
        """Number of ranks."""
        return 1 if self.process_group is None else int(self.process_group.size())


def all_gather(group: RankGroup, topic: str, compute: Callable[[], Any]) -> list[Any]:
    """The values of all ranks on a topic, in rank order; the same list on every rank.

    Args:
        group: the ranks.
        topic: names the step; equal on every rank.
        compute: returns this rank's value, as JSON. The other ranks are notified of an exception, which is raised here
            unchanged.

    Raises:
        RankSyncError: another rank raised, died, did not answer in time, or is at another topic.
    """
    try:
        value = json.loads(json.dumps(compute()))
    except BaseException as error:  # whatever ends this rank, the others wait for it
        notify_failure(group, topic, error)
        raise
    if group.size == 1:
        return [value]
    exchange = _Exchange(group, topic)
    exchange.send({"value": value})
    with _remark_if_late(group, topic) as waiting_for:
        try:
            messages = {}
            for rank in exchange.pending:
                waiting_for[:] = [rank]
                messages[rank] = exchange.receive(rank)
        except RankSyncError:
            exchange.deliver_failure()
            raise
        for rank in exchange.pending:
            exchange.wait_sent(rank)
    for rank, message in messages.items():
        if "raised" in message:
            raise RankSyncError(f"rank {rank} gave up at {message['topic']}: {message['raised']}", "", topic)
    # Where topics differ, every rank sees one that is not its own.
    other = next((rank for rank, message in messages.items() if message["topic"] != topic), None)
    if other is not None:
        reason = "" if group.explain is None else group.explain(group)
        rule = f"rank {other} is at {messages[other]['topic']!r}, rank {group.rank} at {topic!r}"
        remedy = "Give all ranks the same model, settings and version of this plugin"
        raise RankSyncError(f"ranks differ: {reason}" if reason else rule, remedy)
    return [value if rank == group.rank else messages[rank]["value"] for rank in range(group.size)]


def first_common_name(orders: list[list[str]]) -> str | None:
    """The first name in rank 0's order that every rank has; None when there is none.

    Args:
        orders: names by rank, best first.
    """
    return next((name for name in orders[0] if all(name in order for order in orders)), None)


def notify_failure(group: RankGroup, topic: str, error: BaseException) -> None:
    """Notifies the other ranks, once per exception, that this one is about to raise; `all_gather` does so by itself.
    An interruption ends the process, and its connections say so.

    Args:
        group: the ranks. It waits a few seconds at most for a rank that does not receive.
        topic: the topic at which the others are.
        error: the exception.
    """
    if group.size == 1 or getattr(error, _NOTIFIED_ATTRIBUTE, False) or is_interruption(error):
        return
    # Another package's message may be anything.
    words = f"{type(error).__name__}: {error}" if isinstance(error, OracleError) else describe_error(error)
    setattr(error, _NOTIFIED_ATTRIBUTE, True)
    exchange = _Exchange(group, topic)
    try:
        exchange.send({"raised": words})
    except RankSyncError:  # the others will time out; this rank's own exception matters more
        return
    exchange.deliver_failure(drain=True)


@contextmanager
def notify_on_failure(group: RankGroup, topic: str) -> Iterator[None]:
    """Notifies the other ranks of an exception raised inside; they would wait for this rank at their next topic.

    Args:
        group: the ranks.
        topic: what this rank does. Not for `all_gather`, which notifies by itself.
    """
    try:
        yield
    except RankSyncError:  # the others know
        raise
    except BaseException as error:  # whatever ends this rank, the others wait for it
        notify_failure(group, topic, error)
        raise


@contextmanager
def _remark_if_late(group: RankGroup, topic: str) -> Iterator[list[int]]:
    """Logs once for which rank this one waits, if it takes long; the rank is in the list that is yielded.

    Only the log can say it in time: a wait in gloo cannot be taken up again after a time-out.
    """
    waiting_for: list[int] = []

    def remark() -> None:
        ranks, most = ", ".join(map(str, waiting_for)), group.timeout
        logger.warning(
            "moe_oracle: %s: waiting for rank %s, up to %g s; see its log: %s", topic, ranks, most, _NO_PLUGIN
        )

    timer = threading.Timer(_LATE_SECONDS, remark)
    timer.daemon = True
    timer.start()
    try:
        yield waiting_for
    finally:
        timer.cancel()


class _Exchange:
    """A message of this rank to each other one on a topic, and theirs to this rank, within the group's timeout.

    Attributes:
        pending: torch's handles of the sends by rank, with the tensors, which must live until they are sent.
    """

    def __init__(self, group: RankGroup, topic: str) -> None:
        self._group, self._topic = group, topic
        self._deadline = time.monotonic() + group.timeout
        self.pending: dict[int, list[tuple[Any, ...]]] = {}

    def send(self, message: dict[str, Any]) -> None:
        """Starts to send a message to every other rank, its length and then its bytes."""
        text = json.dumps({"topic": self._topic, **message})
        content = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        length = torch.tensor([content.numel()], dtype=torch.int64, device="cpu")
        for rank in range(self._group.size):
            if rank != self._group.rank:
                try:
                    send = self._group.process_group.send
                    works = [send([length], rank, _TAG), send([content], rank, _TAG + 1)]
                except RuntimeError as error:
                    raise self._connection_lost(rank, error) from error
                self.pending[rank] = [(work, length, content) for work in works]

    def receive(self, rank: int) -> dict[str, Any]:
        """The message of another rank."""
        length = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._receive_into(rank, length, _TAG)
        content = torch.zeros(int(length), dtype=torch.uint8, device="cpu")
        self._receive_into(rank, content, _TAG + 1)
        message: dict[str, Any] = json.loads(bytes(content.tolist()))
        return message

    def wait_sent(self, rank: int) -> None:
        """Waits until another rank has received the message."""
        for work in self.pending[rank]:
            self._wait(work, rank)

    def deliver_failure(self, drain: bool = False) -> None:
        """Waits for a few seconds until the other ranks have received the message, before this rank raises.

        Args:
            drain: also receive what the others send: gloo completes a send only with its receive.
        """
        self._deadline = time.monotonic() + min(_NOTIFY_SECONDS, self._group.timeout)
        for rank in self.pending:
            try:
                if drain:
                    self.receive(rank)
                self.wait_sent(rank)
            except RankSyncError:  # a rank that is gone, or that will time out
                continue

    def _receive_into(self, rank: int, into: Tensor, tag: int) -> None:
        try:
            work = self._group.process_group.recv([into], rank, tag)
        except RuntimeError as error:
            raise self._connection_lost(rank, error) from error
        self._wait((work, into), rank)

    def _wait(self, work: tuple[Any, ...], rank: int) -> None:
        """Waits for a send or receive; `work` is torch's handle and the tensors that it needs."""
        left = max(self._deadline - time.monotonic(), 0.001)
        try:
            work[0].wait(timedelta(seconds=left))
        except RuntimeError as error:
            if time.monotonic() < self._deadline:
                raise self._connection_lost(rank, error) from error
            rule = f"rank {rank} did not answer within {self._group.timeout:g} s"
            remedy = f"Its log says what it was doing; {_NO_PLUGIN}. {env_var('rank_sync_timeout')} lengthens the wait"
            raise RankSyncError(rule, remedy, self._topic) from error

    def _connection_lost(self, rank: int, error: RuntimeError) -> RankSyncError:
        rule = f"the connection to rank {rank} was lost ({str(error).splitlines()[0]})"
        return RankSyncError(rule, "Its log says why it ended", self._topic)
