"""What the backends over `vllm_moe_oracle.kernels.fused_moe` share: storage, launch configurations, workspaces,
call."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import json
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, ClassVar

from ..core.activations import ACTIVATIONS
from ..core.capabilities import Capabilities
from ..core.decision import Numerics, ShardPlan
from ..core.problem import ActivationPrecision, Device, Problem
from ..core.sharding import loaded_group_size
from ..layouts.float16_scales import MAX_SPREAD
from ._contract import MAX_CHECK_TOKENS, Adapters, Backend, Builder, Tensors
from ._hopper_warmup import MAX_LOADING_WORKSPACE, token_counts, warm_up

if TYPE_CHECKING:
    from torch import Tensor

    from ..kernels.fused_moe import WorkspaceLayout
    from ..kernels.launch_config import ConfigTable, LaunchConfig
    from ..kernels.prefill_config import PrefillConfig
    from ..kernels.weights import PackedMatrix, PackedWeights

logger = logging.getLogger("vllm.moe_oracle")

SM90 = ((90, 91),)
"""The compute capability that the kernels are compiled, tested and measured for."""

BATCHED_UNKNOWN = "was not measured on tokens that an all-to-all sorts by expert"
BATCHED_SLOWER = (
    "may be slower than vLLM's Marlin kernels on tokens that an all-to-all sorts by expert: 0.68 to 1.50 times as long "
    "up to 64 tokens an expert, 0.47 to 0.87 times from 128 tokens (H200, kernels/RESULTS.md)"
)
"""`why_not_batched` of MXFP4 and of symmetric 4-bit integers in groups. Tests compare the figures with the measured
ones."""

CAPABILITIES = Capabilities(
    compute_capabilities=SM90,
    dtypes=("bfloat16", "float16"),
    gated=tuple(name for name, spec in ACTIVATIONS.items() if spec.kernel),
    ungated=tuple(name for name, spec in ACTIVATIONS.items() if spec.ungated_kernel),
    activation_params=True,
    bias=True,
    hidden_multiple=32,
    intermediate_multiple=32,
    formats=("standard", "batched"),
    apply_router_weight_on_input=True,
    lora=True,
    eplb=True,
    batch_invariant=True,
)
"""What the kernels support in every weight format."""

_MATRIX_PARTS = ("scale", "zero_point", "row_scale", "bias")

_timed_config: ContextVar[tuple[tuple[str, str], LaunchConfig] | None] = ContextVar("timed_config", default=None)
"""Inside `HopperBackend.use_tile`: format and shape of the layers that are timed, and the configuration they run."""

_warned: set[tuple[str, str]] = set()


def _warn_once(problem: Problem, words: str) -> None:
    """Logs a warning once for all layers of a shape."""
    key = (f"{problem.scheme} {problem.hidden_size} {problem.intermediate_size}", words)
    if key not in _warned:
        _warned.add(key)
        logger.warning("moe_oracle: %s: %s", problem.layer, words)


def _profiling_tokens(uncompiled: list[int]) -> int:
    """From how many tokens a call is vLLM's profiling run, in which the kernels of calls with many tokens compile.

    The profiling run has more tokens than the checks during loading. It has fewer than the largest call where an
    all-to-all delivers only the tokens of this rank's experts.

    Args:
        uncompiled: numbers of tokens whose kernels were not compiled while the layer was loaded, ascending.
    """
    return min(uncompiled[-1], max(uncompiled[0], MAX_CHECK_TOKENS + 1)) if uncompiled else 0


def _tile_boundaries(plan: ShardPlan, most: int) -> list[int]:
    """Numbers of tokens up to `most` at which a plan's measured configurations begin and end."""
    return sorted({size for edge, _ in plan.tiles for size in (edge, edge + 1) if 1 <= size <= most})


_EVERY_NUMBER_UP_TO = 1 << 16
"""Up to this number of tokens the memory of every number is planned, 9 us each; beyond, of every 256th: there the
configurations change no more."""

_memory_needs: dict[Hashable, tuple[list[tuple[int, int]], int]] = {}
"""`_plan_memory` by all that it depends on."""


