"""Inference engines: token ids in, completions with their log-probabilities out.

`kinds` says what the one `server` needs of whatever generates behind it; `membership` keeps an engine in its run. The
embedded kind is in `embedded/`, the OpenAI API of kinds that can stream in `openai/`.
"""
