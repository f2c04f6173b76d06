"""The decision records that servers write (the setting `report`), and what the page shows of them."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


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


class _Reason(msgspec.Struct, frozen=True):
    detail: str
    remedy: str = ""


class _Candidate(msgspec.Struct, frozen=True):
    backend: str
    accepted: bool
    reasons: list[_Reason] = []


class _Decision(msgspec.Struct, frozen=True):
    backend: str
    why: str
    explanation: str
    numerics: str = ""


class _SchemeName(msgspec.Struct, frozen=True):
    name: str
    bits: int = 0


class _Problem(msgspec.Struct, frozen=True):
    scheme: _SchemeName


class _Group(msgspec.Struct, frozen=True):
    layers: list[str]
    count: int
    problem: _Problem
    decision: _Decision
    candidates: list[_Candidate] = []


class _Device(msgspec.Struct, frozen=True):
    name: str


class ServerRecord(msgspec.Struct, frozen=True):
    """The shown fields of a decision record. Others are ignored, so that records of other releases can be read."""

    moe_oracle: str
    vllm: str | None
    device: _Device
    groups: list[_Group]
    moe_layers: int = 0
    served: int = 0
    rank: int = 0
    ranks: int = 1
    host: str = ""
    process: int = 0

    def layer_names(self) -> set[str]:
        """Names of the layers that run through the oracle."""
        return {layer for group in self.groups for layer in group.layers}

    def decisions(self) -> ServerDecisions:
        """What the page shows of them."""
        rejected = []
        rows = []
        for group in self.groups:
            layers = group.layers[0] if group.layers else "?"
            more = f" and {group.count - 1} more" if group.count > 1 else ""
            scheme = (
                f"int{group.problem.scheme.bits}" if group.problem.scheme.name == "wna16" else group.problem.scheme.name
            )
            taken = group.decision
            rows.append((f"{layers}{more}", scheme, taken.backend, taken.why, taken.explanation, taken.numerics))
            rejected.append(
                tuple(
                    (each.backend, tuple(f"{r.detail} ({r.remedy})" if r.remedy else r.detail for r in each.reasons))
                    for each in group.candidates
                    if not each.accepted
                )
            )
        return ServerDecisions(
            title=f"rank {self.rank} of {self.ranks}, process {self.process} on {self.host or 'a device'}: "
            f"vLLM {self.vllm}, vllm-moe-oracle {self.moe_oracle}",
            device=self.device.name,
            served=f"{self.served} of {self.moe_layers} MoE layers run through the oracle",
            groups=tuple(rows),
            rejected=tuple(rejected),
        )
