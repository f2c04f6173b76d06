"""The table of other projects' kernels, from records as `bench --peers` writes them."""

from __future__ import annotations

import json
from typing import Any

from tests.tools import peers_table
from vllm_moe_oracle.releases.supported import NEWEST

PEERS = {
    "timed": {"peer:triton_kernels": "triton_kernels, sources 0123"},
    "skipped": {"peer:tokenspeed": "is not installed", "peer:of_the_past": "is not installed"},
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
    said = " ".join(text.split())
    assert "first in 2 of 3 cells, beside stock, peer:x; not first: mxfp4:a at 64: peer:x 0.90." in said
    assert "peer:x takes 0.90 to 1.50 times as long as ours." in said
    assert "Without a time: mxfp4:b, peer:y: no kernel." in text and "marlin" not in text
    assert "Triton 3.8.0:\n" in text and "Repeat with `bench --peers`." in text


def test_a_peer_is_skipped_if_no_benchmark_timed_it() -> None:
    text = peers_table.peers([PEERS])
    assert "| peer:triton_kernels | timed: triton_kernels, sources 0123 |" in text
    assert "| peer:tokenspeed | skipped: is not installed |" in text and "of_the_past" not in text
    text = peers_table.peers([PEERS, {"timed": {"peer:tokenspeed": "0.1.4"}, "skipped": {"peer:triton_kernels": "no"}}])
    assert "| peer:tokenspeed | timed: 0.1.4 |" in text and "skipped" not in text


def test_without_a_benchmark_there_is_the_list_alone() -> None:
    text = peers_table.peers([])
    assert "TurboMind (lmdeploy 0.18.0)" in text and "timed:" not in text


def test_the_page_has_each_benchmark_and_one_list() -> None:
    text = peers_table.table()
    assert text.count("Ours is first in") == len(peers_table.paths()) == text.count("Repeat with") >= 2
    assert text.count("TurboMind (lmdeploy") == 1
