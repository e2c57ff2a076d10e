"""The objective: advantages from rewards (pure numpy) and losses from log-probabilities (pure torch).

Rewards of a group go in, one advantage per rollout comes out; the trainer turns them into sums of token losses.
"""
