"""The table of other projects' kernels, from records as `bench --peers` writes them."""

from __future__ import annotations

import json
from typing import Any

from tests.tools import peers_table
from vllm_moe_oracle.releases.supported import NEWEST

PEERS = {
    "timed": {"peer:triton_kernels": "triton_kernels, sources 0123"},
    "skipped": {"peer:tokenspeed": "is not installed"},
    "listed": [{"name": "QuACK", "package": "quack-kernels 0.6.5", "reason": "dense products only"}],
}
PACKAGES = {"vllm": NEWEST, "torch": "2.14.0", "triton": "3.8.0"}
HEAD = {"conditions": {"gpu": "NVIDIA H200", "packages": PACKAGES, "command": "bench --peers", "peers": PEERS}}


def record(name: str, tokens: int, us: dict[str, float], **more: Any) -> dict[str, Any]:
    return {"layer": {"name": name}, "tokens": tokens, "us": us, **more}


def test_cells_name_the_best_other_and_losses() -> None:
    records = [
        record("mxfp4:a", 1, {"hopper_mxfp4": 10.0, "hopper_mxfp4_w4a8": 5.0, "stock:auto": 20.0, "peer:x": 15.0}),
        record("mxfp4:a", 64, {"hopper_mxfp4": 10.0, "peer:x": 9.0, "emulation": 1.0}),
        record("mxfp4:b", 64, {"hopper_mxfp4": 10.0, "q": 1.0, "stock:auto": 30.0}, activations={"q": "mxfp8"}),
        record("mxfp4:b", 1, {"peer:x": 9.0}, failures={"peer:y": "no kernel", "marlin": "why"}),
    ]
    text = peers_table.part([json.dumps(HEAD), *map(json.dumps, records), ""])
    assert "| mxfp4:a | 10.0, peer:x, 1.50 | 10.0, peer:x, 0.90 |" in text
    assert "| mxfp4:b |  | 10.0, stock, 3.00 |" in text
    assert "Ours is first in 2 of 3 cells; not first: mxfp4:a at 64: peer:x 0.90." in text
    assert "Without a time: mxfp4:b, peer:y: no kernel." in text and "marlin" not in text
    assert "| peer:triton_kernels | timed: triton_kernels, sources 0123 |" in text
    assert "| peer:tokenspeed | skipped: is not installed |" in text
    assert "| QuACK (quack-kernels 0.6.5) | dense products only |" in text
    assert "Triton 3.8.0. Repeat with `bench --peers`." in text


def test_without_a_benchmark_there_is_the_list_alone() -> None:
    text = peers_table.part(None)
    assert "TurboMind (lmdeploy 0.18.0)" in text and "cells" not in text
