"""Every setting of the plugin: name, type, default, help. The only reader of the environment.

The sources of a setting, in increasing precedence: its default, the environment variable ``MOE_ORACLE_<NAME>``, vLLM's
``--additional-config '{"moe_oracle": {"<name>": ...}}'`` and, in the command line tool, ``--set name=value``. Settings
that take effect before an engine has a config (`enabled`, `force`, `strict`) are refused in ``--additional-config``. An
unknown name or an invalid value is an error that lists the valid ones. Spaces around a value are removed; a variable
that is then empty (``MOE_ORACLE_BACKEND=``) counts as not set, because scripts and container files pass variables on
that way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

from .core.env_vars import ENV_PREFIX, is_meant_section, meant_variable
from .core.env_vars import env_var as env_var
from .core.field_checks import check_value
from .core.overrides import Override, parse_overrides
from .core.setting_values import (
    read_boolean,
    read_fraction,
    read_name,
    read_name_list,
    read_objective,
    read_one_of,
    read_path,
    read_seconds,
    read_seconds_or_off,
)
from .errors import SettingError, did_you_mean

CONFIG_SECTION = "moe_oracle"
AUTO = "auto"
_RECORDS_DIR_VAR = "_MOE_ORACLE_RECORDS"
"""Not a setting: the first process of a server sets it for the processes that it starts."""

OnUnavailable = Literal["error", "fallback"]
Activations = Literal["checkpoint", "16bit"]
SelfCheck = Literal["off", "group", "all", "strict"]
ScaleRule = Literal["ceil", "floor", "llm-compressor"]
"""The rules of `vllm_moe_oracle.schemes.mxfp8.e8m0_from_amax`, which imports torch."""


@dataclass(frozen=True, slots=True)
class Need:
    """What a setting needs of others to influence anything.

    Attributes:
        doc: where it has no effect, for the page of settings.
        missing: why it has none beside other settings and vLLM's ``--moe-backend`` (None where that is unknown); "" if
            it may have one.
        remedy: what the user can do then.
    """

    doc: str
    missing: Callable[[Settings, str | None], str]
    remedy: str = "Leave one of the two out"


def _why_no_times(chosen: Settings, moe_backend: str | None) -> str:
    return "" if chosen.use_measurements else f"{chosen.source('use_measurements')} switches measured times off"


def _why_no_choice(chosen: Settings, moe_backend: str | None) -> str:
    # `--moe-backend` names one, too, but not for layers of every format.
    leaves_some = chosen.on_unavailable == "fallback" or any(each.backend == AUTO for each in chosen.overrides)
    named = chosen.backend != AUTO and not leaves_some
    return f"{chosen.source('backend')} names the backend of every layer" if named else ""


def _why_nothing_is_named(chosen: Settings, moe_backend: str | None) -> str:
    return "" if chosen.names_backends or moe_backend != AUTO else "no backend is named, neither to run nor not to run"


_TIMES = Need("where `use_measurements` is 0", _why_no_times)
_CHOICE = Need("where `backend` names one, `on_unavailable` is error, and no override says auto", _why_no_choice)
_NAMED = Need(
    "where nothing names a backend: `backend`, `overrides`, `disable`, --moe-backend",
    _why_nothing_is_named,
    "Name a backend, or leave it out",
)


def _setting(
    default: Any,
    read: Callable[[object, str], Any],
    help: str,
    metavar: str,
    *,
    shared: bool,
    of_rank_0: bool = False,
    startup_only: bool = False,
    needs: tuple[Need, ...] = (),
    off: object = None,
) -> Any:
    """A field of `Settings`.

    Args:
        default: its default.
        read: reads a value.
        help: what it is, for people.
        metavar: what a value looks like.
        shared: the ranks of a model need the same value: it changes numerics, which backends may run, or what ranks
            do together. Ranks may differ in other settings.
        of_rank_0: it changes the order of the backends that may run, and all ranks take the order of rank 0.
        startup_only: it takes effect before an engine has an ``--additional-config``.
        needs: without which of other settings it has no effect.
        off: the value that switches it off, which is never in vain; None if there is none.
    """
    metadata = {"read": read, "help": help, "metavar": metavar, "shared": shared, "needs": needs, "off": off}
    return field(default=default, metadata=metadata | {"of_rank_0": of_rank_0, "startup_only": startup_only})


def _flag(default: bool, help: str, **marks: Any) -> Any:
    """A field of `Settings` that is on or off; see `_setting`."""
    return _setting(default, read_boolean, help, "0|1", off=False, **marks)


def _choice(words: Any, default: str, help: str, **marks: Any) -> Any:
    """A field of `Settings` with one of the values of a `Literal`; see `_setting`."""
    return _setting(default, read_one_of(get_args(words)), help, "|".join(get_args(words)), **marks)


@dataclass(frozen=True, slots=True)
class Settings:
    """The user's settings. `sources` has the origin of each one that is not at its default, `misspelled` an error for
    each key of ``--additional-config`` that is nearly ours, and `similar_variables` one for each such variable, which
    may be another program's."""

    enabled: bool = _flag(True, "use the plugin; 0 leaves vLLM unchanged", startup_only=True, shared=True)
    force: bool = _flag(
        False, "serve vLLM releases outside the tested range instead of standing down", startup_only=True, shared=False
    )
    strict: bool = _flag(
        False,
        "raise an error instead of standing down, and for settings without effect: those that this table says, keys "
        "that are nearly ours, overrides that decide no layer, and a profile that cannot be read",
        startup_only=True,
        shared=False,
    )
    backend: str = _setting(
        AUTO,
        read_name,
        "backend for every layer, or auto; a family's name (marlin, humming, ...) stands for its backend for the "
        "layer's format; takes precedence over vLLM's --moe-backend",
        "NAME",
        shared=True,
    )
    overrides: tuple[Override, ...] = _setting(
        (),
        parse_overrides,
        "backends for the layers whose name matches a regular expression; take precedence over everything else",
        "re:PATTERN=NAME;...",
        shared=True,
    )
    disable: tuple[str, ...] = _setting(
        (),
        read_name_list,
        "backends that must not be chosen; a family's name (marlin, humming, ...) stands for all of its backends",
        "NAME,...",
        shared=True,
    )
    on_unavailable: OnUnavailable = _choice(
        OnUnavailable,
        "error",
        "what happens when an explicitly chosen backend cannot run: an error, or a logged fallback",
        shared=True,
        needs=(_NAMED,),
    )
    activations: Activations = _choice(
        Activations,
        "checkpoint",
        "precision of the experts' inputs: what the checkpoint declares, or the model's 16-bit dtype",
        shared=True,
    )
    allow_activation_quantization: bool = _flag(
        False,
        "also accept backends that quantize activations although the checkpoint does not declare it; most "
        "of them run only if they are also chosen by name",
        shared=True,
    )
    self_check: SelfCheck = _choice(
        SelfCheck,
        "group",
        "compare kernels with the reference at load time: off never; group with all calls for one layer of each group "
        "of equal layers, and one call for each other layer; all with all calls for every layer; strict as group, and "
        "a failure is an error; unless it is off, the weights of all experts are also searched for NaN and for values "
        "that no kernel can compute with",
        shared=True,
    )
    mxfp8_scale_rule: ScaleRule = _choice(
        ScaleRule,
        "ceil",
        "rule for the scales of weights that are quantized to MXFP8 at load time: vLLM's (ceil), the MX "
        "specification's (floor) or the compressed-tensors package's",
        shared=True,
    )
    mxfp4_scale_rule: ScaleRule = _choice(
        ScaleRule,
        "llm-compressor",
        "the same for experts that are quantized to MXFP4 at load time; vLLM uses the compressed-tensors package's",
        shared=True,
    )
    rank_sync_timeout: float = _setting(
        600.0,
        read_seconds,
        "seconds that a rank waits for the other ranks, which may still load or check weights, before it fails",
        "SECONDS",
        shared=False,
    )
    use_measurements: bool = _flag(
        True,
        "choose by measured and predicted times, if there are any for this kind of machine",
        shared=False,
        of_rank_0=True,
    )
    measure_at_start: float = _setting(
        60.0,
        read_seconds_or_off,
        "seconds in which a server may measure layers that neither measurements nor predictions decide; it measures "
        "before it loads weights, in another process, and keeps the times in the cache; 0 is off",
        "SECONDS",
        shared=True,
        needs=(_TIMES, _CHOICE),
        off=0.0,
    )
    objective: str = _setting(
        "balanced",
        read_objective,
        "token counts that measured choices optimize: decode (1 to 256), prefill (512 to 4096), balanced (half and "
        "half), or weights by number of tokens",
        "decode|prefill|balanced|TOKENS:WEIGHT,...",
        shared=False,
        of_rank_0=True,
        needs=(_TIMES,),
    )
    min_time_saving: float = _setting(
        0.03,
        read_fraction,
        "fraction of the static choice's time that another backend must save to replace it",
        "FRACTION",
        shared=False,
        of_rank_0=True,
        needs=(_TIMES,),
    )
    allow_second_layout: bool = _flag(
        False,
        "let a layer keep its weights in two layouts, for a backend at few tokens and another at many, if that is "
        "faster",
        shared=False,
        of_rank_0=True,
        needs=(_TIMES, _CHOICE),
    )
    ragged_shards: bool = _flag(
        False,
        "shard integer experts at the boundaries of scale groups if equal shards would split one; ranks then differ in "
        "size",
        shared=True,
    )
    cache: str = _setting(
        "",
        read_path,
        "directory of the measurements that tune and measure_at_start write; by default in the user's cache directory",
        "DIR",
        shared=False,
        needs=(_TIMES,),
    )
    profile: str = _setting(
        "",
        read_path,
        "file of measurements that takes precedence over the cache; never written",
        "FILE",
        shared=False,
        needs=(_TIMES,),
    )
    report: str = _setting(
        "",
        read_path,
        "file to which each process appends its decisions, one JSON object per line",
        "PATH",
        shared=False,
    )
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    misspelled: tuple[SettingError, ...] = field(default=(), compare=False)
    similar_variables: tuple[SettingError, ...] = field(default=(), compare=False)

    @property
    def names_backends(self) -> bool:
        """Whether the user names backends to run or not to run."""
        return bool(self.backend != AUTO or self.overrides or self.disable)

    @property
    def why_ranks_do_not_measure(self) -> str:
        """Why several ranks measure nothing at a first start, with the remedy: while one measures, the others wait. ""
        where they may measure."""
        needed = self.measure_at_start + _WAIT_MARGIN
        if needed <= self.rank_sync_timeout:
            return ""
        rule = f"{self.measure_at_start:g} s do not fit into the {self.rank_sync_timeout:g} s that ranks wait"
        return f"{rule}; set {env_var('rank_sync_timeout')} to {needed:g} or more"

    def source(self, name: str) -> str:
        """The origin of a setting's value: ``default``, or what set it."""
        return self.sources.get(name, "default")


