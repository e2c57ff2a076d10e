"""The engines and elastic ranks that a run has started: restarted when they die, more or fewer by demand."""
