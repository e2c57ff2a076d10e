"""Stop strings: has the token just drawn completed one?"""

import threading
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from polyrhythm.engine.refusals import Refused

# The first tokens of a cut-out text may decode differently; this many stand before the stretch that is searched.
_LEAD_TOKENS = 8


class StopStrings:
    """Finds stop strings in tokens with the tokenizer of the model folder, which is loaded when first needed."""

    def __init__(self, model_dir: Path, vocab_size: int):
        self._model_dir = model_dir
        self._vocab_size = vocab_size
        self._tokenizer = None
        self._pieces: list[str] = []
        self._preparing = threading.Lock()  # requests prepare on threads of their own
        self._may_complete = lru_cache(maxsize=64)(self._tokens_that_may_complete)

    def prepare(self, stops: tuple[str, ...]) -> None:
        """Load what `completed` needs, or refuse strings that cannot be found."""
        if not stops:
            return
        if not all(stops):
            raise Refused("a stop string must not be empty")
        with self._preparing:
            if self._tokenizer is None:
                self._load_tokenizer()
            self._may_complete(stops)

    def _load_tokenizer(self) -> None:
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(self._model_dir)
        except (OSError, ValueError) as error:
            raise Refused("stop strings need a tokenizer, and the model folder has none") from error
        known = min(self._vocab_size, len(tokenizer))
        self._pieces = tokenizer.batch_decode([[token] for token in range(known)])
        self._tokenizer = tokenizer

    def completed(self, tokens: NDArray[np.int64], stops: tuple[str, ...]) -> Sequence[int]:
        """The rows of [rows, length] token ids whose last token completes one of the strings."""
        if not stops:
            return ()
        # Decoding text is dear: it is done only for the few tokens that contain the end of a stop string.
        candidates = np.flatnonzero(self._may_complete(stops)[tokens[:, -1]])
        return [int(row) for row in candidates if self._has_stop(tokens[row], stops)]

    def _has_stop(self, tokens: NDArray[np.int64], stops: tuple[str, ...]) -> bool:
        assert self._tokenizer is not None
        # Every token adds at least one byte, so a stop string lies within as many tokens as it has bytes.
        window = max(len(stop.encode()) for stop in stops) + _LEAD_TOKENS
        text = self._tokenizer.decode(tokens[-window:].tolist(), clean_up_tokenization_spaces=False)
        return any(stop in text for stop in stops)

    def _tokens_that_may_complete(self, stops: tuple[str, ...]) -> NDArray[np.bool_]:
        endings = {stop[-1] for stop in stops}
        may_complete = np.ones(self._vocab_size, bool)
        # A space can be lost when a token is decoded alone, and half a character shows as the replacement character.
        if " " not in endings:
            endings.add("\ufffd")
            may_complete[: len(self._pieces)] = [any(end in piece for end in endings) for piece in self._pieces]
        return may_complete
