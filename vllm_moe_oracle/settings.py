"""Every setting of the plugin: name, type, default, help. The only reader of the environment.

A setting comes, later ones over earlier ones, from its default, from the environment variable ``MOE_ORACLE_<NAME>``,
from vLLM's ``--additional-config '{"moe_oracle": {"<name>": ...}}'``, and in the command line tool from ``--set
name=value``. Those that are settled before there is an engine (`enabled`, `force`, `strict`) are refused in
``--additional-config``. An unknown name, or a value that a setting cannot take, is an error that lists what is valid;
nothing is ignored. A variable of ours that is set to nothing (``MOE_ORACLE_BACKEND=``) is as good as not set, which is
how scripts and container files hand on what nobody chose.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

from .errors import SettingError, meant
from .oracle import objectives
from .oracle.overrides import Override, parse

PREFIX = "MOE_ORACLE_"
SECTION = "moe_oracle"
AUTO = "auto"
_RECORDS = "_MOE_ORACLE_RECORDS"
"""No setting: one process of a server sets it for those that it starts."""

OnUnavailable = Literal["error", "fallback"]
Activations = Literal["checkpoint", "16bit"]
SelfCheck = Literal["off", "group", "all", "strict"]
ScaleRule = Literal["ceil", "floor", "llm-compressor"]
"""The rules of `vllm_moe_oracle.schemes.mxfp8.scale_exponents`, which imports torch."""

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


def _boolean(value: object, where: str) -> bool:
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower()
    if word in _TRUE or word in _FALSE:
        return word in _TRUE
    raise SettingError(f"{value!r} is no truth value", f"Write one of {', '.join(sorted(_TRUE | _FALSE))}", where)


def _seconds(value: object, where: str) -> float:
    try:
        seconds = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise SettingError(f"{value!r} is no time in seconds", "Write a number above 0", where)
    return seconds


def _part(value: object, where: str) -> float:
    text = str(value).strip()
    try:
        part = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        part = math.nan
    if isinstance(value, bool) or not 0 <= part < 1:
        raise SettingError(f"{value!r} is no part of a whole", "Write a number from 0 to 1, or a percentage: 3%", where)
    return part


def _objective(value: object, where: str) -> str:
    if isinstance(value, Mapping):
        value = ",".join(f"{tokens}:{weight}" for tokens, weight in value.items())
    return objectives.parse(_name(value, where), where).name


def _name(value: object, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise SettingError(f"{value!r} is not a name", where=where)
    return value.strip()


def _path(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise SettingError(f"{value!r} is not a path", where=where)
    return value


def _names(value: object, where: str) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [part for part in value.split(",") if part.strip()]
    if not isinstance(value, list | tuple):
        raise SettingError(f"{value!r} is no list of names", "Separate names with commas", where)
    return tuple(_name(part, where) for part in value)


def _overrides(value: object, where: str) -> tuple[Override, ...]:
    if isinstance(value, str):
        value = [part for part in value.split(";") if part.strip()]
    if isinstance(value, Mapping):
        pairs = [(_name(pattern, where), _name(backend, where)) for pattern, backend in value.items()]
    elif isinstance(value, list | tuple) and all(isinstance(part, str) for part in value):
        # The last "=" separates: an expression may hold one, a backend's name does not.
        pairs = [(before, after) for before, _, after in (str(part).rpartition("=") for part in value)]
    else:
        remedy = (
            r'Write re:layers\.[0-9]\.=marlin (several with ";"), or a JSON object {"re:layers\\.[0-9]\\.": "marlin"}'
        )
        raise SettingError(f"{value!r} is no list of overrides", remedy, where)
    return tuple(parse(pattern, backend, where) for pattern, backend in pairs)


def _one_of(words: tuple[str, ...]) -> Callable[[object, str], str]:
    def read(value: object, where: str) -> str:
        word = str(value).strip().lower()
        if word in words:
            return word
        raise SettingError(f"{value!r} is not one of {', '.join(words)}", where=where)

    return read


def _setting(default: Any, read: Callable[[object, str], Any], help: str, metavar: str, early: bool = False) -> Any:
    """A field; `early` when it counts before there is an engine whose ``--additional-config`` could set it."""
    return field(default=default, metadata={"read": read, "help": help, "metavar": metavar, "early": early})


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user asked for. `sources` says where each setting that is not at its default came from."""

    enabled: bool = _setting(True, _boolean, "use the plugin; 0 leaves vLLM as it is", "0|1", early=True)
    force: bool = _setting(
        False, _boolean, "serve vLLM releases outside the tested range instead of standing down", "0|1", early=True
    )
    strict: bool = _setting(
        False,
        _boolean,
        "a reason to stand down is an error instead; so is a setting that would come to nothing (an override without "
        "layers, a profile that cannot be read)",
        "0|1",
        early=True,
    )
    backend: str = _setting(AUTO, _name, "backend for every layer, or auto; goes before vLLM's --moe-backend", "NAME")
    overrides: tuple[Override, ...] = _setting(
        (),
        _overrides,
        "backends for the layers whose name matches a regular expression; goes before all",
        "RE=NAME;...",
    )
    disable: tuple[str, ...] = _setting((), _names, "backends that are no candidates", "NAME,...")
    on_unavailable: OnUnavailable = _setting(
        "error",
        _one_of(get_args(OnUnavailable)),
        "what an explicitly chosen backend that cannot run leads to; a fallback is logged",
        "error|fallback",
    )
    activations: Activations = _setting(
        "checkpoint",
        _one_of(get_args(Activations)),
        "precision of the experts' inputs: what the checkpoint declares, or left in the model's 16 bits",
        "checkpoint|16bit",
    )
    allow_activation_quantization: bool = _setting(
        False, _boolean, "also offer backends that quantise activations which nobody asked to quantise", "0|1"
    )
    self_check: SelfCheck = _setting(
        "group",
        _one_of(get_args(SelfCheck)),
        "compare kernels with the reference at load: not, one layer of each group, every layer, or one layer of each "
        "group with a refusal to start where it fails",
        "off|group|all|strict",
    )
    mxfp8_scale_rule: ScaleRule = _setting(
        "ceil",
        _one_of(get_args(ScaleRule)),
        "how weights that are quantised to MXFP8 while they load get their scales: as vLLM, as the MX specification, "
        "or as the compressed-tensors package",
        "ceil|floor|llm-compressor",
    )
    mxfp4_scale_rule: ScaleRule = _setting(
        "llm-compressor",
        _one_of(get_args(ScaleRule)),
        "the same for experts that are quantised to MXFP4 while they load; vLLM does as the compressed-tensors package",
        "ceil|floor|llm-compressor",
    )
    agreement_seconds: float = _setting(
        600.0,
        _seconds,
        "how long a rank waits for the others, which may still load or check, before it gives up with an error",
        "SECONDS",
    )
    measured: bool = _setting(True, _boolean, "choose by measurements, where there are some of such a machine", "0|1")
    objective: str = _setting(
        "balanced",
        _objective,
        "numbers of tokens that a measured choice is for: decode (1 to 256), prefill (512 to 4096), balanced (half and "
        "half), or weights by number of tokens",
        "decode|prefill|balanced|TOKENS:WEIGHT,...",
    )
    margin: float = _setting(
        0.03, _part, "by what part a backend must be faster than the one that comes first, to be taken instead", "PART"
    )
    second_copy: bool = _setting(
        False,
        _boolean,
        "let a layer keep its weights for two backends, one for few tokens and one for many, where that is faster",
        "0|1",
    )
    ragged_shards: bool = _setting(
        False,
        _boolean,
        "cut integer experts between whole scale groups where equal shares would split one: ranks then differ in size",
        "0|1",
    )
    cache: str = _setting(
        "", _path, "folder of the measurements that tune keeps; by default the user's cache folder", "DIR"
    )
    profile: str = _setting("", _path, "file of measurements that goes before the cache; never written", "FILE")
    report: str = _setting("", _path, "file that each process appends its decisions to, one JSON object a line", "PATH")
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)

    def source(self, name: str) -> str:
        """Where the setting's value came from: ``default`` or the place that set it."""
        return self.sources.get(name, "default")


