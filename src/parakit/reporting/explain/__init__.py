"""Why strategies differ: takes a `Report` whose runs left ledgers, gives sentences, tables and pictures.

Sets measured bytes, memory and time beside the planner's closed forms. `render` imports it; it imports
`read`, `analyse` and the canvas.
"""