_WAIT_MARGIN = 30.0
"""Seconds that must lie between `measure_at_start` and `rank_sync_timeout`: a process that hangs is killed in them."""

FIELDS: Mapping[str, dataclasses.Field[Any]] = MappingProxyType(
    {item.name: item for item in dataclasses.fields(Settings) if "read" in item.metadata}
)


def without_effect(settings: Settings, moe_backend: str | None = None) -> tuple[SettingError, ...]:
    """What the user has set in vain: misspelled names, and values that cannot influence a server because of other
    settings. Values that switch off what is off in any case are not in vain, and nothing is where the plugin is off.

    Args:
        settings: the settings.
        moe_backend: vLLM's ``--moe-backend``; None where it is unknown.
    """
    if not settings.enabled:
        return ()
    found = [*settings.misspelled, *settings.similar_variables]
    for name, each in FIELDS.items():
        value = getattr(settings, name)
        if value in (each.default, each.metadata["off"]):
            continue
        missing = ((need, need.missing(settings, moe_backend)) for need in each.metadata["needs"])
        need, why = next(((need, why) for need, why in missing if why), (None, ""))
        if need is not None:
            found.append(SettingError(f"has no effect: {why}", need.remedy, settings.source(name)))
    return tuple(found)


def shared_values(settings: Settings) -> dict[str, Any]:
    """The settings that all ranks of a model need in common, by environment variable."""
    return _marked_values(settings, "shared")