FIELDS: Mapping[str, dataclasses.Field[Any]] = MappingProxyType(
    {item.name: item for item in dataclasses.fields(Settings) if "read" in item.metadata}
)


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return PREFIX + name.upper()


def _unknown(name: str, valid: list[str], where: str) -> SettingError:
    return SettingError(f"unknown setting {name!r}", f"{meant(name, valid)}Valid are {', '.join(valid)}", where)


def load(
    environment: Mapping[str, str] | None = None,
    additional_config: object = None,
    assignments: Mapping[str, str] | None = None,
) -> Settings:
    """The settings in force.

    Args:
        environment: environment variables, of which empty ones do not count; None reads the process's own.
        additional_config: vLLM's ``additional_config``; our part is its key ``moe_oracle``.
        assignments: ``--set`` of the command line tool, by setting name.

    Raises:
        SettingError: an unknown name, or a value that the setting cannot take.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}

    def put(name: str, value: object, where: str) -> None:
        values[name] = FIELDS[name].metadata["read"](value, where)
        sources[name] = where

    variables = {variable(name): name for name in FIELDS}
    for key, value in sorted((os.environ if environment is None else environment).items()):
        if key.startswith(PREFIX):
            if key not in variables:
                raise _unknown(key, sorted(variables), "environment")
            if not value:
                continue
            put(variables[key], value, f"environment variable {key}")

    for name, setting in _section(additional_config).items():
        if name not in FIELDS:
            raise _unknown(str(name), sorted(FIELDS), f"--additional-config {SECTION}")
        if FIELDS[name].metadata["early"]:
            rule = "this is settled when the process starts, before an engine has a config"
            raise SettingError(rule, f"Set {variable(name)} instead", f"--additional-config {SECTION}.{name}")
        put(name, setting, f"--additional-config {SECTION}.{name}")

    for name, word in (assignments or {}).items():
        if name not in FIELDS:
            raise _unknown(name, sorted(FIELDS), "--set")
        put(name, word, f"--set {name}")
    return Settings(**values, sources=sources)


def strict_wanted(environment: Mapping[str, str] | None = None) -> bool:
    """The setting `strict` by itself, however wrong the others are; a value that cannot be read counts as set.

    Args:
        environment: environment variables; None reads the process's own.
    """
    value = (os.environ if environment is None else environment).get(variable("strict"))
    try:
        return bool(value) and _boolean(value, "")
    except SettingError:
        return True


def _section(additional_config: object) -> Mapping[str, object]:
    section = additional_config.get(SECTION, {}) if isinstance(additional_config, Mapping) else {}
    if not isinstance(section, Mapping):
        remedy = 'Write {"moe_oracle": {"backend": "emulation"}}'
        raise SettingError(f"{section!r} is no JSON object", remedy, f"--additional-config {SECTION}")
    return section


def environment(name: str) -> str | None:
    """A variable that is not ours, for the few places that have to look at one."""
    return os.environ.get(name)


VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Which GPUs a process sees."""


