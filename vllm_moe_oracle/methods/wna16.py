"""Integer experts with 16-bit activations, whatever tool wrote them: what the methods for GPTQ, AWQ, MoeWNA16 and
compressed-tensors share.

Parameters are registered and loaded here, not by the stock classes: those change from release to release (which
dimension comes first, whether a group index is known, whether a carry between packed zero points survives), and a
parameter that is read otherwise than it was loaded gives wrong numbers without a word. Here, in every release, a
parameter has its dimensions in the order of the checkpoint's tensor.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod
from vllm.transformers_utils.config import get_safetensors_params_metadata

from ..checkpoint.biases import holds_expert_biases, is_expert_bias
from ..compat import current_adapter
from ..errors import CheckpointError, NoBackendError
from ..oracle.planner import has_order, in_whole_groups
from ..oracle.problem import Problem, Scheme
from ..quantization.answers import GATED_PROJECTIONS, NUMBERED, PLAIN_PROJECTIONS, LayerNames
from ..schemes import _wna16_files as files
from ..schemes import _wna16_parameters as layouts
from ..schemes._packings import PACKINGS, every_code
from . import agreement, storage
from .base import OracleMoEMethod

if TYPE_CHECKING:
    from ..schemes._wna16_files import Shard

logger = logging.getLogger("vllm.moe_oracle")

_GPT_OSS = {"gpt_oss_w13": "w13", "gpt_oss_w2": "w2"}
"""gpt-oss's loader hands over gate and up as one tensor whose rows alternate, under the first of these names."""

_said: set[str] = set()
"""Packings of which the warning about zero points of symmetric weights was given: once, not for every tensor."""

_REMEDY = "Check the model's files, or serve another export of it"


