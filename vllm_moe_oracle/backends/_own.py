"""What the backends over this project's own kernels share: storage, workspaces and the call, for every format."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Hashable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

from ..oracle.decision import Plan
from ..oracle.planner import loaded_group
from ..oracle.problem import ActivationPrecision, Device, Problem
from ._contract import Backend, Builder, Tensors
from ._limits import Limits
from ._warmup import LOADING_BYTES, token_counts, warm_up

if TYPE_CHECKING:
    from torch import Tensor

    from ..kernels.config import Config
    from ..kernels.weights import Matrix, OwnWeights

logger = logging.getLogger("vllm.moe_oracle")

HOPPER = ((90, 91),)
"""Where the kernels are compiled, tested and measured."""

LIMITS = Limits(
    capabilities=HOPPER,
    dtypes=("bfloat16", "float16"),
    gated=("silu", "gelu", "gelu_tanh", "swigluoai"),
    ungated=("relu2",),
    parameters=True,
    bias=True,
    hidden_multiple=32,
    intermediate_multiple=32,
    weight_on_input=True,
    eplb=True,
    batch_invariant=True,
)
"""What the kernels take in every weight format."""

_PARTS = ("scale", "zero_point", "row_scale", "bias")

_REGISTERS = {"h": 64, "weights": 128}
"""Registers a thread for what tiles keep there: h of a tile that sweeps, weights of one without a loop."""

_first: dict[tuple[str, str], tuple[tuple[int, Config | None], ...]] = {}
"""Tile configurations of the first layer of a format and shape in this process."""

_said: set[tuple[str, str]] = set()


def _say_once(problem: Problem, words: str) -> None:
    """A warning, once for all layers of a shape."""
    key = (f"{problem.scheme} {problem.hidden_size} {problem.intermediate_size}", words)
    if key not in _said:
        _said.add(key)
        logger.warning("moe_oracle: %s: %s", problem.layer, words)


def _edges(plan: Plan, most: int) -> list[int]:
    """Numbers of tokens, up to `most`, at which a plan's tile configurations begin and end."""
    return sorted({size for edge, _ in plan.tiles for size in (edge, edge + 1) if 1 <= size <= most})


def _in_registers(weights: OwnWeights, config: Config) -> bool:
    """Whether what a configuration keeps in registers has room there; one that spills compiles for very long."""
    from ..kernels.weights import bits_of

    bits = bits_of(weights.format)
    for tile, columns in ((config.gate_up, weights.hidden), (config.down, weights.intermediate)):
        lanes = 4 * 32 * tile.warps
        if tile.sweep > 1 and tile.bm * columns * 2 > _REGISTERS["h"] * lanes:
            return False
        if tile.straight and not tile.merge and tile.bn * columns * bits // 8 > _REGISTERS["weights"] * lanes:
            return False
    return True


