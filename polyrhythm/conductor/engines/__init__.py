"""The engines as the conductor sees them: who is there, how healthy, who gets the next request."""
