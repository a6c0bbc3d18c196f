"""Tables of performance figures checked by arithmetic: what cannot be, row by row.

Takes a CSV or Markdown table (`table`), gives what contradicts itself (`rules`).
"""
