"""Expressions of checkpoints say what Python's own matcher says, and never take long."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_moe_oracle.errors import CheckpointError
from vllm_moe_oracle.expressions import Expression

NAMES = [
    "", "lm_head", "model.layers.0.mlp.gate", "model.layers.10.mlp.experts.3.gate_proj", "a", "ab", "aab", "A.B\n",
    "\n",     "model.layers.1.mlp.shared_expert.up_proj", "aaaaaaaaaaaaaaaa", "x-y_z 9",
]  # fmt: skip

USUAL = [
    "", "lm_head", ".*lm_head", r"model\.layers\.\d+\.mlp\.gate$", r".*\.mlp\.(gate|shared_expert).*", "(a|ab)(c|bcd)*",
    r"model\.layers\.(0|1[0-9])\..*proj", "a{2,3}b?", "a*?b", "(?:a+)+b", r"\Aa", r"a\Z", "a$", "^a", r"\bmodel\b",
    r"a\B", "[^a-c]", "[a-c]+$", r"[\d\w.]*", r"\S+\s\d", "(?i)MODEL", "(?i:a)B", "(?=model)m", "(?!model).", "a.b",
    "(?s)a.b.", "(?<=a)b", r".*(?<!\.)proj", "(?m)^$", "(a{0,2}){3}b", "x-y_z 9", r"\W*", "()*a", "(?:)+",
    "a{0}b", "a|", "|a",
]  # fmt: skip


@pytest.mark.parametrize("pattern", USUAL)
def test_it_says_what_python_says(pattern: str) -> None:
    expression = Expression(pattern, "here")
    for name in NAMES:
        assert expression.match(name) == (re.match(pattern, name) is not None), name
        assert expression.search(name) == (re.search(pattern, name) is not None), name


LETTERS = st.sampled_from("ab.")
ATOMS = st.one_of(
    LETTERS.map(re.escape),
    st.sampled_from([".", "[ab]", "[^a]", r"\w", r"\b", "^", "$", "(?=a)", "(?!b)", "(?<=a)", "(?<!b)"]),
)
PATTERNS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda two: f"(?:{two[0]}|{two[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{1,2}", "*?", "{2}"])).map(
            lambda two: f"(?:{two[0]}){two[1]}"
        ),
    ),
    max_leaves=6,
)


@settings(max_examples=400)
@given(pattern=PATTERNS, text=st.text("ab.", max_size=8))
def test_any_expression_says_what_python_says(pattern: str, text: str) -> None:
    expression = Expression(pattern, "here")
    assert expression.match(text) == (re.match(pattern, text) is not None)
    assert expression.search(text) == (re.search(pattern, text) is not None)


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+$", "(a|aa)+$", "(.*a){20}$", "(a*)*b", ".*.*.*.*.*.*.*.*x", "((a{1,50}){1,50}){1,50}b",
        "((((a?){40}){40}){40}){40}x", "((((b?){40}){40}){40}){40}x", "(?=.*(?=.*(?=.*(?=.*zzz))))",
        "(?!(?=.*(?=.*(?=.*!)))).*",
    ],
)  # fmt: skip
def test_hostile_expressions_are_matched_soon(pattern: str) -> None:
    begin = time.perf_counter()
    expression = Expression(pattern, "here")
    assert not expression.match("a" * 60 + "!")
    expression.search("a" * 60 + "!")
    assert time.perf_counter() - begin < 2.0


@pytest.mark.parametrize("pattern", ["((((a{1,9}){1,9}){1,9}){1,9}){1,9}b", "(((((a|aa)?a?)+)+)+)+(((a?)+)+)+b" * 40])
def test_an_expression_that_takes_too_long_is_an_error(pattern: str) -> None:
    expression = Expression(pattern, "config.json, ignore")
    begin = time.perf_counter()
    with pytest.raises(CheckpointError, match=r"takes more than 1000000 steps .* Write it without repeats inside"):
        for length in range(2000):  # what all of its matches take together is bounded too
            expression.search("a" * 300 + str(length))
    assert time.perf_counter() - begin < 20.0


def test_usual_expressions_can_be_matched_against_any_number_of_names() -> None:
    expression = Expression(r".*\.mlp\.(gate|shared_expert).*", "here")
    for index in range(30_000):
        assert expression.match(f"model.layers.{index}.mlp.gate")


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(", "is no regular expression: missing )"),
        ("a{99999999999}", "is no regular expression"),
        (r"(a)\1", "has groupref, which cannot be matched in bounded time"),
        ("(?>a+)b", "has atomic group"),
        ("a++b", "has possessive repeat"),
        ("(a)?(?(1)b|c)", "has groupref exists"),
        ("(" * 60 + "a" + ")" * 60, "has more than 50 groups inside each other"),
        ("(" * 5000 + "a" + ")" * 5000, "is no regular expression"),
    ],
    ids=["open", "overflow", "reference", "atomic", "possessive", "condition", "nested", "deep"],
)
def test_what_cannot_be_followed_is_refused_with_the_place(pattern: str, message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        Expression(pattern, "config.json, ignore")
    assert message in str(caught.value) and str(caught.value).startswith("config.json, ignore: ")
