"""The command line: one table of commands, and its two doors, make and `parakit`."""
