"""The command line: one table of commands, and the program that runs them."""
