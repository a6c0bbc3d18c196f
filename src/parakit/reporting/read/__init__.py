"""Logs and run folders as frozen data: takes paths, gives `Run`s.

Whatever is missing or damaged becomes a note, never an exception. It imports nothing else of the report;
the layers above import it, and the launcher does for its live view.
"""
