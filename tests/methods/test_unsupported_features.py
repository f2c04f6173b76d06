"""What no backend of this project is proven with stays stock vLLM's, and what vLLM's own class refuses is not run."""

from __future__ import annotations

import copy
import dataclasses
import enum
import logging
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

from tests.lib.cases import CPU, GPT_OSS, H200, INT4_G128, MXFP8, problem
from vllm_moe_oracle.compat import current_adapter
from vllm_moe_oracle.core.decision import Candidate, Reason, Rejected
from vllm_moe_oracle.core.problem import Activation, Device, Parallel, Problem, Scheme
from vllm_moe_oracle.devices import detect
from vllm_moe_oracle.errors import NoBackendError, SettingError
from vllm_moe_oracle.methods import backend_selection, base, load_summary, rank_sync
from vllm_moe_oracle.methods.base import OracleMoEMethod
from vllm_moe_oracle.oracle.registry import default_registry
from vllm_moe_oracle.oracle.selection import decide
from vllm_moe_oracle.settings import load


def load_first(param: torch.nn.Parameter, loaded_weight: torch.Tensor, expert_id: int) -> None:
    """Loads what is no padding: the first rows of an expert."""
    param.data[expert_id, : len(loaded_weight)].copy_(loaded_weight)


class Stock(FusedMoEMethodBase):  # type: ignore[misc]
    """Stands for the stock method class."""

    def create_weights(self, layer: Any, num_experts: int, **kwargs: Any) -> None:
        """Weights whose memory held something, and a scale that no file has."""
        for name, dtype in (("w13_weight", torch.float8_e4m3fn), ("w2_weight_scale", torch.uint8)):
            held = torch.full((num_experts, 4, 2), 0x7F, dtype=torch.uint8).view(dtype)
            parameter = torch.nn.Parameter(held, requires_grad=False)
            parameter.weight_loader = load_first  # type: ignore[attr-defined]
            layer.register_parameter(name, parameter)
        layer.register_parameter("input_scale", torch.nn.Parameter(torch.ones(num_experts), requires_grad=False))

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """Not asked here."""

    def __init__(self, quant_config: Any, moe_config: Any) -> None:
        self.made_with = quant_config, moe_config


class Ours(OracleMoEMethod, Stock):  # type: ignore[misc]
    """Stands for a method of this project."""

    offered = False
    layer = "experts.0"
    candidates: tuple[Candidate, ...] = ()

    def __init__(self, quant_config: Any, moe_config: Any) -> None:
        if not self.offered:
            rule = "no backend can run mxfp8 experts here"
            raise NoBackendError(rule, "Buy one", self.layer, self.candidates, "  the table")


def config(lora: bool = False, batched: bool = False, moe_backend: str = "auto") -> Any:
    parallel = SimpleNamespace(use_batched_activation_format=batched, all2all_backend="allgather_reducescatter")
    return SimpleNamespace(moe_parallel_config=parallel, is_lora_enabled=lora, moe_backend=moe_backend)


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine without settings of ours, on a GPU, whose model has no layers yet."""
    release = current_adapter()
    monkeypatch.setattr(release, "additional_config", lambda: {})
    monkeypatch.setattr(release, "moe_layer_names", lambda: [])
    monkeypatch.setattr(detect, "detect", lambda: H200)
    monkeypatch.setattr(load_summary, "_model", load_summary._ModelLoad())


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, "vllm.moe_oracle")
    return caplog


@pytest.mark.parametrize(
    ("asked", "words"), [({"lora": True}, "LoRA on experts"), ({"batched": True}, "a batched all-to-all")]
)
@pytest.mark.parametrize("device", [H200, CPU], ids=lambda device: device.kind)
def test_a_layer_without_a_backend_for_a_feature_is_left_to_stock_vllm(
    asked: dict[str, bool], words: str, device: Any, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(detect, "detect", lambda: device)
    made = Ours(quant_config="config", moe_config=config(**asked))
    assert type(made) is Stock
    assert made.made_with[0] == "config"
    assert f"experts.0: {words}: left to stock vLLM's Stock; no backend can run mxfp8 experts here" in log.text
    assert "the table" not in log.text


def test_a_copy_is_of_the_same_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ours, "offered", True)
    made = Ours("config", config())
    assert type(made) is Ours and type(copy.copy(made)) is Ours


def test_a_layer_that_something_else_describes_is_left_to_stock_vllm(log: pytest.LogCaptureFixture) -> None:
    """vLLM's own tests do so, and another plugin may."""
    for other in (SimpleNamespace(num_experts=8), "a config", None):
        made = Ours("config", other)
        assert type(made) is Stock and made.made_with == ("config", other)
    assert "left to stock vLLM's Stock; no argument is a FusedMoEConfig" in log.text


