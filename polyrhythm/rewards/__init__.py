"""Rewards: user functions scored in worker processes that can be killed.

The conductor asks the pool, the pool asks a worker, the worker calls the function: completions in, one number out.
"""
