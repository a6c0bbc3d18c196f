"""How numbers and tables are written, once: units and tables for terminal, Markdown, HTML and CSV.

Takes values and columns, gives text. Imports nothing of the kit and no torch; everything may import it.
"""
