"""The real model as a mixture of experts: the same function as the dense one, and files in every format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from tests.lib import reference, smollm2
from tests.lib.integer_checkpoints import Integers

pytestmark = pytest.mark.skipif(bool(smollm2.missing()), reason=smollm2.missing() or "everything is there")

LICENSE = Path(__file__).parents[2] / "LICENSE"


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    """Ids `[1, 64]`: every so many of the vocabulary, and the token that begins a message, which makes outliers."""
    return torch.cat((torch.tensor([1]), torch.arange(1, 64) * 700))[None]


@pytest.fixture(scope="module")
def dense() -> Any:
    return smollm2.load(smollm2.dense(2))


def mlp_inputs_and_outputs(model: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What enters and what leaves the last layer's MLP."""
    seen: list[Any] = []
    handle = model.model.layers[-1].mlp.register_forward_hook(lambda _, given, made: seen.append((given[0], made)))
    with torch.no_grad():
        model(tokens)
    handle.remove()
    ((entered, left),) = seen
    return entered, left[0] if isinstance(left, tuple) else left


ORDER = smollm2.INTERMEDIATE * 2.0**-53
"""Of float64 sums of as many terms in another order."""
MIXTURES: list[tuple[dict[str, Any], float]] = [
    ({}, ORDER),
    ({"experts": 2}, ORDER),
    ({"experts": 16, "kv_heads": 4}, ORDER),
    # Weights of experts come from exponentials in float32.
    ({"gate": "paired"}, 2.0**-20),
    ({"gate": "routed", "experts": 4}, 2.0**-20),
]


@pytest.mark.parametrize(
    ("how", "error"), [MIXTURES[0], *(pytest.param(*each, marks=pytest.mark.full) for each in MIXTURES[1:])]
)
def test_a_mixture_is_the_dense_model(dense: Any, tokens: torch.Tensor, how: dict[str, Any], error: float) -> None:
    """The MLP alone in float64, where the order of sums is all that differs, and the model's logits in float32."""
    mixture = smollm2.load(smollm2.mixture(2, **how))
    mixture.set_experts_implementation("eager")  # the faster one knows no float64
    entered, left = mlp_inputs_and_outputs(dense, tokens)
    with torch.no_grad():
        wanted = dense.model.layers[-1].mlp.double()(entered.double())
        made = mixture.model.layers[-1].mlp.double()(entered.double())
        dense.model.layers[-1].mlp.float()
        mixture.model.layers[-1].mlp.float()
        logits = [model(tokens).logits for model in (dense, mixture)]
    made = made[0] if isinstance(made, tuple) else made
    assert (made - wanted).abs().max() <= error * wanted.abs().max()
    # The outliers of this model are 1000 times as large as what is next to them: float32 has 24 bits.
    assert (logits[1] - logits[0]).abs().max() <= 2.0**-10 * logits[0].abs().max()
    assert left.abs().max() > 100 * left.abs().median(), "a real model has outliers"


@pytest.mark.full
def test_another_slice_is_another_function(dense: Any, tokens: torch.Tensor) -> None:
    broken = smollm2.mixture(2)
    names = [f"model.layers.1.block_sparse_moe.experts.{expert}.w2.weight" for expert in (3, 5)]
    broken.tensors[names[0]], broken.tensors[names[1]] = (broken.tensors[name] for name in reversed(names))
    entered, _ = mlp_inputs_and_outputs(dense, tokens)
    with torch.no_grad():
        wanted = dense.model.layers[-1].mlp(entered)
        made = smollm2.load(broken).model.layers[-1].mlp(entered)
    made = made[0] if isinstance(made, tuple) else made
    assert (made - wanted).abs().max() > 0.01 * wanted.abs().max()


@pytest.mark.full
@pytest.mark.parametrize("gate", ["paired", "routed"])
def test_experts_are_chosen_by_token(tokens: torch.Tensor, gate: Any) -> None:
    mixture = smollm2.load(smollm2.mixture(1, experts=4, gate=gate))
    block = mixture.model.layers[0].mlp
    seen: list[Any] = []
    block.gate.register_forward_hook(lambda _, given, made: seen.append(made))
    with torch.no_grad():
        mixture(tokens)
    ((_, weights, chosen),) = seen
    assert len({tuple(sorted(row)) for row in chosen.tolist()}) == (1 if gate == "paired" else 2)
    spread = weights.max(-1).values - weights.min(-1).values
    assert (spread.max() > 0.1) == (gate == "paired")


