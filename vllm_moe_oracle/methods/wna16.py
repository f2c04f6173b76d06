"""Integer experts (WNA16): the common part of the methods for GPTQ, AWQ, MoeWNA16 and compressed-tensors.

Parameters are registered and loaded here, not by the stock classes, which differ between releases: in the first
dimension, in the group index, in the borrow between packed zero points. A parameter that is read in another way than it
was loaded gives wrong numbers silently. Here a parameter has the dimensions of the checkpoint's tensor in every
release."""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
from vllm.transformers_utils.config import get_safetensors_params_metadata

from ..checkpoint.tensor_headers import has_nonzero_expert_biases, is_expert_bias
from ..compat import current_adapter, weight_storage
from ..compat.layer_context import set_current_layer
from ..core.problem import Problem, Scheme
from ..core.sharding import has_act_order, shard_by_scale_groups
from ..errors import CheckpointError, NoBackendError
from ..quantization import parse_config, takes_modules_from_files
from ..quantization.types import (
    GATED_PROJECTIONS,
    NUMBERED_PROJECTION_MODELS,
    UNGATED_PROJECTIONS,
    ExpertFormat,
    LayerNames,
)
from ..schemes import _wna16_checkpoint, _wna16_parameters
from . import absent_experts, load_summary, rank_sync, weight_loading
from .base import OracleMoEMethod
from .dtypes import EmulatedDtypesMixin

if TYPE_CHECKING:
    from ..schemes._wna16_checkpoint import Shard

logger = logging.getLogger("vllm.moe_oracle")

_WHERE = "quantization_config"
_GPT_OSS_SHARDS = {"gpt_oss_w13": "w13", "gpt_oss_w2": "w2"}
"""Shard names of gpt-oss's loader; the first one is a tensor with interleaved rows of gate and up."""


