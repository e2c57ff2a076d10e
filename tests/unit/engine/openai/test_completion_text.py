from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from polyrhythm.engine.kinds import NewToken
from polyrhythm.engine.openai.text import CompletionText, Piece, TextDecoder, whole_text
from polyrhythm.tokenizer import Tokenizer
from polyrhythm.types import Completion, FinishReason

TEXTS = st.text(alphabet="ab€🎵 \n", max_size=12)


@pytest.fixture(scope="module")
def tokenizer(model_dirs) -> Tokenizer:
    return Tokenizer(model_dirs["qwen3"])


def pieces(
    tokenizer: Tokenizer, text: str, *stops: str, reason: FinishReason = "length", extra: tuple[int, ...] = ()
) -> list[Piece]:
    """What comes out for the bytes of a text, token by token."""
    ids = [*tokenizer.encode(text), *extra]
    stream = CompletionText(tokenizer, stops)
    return [stream.add(NewToken(0, i, -1.0, reason if n == len(ids) - 1 else None)) for n, i in enumerate(ids)]


def texts(*args, **kwargs) -> list[str]:
    return [piece.text for piece in pieces(*args, **kwargs)]


def test_a_character_of_several_tokens_comes_with_the_last_of_them(tokenizer):
    assert texts(tokenizer, "a€b") == ["a", "", "", "€", "b"]


def test_half_a_character_is_shown_only_at_the_end(tokenizer):
    first_byte_of_the_euro_sign = tokenizer.encode("€")[:1]
    assert texts(tokenizer, "a", extra=tuple(first_byte_of_the_euro_sign)) == ["a", "\ufffd"]


@given(st.lists(st.integers(0, 299), max_size=30))
def test_decoding_token_by_token_equals_decoding_at_once(tokenizer, token_ids):
    decoder = TextDecoder(tokenizer)
    assert "".join(map(decoder.push, token_ids)) + decoder.flush() == tokenizer.decode(token_ids)


def test_text_that_may_become_a_stop_string_is_held_back_until_it_is_certain(tokenizer):
    assert texts(tokenizer, "xabyabc", "abc") == ["x", "", "", "aby", "", "", ""]
    assert texts(tokenizer, "xab", "abc") == ["x", "", "ab"]


def test_a_stop_string_ends_the_text_before_it_and_says_so(tokenizer):
    last = pieces(tokenizer, "one\n\ntwo", "\n\n", "two")[4]
    assert (last.text, last.finish_reason) == ("", "stop")
    assert texts(tokenizer, "one\n\ntwo", "\n\n", "two") == ["o", "n", "e", "", "", "", "", ""]


def test_of_two_stop_strings_that_end_together_the_one_that_begins_first_counts(tokenizer):
    assert "".join(texts(tokenizer, "xabc", "c", "abc")) == "x"


@given(TEXTS, st.lists(TEXTS.filter(bool), max_size=3))
def test_the_pieces_never_contain_a_stop_string_and_lose_nothing_before_it(tokenizer, text, stops):
    if not text:
        return
    streamed = "".join(texts(tokenizer, text, *stops))
    assert text.startswith(streamed)
    assert not any(stop in streamed for stop in stops)
    assert streamed == text or any(text[len(streamed) :].startswith(stop) for stop in stops)


def test_tokens_are_reported_with_the_text_that_they_begin(tokenizer):
    tokens = [[token.offset for token in piece.tokens] for piece in pieces(tokenizer, "a€b")]
    assert tokens == [[0], [], [], [1, 1, 1], [2]]


def test_tokens_of_a_stop_string_are_not_reported(tokenizer):
    assert [token.offset for piece in pieces(tokenizer, "xxab", "ab") for token in piece.tokens] == [0, 1]


def test_the_end_of_text_token_is_no_text(tokenizer: Tokenizer, model_dirs: dict[str, Path]):
    (eos,) = tokenizer.eos_token_ids
    ending = pieces(tokenizer, "hi", reason="stop", extra=(eos,))
    assert [piece.text for piece in ending] == ["h", "i", ""]
    assert ending[-1] == Piece("", [], "stop")


def test_a_whole_completion_has_the_text_of_a_streamed_one(tokenizer):
    ids = tokenizer.encode("€uro stop here")
    completion = Completion(ids, [-0.5] * len(ids), "stop")
    whole = whole_text(completion, tokenizer, ("stop",))
    assert (whole.text, whole.finish_reason, len(whole.tokens)) == ("€uro ", "stop", 3 + 4)


def test_bytes_that_are_no_text_do_not_end_the_stream_of_a_tokenizer_with_byte_fallback():
    vocabulary = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)} | {"\u2581word": 257}
    fast = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    fast.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    decoder = TextDecoder(fast)  # pyright: ignore[reportArgumentType]: it has decode, which is all that is needed
    letter, broken, word = ord("A") + 1, 0xFF + 1, 257
    text = "".join(map(decoder.push, [letter, broken, word, letter, broken, broken, word, word]))
    assert text.endswith(" word word") and text.count("word") == 3
