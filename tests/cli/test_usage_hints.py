"""What users type out of habit is taken, or answered with a hint."""

from __future__ import annotations

import pytest

from tests.lib.cli import CONFIGS, Run
from vllm_moe_oracle.cli.usage_hints import with_own_names

CONFIG = CONFIGS / "gpt-oss-20b.json"


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (("--tensor-parallel-size", "2"), ("--tp", "2")),
        (("--tensor-parallel-size=2",), ("--tp", "2")),
        (("-tp", "2"), ("--tp", "2")),
        (("-dp", "2", "-ep"), ("--dp", "2", "--ep")),
        (("--data-parallel-size", "2", "--enable-expert-parallel", "--enable-eplb"), ("--dp", "2", "--ep", "--eplb")),
        (("--enable-lora",), ("--lora",)),
    ],
    ids=str,
)
def test_vllms_names_of_options_are_taken(theirs: tuple[str, ...], ours: tuple[str, ...], run: Run) -> None:
    said = [run("explain", CONFIG, "--device", "nvidia-h200", "--json", *words) for words in (theirs, ours)]
    assert said[0].json == said[1].json and said[0].status == said[1].status == 0


def test_what_goes_on_to_vllm_gets_vllms_names() -> None:
    words = ["m", "--tp", "2", "--dp=2", "--ep", "-tp", "4", "--port", "1", "--", "--tp", "8"]
    assert with_own_names(words, ("--port",), True) == [
        "m", "--tensor-parallel-size", "2", "--data-parallel-size=2", "--enable-expert-parallel", "-tp", "4",
        "--port", "1", "--", "--tp", "8",
    ]  # fmt: skip
    assert with_own_names(words, ("--tp", "--port"), False)[5] == "--tp"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("explain", CONFIG, "h200"), "Hint: write --device h200"),
        (("explain", "h200", CONFIG), "Hint: explain takes one path; a GPU is named by --device"),
        (("explain", CONFIG, "--gpu", "h200"), "Hint: the option is --device"),
        (("explain", "h200"), "It is a GPU's name, for --device of explain: give a checkpoint"),
        (("explain", "gpt-oss-20b"), "It names a layer, which tune and bench take"),
        (("explain", "mxfp4:gpt-oss-20b@tp2"), "It names a layer, which tune and bench take"),
        (("explain", "--model", CONFIG), "Hint: the model is given without an option's name"),
        (("verify", "mxfp4:gpt-oss-20b"), "It names a layer, which tune and bench take"),
        (("verify", CONFIG, "--tp", "2"), "Hint: this command has one rank"),
        (("verify", CONFIG, "--tensor-parallel-size", "2"), "Hint: this command has one rank"),
        (("bench", CONFIG, "--device", "h200"), "Hint: explain answers for any GPU; this command runs on this machine"),
        (("tune", CONFIG, "h200"), "It is a GPU's name; leave it out"),
        (("tune", "gpt-os-20b"), "Did you mean gpt-oss-20b?"),
        (("tune", CONFIG, "-o", "x"), "Hint: give --jsonl FILE, --export FILE"),
        (("backends",), "Hint: status --verbose lists backends"),
        (("version",), "Hint: it is an option: --help, --version"),
        (("-V",), "Hint: --version prints the version"),
        (("doctor",), "Hint: status --check says"),
        (("statu",), "Did you mean 'status'?"),
        (("nonsense",), "No such command 'nonsense'."),
    ],
    ids=str,
)
def test_a_usage_error_says_what_was_meant(words: tuple[object, ...], said: str, run: Run) -> None:
    result = run(*words)
    assert (result.status, result.out) == (2, "") and said in result.messages
