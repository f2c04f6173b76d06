"""The choice among launch configurations.

A configuration may change with the number of tokens; the stored weights do not depend on it. `choose_config` takes, in
this order: the persistent kernels where they apply, a configuration that is stored with the layer's times (`tuned`),
the shipped table (`tiles.json`), a heuristic.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from .heuristic import expected_load, heuristic_config, prefers_small_tiles
from .launch_config import ConfigTable, LaunchConfig, TileConfig, config_errors, fits_registers, keeps_mx_groups
from .prefill_config import PrefillConfig, choose_prefill_config
from .weights import PackedWeights, code_bits


def shape_key(weights: PackedWeights, top_k: int) -> str:
    """The key of a layer's shape in `measured_table`: experts, of how many on all ranks, top-k, columns of both
    products, kind."""
    kind = "gated" if weights.gated else "plain"
    of = f"/{weights.num_experts}" if weights.num_experts != weights.experts else ""
    return f"{weights.experts}{of}x{top_k} {weights.hidden}x{weights.intermediate} {kind}"


def _parse_shape_key(key: str) -> tuple[int, int, int, int, int, bool]:
    """Experts, experts of all ranks, top-k, hidden, intermediate, gated."""
    routing, sizes, kind = key.split(" ")
    held, _, top_k = routing.partition("x")
    experts, _, total = held.partition("/")
    hidden, _, inner = sizes.partition("x")
    return int(experts), int(total or experts), int(top_k), int(hidden), int(inner), kind == "gated"


@functools.cache
def measured_table() -> dict[str, Any]:
    """The shipped table: `format_key` -> `shape_key` -> rows of {"tokens": largest, "config": ...}, ascending; a
    configuration of None leaves the choice to the heuristic."""
    path = Path(__file__).with_name("tiles.json")
    return json.loads(path.read_text()) if path.exists() else {}


def choose_config(
    weights: PackedWeights,
    top_k: int,
    tokens: int,
    *,
    tuned: ConfigTable = (),
    quantize: bool = False,
) -> LaunchConfig | PrefillConfig:
    """The configuration that `fused_moe` runs for a number of tokens.

    Args:
        weights: the layer; tensors on the meta device will do.
        top_k: choices per token.
        tokens: rows of x.
        tuned: configurations that were measured for this layer, before the shipped table's. They do not replace the
            persistent kernels.
        quantize: activations pass through MXFP8, so a tile must hold whole groups of 32 columns of h.
    """
    load = expected_load(weights.experts, weights.num_experts, top_k, tokens)
    key = format_key(weights), shape_key(weights, top_k)
    small = prefers_small_tiles(weights, load)
    prefill = choose_prefill_config(weights, *key, tokens, rows=load.rows, slots=load.slots, small_tiles=small)
    if prefill is not None and not quantize:
        return prefill
    return choose_launch_config(weights, top_k, tokens, tuned=tuned, quantize=quantize)


def candidate_configs(
    weights: PackedWeights,
    top_k: int,
    tokens: int,
    most: int,
    *,
    quantize: bool = False,
) -> list[LaunchConfig]:
    """Configurations worth timing beside the chosen one, the likeliest first; none where the persistent kernels run.

    These are the fastest of similar shapes with as many rows per expert, after the heuristic's own where the shipped
    table holds another. For a shape that is not in the table, they alternate with tiles one width narrower or wider
    than the heuristic's.

    Args:
        weights: the layer; tensors on the meta device will do.
        top_k: choices per token.
        tokens: rows of x.
        most: how many to return at most.
        quantize: as in `choose_config`.
    """
    chosen = choose_config(weights, top_k, tokens, quantize=quantize)
    if not isinstance(chosen, LaunchConfig):
        return []
    rows = expected_load(weights.experts, weights.num_experts, top_k, tokens).rows
    found: list[tuple[float, LaunchConfig]] = []
    for name, shapes in measured_table().items():
        if not _is_similar_format(name, weights):
            continue
        for shape, table in shapes.items():
            found += _nearby_configs(shape, table, weights, tokens, rows, 0.0 if name == format_key(weights) else 0.5)
    configs = [config for _, config in sorted(found, key=lambda pair: pair[0])]
    configs.insert(0, heuristic_config(weights, top_k, tokens))
    if shape_key(weights, top_k) not in measured_table().get(format_key(weights), {}):
        configs = [each for pair in itertools.zip_longest(_neighbors(chosen), configs) for each in pair if each]
    fit = [each for each in dict.fromkeys(configs) if each != chosen and is_suitable(weights, top_k, each, quantize)]
    return fit[:most]


_NARROWER = {
    (16, 128): TileConfig(16, 64, 128),
    (16, 64): TileConfig(8, 64, 128, k_parts=2),
    (8, 64): TileConfig(4, 32, 128, k_parts=4),
    (8, 32): TileConfig(4, 16, 128, k_parts=4),
    (4, 32): TileConfig(4, 16, 128, k_parts=4),
}
_WIDER = {
    (4, 16): TileConfig(4, 32, 128, k_parts=4),
    (4, 32): TileConfig(8, 64, 128, k_parts=2),
    (8, 32): TileConfig(8, 64, 128, k_parts=2),
    (8, 64): TileConfig(16, 64, 128),
    (16, 64): TileConfig(16, 128, 128, num_stages=3, scale_accumulators=False),
}


def _neighbors(config: LaunchConfig) -> Iterator[LaunchConfig]:
    """Configurations with one tile narrower or wider, `down` first: it has fewer programs."""
    for name in ("down", "gate_up"):
        tile = getattr(config, name)
        for table in (_NARROWER, _WIDER):
            other = table.get((tile.bm, tile.bn))
            if other and not (tile.no_k_loop or tile.n_tiles > 1) and (config.per_slot or other.bm == tile.bm):
                yield replace(config, **{name: other})


def _is_similar_format(name: str, weights: PackedWeights) -> bool:
    """Whether a format of the table resembles the layer's: both integers or both MX, with as many bits."""
    kind = name.split()[0]
    return kind == weights.format or (
        kind.startswith("int") == weights.format.startswith("int") and kind[-1] == weights.format[-1]
    )


