"""The local cache of the Hugging Face Hub, as its own library keeps it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_moe_oracle.checkpoint.hub_cache import is_hub_name
from vllm_moe_oracle.settings import hub_cache_dir

VARIABLES = ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME")


@pytest.mark.parametrize("given", [(), VARIABLES[2:], VARIABLES[1:], VARIABLES], ids="-".join)
def test_the_folder_is_the_librarys(given: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    for name in (*VARIABLES, "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    for name in given:
        monkeypatch.setenv(name, str(tmp_path / name))
    code = "from huggingface_hub import constants; print(constants.HF_HUB_CACHE)"
    theirs = subprocess.run([sys.executable, "-c", code], env=os.environ, capture_output=True, text=True, check=True)
    assert str(hub_cache_dir()) == theirs.stdout.strip()


@pytest.mark.parametrize("word", ["Qwen/Qwen3-30B-A3B", "openai/gpt-oss-20b", "a_b/c.d"])
def test_names_of_the_hub(word: str) -> None:
    assert is_hub_name(word)


@pytest.mark.parametrize(
    "word", ["config.json", "../model", "/a/b", "a/b/c", "a/..\n", "a b/c", "é/b", "/", "", "c/q.json"]
)
def test_what_is_no_name_of_the_hub(word: str) -> None:
    assert not is_hub_name(word)
