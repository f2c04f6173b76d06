"""What `verify` does: every decided backend of a checkpoint's MoE layers against the float32 reference, layer by layer.

The checkpoint's own weights are read from its files, the inputs are those of `verification.token_stream`, and one layer
is compared as `verification.whole_layer` says. Nothing is served, and no vLLM loader runs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from .. import __version__
from ..checkpoint.dtypes import dtype_refusal
from ..checkpoint.files import CheckpointFiles
from ..checkpoint.layer_names import expert_layers, mtp_layers
from ..checkpoint.moe_layers import MoeLayers, find_moe_layers
from ..checkpoint.serving import with_activations
from ..core.decision import Decision
from ..core.problem import Device, Problem
from ..errors import BackendDefect, CheckpointError, DamagedCheckpointError, MeasurementError, NoBackendError
from ..measurements import lookup
from ..oracle.registry import Registry, default_registry
from ..oracle.selection import decide, is_final, remaining_candidates
from ..oracle.stock_choice import asks_stock, choose_stock, left_to_stock
from ..oracle.watchdog import doing
from ..releases.gemma_norms import has_gemma_norms
from ..settings import AUTO, Settings, env_var
from ..untrusted import boundary, complete_lines, parse_json
from ..verification.layer_result import LayerResult, Status
from ..whole_files import writing

if TYPE_CHECKING:
    from ..compat.adapter import Adapter
    from ..verification.checkpoint_tensors import StoredExperts, TensorFiles
    from ..verification.token_stream import LayerInputs, TokenStream
    from ..verification.whole_layer import LayerCheck

OnCheck = Callable[[str, str, int], None]
"""Receives a layer and its backend that are about to be compared, which may end this process, and the number of layers
done."""


_MAX_RESUME_BYTES = 64 << 20
_RESUME_KIND = "vllm-moe-oracle verify"
_MAX_TOKENS = 2048


@dataclass(frozen=True)
class LayerPlan:
    """What is to be compared of one layer.

    Attributes:
        problem: the layer as one rank sees it that holds all experts.
        decision: the decision; None where no backend can run the layer.
        failure: why there is none.
        is_stock: stock vLLM serves the layer.
        tensors: where its experts are; None where nothing is compared.
    """

    problem: Problem
    decision: Decision | None
    failure: str = ""
    is_stock: bool = False
    tensors: StoredExperts | None = None

    @property
    def backends(self) -> tuple[str, ...]:
        """The decided backends: one, or those of the ranges of tokens."""
        if self.decision is None:
            return ()
        return tuple(dict.fromkeys(each.backend for each in self.decision.token_ranges)) or (self.decision.backend,)

    @property
    def compared(self) -> str:
        """What the calls depend on besides the backends: the ranges of tokens, and each candidate's shard plan with the
        tiles that were measured. Times are no part of it."""
        if self.decision is None:
            return self.failure
        plans = {each.backend: each.answers.plan for each in self.decision.candidates if each.accepted}
        ends = [(each.backend, each.max_tokens) for each in self.decision.token_ranges]
        return repr((ends, plans))


class Verification:
    """A checkpoint that is ready to be verified; closes its files as a context manager.

    Attributes:
        plans: the layers with quantized experts, in order.
        layers: all MoE layers of the checkpoint.
        gemma_norms: see `token_stream.TokenStream`.
        identity: a digest of the checkpoint and the state of its files, the machine, the versions, third parties'
            included, and the layers as they are decided.
    """

    def __init__(
        self,
        config: CheckpointFiles,
        device: Device,
        settings: Settings,
        registry: Registry | None = None,
        dtype: str = AUTO,
    ) -> None:
        """Reads the config and the headers of all tensors, and decides every layer. No weight is read.

        Args:
            config: the checkpoint's; its tensors are in the same folder.
            device: this machine.
            settings: the user's.
            registry: the backends; None for the default registry.
            dtype: the model's, from `read_dtype_option`; "auto" for the one that vLLM takes by itself.

        Raises:
            DamagedCheckpointError: a tensor is missing, misshapen or of the wrong dtype, or a file is damaged.
            CheckpointError: the checkpoint has no quantized experts, or its files cannot be read.
            MeasurementError: vLLM is not installed, or stock vLLM serves every layer.
            NoBackendError: no backend can run a layer that the settings name one for.
        """
        try:
            from ..verification.checkpoint_tensors import TensorFiles, find_layer
        except ImportError as error:
            raise MeasurementError(f"vLLM cannot be imported: {error}", "Install it beside this package") from error
        self.device, self.settings = device, settings
        self.registry = registry or default_registry()
        release = device.packages.get("vllm")
        self.layers: MoeLayers = find_moe_layers(config, vllm=release, dtype=dtype, capability=device.capability)
        self.gemma_norms = has_gemma_norms(_architectures(config))
        names = {each.name: each.names for each in (*expert_layers(config, release), *mtp_layers(config, release))}
        drafts = [each for each in self.layers.mtp_problems if each.layer not in self.layers.absent_drafts]
        found = [self._plan(problem) for problem in (*self.layers.problems, *drafts)]
        if all(each.is_stock for each in found):
            reasons = [each.failure for each in found[:1]]
            reasons += [
                f"its experts are in {kind}" for kind in dict.fromkeys(self.layers.unsupported_formats.values())
            ]
            total = len(found) + len(self.layers.unquantized) + len(self.layers.unsupported_formats)
            rule = f"there is nothing to verify: stock vLLM serves all {total} MoE layers"
            raise MeasurementError(f"{rule} ({'; '.join(reasons) or 'not quantized'})", "", config.where)
        self.files: TensorFiles = TensorFiles(config.path.parent)
        try:
            self.plans = [
                dataclasses.replace(each, tensors=find_layer(self.files, each.problem, names[each.problem.layer]))
                if each.decision is not None
                else each
                for each in found
            ]
            for each in self.plans:
                if each.tensors is not None:
                    _check_headers(each.tensors)
        except BaseException:
            self.files.close()
            raise
        self.identity = self._identity(config)

    def __enter__(self) -> Verification:
        return self

    def __exit__(self, *_: object) -> None:
        self.files.close()

    def _plan(self, declared: Problem) -> LayerPlan:
        """What is to be compared of a layer, given with the activations that its checkpoint declares."""
        problem = with_activations(declared, self.settings)
        device, settings, method = self.device, self.settings, self.layers.method
        refusal = dtype_refusal(problem, method, device)
        if refusal is None:
            measurements = lookup.find_measurements(problem, device, settings)
            try:
                return LayerPlan(problem, decide(problem, device, settings, AUTO, self.registry, measurements))
            except NoBackendError as error:
                refusal = error
            if asks_stock(problem, device, settings, self.registry):
                stock = choose_stock(declared, device, self.registry, method=method)
                if left := left_to_stock(problem, stock):
                    return LayerPlan(problem, None, left, is_stock=True)
        words = f"{refusal.rule}. {refusal.remedy}" if refusal.remedy else refusal.rule
        return LayerPlan(problem, None, words)

    def _identity(self, config: CheckpointFiles) -> str:
        parts: list[Any] = [
            __version__,
            config.full_config,
            None if config.quantization is None else config.quantization.fields,
            self.files.identity,
            msgspec.to_builtins(self.device),
            {each.name: (self.registry.origin(each.name), self.registry.packages(each.name)) for each in self.registry},
            [(each.problem.layer, repr(each.problem), each.backends, each.compared) for each in self.plans],
        ]
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()

    def run(self, resume: ResumeFile | None, on_check: OnCheck) -> Iterator[LayerResult]:
        """Compares layer by layer; yields each result as it is known, resumed ones too.

        Args:
            resume: results of an earlier run, and where new ones are kept; None to keep none.
            on_check: called before each comparison.

        Raises:
            DamagedCheckpointError: the files changed while they were read, or the model's embedding is damaged.
            HostMemoryError: the memory is not sufficient for a layer.
            MeasurementError: a result cannot be kept.
        """
        from ..compat import standalone_layer
        from ..verification import token_stream

        known = resume.results if resume is not None else {}
        streams: dict[int, TokenStream] = {}
        with standalone_layer.single_rank_worker(self.device.kind, _MAX_TOKENS):
            for done, plan in enumerate(self.plans):
                layer, size = plan.problem.layer, plan.problem.hidden_size
                found = [known[layer, name] for name in plan.backends if (layer, name) in known]
                if found and len(found) == len(plan.backends):
                    yield from found
                    continue
                if plan.tensors is None:
                    status: Status = "stock" if plan.is_stock else "no_backend"
                    yield LayerResult(layer, "", status, fault=plan.failure, experts=plan.problem.num_experts)
                    continue
                if size not in streams:
                    streams[size] = token_stream.TokenStream(self.files, size, self.gemma_norms)
                for result in self._layer(plan, plan.tensors, streams[size], on_check, done):
                    if resume is not None:
                        resume.keep(result)
                    yield result

    def _layer(
        self, plan: LayerPlan, tensors: StoredExperts, stream: TokenStream, on_check: OnCheck, done: int
    ) -> Iterator[LayerResult]:
        """The results of a layer's backends; arguments are those of `run`."""
        from ..compat import current_adapter
        from ..verification.whole_layer import LayerCheck

        adapter, problem = current_adapter(), plan.problem
        kind = "cuda" if self.device.kind == "cuda" else "cpu"
        inputs: LayerInputs | None = None
        warnings: list[str] | None = None
        for name in plan.backends:
            on_check(problem.layer, name, done)
            start = time.perf_counter()
            try:
                warnings = tensors.check_unread() if warnings is None else warnings
                inputs = inputs or stream.inputs(tensors)
                tokens = inputs.x, inputs.weights, inputs.ids
                check = LayerCheck(problem, tensors.expert, tokens, adapter, kind, tensors.raw_expert)
                result, outputs = self._compare(plan, name, check, adapter)
            except CheckpointError as error:
                # The result names the layer.
                where = error.where.removeprefix(problem.layer).removeprefix(", ")
                words = f"{CheckpointError(error.rule, error.remedy, where)}"
                result, outputs = LayerResult(problem.layer, name, "damaged", fault=words), None
            if outputs is not None and name == plan.backends[-1]:
                stream.advance(outputs)
            yield msgspec.structs.replace(
                result,
                seconds=round(time.perf_counter() - start, 3),
                warnings=tuple(warnings or ()),
                inputs=inputs.source if inputs else "",
                experts=problem.num_experts,
            )

    def _compare(self, plan: LayerPlan, name: str, check: LayerCheck, adapter: Adapter) -> tuple[LayerResult, Any]:
        """The result of a backend, and the reference's outputs; of the next candidate where a server takes that one,
        because vLLM's own class or the weights speak against the first."""
        from ..backends import MAX_CHECK_TOKENS
        from ..compat import standalone_layer
        from ..verification import process_state
        from ..verification.whole_layer import WeightsRefused

        decision, problem = plan.decision, plan.problem
        notes: list[str] = []
        assert decision is not None
        # With the tiles that were measured, for a backend of some numbers of tokens, too.
        plans = {each.backend: each.answers.plan for each in decision.candidates if each.accepted}
        others = remaining_candidates(decision, name)
        edges = tuple(each.max_tokens for each in decision.token_ranges if each.max_tokens is not None)
        for candidate in [name] if is_final(decision, self.settings) else [name, *others]:
            backend = self.registry[candidate]
            moe = standalone_layer.fused_moe_config(problem, check.kind, MAX_CHECK_TOKENS)
            with process_state.kept():  # the class may be a third party's
                refusal = adapter.stock_class_rejection(backend, moe, problem)
            if not refusal:
                own = plans[candidate] if candidate in plans else backend.plan(problem, self.device)
                remedy = f"{env_var('disable')}={candidate} leaves it out"
                try:
                    with doing(f"the check of {candidate} in {problem.layer}", remedy):
                        result = check.run(backend, own, edges)
                except WeightsRefused as error:
                    refusal = str(error)
                except BackendDefect as error:  # of a method that had answered when the layer was decided
                    fault = "; ".join([str(error), *notes])
                    return LayerResult(problem.layer, name, "failed", fault=fault), None
                else:
                    fault = "; ".join(filter(None, (result.fault, *notes)))
                    return msgspec.structs.replace(result, backend=name, fault=fault), check.outputs
            notes.append(f"{candidate} refuses the layer ({refusal})")
        fault = "; ".join([*notes, "no other candidate is left"])
        return LayerResult(problem.layer, name, "failed", fault=fault), None


