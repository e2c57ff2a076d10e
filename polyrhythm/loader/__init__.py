"""What a training loop sees of inference: steps, and in each step the micro-batches of finished groups.

settings = LoaderSettings(num_steps=20, groups_per_step=8, tokens_per_micro_batch=4096)
loader = RolloutLoader(conductor_url, settings, token=token)
loader.announce(0)                          # version 0 is published
for step in loader.steps():                 # engines hold policy v{step.version}, verified
    for update in step.updates():           # one, unless training.updates_per_step says more
        for micro_batch in update:          # groups as they finish, with advantages
            ...
    ...                                     # publish version + 1
    step.commit(metrics)                    # closes the step; engines begin the next one at once
"""

from polyrhythm.loader.loader import LoaderSettings, RolloutLoader, Step

__all__ = ["LoaderSettings", "RolloutLoader", "Step"]
