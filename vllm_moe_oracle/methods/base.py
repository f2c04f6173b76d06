"""The life of a quantised MoE layer: decided when its method is made, converted after loading, run by vLLM's kernel.

`OracleMoEMethod` is mixed in before a stock method class, whose registration of parameters and whose name (vLLM's
loaders branch on it) stay. The decision falls in the constructor: an explicit choice that cannot run is an error before
any weight is read.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

from .. import device, schemes, settings
from ..backends import Backend
from ..compat import current_adapter
from ..compat.construction import current_layer
from ..errors import LifecycleError, NoBackendError
from ..oracle.decision import Decision
from ..oracle.oracle import decide
from ..oracle.problem import Problem, Scheme
from . import agreement, choice, engagement, loading, selfcheck, storage, turns
from .builder import VllmBuilder

if TYPE_CHECKING:
    from ..compat.adapter import Adapter

logger = logging.getLogger("vllm.moe_oracle")

_PROCESSED = "_already_called_process_weights_after_loading"
"""vLLM's own mark of a converted layer: its layer-wise reload takes it away before it converts fresh weights."""

_READ_BY_VLLM = {"w13": "w13_weight", "w2": "w2_weight"}
"""Parameters that vLLM's own code looks for on a layer that runs, by canonical name; a checkpoint may have others."""

State = Literal["raw", "converting", "converted"]
STATE = "moe_oracle_state"
"""Attribute of a layer: ``raw`` while the checkpoint's tensors are loaded, ``converted`` when the kernel's are in their
place and it may run, ``converting`` in between, and for good when the conversion failed."""


