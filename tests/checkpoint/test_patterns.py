"""Patterns of checkpoint configs match as Python's `re` does, in bounded time."""

from __future__ import annotations

import fnmatch
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_moe_oracle.core import patterns
from vllm_moe_oracle.core.patterns import (
    BoundedPattern,
    MatchBudget,
    NameParts,
    PatternList,
    SearchList,
    WildcardPattern,
)
from vllm_moe_oracle.errors import CheckpointError

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


def test_matches_as_python_does() -> None:
    for text in USUAL:
        pattern = BoundedPattern(text, MatchBudget("here"))
        for name in NAMES:
            assert pattern.match(name) == (re.match(text, name) is not None), (text, name)
            assert pattern.search(name) == (re.search(text, name) is not None), (text, name)


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
@given(text=PATTERNS, name=st.text("ab.", max_size=8))
def test_random_patterns_match_as_python_does(text: str, name: str) -> None:
    pattern = BoundedPattern(text, MatchBudget("here"))
    assert pattern.match(name) == (re.match(text, name) is not None)
    assert pattern.search(name) == (re.search(text, name) is not None)


HOSTILE = [
    "(a+)+$", "(a|aa)+$", "(.*a){20}$", "(a*)*b", ".*.*.*.*.*.*.*.*x", "((a{1,20}){1,20}){1,20}b",
    "(((a?){20}){20}){20}x", "(?=.*(?=.*(?=.*(?=.*zzz))))", "(?!(?=.*(?=.*(?=.*!)))).*", "(a{10000})b",
    "(?R)a", "(?:a|b|ab){e}(?:a+)+c", "(?(DEFINE)(?P<q>(?&q)a))(?&q)", "((a)|(b))*" * 1000, "(?>(a|aa)+)+$",
    "(((((a|aa)?a?)+)+)+)+(((a?)+)+)+b" * 40,
]  # fmt: skip
"""Patterns that backtrack exponentially, recurse, or compile into large programs."""


def test_hostile_patterns_end_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "MAX_SECONDS", 0.1)  # each takes all of it
    for text in HOSTILE:
        start = time.process_time()
        try:
            pattern = BoundedPattern(text, MatchBudget("config.json, ignore"))
            for length in range(500):  # the limit holds for all matches together
                pattern.match("a" * 60 + "!" + str(length))
                pattern.search("a" * 60 + "!" + str(length))
        except CheckpointError as error:
            assert str(error).startswith("config.json, ignore: ")
            said = ("calls itself or one of its groups", "take more than 0.1 s to match names of layers")
            assert any(words in str(error) for words in said), text
        assert time.process_time() - start < 2.0, text


def test_a_usual_pattern_matches_any_number_of_names() -> None:
    pattern = BoundedPattern(r".*\.mlp\.(gate|shared_expert).*", MatchBudget("here"))
    for index in range(30_000):
        assert pattern.match(f"model.layers.{index}.mlp.gate")


