"""The command line tool. One file in `commands` is one command; nothing else has to be edited for a new one."""

EXIT_UNHEALTHY = 1
"""Exit status of a check that failed."""
EXIT_INVALID_INPUT = 2
"""Exit status when the input cannot be used; also click's own for a wrong option."""
EXIT_NO_BACKEND = 3
"""Exit status when a server would not start: a layer has no backend, or vLLM refuses the options for the model."""
EXIT_INCOMPLETE = 4
"""Exit status when a part of what was asked for could not be measured."""
EXIT_INTERRUPTED = 130
"""Exit status after Ctrl-C: 128 and SIGINT, as shells have it."""
