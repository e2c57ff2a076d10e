"""The models of the trainer: loading, saving, policy / old policy / reference, and patches that make them faster."""
