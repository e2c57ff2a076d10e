"""What a run shows and writes: recorders note what each process does, files keep metrics and samples, views show the status.

Flow: the conductor writes `metrics.jsonl` and `samples.jsonl` and answers `GET /status`; `polyrhythm train` feeds that
status to a view. Nothing here imports torch, and text made by a model is cleaned before a terminal sees it.
"""
