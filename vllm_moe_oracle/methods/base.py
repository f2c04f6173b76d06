"""The life cycle of a quantized MoE layer: decide at construction, convert after loading, run through vLLM's kernel.

`OracleMoEMethod` is a mix-in in front of a stock method class. The stock class registers the parameters, and its name
stays, because vLLM's loaders branch on it. The constructor decides: an explicit choice that cannot run is an error
before any weight is read.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

from .. import schemes, settings
from ..backends import Backend
from ..checkpoint.serving import check_hidden_size, require_lora
from ..compat import current_adapter, weight_storage
from ..compat.experts_builder import VllmBuilder
from ..compat.layer_context import current_layer
from ..core.decision import Decision
from ..core.problem import Problem, Scheme
from ..devices import detect
from ..errors import BackendDefect, LifecycleError, NoBackendError, OracleError, is_out_of_memory
from ..oracle.checked_backend import watched_calls
from ..oracle.registry import Registry, default_registry
from ..oracle.selection import decide
from ..verification import process_state
from ..verification.converted_layer import InstalledLayer, WeightParts
from . import (
    absent_experts,
    backend_check,
    backend_selection,
    correction_bias,
    first_start,
    load_summary,
    rank_comparison,
    rank_sync,
    token_dispatch,
    weight_loading,
)
from .layer_tensors import LayerTensors
from .stock_fallback import StockFallback
from .token_dispatch import TokenDispatch, WeightCopies

if TYPE_CHECKING:
    from ..compat.adapter import Adapter

logger = logging.getLogger("vllm.moe_oracle")

PROCESSED_ATTRIBUTE = "_already_called_process_weights_after_loading"
"""vLLM's attribute of a converted layer; its layer-wise reload removes it before it converts fresh weights."""

_VLLM_PARAMETER_NAMES = {"w13": "w13_weight", "w2": "w2_weight"}
"""Parameters that vLLM reads from a running layer, by canonical name; a checkpoint may have other names."""

State = Literal["raw", "converting", "converted"]
STATE_ATTRIBUTE = "moe_oracle_state"
"""Attribute of a layer: ``raw`` while the checkpoint's tensors are loaded, ``converting`` during the conversion and
after one that failed, ``converted`` when the layer holds the kernel's tensors and may run."""


