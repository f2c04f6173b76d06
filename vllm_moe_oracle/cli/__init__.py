"""The command line tool. One file in `commands` is one command; nothing else has to be edited for a new one."""
