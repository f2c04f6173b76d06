"""The decision records that servers write (the setting `report`), and what the page shows of them."""

from __future__ import annotations

from dataclasses import dataclass

from ..decision_records import ServerRecord


@dataclass(frozen=True)
class ServerDecisions:
    """The decisions of one server process.

    Attributes:
        title: the process and its releases.
        device: name of its device.
        served: how many of the model's MoE layers run through the oracle, in words.
        groups: one row per group of equal layers: layers, format, backend, what decided, explanation, numerics.
        rejected: by group, the backends that cannot run it, with every reason.
    """

    title: str
    device: str
    served: str
    groups: tuple[tuple[str, ...], ...]
    rejected: tuple[tuple[tuple[str, tuple[str, ...]], ...], ...]


def decisions_of(record: ServerRecord) -> ServerDecisions:
    """What the page shows of a record."""
    rejected = []
    rows = []
    for group in record.groups:
        layers = group.layers[0] if group.layers else "?"
        more = f" and {group.count - 1} more" if group.count > 1 else ""
        scheme = (
            f"int{group.problem.scheme.bits}" if group.problem.scheme.name == "wna16" else group.problem.scheme.name
        )
        taken = group.decision
        rows.append((f"{layers}{more}", scheme, taken.backend, taken.why, taken.explanation, taken.numerics))
        rejected.append(
            tuple((each.backend, tuple(map(str, each.reasons))) for each in group.candidates if not each.accepted)
        )
    return ServerDecisions(
        title=f"rank {record.rank} of {record.ranks}, process {record.process} on {record.host or 'a device'}: "
        f"vLLM {record.vllm}, vllm-moe-oracle {record.moe_oracle}",
        device=record.device.name,
        served=f"{record.served} of {record.moe_layers} MoE layers run through the oracle",
        groups=tuple(rows),
        rejected=tuple(rejected),
    )
