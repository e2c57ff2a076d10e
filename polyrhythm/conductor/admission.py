"""Who may take part in a run: whoever is made of the same as the run."""

import logging

from polyrhythm.conductor.refusals import Unfit
from polyrhythm.messages import Setup
from polyrhythm.setups import differences

log = logging.getLogger(__name__)


def refuse_unfit(who: str, theirs: Setup | None, ours: Setup, with_torch: bool) -> None:
    """Unfit, with what is another there and here. Only those who add up gradients need the same torch."""
    found = differences(theirs, ours, with_torch) if theirs is not None else "it does not say what it is made of"
    if found:
        log.warning("%s is refused: %s", who, found)
        raise Unfit(f"{who} does not fit this run: {found}")
