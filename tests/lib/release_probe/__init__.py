"""Runs in a process of its own, on the sources of one vLLM release: does vLLM itself arrive at this plugin's methods?

    PYTHONPATH=SOURCES:REPOSITORY python -m tests.lib.release_probe RESULTS.json

The result is ``{"version": ..., "checks": {name: "ok" or a traceback}, ...}``. The environment's torch and other
packages are used, whatever release they were installed for. Only two things are replaced: the release's compiled
extensions (its own import of them may fail), and packages that an older release imports at the top of a module and
that newer environments no longer bring.

`frame` starts vLLM, collects checks and runs them. `layers` makes, loads and runs MoE layers. The other modules are the
checks.
"""
