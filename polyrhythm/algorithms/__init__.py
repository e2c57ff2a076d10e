"""The objective: advantages from rewards (pure numpy), losses from log-probabilities (pure torch), and how they add up.

Rewards of a group go in, one advantage per rollout comes out; a loss turns them into a sum over sampled tokens.

    advantages     rewards of a group → one advantage per rollout
    aggregation    what a token weighs, and what a group adds to the divisor of the update
    loss           what every loss is given and returns; losses/ holds the kinds
    kl             estimators of the divergence from the reference
"""
