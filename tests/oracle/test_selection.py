"""The decision: precedence, reasons, policies; with backends made here, so that only the oracle is tested."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import pickle
import random
import re
from typing import Any

import msgspec
import pytest

from tests.lib.cases import B200, CPU, GPT_OSS, H200, INT4_G128, MXFP8_W8A8, RELU2, backend, problem, refusing, registry
from vllm_moe_oracle.backends import Capabilities, Rule
from vllm_moe_oracle.backends.emulation import Emulation
from vllm_moe_oracle.core.decision import (
    Accepted,
    Candidate,
    Decision,
    Reason,
    Rejected,
    ShardPlan,
    format_candidates,
)
from vllm_moe_oracle.core.problem import Activation, Device, Parallel, Problem, Routing, Scheme, SchemeName
from vllm_moe_oracle.devices.catalog import known_device
from vllm_moe_oracle.errors import NoBackendError, SettingError
from vllm_moe_oracle.measurements import model_shapes
from vllm_moe_oracle.oracle.backend_names import check_backend_names
from vllm_moe_oracle.oracle.registry import Registry, default_registry, discover
from vllm_moe_oracle.oracle.selection import decide, evaluate_candidates
from vllm_moe_oracle.releases.supported import NEWEST
from vllm_moe_oracle.settings import Settings, load

FAST = backend("fast", rank=1.0)
SLOW = backend("slow", rank=2.0, vllm_names=("slow_in_vllm", "shared"))
OTHER = backend("other", rank=3.0, vllm_names=("shared",))
THREE = registry([SLOW, OTHER, FAST])


def settings(**values: str) -> Settings:
    return load({}, None, values)


# --- Who wins --------------------------------------------------------------------------------------------------------


def test_without_a_wish_the_lowest_estimate_wins() -> None:
    decision = decide(problem(), H200, settings(), registry=THREE)
    assert (decision.backend, decision.why) == ("fast", "static")
    assert [candidate.backend for candidate in decision.candidates] == ["fast", "slow", "other"]


def test_equal_estimates_are_ordered_by_name() -> None:
    names = ["c", "a", "b"]
    decision = decide(problem(), H200, settings(), registry=registry(backend(name, rank=1.0) for name in names))
    assert [candidate.backend for candidate in decision.candidates] == ["a", "b", "c"]


def test_vllms_moe_backend_goes_before_the_static_order() -> None:
    decision = decide(problem(), H200, settings(), moe_backend="slow_in_vllm", registry=THREE)
    assert (decision.backend, decision.why) == ("slow", "user")
    assert decision.explanation == "--moe-backend slow_in_vllm"


def test_moe_backend_accepts_only_vllms_names() -> None:
    with pytest.raises(NoBackendError) as caught:
        decide(problem(), H200, settings(), moe_backend="other", registry=THREE)
    assert "other (--moe-backend other) is not a backend for mxfp8 experts" in caught.value.rule
    assert "this project's own names go into MOE_ORACLE_BACKEND" in caught.value.remedy


def test_our_setting_goes_before_vllms_moe_backend_and_says_so() -> None:
    decision = decide(problem(), H200, settings(backend="slow"), moe_backend="other", registry=THREE)
    assert (decision.backend, decision.why) == ("slow", "user")
    assert decision.explanation == "assignments.backend, which goes before --moe-backend other"


def test_an_override_goes_before_everything() -> None:
    chosen = settings(backend="slow", overrides=r"re:layers\.0\.=other")
    decision = decide(problem(), H200, chosen, moe_backend="fast", registry=THREE)
    assert (decision.backend, decision.why) == ("other", "override")
    assert decision.explanation == r"re:layers\.0\. from assignments.overrides"
    elsewhere = decide(problem(layer="model.layers.10.mlp.experts"), H200, chosen, registry=THREE)
    assert (elsewhere.backend, elsewhere.why) == ("slow", "user")


def test_an_override_with_auto_frees_its_layers_from_every_other_wish() -> None:
    chosen = settings(backend="slow", overrides=r"re:layers\.0\.=auto")
    decision = decide(problem(), H200, chosen, moe_backend="other", registry=THREE)
    assert (decision.backend, decision.why) == ("fast", "static")


def test_the_first_matching_override_counts() -> None:
    chosen = settings(overrides="re:experts=other;re:layers=slow")
    assert decide(problem(), H200, chosen, registry=THREE).backend == "other"


def test_a_mixed_checkpoint_gets_its_backends_per_layer() -> None:
    # One global flag cannot serve two schemes; an override can.
    both = registry([backend("mx", schemes=("mxfp8",)), backend("int", schemes=("wna16",)), FAST])
    chosen = settings(overrides=r"re:layers\.[0-9]\.=mx")
    for index in range(12):
        scheme = problem().scheme if index < 10 else INT4_G128
        layer = problem(layer=f"model.layers.{index}.mlp.experts", scheme=scheme)
        decision = decide(layer, H200, chosen, registry=both)
        assert (decision.backend, decision.why) == (("mx", "override") if index < 10 else ("int", "static"))


def test_a_shared_vllm_name_selects_the_first_backend_that_can_run() -> None:
    assert decide(problem(), H200, settings(), moe_backend="shared", registry=THREE).backend == "slow"
    chosen = settings(disable="slow")
    assert decide(problem(), H200, chosen, moe_backend="shared", registry=THREE).backend == "other"


def test_a_backends_own_name_goes_before_the_same_name_in_vllm() -> None:
    both = registry([backend("a", vllm_names=("b",), rank=1.0), backend("b", rank=2.0)])
    assert decide(problem(), H200, settings(backend="b"), registry=both).backend == "b"


def test_only_backends_of_the_scheme_are_candidates() -> None:
    both = registry([backend("mx", schemes=("mxfp8",)), backend("int", schemes=("wna16",))])
    decision = decide(problem(scheme=INT4_G128), H200, settings(), registry=both)
    assert [candidate.backend for candidate in decision.candidates] == ["int"]


# --- What cannot run -------------------------------------------------------------------------------------------------


def test_an_explicit_choice_that_cannot_run_is_an_error_with_a_table() -> None:
    some = registry([refusing("wanted", "rule.one", "rule.two"), refusing("third", "rule.three"), FAST])
    with pytest.raises(NoBackendError) as caught:
        decide(problem(), H200, settings(backend="wanted"), registry=some)
    error = caught.value
    text = str(error)
    rules = ("rule.one for 2048", "rule.two for 2048", "rule.three for 2048")
    for part in ("wanted (assignments.backend)", *rules, "fast"):
        assert part in text
    assert error.where == problem().layer
    assert {candidate.backend for candidate in error.candidates} == {"wanted", "third", "fast"}
    assert "MOE_ORACLE_ON_UNAVAILABLE=fallback" in error.remedy
    # The first line is complete, as a search of a log shows it; the table follows.
    lines = text.splitlines()
    assert lines[0] == f"{error.where}: {error.rule}. {error.remedy}" and lines[1].startswith("Every candidate for ")


def test_the_remedy_without_accepted_candidates() -> None:
    some = registry([refusing("wanted", "rule.one", remedy="turn the screw")])
    with pytest.raises(NoBackendError) as caught:
        decide(problem(), H200, settings(backend="wanted"), registry=some)
    assert caught.value.remedy == "To run wanted: turn the screw"
    assert str(caught.value).splitlines()[0].endswith("rule.one for 2048. To run wanted: turn the screw")


def test_fallback_takes_the_best_and_keeps_the_reason_in_one_line() -> None:
    some = registry([refusing("wanted", "rule.one", "rule.two"), FAST])
    decision = decide(problem(), H200, settings(backend="wanted", on_unavailable="fallback"), registry=some)
    assert (decision.backend, decision.why) == ("fast", "static")
    for part in ("wanted (assignments.backend)", "rule.one", "rule.two"):
        assert part in decision.explanation
    assert len(decision.explanation.splitlines()) == len(decision.summary().splitlines()) == 1


def test_fallback_without_candidates_names_the_requested_backend() -> None:
    some = registry([refusing("wanted", "rule.one")])
    with pytest.raises(NoBackendError, match=r"no backend can run mxfp8 experts here.*wanted \(assignments.backend\)"):
        decide(problem(), H200, settings(backend="wanted", on_unavailable="fallback"), registry=some)


def test_an_unknown_name_lists_the_valid_ones() -> None:
    with pytest.raises(NoBackendError, match="Valid are auto, shared, slow_in_vllm;") as caught:
        decide(problem(), H200, settings(), moe_backend="flashinfer_cutlass", registry=THREE)
    assert "--moe-backend flashinfer_cutlass" in str(caught.value)
    with pytest.raises(NoBackendError, match="Valid are auto, fast, other, shared, slow, slow_in_vllm"):
        decide(problem(), H200, settings(backend="flashinfer_cutlass"), registry=THREE)
    with pytest.raises(NoBackendError) as caught:  # as of a server, which asks for each layer alone
        decide(problem(), H200, settings(backend="hopper_mxfp9"))
    said = (
        "hopper_mxfp9 (assignments.backend) is not a backend for mxfp8 experts. Did you mean hopper_mxfp8? Valid are "
    )
    assert str(caught.value).splitlines()[0].startswith(f"{problem().layer}: {said}auto, cpu, ")


def test_an_unknown_name_can_fall_back() -> None:
    chosen = settings(on_unavailable="fallback")
    decision = decide(problem(), H200, chosen, moe_backend="flashinfer_cutlass", registry=THREE)
    assert decision.backend == "fast" and "flashinfer_cutlass" in decision.explanation
    decision = decide(problem(), H200, settings(on_unavailable="fallback", backend="hopper_mxfp9"))
    assert "hopper_mxfp9 (assignments.backend) is not a backend for mxfp8 experts (Did you mean hopper_mxfp8? " in (
        decision.explanation
    )


def test_a_backend_of_another_scheme_is_refused() -> None:
    both = registry([backend("mx", schemes=("mxfp8",)), backend("int", schemes=("wna16",))])
    with pytest.raises(
        NoBackendError, match=r"not a backend for mxfp8 experts but for wna16 experts\. Valid are auto, mx"
    ):
        decide(problem(), H200, settings(backend="int"), registry=both)


def test_everything_disabled_lists_each_candidate_with_its_reason() -> None:
    with pytest.raises(NoBackendError) as caught:
        decide(problem(), H200, settings(disable="fast,slow,other"), registry=THREE)
    lines = str(caught.value).splitlines()
    for name in ("fast", "slow", "other"):
        assert any(line.split()[:1] == [name] and "disabled by assignments.disable" in line for line in lines)
    assert "no backend can run mxfp8 experts" in lines[0] and "NVIDIA H200" in lines[0]


def test_a_disabled_backend_keeps_its_other_reasons() -> None:
    verdicts = evaluate_candidates(problem(dtype="float32"), H200, settings(disable="hopper_mxfp8"), default_registry())
    (own,) = (each for each in verdicts if each.backend == "hopper_mxfp8")
    assert len(own.reasons) > 1 and own.reasons[-1].code == "disabled"


def test_a_third_partys_disabled_backend_is_not_called() -> None:
    """Its method may hang, or end the process."""

    class Fatal(type(backend("fatal"))):  # type: ignore[misc]
        def plan(self, problem: Problem, device: Device) -> ShardPlan:
            raise SystemExit(3)

    verdicts = evaluate_candidates(problem(), H200, settings(disable="fatal"), registry([Fatal(), FAST]))
    assert [(each.backend, [reason.code for reason in each.reasons]) for each in verdicts] == [
        ("fast", []),
        ("fatal", ["disabled"]),
    ]


def test_auto_is_no_remedy_where_only_a_name_would_do() -> None:
    layer = model_shapes.parse("mxfp8:gpt-oss-20b")
    with pytest.raises(NoBackendError, match=r"(?m)Choose an accepted one \(emulation\)$"):
        decide(layer, known_device("nvidia-b200"), settings(backend="hopper_mxfp8"))
    with pytest.raises(NoBackendError, match=r"(?m)\), or auto, or set MOE_ORACLE_ON_UNAVAILABLE=fallback$"):
        decide(problem(), known_device("nvidia-b200"), settings(backend="hopper_mxfp8"))


def test_disabling_what_does_not_exist_is_an_error_that_lists_what_does() -> None:
    with pytest.raises(
        SettingError, match=r"'fats' is not a backend.*Valid are fast, other, shared, slow, slow_in_vllm$"
    ):
        decide(problem(), H200, settings(disable="fats"), registry=THREE)


def test_a_familys_name_disables_its_backends_of_every_scheme() -> None:
    family = {"vllm_names": ("family",)}
    both = registry(
        [backend("mx", schemes=("mxfp8",), **family), backend("int", schemes=("wna16",), **family), backend("own")]
    )
    for asked, name in ((problem(), "mx"), (problem(scheme=INT4_G128), "int")):
        (found,) = (
            each for each in evaluate_candidates(asked, H200, settings(disable="family"), both) if each.backend == name
        )
        (reason,) = found.reasons
        assert reason.code == "disabled"
        assert str(reason) == (
            "disabled by assignments.disable, as every backend of family (take family out of MOE_ORACLE_DISABLE)"
        )
    assert decide(problem(), H200, settings(disable="family"), registry=both).backend == "own"
    with pytest.raises(
        SettingError, match=r"'famly' is not a backend\. Did you mean family\? Valid are family, int, mx"
    ):
        decide(problem(), H200, settings(disable="famly"), registry=both)


def test_a_backends_own_name_disables_no_family() -> None:
    some = registry([backend("name"), backend("member", vllm_names=("name",))])
    assert [each.accepted for each in evaluate_candidates(problem(), H200, settings(disable="name"), some)] == [
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("name", "schemes", "meant"),
    [
        ("hopper", ("mxfp8",), "hopper_mxfp8"),
        ("hopper", ("mxfp4",), "hopper_mxfp4"),
        ("hopper", ("wna16",), "hopper_wna16"),
        ("hopper_mxfp9", ("mxfp4",), "hopper_mxfp4"),
        ("hopper_mxpf4", ("mxfp8",), "hopper_mxfp4"),
        ("cpu_int", ("mxfp8",), "cpu_int4"),
        ("marln", (), "marlin"),
    ],
)
def test_a_suggestion_is_of_the_models_scheme_first(name: str, schemes: tuple[SchemeName, ...], meant: str) -> None:
    with pytest.raises(SettingError, match=rf"^assignments.backend: '{name}' is not a backend. Did you mean {meant}\?"):
        check_backend_names(settings(backend=name), schemes=schemes)


def test_disabling_a_backend_that_could_not_be_loaded_is_allowed() -> None:
    some = registry([FAST])
    some.load_errors["theirs"] = "ImportError: no"
    assert decide(problem(), H200, settings(disable="theirs"), registry=some).backend == "fast"


def test_an_explicit_choice_of_a_broken_backend_says_why_it_is_broken() -> None:
    some = registry([FAST])
    some.load_errors["theirs"] = "ImportError: no module named cutlass_9"
    with pytest.raises(NoBackendError, match=r"theirs .* could not be loaded: ImportError: no module named cutlass_9"):
        decide(problem(), H200, settings(backend="theirs"), registry=some)
    # Its entry point may be called otherwise: an unknown name mentions what failed to load.
    with pytest.raises(NoBackendError, match="entry points that could not be loaded: theirs"):
        decide(problem(), H200, settings(backend="their_backend"), registry=some)


def test_a_scheme_without_backends_is_an_error_that_says_so() -> None:
    with pytest.raises(NoBackendError, match=r"no backend can run wna16 experts(.|\n)*no backend knows the scheme"):
        decide(problem(scheme=INT4_G128), H200, settings(), registry=THREE)


def test_the_way_out_is_that_of_the_nearest_candidate_that_has_one() -> None:
    some = registry([
        refusing("far", "one", "two", remedy="do a"),
        refusing("near", "one", remedy="do b"),
        refusing("hopeless", "one"),
    ])  # fmt: skip
    with pytest.raises(NoBackendError) as caught:
        decide(problem(), H200, settings(), registry=some)
    assert caught.value.remedy == "To run near: do b"


def test_the_rule_and_the_way_out_name_one_nearest_candidate() -> None:
    """It is one that a remedy makes run, although another has fewer reasons, and the first of these in static order."""
    some = registry([
        refusing("hopeless", "one", rank=1.0),
        refusing("near_later", "one", "two", remedy="do b", rank=3.0),
        refusing("near", "one", "two", remedy="do a", rank=2.0),
        refusing("far", "one", "two", "three", remedy="do c", rank=0.0),
    ])  # fmt: skip
    with pytest.raises(NoBackendError) as caught:
        decide(problem(), H200, settings(), registry=some)
    assert "here, on NVIDIA H200 (sm_90); for example near: near refuses by one" in caught.value.rule
    assert caught.value.remedy == "To run near: do a"
    with_reference = registry([backend("emulation"), *some])
    explanation = decide(problem(), CPU, settings(), registry=with_reference).explanation
    assert "; nearest is near: near refuses by one" in explanation


def test_options_are_nearer_than_another_release_of_vllm() -> None:
    """Each fact once: the rule has what speaks against the nearest candidate, the remedy what to do."""
    asked = problem(
        scheme=Scheme("wna16", 4, 128, "gptq", act_order="group"),
        parallel=Parallel(tp=2),
        intermediate_size=7168,
    )
    for name, nearest, fact, remedy in (
        ("nvidia-h100", "hopper_wna16_act_order", "needs whole groups", "expert parallelism, or a checkpoint"),
        ("nvidia-a100", "marlin_wna16", "the operator has no act order since vLLM", "vLLM 0.29.0, or a checkpoint"),
    ):
        with pytest.raises(NoBackendError) as caught:
            decide(asked, known_device(name), settings())
        error = caught.value
        assert f"; nearest is {nearest}: {fact}" in error.rule and remedy not in error.rule
        assert error.remedy.startswith(f"To run {nearest}: {remedy}") and error.remedy.count(remedy) == 1


def test_a_kernel_that_runs_by_name_is_the_nearest() -> None:
    some = registry([
        refusing("fixable", "one", "two", remedy="do a"),
        backend("named", only_by_name=lambda self, problem, device: "was not measured"),
    ])  # fmt: skip
    with pytest.raises(NoBackendError) as caught:
        decide(problem(), H200, settings(), registry=some)
    assert "; nearest is named: was not measured: it runs only when it is asked for by name" in caught.value.rule
    assert caught.value.remedy == "named can run it: MOE_ORACLE_BACKEND=named"


def test_candidates_without_a_choice_are_in_static_order() -> None:
    some = registry([
        backend("emulation", rank=9.0, only_by_name=Emulation.only_by_name),
        refusing("b", "one", rank=2.0),
        refusing("a", "one", rank=2.0),
        backend("named", rank=1.0, only_by_name=lambda self, problem, device: "was not measured"),
    ])  # fmt: skip
    with pytest.raises(NoBackendError) as caught:
        decide(problem(), H200, settings(), registry=some)
    assert [each.backend for each in caught.value.candidates] == ["named", "a", "b", "emulation"]
    table = str(caught.value).splitlines()
    places = [next(at for at, line in enumerate(table) if line.startswith(f"  {name} ")) for name in "ab"]
    assert places == sorted(places)


def test_a_backend_that_raises_is_rejected_and_harms_no_other() -> None:
    def explode(*args: Any) -> Any:
        raise ZeroDivisionError("by the author")

    for method in ("check", "plan", "priority", "activations"):
        some = registry([backend("broken", **{method: explode}), FAST])
        decision = decide(problem(), H200, settings(), registry=some)
        assert decision.backend == "fast"
        (reason,) = decision.candidates[1].reasons
        assert reason.code == "defect" and "ZeroDivisionError: by the author" in reason.detail


def test_all_failing_rules_are_reported_in_the_decision_and_the_error() -> None:
    limits = Capabilities(
        devices=("cuda",), compute_capabilities=((100, 110),), packages={"deep-gemm": "2.0", "torch": "99"},
        dtypes=("float16",), gated=(), max_experts=4, max_top_k=1, hidden_multiple=4096, intermediate_multiple=512,
    )  # fmt: skip
    rule = Rule("own", lambda p, d: True, lambda p, d: "always")
    picky = backend("picky", capabilities=limits, rules=(rule,))
    expected = {
        "capability", "package", "dtype", "activation", "experts.max", "top_k.max", "alignment.hidden",
        "alignment.intermediate", "own",
    }  # fmt: skip
    (verdict, _) = sorted(
        evaluate_candidates(problem(), H200, settings(), registry([picky, FAST])), key=lambda c: c.accepted
    )
    assert {reason.code for reason in verdict.reasons} == expected
    assert sum(reason.code == "package" for reason in verdict.reasons) == 2
    with pytest.raises(NoBackendError) as caught:
        decide(problem(), H200, settings(), registry=registry([picky]))
    for reason in verdict.reasons:
        assert str(reason) in str(caught.value)


# --- Activation quantization -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("declared", "consumed", "allowed", "accepted"),
    [
        ("16bit", "16bit", "0", True),
        ("16bit", "mxfp8", "0", False),
        ("16bit", "mxfp8", "1", True),
        ("mxfp8", "mxfp8", "0", True),
        ("mxfp8", "16bit", "0", True),  # more precise than asked for: no quantization that nobody wanted
        ("mxfp8", "fp8", "0", False),
        ("mxfp8", "fp8", "1", True),
    ],
)
def test_activations_are_quantized_only_as_declared_or_allowed(
    declared: Any, consumed: str, allowed: str, accepted: bool
) -> None:
    layer = problem(scheme=dataclasses.replace(MXFP8_W8A8, activations=declared))
    (verdict,) = evaluate_candidates(
        layer, H200, settings(allow_activation_quantization=allowed), registry([backend("one", consumes=consumed)])
    )
    assert verdict.accepted is accepted
    if not accepted:
        assert [reason.code for reason in verdict.reasons] == ["activation_quantization"]
        assert consumed in verdict.reasons[0].detail and declared in verdict.reasons[0].detail
        assert "MOE_ORACLE_ALLOW_ACTIVATION_QUANTIZATION" in verdict.reasons[0].remedy


def test_an_explicit_choice_does_not_allow_quantization_by_itself() -> None:
    some = registry([backend("quantizing", consumes="fp8")])
    with pytest.raises(NoBackendError, match="would quantize activations to fp8"):
        decide(problem(), H200, settings(backend="quantizing"), registry=some)


# --- The project's own backends --------------------------------------------------------------------------------------


def test_mxfp8_runs_dequantized_on_a_cpu_and_emulated_where_it_cannot() -> None:
    decision = decide(problem(), CPU, settings(), registry=discover())
    assert (decision.backend, decision.why) == ("cpu_dequantized", "static")
    assert decision.plan == ShardPlan(2048, 768, layout="vec")
    other = problem(activation=Activation("silu", limit=10.0))
    decision = decide(other, CPU, settings(), registry=discover())
    assert (decision.backend, decision.why) == ("emulation", "static")
    assert decision.plan == ShardPlan(2048, 768)


def test_emulation_is_an_explicit_choice_by_vllms_name() -> None:
    decision = decide(problem(), H200, settings(), moe_backend="emulation", registry=discover())
    assert (decision.backend, decision.why) == ("emulation", "user")


@pytest.mark.parametrize("activations", ["fp8", "mxfp4"])
def test_emulation_refuses_activations_that_it_would_quantize_otherwise(activations: Any) -> None:
    layer = problem(scheme=dataclasses.replace(MXFP8_W8A8, activations=activations))
    (verdict,) = (c for c in evaluate_candidates(layer, CPU, settings(), discover()) if c.backend == "emulation")
    assert [reason.code for reason in verdict.reasons] == ["activations"]
    assert activations in verdict.reasons[0].detail


@pytest.mark.parametrize(
    "activation",
    [
        Activation("gelu", alpha=1.702),
        Activation("gelu_tanh", beta=1.0),
        Activation("relu2", gated=False, limit=7.0),
        Activation("silu", gated=False, beta=1.0),
    ],
)
def test_no_backend_takes_parameters_that_have_no_meaning(activation: Activation) -> None:
    verdicts = evaluate_candidates(problem(activation=activation), H200, settings(), discover())
    codes = {each.backend: [reason.code for reason in each.reasons] for each in verdicts}
    unknown = activation.name == "silu"  # without a gate
    assert codes["emulation"] == ["activation.parameters.undefined"] and all(codes.values())
    assert codes["hopper_mxfp8"] == ["activation" if unknown else "activation.parameters.undefined"]


def test_parameters_that_change_nothing_are_taken() -> None:
    layer = problem(activation=Activation("gelu_tanh", alpha=1.0, beta=0.0))
    verdicts = evaluate_candidates(layer, H200, settings(), discover())
    assert {each.backend for each in verdicts if each.accepted} >= {"emulation", "hopper_mxfp8"}


def test_batch_invariance_is_the_reason_for_each_unproven_backend() -> None:
    some = registry([backend("a"), backend("b")])
    with pytest.raises(NoBackendError) as caught:
        decide(problem(batch_invariant=True, activation=Activation("silu")), H200, settings(), registry=some)
    assert str(caught.value).count("batch invariance is requested and not supported") == 3  # once for both, once each


def test_every_refusal_of_a_named_backend_says_why() -> None:
    """Two rules of a backend may say the same; that sentence counts once, and is not lost."""
    found = default_registry()
    refused = set()
    machines = [H200, *map(known_device, ("h100", "b200", "a100"))]
    for name, device in itertools.product([each.name for each in found], machines):
        for layer in (problem(), problem(scheme=Scheme("wna16", 4, 128, "gptq")), problem(has_bias=True)):
            if layer.scheme.name not in found[name].schemes:
                continue
            try:
                decide(layer, device, settings(backend=name), registry=found)
            except NoBackendError as error:
                assert re.search(r"cannot run this layer on .*?\): \w", error.rule), error.rule
                refused.add(name)
    assert len(refused) > 15


# --- Purity, JSON, hashing, pickling ---------------------------------------------------------------------------------


def test_the_order_of_registration_does_not_matter() -> None:
    backends = [backend(f"b{i}", rank=float(i % 3)) for i in range(9)] + [refusing("r", "x"), refusing("q", "y", "z")]
    answers = set()
    for seed in range(8):
        shuffled = backends.copy()
        random.Random(seed).shuffle(shuffled)
        answers.add(decide(problem(), H200, settings(), registry=registry(shuffled)))
    assert len(answers) == 1


def test_the_question_is_not_changed_by_asking() -> None:
    asked, device, chosen = problem(), H200, settings(disable="slow")
    before = copy.deepcopy((asked, device, chosen))
    decide(asked, device, chosen, registry=THREE)
    assert (asked, device, chosen) == before


def test_the_layers_name_is_not_part_of_the_key() -> None:
    first, second = problem(layer="model.layers.0.mlp.experts"), problem(layer="model.layers.7.mlp.experts")
    assert first != second
    assert first.key() == second.key() and hash(first.key()) == hash(second.key())
    assert first.key() != problem(top_k=4).key()


FULL = problem(
    scheme=MXFP8_W8A8, activation=GPT_OSS, has_bias=True, dtype="float16", lora=True, eplb=True, batch_invariant=True,
    routing=Routing("deepseek_v3", "sigmoid", False, 8, 4, True, True, True),
    parallel=Parallel(1, 4, 2, "batched"), local_experts=32, top_k=1,
)  # fmt: skip


@pytest.mark.parametrize("asked", [problem(), FULL, problem(scheme=INT4_G128, tp=2), problem(activation=RELU2)])
def test_problems_survive_json(asked: Problem) -> None:
    again = msgspec.json.decode(msgspec.json.encode(asked), type=Problem)
    assert again == asked and hash(again) == hash(asked) and str(again) == str(asked)


@pytest.mark.parametrize("device", [CPU, H200, B200, Device("rocm", "x")])
def test_devices_survive_json(device: Device) -> None:
    again = msgspec.json.decode(msgspec.json.encode(device), type=Device)
    assert again == device and hash(again) == hash(device)


def test_decisions_survive_json_with_every_verdict() -> None:
    layer = dataclasses.replace(FULL, lora=False)  # of LoRA with the other features, vLLM knows no adapters
    found = registry([FAST_FOR_ALL, refusing("no", "a", "b", remedy="c")])
    decision = decide(layer, H200, settings(), registry=found)
    again = msgspec.json.decode(msgspec.json.encode(decision), type=Decision)
    assert again == decision and hash(again) == hash(decision)
    assert isinstance(again.candidates[0].verdict, Accepted)
    rejected = again.candidates[1].verdict
    assert isinstance(rejected, Rejected) and rejected.reasons[-1].remedy == "c"


@pytest.mark.parametrize(
    "change",
    [
        {"top_k": "8"},
        {"scheme": {"name": "int3", "bits": 3, "group_size": 32, "packing": "x"}},
        {"hidden_size": 0},
        {"top_k": 129},
        {"local_experts": 129},
    ],
)
def test_invalid_problem_json_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(msgspec.to_builtins(problem()) | change, Problem)


def test_a_rejection_has_a_reason() -> None:
    with pytest.raises(ValueError, match="a rejection without a reason"):
        Rejected(())


@pytest.mark.parametrize("change", [{"top_k": 0}, {"top_k": 129}, {"local_experts": 129}, {"hidden_size": -1}])
def test_impossible_problems_are_refused_with_their_numbers(change: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=str(next(iter(change.values())))):
        problem(**change)


def test_decisions_and_settings_can_be_sent_to_another_process() -> None:
    decision = decide(problem(), H200, settings(backend="slow"), registry=THREE)
    assert pickle.loads(pickle.dumps(decision)) == decision
    chosen = settings(backend="slow", overrides="re:a=b")
    assert pickle.loads(pickle.dumps(chosen)) == chosen == copy.deepcopy(chosen)
    assert dataclasses.asdict(chosen)["sources"] == dict(chosen.sources)


def test_the_table_has_one_line_a_reason_and_the_name_once() -> None:
    reasons = (Reason("a", "first"), Reason("b", "second", "do this"))
    lines = format_candidates(
        (Candidate("good", Accepted(), 1.0), Candidate("terrible", Rejected(reasons), 2.0))
    ).splitlines()
    assert lines == ["  good      accepted", "  terrible  first", "            second (do this)"]


FAST_FOR_ALL = backend(
    "all",
    capabilities=Capabilities(
        devices=("cuda",), gated=("swigluoai",), activation_params=True, bias=True, formats=("standard", "batched"),
        apply_router_weight_on_input=True, lora=True, eplb=True, batch_invariant=True,
    ),
)  # fmt: skip


def test_the_registry_of_the_process_is_used_when_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    only = Registry()
    only.add(FAST, "test")
    monkeypatch.setattr("vllm_moe_oracle.oracle.selection.default_registry", lambda: only)
    assert decide(problem(), H200, settings()).backend == "fast"


# --- What is decided but not as it should be ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "device", [H200, dataclasses.replace(H200, kind="rocm"), dataclasses.replace(H200, kind="xpu")]
)
def test_the_reference_runs_on_a_gpu_by_name_only(device: Device) -> None:
    some = registry(
        [
            backend(
                "emulation",
                capabilities=Capabilities(devices=("cuda", "rocm", "xpu")),
                vllm_names=("emulation",),
                only_by_name=Emulation.only_by_name,
            ),
            refusing("far", "a", "b"),
            refusing("near", "c"),
        ]
    )
    for chosen in (settings(), settings(backend="near", on_unavailable="fallback"), settings(overrides="re:.=auto")):
        with pytest.raises(NoBackendError) as caught:
            decide(problem(), device, chosen, registry=some)
        message = str(caught.value)
        assert "no kernel can run mxfp8 experts here" in message and "near refuses by c for 2048" in message
        assert "emulation runs it slowly: MOE_ORACLE_BACKEND=emulation, or --moe-backend emulation" in message
        assert not any(each.accepted for each in caught.value.candidates)
    named = settings(backend="emulation"), settings(overrides="re:.=emulation")
    assert {decide(problem(), device, each, registry=some).backend for each in named} == {"emulation"}
    disabled = registry([refusing("near", "c")])
    with pytest.raises(NoBackendError, match="no backend can run mxfp8 experts here") as caught:
        decide(problem(), device, settings(), registry=disabled)
    assert "emulation" not in str(caught.value)


def test_a_third_partys_slow_kernel_goes_before_the_reference() -> None:
    some = registry([backend("emulation", only_by_name=Emulation.only_by_name), backend("slower", rank=2000.0)])
    assert decide(problem(), H200, settings(), registry=some).backend == "slower"


def test_emulation_on_a_cpu_or_by_choice_is_not_degraded() -> None:
    some = registry([backend("emulation"), refusing("near", "c")])
    assert not decide(problem(), CPU, settings(), registry=some).degraded
    assert not decide(problem(), H200, settings(backend="emulation"), registry=some).degraded
    assert not decide(problem(), H200, settings(), registry=THREE).degraded


def test_the_reference_on_a_cpu_names_the_nearest_candidate() -> None:
    others = [backend("emulation"), backend("gpu", capabilities=Capabilities(devices=("cuda",)))]
    none = decide(problem(), CPU, settings(), registry=registry(others))
    assert none.explanation == "no other backend runs mxfp8 experts on a CPU (cpu)"
    decision = decide(problem(), CPU, settings(), registry=registry([*others, refusing("near", "c", "d")]))
    assert (
        "no kernel for a CPU (cpu) can run the layer; emulation runs it slowly; nearest is near" in decision.explanation
    )
    real = decide(problem(scheme=INT4_G128), dataclasses.replace(CPU, features=()), settings())
    assert real.backend == "emulation" and "order" not in real.explanation
    assert "emulation runs it slowly; nearest is cpu_dequantized: " in real.explanation
    assert "avx2" in real.explanation


def test_the_reference_on_a_cpu_is_degraded_if_a_remedy_exists() -> None:
    """A warning in a server's log is for what its reader can change."""
    there = dataclasses.replace(CPU, features=("avx512f", "avx512_bf16"), packages={"vllm": NEWEST})
    decision = decide(problem(scheme=INT4_G128), there, settings())
    assert decision.backend == "emulation" and decision.degraded
    assert "set MOE_ORACLE_ALLOW_ACTIVATION_QUANTIZATION to 1 and choose it by name" in decision.explanation
    assert not decide(problem(scheme=INT4_G128), dataclasses.replace(there, features=()), settings()).degraded
    assert not decide(problem(scheme=INT4_G128), there, settings(disable="cpu_int4")).degraded
    assert not decide(problem(scheme=MXFP8_W8A8), there, settings()).degraded


def test_a_fallback_is_degraded() -> None:
    assert decide(problem(), H200, settings(backend="none", on_unavailable="fallback"), registry=THREE).degraded
