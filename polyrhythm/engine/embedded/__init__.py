"""The inference engine of this package: PyTorch and transformers, one compute thread, continuous batching."""
