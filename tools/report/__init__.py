"""From what runs leave behind (logs, ledgers, samples) to tables, charts and verdicts."""
