"""What becomes of a checkpoint's MoE layers on a server with certain options: a backend, stock vLLM, or an error."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from ..core.decision import Candidate, Decision
from ..core.field_checks import check_fields, check_value
from ..core.lora import targets_experts
from ..core.measurement_set import MeasurementSet
from ..core.overrides import first_match
from ..core.problem import Device, Placement, Problem
from ..errors import LeftToStockError, NoBackendError, StandDown
from ..measurements.lookup import find_measurements, profile_error
from ..oracle.backend_names import check_backend_names
from ..oracle.registry import default_registry
from ..oracle.selection import decide
from ..oracle.stock_choice import StockChoice, asks_stock, choose_stock, left_to_stock
from ..releases.all2all import effective_all2all, why_vllm_refuses
from ..releases.supported import check_platform
from ..settings import AUTO, Settings
from .dtypes import dtype_refusal, read_dtype_option
from .files import CheckpointFiles
from .moe_layers import MoeLayers, find_moe_layers
from .ranks import Ranks
from .serving import (
    carried_hidden_size,
    check_exchange,
    exchange_refusal,
    is_round_robin,
    why_eplb_is_refused,
    why_lora_is_refused,
    with_activations,
)

STOCK_ITSELF = "stock vLLM's own choice"
"""What layers are left to where only a server can ask stock vLLM what it takes."""


@dataclasses.dataclass(slots=True)
class Server:
    """A server with the plugin, by vLLM's options as a user gives them; the attributes have what vLLM makes of them.

    Attributes:
        device: its machine.
        settings: of the plugin.
        ranks: vLLM's options of parallelism; a release may make another all-to-all of the one that is given.
        moe_backend: vLLM's ``--moe-backend``.
        draft_moe_backend: the ``moe_backend`` of vLLM's ``--speculative-config``, for multi-token prediction modules;
            given as "" for that of the model, as in vLLM.
        dtype: vLLM's ``--dtype``; "auto" for the one that vLLM takes by itself.
        batch_invariant: as vLLM's ``VLLM_BATCH_INVARIANT``.
        lora: LoRA adapters may be applied.
        lora_target_modules: the modules that adapters are for, given as any sequence; none for all.
        eplb: experts may move between ranks.
        expert_placement_strategy: as vLLM's option.
        round_robin: vLLM is asked to place experts round-robin.

    Raises:
        SettingError: an option of another type, a number of ranks below one, options that contradict each other, or a
            name of an all-to-all or a dtype that is unknown.
    """

    device: Device
    settings: Settings
    ranks: Ranks
    moe_backend: str = AUTO
    draft_moe_backend: str = ""
    dtype: str = AUTO
    batch_invariant: bool = False
    lora: bool = False
    lora_target_modules: tuple[str, ...] = ()
    eplb: bool = False
    expert_placement_strategy: dataclasses.InitVar[Placement | str] = "linear"
    round_robin: bool = dataclasses.field(init=False, default=False)

    def __post_init__(self, expert_placement_strategy: Placement | str) -> None:
        modules: object = self.lora_target_modules
        if isinstance(modules, Sequence) and not isinstance(modules, str):
            self.lora_target_modules = tuple(modules)
        check_fields(self)
        ranks = self.ranks
        ranks.check()
        model, draft = (each.lower().replace("-", "_") for each in (self.moe_backend, self.draft_moe_backend))
        exchange = effective_all2all(ranks.all2all, self.device.packages.get("vllm"))
        self.ranks = dataclasses.replace(ranks, all2all=exchange)
        self.moe_backend, self.draft_moe_backend = model, draft or model
        self.dtype = read_dtype_option(self.dtype)
        self.round_robin = is_round_robin(expert_placement_strategy, self.eplb, ranks.spreads_experts)

    def find_layers(self, read: CheckpointFiles, quantization: str = "") -> MoeLayers:
        """The layers of a checkpoint on one rank.

        Args:
            read: the checkpoint.
            quantization: vLLM's ``--quantization``.

        Raises:
            SettingError: a name of a backend is unknown. The error suggests one for the layers' formats.
            OracleError: as for `find_moe_layers`.
        """
        check_value("quantization", quantization, (str,))
        try:
            found = find_moe_layers(
                read,
                self.ranks,
                ragged_shards=self.settings.ragged_shards,
                online=quantization.lower(),
                vllm=self.device.packages.get("vllm"),
                dtype=self.dtype,
                capability=self.device.capability,
            )
        except LeftToStockError:
            self._check_names(())
            raise
        self._check_names((*found.problems, *found.mtp_problems))
        return found

    def _check_names(self, problems: Iterable[Problem]) -> None:
        schemes = {problem.scheme.name for problem in problems}
        check_backend_names(self.settings, self.moe_backend, schemes=schemes)
        check_backend_names(self.settings, self.draft_moe_backend, option="--draft-moe-backend", schemes=schemes)

    def refusal(self, layers: MoeLayers) -> str:
        """Why vLLM would not start with the model, its dtype and the options of parallelism; "" if it would. No experts
        exchange no tokens."""
        return next(filter(None, self._refusals(layers)), "")

    def _refusals(self, layers: MoeLayers) -> Iterator[str]:
        problems = (*layers.problems, *layers.mtp_problems)
        if not (problems or layers.unquantized or layers.unsupported_formats):
            return
        ranks, kind = self.ranks, self.device.kind
        yield why_vllm_refuses(ranks.all2all, kind, ranks.exchanges_tokens, ranks.dp, quantized=bool(layers.method))
        for problem in problems:
            error = dtype_refusal(problem, layers.method, self.device)
            yield "" if error is None else error.rule
        if self.eplb:
            for count in sorted({problem.num_experts for problem in problems}) or [0]:
                yield why_eplb_is_refused(count, ranks.total, kind)
        for problem in problems:
            yield why_lora_is_refused(self.serve(problem), ranks.all2all)

    @property
    def refused_profile(self) -> str:
        """Why the plugin would not start with the profile of the settings; "" if it would, or goes on without it."""
        return profile_error(self.settings) if self.settings.strict and self.settings.enabled else ""

    @property
    def stands_down(self) -> str:
        """Why the plugin registers nothing on the kind of device; "" where it does."""
        try:
            check_platform(self.device.kind, self.device.name)
        except StandDown as error:
            return str(error)
        return ""

    def serve(self, problem: Problem) -> Problem:
        """A layer of the checkpoint as this server sees it, with inputs in the precision of the settings."""
        modules, parallel = self.lora_target_modules, problem.parallel
        # vLLM places only several groups of experts in turn, without EPLB, and where tokens are exchanged at all, only
        # by a batched all-to-all.
        in_turn = self.round_robin and not self.eplb and (problem.routing.num_groups or 0) > 1
        if in_turn and (parallel.is_batched or not parallel.exchanges_tokens):
            parallel = dataclasses.replace(parallel, placement="round_robin")
        served = dataclasses.replace(
            problem,
            lora=self.lora and (not modules or targets_experts(modules, problem.layer)),
            eplb=self.eplb,
            batch_invariant=self.batch_invariant,
            parallel=parallel,
        )
        return with_activations(served, self.settings)


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What becomes of a layer.

    Attributes:
        decision: None where no backend runs it.
        candidates: every backend, with its verdict.
        stock: what stock vLLM does with the layer.
        error: why there is no decision; None where there is one.
        failure: the same in words for a user; "" where there is a decision.
        left_to_stock: what of stock vLLM the layer is left to, its class where that is known; "" where a backend runs
            it, or nothing does.
    """

    decision: Decision | None
    candidates: tuple[Candidate, ...]
    stock: StockChoice
    error: NoBackendError | None = None
    failure: str = ""
    left_to_stock: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class ServedLayer:
    """A layer and what becomes of it.

    Attributes:
        problem: the layer as the server sees it.
        outcome: the same object for equal layers, whose first it names.
        is_mtp: the layer is one of a multi-token prediction module, which vLLM loads as a model of its own for
            speculative decoding.
    """

    problem: Problem
    outcome: Outcome
    is_mtp: bool = False

    @property
    def decision(self) -> Decision | None:
        """The layer's own decision; None where no backend runs it."""
        decision = self.outcome.decision
        return None if decision is None else dataclasses.replace(decision, problem=self.problem)

    @property
    def error(self) -> NoBackendError | None:
        """Why the layer has no decision; None where it has one."""
        error = self.outcome.error
        if error is None:
            return None
        return NoBackendError(error.rule, error.remedy, self.problem.layer, error.candidates, error.table)