@contextlib.contextmanager
def seeing(gpu: str | None) -> Iterator[None]:
    """Processes that are begun meanwhile see one GPU, before anything that they import can ask for GPUs.

    Args:
        gpu: as `VISIBLE` has it; None leaves what this process sees.
    """
    before = os.environ.get(VISIBLE)
    if gpu is not None:
        os.environ[VISIBLE] = gpu
    try:
        yield
    finally:
        if before is not None:
            os.environ[VISIBLE] = before
        elif gpu is not None:
            del os.environ[VISIBLE]


def batch_invariant() -> bool:
    """Whether vLLM's ``VLLM_BATCH_INVARIANT`` asks for it, as vLLM reads it.

    Raises:
        SettingError: it is no integer, which vLLM would not start with.
    """
    value = environment("VLLM_BATCH_INVARIANT")
    try:
        return value is not None and bool(int(value))
    except ValueError as error:
        raise SettingError(f"{value!a} is no integer", "Set it to 1 or 0", "VLLM_BATCH_INVARIANT") from error


def records_folder() -> str | None:
    """Where the processes of one server leave their decisions for its metrics endpoint; None where there is no such."""
    return os.environ.get(_RECORDS)


def set_records_folder(folder: str | None) -> None:
    """Names that folder to this process and those that it starts; None takes the name away."""
    if folder is None:
        os.environ.pop(_RECORDS, None)
    else:
        os.environ[_RECORDS] = folder


def cache_folder(settings: Settings) -> Path:
    """Where measurements are kept: the setting `cache`, or the user's cache folder by the XDG rules.

    Raises:
        SettingError: there is no home folder to put it into.
    """
    if settings.cache:
        return Path(settings.cache).expanduser()
    base = environment("XDG_CACHE_HOME")
    if base and Path(base).is_absolute():  # the XDG rules: relative paths are to be ignored
        return Path(base) / "vllm-moe-oracle"
    try:
        return Path.home() / ".cache" / "vllm-moe-oracle"
    except RuntimeError as error:
        raise SettingError(f"there is no cache folder: {error}", "Set MOE_ORACLE_CACHE to one", "cache") from error


def not_selected() -> str:
    """How vLLM's ``VLLM_PLUGINS`` leaves this plugin out, in words; "" when it does not."""
    chosen = environment("VLLM_PLUGINS")
    if chosen is None or SECTION in chosen.split(","):
        return ""
    return f"not selected by VLLM_PLUGINS={chosen!r}"