def _plan_memory(
    layout_of: Callable[[int], WorkspaceLayout], counts: Iterable[int]
) -> tuple[list[tuple[int, int]], int]:
    """Where the bytes of workspace reach a maximum from which they fall, as (tokens, bytes), and the most counters.

    Tiles change with the number of tokens, so that fewer tokens may need more memory.
    """
    peaks: list[tuple[int, int]] = []
    at = most = counters = 0
    for tokens in counts:
        layout = layout_of(tokens)
        counters = max(counters, layout.counters)
        if layout.nbytes >= most:
            at, most = tokens, layout.nbytes
        elif not peaks or peaks[-1][1] < most:
            peaks.append((at, most))
    return peaks, counters


class _LayerLaunches:
    """The configurations that one layer runs and the memory that they need.

    Args:
        blank: the layer's weights on the meta device.
        problem: the layer.
        tuned: configurations measured for the layer.
        quantize: activations pass through MXFP8.
        max_tokens: most tokens of a call.
        one_size: every call has that many.
    """

    def __init__(
        self,
        blank: PackedWeights,
        problem: Problem,
        tuned: ConfigTable,
        quantize: bool,
        max_tokens: int,
        one_size: bool,
    ) -> None:
        from ..kernels.config import format_key, shape_key

        self.blank, self.top_k, self.tuned, self.quantize = blank, problem.top_k, tuned, quantize
        self._invariant = problem.batch_invariant
        self._key = format_key(blank), shape_key(blank, problem.top_k)
        # vLLM asks for the workspace once, for the most tokens, and the counters are allocated once.
        most, every = max(1, max_tokens), min(max_tokens, _EVERY_NUMBER_UP_TO)
        counts = (most,) if one_size else (*range(1, every + 1), *range(every + 256, most, 256), most)
        key = (
            *self._key, blank.dtype, blank.w13.zeros is not None, tuned, quantize, self._invariant, most, one_size
        )  # fmt: skip
        if self._timed() is not None:  # for one timing
            self._peaks, self.counters = _plan_memory(self._layout, counts)
            return
        if key not in _memory_needs:
            _memory_needs[key] = _plan_memory(self._layout, counts)
        self._peaks, self.counters = _memory_needs[key]
        """Elements of the layer's counters, for every number of tokens."""

    def _timed(self) -> LaunchConfig | None:
        """The configuration that is timed, if it is one of this layer's."""
        timed = _timed_config.get()
        return timed[1] if timed and timed[0] == self._key else None

    def config(self, tokens: int) -> LaunchConfig | PrefillConfig:
        """The configuration that a call with `tokens` tokens runs."""
        from ..kernels.config import choose_config
        from ..kernels.launch_config import BATCH_INVARIANT_CONFIG

        if self._invariant:
            return BATCH_INVARIANT_CONFIG
        timed = self._timed()
        tuned = ((1 << 30, timed),) if timed else self.tuned
        return choose_config(self.blank, self.top_k, tokens, tuned=tuned, quantize=self.quantize)

    def _layout(self, tokens: int) -> WorkspaceLayout:
        from ..kernels.fused_moe import workspace_layout

        return workspace_layout(self.blank, tokens, self.top_k, self.config(tokens), quantize=self.quantize)

    def nbytes(self, tokens: int, top_k: int) -> int:
        """Bytes of workspace for calls with up to `tokens` tokens."""
        return max(self._layout(tokens).nbytes, *(nbytes for at, nbytes in self._peaks if at <= tokens), 0)


