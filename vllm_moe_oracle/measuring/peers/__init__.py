"""Kernels of other projects ("peers"), which `bench --peers` times beside the backends. The oracle never chooses one.

Each public module of this folder exports ``PEERS``, a tuple of subclasses of `PeerBackend`: a peer is one file. Peers
are no part of the default registry, so that no decision depends on them. `listed` names kernels that cannot be timed as
a single layer, each with its reason.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ...core.problem import Device
from ...errors import MeasurementError, describe_error, is_interruption
from ...measurements.bench_records import PEER_PREFIX
from ...oracle.registry import Registry
from ._contract import PeerBackend
from ._listed import LISTED, ListedPeer

__all__ = ["LISTED", "FoundPeers", "ListedPeer", "PeerBackend", "discover", "peer_classes"]


@dataclass(frozen=True)
class FoundPeers:
    """The peers of a machine.

    Attributes:
        registry: those that can run here.
        versions: what each of them was imported from.
        skipped: why each of the others cannot run here.
    """

    registry: Registry = field(default_factory=Registry)
    versions: Mapping[str, str] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        """For the conditions of a benchmark: peers that are timed, that are skipped, and that are only listed."""
        listed = [{"name": each.name, "package": each.package, "reason": each.reason} for each in LISTED]
        return {"timed": dict(self.versions), "skipped": dict(self.skipped), "listed": listed}


def peer_classes() -> list[type[PeerBackend]]:
    """The classes of this folder's peers, in the order of files.

    Raises:
        MeasurementError: a module exports no ``PEERS``, or a name lacks the prefix.
    """
    found: list[type[PeerBackend]] = []
    for module_info in pkgutil.iter_modules(__path__):
        if module_info.name.startswith("_"):
            continue
        module = importlib.import_module(f"{__name__}.{module_info.name}")
        if not hasattr(module, "PEERS"):
            raise MeasurementError("the module exports no PEERS", where=module.__name__)
        found += module.PEERS
    for each in found:
        if not each.name.startswith(PEER_PREFIX):
            raise MeasurementError(f"the peer's name {each.name!r} does not start with {PEER_PREFIX}")
    return found


def discover(
    device: Device, folder: Path | None = None, classes: Iterable[type[PeerBackend]] | None = None
) -> FoundPeers:
    """Imports the peers that this machine can run.

    Args:
        device: this machine.
        folder: where their packages lie; None for the environment's.
        classes: the peers; by default all of this folder.

    Raises:
        MeasurementError: the folder does not exist, or a peer's file is incomplete.
    """
    if folder is not None and not os.path.isdir(folder):
        raise MeasurementError("is not a folder", "Name the folder that holds the packages of peers", str(folder))
    registry, versions, skipped = Registry(), {}, {}
    for each in peer_classes() if classes is None else classes:
        peer = each(folder)
        try:
            reason = peer.why_not(device)
        except BaseException as error:  # the import of another project's package may raise anything
            if is_interruption(error):
                raise
            reason = f"cannot be imported: {describe_error(error)}"
        if reason:
            skipped[peer.name] = reason
        else:
            registry.add(peer, each.__module__)
            versions[peer.name] = peer.version()
    return FoundPeers(registry, versions, skipped)