def decide_layers(server: Server, layers: MoeLayers) -> list[ServedLayer]:
    """What becomes of each quantized MoE layer, those of multi-token prediction modules last.

    Args:
        server: the server.
        layers: from `Server.find_layers`.
    """
    settings = server.settings
    evidence: dict[Problem, MeasurementSet | None] = {}
    known: dict[object, Outcome] = {}
    found = []
    for is_mtp, problems in ((False, layers.problems), (True, layers.mtp_problems)):
        backend = server.draft_moe_backend if is_mtp else server.moe_backend
        for read in problems:
            problem = server.serve(read)
            kind = problem.key()
            # Equal layers get equal decisions, unless an override names one of them.
            case = (
                kind,
                read.scheme,
                backend,
                first_match(settings.overrides, problem.layer, settings.source("overrides")),
            )
            if case not in known:
                if kind not in evidence:
                    evidence[kind] = find_measurements(problem, server.device, settings)
                declared = problem.with_activations(read.scheme.activations)  # a setting may replace them
                size = carried_hidden_size(problem, server.ranks.all2all)
                stock = choose_stock(declared, server.device, default_registry(), backend, layers.method, size)
                outcome = _outcome(server, problem, backend, stock, evidence[kind])
                if error := dtype_refusal(problem, layers.method, server.device):
                    words = _words(error, outcome.candidates, problem)
                    outcome = Outcome(None, outcome.candidates, stock, error, words)
                known[case] = outcome
            found.append(ServedLayer(problem, known[case], is_mtp))
    return found


