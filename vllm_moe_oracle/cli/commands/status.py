"""`status`: what is installed, whether the plugin serves it, with which settings, methods, patches and backends."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import platform
import sys
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from typing import Annotated, Any

import msgspec
import typer

from ... import __version__, decision_records, settings
from ...checkpoint.layer_names import compact_layer_names
from ...core.capabilities import device_reasons
from ...core.overrides import Override
from ...core.problem import Device
from ...devices import detect
from ...devices.detect import installed_packages
from ...errors import OracleError, SettingError
from ...measurements.lookup import profile_error, profile_of_other_gpu
from ...measurements.store import Store
from ...oracle.backend_names import check_backend_names, list_without_effect
from ...oracle.registry import (
    Registry,
    describe_load_error,
    disabled_entry_points,
    discover,
    installed_entry_points,
)
from ...plugin import PluginState, expected_state
from ...releases.supported import release_support
from ...settings import Settings, cache_dir, excluded_by_vllm
from .. import EXIT_INVALID_INPUT, EXIT_UNHEALTHY, output
from ..arguments import AsJson
from ..bug_report import where_to_report
from ..entry_point_probe import find_unsafe
from ..writable import require_working_directory, why_unwritable_folder, why_unwritable_report

_VALID_NAMES = " Valid are "
"""Where the list of all valid names begins in an error; standard error and JSON have it."""


HELP = """\
Say what is installed, whether the plugin is active, what is wrong, and what running servers leave to stock vLLM.

By itself it reads versions, settings, caches and records, in about a second. --check, --verbose and --json also
register the plugin in this process the way vLLM registers it, without a model or a GPU; vLLM's import takes some
seconds. explain --device on another machine takes the file that --json prints.

\b
Examples:
  vllm-moe-oracle status
  vllm-moe-oracle status --check && vllm serve MODEL
  vllm-moe-oracle status --json > here.json

\b
Exit status:
  0  the report was made, whether or not the plugin is active
  1  with --check: the plugin is not active, a setting is invalid or has no
     effect, such as a profile of another GPU, its backend cannot run on this
     machine, a backend could not be loaded, or the cache cannot be used
  2  without --check: a setting has an unknown name, a value that it cannot
     take, or the name of no backend
