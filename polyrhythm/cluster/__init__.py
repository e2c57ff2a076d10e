"""Who runs where: the run folder, the launchers that start processes, and the supervisor that watches and ends them.

`polyrhythm train` makes a RunFolder and hands it to a Supervisor, which starts conductor, engines and trainer through a
Launcher and watches them.
"""