def values_of_rank_0(settings: Settings) -> dict[str, Any]:
    """The settings by which rank 0 orders the backends for all ranks, by environment variable."""
    return _marked_values(settings, "of_rank_0")


def _marked_values(settings: Settings, mark: str) -> dict[str, Any]:
    return {env_var(name): getattr(settings, name) for name, each in FIELDS.items() if each.metadata[mark]}


def _unknown_setting(name: str, valid: list[str], where: str) -> SettingError:
    return SettingError(f"unknown setting {name!r}", f"{did_you_mean(name, valid)}Valid are {', '.join(valid)}", where)


def _similar_variables(environment: Iterable[str]) -> Iterator[SettingError]:
    """Errors for variables of others that are nearly those of our settings."""
    for key in sorted(environment):
        if not key.startswith(ENV_PREFIX) and (meant := meant_variable(key, tuple(FIELDS))):
            yield SettingError(f"{key!r} is no variable of a setting", f"Did you mean {meant}?", "environment")


def _misspelled_keys(additional_config: object) -> Iterator[SettingError]:
    """Errors for keys that are nearly our section, or a setting outside of it. Nothing is said of an unknown word, nor
    of a key whose value the setting of that name could not take."""
    where = "--additional-config"
    for key, value in additional_config.items() if isinstance(additional_config, Mapping) else ():
        if key == CONFIG_SECTION or not isinstance(key, str):
            continue
        if key in FIELDS and not FIELDS[key].metadata["startup_only"]:
            with contextlib.suppress(SettingError):
                FIELDS[key].metadata["read"](value, where)
                remedy = f'Did you mean {{"{CONFIG_SECTION}": {{"{key}": ...}}}}?'
                yield SettingError(f"the key {key!r} is not read outside of {CONFIG_SECTION!r}", remedy, where)
        elif is_meant_section(key) or meant_variable(key, tuple(FIELDS)):
            yield SettingError(f"the key {key!r} is not read", f'Did you mean {{"{CONFIG_SECTION}": ...}}?', where)