"""


def command(
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Import vLLM, register the plugin as vLLM would, and exit with 1 if a server would not run it as it "
            "is set.",
        ),
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", "-v", help="List every setting, method, patch and backend; registers the plugin, too."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """What `HELP` says."""
    register = check or verbose or as_json
    if register:
        require_working_directory("status with --check, --verbose or --json")
    chosen, error, in_vain = None, "", list[str]()
    registry = _discover()
    try:
        chosen = settings.load()
        check_backend_names(chosen, registry=registry)
        in_vain = list_without_effect(chosen, None, registry)
    except SettingError as problem:
        error = str(problem)
    report = _build_report(chosen, registry, error, register=register)
    # Servers start in spite of these.
    found = () if chosen is None else (
        *in_vain, profile_error(chosen), profile_of_other_gpu(chosen, report["device"]), why_unwritable_report(chosen)
    )  # fmt: skip
    notes = [each for each in found if each]
    unusable = [] if chosen is None else _unusable_backends(chosen, report["device"], registry)
    report["problems"] = [*_problems(report, error), *unusable, *notes]
    if as_json:
        output.print_json(report)
    else:
        _print(report, verbose)
    for note in notes:
        output.print_message("note", note)
    if error:
        output.print_message("error", error)
    if check and report["problems"]:
        raise typer.Exit(EXIT_UNHEALTHY)
    if error and not check:
        raise typer.Exit(EXIT_INVALID_INPUT)


def _problems(report: dict[str, Any], setting_error: str) -> Iterator[str]:
    """What keeps a server from running the plugin as it is set, one sentence each."""
    state: PluginState = report["plugin"]
    if setting_error:
        yield setting_error
    if not state.active and (not setting_error or setting_error not in state.reason):
        yield f"the plugin is not active: {state.reason}"
    yield from (f"the patch {name} failed: {reason}" for name, reason in state.failed.items())
    for name, reason in report["broken_backends"].items():
        yield describe_load_error(name, reason)
    if report["cache"] is not None and report["cache"]["error"]:
        yield f"the cache of measurements cannot be used: {report['cache']['error']}"


def _unusable_backends(chosen: Settings, device: Device, registry: Registry) -> Iterator[str]:
    """Backends that the user names and that can run no layer on this machine, with every rule against them."""
    named = [(chosen.backend, chosen.source("backend"))]
    named += [(each.backend, chosen.source("overrides")) for each in chosen.overrides]
    for name, source in dict.fromkeys(named):
        found = [registry[name]] if name in registry else [each for each in registry if name in each.vllm_names]
        reasons = [device_reasons(each.capabilities, device) for each in found]
        if found and all(reasons):
            rules = "; ".join(dict.fromkeys(str(reason) for each in reasons for reason in each))
            yield f"{source}: {name} cannot run on this machine: {rules}"


def _discover() -> Registry:
    """The backends; entry points that would end or block this process are left out, with the reason."""
    points, skipped = installed_entry_points(), disabled_entry_points()
    wanted = [point for point in points if point.name not in skipped]
    if not wanted:
        return discover(points, skipped)
    with output.status_spinner(f"importing {len(wanted)} entry points, each in a process of its own"):
        unsafe = find_unsafe(wanted)
    return discover(points, skipped | unsafe)


def _build_report(chosen: Settings | None, registry: Registry, setting_error: str, register: bool) -> dict[str, Any]:
    device = detect.detect()
    state = _register_plugin() if register else _expected_state(chosen, setting_error, device)
    if setting_error and state.active:  # names of backends are checked when the model's layers are built
        reason = f"the start of a server would end with: {setting_error}"
        state = dataclasses.replace(state, active=False, reason=reason)
    versions = _versions()
    vllm = versions["vllm"]
    return {
        "versions": versions,
        "support": None if vllm is None else release_support(vllm),
        "plugin": state,
        "settings": None
        if chosen is None
        else {
            name: {"value": getattr(chosen, name), "source": chosen.source(name), "help": field.metadata["help"]}
            for name, field in settings.FIELDS.items()
        },
        "backends": [
            {"name": backend.name, "schemes": backend.schemes, "origin": registry.origin(backend.name)}
            for backend in registry
        ],
        "families": registry.families(),
        "broken_backends": registry.load_errors,
        "device": device,
        "cache": None if chosen is None else _cache_report(chosen),
        "servers": [*_running_servers()],
    }


_SERVER_FIELDS = ("process", "program", "vllm", "rank", "ranks", "moe_layers", "served", "left_to_stock")


def _running_servers() -> Iterator[dict[str, Any]]:
    """What is said of each running server: fields of its lowest rank's record, with which the others agree, and how
    many layers each backend runs."""
    for records in decision_records.running_servers():
        with contextlib.suppress(msgspec.ValidationError):  # of another release
            ranks = (msgspec.convert(each, decision_records.ServerRecord) for each in records)
            server = min(ranks, key=lambda each: each.rank)
            counts: Counter[str] = Counter()
            for group in server.groups:
                counts[group.decision.backend] += len(group.layers)
            yield {name: getattr(server, name) for name in _SERVER_FIELDS} | {"backends": dict(sorted(counts.items()))}


def _cache_report(chosen: Settings) -> dict[str, Any]:
    """Where measurements are kept, how many by environment, and why they cannot be read."""
    try:
        store = Store(cache_dir(chosen))
    except OracleError as error:
        return {"path": None, "measurements": {}, "error": str(error)}
    try:
        return {
            "path": str(store.path),
            "measurements": store.summary(),
            "error": why_unwritable_folder(store.path.parent),
        }
    except OracleError as error:
        return {"path": str(store.path), "measurements": {}, "error": str(error)}


def _versions() -> dict[str, str | None]:
    """Versions by name; None for what is not installed."""

    installed = installed_packages()
    try:
        triton: str | None = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = None
    return {
        "vllm-moe-oracle": __version__,
        "vllm": installed.get("vllm"),
        "torch": installed.get("torch"),
        "triton": triton,
        "python": platform.python_version(),
    }


def _register_plugin() -> PluginState:
    """Registers the plugin here, as vLLM does in its processes, and says what came of it."""
    from ... import plugin

    if reason := excluded_by_vllm():
        return plugin.PluginState(False, reason, _versions()["vllm"])

    # vLLM's logger writes to standard output, which belongs to the report. With the setting strict, a stand-down is
    # raised. Nearly all the time of this command is vLLM's import, a fifth of which the collector would take.
    with (
        _no_garbage_collection(),
        output.status_spinner("importing vLLM, to register the plugin as vLLM would"),
        contextlib.redirect_stdout(sys.stderr),
    ):
        try:
            plugin.register()
        except Exception:  # whatever keeps vLLM from starting is the state to show
            return _refused_start(plugin.state())
    return plugin.state()


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Imports make many objects and hardly any garbage."""
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collected:
            gc.enable()


def _expected_state(chosen: Settings | None, setting_error: str, device: Device) -> PluginState:
    """What registration would come to, without vLLM's import."""
    vllm = _versions()["vllm"]
    if reason := excluded_by_vllm():
        return PluginState(False, reason, vllm)
    if chosen is None:
        state = PluginState(False, setting_error, vllm)
    else:
        state = expected_state(chosen, device)
        if state.active or not chosen.enabled:
            return state
    # With the setting strict, a stand-down is raised.
    return _refused_start(state) if settings.is_strict() else state


def _refused_start(state: PluginState) -> PluginState:
    return dataclasses.replace(state, reason=f"the start of a server would end with: {state.reason}")


