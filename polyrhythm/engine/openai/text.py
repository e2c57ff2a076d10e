"""The text of a completion while its tokens come in: whole characters only, and nothing of a stop string."""

from typing import NamedTuple

from polyrhythm.engine.kinds import NewToken
from polyrhythm.tokenizer import Tokenizer
from polyrhythm.types import Completion, FinishReason

_HALF_CHARACTER = "\ufffd"


class TokenText(NamedTuple):
    """A token, its log-probability, and where its text begins in the completion."""

    token_id: int
    logprob: float
    offset: int


class Piece(NamedTuple):
    """What a token made certain: text that will not change any more, and the tokens that begin in it."""

    text: str
    tokens: list[TokenText]
    finish_reason: FinishReason | None


class TextDecoder:
    """Decodes tokens one after another. A character that is spread over several tokens comes with the last of them.

    Not `tokenizers.decoders.DecodeStream`, which gives the same pieces and is faster, but raises "Invalid prefix" when a
    tokenizer with byte fallback (Llama 2, Gemma) is given bytes that are no UTF-8, as a policy in training draws them: the
    stream of a client would end there. It also has no way to say what is left at the end.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        # Tokens decode differently at the start of a text, so the last decoded ones are kept as its lead.
        self._lead: list[int] = []
        self._pending: list[int] = []
        self._lead_text = ""

    def push(self, token_id: int) -> str:
        self._pending.append(token_id)
        text = self._pending_text()
        if not text or text.endswith(_HALF_CHARACTER):
            return ""
        self._lead, self._pending = self._pending, []
        self._lead_text = self._tokenizer.decode(self._lead)
        return text

    def flush(self) -> str:
        """What is left at the end, be it half a character."""
        return self._pending_text() if self._pending else ""

    def _pending_text(self) -> str:
        return self._tokenizer.decode(self._lead + self._pending)[len(self._lead_text) :]


class CompletionText:
    """Turns the tokens of one completion into pieces of text, and ends it before a stop string.

    A whole completion and a streamed one go through the same steps, so their texts are equal.
    """

    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...]):
        self._eos_token_ids = tokenizer.eos_token_ids
        self._decoder = TextDecoder(tokenizer)
        self._stops = stops
        self._text = ""
        self._num_released = 0
        self._tokens: list[TokenText] = []
        self.is_finished = False

    def add(self, new: NewToken) -> Piece:
        """The text that this token makes certain; tokens after the end are ignored."""
        if self.is_finished:
            return Piece("", [], None)
        ends = new.finish_reason is not None
        if not (new.finish_reason == "stop" and new.token_id in self._eos_token_ids):
            self._tokens.append(TokenText(new.token_id, new.logprob, len(self._text)))
            self._text += self._decoder.push(new.token_id)
        if ends:
            self._text += self._decoder.flush()
        found = [at for stop in self._stops if (at := self._text.find(stop, self._num_released)) >= 0]
        if found:
            return self._release(min(found), "stop", cut=True)
        if ends:
            return self._release(len(self._text), new.finish_reason)
        return self._release(len(self._text) - self._num_held_back(), None)

    def _num_held_back(self) -> int:
        """The length of the longest end of the text that a stop string begins with."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(self._text) - self._num_released), 0, -1):
            if any(stop.startswith(self._text[-length:]) for stop in self._stops):
                return length
        return 0

    def _release(self, end: int, reason: FinishReason | None, cut: bool = False) -> Piece:
        text = self._text[self._num_released : end]
        self._num_released = end
        self.is_finished = reason is not None
        # At a natural end tokens without text of their own belong to the completion; behind a cut nothing does.
        num_tokens = sum(token.offset < end for token in self._tokens) if cut or not reason else len(self._tokens)
        tokens, self._tokens = self._tokens[:num_tokens], self._tokens[num_tokens:]
        return Piece(text, tokens, reason)


def whole_text(completion: Completion, tokenizer: Tokenizer, stops: tuple[str, ...]) -> Piece:
    """The text of a completion that is finished."""
    text = CompletionText(tokenizer, stops)
    drawn = list(zip(completion.token_ids, completion.rollout_logprobs, strict=True))
    pieces = [text.add(NewToken(0, *token, None)) for token in drawn[:-1]]
    pieces.append(text.add(NewToken(0, *drawn[-1], completion.finish_reason)))
    reason = "stop" if any(piece.finish_reason == "stop" for piece in pieces) else completion.finish_reason
    return Piece("".join(piece.text for piece in pieces), [token for piece in pieces for token in piece.tokens], reason)
