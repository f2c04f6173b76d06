"""`status`: what is installed, whether the plugin serves it, with which settings, methods, patches and backends."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import typer

from ... import __version__, settings
from ...compat import release_support
from ...core.overrides import Override
from ...devices import detect
from ...devices.detect import installed_packages
from ...errors import OracleError, SettingError
from ...measurements.lookup import profile_error
from ...measurements.store import Store
from ...oracle.registry import Registry, disabled_entry_points, discover, installed_entry_points
from ...oracle.selection import check_backend_names
from ...plugin import PluginState
from ...settings import Settings, cache_dir, excluded_by_vllm
from .. import EXIT_INVALID_INPUT, output
from ..arguments import AsJson
from ..entry_point_probe import find_unsafe


def command(as_json: AsJson = False) -> None:
    """Say what is installed, whether the plugin is active, and with which settings, methods, patches and backends.

    The plugin is registered in this process the way vLLM registers it, without a model or a GPU.
    "device" of the JSON can be handed to explain --device on another machine.

    \b
    Examples:
      vllm-moe-oracle status
      vllm-moe-oracle status --json > here.json

    \b
    Exit status:
      0  the report was made, whether or not the plugin is active
      2  a setting has an unknown name, a value that it cannot take, or the name of no backend
    """
    chosen, error = None, ""
    registry = _discover()
    try:
        chosen = settings.load()
        check_backend_names(chosen, registry=registry)
    except SettingError as problem:
        error = str(problem)
    report = _build_report(chosen, registry)
    if as_json:
        output.print_json(report)
    else:
        _print(report)
    if chosen is not None and (unused := profile_error(chosen)):
        output.print_message("note", unused)
    if chosen is not None and (unwritable := _unwritable_report(chosen)):
        output.print_message("note", unwritable)
    if error:
        output.print_message("error", error)
        raise typer.Exit(EXIT_INVALID_INPUT)


def _discover() -> Registry:
    """The backends; entry points that would end or block this process are left out, with the reason."""
    points, skipped = installed_entry_points(), disabled_entry_points()
    wanted = [point for point in points if point.name not in skipped]
    if not wanted:
        return discover(points, skipped)
    with output.status_spinner(f"importing {len(wanted)} entry points, each in a process of its own"):
        unsafe = find_unsafe(wanted)
    return discover(points, skipped | unsafe)


def _build_report(chosen: Settings | None, registry: Registry) -> dict[str, Any]:
    state = _register_plugin()
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
        "broken_backends": registry.load_errors,
        "device": detect.detect(),
        "cache": None if chosen is None else _cache_report(chosen),
    }


def _unwritable_report(chosen: Settings) -> str:
    """Why the file of the setting `report` could not be written; "" if it could, or none is set."""
    if not chosen.report:
        return ""
    path = Path(chosen.report)
    folder, rule = path.parent, f"{chosen.source('report')}: {path} cannot be written"
    if not folder.is_dir():
        return f"{rule}: there is no directory {folder}"
    if path.is_dir():
        return f"{rule}: it is a directory"
    return "" if os.access(path if path.exists() else folder, os.W_OK) else f"{rule}: permission denied"


def _cache_report(chosen: Settings) -> dict[str, Any]:
    """Where measurements are kept, how many by environment, and why they cannot be read."""
    try:
        store = Store(cache_dir(chosen))
    except OracleError as error:
        return {"path": None, "measurements": {}, "error": str(error)}
    try:
        return {"path": str(store.path), "measurements": store.summary(), "error": ""}
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
    # raised. Nearly all the time of this command is vLLM's import.
    with (
        output.status_spinner("importing vLLM, to register the plugin as vLLM would"),
        contextlib.redirect_stdout(sys.stderr),
    ):
        try:
            plugin.register()
        except Exception:
            state = plugin.state()
            return dataclasses.replace(state, reason=f"the start of a server would end with: {state.reason}")
    return plugin.state()


def _print(report: dict[str, Any]) -> None:
    state: PluginState = report["plugin"]
    output.show(
        output.key_value_table(((name, version or "not installed") for name, version in report["versions"].items()), 0)
    )
    facts = [
        ("plugin", f"{'active' if state.active else 'not active'}: {state.reason}"),
        ("tested", str(report["support"] or "nothing: vLLM is not installed")),
        ("methods", ", ".join(state.methods) or "none"),
        ("patches", _describe_patches(state)),
        ("device", str(report["device"])),
        ("cache", _describe_cache(report["cache"])),
    ]
    facts += [("failed", f"{name}: {reason}") for name, reason in state.failed.items()]
    output.show("", output.key_value_table(facts, 0), "")
    if report["settings"] is not None:
        rows = [
            (name, _format_setting(setting["value"]), setting["source"]) for name, setting in report["settings"].items()
        ]
        output.show(output.table(("setting", "value", "from"), rows), "")
    backends = [
        (backend["name"], ", ".join(backend["schemes"]), _format_origin(backend["origin"]))
        for backend in report["backends"]
    ]
    backends += [(name, "broken", reason) for name, reason in report["broken_backends"].items()]
    output.show(output.table(("backend", "schemes", "from"), backends))


def _format_origin(origin: str) -> str:
    """Where a backend comes from: ``built in``, or its entry point."""
    return "built in" if origin.startswith(f"{__name__.partition('.')[0]}.backends.") else origin


def _describe_patches(state: PluginState) -> str:
    """The applied patches by name, and how many wait for vLLM to import the modules that they change."""
    words = [", ".join(state.patches) or "none"]
    if state.deferred:
        words.append(f"{len(state.deferred)} more when vLLM imports the modules that they change (listed by --json)")
    return "; ".join(words)


def _describe_cache(cache: dict[str, Any] | None) -> str:
    """What is in the cache of measurements, in a line."""
    if cache is None:
        return "unknown: the settings cannot be read"
    if cache["error"]:
        return f"not used: {cache['error']}"
    counts = ", ".join(f"{count} on {name}" for name, count in cache["measurements"].items())
    return f"{counts} ({cache['path']})" if counts else f"nothing measured yet ({cache['path']})"


def _format_setting(value: object) -> str:
    """A setting's value as it would be written."""
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, tuple):
        parts = [f"re:{item.pattern}={item.backend}" if isinstance(item, Override) else str(item) for item in value]
        return (";" if any(isinstance(item, Override) for item in value) else ",").join(parts) or "none"
    return str(value) or "none"
