"""One run, from what was asked to a complete run folder: compose, check, start, watch, record."""
