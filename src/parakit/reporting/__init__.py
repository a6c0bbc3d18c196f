"""From what runs leave behind (logs, ledgers, samples) to tables, charts and verdicts.

Takes run folders, foreign logs and published figures; gives `results.csv`, `results.json`, `report.md`,
`report.html`, charts and a terminal's table. Four layers, each importing only those before it: `read`,
`analyse`, `explain`, `render`; `build` and `command` are on top. No torch. Only `launch` and `study`
import it.
"""
