"""The documentation site and the planner's page, made from what the repository already says.

`make docs` calls mkdocs with mkdocs.yml; `hooks.py` gives it the READMEs where they are and a reference
of the settings; `planner_page.py` adds the planner, which runs in the reader's browser, and the page of
drawings, made by `drawing/` from the spec of a run.
"""
