"""The training engine: micro-batches in, one update of the policy out.

`layout` packs groups into one row, `attention` and `logprobs` score it, `models` holds policy, old policy and reference,
`trainer` adds up gradients and makes the update, `parallel` adds them up over several processes.
"""
