"""The launcher of a fused MoE layer over quantized weights: two to seven kernels.

    weights = allocate_weights("mxfp4", experts, hidden, intermediate, bias=True, device="cuda")
    pack_expert(weights, "w13", expert, codes, scales)  # each expert, w13 and w2
    config = choose_config(weights, top_k, tokens)
    layout = workspace_layout(weights, tokens, top_k, config)
    fused_moe(x, weights, topk_weights, topk_ids, activation="swigluoai", workspace=buffer, counters=counters, out=out)

All launches go to the current CUDA stream and depend only on shapes, so they can be captured in a CUDA graph. Nothing
is allocated, except for a copy of x where the persistent kernels cannot read its rows (`prefill_launch.launch`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ..core.activations import ACTIVATIONS
from ..core.problem import Activation
from . import gemm, prefill_launch, route
from .activations import activate
from .config import choose_config
from .fp8_weights import Fp8Weights
from .launch_config import BATCH_INVARIANT_CONFIG, ConfigTable, LaunchConfig, TileConfig, config_errors, keeps_mx_groups
from .prefill_config import PrefillConfig, prefill_errors
from .weights import PackedMatrix, PackedWeights, dequantize_expert, unpack_expert

_ALIGN = 256


@dataclass(frozen=True)
class WorkspaceLayout:
    """Where the parts of a workspace lie, in bytes from its start, and what it takes. A part that a configuration does
    not need has no bytes. S is tokens times top-k.

    Attributes:
        h: the activation's output, x's dtype, `[S, intermediate]`.
        partial: outputs of the second product by slot, x's dtype, `[S, hidden]`.
        quantized: x after MXFP8, x's dtype, `[tokens, hidden]`; with quantized activations.
        counts: slots by chunk and expert, int32; with a `PrefillConfig`.
        sorted: slots in the order of their experts, int32, `[S]`; not with `per_slot`.
        blocks: the blocks of slots of one expert, 16 bytes each; not with `per_slot`.
        scratch: sums of the parts of K, float32, with a `LaunchConfig`; router weights in the order of `sorted`,
            float32, with a `PrefillConfig`.
        nbytes: size of the workspace.
        counters: int32 elements of the counters that `fused_moe` takes.
        token_counters: the first of these that counts a token's summed parts; those before it count parts of K.
    """

    h: int
    partial: int
    quantized: int
    counts: int
    sorted: int
    blocks: int
    scratch: int
    nbytes: int
    counters: int
    token_counters: int


def max_blocks(slots: int, experts: int, bm: int) -> int:
    """The most blocks of up to bm slots of one expert that any routing of `slots` slots can give."""
    active = min(slots, experts)
    return active + (slots - active) // bm


def _num_blocks(config: LaunchConfig, slots: int, experts: int) -> int:
    """Programs along M: entries of the list of blocks, or slots with `per_slot`."""
    return slots if config.per_slot else _block_list_entries(slots, experts, config.gate_up.bm)


def _block_list_entries(slots: int, experts: int, bm: int) -> int:
    """Entries of the list of blocks."""
    return slots // bm + experts if _sorts_by_comparison(slots, experts) else max_blocks(slots, experts, bm)


def _sorts_by_comparison(slots: int, experts: int) -> bool:
    """Whether `sort_slots_by_comparison` sorts: its list has an entry for every expert at least."""
    return slots >= max(512, experts)


def _num_n_tiles(rows: int, tile: TileConfig) -> int:
    return -(-rows // tile.bn)


def aligned_offsets(sizes: list[int]) -> list[int]:
    """Aligned offsets of buffers of these sizes in bytes, and the total size last."""
    return [0, *itertools.accumulate(-(-size // _ALIGN) * _ALIGN for size in sizes)]


def workspace_layout(
    weights: PackedWeights,
    tokens: int,
    top_k: int,
    config: LaunchConfig | PrefillConfig | None = None,
    *,
    quantize: bool = False,
) -> WorkspaceLayout:
    """The memory that `fused_moe` needs for a number of tokens.

    `workspace` is any contiguous CUDA buffer of at least `nbytes` bytes, 16-byte aligned, with any content. `counters`
    is int32, at least `counters` elements, zero before the first call; every call leaves it zero. Calls that may run at
    the same time need a workspace and counters each. quantize: with MXFP8-dynamic activations.
    """
    config = config or choose_config(weights, top_k, tokens, quantize=quantize)
    if isinstance(config, PrefillConfig):
        needs = prefill_launch.buffer_sizes(weights, tokens, top_k)
        names = ("h", "partial", "quantized", "counts", "sorted", "blocks", "routers")
        return WorkspaceLayout(*aligned_offsets([needs.get(name, 0) for name in names]), counters=0, token_counters=0)
    slots = tokens * top_k
    sizes = [slots * weights.intermediate * 2, slots * weights.hidden * 2, tokens * weights.hidden * 2 * quantize]
    listed = 0 if config.per_slot else _block_list_entries(slots, weights.experts, config.gate_up.bm)
    sizes += [0, slots * 4 * (not config.per_slot), listed * 16]
    scratch, counters = 0, 0
    for tile, rows in ((config.gate_up, weights.w13.rows), (config.down, weights.w2.rows)):
        if tile.split_k > 1:
            programs = _num_blocks(config, slots, weights.experts) * _num_n_tiles(rows, tile)
            scratch = max(scratch, programs * tile.split_k * tile.bn * tile.bm * 4)
            # Rounded up: Triton compiles a variant of its own for a pointer that is not aligned to 16 bytes.
            counters = max(counters, -(-programs // 4) * 4)
    token_counters = tokens * _num_n_tiles(weights.hidden, config.down) if config.fuse_sum else 0
    return WorkspaceLayout(
        *aligned_offsets([*sizes, scratch]), counters=counters + token_counters, token_counters=counters
    )


def workspace_view(workspace: torch.Tensor, at: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """`count` elements of a dtype as a flat view of the workspace, from byte `at`."""
    flat = workspace.view(torch.uint8).view(-1)
    return flat[at : at + count * dtype.itemsize].view(dtype)


def _next_power_of_two(value: int, least: int) -> int:
    return max(least, 1 << (value - 1).bit_length())


def _sort_kernel(slots: int, experts: int) -> tuple[Any, dict[str, int]]:
    """The sorting kernel, and its constexprs and options."""
    chunk = _next_power_of_two(slots, 128)
    if _sorts_by_comparison(slots, experts):
        chunk = min(chunk, 4096)
        return route.sort_slots_by_comparison, {
            "CHUNK": chunk,
            "SINGLE_CHUNK": slots <= chunk,
            "num_warps": max(chunk // 256, 4),
        }
    return route.sort_slots, {"CHUNK": min(chunk, 1024), "EP": _next_power_of_two(experts, 16), "num_warps": 4}


def _scales_accumulators(weights: PackedWeights, tile: TileConfig) -> bool:
    """Whether scales multiply accumulators. That is more exact, and cheaper as long as there are few accumulators."""
    if (
        not tile.scale_accumulators
        or (tile.bm * tile.k_parts > 32 and not tile.fused_topk)
        or weights.format.startswith("mx")
    ):
        return False
    return weights.group > 0 and weights.group % tile.bk == 0


def _constexprs(weights: PackedWeights, matrix: PackedMatrix, tile: TileConfig) -> dict[str, object]:
    return {
        "HAS_ZERO": matrix.zeros is not None,
        "HAS_ROW_SCALE": matrix.row_scale is not None,
        "HAS_BIAS": matrix.bias is not None,
        "EVEN_K": matrix.columns % (tile.bk * tile.k_parts) == 0,
        "SCALE_ACC": _scales_accumulators(weights, tile),
        "STEPS": -(-matrix.columns // (tile.bk * tile.k_parts)) if tile.no_k_loop or tile.n_tiles > 1 else 0,
        "STAGES": tile.num_stages,
        "SPLIT_K": tile.split_k,
        "K_PARTS": tile.k_parts,
        "BM_REST": tile.bm_rest,
        "BM": tile.bm - tile.bm_rest,
        "BN": tile.bn,
        "BK": tile.bk,
    }


def _tensor_arguments(matrix: PackedMatrix, absent: torch.Tensor) -> tuple[torch.Tensor, ...]:
    tensors = (matrix.codes, matrix.scales, matrix.zeros, matrix.row_scale, matrix.bias)
    return tuple(absent if tensor is None else tensor for tensor in tensors)


def _scale_stride(matrix: PackedMatrix) -> int:
    """int32 words per expert of scales and zero points, which have the same shape where both exist."""
    words = matrix.scales if matrix.scales is not None else matrix.zeros
    return 0 if words is None else words.stride(0)


def _launch_options(pdl: bool) -> dict[str, object]:
    # Triton 3.10 will change the default of enable_fp_fusion; 3.9 warns when it is left out.
    return {"launch_pdl": pdl, "enable_fp_fusion": True}


def _compile_options(tile: TileConfig, pdl: bool) -> dict[str, object]:
    options: dict[str, object] = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, **_launch_options(pdl)}
    if tile.maxnreg:
        options["maxnreg"] = tile.maxnreg
    return options


def resolve_activation(
    activation: str, gated: bool, alpha: float | None, beta: float | None
) -> tuple[str, float, float]:
    """The kernels' name of an activation's formula, alpha and beta; None means the activation's own value."""
    spec = ACTIVATIONS[activation]
    return spec.kernel_for(gated), spec.alpha if alpha is None else alpha, spec.beta if beta is None else beta