REFUSED = {
    "open": ("(", "is not a regular expression: missing )"),
    "overflow": ("a{99999999999}", "repeats a part more than 10000 times"),
    "nested": ("((((a?){40}){40}){40}){40}x", "repeats a part more than 10000 times"),
    "unbounded": ("(a{2000,}){20,}", "repeats a part more than 10000 times"),
    "deep": ("(" * 5000 + "a" + ")" * 5000, "is not a regular expression"),
    "long": (".*" + "a" * 20_000, "has 20002 characters, more than 20000"),
    "flags": ("(?a)(?u)x", "is not a regular expression: "),
    "recursion": ("(?R)", "calls itself or one of its groups"),
    "sets of sets": ("(?iV1)" + "[\\w--a]|" * 2200, "has the flag V1"),
    "scoped flag": ("a(?iV1:b)", "has the flag V1"),
    "digits": ("a{" + "9" * 5000 + "}", "repeats a part more than 10000 times"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_patterns_are_named_with_their_place(kind: str) -> None:
    text, message = REFUSED[kind]
    with pytest.raises(CheckpointError) as caught:
        BoundedPattern(text, MatchBudget("config.json, ignore"))
    assert message in str(caught.value) and str(caught.value).startswith("config.json, ignore: ")


def test_all_expressions_of_a_config_share_one_budget() -> None:
    """A thousand expressions that each backtrack for long end as soon as one does."""
    start = time.process_time()
    budget = MatchBudget("config.json, ignore")
    tried = PatternList([f"(a|aa)+{number}$" for number in range(1000)], budget)
    with pytest.raises(CheckpointError, match=r"take more than 1\.0 s .* Write fewer of them, without nested rep"):
        tried.first(["a" * 100 + "!"])
    assert time.process_time() - start < 2 * patterns.MAX_SECONDS


@settings(max_examples=200)
@given(
    texts=st.lists(
        st.one_of(PATTERNS, st.sampled_from(USUAL), st.text("ab.^$|?", max_size=5).map(re.escape)), max_size=6
    ),
    names=st.lists(st.text("ab.", max_size=6), max_size=3),
    before=st.none() | st.integers(0, 6),
)
def test_a_list_gives_the_first_expression_that_matches(texts: list[str], names: list[str], before: int | None) -> None:
    expected = [at for at, text in enumerate(texts) if any(re.match(text, name) for name in names)]
    expected = [at for at in expected if before is None or at < before]
    found = PatternList(texts, MatchBudget("here")).first(names, before)
    assert found == (expected[0] if expected else None)


@pytest.mark.parametrize(
    "text", ["a(?i)b", "ab|b", "a(b|c)|b", "ab?", "ab{0,2}", "ab*", "[(a|b)]", r"a\(b|c\)", "(?i)ab"]
)
def test_a_prefix_is_what_every_match_starts_with(text: str) -> None:
    """Each of these matches a name that does not start with its first letters."""
    import regex

    patterns = PatternList([text], MatchBudget("here"))
    for name in ("a", "b", "ab", "aB", "AB", "B", "ac", "(", "c)"):
        assert (patterns.first([name]) is not None) == (regex.match(text, name) is not None), name


def test_a_wildcard_matches_as_fnmatch_does() -> None:
    budget = MatchBudget("here")
    for text in ("*", "a*", "*.b", "a?c", "[ab]c", "[!a]c", "model.layers.*.mlp"):
        wildcard = WildcardPattern(text, budget)
        for name in NAMES:
            assert wildcard.match(name, budget) == fnmatch.fnmatchcase(name, text), (text, name)
    with pytest.raises(CheckpointError, match="has 30000 characters"):
        WildcardPattern("*" * 30_000, budget)


@given(st.lists(st.text("ab.", max_size=5), max_size=60), st.text("ab.", max_size=12))
def test_parts_of_a_name_are_those_that_it_holds(parts: list[str], name: str) -> None:
    """By either way: of few texts each is looked for, of many each part of the name is looked up."""
    found = NameParts(parts, MatchBudget("here"))
    held = {part for part in parts if part in name}
    assert {*found.within(name)} == held and found.any_within(name) == bool(held)


def test_long_lists_of_names_take_bounded_time() -> None:
    """200,000 names of 5 lengths, looked up in as many."""
    names = [f"model.layers.{index}.mlp.experts" for index in range(200_000)]
    parts = NameParts([f"{name}.x" for name in names], MatchBudget("here"))
    begin = time.thread_time()
    with pytest.raises(CheckpointError, match=r"take more than 1\.0 s"):
        for _ in range(40):
            assert not any(map(parts.any_within, names))
    assert time.thread_time() - begin < 2 * patterns.MAX_SECONDS


UNITS = st.sampled_from([r"\.", r"\d", r"\d+", "[0-9]*", ".", ".*", "a", "b", "1", "(a|b1)", "(?:b|a)?"])


@settings(max_examples=400)
@given(
    texts=st.lists(
        st.one_of(
            PATTERNS,
            st.sampled_from(USUAL),
            st.tuples(
                st.sampled_from(["", "^"]), st.lists(UNITS, max_size=6).map("".join), st.sampled_from(["", "$"])
            ).map("".join),
        ),
        max_size=6,
    ),
    names=st.lists(st.text("ab.1\n", max_size=8), max_size=3),
)
def test_every_expression_that_is_found_in_a_name_is_possible(texts: list[str], names: list[str]) -> None:
    budget = MatchBudget("here")
    made = [BoundedPattern(text, budget) for text in texts]
    possible = SearchList(made, budget).possible(names)
    found = {at for at, text in enumerate(texts) if any(re.search(text, name) for name in names)}
    assert possible == sorted(possible) and found <= set(possible)


def test_a_list_of_expressions_for_every_layer_is_tried_for_its_own() -> None:
    budget = MatchBudget("here")
    texts = [rf".*model\.layers\.{layer}\.(mlp|self_attn)\.gate.*" for layer in range(2000)]
    searched = SearchList([BoundedPattern(text, budget) for text in texts], budget)
    assert searched.possible(["model.layers.17.mlp.experts"]) == [17]