def _outcome(
    server: Server, problem: Problem, moe_backend: str, stock: StockChoice, measurements: MeasurementSet | None
) -> Outcome:
    try:
        decision = decide(problem, server.device, server.settings, moe_backend, measurements=measurements)
    except NoBackendError as error:
        return _without_backend(server, problem, moe_backend, stock, error, error.candidates)
    candidates, all2all, kind = decision.candidates, server.ranks.all2all, server.device.kind
    try:
        check_exchange(problem, all2all, kind)
    except NoBackendError as error:
        # A hidden size that vLLM rounds up is no refusal.
        is_rounded = carried_hidden_size(problem, all2all) > problem.hidden_size
        if exchange_refusal(problem, all2all, kind) is not None or not is_rounded:
            return Outcome(None, candidates, stock, error, _words(error, candidates, problem))
        return _without_backend(server, problem, moe_backend, stock, error, candidates)
    return Outcome(decision, candidates, stock)


def _words(error: NoBackendError, candidates: tuple[Candidate, ...], problem: Problem) -> str:
    """An error without its table, which is printed anyway."""
    if not candidates:
        return f"this release has no backend for {problem.scheme.name} experts yet"
    return f"{error.rule}. {error.remedy}" if error.remedy else error.rule


def _without_backend(
    server: Server,
    problem: Problem,
    moe_backend: str,
    stock: StockChoice,
    error: NoBackendError,
    candidates: tuple[Candidate, ...],
) -> Outcome:
    """What becomes of a layer that no backend runs: it is left to stock vLLM, unless that is known not to run it."""
    failure, left_to = _words(error, candidates, problem), ""
    asked = asks_stock(problem, server.device, server.settings, default_registry(), moe_backend)
    if server.stands_down:
        left_to, failure = STOCK_ITSELF, f"left to stock vLLM: {server.stands_down}"
    elif asked and stock.may_run:
        left_to = stock.stock_class if stock.runs else STOCK_ITSELF
        failure = f"{left_to_stock(problem, stock)}: {failure}"
    elif asked:
        said = f"runs {stock}, an emulation" if stock.stock_class else str(stock)
        failure = f"{failure}; stock vLLM {'cannot, either' if stock.refusal and stock.refusal in failure else said}"
    return Outcome(None, candidates, stock, error, failure, left_to)