def check_arguments(x: torch.Tensor, weights: PackedWeights | Fp8Weights, topk_weights: torch.Tensor,
                    topk_ids: torch.Tensor, activation: str, out: torch.Tensor) -> None:  # fmt: skip
    """Raises a ValueError unless the activation, shapes, dtypes, strides and device of a call fit the weights."""
    known = [name for name, spec in ACTIVATIONS.items() if spec.kernel_for(weights.gated)]
    if activation not in known:
        kind = "with" if weights.gated else "without"
        raise ValueError(
            f"activation {activation!r} of experts {kind} a gate; the kernels implement {', '.join(known)}"
        )
    if x.dim() != 2 or x.shape[1] != weights.hidden or x.stride(1) != 1:
        raise ValueError(f"x has shape {tuple(x.shape)}; expected [tokens, {weights.hidden}] with contiguous rows")
    if x.dtype != weights.dtype or out.dtype != x.dtype:
        raise ValueError(f"x is {x.dtype}, out {out.dtype}; the weights were stored for {weights.dtype}")
    if out.shape != x.shape or out.stride(1) != 1:
        raise ValueError(f"out has shape {tuple(out.shape)}; expected {tuple(x.shape)} with contiguous rows")
    if topk_ids.dim() != 2 or topk_ids.shape[0] != x.shape[0] or topk_ids.shape != topk_weights.shape:
        raise ValueError(
            f"topk_ids {tuple(topk_ids.shape)} and topk_weights {tuple(topk_weights.shape)} must both be "
            f"[{x.shape[0]}, top_k]"
        )
    if not (topk_ids.is_contiguous() and topk_weights.is_contiguous()):
        raise ValueError("topk_ids and topk_weights must be contiguous")
    if topk_ids.dtype not in (torch.int32, torch.int64) or not topk_weights.is_floating_point():
        raise ValueError(
            f"topk_ids are {topk_ids.dtype} and topk_weights {topk_weights.dtype}; expected int32 or int64, and floats"
        )
    elsewhere = {each.device for each in (weights.w13.codes, topk_ids, topk_weights, out)} - {x.device}
    # Triton launches on the current device, whatever the tensors' is.
    if elsewhere or (x.is_cuda and x.device.index != torch.cuda.current_device()):
        others = ", ".join(map(str, elsewhere or {f"cuda:{torch.cuda.current_device()}, the current device"}))
        raise ValueError(f"x is on {x.device}, and not all else: {others}")


