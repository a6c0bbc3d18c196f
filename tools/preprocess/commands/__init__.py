"""One module a command: its flags, and what it prints."""