def _check_headers(tensors: StoredExperts) -> None:
    try:
        tensors.check_headers()
    except CheckpointError as error:  # of a scheme, which does not know where the tensor is from
        raise DamagedCheckpointError(error.rule, error.remedy, error.where) from error


def _architectures(config: CheckpointFiles) -> Iterator[object]:
    for part in (config.full_config, config.model_config):
        found = part.get("architectures")
        yield from found if isinstance(found, list) else ()


# --- Resuming ---------------------------------------------------------------------------------------------------------


class ResumeFile:
    """Results of an earlier run in a file of one line each, to which new ones are added.

    The file is believed: it must not come from others. What is not checked again is what it says has passed, so a
    complete line that is no result voids the file. An unfinished last line is of a run that was killed, and is removed.

    Attributes:
        results: the earlier results, by layer and backend.
    """

    def __init__(self, path: Path, verification: Verification) -> None:
        """
        Args:
            path: the file; made if it does not exist.
            verification: what it must be of.

        Raises:
            MeasurementError: it cannot be read or written, is no such file, or is of another checkpoint, of files that
                have changed since, or of another machine, version or decision.
        """
        self.path = path
        self.results: Mapping[tuple[str, str], LayerResult] = {}
        header = {"kind": _RESUME_KIND, "identity": verification.identity}
        exists = os.path.lexists(path)
        if exists:
            known = {(plan.problem.layer, name) for plan in verification.plans for name in plan.backends}
            self.results, size = _read_results(path, header, known)
        with boundary(MeasurementError, "cannot be written", "Name another file", str(path)):
            flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC | (0 if exists else os.O_EXCL)
            self._file = os.fdopen(os.open(path, flags, 0o600), "wb")
            if exists:  # without a line that an interrupted run left unfinished
                self._file.truncate(size)
                self._file.seek(size)
        if not exists or not size:
            self._write(header)

    def keep(self, result: LayerResult) -> None:
        """Adds a result.

        Raises:
            MeasurementError: it cannot be written.
        """
        self._write(msgspec.to_builtins(result))

    def _write(self, line: object) -> None:
        with writing(self.path, remedy="Free space, or name another file"):
            self._file.write(json.dumps(line).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _read_results(
    path: Path, header: Mapping[str, str], known: set[tuple[str, str]]
) -> tuple[dict[tuple[str, str], LayerResult], int]:
    """Results by layer and backend, and the bytes of complete lines."""
    lines, unfinished = complete_lines(path, _MAX_RESUME_BYTES, MeasurementError)
    if not lines and not unfinished:
        return {}, 0
    remedy = "Name another file, or remove this one to begin anew"
    first = parse_json(lines[0], MeasurementError, f"{path}, line 1") if lines else None
    if not isinstance(first, dict) or first.get("kind") != header["kind"]:
        raise MeasurementError("is not a file of verify --resume", remedy, str(path))
    if first.get("identity") != header["identity"]:
        rule = "is of another checkpoint, of files that have changed since, or of another machine, version or decision"
        raise MeasurementError(rule, remedy, str(path))
    if len(lines) > 1 + 2 * max(len(known), 1):
        raise MeasurementError(f"has {len(lines)} lines for {len(known)} results", remedy, str(path))
    found = {}
    for number, line in enumerate(lines[1:], 2):
        where = f"{path}, line {number}"
        value = parse_json(line, MeasurementError, where)
        with boundary(MeasurementError, "is not a result", remedy, where):
            result = msgspec.convert(value, LayerResult, strict=True)
        if (result.layer, result.backend) not in known:
            raise MeasurementError("is of a layer or backend that is not verified", remedy, where)
        found[result.layer, result.backend] = result
    return found, sum(len(line) + 1 for line in lines)
