"""Why a training hangs: which rank stopped, who waits for it, where in the step. No torch."""