def check_slot_rows(
    x: torch.Tensor,
    weights: PackedWeights,
    topk_ids: torch.Tensor,
    addend: torch.Tensor | None,
    h: torch.Tensor | None,
) -> None:
    """Raises a ValueError unless `addend` and `h` of `fused_moe` are both there and fit, or neither is there."""
    if addend is None and h is None:
        return
    slots = topk_ids.numel()
    for name, tensor, columns in (("addend", addend, weights.w13.rows), ("h", h, weights.intermediate)):
        if tensor is None:
            raise ValueError(f"{name} is missing: addend and h go together")
        if tensor.shape != (slots, columns) or tensor.dtype != x.dtype or not tensor.is_contiguous():
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}; expected contiguous {x.dtype} ({slots}, {columns})"
            )


def fused_moe(
    x: torch.Tensor,
    weights: PackedWeights,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    activation: str,
    workspace: torch.Tensor,
    counters: torch.Tensor,
    out: torch.Tensor,
    alpha: float | None = None,
    beta: float | None = None,
    limit: float | None = None,
    expert_map: torch.Tensor | None = None,
    apply_router_weight_on_input: bool = False,
    quantize_activations: bool = False,
    config: LaunchConfig | PrefillConfig | None = None,
    batch_invariant: bool = False,
    pdl: bool | None = None,
    addend: torch.Tensor | None = None,
    h: torch.Tensor | None = None,
) -> torch.Tensor:
    """Runs a layer: ``out[t] = sum over j of topk_weights[t, j] * expert(topk_ids[t, j])(x[t])``.

    Args:
        x: bfloat16 or float16, `[tokens, hidden]`, rows contiguous.
        weights: the layer's stored experts.
        topk_weights: any float dtype, `[tokens, top_k]`.
        topk_ids: int32 or int64, `[tokens, top_k]`; global ids with an `expert_map`. A negative id adds nothing.
        activation: one of ACTIVATIONS.
        workspace: scratch of at least `workspace_layout(...).nbytes` bytes for the same `config` and tokens.
        counters: int32, zeros; at least `workspace_layout(...).counters` elements. They are zeros again afterwards.
        out: as x; must not overlap `workspace`.
        alpha: parameter of the activation; None for its default.
        beta: likewise.
        limit: clamps gate from above and up on both sides; None for no limit.
        expert_map: int32, `[global experts]`: local index of each expert, -1 for experts of other ranks.
        apply_router_weight_on_input: multiplies the first product instead of the second one.
        quantize_activations: x and h pass through MXFP8 (e4m3, one e8m0 scale per 32 values, exponent rounded up).
        config: launch configuration; None for `choose_config`'s.
        batch_invariant: one configuration for all numbers of tokens: a token's result does not depend on the batch.
        pdl: programmatic dependent launch; None: on from compute capability 9.0.
        addend: x's dtype, contiguous `[tokens * top_k, w13 rows]`, gate columns then up columns: added in float32 to
            the first product, after its bias and before the activation. Slot ``t * top_k + j`` is token t's choice j;
            rows of slots without a local expert are not read. None for none.
        h: x's dtype, contiguous `[tokens * top_k, intermediate]`, only with an `addend`: gets the activation's rows by
            slot. Rows of slots without a local expert are left as they are.

    Returns:
        out.

    Raises:
        ValueError: arguments do not fit each other; the message has the sizes.
    """
    # One body of more than 80 lines: checks, then the launches in their order, which share most of their arguments.
    check_arguments(x, weights, topk_weights, topk_ids, activation, out)
    check_slot_rows(x, weights, topk_ids, addend, h)
    tokens, top_k = topk_ids.shape
    if tokens == 0:
        return out
    if batch_invariant:
        config = BATCH_INVARIANT_CONFIG
    config = config or choose_config(weights, top_k, tokens, quantize=quantize_activations)
    if quantize_activations and (isinstance(config, PrefillConfig) or not keeps_mx_groups(weights, config)):
        raise ValueError(f"{config} does not hold whole groups of 32 columns of h, which are quantized together")
    if (
        reasons := config_errors(weights, top_k, config)
        if isinstance(config, LaunchConfig)
        else prefill_errors(weights)
    ):
        raise ValueError(f"{config} does not fit this layer: " + "; ".join(reasons))
    plan = workspace_layout(weights, tokens, top_k, config, quantize=quantize_activations)
    available = workspace.numel() * workspace.element_size()
    if available < plan.nbytes or counters.numel() < plan.counters:
        raise ValueError(
            f"workspace of {available} bytes and {counters.numel()} counters; {tokens} tokens need {plan.nbytes} bytes "
            f"and {plan.counters} counters (workspace_layout)"
        )
    if pdl is None:
        pdl = torch.cuda.get_device_capability(x.device)[0] >= 9
    name, alpha, beta = resolve_activation(activation, weights.gated, alpha, beta)
    slots, hidden, inner, experts = tokens * top_k, weights.hidden, weights.intermediate, weights.experts
    if isinstance(config, PrefillConfig):
        buffers = {
            part: workspace_view(workspace, at, size // dtype.itemsize, dtype)
            for (part, size), at, dtype in zip(
                prefill_launch.buffer_sizes(weights, tokens, top_k).items(),
                (plan.h, plan.partial, plan.counts, plan.sorted, plan.blocks, plan.scratch),
                (x.dtype, x.dtype, torch.int32, torch.int32, torch.int32, torch.float32),
                strict=True,
            )
        }
        prefill_launch.launch(
            x, weights, topk_weights, topk_ids, expert_map, buffers, out, config, activation=name, alpha=alpha,
            beta=beta, limit=limit, weight_input=apply_router_weight_on_input, pdl=pdl, addend=addend, slot_h=h,
        )  # fmt: skip
        return out
    ids_map = topk_ids if expert_map is None else expert_map
    has_map = expert_map is not None
    h = workspace_view(workspace, plan.h, slots * inner, x.dtype) if h is None else h
    partial = workspace_view(workspace, plan.partial, slots * hidden, x.dtype)
    scratch = workspace_view(workspace, plan.scratch, (plan.nbytes - plan.scratch) // 4, torch.float32)
    token_counters = counters[plan.token_counters :]
    x_stride = x.stride(0)
    if quantize_activations:
        source, x = x, workspace_view(workspace, plan.quantized, tokens * hidden, x.dtype)
        gemm.mxfp8_round_trip_rows[(tokens, -(-hidden // 1024))](
            source, x, hidden, x_stride, BLOCK=1024, PDL=pdl, num_warps=4, **_launch_options(pdl)
        )
        x_stride = hidden
    blocks = _num_blocks(config, slots, experts)
    ordered = table = topk_ids
    if not config.per_slot:
        ordered = workspace_view(workspace, plan.sorted, slots, torch.int32)
        table = workspace_view(workspace, plan.blocks, blocks * 4, torch.int32)
        sort, compiled = _sort_kernel(slots, experts)
        sort[(experts,)](
            topk_ids, ids_map, ordered, table, slots, experts, blocks, HAS_MAP=has_map, BM=config.gate_up.bm, PDL=pdl,
            **compiled, **_launch_options(pdl),
        )  # fmt: skip
    w13, w2 = weights.w13, weights.w2
    shared = {
        "TOP_K": top_k, "FORMAT": weights.format, "GROUP": weights.group, "HAS_MAP": has_map,
        "WEIGHT_INPUT": apply_router_weight_on_input, "PER_SLOT": config.per_slot, "PDL": pdl,
    }  # fmt: skip
    tile = config.gate_up
    tiles = _num_n_tiles(w13.rows, tile)
    gemm.gate_up[(blocks * tiles * tile.split_k,)](
        x, *_tensor_arguments(w13, topk_ids), h, topk_ids, ids_map, topk_weights, ordered, table, scratch, counters,
        w2.codes, w2.codes if w2.scales is None else w2.scales, tiles, x_stride, hidden, inner, w13.codes.shape[1],
        w13.codes.shape[2], _scale_stride(w13), w2.codes.shape[1] * w2.codes.shape[2], _scale_stride(w2),
        alpha, beta, limit or 0.0,
        GATED=weights.gated, ACTIVATION=name, HAS_LIMIT=limit is not None, QUANTIZE=quantize_activations,
        PREFETCH=config.prefetch and pdl, addend_ptr=addend,
        **shared, **_constexprs(weights, w13, tile), **_compile_options(tile, pdl),
    )  # fmt: skip
    tile = config.down
    tiles = _num_n_tiles(w2.rows, tile)
    if tile.fused_topk:
        down, programs, only = gemm.down_fused_topk, tiles, {"CHOICES": _next_power_of_two(top_k, 1)}
        blocks = tokens
    elif tile.n_tiles > 1:
        down, programs, only = gemm.down_loop_n, -(-tiles // tile.n_tiles), {"N_TILES": tile.n_tiles}
    else:
        down, programs, only = gemm.down, tiles * tile.split_k, {"FUSE_SUM": config.fuse_sum}
    flags = {key: value for key, value in (shared | _constexprs(weights, w2, tile)).items() if key in down.arg_names}
    down[(blocks * programs,)](
        h, *_tensor_arguments(w2, topk_ids), partial, out, topk_ids, ids_map, topk_weights, ordered, table, scratch,
        counters, token_counters, tokens, tiles, inner, hidden, out.stride(0), w2.codes.shape[1], w2.codes.shape[2],
        _scale_stride(w2), **only, **flags, **_compile_options(tile, pdl),
    )  # fmt: skip
    if not config.fuse_sum and not tile.fused_topk:
        block = 1024 if tokens >= 64 else 512
        gemm.sum_topk[(tokens, -(-hidden // block))](
            partial, out, topk_ids, ids_map, hidden, out.stride(0), TOP_K=top_k, HAS_MAP=has_map, BLOCK=block, PDL=pdl,
            num_warps=4, **_launch_options(pdl),
        )  # fmt: skip
    return out


def fused_moe_reference(
    x: torch.Tensor,
    weights: PackedWeights,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    activation: str,
    alpha: float | None = None,
    beta: float | None = None,
    limit: float | None = None,
    expert_map: torch.Tensor | None = None,
    apply_router_weight_on_input: bool = False,
    quantize_activations: bool = False,
    addend: torch.Tensor | None = None,
    h: torch.Tensor | None = None,
) -> torch.Tensor:
    """`fused_moe` in plain torch and float32 on any device; h is rounded as the kernels round it."""
    ids = topk_ids.long()
    if expert_map is not None:
        ids = torch.where(ids >= 0, expert_map.long()[ids.clamp(min=0)], -1)
    rows = mxfp8_round_trip_reference(x.float()) if quantize_activations else x.float()
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in ids.unique().tolist():
        if expert < 0:
            continue
        token, choice = (ids == expert).nonzero(as_tuple=True)
        router = topk_weights[token, choice].float()[:, None]
        w13, w2 = (dequantize_expert(weights, which, expert) for which in ("w13", "w2"))
        b13, b2 = (unpack_expert(weights, which, expert)[3] for which in ("w13", "w2"))
        y = rows[token] @ w13.T
        if apply_router_weight_on_input:
            y = y * router
        y = y if b13 is None else y + b13
        slot = token * ids.shape[1] + choice
        y = y if addend is None else y + addend[slot].float()
        rows_h = activate(y, Activation(activation, weights.gated, alpha, beta, limit))
        rows_h = mxfp8_round_trip_reference(rows_h) if quantize_activations else rows_h.to(x.dtype).float()
        if h is not None:
            h[slot] = rows_h.to(x.dtype)
        y = rows_h @ w2.T
        y = y if b2 is None else y + b2
        out.index_add_(0, token, y if apply_router_weight_on_input else y * router)
    return out.to(x.dtype)


def mxfp8_round_trip_reference(x: torch.Tensor) -> torch.Tensor:
    """float32 `[..., K]` to MXFP8 and back: e4m3 with one scale 2**ceil(log2(amax / 448)) per 32 columns."""
    groups = x.unflatten(-1, (-1, 32))
    amax = groups.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny).double()
    exponent = torch.ceil(torch.log2(amax / 448.0)).clamp(-127, 127)
    codes = (groups.double() / torch.exp2(exponent)).clamp(-448, 448).float().to(torch.float8_e4m3fn)
    return (codes.double() * torch.exp2(exponent)).float().flatten(-2)


def warmup(
    weights: PackedWeights,
    top_k: int,
    tokens: Iterable[int],
    *,
    activation: str,
    limit: float | None = None,
    expert_map: torch.Tensor | None = None,
    ids_dtype: torch.dtype = torch.int32,
    topk_weights_dtype: torch.dtype = torch.float32,
    apply_router_weight_on_input: bool = False,
    tuned: ConfigTable = (),
    quantize_activations: bool = False,
    batch_invariant: bool = False,
    addend: bool = False,
) -> int:
    """Compiles (or loads from Triton's cache) every kernel that `fused_moe` will use for these numbers of tokens.

    Runs each distinct variant once on zeros, on the weights' device, in memory of its own; the other arguments must be
    those of the later calls. Returns the number of variants. Kernels are not specialized on the number of tokens, so
    any other number of tokens with the same configuration is covered too. addend: the later calls have one.
    """
    device = weights.w13.codes.device
    seen = set()
    for count in tokens:
        config = (
            BATCH_INVARIANT_CONFIG
            if batch_invariant
            else choose_config(weights, top_k, count, tuned=tuned, quantize=quantize_activations)
        )
        slots = count * top_k
        if isinstance(config, PrefillConfig):
            sorting: tuple[object, ...] = (prefill_launch.needs_scan_kernel(slots, weights.experts),)
        else:
            sorting = tuple(_sort_kernel(slots, weights.experts)[1].items())
        variant = (config, *sorting, count >= 64)
        if count == 0 or variant in seen:
            continue
        seen.add(variant)
        x = torch.zeros(count, weights.hidden, dtype=weights.dtype, device=device)
        ids = torch.arange(slots, device=device, dtype=ids_dtype).view(count, top_k)
        ids = ids % (weights.experts if expert_map is None else expert_map.numel())
        plan = workspace_layout(weights, count, top_k, config, quantize=quantize_activations)
        fused_moe(
            x,
            weights,
            torch.zeros(count, top_k, dtype=topk_weights_dtype, device=device),
            ids,
            activation=activation,
            limit=limit,
            workspace=torch.empty(plan.nbytes, dtype=torch.uint8, device=device),
            counters=torch.zeros(max(1, plan.counters), dtype=torch.int32, device=device),
            out=torch.empty_like(x),
            expert_map=expert_map,
            apply_router_weight_on_input=apply_router_weight_on_input,
            quantize_activations=quantize_activations,
            config=config,
            addend=x.new_zeros(slots, weights.w13.rows) if addend else None,
            h=x.new_empty(slots, weights.intermediate) if addend else None,
        )
    return len(seen)