class OracleMoEMethod(StockFallback):
    """The mix-in in front of a stock method class; see the module.

    Attributes:
        decision: the layer's decision.
        backend: the backend that it names.
        moe: vLLM's `FusedMoEConfig`.
        experts: what the backend built for vLLM's kernel; None before the conversion.
        moe_kernel: vLLM's kernel; None before the conversion.
        moe_quant_config: vLLM's `FusedMoEQuantConfig`; None before the conversion.
        adapter: vLLM's side.
        settings: the settings in force when the layer was made.
        registry: the backends that decisions name.
        rank_group: the ranks that hold parts of the layer.
        weight_copies: kernel tensors of further backends, by backend.
        token_dispatch: the kernels by number of tokens; None with a single backend.
        installed: what the check of the converted layer needs, until the next layer of its kind was checked.
    """

    decision: Decision
    backend: Backend
    moe: Any
    experts: object | None
    moe_kernel: Any
    moe_quant_config: Any
    adapter: Adapter
    settings: settings.Settings
    registry: Registry
    rank_group: rank_sync.RankGroup
    weight_copies: WeightCopies
    token_dispatch: TokenDispatch | None
    installed: InstalledLayer | None
    announced_cls: type
    """The class of the experts that the model's code saw when it was built."""

    def decide(self, moe: Any, scheme: Scheme) -> None:
        """Decides which backend runs the layer, and logs it.

        Args:
            moe: vLLM's `FusedMoEConfig`.
            scheme: what the checkpoint holds.

        Raises:
            CheckpointError: vLLM would load what `save_sharded_state` wrote.
            NoBackendError: no backend can run the layer, or the requested one cannot.
            RankSyncError: the ranks of the layer differ in what they compute with, or cannot agree on a backend.
            SettingError: a setting cannot be read, or has no effect where settings are strict, or an option contradicts
                LoRA adapters.
        """
        if hasattr(self, "decision"):  # `__new__` has called the constructor already; Python calls it again
            return
        FusedMoEMethodBase.__init__(self, moe)
        self.experts = None
        self._built_over: dict[str, int] = {}
        self.weight_copies = {}
        self.token_dispatch = None
        self.installed = None
        # An attribute, so that `apply` calls no cached function: on a CPU torch.compile traces through it.
        self.adapter = current_adapter()
        layer, name = current_layer()
        with process_state.kept():  # the first question imports third parties' backends
            self.registry = default_registry()
        load_summary.start_layer(name)
        self.adapter.require_original(name)
        with rank_sync.notify_on_failure(rank_comparison.make_group(), f"the settings and the shape of {name}"):
            self.settings = chosen = settings.load(additional_config=self.adapter.additional_config())
            load_summary.warn_without_effect(chosen, moe.moe_backend, self.registry)
            declared = scheme.activations
            scheme, requested_by = self._requested_scheme(scheme)
            problem = self._refine_problem(self.adapter.problem(moe, layer, name, scheme))
            self.problem = problem.with_activations(declared)
            require_lora(problem, moe.moe_parallel_config.all2all_backend)
        # vLLM's classes refuse LoRA by this flag, which vLLM sets for every layer.
        moe.is_lora_enabled = problem.lora
        self.rank_group = rank_comparison.make_group(chosen.rank_sync_timeout)
        rank_comparison.require_same_layer(self.rank_group, problem, chosen, moe.moe_backend)

        alone = self.adapter.adds_ranks_later()

        def decide_here() -> Decision:
            self._require_supported(problem)
            check_hidden_size(problem, moe.moe_parallel_config.all2all_backend)
            with process_state.kept():
                measurements = backend_selection.measurements_for(problem, chosen)
                found = decide(problem, detect.detect(), chosen, moe.moe_backend, self.registry, measurements)
            if alone:
                backend_selection.require_named(found, chosen)
            return found

        if not alone:
            first_start.measure_if_undecided(self.rank_group, problem, chosen, decide_here)
        backend_selection.select_backend(self, name, lambda: decide_here().with_activation_note(declared, requested_by))
        self.experts_cls = self.announced_cls = self.adapter.experts_class(self.backend)
        load_summary.record_decision(self.decision, chosen)
        correction_bias.watch(layer, name)

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, *args: Any, **kwargs: Any
    ) -> tuple[int, int]:
        """Sizes of the layer's parameters: those of the checkpoint's tensors on this rank. The conversion pads for the
        kernel, by the backend's plan.

        Raises:
            NoBackendError: an all-to-all needs larger sizes, for which no backend was decided.
        """
        # The stock class rounds for a backend of its own.
        rounded: tuple[int, int] = FusedMoEMethodBase.maybe_roundup_sizes(
            self, hidden_size, intermediate_size_per_partition, *args, **kwargs
        )
        if tuple(rounded) != (hidden_size, intermediate_size_per_partition):
            rule = (
                f"vLLM's all-to-all rounds hidden size {hidden_size} and intermediate size "
                f"{intermediate_size_per_partition} up to {rounded[0]} and {rounded[1]}; no backend loads such a layer"
            )
            raise NoBackendError(rule, "Choose another --all2all-backend", self.decision.problem.layer)
        return hidden_size, self.decision.problem.intermediate_size

    converts_on_arrival: ClassVar[bool] = False
    """Whether vLLM has the method convert each layer as soon as its weights are complete, not after all of them."""

    @property
    def in_own_order(self) -> bool:
        """See `backend_selection.LayerMethod`."""
        several = self.rank_group.size > 1 and self.decision.problem.parallel.ep > 1
        return several and (self.converts_on_arrival or self.moe_kernel is not None)

    @property
    def is_monolithic(self) -> bool:
        """Whether the kernel routes tokens itself."""
        return self.adapter.is_monolithic(self.backend)

    def create_weights(self, layer: Any, num_experts: int, *args: Any, **kwargs: Any) -> None:
        """Registers the checkpoint's parameters over buffers that can hold the kernel's tensors, too."""
        self._register_parameters(layer, num_experts, *args, **kwargs)
        self._set_state(layer, "raw")
        backend_check.reserve_or_fallback(self, lambda: self._reserve_expert_buffers(layer))

    def _keep_load_order(self) -> None:
        """Makes vLLM load files in the same order on every rank from now on.

        Ranks check layers together. Where layers are converted as they arrive, in a reload or with online quantization,
        several threads would deliver them in another order on each rank.
        """
        if self.rank_group.size > 1 and self.adapter.stop_multithread_load():
            logger.warning(
                "moe_oracle: enable_multithread_load is off from now on: %d ranks convert layers as they arrive, which "
                "must be in the same order on all",
                self.rank_group.size,
            )

    def _requested_scheme(self, scheme: Scheme) -> tuple[Scheme, str]:
        """The scheme with the requested activation precision, and the setting that requests it; "" where the precision
        is the one that the checkpoint declares."""
        if self.settings.activations == "checkpoint" or scheme.activations == self.settings.activations:
            return scheme, ""
        requested = dataclasses.replace(scheme, activations=self.settings.activations)
        return requested, self.settings.source("activations")

    def _refine_problem(self, problem: Problem) -> Problem:
        """The problem; a subclass corrects what vLLM's config of the layer does not say about its checkpoints."""
        return problem

    def _require_supported(self, problem: Problem) -> None:
        """Raises `NoBackendError` for what no backend can do with the parameters of this method. Ranks gather it, so
        that the layer may be left to stock vLLM on all of them."""

    def _register_parameters(self, layer: Any, num_experts: int, *args: Any, **kwargs: Any) -> None:
        """Registers the checkpoint's parameters as the stock class does, and biases that it leaves out."""
        problem = self.decision.problem
        loader = kwargs.get("weight_loader")
        unloaded = self._scheme().UNLOADED
        if loader is not None and unloaded:
            kwargs["weight_loader"] = weight_loading.validating_loader(
                loader, problem, self.rank_group, self.adapter.local_expert
            )
        super().create_weights(layer, num_experts, *args, **kwargs)
        if problem.has_bias:
            self._register_biases(layer, kwargs)
        names = self._parameter_names(self._scheme().shapes(problem))
        weight_loading.set_sentinel({own: getattr(layer, name) for own, name in names.items()}, self._sentinels())

    def _sentinels(self) -> dict[str, int]:
        """The byte that marks what was not loaded, by canonical name. Only the first rank adds the bias of the second
        product: a loader may leave it out on the others."""
        found = dict(self._scheme().UNLOADED)
        if self.moe.moe_parallel_config.tp_rank > 0:
            found.pop("w2_bias", None)
        return found

    def _reserve_expert_buffers(self, layer: Any) -> None:
        """Makes expert buffers as large as the kernel's tensors, and fills them with bytes that no checkpoint holds."""
        unloaded = self._sentinels()
        names = self._parameter_names(self._scheme().shapes(self.decision.problem))
        raw = {own: getattr(layer, name).data for own, name in names.items()}
        for own, spec in self._converted_specs(layer, raw).items():
            if own in names:
                weight_storage.reserve_expert_buffers(getattr(layer, names[own]), spec)
        if self.adapter.uses_dummy_weights():
            unloaded = self._scheme().DUMMY_FILL
        weight_loading.fill_with_sentinel({own: getattr(layer, name) for own, name in names.items()}, unloaded)

    def _converted_specs(self, layer: Any, raw: Mapping[str, Tensor]) -> dict[str, weight_storage.TensorSpec]:
        """Specs of one expert's kernel tensors.

        Args:
            layer: vLLM's layer.
            raw: tensors of the loaded ones' shapes and dtypes by canonical name, `[local_experts, ...]` each.

        Raises:
            BackendDefect: the conversion fails, or a kernel tensor has a name that the layer uses for something else.
        """
        with process_state.kept():
            specs = weight_storage.converted_specs(self._convert, raw)
        parameters = {*self._parameter_names(raw).values(), *_VLLM_PARAMETER_NAMES.values()}
        for own in specs.keys() - raw.keys():
            if own in parameters or weight_storage.is_other_attribute(layer, own):
                rule = f"backend {self.backend.name} converts to a tensor {own}, a name that vLLM's layer uses"
                raise BackendDefect(rule, "Report it to its maintainers: kernel tensors need names of their own")
        return specs

    def _register_biases(self, layer: Any, extra: Mapping[str, Any]) -> None:
        problem = self.decision.problem
        for name, rows in (("w13_bias", problem.w13_rows), ("w2_bias", problem.hidden_size)):
            if hasattr(layer, name):
                continue
            device = next(layer.parameters(recurse=False)).device
            data = torch.zeros(problem.local_experts, rows, dtype=layer.params_dtype, device=device)
            loader = {}
            if "weight_loader" in extra:
                loader["weight_loader"] = weight_loading.filling_loader(
                    self.adapter.bias_loader(layer, extra["weight_loader"])
                )
            weight_storage.replace_parameter(layer, name, data, **loader)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Converts the loaded weights for the backend, one expert at a time, and builds the kernel. A second call does
        nothing.

        Raises:
            CheckpointError: a tensor is missing, misshapen, of the wrong dtype, or damaged. Nothing has been converted.
        """
        if self._is_processed(layer):
            return
        self._set_state(layer, "converting")
        problem = self.decision.problem
        load_summary.begin_conversion(problem.layer)
        rank_comparison.require_same_layers(self.rank_group)
        with rank_sync.notify_on_failure(self.rank_group, f"the loaded weights of {problem.layer}"):
            if self.moe_kernel is not None:
                parameters = dict(layer.named_parameters(recurse=False))
                weight_loading.check_all_loaded(parameters, problem.layer)
                weight_loading.fill_unloaded(parameters.values())
            with absent_experts.refused(problem.layer):
                raw = self._read_weights(layer)
            weight_loading.end_load(layer.parameters(recurse=False))
            if self.settings.self_check != "off":
                self._scheme().check_values(raw, problem)
        parallel = self.moe.moe_parallel_config
        if "w2_bias" in raw and parallel.tp_size > 1 and parallel.tp_rank > 0:
            # vLLM sums the ranks' outputs, and its loader gives every rank the whole bias of the second product.
            raw["w2_bias"].zero_()
        topic = f"the checks of {problem.layer}"
        with rank_sync.notify_on_failure(self.rank_group, topic) if self.in_own_order else nullcontext():
            backend_check.check_or_fallback(self, raw, kernel_built=self.moe_kernel is not None)
            token_dispatch.prepare_copies(self, raw)
        with rank_sync.notify_on_failure(self.rank_group, f"the conversion of {problem.layer}"):
            self._install_weights(layer, raw)
        setattr(layer, PROCESSED_ATTRIBUTE, True)
        self._set_state(layer, "converted")
        self._keep_load_order()  # of a reload
        load_summary.record_conversion(self.decision)

    def _install_weights(self, layer: Any, raw: Mapping[str, Tensor]) -> None:
        """Replaces the loaded tensors by the kernel's, and builds the kernel unless it exists."""
        problem = self.decision.problem
        self.experts_cls = self.adapter.experts_class(self.backend)
        loaded = [name for name, _ in layer.named_parameters(recurse=False)]
        names = self._parameter_names(raw)
        parts = backend_check.parts_to_check(self)
        with process_state.kept():
            kernel_names = weight_storage.rename_parameters(
                layer,
                weight_storage.convert_in_place(layer, names, functools.partial(self._convert, parts=parts)),
                _VLLM_PARAMETER_NAMES,
            )
        offered = list(kernel_names.values())
        if problem.parallel.ep > 1:
            offered += weight_storage.keep_names(layer, loaded, problem.local_experts)
        local_expert = functools.partial(self.adapter.local_expert, layer)
        for name in offered:
            # Those that the conversion leaves as they were, too: biases of other ranks have been set to zero.
            weight_storage.forbid_loading(getattr(layer, name), problem.layer, local_expert)
        tensors = LayerTensors(layer, kernel_names)
        if self.moe_kernel is None:
            other = self.experts_cls is not self.announced_cls or self.decision.token_ranges
            if other and self.adapter.finalize_always(self.moe):  # before it is copied for other backends
                logger.info("moe_oracle: %s: its experts sum over top-k themselves", problem.layer)
            # Built once: a reload copies new values into the tensors that this kernel and captured graphs refer to.
            self.moe_quant_config = self.adapter.quant_config(problem, tensors)
            builder = self._builder(self.moe_quant_config)
            with process_state.kept(), watched_calls(self.backend, "experts"):
                self.experts = self.backend.build_experts(tensors, problem, self.decision.plan, builder)
                self.moe_kernel = self.adapter.kernel(self.moe, self.moe_quant_config, layer, self.experts)
            self._built_over = {name: tensor.data_ptr() for name, tensor in tensors.items()}
            weight_storage.register_buffers(layer, builder.buffers)
            self.token_dispatch = token_dispatch.build_dispatch(self, layer, tensors, self.moe_kernel)
        if parts is None:
            return

        def installed(experts: Any) -> InstalledLayer:
            return InstalledLayer(self.backend, parts, experts, layer, tensors, self.adapter)

        backend_check.check_installed(self, lambda: installed(self._experts_over(tensors)))
        if self._is_built_over(tensors):
            token_dispatch.check_installed(self, parts)
        elif parts.every:  # the kernel still reads the weights before these
            beside = () if self.token_dispatch is None else self.token_dispatch.installed(parts)
            own = functools.partial(installed, self.experts)
            backend_check.check_when_copied(self, [own, *(prepare for _, prepare in beside)])

    def _builder(self, quant_config: Any, for_serving: bool = True) -> VllmBuilder:
        batched = self.decision.problem.parallel.is_batched
        return VllmBuilder(self.adapter, self.moe, quant_config, for_serving, batched=batched)

    def _experts_over(self, tensors: Mapping[str, Tensor]) -> Any:
        """The experts that compute with tensors: those that were built, or new ones.

        vLLM's reload by layer converts fresh parameters, and copies them afterwards into the tensors that the kernel
        was built over; stock experts keep scales from when they were built.
        """
        if self._is_built_over(tensors):
            return self.experts
        quant_config = self.adapter.quant_config(self.decision.problem, tensors)
        builder = self._builder(quant_config, for_serving=False)
        with process_state.kept():
            return self.backend.build_experts(tensors, self.decision.problem, self.decision.plan, builder)

    def _is_built_over(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether the kernel reads these tensors."""
        return all(tensors[name].data_ptr() == address for name, address in self._built_over.items())

    def _read_weights(self, layer: Any) -> dict[str, Tensor]:
        """The layer's loaded parameters by canonical name, validated."""
        parameters = dict(layer.named_parameters(recurse=False))
        found: dict[str, Tensor] = self._scheme().read(
            parameters, self.decision.problem, functools.partial(self._was_loaded, layer)
        )
        return found

    def _was_loaded(self, layer: Any, name: str, shard: str, expert: int) -> bool:
        """Whether a loader has brought an expert's part of a parameter; see `_checks.WasLoaded`."""
        local_expert = functools.partial(self.adapter.local_expert, layer)
        return weight_loading.was_loaded(getattr(layer, name), shard, expert, local_expert)

    @staticmethod
    def _is_processed(layer: Any) -> bool:
        return bool(getattr(layer, PROCESSED_ATTRIBUTE, False))

    @staticmethod
    def _set_state(layer: Any, state: State) -> None:
        setattr(layer, STATE_ATTRIBUTE, state)

    def _scheme(self) -> Any:
        return schemes.module(self.decision.problem.scheme.name)

    def _parameter_names(self, canonical: Mapping[str, Any]) -> dict[str, str]:
        """Parameter name by canonical name."""
        found = self._scheme().parameter_names(self.decision.problem).items()
        return {own: name for own, name in found if own in canonical}

    def canonical(self, expert: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Canonical tensors of one expert, from the checkpoint's."""
        found: dict[str, Tensor] = self._scheme().canonical_expert(expert, self.decision.problem)
        return found

    def _convert(self, expert: Mapping[str, Tensor], parts: WeightParts | None = None) -> dict[str, Tensor]:
        """Kernel tensors of one expert, from the checkpoint's; `parts` keeps what a check of the layer needs."""
        canonical = self.canonical(expert)
        if parts is not None and not canonical["w13"].is_meta:
            parts.add(canonical)
        return self.backend.convert(canonical, self.decision.problem, self.decision.plan)

    def get_fused_moe_quant_config(self, layer: Any) -> Any:
        """vLLM's quant config of the layer, with its scales and biases; never None."""
        if self.moe_quant_config is None:
            problem = self.decision.problem
            present = {
                own: name for own, name in self._scheme().parameter_names(problem).items() if hasattr(layer, name)
            }
            return self.adapter.quant_config(problem, LayerTensors(layer, present))
        return self.moe_quant_config

    @property
    def supports_eplb(self) -> bool:
        """Whether vLLM may move experts between ranks; then experts are the first dimension of every kernel tensor."""
        return self.backend.capabilities.eplb

    def apply(self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Runs the experts on routed tokens; `x` is `[M, hidden]`."""
        kernel, weights = self._require_kernel(layer), layer
        extra = dict(zip(("shared_experts", "shared_experts_input"), args, strict=False)) | kwargs
        if self.token_dispatch is not None:
            self.token_dispatch.reserve_workspaces(x, topk_weights, topk_ids)
            kernel, weights = self.token_dispatch.select(x.shape[0])
        try:
            return self.adapter.apply(kernel, weights, x, topk_weights, topk_ids, extra)
        except Exception as error:  # entering a `try` costs nothing
            self._describe_failure(error, x)
            raise

    def apply_monolithic(self, layer: Any, x: Tensor, router_logits: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Routes tokens and runs the experts in one kernel; `x` is `[M, hidden]`, `router_logits` `[M, experts]`."""
        kernel = self._require_kernel(layer)
        extra = dict(zip(("input_ids",), args, strict=False)) | kwargs
        try:
            return self.adapter.apply_monolithic(kernel, layer, x, router_logits, extra)
        except Exception as error:  # named and raised again
            self._describe_failure(error, x)
            raise

    def _describe_failure(self, error: Exception, x: Tensor) -> None:
        """Adds the layer, the backend and a remedy to an exception of a running kernel; its type and traceback stay."""
        if isinstance(error, OracleError):  # it says where and what to do
            return
        name = self.decision.backend_for(x.shape[0])
        where = f"in {self.decision.problem.layer}, for {x.shape[0]} tokens"
        between_ranks = self.adapter.raised_between_ranks(error)
        if between_ranks:
            step = "vLLM hands over or exchanges tokens between ranks"
            error.add_note(f"moe_oracle: raised where {step} {where}, outside of {name}")
        else:
            error.add_note(f"moe_oracle: raised by the backend {name} {where}")
        if is_out_of_memory(error):
            return
        if between_ranks and "CUDA error" in str(error):  # launches return before their kernels run
            error.add_note("moe_oracle: an earlier kernel may have failed; CUDA_LAUNCH_BLOCKING=1 shows which one")
        elif between_ranks:
            variable = settings.env_var("enabled")
            error.add_note(f"moe_oracle: {variable}=0 at the next start shows whether stock vLLM fails likewise")
        else:
            variable = settings.env_var("disable")
            error.add_note(f"moe_oracle: {variable}={name} at the next start takes another backend; please report this")

    def _require_kernel(self, layer: Any) -> Any:
        state = getattr(layer, STATE_ATTRIBUTE, "raw")
        if state != "converted" or self.moe_kernel is None:
            rule = f"the layer was run before its weights were converted; they are {state}"
            remedy = "Call process_weights_after_loading first; if it failed, its error says why"
            raise LifecycleError(rule, remedy, self.decision.problem.layer)
        return self.moe_kernel
