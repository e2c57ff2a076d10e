"""The OpenAI API in front of an engine."""
