"""Who runs where: the run folder, the processes of one machine, and how they are kept and ended.

`polyrhythm train` makes a RunFolder and hands it to LocalRun, which starts conductor, engines and trainer and watches them.
"""
