"""A run as a whole: what `polyrhythm train` and a script or notebook do alike, and what is left of a run when it is over.

`arguments` makes a configuration of what a script gave, `starting` checks it and opens the run folder, `training` carries
the run out and returns a Run; `rollouts` is for a training loop of one's own.
"""
