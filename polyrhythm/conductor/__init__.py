"""The conductor: the process between task, engines and trainer. It never imports torch.

Problems go out to the engines of the pool, completions come back through the ledger and the reward workers, and
finished groups wait in the step until the trainer pulls them:

    service (HTTP) → conductor (what the routes do) → dispatcher → pool → engine client
                                 step ← ledger, rewards
                                 ranks: who trains together, and where they find each other
                                 assignment: which rank of the trainer gets which group
"""