def load(
    environment: Mapping[str, str] | None = None,
    additional_config: object = None,
    assignments: Mapping[str, str] | None = None,
    options: Mapping[str, str] = MappingProxyType({}),
    prefix: str = "assignments.",
) -> Settings:
    """The effective settings.

    Args:
        environment: environment variables; empty ones count as not set. None reads the process's own.
        additional_config: vLLM's ``additional_config``; our section is its key ``moe_oracle``.
        assignments: settings by name, e.g. ``{"backend": "emulation"}``: ``--set`` of the command line tool.
        options: the command line's options that gave assignments, by setting; errors name what the user typed.
        prefix: what errors put in front of the name of a setting in assignments that no option gave.

    Raises:
        SettingError: an unknown name or an invalid value.
    """
    for name, given in (("environment", environment), ("assignments", assignments)):
        check_value(name, given, (Mapping, type(None)))
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}

    def put(name: str, value: object, where: str) -> None:
        if isinstance(value, int) and value.bit_length() > 63:  # Python neither prints nor converts the largest
            rule = f"an integer of {value.bit_length()} bits is too large for any setting"
            raise SettingError(rule, "Write a smaller one", where)
        text = value.strip() if isinstance(value, str) else value
        values[name] = FIELDS[name].metadata["read"](text, where)
        sources[name] = where

    variables = {env_var(name): name for name in FIELDS}
    if environment is not None and (bare := sorted(name for name in environment if name in FIELDS)):
        remedy = f"Write {env_var(bare[0])}, or give settings by name in assignments"
        raise SettingError(f"{bare[0]!r} is not an environment variable of a setting", remedy, "environment")
    variables_here = os.environ if environment is None else environment
    for key, value in sorted(variables_here.items()):
        if key.startswith(ENV_PREFIX):
            if key not in variables:
                raise _unknown_setting(key, sorted(variables), "environment")
            check_value(key, value, (str,))
            if not value.strip():
                continue
            put(variables[key], value, f"environment variable {key}")

    for name, setting in _plugin_section(additional_config).items():
        if name not in FIELDS:
            raise _unknown_setting(str(name), sorted(FIELDS), f"--additional-config {CONFIG_SECTION}")
        if FIELDS[name].metadata["startup_only"]:
            rule = "this takes effect when the process starts, before an engine has a config"
            raise SettingError(rule, f"Set {env_var(name)} instead", f"--additional-config {CONFIG_SECTION}.{name}")
        put(name, setting, f"--additional-config {CONFIG_SECTION}.{name}")

    for name, word in (assignments or {}).items():
        if name not in FIELDS:
            raise _unknown_setting(name, sorted(FIELDS), prefix.rstrip(" ."))
        put(name, word, options.get(name, f"{prefix}{name}"))
    similar, misspelled = tuple(_similar_variables(variables_here)), tuple(_misspelled_keys(additional_config))
    return Settings(**values, sources=sources, similar_variables=similar, misspelled=misspelled)


def is_strict(environment: Mapping[str, str] | None = None) -> bool:
    """The setting `strict` alone, even if others are invalid; an invalid value counts as set.

    Args:
        environment: environment variables; None reads the process's own.
    """
    value = (os.environ if environment is None else environment).get(env_var("strict"))
    try:
        return bool(value and value.strip()) and read_boolean(value, "")
    except SettingError:
        return True


def _plugin_section(additional_config: object) -> Mapping[str, object]:
    section = additional_config.get(CONFIG_SECTION, {}) if isinstance(additional_config, Mapping) else {}
    if not isinstance(section, Mapping):
        remedy = 'Write {"moe_oracle": {"backend": "emulation"}}'
        raise SettingError(f"{section!r} is not a JSON object", remedy, f"--additional-config {CONFIG_SECTION}")
    return section


