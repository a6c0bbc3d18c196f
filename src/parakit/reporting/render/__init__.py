"""A report as files and text: takes a `Report`, gives terminal, Markdown, HTML, CSV, JSON and SVG.

Decides nothing: every number and verdict comes from the layers below. `build` imports it.
"""
