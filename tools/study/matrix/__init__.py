"""Which model features are right under which strategies: many verifications, chosen, run and shown.

`definition` reads `examples/matrix.yaml`; `cells` chooses what to verify (`cell`), so that each pair of
a strategy and a level of a feature is covered; `running` verifies it, one JSON a cell (`outcome`);
`shrink` finds the least that is still wrong; `page` shows all of it; `fuzz` draws what nobody listed;
`curves` compares losses in bf16. `commands` joins these for the make targets.
"""