class Wna16MoEMethod(OracleMoEMethod):
    """The mix-in in front of a stock method class for integer experts.

    Attributes:
        file_packing: the checkpoint's packing; the layer's parameters have the packing of the problem's scheme.
        bias_in_file: the checkpoint has expert biases, whether or not the model's config declares them.
        parameter_packing: packing of the parameters; "" for the checkpoint's.
    """

    file_packing: str
    bias_in_file: bool = False
    parameter_packing: ClassVar[str] = ""
    _separates_rows: bool = False

    def decide(self, moe: Any, scheme: Scheme) -> None:
        """Decides which backend runs the layer; see `OracleMoEMethod.decide`."""
        self._loaded: set[tuple[str, int, str]] = set()
        self._up_groups: dict[int, Tensor] = {}
        before = moe.activation, moe.intermediate_size_per_partition
        try:
            super().decide(moe, scheme)
        except Exception:  # raised again
            # A stock class may take the layer; it keeps rows interleaved, and shards of equal size.
            moe.activation, moe.intermediate_size_per_partition = before
            raise

    def _refine_problem(self, problem: Problem) -> Problem:
        # gpt-oss's activation name means interleaved rows of gate and up; the loader here separates them where it can,
        # and the activation changes accordingly.
        self._separates_rows = problem.activation.interleaved and problem.scheme.rows_are_separable
        if self._separates_rows:
            self.moe.activation = self.adapter.uninterleaved_activation(self.moe)
            problem = dataclasses.replace(
                problem, activation=dataclasses.replace(problem.activation, interleaved=False)
            )
        problem = dataclasses.replace(problem, has_bias=problem.has_bias or self.bias_in_file)
        if self.settings.ragged_shards:
            problem = shard_by_scale_groups(problem)
            # Stock classes and vLLM's layer read the shard size there.
            self.moe.intermediate_size_per_partition = problem.intermediate_size
        return problem

    def _require_supported(self, problem: Problem) -> None:
        super()._require_supported(problem)
        if self._separates_rows and problem.lora:
            rule = "LoRA adapters for interleaved rows of gate and up do not fit separated rows"
            remedy = "Leave experts out of --lora-target-modules, or serve without --enable-lora"
            raise NoBackendError(rule, remedy, problem.layer)

    # --- parameters -------------------------------------------------------------------------------

    def _register_parameters(self, layer: Any, num_experts: int, *args: Any, **kwargs: Any) -> None:
        """Registers parameters for all tensors of the experts: those that are read, and empty ones for those that are
        only validated (zero points of symmetric weights, a trivial group index, undeclared biases)."""
        problem = self.decision.problem
        layer.activation = self.moe.activation
        packing = _wna16_parameters.packing_of(problem)
        layout = _wna16_checkpoint.checkpoint_layout(problem.scheme.packing)
        shapes = _wna16_parameters.parameter_shapes(problem, layout)
        named = _wna16_parameters.canonical_names(problem)
        for name, canonical in named.items():
            dtype = packing.word_dtype
            if canonical.endswith(("_scale", "_bias")):
                dtype = layer.params_dtype
            elif canonical.endswith("_order"):
                dtype = torch.int32
            data = torch.zeros(shapes[canonical], dtype=dtype)
            parameter = self._parameter(layer, data, name, canonical)
            if not canonical.endswith(("_order", "_bias")):
                # vLLM's word for K as the first dimension; `wna16.read` needs it.
                parameter.is_transposed = layout == "k_first"  # type: ignore[attr-defined]  # vLLM declares none
            if canonical.endswith("_bias"):  # the one thing that files may leave out
                weight_loading.set_sentinel({canonical: parameter}, {})
        for name in self._optional_parameters():
            if name not in named:
                self._parameter(layer, torch.zeros(0), name, "")

    def _optional_parameters(self) -> list[str]:
        """Names of parameters that a checkpoint of this kind may have beside codes and scales."""
        endings = _wna16_parameters.optional_endings(self.decision.problem.scheme.packing)
        return [f"{matrix}_{ending}" for matrix in _wna16_parameters.MATRICES for ending in endings]

    def _parameter(self, layer: Any, data: Tensor, name: str, canonical: str) -> nn.Parameter:
        return weight_storage.replace_parameter(layer, name, data, weight_loader=self._loader(layer, name, canonical))

    def _reserve_expert_buffers(self, layer: Any) -> None:
        super()._reserve_expert_buffers(layer)
        problem = self.decision.problem
        if not (self.adapter.uses_dummy_weights() and has_act_order(problem)):
            return
        for name, canonical in _wna16_parameters.canonical_names(problem).items():
            if canonical.endswith("_order"):
                groups = getattr(layer, name).data
                groups.copy_(torch.arange(groups.shape[1], device=groups.device) // problem.scheme.group_size)

    # --- loading ----------------------------------------------------------------------------------

    def _loader(self, layer: Any, name: str, canonical: str) -> Callable[..., Any]:
        """The loader of one parameter: a bound method of the layer with the attributes of the layer's loader. vLLM's
        reload unbinds loaders, and models look at a loader's attributes.

        vLLM keeps unbound loaders in a dictionary with weak keys, so that a loader which holds the layer would keep it,
        and its weights, until the process ends."""
        method = cast("Wna16MoEMethod", weakref.proxy(self))

        @functools.wraps(type(layer).weight_loader)
        def load(
            self: Any,
            param: nn.Parameter,
            loaded_weight: Tensor,
            weight_name: str = "",
            shard_id: str = "",
            expert_id: int = 0,
            return_success: bool = False,
        ) -> bool | None:
            is_local = True
            with rank_sync.notify_on_failure(
                method.rank_group, f"loading the weights of {method.decision.problem.layer}"
            ):
                if canonical:
                    is_local = method._load_shard(self, param, loaded_weight, name, canonical, shard_id, expert_id)
                else:
                    method._check_unread(loaded_weight, name, shard_id, expert_id)
            return is_local if return_success else None

        return MethodType(load, layer)

    def _load_shard(
        self, layer: Any, param: nn.Parameter, tensor: Tensor, name: str, canonical: str, shard: str, expert: int
    ) -> bool:
        """Copies this rank's shard of a checkpoint's tensor into the parameter.

        Args:
            layer: the layer.
            param: the parameter, `[local_experts, ...]`; on the meta device while vLLM's reload counts elements.
            tensor: one projection of one expert, over all ranks.
            name: the parameter's name.
            canonical: its canonical name.
            shard: vLLM's name of the projection.
            expert: global expert number.

        Returns:
            Whether the expert is one of this rank's.

        Raises:
            CheckpointError: the tensor has another dtype or shape than the packing stores, or its place was loaded with
                other values.
        """
        local = self.adapter.local_expert(layer, expert)
        if local == -1:
            return False
        problem = self.decision.problem
        weight_loading.fill_once(param)
        if self.file_packing != problem.scheme.packing and not param.is_meta:
            # Codes are repacked, which is fast on a GPU.
            tensor = tensor.to(param.device)
        suffix = canonical.removeprefix("w13").removeprefix("w2")
        where = f"{problem.layer}, {name}, expert {expert}, {shard}"
        if _GPT_OSS_SHARDS.get(shard) == "w13" and problem.activation.gated:
            # gpt-oss's loader splits packed weights into blocks.
            tensor = tensor.flatten(1) if tensor.ndim > 2 else tensor
            parts = _wna16_checkpoint.split_gate_up(tensor, suffix, problem, self.file_packing, where)
        else:
            parts = {cast("Shard", "w2" if shard in ("w2", "gpt_oss_w2") else shard): tensor}
        for each, whole in parts.items():
            _wna16_checkpoint.check_checkpoint_tensor(whole, suffix, each, problem, self.file_packing, where)
            self._loaded.add((name, local, each))
            again = weight_loading.loaded_before(param, (local, each))
            rank = self.moe.moe_parallel_config.tp_rank
            mine = _wna16_checkpoint.rank_shard(whole, suffix, each, problem, self.file_packing, rank)
            if each == "w3" and suffix == "_order":
                # Gate and up multiply the same inputs and share one order.
                if again:
                    weight_loading.require_equal(self._up_groups[local], mine, where)
                self._up_groups[local] = mine
                continue
            place = _wna16_checkpoint.destination(param.data[local], mine, suffix, each, problem)
            if again:
                weight_loading.require_equal(place, mine, where)
            if suffix == "_scale" and (words := _wna16_checkpoint.rounding_warning(mine, place.dtype)):
                load_summary.warn_once(words, problem.layer)
            place.copy_(mine)
        return True

    def _check_unread(self, tensor: Tensor, name: str, shard: str, expert: int) -> None:
        """Validates a tensor that is not read; see `_wna16_checkpoint.check_unread_tensor`."""
        where = f"{self.decision.problem.layer}, {name}, expert {expert}, {shard}"
        words = _wna16_checkpoint.check_unread_tensor(
            tensor, name.partition("_")[2], shard, self.decision.problem, self.file_packing, where
        )
        if words:
            load_summary.warn_once(words, where)

    # --- converting -------------------------------------------------------------------------------

    def _read_weights(self, layer: Any) -> dict[str, Tensor]:
        """The layer's parameters by canonical name, after a check that all of them were loaded.

        Raises:
            CheckpointError: the checkpoint lacks a tensor, or one contradicts another.
        """
        problem = self.decision.problem
        # Dummy weights are not loaded; a reload may bring real ones.
        if self._loaded or not self.adapter.uses_dummy_weights():
            self._check_all_loaded()
            self._check_group_indices(layer)
        self._loaded, self._up_groups = set(), {}
        if problem.eplb:
            # Every parameter moves with its expert. Without EPLB the empty ones stay: vLLM's reload converts a layer
            # once all its elements were loaded, and may load a tensor that has no elements after that.
            for name in self._optional_parameters():
                if name not in _wna16_parameters.canonical_names(problem) and hasattr(layer, name):
                    delattr(layer, name)
        for name, canonical in _wna16_parameters.canonical_names(problem).items():
            data = getattr(layer, name).data
            for place in _wna16_checkpoint.unused_slices(
                data, canonical, problem, self.moe.moe_parallel_config.tp_rank
            ):
                place.zero_()
        return _wna16_parameters.read(dict(layer.named_parameters(recurse=False)), problem)

    def _check_all_loaded(self) -> None:
        problem = self.decision.problem
        shards = {"w13": ("w1", "w3") if problem.activation.gated else ("w1",), "w2": ("w2",)}
        unloaded = [
            (name, expert, shard)
            for name, canonical in _wna16_parameters.canonical_names(problem).items()
            for expert in range(problem.local_experts)
            for shard in shards[canonical.partition("_")[0]]
            if (name, expert, shard) not in self._loaded
        ]
        # Not every expert has a bias that only the files declare.
        optional = [each for each in unloaded if each[0].endswith("_bias") and not self.moe.has_bias]
        if optional:
            name, expert, shard = optional[0]
            projection = _wna16_checkpoint.projection_name(cast("Shard", shard), problem)
            words = f"{name} of the {projection} projection of local expert {expert} is not in the checkpoint"
            logger.warning(
                "moe_oracle: %s: %s, others are (%d missing); it is zero", problem.layer, words, len(optional)
            )
        missing = [each for each in unloaded if each not in optional]
        if missing:
            name, expert, shard = missing[0]
            more = sum(1 for each in missing if each[0] == name)
            projection = _wna16_checkpoint.projection_name(cast("Shard", shard), problem)
            rule = f"{name} of the {projection} projection of local expert {expert} was never loaded"
            remedy = f"The checkpoint lacks it, or names it differently ({more} such in {name})"
            raise CheckpointError(rule, remedy, problem.layer)

    def _check_group_indices(self, layer: Any) -> None:
        """Checks that gate and up have the same group index."""
        problem = self.decision.problem
        names = {own: name for name, own in _wna16_parameters.canonical_names(problem).items()}
        for expert, groups in self._up_groups.items():
            gate = getattr(layer, names["w13_order"]).data[expert]
            where = f"{problem.layer}, {names['w13_order']}, local expert {expert}"
            _wna16_parameters.check_shared_order(gate, groups, where)


class ConfigWna16MoEMethod(Wna16MoEMethod):
    """The mix-in in front of stock method classes whose config object alone tells the scheme of the experts."""

    def __init__(self, quant_config: Any, moe: Any) -> None:
        # The stock constructor would choose a backend by its own rules, and raise where it finds none.
        self.quant_config = quant_config
        scheme = self.scheme_in(quant_config)
        self.file_packing = scheme.packing
        self.bias_in_file = getattr(quant_config, "expert_biases", False)
        self.decide(moe, dataclasses.replace(scheme, packing=self.parameter_packing or scheme.packing))

    @classmethod
    def scheme_in(cls, quant_config: Any) -> Scheme:
        """What the checkpoint holds: what was found for the layer, or else what the config says for all layers."""
        found: Scheme | None = getattr(quant_config, "expert_scheme", None)
        return found or cls.read_scheme(quant_config)

    @staticmethod
    @abstractmethod
    def read_scheme(quant_config: Any) -> Scheme:
        """What the fields of vLLM's config object say."""


class Wna16ConfigMixin(EmulatedDtypesMixin):
    """The mix-in in front of a stock config class for integer experts, which reads the config as `explain` does.

    Experts get this project's method; everything else is the stock class's.

    Attributes:
        moe_method_cls: the method of the experts.
        expert_biases: the checkpoint holds biases of experts.
        expert_scheme: what the checkpoint holds for the layer whose config this is; None for the config of a model.
        stated_fields: the checkpoint's config, where the object has lists of modules that are from its files.
    """

    moe_method_cls: ClassVar[type[Any]]
    expert_biases: bool = False
    expert_scheme: Scheme | None = None
    stated_fields: Mapping[str, Any] | None = None

    @abstractmethod
    def checkpoint_fields(self) -> dict[str, Any]:
        """The object as the fields of a checkpoint's config."""

    def maybe_update_config(self, model_name: str, *args: Any, **kwargs: Any) -> None:
        """Reads the names of the checkpoint's tensors, for biases of experts that the config does not mention. The
        stock class takes quantized modules from them, where the config lists none."""
        stated = self.checkpoint_fields()
        if takes_modules_from_files(stated, _WHERE, self.get_name()):  # type: ignore[attr-defined]  # of the stock class
            self.stated_fields = stated
        super().maybe_update_config(model_name, *args, **kwargs)  # type: ignore[misc]  # of the mixin's stock class
        self.expert_biases = has_expert_biases(model_name, kwargs.get("revision"))

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """The method of a layer; see the stock class."""
        if not isinstance(layer, RoutedExperts):
            method = super().get_quant_method(layer, prefix)  # type: ignore[misc]  # of the mixin's stock class
            self.refuse_linear_dtype(layer, method, prefix)
            return method
        found = self.scheme_of(prefix, layer)
        if not isinstance(found, Scheme):
            absent_experts.refuse(prefix)
            return UnquantizedFusedMoEMethod(layer.moe_config)
        with set_current_layer(layer, prefix):
            # The method gets what was read here; only a stock method reads the fields of a layer's config again.
            config = copy.copy(self.with_scheme(found))
            config.expert_scheme = found
            return self.moe_method_cls(config, layer.moe_config)

    def with_scheme(self, scheme: Scheme) -> Any:
        """The config of a layer with another scheme, where rules for single layers can give it one."""
        return self

    def scheme_of(self, prefix: str, layer: Any = None) -> ExpertFormat:
        """How the checkpoint stores a layer's experts; None for unquantized experts.

        Args:
            prefix: the layer's name.
            layer: the layer, if there is one.

        Raises:
            CheckpointError: entries of the config say different things of experts of the layer, or the files lack some.
        """
        names = expert_layer_names(prefix, layer)
        try:
            return parse_config(self.checkpoint_fields(), _WHERE)(names)
        except CheckpointError:
            absent_experts.refuse(prefix)
            if self.stated_fields is None:
                raise
        # No entry of the config says so: the files lack experts, and loading says which.
        return parse_config(self.stated_fields, _WHERE)(names)


def has_expert_biases(model_name: str, revision: str | None = None) -> bool:
    """Whether a checkpoint holds biases of routed experts, which some files do although the model's config has no
    biases.

    In a folder the tensors are read, and biases of zeros do not count: the loader accepts them. For a repository only
    the names count, even if it is partly downloaded, so that the decision does not depend on the download.

    Args:
        model_name: folder or repository.
        revision: revision of a repository.

    Raises:
        CheckpointError: a file in the folder is damaged.
    """
    names = get_safetensors_params_metadata(model_name, revision=revision)
    if not any(is_expert_bias(name) for name in names):
        return False
    folder = Path(model_name)
    return not folder.is_dir() or has_nonzero_expert_biases(folder)


def expert_layer_names(prefix: str, layer: Any = None) -> LayerNames:
    """The names under which a config may list the experts of a layer.

    Args:
        prefix: the layer's name.
        layer: the layer; None if there is none.
    """
    if layer is None:
        return LayerNames((prefix,), GATED_PROJECTIONS + UNGATED_PROJECTIONS)
    conventions = GATED_PROJECTIONS if layer.moe_config.is_act_and_mul else UNGATED_PROJECTIONS
    names = (getattr(layer, f"ckpt_{each}_proj_name", None) for each in ("gate", "up", "down"))
    own = tuple(name for name in names if name)
    # The first convention is vLLM's default, also for models whose loaders use another one.
    if own in ((), GATED_PROJECTIONS[0]):
        kind = current_adapter().model_type()
        own = conventions[kind in NUMBERED_PROJECTION_MODELS] if kind else ()
    return LayerNames((prefix,), conventions, own, num_experts=layer.moe_config.num_logical_experts)
