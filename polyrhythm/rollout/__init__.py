"""How a problem becomes rollouts: prompt ids and seeds go in, traces of given and sampled tokens come out.

    dispatcher ── problem, generate, seeds ──► Rollouter.run ── GenerateRequest ──► the engine that was chosen
        ▲                                           │
        └────────────── one Trace per seed ◄────────┘

The dispatcher chooses the engine, sends again what failed, and enters traces into the ledger; what is asked of the engine,
how often, and what is put between two answers is decided here. A kind with several turns is a file of this folder: it
awaits `generate` more than once and returns traces with more than one turn.
"""

from polyrhythm.rollout.rollouter import Generate, Rollouter, Text
from polyrhythm.rollout.single_turn import SingleTurn

ROLLOUTERS = {"single_turn": SingleTurn}

__all__ = ["ROLLOUTERS", "Generate", "Rollouter", "SingleTurn", "Text"]
