"""training.elastic: ranks that join, are lost and leave while the run goes on."""
