"""The table of activations, and what is derived from it."""

from __future__ import annotations

import pytest

from vllm_moe_oracle.core import activations
from vllm_moe_oracle.core.activations import ACTIVATIONS
from vllm_moe_oracle.core.problem import Activation


def test_names_and_aliases_are_unique() -> None:
    names = [name for spec in ACTIVATIONS.values() for name in (spec.name, *spec.aliases, spec.halves_name) if name]
    assert len(set(names)) == len(names)
    models = [model for spec in ACTIVATIONS.values() for model in spec.model_types]
    assert len(set(models)) == len(models)


def test_gated_and_ungated_names() -> None:
    assert {"silu", "gelu", "gelu_tanh", "swigluoai", "situ", "swiglustep"} <= set(activations.GATED)
    assert {"silu", "gelu", "gelu_tanh", "relu2"} <= set(activations.UNGATED)
    assert "relu2" not in activations.GATED and "swigluoai" not in activations.UNGATED
    assert all(spec.gated or spec.ungated for spec in ACTIVATIONS.values())


@pytest.mark.parametrize(
    ("stated", "complete"),
    [
        (Activation("silu"), Activation("silu")),
        (Activation("silu", limit=10.0), Activation("silu", limit=10.0)),
        (Activation("swigluoai"), Activation("swigluoai", alpha=1.702, beta=1.0, limit=7.0)),
        (Activation("swigluoai", alpha=1.0, limit=3.0), Activation("swigluoai", alpha=1.0, beta=1.0, limit=3.0)),
        (Activation("swiglustep"), Activation("swiglustep", limit=7.0)),
        (Activation("situ", alpha=2.0), Activation("situ", alpha=2.0)),
        (Activation("unheard_of"), Activation("unheard_of")),
    ],
    ids=lambda value: str(value),
)
def test_defaults_fill_only_what_the_formula_has_built_in(stated: Activation, complete: Activation) -> None:
    assert activations.with_defaults(stated) == complete


@pytest.mark.parametrize(
    ("alpha", "beta", "kept"),
    [(4.0, 25.0, (4.0, 25.0)), (4.0, 0.0, (4.0, None)), (4.0, -1.0, (4.0, None)), (0.0, 25.0, (0.0, 25.0)),
     (-1.0, None, (-1.0, None)), (None, -1.0, (None, None)), (4.0, float("nan"), (4.0, None))],
)  # fmt: skip
def test_a_bound_of_zero_or_less_is_none_where_none_is_possible(
    alpha: float | None, beta: float | None, kept: tuple[float | None, float | None]
) -> None:
    found = activations.from_vllm("situ", alpha=alpha, beta=beta)
    assert (found.alpha, found.beta) == kept
    assert activations.without_empty_bounds(Activation("situ", alpha=alpha, beta=beta)) == found
    others = Activation("swigluoai", alpha=0.0, beta=-1.0, limit=0.0)
    assert activations.without_empty_bounds(others) == others


def test_alpha_and_beta_of_the_formula() -> None:
    assert activations.alpha_beta(Activation("silu")) == (1.0, 0.0)
    assert activations.alpha_beta(Activation("swigluoai")) == (1.702, 1.0)
    assert activations.alpha_beta(Activation("swigluoai", alpha=2.0)) == (2.0, 1.0)


@pytest.mark.parametrize(
    ("activation", "formula", "changed"),
    [
        (Activation("silu"), "", ()),
        (Activation("silu", alpha=1.0, beta=0.0), "silu", ()),
        (Activation("silu", alpha=1.702, beta=1.0, limit=7.0), "", ("alpha", "beta", "limit")),
        (Activation("swigluoai", alpha=1.702, beta=1.0, limit=7.0), "", ()),
        (Activation("swigluoai", alpha=1.702, beta=1.0, limit=7.0), "silu", ("alpha", "beta", "limit")),
        (Activation("swigluoai"), "", ("limit",)),
        (Activation("swiglustep", limit=7.0), "", ()),
        (Activation("unheard_of", alpha=0.0), "", ("alpha",)),
    ],
    ids=lambda value: str(value),
)
def test_what_a_formula_does_not_have_built_in(activation: Activation, formula: str, changed: tuple[str, ...]) -> None:
    assert activations.changed_parameters(activation, formula) == changed


def test_names_of_configs_become_canonical() -> None:
    names = {"swish": "silu", "gelu_new": "gelu_tanh", "relu2_no_mul": "relu2", " SiLU ": "silu"}
    names |= {"swigluoai_uninterleave": "swigluoai", "unheard_of": "unheard_of"}
    assert {name: activations.canonical_name(name) for name in names} == names
    assert activations.name_for_model_type("gpt_oss") == "swigluoai"
    assert activations.name_for_model_type("no_such_model") == ""


def test_vllm_names_survive_a_round_trip() -> None:
    for spec in ACTIVATIONS.values():
        for gated in [True] * spec.gated + [False] * spec.ungated:
            for interleaved in (False, True) if spec.halves_name else (False,):
                layer = activations.with_defaults(Activation(spec.name, gated, interleaved=interleaved))
                assert activations.from_vllm(activations.vllm_name(layer), gated) == layer
