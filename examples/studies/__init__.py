"""Studies with code of their own: `tools` imports none of them, its command line calls them by name."""