class LayerTensors(Mapping[str, Tensor]):
    """The kernel tensors of a layer by canonical name, looked up anew each time: a reload may replace parameters."""

    def __init__(self, layer: torch.nn.Module, names: Mapping[str, str]) -> None:
        """
        Args:
            layer: whose parameters they are.
            names: parameter name by canonical name.
        """
        self._layer = layer
        self._names = dict(names)

    def __getitem__(self, name: str) -> Tensor:
        tensor = getattr(self._layer, self._names[name])
        assert isinstance(tensor, Tensor)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class OracleMoEMethod(FusedMoEMethodBase):
    """Mixed in before a stock method class; see the module."""

    decision: Decision
    backend: Backend
    moe: Any
    moe_kernel: Any
    moe_quant_config: Any
    release: Adapter
    settings: settings.Settings
    group: agreement.Group
    copies: turns.Copies
    by_turns: turns.Turns | None

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """An instance, or one of the stock class where stock vLLM has to serve the layer.

        LoRA adapters and batched all-to-alls are what few backends here know; where none of those that do can run the
        layer, stock classes may. Anything else that no backend can do is an error.

        Raises:
            NoBackendError: the stock class has to serve the layer, and cannot read its checkpoint.
        """
        asked = [*args, *kwargs.values()]
        moe = next((getattr(each, "moe_config", each) for each in asked if _is_layer_config(each)), None)
        wanted = [] if moe is None else current_adapter().beyond_us(moe)
        made = super().__new__(cls)
        if not wanted or _is_explicit():
            return made
        try:
            made.__init__(*args, **kwargs)
            return made
        except NoBackendError as error:
            refused = error.rule.partition("\n")[0]
        stock = next(base for base in cls.__mro__ if not issubclass(base, OracleMoEMethod))
        name = current_layer()[1]
        objection = cls.beyond_stock(*args, **kwargs)
        if objection:
            rule = f"{' and '.join(wanted)} would be left to stock vLLM's {stock.__name__}, which {objection}"
            raise NoBackendError(rule, "Serve without", name)
        words = " and ".join(wanted)
        logger.warning("moe_oracle: %s: %s: left to stock vLLM's %s; %s", name, words, stock.__name__, refused)
        return cls.made_by_stock(stock, *args, **kwargs)

    @classmethod
    def made_by_stock(cls, stock_class: Any, *args: Any, **kwargs: Any) -> Any:
        """What serves a layer that is left to stock vLLM.

        Args:
            stock_class: the stock class.
            args: what this class's constructor was called with.
            kwargs: likewise.
        """
        theirs = stock_class.__new__(stock_class)
        stock_class.__init__(theirs, *args, **kwargs)
        return theirs

    @classmethod
    def beyond_stock(cls, *args: Any, **kwargs: Any) -> str:
        """Why the stock class cannot take this one's place with what the checkpoint holds; "" when it can.

        Args:
            args: what the constructor is called with.
            kwargs: likewise.
        """
        return ""

    def decide(self, moe: Any, scheme: Scheme) -> None:
        """Decides which backend runs the layer, and says so.

        Args:
            moe: vLLM's `FusedMoEConfig`.
            scheme: what the checkpoint holds.

        Raises:
            NoBackendError: no backend can, or the one asked for cannot.
            AgreementError: the ranks of the layer cannot agree on one.
            SettingError: a setting cannot be read.
        """
        if hasattr(self, "decision"):  # `__new__` has made it already, and Python comes once more
            return
        FusedMoEMethodBase.__init__(self, moe)
        self.copies = {}
        self.by_turns = None
        # Kept, so that `apply` calls nothing that is cached: on a CPU the compiler traces through it.
        self.release = current_adapter()
        layer, name = current_layer()
        self.settings = chosen = settings.load(additional_config=self.release.additional_config())
        declared = scheme.activations
        scheme, asked_by = self._asked(scheme)
        problem = self._refined(self.release.problem(moe, layer, name, scheme))
        self.group = agreement.Group(self.release.peers(), chosen.agreement_seconds)
        choice.choose(
            self,
            name,
            lambda: decide(
                problem, device.detect(), chosen, moe.moe_backend, evidence=choice.evidence(problem, chosen)
            ).after(declared, asked_by),
        )
        self.experts_cls = self.release.experts_class(self.backend)
        engagement.decided(self.decision, chosen)

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, *args: Any, **kwargs: Any
    ) -> tuple[int, int]:
        """Sizes of the tensors that vLLM hands to the layer: those of the checkpoint's tensors on this rank. What a
        kernel wants is padded when they are converted, by the backend's own plan.

        Raises:
            NoBackendError: an all-to-all wants larger ones, which no backend was asked about.
        """
        # Not the stock class's, which rounds for a backend of its own.
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

    @property
    def is_monolithic(self) -> bool:
        """Whether the kernel routes tokens itself."""
        return self.release.is_monolithic(self.backend)

    def create_weights(self, layer: Any, num_experts: int, *args: Any, **kwargs: Any) -> None:
        """Registers the checkpoint's parameters, with room for what the kernel will need in their place."""
        self._register(layer, num_experts, *args, **kwargs)
        self._enter(layer, "raw")
        self._make_room(layer)

    def _asked(self, scheme: Scheme) -> tuple[Scheme, str]:
        """What the checkpoint holds with the precision of activations that somebody asks for, and who does; "" when
        nobody asks for another one than it declares."""
        if self.settings.activations == "checkpoint" or scheme.activations == self.settings.activations:
            return scheme, ""
        asked = dataclasses.replace(scheme, activations=self.settings.activations)
        return asked, self.settings.source("activations")

    def _refined(self, problem: Problem) -> Problem:
        """The problem with what this kind of checkpoint knows better than vLLM's config of the layer."""
        return problem

    def _register(self, layer: Any, num_experts: int, *args: Any, **kwargs: Any) -> None:
        """Registers the checkpoint's parameters as the stock class does, and biases where it forgets them."""
        problem = self.decision.problem
        own_loader = kwargs.get("weight_loader")
        unloaded = getattr(self._scheme(), "UNLOADED", {})
        if own_loader is not None and unloaded:
            kwargs["weight_loader"] = loading.checked(own_loader, problem, self.group)
        super().create_weights(layer, num_experts, *args, **kwargs)
        if problem.has_bias:
            self._register_biases(layer, kwargs)
        names = self._names(self._scheme().shapes(problem))
        loading.remember({own: getattr(layer, name) for own, name in names.items()}, unloaded)

    def _make_room(self, layer: Any) -> None:
        """Makes slots as large as the kernel's tensors are, and fills them with what no checkpoint holds."""
        unloaded = getattr(self._scheme(), "UNLOADED", {})
        names = self._names(self._scheme().shapes(self.decision.problem))
        raw = {own: getattr(layer, name).data for own, name in names.items()}
        for own, kind in storage.kinds_after(self._convert, raw).items():
            if own in names:
                storage.make_room(getattr(layer, names[own]), kind)
        if self.release.weights_are_made_up():
            unloaded = getattr(self._scheme(), "MADE_UP", {})
        loading.fill({own: getattr(layer, name) for own, name in names.items()}, unloaded)

    def _register_biases(self, layer: Any, extra: Mapping[str, Any]) -> None:
        problem = self.decision.problem
        for name, rows in (("w13_bias", problem.w13_rows), ("w2_bias", problem.hidden_size)):
            if hasattr(layer, name):
                continue
            # Zeros: a rank other than the first may leave the second product's bias to the first.
            device_of = next(layer.parameters(recurse=False)).device
            data = torch.zeros(problem.local_experts, rows, dtype=layer.params_dtype, device=device_of)
            loader = {}
            if "weight_loader" in extra:
                loader["weight_loader"] = self.release.bias_loader(layer, extra["weight_loader"])
            storage.replace(layer, name, data, **loader)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Converts loaded weights for the backend, expert by expert, and builds the kernel. A second call changes
        nothing.

        Raises:
            CheckpointError: a tensor is missing, misshapen, of the wrong dtype, or damaged. Nothing has been converted.
        """
        if self._is_processed(layer):
            return
        self._enter(layer, "converting")
        problem = self.decision.problem
        with agreement.telling(self.group, f"the loaded weights of {problem.layer}"):
            if self.moe_kernel is not None:
                loading.refuse_untouched(dict(self.release.parameters(layer)), problem.layer)
            raw = self._read(layer)
        parallel = self.moe.moe_parallel_config
        if "w2_bias" in raw and parallel.tp_size > 1 and parallel.tp_rank > 0:
            # vLLM sums the ranks' outputs, and its loader gives every rank the whole bias of the second product.
            raw["w2_bias"].zero_()
        selfcheck.settle(self, raw, fixed=self.moe_kernel is not None)
        turns.copy_weights(self, raw)
        with agreement.telling(self.group, f"the conversion of {problem.layer}"):
            self._take_place(layer, raw)
        setattr(layer, _PROCESSED, True)
        self._enter(layer, "converted")
        engagement.converted(self.decision)

    def _take_place(self, layer: Any, raw: Mapping[str, Tensor]) -> None:
        """Puts the kernel's tensors into the places of the loaded ones, and builds the kernel where there is none."""
        problem = self.decision.problem
        self.experts_cls = self.release.experts_class(self.backend)
        names = self._names(raw)
        kernel_names = storage.rename(
            layer,
            storage.convert_in_place(layer, names, self._convert, dense=problem.eplb or self.backend.dense),
            _READ_BY_VLLM,
        )
        for name in kernel_names.values():
            parameter = getattr(layer, name)
            if not hasattr(parameter, "weight_loader"):
                storage.refuse_loading(parameter, problem.layer)
        if self.moe_kernel is None:
            # Built once: after a reload vLLM copies fresh values into the tensors that this kernel, and any captured
            # graph, already looks at.
            tensors = LayerTensors(layer, kernel_names)
            self.moe_quant_config = self.release.quant_config(problem, tensors)
            builder = VllmBuilder(self.release, self.moe, self.moe_quant_config)
            experts = self.backend.experts(tensors, problem, self.decision.plan, builder)
            storage.keep(layer, builder.kept)
            self.moe_kernel = self.release.kernel(self.moe, self.moe_quant_config, layer, experts)
            self.by_turns = turns.build(self, layer, tensors, self.moe_kernel)

    def _read(self, layer: Any) -> dict[str, Tensor]:
        """The layer's loaded parameters by canonical name, checked."""
        found: dict[str, Tensor] = self._scheme().read(dict(self.release.parameters(layer)), self.decision.problem)
        return found

    @staticmethod
    def _is_processed(layer: Any) -> bool:
        return bool(getattr(layer, _PROCESSED, False))

    @staticmethod
    def _enter(layer: Any, state: State) -> None:
        setattr(layer, STATE, state)

    def _scheme(self) -> Any:
        return schemes.module(self.decision.problem.scheme.name)

    def _names(self, canonical: Mapping[str, Any]) -> dict[str, str]:
        """Parameter name by canonical name."""
        found = self._scheme().parameters_of(self.decision.problem).items()
        return {own: name for own, name in found if own in canonical}

    def canonical(self, expert: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Canonical tensors of one expert from the checkpoint's."""
        found: dict[str, Tensor] = self._scheme().canonical_expert(expert, self.decision.problem)
        return found

    def _convert(self, expert: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """From the checkpoint's tensors of one expert to the kernel's."""
        return self.backend.convert(self.canonical(expert), self.decision.problem, self.decision.plan)

    def get_fused_moe_quant_config(self, layer: Any) -> Any:
        """The layer's quant config: never None, scales and biases in their slots."""
        if self.moe_quant_config is None:
            problem = self.decision.problem
            present = {own: name for own, name in self._scheme().parameters_of(problem).items() if hasattr(layer, name)}
            return self.release.quant_config(problem, LayerTensors(layer, present))
        return self.moe_quant_config

    @property
    def supports_eplb(self) -> bool:
        """Whether experts may move while serving: every tensor of every backend that says so has experts outermost."""
        return self.backend.limits.eplb

    def apply(self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Runs the experts on routed tokens; `x` is `[M, hidden]`."""
        kernel, weights = self._ready(layer), layer
        extra = dict(zip(("shared_experts", "shared_experts_input"), args, strict=False)) | kwargs
        if self.by_turns is not None:
            self.by_turns.reserve(x, topk_weights, topk_ids)
            kernel, weights = self.by_turns.at(x.shape[0])
        return self.release.apply(kernel, weights, x, topk_weights, topk_ids, extra)

    def apply_monolithic(self, layer: Any, x: Tensor, router_logits: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Routes tokens and runs the experts in one kernel; `x` is `[M, hidden]`, `router_logits` `[M, experts]`."""
        kernel = self._ready(layer)
        extra = dict(zip(("input_ids",), args, strict=False)) | kwargs
        return self.release.apply_monolithic(kernel, layer, x, router_logits, extra)

    def _ready(self, layer: Any) -> Any:
        state = getattr(layer, STATE, "raw")
        if state != "converted" or self.moe_kernel is None:
            rule = f"the layer was run before its weights were converted; they are {state}"
            remedy = "Call process_weights_after_loading first; where that failed, its error says why"
            raise LifecycleError(rule, remedy, self.decision.problem.layer)
        return self.moe_kernel


def _is_layer_config(value: Any) -> bool:
    return hasattr(getattr(value, "moe_config", value), "moe_parallel_config")


def _is_explicit() -> bool:
    """Whether the user named backends of ours: then what they cannot do is an error, not stock vLLM's."""
    chosen = settings.load(additional_config=current_adapter().additional_config())
    return chosen.backend != settings.AUTO or bool(chosen.overrides)