def _nearby_configs(
    shape: str, table: list[dict[str, Any]], weights: PackedWeights, tokens: int, rows: float, penalty: float
) -> Iterator[tuple[float, LaunchConfig]]:
    """(distance, configuration) for rows of a shape's table with about as many rows per expert."""
    experts, total, top_k, hidden, inner, gated = _parse_shape_key(shape)
    sizes = abs(math.log(weights.hidden / hidden)) + abs(math.log(weights.intermediate / inner))
    plain = gated != weights.gated
    for row in table:
        if row["config"] is None:
            continue
        count = min(row["tokens"], 1 << 14)
        config = _parse_table_entry(json.dumps(row["config"], sort_keys=True))
        theirs = expected_load(experts, total, top_k, count).rows
        apart = abs(math.log(theirs / rows))
        if config.per_slot:  # every slot is a tile, so the number of tokens counts
            apart = abs(math.log(count / tokens))
        if apart <= math.log(2.1):
            yield apart + 0.3 * sizes + 0.5 * plain + 1.0 * (config.per_slot != (tokens <= 4)) + penalty, config


def is_suitable(weights: PackedWeights, top_k: int, config: LaunchConfig, quantize: bool) -> bool:
    """Whether another shape's configuration can run this layer without more registers than it takes there."""
    if config_errors(weights, top_k, config) or not fits_registers(weights, config):
        return False
    for tile, columns in ((config.gate_up, weights.hidden), (config.down, weights.intermediate)):
        if (tile.no_k_loop or tile.n_tiles > 1) and columns % (tile.bk * tile.k_parts):
            return False
    if config.down.fused_topk:
        choices = 1 << (top_k - 1).bit_length()
        if choices * 16 * weights.intermediate * code_bits(weights.format) > 96 * 32 * 256 or not 8 <= choices <= 16:
            return False
    return not quantize or keeps_mx_groups(weights, config)


def format_key(weights: PackedWeights) -> str:
    """The key of a layer's format in `measured_table`."""
    return weights.format if weights.format.startswith("mx") else f"{weights.format} g{weights.group}"


def choose_launch_config(
    weights: PackedWeights,
    top_k: int,
    tokens: int,
    *,
    tuned: ConfigTable = (),
    quantize: bool = False,
) -> LaunchConfig:
    """`choose_config` among the kernels of `gemm.py` only."""
    name, shape = format_key(weights), shape_key(weights, top_k)
    config = heuristic_config(weights, top_k, tokens)
    rows = measured_table().get(name, {}).get(shape, ())
    measured = next((row["config"] for row in rows if tokens <= row["tokens"]), None)
    if measured is not None:
        config = _parse_table_entry(json.dumps(measured, sort_keys=True))
    config = next((each for most, each in tuned if tokens <= most), None) or config
    if quantize and not keeps_mx_groups(weights, config):
        # With k_parts, a tile of whole groups would be several times as large.
        small = TileConfig(8, 64, 128, k_parts=2) if config.per_slot else replace(config.gate_up, bn=64)
        config = replace(config, gate_up=small)
    return config


@functools.cache
def _parse_table_entry(text: str) -> LaunchConfig:
    return LaunchConfig.from_json(json.loads(text))
