"""The worker extension with a fault that can be switched on: the head keeps what it was packed from."""

from polyrhythm_worker import WeightsOfARun


class FaultyWeights(WeightsOfARun):
    def polyrhythm_forget_to_repack(self, really: str) -> None:
        self.is_forgetful = really == "yes"

    def polyrhythm_repack(self) -> list[str]:
        return [] if getattr(self, "is_forgetful", False) else super().polyrhythm_repack()
