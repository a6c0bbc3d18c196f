"""Which model features are right under which strategies: many verifications, chosen, run and shown.

`definition` reads `examples/matrix.yaml`; `cells` chooses what to verify (`cell`), so that each pair of
a strategy and a level of a feature is covered, or draws what nobody listed; `running` verifies it, one
JSON a cell (`outcome`), and finds the least that is still wrong; `page` shows all of it; `curves`
compares losses in bf16; `touched` are the cells that a change can have touched. `commands` joins these
for the make targets.
"""
