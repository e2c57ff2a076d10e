"""vLLM as an engine of a run: a sidecar that speaks our engine protocol, and a private vLLM server behind it.

    conductor ──► engine server ──► VllmEngine ──unix socket──► vLLM (its own Python) ──► worker/polyrhythm_worker.py
                  (ours, tokens)     (engine.py)  (mode 0700)                              (verifies, loads, repacks)

vLLM's administrative routes ask nobody who they are: they are reached through the socket alone. `process` starts the server
and ends all of its processes, `launching` says with which options, `client` talks to it. Nothing here imports vLLM.
"""