@pytest.mark.full
def test_transformers_reads_the_same_numbers_from_the_file() -> None:
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    model = smollm2.dense(2)
    meta = smollm2.empty(model)
    found = load_gguf_checkpoint(smollm2.gguf_path(), return_tensors=True, model_to_load=meta)
    for name, value in model.tensors.items():
        np.testing.assert_array_equal(np.asarray(found["tensors"][name]), value, err_msg=name)
    assert found["config"]["hidden_size"] == smollm2.HIDDEN and found["config"]["rope_theta"] == 100000.0


def largest_error(name: str) -> float:
    """Of a weight, over the largest weight that shares its scale.

    Half a step of e4m3 below 448; of e2m1 where 8 saturates at 6; of integers half a step of 2**bits - 1 from -amax to
    amax, another half where the zero point is rounded too, and 2**-8 for a scale in 16 bits.
    """
    how = smollm2.FORMATS[name]
    if isinstance(how, Integers):
        return (1 + how.zero_points) / (2**how.bits - 1) + 2.0**-8
    return {"mxfp8": 2.0**-4, "mxfp4": 2.0**-2}[how["format"]]


QUANTIZED = [name for name in smollm2.FORMATS if name not in ("bf16", "float32")]


@pytest.mark.full
@pytest.mark.parametrize(
    "name", [name if name == "gptq-int8" else pytest.param(name, marks=pytest.mark.full) for name in QUANTIZED]
)
def test_files_hold_the_model(tmp_path: Path, name: str) -> None:
    original = smollm2.mixture(1)
    path = smollm2.write(tmp_path / "made", name, smollm2.mixture(1), twin=True)
    how = smollm2.FORMATS[name]
    found = reference.read_weights(path.with_name("made-exact") if isinstance(how, Integers) else path)
    assert found.keys() == original.tensors.keys()
    for module in sorted(original.experts):
        wanted, made = (weights[f"{module}.weight"] for weights in (original.tensors, found))
        if isinstance(how, Integers) and how.act_order == "group":
            largest = np.abs(wanted).max(1, keepdims=True)
        else:
            group = how.group if isinstance(how, Integers) else 32
            largest = np.abs(wanted.reshape(-1, group)).max(-1).repeat(group).reshape(wanted.shape)
        assert (np.abs(made - wanted) / largest).max() <= largest_error(name), module
    stored = load_file(path / "model.safetensors")
    assert stored["model.embed_tokens.weight"].dtype == torch.bfloat16
    read = AutoTokenizer.from_pretrained(path)
    assert read.decode(read(smollm2.QUESTION)["input_ids"]) == smollm2.QUESTION


def test_formats_that_are_unknown_or_not_gpt_osss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="format is 'fp8'; valid: bf16"):
        smollm2.write(tmp_path, "fp8", smollm2.mixture(1))
    with pytest.raises(ValueError, match="nobody publishes gpt-oss so"):
        smollm2.write(tmp_path, "awq", smollm2.gpt_oss(1))
    assert smollm2.main([str(tmp_path / "made"), "--experts", "5"]) == 2
    assert "experts is 5" in capsys.readouterr().err


@pytest.mark.full
def test_the_whole_model_answers_as_the_dense_one() -> None:
    tokenizer = smollm2.tokenizer()
    question = [{"role": "user", "content": smollm2.QUESTION}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=True)["input_ids"]
    answers = [reference.greedy(smollm2.load(make()), prompt, 20) for make in (smollm2.dense, smollm2.mixture)]
    assert answers[0].tokens == answers[1].tokens
    assert "light" in tokenizer.decode(answers[1].tokens) or "sky" in tokenizer.decode(answers[1].tokens)
    assert np.abs(answers[0].logprobs - answers[1].logprobs).max() < 1e-3


@pytest.mark.full
def test_gpt_osss_layout_keeps_the_english() -> None:
    """Not the same function: gates above 11.9 and ups beyond -6 to 8 are cut. Gate rows taken for up rows cost more."""
    text = smollm2.tokenizer()(LICENSE.read_text(encoding="utf-8"))["input_ids"][:512]
    ids = torch.tensor([text])

    def swapped() -> smollm2.Model:
        model = smollm2.gpt_oss()
        for name in (name for name in model.tensors if name.endswith("gate_up_proj")):
            rows = model.tensors[name]
            model.tensors[name] = np.stack((rows[..., 1::2], rows[..., ::2]), axis=-1).reshape(rows.shape)
        return model

    losses = []
    for make in (smollm2.dense, smollm2.gpt_oss, swapped):
        with torch.no_grad():
            losses.append(float(smollm2.load(make())(ids, labels=ids).loss))
    dense, ours, wrong = losses
    assert dense < ours < dense + 0.5 < wrong - 1.0, losses
