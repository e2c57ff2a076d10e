"""The ranks of the trainer as the conductor sees them: who they are, and where they find each other.

A rank joins; when all are there, an epoch begins, and its members find each other by keys and values that are the epoch's own:

    join → membership (epoch, members) → rendezvous (the store of torch.distributed) → the ranks talk among themselves
"""
