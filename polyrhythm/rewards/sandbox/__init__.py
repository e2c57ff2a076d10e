"""The worker processes that run user code, with deadlines and limits, and can be killed."""
