"""What no backend of this project is proven with stays stock vLLM's, and what vLLM's own class refuses is not run."""

from __future__ import annotations

import dataclasses
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from tests.lib.cases import H200, problem
from vllm_moe_oracle.errors import NoBackendError
from vllm_moe_oracle.oracle.registry import default_registry
from vllm_moe_oracle.oracle.selection import decide
from vllm_moe_oracle.settings import load

pytest.importorskip("vllm", reason="methods subclass vLLM's")

from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

from vllm_moe_oracle.methods import backend_selection, base, rank_sync
from vllm_moe_oracle.methods.base import OracleMoEMethod


class Stock(FusedMoEMethodBase):  # type: ignore[misc]
    """Stands for the stock method class."""

    def create_weights(self, *args: Any, **kwargs: Any) -> None:
        """Not asked here."""

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """Not asked here."""

    def __init__(self, quant_config: Any, moe_config: Any) -> None:
        self.made_with = quant_config, moe_config


class Ours(OracleMoEMethod, Stock):  # type: ignore[misc]
    """Stands for a method of this project."""

    offered = False
    constructed = 0

    def __init__(self, quant_config: Any, moe_config: Any) -> None:
        type(self).constructed += 1
        if not self.offered:
            raise NoBackendError("no backend can run mxfp8 experts here\n  the table")


def config(lora: bool = False, batched: bool = False) -> Any:
    parallel = SimpleNamespace(use_batched_activation_format=batched)
    return SimpleNamespace(moe_parallel_config=parallel, is_lora_enabled=lora)


@pytest.mark.parametrize(
    ("asked", "words"), [({"lora": True}, "LoRA on experts"), ({"batched": True}, "a batched all-to-all")]
)
def test_an_unsupported_layer_is_left_to_stock_vllm_and_reported(
    asked: dict[str, bool], words: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(base, "_has_explicit_choice", lambda: False)
    caplog.set_level(logging.WARNING, "vllm.moe_oracle")
    logging.getLogger("vllm").propagate = True
    made = Ours(quant_config="config", moe_config=config(**asked))
    assert type(made) is Stock
    assert made.made_with[0] == "config"
    assert f"{words}: left to stock vLLM's Stock; no backend can run mxfp8 experts here" in caplog.text
    assert "the table" not in caplog.text


@pytest.mark.parametrize("asked", [{"lora": True}, {"batched": True}])
def test_a_supported_layer_is_served_by_this_plugin(asked: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_has_explicit_choice", lambda: False)
    monkeypatch.setattr(Ours, "offered", True)
    assert type(Ours(quant_config=None, moe_config=config(**asked))) is Ours


def test_an_explicit_choice_is_not_given_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_has_explicit_choice", lambda: True)
    with pytest.raises(NoBackendError):
        Ours(quant_config=None, moe_config=config(lora=True))


def test_layer_without_lora_is_never_left_to_stock_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ours, "constructed", 0)
    with pytest.raises(NoBackendError):
        Ours(quant_config=None, moe_config=config())
    monkeypatch.setattr(Ours, "offered", True)
    assert type(Ours(quant_config=None, moe_config=config())) is Ours
    assert Ours.constructed == 2


def chosen(environment: dict[str, str], objections: dict[str, str]) -> Any:
    """A method that was decided on an H200, before a vLLM whose classes object by backend name."""
    decision = decide(problem(), H200, load(environment))
    release = SimpleNamespace(stock_class_rejection=lambda backend, moe, problem: objections.get(backend.name, ""))
    return SimpleNamespace(
        decision=decision, backend=default_registry()[decision.backend], adapter=release, moe=None, settings=load({})
    )


def test_what_vllms_own_class_refuses_is_not_run_and_called_a_defect(caplog: pytest.LogCaptureFixture) -> None:
    first = chosen({}, {}).decision.backend
    logging.getLogger("vllm").propagate = True
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
    method.decision = SimpleNamespace(problem=problem())

    def raises(message: str) -> Any:
        def fail(*args: Any) -> Any:
            raise ValueError(message)

        return fail

    monkeypatch.setattr(method, "_read_weights", raises("damaged"), raising=False)
    for words in ("damaged", "no room"):
        with pytest.raises(ValueError, match=words):
            method.process_weights_after_loading(SimpleNamespace())
        monkeypatch.setattr(method, "_read_weights", lambda layer: {})
        monkeypatch.setattr(method, "_install_weights", raises("no room"), raising=False)
    layer = problem().layer
    assert told == [f"the loaded weights of {layer}: damaged", f"the conversion of {layer}: no room"]
