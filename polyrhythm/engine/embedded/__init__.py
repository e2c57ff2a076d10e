"""The embedded engine: our own, in the process of its server.

A request (one prompt, several seeds) flows `engine -> scheduler`, its prompt and tokens through `model_runner` over the
`kv_cache`, its logits through the `sampler`, and back. One compute thread owns everything below `engine`.

A completion is a function of (weights, prompt, seed, sampling) alone, bit for bit, whatever else is in the batch. That
rests on prompts prefilled in forwards of their own, decoding batches of at least 16 rows in multiples of 8, attention
without padding, and noise keyed by (seed, position, token). Where the matrix library is MKL, `MKL_CBWR=AUTO,STRICT` in
the environment makes it hold across thread counts too.
"""
