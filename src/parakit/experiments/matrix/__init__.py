"""Which model features are right under which strategies: many verifications, chosen, run and shown."""