def test_on_a_gpu_a_layer_without_a_kernel_here_stays_stock_vllms(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    names: list[str] = []
    monkeypatch.setattr(current_adapter(), "moe_layer_names", lambda: names)
    for name in ("experts.0", "experts.1", "experts.2"):
        monkeypatch.setattr(Ours, "layer", name)
        assert type(Ours(quant_config="config", moe_config=config())) is Stock
        names.append(name)
    reason = "no backend can run mxfp8 experts here. Buy one"
    assert log.text.count(f": left to stock vLLM's Stock; {reason}") == 1
    assert "the table" in log.text  # what speaks against the wrapper of a stock class may be wrong with the class
    report = load_summary.model_report(3)
    assert report["left_to_stock"] == dict.fromkeys(names, reason) and report["served"] == 0


class Deciding(OracleMoEMethod, Stock):  # type: ignore[misc]
    """A method of this project that decides for itself."""

    scheme = MXFP8

    def __init__(self, quant_config: Any, moe_config: Any) -> None:
        self.moe = moe_config
        self.decide(moe_config, self.scheme)

    @classmethod
    def over(cls, layer: Problem, all2all: str, monkeypatch: pytest.MonkeyPatch) -> Any:
        """What such a layer gets with this all-to-all."""
        release = current_adapter()
        monkeypatch.setattr(cls, "scheme", layer.scheme)
        monkeypatch.setattr(release, "problem", lambda *arguments: dataclasses.replace(layer, scheme=arguments[-1]))
        monkeypatch.setattr(release, "require_original", lambda name: None)
        monkeypatch.setattr(base, "current_layer", lambda: (torch.nn.Module(), layer.layer))
        moe = config(lora=layer.lora)
        moe.moe_parallel_config.all2all_backend = all2all
        return cls("config", moe)


@pytest.mark.parametrize(
    ("all2all", "hidden", "left"),
    [
        ("deepep_high_throughput", 2880, True),
        ("deepep_high_throughput", 3072, False),
        ("allgather_reducescatter", 2880, False),
    ],
)
def test_a_layer_whose_hidden_size_vllm_rounds_up_stays_stock_vllms(
    all2all: str, hidden: int, left: bool, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    """Also where the class that stock takes needs a multiple of the size: it gets the size that vLLM rounds up to."""
    monkeypatch.setattr(Stock, "experts_cls", type("MarlinExperts", (), {}), raising=False)
    llm_compressor = Scheme("mxfp4", 4, 32, "compressed-tensors")
    layer = problem(scheme=llm_compressor, hidden_size=hidden, parallel=Parallel(ep=2, dp=2))
    made = Deciding.over(layer, all2all, monkeypatch)
    assert type(made) is (Stock if left else Deciding)
    assert left == (f"left to stock vLLM's Stock; the all-to-all {all2all} does not carry hidden size" in log.text)


def test_experts_that_a_loader_loses_are_nobodys_with_a_rounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = problem(
        scheme=Scheme("mxfp4", 4, 32, "gpt_oss"), hidden_size=2880, num_experts=7, local_experts=4, top_k=4,
        parallel=Parallel(ep=2, dp=2), activation=dataclasses.replace(GPT_OSS, interleaved=True), has_bias=True,
        even_expert_split=True,
    )  # fmt: skip
    with pytest.raises(
        NoBackendError, match=r"hidden size 2880.*stock vLLM's Stock gets its weights and adapters from"
    ):
        Deciding.over(layer, "deepep_high_throughput", monkeypatch)
    even = dataclasses.replace(layer, num_experts=8)
    assert type(Deciding.over(even, "deepep_high_throughput", monkeypatch)) is Stock


@pytest.mark.parametrize(("all2all", "refused"), [("nixl_ep", True), ("allgather_reducescatter", False)])
def test_an_all_to_all_without_adapters_ends_the_start(
    all2all: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's LoRA layer looks at the option alone: there is one data-parallel rank."""
    layer = problem(parallel=Parallel(ep=2), lora=True)
    if not refused:
        assert Deciding.over(layer, all2all, monkeypatch) is not None
        return
    with pytest.raises(SettingError, match=r"with the all-to-all allgather_reducescatter alone.*Leave out"):
        Deciding.over(layer, all2all, monkeypatch)


def test_on_a_cpu_a_layer_without_a_backend_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "detect", lambda: CPU)
    with pytest.raises(NoBackendError, match="Buy one"):
        Ours(quant_config="config", moe_config=config())


class Emulated(enum.Enum):
    """As vLLM's enumerations of kernels."""

    EMULATION = "EMULATION"
    MARLIN = "MARLIN"


def _raises(self: Any, **kwargs: Any) -> None:
    raise NotImplementedError("No MoE backend\x1b supports the configuration")


def _by(name: str, value: Any) -> Any:
    return lambda self, **kwargs: setattr(self, name, value)


@pytest.mark.parametrize(
    ("constructor", "words"),
    [
        (_raises, "Stock raises NotImplementedError: No MoE backend supports the configuration"),
        (_by("mxfp8_backend", Emulated.EMULATION), "Stock can only emulate it"),
        (_by("experts_cls", type("OCP_MXQuantizationEmulationTritonExperts", (), {})), "can only emulate it"),
        (_by("emulate", True), "Stock can only emulate it"),
    ],
)
@pytest.mark.parametrize("asked", [{}, {"lora": True}])
def test_what_stock_vllm_cannot_run_either_is_one_error_with_the_remedy(
    constructor: Any, words: str, asked: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stock, "__init__", constructor)
    with pytest.raises(NoBackendError) as caught:
        Ours(quant_config="config", moe_config=config(**asked))
    message = str(caught.value)
    assert message.startswith("experts.0: ") and words in message and "the table" in message and "Buy one" in message
    assert ("LoRA on experts: " in message) == bool(asked)


def test_stocks_own_kernel_is_no_emulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stock, "__init__", _by("mxfp8_backend", Emulated.MARLIN))
    assert type(Ours(quant_config="config", moe_config=config())) is Stock


@pytest.mark.parametrize(
    ("fields", "ending"),
    [
        ({"intermediate_size": 48, "tp": 16}, "ranks cut scale groups of 32: its loader gives rank 1 the scales"),
        ({"eplb": True}, "it does not support EPLB"),
        ({"lora": True}, "AssertionError: CutlassExpertsMxfp4 does not support LoRA"),
        ({"intermediate_size": 192}, "RuntimeError: scales are tiled by 128 rows and features"),
        ({"scheme": Scheme("wna16", 4, 128, "gptq", act_order="group")}, "its kernels do not reorder input features"),
        ({"scheme": Scheme("wna16", 4, 128, "moe_wna16", act_order="group")}, "its kernels do not reorder"),
        ({"scheme": Scheme("wna16", 4, 128, "compressed-tensors-int")}, "ValueError: For Fused MoE layers, only"),
        ({}, ""),
    ],
)
def test_what_stock_finds_out_after_its_choice_is_an_error_before(
    fields: dict[str, Any], ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its constructor takes the layer, and the load ends, or puts scales of other features beside the weights."""
    chosen = type("CutlassExpertsMxfp4", (), {})
    monkeypatch.setattr(Stock, "experts_cls", chosen, raising=False)
    layer = problem(**{"scheme": Scheme("mxfp4", 4, 32, "compressed-tensors")} | fields)
    monkeypatch.setattr(Ours, "problem", layer)
    if not ending:
        assert type(Ours("config", config())) is Stock
        return
    with pytest.raises(NoBackendError, match=re.escape(f"stock vLLM's Stock cannot run it: {ending}")) as caught:
        Ours("config", config())
    assert caught.value.remedy == "Buy one"


@pytest.mark.parametrize(
    ("device", "fields", "ending"),
    [
        (
            H200,
            {"dtype": "float32"},
            "MarlinExperts takes bfloat16 activations, the model has float32, and vLLM does not",
        ),
        (
            dataclasses.replace(H200, capability=75),
            {"dtype": "float16"},
            "its kernels for mxfp8 are in bfloat16, which",
        ),
        (dataclasses.replace(H200, capability=75), {"scheme": INT4_G128, "dtype": "float16"}, ""),
        (CPU, {"dtype": "float32", "lora": True}, ""),
    ],
)
def test_dtypes_and_gpus_that_stocks_class_does_not_ask_about(
    device: Device, fields: dict[str, Any], ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its constructor takes them, and the first call ends."""
    monkeypatch.setattr(Stock, "experts_cls", type("MarlinExperts", (), {}), raising=False)
    monkeypatch.setattr(detect, "detect", lambda: device)
    layer = problem(**fields)
    monkeypatch.setattr(Ours, "problem", layer)
    if not ending:
        assert type(Ours("config", config(lora=layer.lora))) is Stock
        return
    with pytest.raises(NoBackendError, match=re.escape(f"stock vLLM's Stock cannot run it: {ending}")):
        Ours("config", config())


@pytest.mark.parametrize("asked", ["checkpoint", "16bit"])
def test_stock_gets_the_activations_that_the_checkpoint_declares(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting asks backends here for others, for which stock would take a method that fails with this hidden size."""
    monkeypatch.setattr(current_adapter(), "additional_config", lambda: {"moe_oracle": {"activations": asked}})
    monkeypatch.setattr(Stock, "experts_cls", type("MarlinExperts", (), {}), raising=False)
    declared = Scheme("mxfp4", 4, 32, "compressed-tensors", activations="fp8_token")
    layer = problem(scheme=declared, hidden_size=2880, activation=Activation("unknown"))
    assert type(Deciding.over(layer, "allgather_reducescatter", monkeypatch)) is Stock


def test_whether_stocks_method_moves_experts_is_asked_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some do with one class, or with activations in another precision."""
    monkeypatch.setattr(Stock, "supports_eplb", True, raising=False)
    monkeypatch.setattr(Ours, "problem", problem(scheme=Scheme("mxfp4", 4, 32, "compressed-tensors"), eplb=True))
    assert type(Ours("config", config())) is Stock


@pytest.mark.parametrize("asked", [{}, {"lora": True}, {"batched": True}])
@pytest.mark.parametrize("code", ["expert_parallel.loader", "lora.eplb", "lora.dp", "lora.placement", "lora.format"])
def test_what_vllms_loader_cannot_fill_is_an_error_before_it_loads(
    code: str, asked: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = Rejected((Reason(code, "gives each of 2 ranks 3 of 7 experts", "tensor parallelism"),))
    monkeypatch.setattr(Ours, "candidates", (Candidate("marlin_mxfp8", lost, 1.0),))
    words = "stock vLLM's Stock gets its weights and adapters from the same code"
    with pytest.raises(NoBackendError, match=words) as caught:
        Ours(quant_config="config", moe_config=config(**asked))
    assert caught.value.candidates == Ours.candidates and caught.value.remedy == "Buy one"


@pytest.mark.parametrize("asked", [{}, {"lora": True}, {"batched": True}])
def test_a_supported_layer_is_served_by_this_plugin(asked: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ours, "offered", True)
    assert type(Ours(quant_config=None, moe_config=config(**asked))) is Ours


@pytest.mark.parametrize(
    ("settings", "moe_backend", "kept"),
    [
        ({"backend": "hopper_mxfp8"}, "auto", True),
        ({"overrides": "re:experts=hopper_mxfp8"}, "auto", True),
        ({"backend": "hopper_mxfp8", "on_unavailable": "fallback"}, "auto", False),
        ({}, "marlin", True),
        ({}, "a_kernel_of_stock_alone", False),
        ({"on_unavailable": "fallback"}, "marlin", False),
    ],
)
def test_an_explicit_choice_is_not_given_away(
    settings: dict[str, Any], moe_backend: str, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(current_adapter(), "additional_config", lambda: {"moe_oracle": settings})
    if not kept:
        assert type(Ours(quant_config=None, moe_config=config(moe_backend=moe_backend))) is Stock
        return
    with pytest.raises(NoBackendError, match=r"^experts\.0: no backend can run mxfp8 experts here\. Buy one\n"):
        Ours(quant_config=None, moe_config=config(moe_backend=moe_backend))


def chosen(environment: dict[str, str], objections: dict[str, str]) -> Any:
    """A method that was decided on an H200, before a vLLM whose classes object by backend name."""
    decision = decide(problem(), H200, load(environment))
    release = SimpleNamespace(stock_class_rejection=lambda backend, moe, problem: objections.get(backend.name, ""))
    return SimpleNamespace(
        decision=decision, backend=default_registry()[decision.backend], adapter=release, moe=None, settings=load({}),
        registry=default_registry(),
    )  # fmt: skip


def test_what_vllms_own_class_refuses_is_not_run_and_called_a_defect(caplog: pytest.LogCaptureFixture) -> None:
    first = chosen({}, {}).decision.backend
    method = chosen({}, {first: "kernel does not support Tuesdays"})
    backend_selection.consult_stock_class(method)
    assert method.backend.name == method.decision.backend != first
    assert method.decision.plan == method.backend.plan(method.decision.problem, H200)
    refused = next(each for each in method.decision.candidates if each.backend == first)
    assert [reason.code for reason in refused.reasons] == ["stock"]
    assert "Tuesdays" in refused.reasons[0].detail
    assert "a rule of this plugin is wrong" in caplog.text


def test_an_explicit_choice_that_vllms_own_class_refuses_is_an_error() -> None:
    method = chosen({"MOE_ORACLE_BACKEND": "marlin_mxfp8"}, {"marlin_mxfp8": "kernel does not support Tuesdays"})
    with pytest.raises(NoBackendError, match=r"MarlinExperts rejects what marlin_mxfp8 accepts: .*Tuesdays"):
        backend_selection.consult_stock_class(method)


def test_a_class_that_agrees_changes_nothing() -> None:
    method = chosen({}, {})
    before = dataclasses.replace(method.decision)
    backend_selection.consult_stock_class(method)
    assert method.decision == before


def test_whatever_keeps_a_rank_from_deciding_is_told_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, str]] = []
    monkeypatch.setattr(rank_sync, "notify_failure", lambda group, topic, error: told.append((topic, str(error))))

    def broken() -> Any:
        raise RuntimeError("no driver")

    with pytest.raises(RuntimeError, match="no driver"):
        backend_selection.select_backend(SimpleNamespace(rank_group=rank_sync.RankGroup()), "experts", broken)
    assert told == [("the backend of experts", "no driver")]


def test_faults_in_loaded_or_converted_weights_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(rank_sync, "notify_failure", lambda group, topic, error: told.append(f"{topic}: {error}"))
    moe = SimpleNamespace(moe_parallel_config=SimpleNamespace(tp_size=1, tp_rank=0))
    monkeypatch.setattr(base.backend_check, "check_or_fallback", lambda *args, **kwargs: None)
    monkeypatch.setattr(base.token_dispatch, "prepare_copies", lambda *args: None)
    method = object.__new__(Ours)
    method.rank_group, method.moe, method.moe_kernel = rank_sync.RankGroup(), moe, None
    method.settings = load({"MOE_ORACLE_SELF_CHECK": "off"})
    method.decision = SimpleNamespace(problem=problem())

    def raises(message: str) -> Any:
        def fail(*args: Any) -> Any:
            raise ValueError(message)

        return fail

    monkeypatch.setattr(method, "_read_weights", raises("damaged"), raising=False)
    for words in ("damaged", "no room"):
        with pytest.raises(ValueError, match=words):
            method.process_weights_after_loading(torch.nn.Module())
        monkeypatch.setattr(method, "_read_weights", lambda layer: {})
        monkeypatch.setattr(method, "_install_weights", raises("no room"), raising=False)
    layer = problem().layer
    assert told == [f"the loaded weights of {layer}: damaged", f"the conversion of {layer}: no room"]


@pytest.mark.parametrize("device", [H200, CPU], ids=lambda device: device.kind)
def test_experts_that_the_models_code_pads_are_left_to_stock_vllm(
    device: Any, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    release, fields = current_adapter(), {"model_type": "kimi_linear", "moe_intermediate_size": 3072}
    monkeypatch.setattr(release, "_model_field", lambda name, default: fields.get(name, default))
    monkeypatch.setattr(detect, "detect", lambda: device)
    layer = config(moe_backend="marlin")
    layer.moe_parallel_config.tp_size = 16
    layer.intermediate_size_per_partition = 256
    made, module = Ours("config", layer), torch.nn.Module()
    assert type(made) is Stock
    made.create_weights(layer=module, num_experts=2)
    assert not any(bool(each.view(torch.uint8).any()) for each in (module.w13_weight, module.w2_weight_scale))
    assert bool((module.input_scale == 1).all())
    again = torch.nn.Parameter(torch.full_like(module.w2_weight_scale, 0x7F), requires_grad=False)
    again.__dict__.update(module.w2_weight_scale.__dict__)  # as vLLM's reload makes one
    for expert in range(2):
        again.weight_loader(again, torch.full((3, 2), 5, dtype=torch.uint8), expert_id=expert)
    assert again.data[..., 0].tolist() == [[5, 5, 5, 0]] * 2
    assert "experts that the model's code pads with zeros: left to stock vLLM's Stock" in log.text
    assert release.unpadded_intermediate_size(layer) == 3072
    layer.intermediate_size_per_partition = 192  # the model's own minimum is smaller
    assert not release.unsupported_features(layer) and release.unpadded_intermediate_size(layer) == 0
    layer.intermediate_size_per_partition, fields["model_type"] = 256, "qwen3_moe"
    assert release.unpadded_intermediate_size(layer) == 0
