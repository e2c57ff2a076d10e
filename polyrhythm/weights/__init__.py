"""Where weights come from and how they move: `pretrained` finds or makes the model a run begins with, `store` carries
each new version from the trainer to the engines."""
