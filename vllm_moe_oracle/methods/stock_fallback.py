"""Which layers are left to stock vLLM, although a quantization of theirs is served here."""

from __future__ import annotations

import dataclasses
from typing import Any

from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

from .. import settings
from ..checkpoint.serving import carried_hidden_size
from ..compat import current_adapter
from ..compat.layer_context import current_layer
from ..core.problem import PADDED_EXPERTS, Problem
from ..devices import detect
from ..errors import NoBackendError, sanitize
from ..oracle.registry import default_registry
from ..oracle.stock_choice import is_loadable, names_backend, stock_candidates
from ..oracle.stock_refusals import load_refusal
from ..verification import process_state
from . import load_summary, weight_loading


class StockFallback(FusedMoEMethodBase):
    """The base of `base.OracleMoEMethod`: a construction that may make an instance of the stock class instead.

    Attributes:
        problem: the layer as its checkpoint declares it, as soon as it is known.
    """

    problem: Problem | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """An instance, or one of the stock class where stock vLLM has to serve the layer.

        A layer that no backend can run is left to the stock class, if that one has a kernel for it: on a GPU whatever
        the reason, on a CPU where the layer needs what few backends support (`problem.features_for_stock`). A backend
        that the user names is never replaced. A layer without vLLM's `FusedMoEConfig` is the stock class's, too.

        Raises:
            NoBackendError: no backend can run the layer, and neither can the stock class.
        """
        arguments = [*args, *kwargs.values()]
        if not arguments:  # a copy is made like this
            return super().__new__(cls)
        moe = next((getattr(each, "moe_config", each) for each in arguments if _is_layer_config(each)), None)
        if moe is None:  # some other object stands for it, which stock code may know how to read
            unknown = NoBackendError("no argument is a FusedMoEConfig, or a layer that has one", "", current_layer()[1])
            if _has_explicit_choice(settings.AUTO):
                raise unknown
            return cls._leave_to_stock(unknown, None, [], *args, **kwargs)
        method = super().__new__(cls)
        features = current_adapter().unsupported_features(moe)
        if _has_explicit_choice(settings.AUTO if features else moe.moe_backend):
            return method
        try:
            method.__init__(*args, **kwargs)
            return method
        except NoBackendError as error:
            if not features and detect.detect().kind == "cpu":
                raise
            problem = method.problem and _as_exchanged(method.problem, moe.moe_parallel_config.all2all_backend)
            return cls._leave_to_stock(error, problem, features, *args, **kwargs)

    @classmethod
    def _leave_to_stock(
        cls, error: NoBackendError, problem: Problem | None, features: list[str], *args: Any, **kwargs: Any
    ) -> Any:
        """The stock class's method of a layer that no backend can run.

        Args:
            error: why not.
            problem: the layer as its checkpoint declares it, with the hidden size that vLLM gives it; None where it is
                not known.
            features: what only some backends support and the layer needs.
            args: arguments of the constructor.
            kwargs: likewise.

        Raises:
            NoBackendError: the stock class cannot run the layer either, or by its own emulation only, or it cannot be
                filled, which the class finds out later or never.
        """
        stock = next(base for base in cls.__mro__ if not issubclass(base, StockFallback))
        name = error.where or current_layer()[1]
        candidates = error.candidates
        if problem is not None:  # an error that no candidate raises has none
            candidates = stock_candidates(problem, detect.detect(), default_registry())
        limitation = "" if is_loadable(candidates) else "gets its weights and adapters from the same code"
        try:
            method = None if limitation else cls.build_stock_method(stock, *args, **kwargs)
        except Exception as refusal:  # stock's own choice of a kernel is its constructor; it raises many types
            method, limitation = None, f"raises {type(refusal).__name__}: {sanitize(str(refusal))}"
        if method is not None and current_adapter().is_emulated_by_stock(method):
            method, limitation = None, "can only emulate it"
        if method is not None and problem is not None:
            chosen = getattr(getattr(method, "experts_cls", None), "__name__", "")
            # Which experts move, the method itself says.
            asked = dataclasses.replace(problem, eplb=False)
            ending = load_refusal(asked, detect.detect(), default_registry(), chosen)
            if problem.eplb and not getattr(method, "supports_eplb", False):
                ending = "it does not support EPLB"
            if ending:
                method, limitation = None, f"cannot run it: {ending}"
        if method is None:
            needs = f"{' and '.join(features)}: " if features else ""
            rule = f"{needs}{error.rule}; stock vLLM's {stock.__name__} {limitation}"
            remedy = error.remedy or (f"Serve without {' and '.join(features)}" if features else "")
            raise NoBackendError(rule, remedy, name, error.candidates, error.table) from error
        if PADDED_EXPERTS in features:
            weight_loading.zero_before_loading(method)
        load_summary.record_stock_layer(name, features, type(method).__name__, error)
        return method

    @classmethod
    def build_stock_method(cls, stock_class: Any, *args: Any, **kwargs: Any) -> Any:
        """The method of a layer that is left to stock vLLM.

        Args:
            stock_class: the stock class.
            args: arguments of this class's constructor.
            kwargs: likewise.
        """
        method = stock_class.__new__(stock_class)
        stock_class.__init__(method, *args, **kwargs)
        return method


def _as_exchanged(problem: Problem, all2all: str) -> Problem:
    """The layer with the hidden size to which vLLM rounds it up for an all-to-all, before it makes weights."""
    return dataclasses.replace(problem, hidden_size=max(problem.hidden_size, carried_hidden_size(problem, all2all)))


def _is_layer_config(value: Any) -> bool:
    return hasattr(getattr(value, "moe_config", value), "moe_parallel_config")


def _has_explicit_choice(moe_backend: str) -> bool:
    """Whether the user chose backends of ours: see `names_backend`."""
    chosen = settings.load(additional_config=current_adapter().additional_config())
    with process_state.kept():  # the first question imports third parties' backends
        return names_backend(chosen, default_registry(), moe_backend)