class Wna16MoEMethod(OracleMoEMethod):
    """Mixed in before a stock method class for integer experts.

    Attributes:
        file_packing: how the checkpoint packs; the layer's parameters have the packing of the problem's scheme.
        bias_in_file: the checkpoint has expert biases, whether or not the model's config declares them.
    """

    file_packing: str
    bias_in_file: bool = False

    def decide(self, moe: Any, scheme: Scheme) -> None:
        """Decides which backend runs the layer; see `OracleMoEMethod.decide`."""
        self._arrived: set[tuple[str, int, str]] = set()
        self._up_groups: dict[int, Tensor] = {}
        told = moe.activation
        try:
            super().decide(moe, scheme)
        except Exception:
            moe.activation = told  # a stock class may take the layer, and leaves rows as they come
            raise

    def _refined(self, problem: Problem) -> Problem:
        # gpt-oss's name for its activation says that rows alternate; the loader here puts them apart, and tells
        # vLLM's kernels so.
        if problem.activation.interleaved and problem.lora:
            rule = "adapters of experts whose gate and up rows alternate do not fit rows that are put apart"
            raise NoBackendError(rule, "Serve without --enable-lora", problem.layer)
        self.moe.activation = self.release.activation_in_halves(self.moe)
        activation = dataclasses.replace(problem.activation, interleaved=False)
        problem = dataclasses.replace(problem, activation=activation, has_bias=problem.has_bias or self.bias_in_file)
        if self.settings.ragged_shards:
            problem = in_whole_groups(problem)
            # Stock classes and vLLM's layer read the share there.
            self.moe.intermediate_size_per_partition = problem.intermediate_size
        return problem

    # --- parameters -------------------------------------------------------------------------------

    def _register(self, layer: Any, num_experts: int, *args: Any, **kwargs: Any) -> None:
        """Registers what the checkpoint has for the experts: what is read, and under their names what is only looked at
        (zero points of symmetric weights, a group index in order, biases of a model without)."""
        problem = self.decision.problem
        layer.activation = self.moe.activation
        packing = layouts.packing_of(problem)
        layout = files.layout_in_file(problem.scheme.packing)
        shapes = layouts.expected_shapes(problem, layout)
        named = layouts.parameters(problem)
        for name, canonical in named.items():
            dtype = packing.word
            if canonical.endswith(("_scale", "_bias")):
                dtype = layer.params_dtype
            elif canonical.endswith("_order"):
                dtype = torch.int32
            data = torch.zeros(shapes[canonical], dtype=dtype)
            parameter = self._parameter(layer, data, name, canonical)
            if not canonical.endswith(("_order", "_bias")):
                # What vLLM's classes call K first; `wna16.read` asks for it.
                parameter.is_transposed = layout == "k_first"  # type: ignore[attr-defined]
        for name in self._ignored():
            if name not in named:
                self._parameter(layer, torch.zeros(0), name, "")

    def _ignored(self) -> list[str]:
        """Names of parameters that a checkpoint of this kind may have, read or not."""
        packing = layouts.packing_of(self.decision.problem)
        suffixes = ["bias", packing.group_index, packing.zero_point]
        suffixes += ["weight_shape"] if packing.weight.startswith("weight") else []
        return [f"{matrix}_{suffix}" for matrix in layouts.MATRICES for suffix in suffixes]

    def _parameter(self, layer: Any, data: Tensor, name: str, canonical: str) -> nn.Parameter:
        return storage.replace(layer, name, data, weight_loader=self._loader(layer, name, canonical))

    def _make_room(self, layer: Any) -> None:
        super()._make_room(layer)
        problem = self.decision.problem
        if not (self.release.weights_are_made_up() and has_order(problem)):
            return
        for name, canonical in layouts.parameters(problem).items():
            if canonical.endswith("_order"):
                groups = getattr(layer, name).data
                groups.copy_(torch.arange(groups.shape[1], device=groups.device) // problem.scheme.group_size)

    # --- loading ----------------------------------------------------------------------------------

    def _loader(self, layer: Any, name: str, canonical: str) -> Callable[..., Any]:
        """What loads one parameter. A bound method of the layer with the marks of its own loader: vLLM's reload unbinds
        loaders from their layers, and models ask loaders what they can do."""
        method = self

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
            done = True
            with agreement.telling(method.group, f"loading the weights of {method.decision.problem.layer}"):
                if canonical:
                    done = method._load(self, param, loaded_weight, name, canonical, shard_id, expert_id)
                else:
                    method._look_at(loaded_weight, name, shard_id, expert_id)
            return done if return_success else None

        return MethodType(load, layer)

    def _load(
        self, layer: Any, param: nn.Parameter, tensor: Tensor, name: str, canonical: str, shard: str, expert: int
    ) -> bool:
        """Copies this rank's part of a checkpoint's tensor into its place.

        Args:
            layer: the layer.
            param: the parameter, `[local_experts, ...]`; without data while vLLM's reload counts.
            tensor: of one projection of one expert, over all ranks.
            name: the parameter's name.
            canonical: its canonical name.
            shard: vLLM's word for the projection.
            expert: number over all ranks.

        Returns:
            Whether the expert is one of this rank's.

        Raises:
            CheckpointError: the tensor is not what the packing stores.
        """
        local = layer._map_global_expert_id_to_local_expert_id(expert)
        if local == -1:
            return False
        problem = self.decision.problem
        if self.file_packing != problem.scheme.packing and not param.is_meta:
            # Codes are packed anew, which a GPU does in no time.
            tensor = tensor.to(param.device)
        suffix = canonical.removeprefix("w13").removeprefix("w2")
        where = f"{problem.layer}, {name}, expert {expert}, {shard}"
        if _GPT_OSS.get(shard) == "w13" and problem.activation.gated:
            # vLLM splits packed weights into blocks there.
            tensor = tensor.flatten(1) if tensor.ndim > 2 else tensor
            parts = files.halves(tensor, suffix, problem, self.file_packing, where)
        else:
            parts = {cast("Shard", "w2" if shard in ("w2", "gpt_oss_w2") else shard): tensor}
        for each, whole in parts.items():
            files.check(whole, suffix, each, problem, self.file_packing, where)
            self._arrived.add((name, local, each))
            rank = self.moe.moe_parallel_config.tp_rank
            mine = files.part(whole, suffix, each, problem, self.file_packing, rank)
            if each == "w3" and suffix == "_order":
                # Both halves of the first product multiply the same inputs; there is one order for them.
                self._up_groups[local] = mine
                continue
            files.target(param.data[local], mine, suffix, each, problem).copy_(mine)
        return True

    def _look_at(self, tensor: Tensor, name: str, shard: str, expert: int) -> None:
        """What is not read must not mean anything. Zero points of symmetric weights are never applied, as in vLLM; of
        those that no symmetric weights have a warning tells, for a config that says the wrong thing.

        Raises:
            CheckpointError: it does.
        """
        problem = self.decision.problem
        where = f"{problem.layer}, {name}, expert {expert}, {shard}"
        if name.endswith("_bias") and tensor.any():
            rule = "the checkpoint has expert biases, which the model's config does not declare"
            raise CheckpointError(rule, _REMEDY, where)
        if name.endswith("zero_point" if "weight" in name else "_qzeros"):
            self._look_at_zeros(tensor, where)
        if name.endswith("_weight_shape") and shard in files.PROJECTIONS:
            shape = tuple(int(size) for size in tensor.flatten())
            expected = files.sizes_in_file(cast("Shard", shard), problem)
            if shape != expected:
                raise CheckpointError(f"the weight's shape is given as {shape}, expected {expected}", _REMEDY, where)
        if name.endswith("_g_idx") and problem.scheme.group_size != -1:
            in_order = torch.arange(tensor.numel(), device=tensor.device) // problem.scheme.group_size
            if tensor.numel() and not (torch.equal(tensor.to(in_order.dtype), in_order) or bool((tensor == 0).all())):
                rule = "its input features are in the order of a group index, and its config declares no act order"
                raise CheckpointError(rule, "desc_act (GPTQ) or actorder (compressed-tensors) would say so", where)

    def _look_at_zeros(self, tensor: Tensor, where: str) -> None:
        bits, packing = self.decision.problem.scheme.bits, PACKINGS[self.file_packing]
        if tensor.dtype != packing.word or not tensor.numel() or self.file_packing in _said:
            return
        middle = 1 << bits - 1
        # Of both storages, and what a tool leaves that never fills them.
        usual = [0] if packing.signed else [0, middle, middle - 1]
        words = [every_code(code, bits, packing) for code in usual]
        if not any(bool((tensor == word).all()) for word in words):
            _said.add(self.file_packing)
            rule = "zero points of weights that are symmetric by the config are not those of symmetric weights"
            remedy = (
                "if they were quantised with these, correct sym (GPTQ), zero_point (AWQ) or symmetric in the config"
            )
            logger.warning("moe_oracle: %s: %s; they are not applied: %s", where, rule, remedy)

    # --- converting -------------------------------------------------------------------------------

    def _read(self, layer: Any) -> dict[str, Tensor]:
        """The layer's parameters, all of them loaded.

        Raises:
            CheckpointError: the checkpoint lacks a tensor, or one contradicts another.
        """
        problem = self.decision.problem
        # Of weights that vLLM makes up nothing comes; a reload may bring real ones.
        if self._arrived or not self.release.weights_are_made_up():
            self._check_arrived()
            self._check_groups(layer)
        self._arrived, self._up_groups = set(), {}
        if problem.eplb:
            # What moves with an expert must be the expert's. Otherwise these stay: vLLM's reload converts a layer when
            # as many elements came as it has, and may hand over a tensor that has no place among them afterwards.
            for name in self._ignored():
                if name not in layouts.parameters(problem) and hasattr(layer, name):
                    delattr(layer, name)
        for name, canonical in layouts.parameters(problem).items():
            data = getattr(layer, name).data
            for place in files.beyond_share(data, canonical, problem, self.moe.moe_parallel_config.tp_rank):
                place.zero_()
        return super()._read(layer)

    def _check_arrived(self) -> None:
        problem = self.decision.problem
        shards = {"w13": ("w1", "w3") if problem.activation.gated else ("w1",), "w2": ("w2",)}
        missing = [
            (name, expert, shard)
            for name, canonical in layouts.parameters(problem).items()
            # Of a bias that only the files know of, nobody says that all experts have it.
            if not (canonical.endswith("_bias") and not self.moe.has_bias)
            for expert in range(problem.local_experts)
            for shard in shards[canonical.partition("_")[0]]
            if (name, expert, shard) not in self._arrived
        ]
        if missing:
            name, expert, shard = missing[0]
            more = sum(1 for each in missing if each[0] == name)
            projection = files.projection(cast("Shard", shard), problem)
            rule = f"{name} of the {projection} projection of local expert {expert} was never loaded"
            remedy = f"The checkpoint lacks it, or names it differently ({more} such in {name})"
            raise CheckpointError(rule, remedy, problem.layer)

    def _check_groups(self, layer: Any) -> None:
        """Gate and up must group the input features alike."""
        problem = self.decision.problem
        names = {own: name for name, own in layouts.parameters(problem).items()}
        for expert, groups in self._up_groups.items():
            gate = getattr(layer, names["w13_order"]).data[expert]
            if not torch.equal(gate.cpu(), groups.to(gate.dtype).cpu()):
                rule = f"{names['w13_order']}: gate and up of local expert {expert} have their input features in "
                raise CheckpointError(f"{rule}different groups; one product reads both", _REMEDY, problem.layer)


def unquantised(moe: Any) -> Any:
    """vLLM's own method for experts that are left in the model's dtype.

    Args:
        moe: vLLM's `FusedMoEConfig`.
    """
    return UnquantizedFusedMoEMethod(moe)


def has_expert_biases(model_name: str, revision: str | None = None) -> bool:
    """Whether a checkpoint holds biases of routed experts: some files do of models whose config knows nothing of them.

    In a folder the tensors are looked at, and zeros are none: the loader refuses what is not zero then. Of a repository
    only names are known before it is loaded, however much of it this machine has by now, so that the same repository is
    always decided alike.

    Args:
        model_name: folder or repository.
        revision: of a repository.

    Raises:
        CheckpointError: a file in the folder is damaged.
    """
    names = get_safetensors_params_metadata(model_name, revision=revision)
    if not any(is_expert_bias(name) for name in names):
        return False
    folder = Path(model_name)
    return not folder.is_dir() or holds_expert_biases(folder)


def experts_called(prefix: str, layer: Any = None) -> LayerNames:
    """The names that a config may call the experts of a layer by.

    Args:
        prefix: the layer's name.
        layer: the layer; None for nothing known.
    """
    if layer is None:
        return LayerNames((prefix,), GATED_PROJECTIONS + PLAIN_PROJECTIONS)
    conventions = GATED_PROJECTIONS if layer.moe_config.is_act_and_mul else PLAIN_PROJECTIONS
    names = (getattr(layer, f"ckpt_{each}_proj_name", None) for each in ("gate", "up", "down"))
    own = tuple(name for name in names if name)
    # The first convention is vLLM's default, which it says also of models whose own loaders know better.
    if own in ((), GATED_PROJECTIONS[0]):
        kind = current_adapter().model_type()
        own = conventions[kind in NUMBERED] if kind else ()
    return LayerNames((prefix,), conventions, own)
