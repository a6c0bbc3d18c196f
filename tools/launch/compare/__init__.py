"""Sets of runs on equal terms, as tables beside what was published."""