def get_env(name: str) -> str | None:
    """An environment variable that is not this project's; None if it is not set."""
    return os.environ.get(name)


def server_environment(assignments: Mapping[str, str]) -> dict[str, str]:
    """All environment variables for a server of its own, with settings of this project.

    Args:
        assignments: values by name of the setting; they replace the environment's.
    """
    mine = {env_var(name): value for name, value in assignments.items()}
    return {name: value for name, value in os.environ.items() if name != _RECORDS_DIR_VAR} | mine


VISIBLE_GPUS_VAR = "CUDA_VISIBLE_DEVICES"
"""The variable that selects the GPUs of a process."""


@contextlib.contextmanager
def visible_gpu(gpu: str | None) -> Iterator[None]:
    """Processes that are started within this context see one GPU only.

    Args:
        gpu: its name in `VISIBLE_GPUS_VAR`; None leaves the GPUs of this process.
    """
    before = os.environ.get(VISIBLE_GPUS_VAR)
    if gpu is not None:
        os.environ[VISIBLE_GPUS_VAR] = gpu
    try:
        yield
    finally:
        if before is not None:
            os.environ[VISIBLE_GPUS_VAR] = before
        elif gpu is not None:
            del os.environ[VISIBLE_GPUS_VAR]


def batch_invariant() -> bool:
    """Whether vLLM's ``VLLM_BATCH_INVARIANT`` is on, read as vLLM reads it.

    Raises:
        SettingError: it is not an integer; vLLM does not start with such a value.
    """
    value = get_env("VLLM_BATCH_INVARIANT")
    try:
        return value is not None and bool(int(value))
    except ValueError as error:
        raise SettingError(f"{value!a} is not an integer", "Set it to 1 or 0", "VLLM_BATCH_INVARIANT") from error


def set_batch_invariant(wanted: bool | None) -> None:
    """Sets vLLM's ``VLLM_BATCH_INVARIANT`` for this process and those that it starts; None leaves it as it is.

    vLLM's kernels read the variable, also in processes that measure.
    """
    if wanted is not None:
        os.environ["VLLM_BATCH_INVARIANT"] = str(int(wanted))


def records_dir() -> str | None:
    """The directory in which the processes of one server write decisions for its metrics endpoint; None without one."""
    return os.environ.get(_RECORDS_DIR_VAR)


def set_records_dir(folder: str | None) -> None:
    """Sets that directory for this process and the processes that it starts; None unsets it."""
    if folder is None:
        os.environ.pop(_RECORDS_DIR_VAR, None)
    else:
        os.environ[_RECORDS_DIR_VAR] = folder


def cache_dir(settings: Settings) -> Path:
    """The directory of measurements: the setting `cache`, or the user's cache directory by the XDG specification.

    Raises:
        SettingError: there is no home directory.
    """
    if settings.cache:
        try:
            return Path(settings.cache).expanduser()
        except RuntimeError as error:  # ~NAME of an unknown user
            rule = f"{settings.cache!r} is not a directory: {str(error).rstrip('.')}"
            raise SettingError(rule, "Write the path of one", settings.source("cache")) from error
    base = get_env("XDG_CACHE_HOME")
    if base and Path(base).is_absolute():  # the XDG specification: relative paths are ignored
        return Path(base) / "vllm-moe-oracle"
    try:
        return Path.home() / ".cache" / "vllm-moe-oracle"
    except RuntimeError as error:
        rule = f"there is no cache directory: {str(error).rstrip('.')}"
        raise SettingError(rule, f"Set {env_var('cache')} to one", "cache") from error


def report_path(settings: Settings) -> Path | None:
    """The file of the setting `report`; None if none is set. The name of an unknown user is left as it is."""
    return Path(os.path.expanduser(settings.report)) if settings.report else None


def hub_cache_dir() -> Path:
    """The directory in which huggingface_hub keeps models.

    Raises:
        RuntimeError: there is no home directory.
    """
    for name, below in (("HF_HUB_CACHE", ""), ("HF_HOME", "hub"), ("XDG_CACHE_HOME", "huggingface/hub")):
        if base := get_env(name):
            return Path(base).expanduser() / below
    return Path.home() / ".cache" / "huggingface" / "hub"


def excluded_by_vllm() -> str:
    """Why vLLM's ``VLLM_PLUGINS`` excludes this plugin; "" if it does not."""
    chosen = get_env("VLLM_PLUGINS")
    if chosen is None or CONFIG_SECTION in chosen.split(","):
        return ""
    return f"not selected by VLLM_PLUGINS={chosen!r} (add {CONFIG_SECTION} to it, or unset it)"