class HopperBackend(Backend):
    """Experts over `vllm_moe_oracle.kernels.fused_moe`; a subclass names the weight format and its limits."""

    static_priority = 900.0  # after vLLM's own kernels: without measurements, the stock choice stands
    activation_precision: ClassVar[ActivationPrecision] = "16bit"
    triton_release_error = 0.024

    def only_by_name(self, problem: Problem, device: Device) -> str:
        """Where vLLM's own kernels may be faster, and nothing could show it."""
        if problem.lora:
            return "was not measured with LoRA adapters"
        return self.why_not_batched(problem) if problem.parallel.is_batched else ""

    def why_not_batched(self, problem: Problem) -> str:
        """Why a layer in the batched format gets these kernels by name alone; "" where vLLM has none for it."""
        return BATCHED_UNKNOWN

    def numerics(self, problem: Problem) -> Numerics:
        """What it computes with. float16 holds MX weights exactly only within some binades of a row's largest scale."""
        found = super().numerics(problem)
        if problem.dtype != "float16" or problem.scheme.name not in MAX_SPREAD:
            return found
        exact = f"exact within {MAX_SPREAD[problem.scheme.name]} binades of a row's largest scale"
        return Numerics(f"converted to float16 and scaled in float16, {exact}", found.activations, found.accumulate)

    def weight_format(self, problem: Problem) -> str:
        """The kernels' name of the layer's weight format."""
        return problem.scheme.name if problem.scheme.name != "wna16" else f"int{problem.scheme.bits}"

    def convert(self, expert: Tensors, problem: Problem, plan: ShardPlan) -> dict[str, Tensor]:
        """The kernels' storage order; see `vllm_moe_oracle.kernels.weights.PackedMatrix` for shapes and dtypes."""
        from ..kernels.weights import pack_expert

        one = self._allocate(problem, 1, expert["w13"].device)
        converted = {}
        for name, matrix in (("w13", one.w13), ("w2", one.w2)):
            pack_expert(
                one, name, 0, expert[name], expert[f"{name}_scale"],
                expert.get(f"{name}_zero_point"), expert.get(f"{name}_bias"),
            )  # fmt: skip
            converted[name] = matrix.codes[0]
            parts = dict(zip(_MATRIX_PARTS, (matrix.scales, matrix.zeros, matrix.row_scale, matrix.bias), strict=True))
            converted |= {f"{name}_{part}": tensor[0] for part, tensor in parts.items() if tensor is not None}
        return converted

    def _allocate(self, problem: Problem, experts: int, device: Any) -> PackedWeights:
        import torch

        from ..kernels.weights import allocate_weights

        scheme = problem.scheme
        return allocate_weights(
            self.weight_format(problem),
            experts,
            problem.hidden_size,
            problem.intermediate_size,
            gated=problem.activation.gated,
            group=max(loaded_group_size(problem), 0),
            dtype=getattr(torch, problem.dtype),
            zero_points=scheme.zero_points,
            bias=problem.has_bias,
            num_experts=problem.num_experts,
            device=device,
        )

    def build_experts(self, tensors: Tensors, problem: Problem, plan: ShardPlan, builder: Builder) -> Any:
        """Experts that run the kernels in vLLM's workspaces."""
        import torch

        from ..kernels.fused_moe import fused_moe

        launches = self._launches(problem.as_called(), plan, builder.max_tokens, problem.parallel.is_batched)
        # Every call leaves the counters zero, so one buffer is enough. It is allocated outside of CUDA graphs.
        counters = builder.register_buffer(
            torch.zeros(launches.counters, dtype=torch.int32, device=tensors["w13"].device)
        )
        activation = problem.activation
        later = self._warm_up(tensors, launches, problem, plan, builder)
        profiling_tokens = _profiling_tokens(later)

        def run(
            out: Tensor,
            x: Tensor,
            topk_weights: Tensor,
            topk_ids: Tensor,
            expert_map: Tensor | None,
            workspace: Tensor,
            adapters: Adapters | None = None,
        ) -> None:
            weights = self._stored(tensors, launches.blank)
            if later and x.shape[0] >= profiling_tokens and not torch.cuda.is_current_stream_capturing():
                warm_up(
                    weights, problem.as_called(), later, ids_dtype=topk_ids.dtype, tuned=launches.tuned,
                    quantize=launches.quantize,
                )  # fmt: skip
                later.clear()
            addend = None if adapters is None else adapters.gate_up()
            h = None if addend is None else x.new_empty(topk_ids.numel(), weights.intermediate)
            fused_moe(
                x,
                weights,
                topk_weights,
                topk_ids,
                activation=activation.name,
                alpha=activation.alpha,
                beta=activation.beta,
                limit=activation.limit,
                workspace=workspace,
                counters=counters,
                out=out,
                expert_map=expert_map,
                quantize_activations=launches.quantize,
                config=launches.config(x.shape[0]),
                addend=addend,
                h=h,
            )
            if adapters is not None and h is not None:
                adapters.add_down(out, h)

        return builder.from_workspace_function(run, launches.nbytes)

    def _launches(self, problem: Problem, plan: ShardPlan, max_tokens: int, one_size: bool = False) -> _LayerLaunches:
        """The layer's configurations: the plan's where they are usable, then the kernels' own choice."""
        blank = self._allocate(problem, problem.local_experts, "meta")
        quantize = self.activations(problem) == "mxfp8"
        tuned = self._tuned(problem, plan, blank, quantize)
        return _LayerLaunches(blank, problem, tuned, quantize, max_tokens, one_size)

    def _tuned(self, problem: Problem, plan: ShardPlan, blank: PackedWeights, quantize: bool) -> ConfigTable:
        """The plan's configurations as a table. One that the kernels cannot run is left out with a warning."""
        from ..kernels.config import is_suitable
        from ..kernels.launch_config import parse_config

        rows: list[tuple[int, LaunchConfig | None]] = []
        for tokens, tile in plan.tiles:
            config = None
            try:
                config = parse_config(tile) if tile else None
                if config and not is_suitable(blank, problem.top_k, config, quantize):
                    raise ValueError(f"{config} does not fit {problem.hidden_size} x {problem.intermediate_size}")
            except ValueError as error:
                _warn_once(problem, f"a measured tile configuration is not used: {error}")
                config = None
            rows.append((tokens, config))
        return tuple(rows)

    def tiles(self, problem: Problem, tokens: int, most: int) -> tuple[str, ...]:
        """See `Backend.tiles`. None for batch-invariant layers, which run one configuration for all numbers of tokens,
        and none that needs more counters than the layer's own choice: a layer allocates its counters once."""
        from ..kernels.config import candidate_configs
        from ..kernels.fused_moe import workspace_layout

        if problem.batch_invariant:
            return ()
        blank = self._allocate(problem, problem.local_experts, "meta")
        quantize = self.activations(problem) == "mxfp8"
        found = candidate_configs(blank, problem.top_k, tokens, 4 * most, quantize=quantize)

        def counters(config: LaunchConfig | None) -> int:
            return workspace_layout(blank, tokens, problem.top_k, config, quantize=quantize).counters

        room = counters(None)
        small = [each for each in found if counters(each) <= room]
        return tuple(json.dumps(each.to_json(), sort_keys=True) for each in small[:most])

    @contextlib.contextmanager
    def use_tile(self, problem: Problem, tile: str) -> Iterator[None]:
        """While the context lasts, layers of the format and shape run the configuration. For timing only."""
        from ..kernels.config import format_key, shape_key
        from ..kernels.launch_config import parse_config

        blank = self._allocate(problem, problem.local_experts, "meta")
        token = _timed_config.set(((format_key(blank), shape_key(blank, problem.top_k)), parse_config(tile)))
        try:
            yield
        finally:
            _timed_config.reset(token)

    def compile_keys(self, problem: Problem, tokens: int, tile: str = "") -> frozenset[Hashable]:
        """See `Backend.compile_keys`. Triton compiles a kernel for each tile and each format, activation and number of
        choices. Of a layer's sizes it specializes on multiples of 16, and the kernels on whole steps."""
        from ..kernels.config import choose_config, format_key
        from ..kernels.launch_config import BATCH_INVARIANT_CONFIG, LaunchConfig, parse_config

        blank = self._allocate(problem, problem.local_experts, "meta")
        quantize = self.activations(problem) == "mxfp8"
        if tile:
            config: Any = parse_config(tile)
        else:
            own = None if problem.batch_invariant else choose_config(blank, problem.top_k, tokens, quantize=quantize)
            config = own or BATCH_INVARIANT_CONFIG
        matrices = {"w13": blank.w13, "w2": blank.w2}
        numbers = [blank.hidden, blank.intermediate]
        for matrix in matrices.values():
            words = [each for each in (matrix.scales, matrix.zeros) if each is not None]
            numbers += [*matrix.codes.shape[1:], *(each.stride(0) for each in words)]
        activation = problem.activation
        common = (
            self.name, format_key(blank), problem.dtype, problem.scheme.zero_points, problem.has_bias, problem.top_k,
            activation.name, activation.limit is None, problem.routing.apply_router_weight_on_input,
            problem.parallel.ep > 1, quantize, tuple((number % 16 == 0, number == 1) for number in numbers),
        )  # fmt: skip
        # The kernels that sort slots and sum over top-k are specialized on the numbers of slots and experts.
        sorting = (config.gate_up.bm, config.per_slot) if isinstance(config, LaunchConfig) else str(config)
        found: set[Hashable] = {(sorting, blank.experts, problem.top_k, problem.parallel.ep > 1, tokens)}
        if not isinstance(config, LaunchConfig):
            return frozenset({*found, (*common, str(config), blank.experts)})
        for name, part in (("w13", config.gate_up), ("w2", config.down)):
            columns, step = matrices[name].columns, part.bk * part.k_parts
            whole = (columns % step == 0, columns if part.no_k_loop or part.n_tiles > 1 else None)
            found.add((name, *common, config.per_slot, config.prefetch, config.fuse_sum, str(part), *whole))
        return frozenset(found)

    def hand_overs(self, problem: Problem, most: int) -> tuple[int, ...]:
        """See `Backend.hand_overs`: up to where the small tiles run, and not the persistent kernels."""
        from ..kernels.config import choose_config
        from ..kernels.launch_config import LaunchConfig

        if problem.batch_invariant or problem.parallel.is_batched or self.activations(problem) == "mxfp8":
            return ()
        blank = self._allocate(problem, problem.local_experts, "meta")

        def persistent(tokens: int) -> bool:
            return not isinstance(choose_config(blank, problem.top_k, tokens), LaunchConfig)

        # Where they run, they run for all larger numbers, too.
        last = bisect.bisect_left(range(1, most + 1), True, key=persistent)
        return (last,) if 0 < last < most else ()

    def _warm_up(
        self, tensors: Tensors, launches: _LayerLaunches, problem: Problem, plan: ShardPlan, builder: Builder
    ) -> list[int]:
        """Compiles the kernels of calls with few tokens. Returns the numbers of tokens still to be compiled.

        In the batched format every call has the same number of rows, and the first one compiles what is not compiled.
        """
        if not (builder.for_serving and tensors["w13"].is_cuda):
            return []
        most, one_size = builder.max_tokens, problem.parallel.is_batched
        problem = problem.as_called()
        counts = [most] if one_size else sorted({*token_counts(most), *_tile_boundaries(plan, most)})
        needs = itertools.accumulate((launches.nbytes(count, problem.top_k) for count in counts), max)
        few = sum(need <= MAX_LOADING_WORKSPACE for need in needs)
        weights = self._stored(tensors, launches.blank)
        warm_up(
            weights, problem, counts[:few], ids_dtype=builder.ids_dtype, tuned=launches.tuned,
            quantize=launches.quantize,
        )  # fmt: skip
        return [] if one_size else counts[few:]

    def stored(self, tensors: Tensors, problem: Problem) -> PackedWeights:
        """The layer's weights as the kernels take them, from its kernel tensors."""
        return self._stored(tensors, self._allocate(problem, problem.local_experts, "meta"))

    def _stored(self, tensors: Tensors, blank: PackedWeights) -> PackedWeights:
        import dataclasses

        return dataclasses.replace(
            blank, w13=self._matrix(tensors, "w13", blank.w13), w2=self._matrix(tensors, "w2", blank.w2)
        )

    def _matrix(self, tensors: Tensors, name: str, blank: PackedMatrix) -> PackedMatrix:
        from ..kernels.weights import PackedMatrix

        scales, zeros, row_scale, bias = (tensors.get(f"{name}_{part}") for part in _MATRIX_PARTS)
        return PackedMatrix(blank.rows, blank.columns, tensors[name], scales, zeros, row_scale, bias)