class OwnBackend(Backend):
    """Experts over `vllm_moe_oracle.kernels.fused_moe`; a subclass names the weight format and its limits."""

    place: ClassVar[float] = 900.0

    def estimate(self, problem: Problem, device: Device) -> float:
        """After every kernel that stock vLLM would take: without measurements the stock choice stands."""
        return self.place

    def activations(self, problem: Problem) -> ActivationPrecision:
        """The model's own dtype."""
        return "16bit"

    def weight_format(self, problem: Problem) -> str:
        """The kernels' name of the layer's weight format."""
        return problem.scheme.name if problem.scheme.name != "wna16" else f"int{problem.scheme.bits}"

    def convert(self, expert: Tensors, problem: Problem, plan: Plan) -> dict[str, Tensor]:
        """The kernels' storage order; see `vllm_moe_oracle.kernels.weights.Matrix` for shapes and dtypes."""
        from ..kernels.weights import load_expert

        one = self._allocate(problem, 1, expert["w13"].device)
        converted = {}
        for name, matrix in (("w13", one.w13), ("w2", one.w2)):
            load_expert(
                one, name, 0, expert[name], expert[f"{name}_scale"],
                expert.get(f"{name}_zero_point"), expert.get(f"{name}_bias"),
            )  # fmt: skip
            converted[name] = matrix.codes[0]
            parts = dict(zip(_PARTS, (matrix.scales, matrix.zeros, matrix.row_scale, matrix.bias), strict=True))
            converted |= {f"{name}_{part}": tensor[0] for part, tensor in parts.items() if tensor is not None}
        return converted

    def _allocate(self, problem: Problem, experts: int, device: Any) -> OwnWeights:
        import torch

        from ..kernels.weights import allocate

        scheme = problem.scheme
        return allocate(
            self.weight_format(problem),
            experts,
            problem.hidden_size,
            problem.intermediate_size,
            gated=problem.activation.gated,
            group=max(loaded_group(problem), 0),
            dtype=getattr(torch, problem.dtype),
            zero_points=scheme.zero_points,
            bias=problem.has_bias,
            device=device,
        )

    def experts(self, tensors: Tensors, problem: Problem, plan: Plan, builder: Builder) -> Any:
        """Experts over the kernels, with vLLM's workspaces as their scratch memory."""
        import torch

        from ..kernels.config import INVARIANT
        from ..kernels.fused_moe import fused_moe, plan_workspace

        config = INVARIANT if problem.batch_invariant else None
        self._give(problem, plan)
        quantise = self.activations(problem) == "mxfp8"
        blank = self._allocate(problem, problem.local_experts, "meta")
        # Tiles change with the number of tokens, so neither need grows steadily with it; beyond 1024 tokens the tiles
        # are the largest there are. vLLM sizes its workspaces once, for the most tokens.
        small = range(1, min(builder.max_tokens, 1024) + 1)
        plans = [plan_workspace(blank, size, problem.top_k, config, quantise=quantise) for size in small]
        most_bytes = list(itertools.accumulate((plan.nbytes for plan in plans), max))
        # Zero before the first call, and every call leaves it zero: one buffer, made once, outside any graph.
        sizes = [1 << power for power in range(10, builder.max_tokens.bit_length() + 1)]
        # Measured configurations may begin and end anywhere beyond 1024 tokens too.
        edges = [size for size in _edges(plan, builder.max_tokens) if size > 1024]
        bounds = {
            size: plan_workspace(blank, size, problem.top_k, config, quantise=quantise) for size in (*sizes, *edges)
        }
        plans += bounds.values()
        most = max(plan.counters for plan in plans)
        counters = builder.keep(torch.zeros(most, dtype=torch.int32, device=tensors["w13"].device))
        activation = problem.activation
        later = self._warm_up(tensors, blank, problem, plan, builder, config, quantise)

        def nbytes(tokens: int, top_k: int) -> int:
            below = most_bytes[min(tokens, len(most_bytes)) - 1] if tokens else 0
            if tokens == 0:
                return 0
            between = (bounds[size].nbytes for size in edges if size <= tokens)
            return max(below, *between, plan_workspace(blank, tokens, top_k, config, quantise=quantise).nbytes)

        def run(
            out: Tensor,
            x: Tensor,
            topk_weights: Tensor,
            topk_ids: Tensor,
            expert_map: Tensor | None,
            workspace: Tensor,
        ) -> None:
            weights = self._stored(tensors, blank)
            if later and x.shape[0] >= later[-1] and not torch.cuda.is_current_stream_capturing():
                warm_up(weights, problem, later, quantise=quantise)
                later.clear()
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
                quantise_activations=quantise,
                config=config,
            )

        return builder.from_scratch_function(run, nbytes)

    def tiles(self, problem: Problem, tokens: int, most: int) -> tuple[str, ...]:
        """What was the fastest for other shapes with as many rows an expert; none where one configuration must do for
        all numbers of tokens, and none that counts arrivals where the layer's own choice does not: a layer's counters
        are made once, for its own choices."""
        from ..kernels.config import candidates
        from ..kernels.fused_moe import plan_workspace

        if problem.batch_invariant:
            return ()
        blank = self._allocate(problem, problem.local_experts, "meta")
        quantise = self.activations(problem) == "mxfp8"
        found = candidates(blank, problem.top_k, tokens, 4 * most, quantise=quantise)

        def counters(config: Config | None) -> int:
            return plan_workspace(blank, tokens, problem.top_k, config, quantise=quantise).counters

        room = counters(None)
        small = [each for each in found if _in_registers(blank, each) and counters(each) <= room]
        return tuple(json.dumps(each.to_json(), sort_keys=True) for each in small[:most])

    def tiled(self, problem: Problem, tile: str) -> AbstractContextManager[None]:
        """The configuration, for all layers of the format and shape in this process."""
        from ..kernels.config import checked, given

        return given(self._allocate(problem, problem.local_experts, "meta"), problem.top_k, checked(tile))

    def compiled(self, problem: Problem, tokens: int, tile: str = "") -> frozenset[Hashable]:
        """Triton compiles a kernel for a tile, and for everything of a layer but its sizes: of these it asks whether
        they are multiples of 16, and the tile whether they are whole steps."""
        from ..kernels.config import INVARIANT, Config, checked, choose, format_key

        blank = self._allocate(problem, problem.local_experts, "meta")
        quantise = self.activations(problem) == "mxfp8"
        if tile:
            config: Any = checked(tile)
        else:
            own = None if problem.batch_invariant else choose(blank, problem.top_k, tokens, quantise=quantise)
            config = own or INVARIANT
        matrices = {"w13": blank.w13, "w2": blank.w2}
        numbers = [blank.hidden, blank.intermediate]
        for matrix in matrices.values():
            words = [each for each in (matrix.scales, matrix.zeros) if each is not None]
            numbers += [*matrix.codes.shape[1:], *(each.stride(0) for each in words)]
        activation = problem.activation
        common = (
            self.name, format_key(blank), problem.dtype, problem.scheme.zero_points, problem.has_bias, problem.top_k,
            activation.name, activation.limit is None, problem.routing.weight_on_input, problem.parallel.ep > 1,
            quantise, tuple((number % 16 == 0, number == 1) for number in numbers),
        )  # fmt: skip
        # Kernels that list each tile's slots and add choices up are small, and differ with how many there are.
        tile_tokens = (config.gate_up.bm, config.per_slot) if isinstance(config, Config) else str(config)
        found: set[Hashable] = {(tile_tokens, blank.experts, problem.top_k, problem.parallel.ep > 1, tokens)}
        if not isinstance(config, Config):
            return frozenset({*found, (*common, str(config), blank.experts)})
        for name, part in (("w13", config.gate_up), ("w2", config.down)):
            columns, step = matrices[name].columns, part.bk * part.fold
            whole = (columns % step == 0, columns if part.straight or part.sweep > 1 else None)
            found.add((name, *common, config.per_slot, config.prefetch, config.fuse_sum, str(part), *whole))
        return frozenset(found)

    def _give(self, problem: Problem, plan: Plan) -> None:
        """Puts the plan's configurations before the kernels' own table, for all layers of the format and shape; the
        first such layer's hold, also where it has none: scratch memory and what is compiled are planned with them. One
        that these kernels cannot run is left out and said: somebody wrote it."""
        from ..kernels.config import checked, fits, format_key, give, shape_key

        blank = self._allocate(problem, problem.local_experts, "meta")
        key = (format_key(blank), shape_key(blank, problem.top_k))
        rows = []
        for most, tile in plan.tiles:
            try:
                config = checked(tile) if tile else None
                if config and not fits(blank, problem.top_k, config, self.activations(problem) == "mxfp8"):
                    raise ValueError(f"{config} does not fit {problem.hidden_size} x {problem.intermediate_size}")
            except ValueError as error:
                _say_once(problem, f"a measured tile configuration is not used: {error}")
                config = None
            rows.append((most, config))
        first = _first.setdefault(key, tuple(rows))
        if not rows:
            return
        if first != tuple(rows):
            _say_once(problem, "measured tile configurations are not used: an earlier layer of the shape has others")
            return
        before = give(blank, problem.top_k, first)
        if before:  # one that is being timed, or this very one
            give(blank, problem.top_k, before)

    def _warm_up(
        self,
        tensors: Tensors,
        blank: OwnWeights,
        problem: Problem,
        plan: Plan,
        builder: Builder,
        config: Any,
        quantise: bool,
    ) -> list[int]:
        """Compiles what calls with few tokens run. Returns the numbers of tokens for which that is still to be done."""
        from ..kernels.fused_moe import plan_workspace

        if not (builder.serves and tensors["w13"].is_cuda):
            return []
        counts = sorted({*token_counts(builder.max_tokens), *_edges(plan, builder.max_tokens)})
        plans = (plan_workspace(blank, count, problem.top_k, config, quantise=quantise) for count in counts)
        needs = itertools.accumulate((plan.nbytes for plan in plans), max)
        few = sum(need <= LOADING_BYTES for need in needs)
        warm_up(self._stored(tensors, blank), problem, counts[:few], quantise=quantise)
        return counts[few:]

    def _stored(self, tensors: Tensors, blank: OwnWeights) -> OwnWeights:
        import dataclasses

        return dataclasses.replace(
            blank, w13=self._matrix(tensors, "w13", blank.w13), w2=self._matrix(tensors, "w2", blank.w2)
        )

    def _matrix(self, tensors: Tensors, name: str, blank: Matrix) -> Matrix:
        from ..kernels.weights import Matrix

        scales, zeros, row_scale, bias = (tensors.get(f"{name}_{part}") for part in _PARTS)
        return Matrix(blank.rows, blank.columns, tensors[name], scales, zeros, row_scale, bias)
