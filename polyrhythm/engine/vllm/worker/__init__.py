"""What runs inside vLLM's worker. vLLM's Python finds this folder and nothing else of the package."""
