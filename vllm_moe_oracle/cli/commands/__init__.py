"""One module is one command: its function `command`, under the module's name, and `HELP`, which ``--help`` prints.

`HELP` is no docstring: Python drops those under ``PYTHONOPTIMIZE=2``.

Every module is imported whenever the tool starts, so it imports what its work needs inside the function: `--help` and
`explain` must not wait for torch.
"""