def _print(report: dict[str, Any], verbose: bool) -> None:
    """One screen; with `verbose` everything."""
    state: PluginState = report["plugin"]
    versions = [f"{name} {version or 'not installed'}" for name, version in report["versions"].items()]
    active = "active" if state.active else "not active"
    facts = [
        ("versions", ", ".join(each.replace(" ", output.GLUE) for each in versions)),
        ("plugin", f"{active}: {state.reason.partition(_VALID_NAMES)[0]}"),
        ("tested", str(report["support"] or "nothing: vLLM is not installed")),
        ("device", str(report["device"])),
        ("cache", _describe_cache(report["cache"])),
        ("settings", _describe_settings(report["settings"])),
        ("changes", _describe_changes(state)),
        ("backends", _describe_backends(report["backends"])),
    ]
    facts += [("server", line) for server in report["servers"] for line in _describe_server(server)]
    facts += [("problem", problem.partition(_VALID_NAMES)[0]) for problem in report["problems"]]
    if not report["problems"]:
        facts.append(("health", "nothing is wrong"))
    output.show(output.key_value_table(facts, 0))
    if verbose:
        _print_details(report)
    more = () if verbose else ("more: vllm-moe-oracle status --verbose, or --json",)
    output.show("", *more, f"report a bug: {where_to_report()}")


def _print_details(report: dict[str, Any]) -> None:
    """Methods, patches, settings, backends and their families, one in a line."""
    state: PluginState = report["plugin"]
    for title, names in (("methods", state.methods), ("patches", state.patches), ("later patches", state.deferred)):
        if names:
            output.show("", f"{title}:", *(f"  {name}" for name in names))
    if report["settings"] is not None:
        rows = [
            (name, _format_setting(name, setting["value"]), setting["source"])
            for name, setting in report["settings"].items()
        ]
        output.show_table(("setting", "value", "from"), rows)
    backends = [
        (backend["name"], ", ".join(backend["schemes"]), _format_origin(backend["origin"]))
        for backend in report["backends"]
    ]
    backends += [(name, "broken", reason) for name, reason in report["broken_backends"].items()]
    output.show_table(("backend", "schemes", "from"), backends)
    output.show_table(("family", "backends"), [(name, ", ".join(each)) for name, each in report["families"].items()])


def _describe_changes(state: PluginState) -> str:
    """How many methods and patches there are; of a plugin that was not registered here, how to see them."""
    if state.active and not state.methods:
        return "not tried: --check registers the plugin as vLLM would"
    return f"{len(state.methods)} quantization methods, {len(state.patches)} patches{_deferred(state)}"


def _describe_settings(found: dict[str, Any] | None) -> str:
    """The settings that are not at their defaults."""
    if found is None:
        return "cannot be read"
    words = [
        f"{name}={_format_setting(name, each['value'])} ({each['source']})"
        for name, each in found.items()
        if each["source"] != "default"
    ]
    return "; ".join(words) or f"all {len(found)} at their defaults"


def _describe_backends(found: list[dict[str, Any]]) -> str:
    """How many are built in, and the names of the others."""
    others = [f"{each['name']} from {each['origin']}" for each in found if _format_origin(each["origin"]) != "built in"]
    return ", ".join((f"{len(found) - len(others)} built in", *others))


def _describe_server(server: dict[str, Any]) -> Iterator[str]:
    """What a running server runs here, and a line for each reason why layers are stock vLLM's."""
    place = "process {process} ({program}), vLLM {vllm}".format_map(server)
    backends = ", ".join(f"{name} x {count}" for name, count in server["backends"].items())
    words = f"{place}: {server['served']} of {server['moe_layers']} MoE layers run through the oracle"
    yield f"{words}: {backends}" if backends else words
    left: dict[str, list[str]] = {}
    for layer, reason in server["left_to_stock"].items():
        left.setdefault(reason, []).append(layer)
    for reason, layers in left.items():
        yield f"{compact_layer_names(layers)} left to stock vLLM: {reason}"
    if (others := server["moe_layers"] - server["served"] - len(server["left_to_stock"])) > 0:
        yield f"{others} more are stock vLLM's: unquantized, or in a format that is not served; its log names them"


def _format_origin(origin: str) -> str:
    """Where a backend comes from: ``built in``, or its entry point."""
    return "built in" if origin.startswith(f"{__name__.partition('.')[0]}.backends.") else origin


def _deferred(state: PluginState) -> str:
    """How many patches wait for vLLM to import the modules that they change."""
    count = len(state.deferred)
    return f", {count} more when vLLM imports the modules that they change" if count else ""


def _describe_cache(cache: dict[str, Any] | None) -> str:
    """What is in the cache of measurements, in a line."""
    if cache is None:
        return "unknown: the settings cannot be read"
    if cache["error"]:
        return f"not used: {cache['error']}"
    counts = ", ".join(
        f"{count} {'time' if count == 1 else 'times'} on {name}" for name, count in cache["measurements"].items()
    )
    return f"{counts} ({cache['path']})" if counts else f"nothing measured yet ({cache['path']})"


def _format_setting(name: str, value: object) -> str:
    """A setting's value as it would be written, and its unit."""
    if settings.FIELDS[name].metadata["metavar"] == "SECONDS":
        return f"{value:g} s"
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, tuple):
        parts = [f"re:{item.pattern}={item.backend}" if isinstance(item, Override) else str(item) for item in value]
        return (";" if any(isinstance(item, Override) for item in value) else ",").join(parts) or "none"
    return str(value) or "none"
