"""Any decoder of transformers that calls its attention function: its own modules run, only attention is ours.

The model is given an attention function that keeps keys and values in the shared-prompt cache. What a layer asks of attention
(scale, sliding window, soft-capped scores, a sink) comes with each call and is honoured for that layer. A probe at the start
compares the result with the model's own forward pass: a model that needs anything else is refused.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from polyrhythm.engine.embedded.attention import attend, attend_explicitly, merge_all
from polyrhythm.engine.embedded.batch import DecodeBatch, padded_rows, prompt_rows
from polyrhythm.engine.embedded.kv_cache import KvCache, KvRange
from polyrhythm.errors import UserError
from polyrhythm.weights.logits import logits_rule

IMPLEMENTATION = "polyrhythm_cached"
PROBE_IDS = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3)
PROBE_TOLERANCE = 1e-3
_MIN_QUERIES = 16  # matrix kernels for fewer rows round differently


@dataclass(frozen=True)
class Wish:
    """What a layer asks of attention in one call."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None

    def attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, *, first_query: int, first_key: int, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp; positions of the first query and key say what a window hides."""
        num_queries, num_keys = queries.size(2), keys.size(2)
        last_query = first_query + num_queries - 1
        hides = causal and self.window is not None and last_query - first_key >= self.window
        if self.softcap is None and not hides and keys.size(3) == values.size(3):
            # The kernel's causal mask begins at the first key: keys that lie before all queries need none.
            return attend(queries, keys, values, scale=self.scale, causal=causal and first_key == first_query)
        visible = None
        if causal:
            at_query = torch.arange(first_query, first_query + num_queries, device=keys.device)[:, None]
            at_key = torch.arange(first_key, first_key + num_keys, device=keys.device)
            visible = at_key <= at_query
            if self.window is not None:
                visible &= at_key > at_query - self.window
        return attend_explicitly(queries, keys, values, scale=self.scale, visible=visible, softcap=self.softcap)

    def first_visible(self, position: int) -> int:
        """The first position that a query at `position` sees."""
        return 0 if self.window is None else max(0, position - self.window + 1)


LayerCall = Callable[[int, Wish, Tensor, Tensor, Tensor], Tensor]
"""Layer, wish, and rotated queries, keys and values [rows, heads, dim]; the output is [rows, heads, dim]."""


@dataclass(frozen=True)
class Part:
    """Rows of a pass with their positions; their attention is their own."""

    token_ids: Tensor
    positions: Tensor
    attention: LayerCall
    kept: slice


class ModuleRunner:
    """The interface of `ModelRunner` over the modules of a transformers model in fp32."""

    def __init__(self, model: Any, *, context_length: int = 0):
        self.model = model
        self.device = model.device
        config = model.config.get_text_config()
        longest = config.max_position_embeddings
        self.context_length = min(context_length or longest, longest)
        self.vocab_size: int = config.vocab_size
        self._decoder = model.get_decoder()
        self._head = model.get_output_embeddings()
        self._rule = logits_rule(model.config)
        expected = _own_logits(model)
        model.set_attn_implementation(IMPLEMENTATION)
        self._shapes = self._find_shapes()
        self._check(expected)

    @property
    def num_layers(self) -> int:
        return len(self._shapes)

    def new_cache(self, num_slots: int) -> KvCache:
        (num_heads, key_dim, value_dim) = self._shapes[0]
        return KvCache(self.num_layers, num_slots, num_heads, key_dim, self.device, value_dim=value_dim)

    @property
    def kv_bytes_per_token(self) -> int:
        (num_heads, key_dim, value_dim) = self._shapes[0]
        return self.num_layers * num_heads * (key_dim + value_dim) * 4

    def prefill(self, cache: KvCache, where: KvRange, token_ids: list[int], start: int) -> Part:
        """Prompt tokens from position `start` on, whose keys and values are kept; its result is the last one's [1, dim]."""
        num_tokens = len(token_ids)
        rows = prompt_rows(
            token_ids, start, where,
            context_length=self.context_length, padding_slot=cache.padding_slot, device=self.device,
        )  # fmt: skip
        earlier_keys, earlier_values = cache.prompt(where, start)

        def attention(layer: int, wish: Wish, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            cache.write(layer, rows.slots, keys, values)
            queries, keys, values = (part.transpose(0, 1).unsqueeze(0) for part in (queries, keys, values))
            pieces = [wish.attend(queries, keys, values, first_query=start, first_key=start, causal=True)]
            if start > (first := wish.first_visible(start)):
                before = [stored[layer][:, :, first:] for stored in (earlier_keys, earlier_values)]
                # Without a window every row sees all of it; with one, later rows see less.
                pieces.append(
                    wish.attend(queries, *before, first_query=start, first_key=first, causal=wish.window is not None)
                )
            return merge_all(pieces, wish.sinks)[0].transpose(0, 1)

        return Part(rows.token_ids, rows.positions, attention, slice(num_tokens - 1, num_tokens))

    def decode(self, cache: KvCache, batch: DecodeBatch) -> Part:
        """One token of every running completion; its result is all rows [rows, dim]."""
        slots, num_rows = batch.slots(), batch.num_padded_rows
        views = []
        for where, span in zip(batch.where, batch.spans.tolist(), strict=True):
            first, last, own_length = span[0], span[1], span[-1]
            prompt, own = cache.prompt(where, where.prompt_length), cache.strips(where, last - first, own_length)
            views.append((first, last, where.prompt_length, own_length, prompt, own))

        def attention(layer: int, wish: Wish, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            cache.write(layer, slots, keys, values)
            repeats = queries.size(1) // keys.size(1)
            least = -(-_MIN_QUERIES // repeats)
            folded = (
                queries.unflatten(1, (keys.size(1), repeats)).transpose(0, 1).contiguous()
            )  # [kv heads, rows, repeats, dim]
            out = queries.new_zeros(num_rows, queries.size(1), values.size(2))
            for first_row, last_row, prompt_length, own_length, prompt, own in views:
                position = prompt_length + own_length - 1
                first_seen = wish.first_visible(position)
                own_from = max(0, first_seen - prompt_length)
                own_keys, own_values = (stored[layer][:, :, own_from:] for stored in own)
                mine = folded[:, first_row:last_row].transpose(0, 1)  # [rows, kv heads, repeats, dim]
                pieces = [wish.attend(mine, own_keys, own_values, first_query=0, first_key=0, causal=False)]
                if first_seen < prompt_length:
                    # Neighbours' rows fill the product up, so that a row's bits do not depend on how many siblings it has.
                    first = min(first_row, max(num_rows - least, 0))
                    last = max(last_row, first + least)
                    shared = folded[:, first:last].flatten(1, 2).unsqueeze(0)
                    prompt_keys, prompt_values = (stored[layer][:, :, first_seen:] for stored in prompt)
                    piece = wish.attend(shared, prompt_keys, prompt_values, first_query=0, first_key=0, causal=False)
                    chosen = slice(first_row - first, last_row - first)
                    pieces.append(tuple(x[0].unflatten(1, (-1, repeats)).transpose(0, 1)[chosen] for x in piece))  # pyright: ignore
                sinks = None if wish.sinks is None else wish.sinks.view(keys.size(1), repeats)
                out[first_row:last_row] = merge_all(pieces, sinks).flatten(1, 2)
            return out

        return Part(batch.token_ids, batch.positions, attention, slice(num_rows))

    @torch.inference_mode()
    def run(self, parts: Sequence[Part]) -> list[Tensor]:
        """Take all parts through the model in one pass; the hidden states that each asked for."""
        sizes = [len(part.token_ids) for part in parts]
        hidden = self._hidden(
            torch.cat([part.token_ids for part in parts]),
            torch.cat([part.positions for part in parts]),
            lambda layer, wish, *rows: torch.cat(
                [
                    part.attention(layer, wish, *piece)
                    for part, *piece in zip(parts, *(row.split(sizes) for row in rows), strict=True)
                ]
            ),
        ).split(sizes)
        return [rows[part.kept] for rows, part in zip(hidden, parts, strict=True)]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states; the number of rows is padded, callers read those they gave."""
        padding = padded_rows(len(hidden)) - len(hidden)
        return self._rule.apply(self._head(torch.nn.functional.pad(hidden, (0, 0, 0, padding)) if padding else hidden))

    def refresh(self) -> None:
        """Nothing is derived from the weights."""

    def _hidden(self, token_ids: Tensor, positions: Tensor, call: LayerCall) -> Tensor:
        output = self._decoder(
            input_ids=token_ids[None], position_ids=positions[None], use_cache=False, attention_call=call
        )
        return output.last_hidden_state[0]

    @torch.inference_mode()
    def _find_shapes(self) -> list[tuple[int, int, int]]:
        """Key/value heads and the dimensions of keys and values, layer by layer."""
        shapes: dict[int, tuple[int, int, int]] = {}
        windows: set[int | None] = set()

        def record(layer: int, wish: Wish, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            shapes[layer] = (keys.size(1), keys.size(2), values.size(2))
            windows.add(wish.window)
            return queries.new_zeros(len(queries), queries.size(1), values.size(2))

        ids = torch.tensor(PROBE_IDS, device=self.device) % self.vocab_size
        try:
            self._hidden(ids, torch.arange(len(ids), device=self.device), record)
        except _NotOurs as error:
            raise UserError(f"{_name(self.model)} cannot be run by the embedded engine: {error}") from None
        num_layers = self.model.config.get_text_config().num_hidden_layers
        if sorted(shapes) != list(range(num_layers)):
            raise UserError(
                f"{_name(self.model)} cannot be run by the embedded engine: {len(shapes)} of its {num_layers} layers call "
                "the attention function they are given (the others keep a state, or compute attention themselves)"
            )
        if _declares_window(self.model.config.get_text_config()) and windows == {None}:
            raise UserError(
                f"{_name(self.model)} cannot be run by the embedded engine: it declares a sliding window and does not pass it "
                "on to the attention function"
            )
        if len(set(shapes.values())) > 1:
            raise UserError(
                f"{_name(self.model)} cannot be run by the embedded engine: its layers differ in their heads"
            )
        return [shapes[layer] for layer in range(num_layers)]

    @torch.inference_mode()
    def _check(self, expected: Tensor) -> None:
        """A prompt in two chunks must have the logits of the model's own forward pass."""
        ids = [token % self.vocab_size for token in PROBE_IDS]
        cache = self.new_cache(len(ids))
        where = KvRange(0, len(ids), 0, 0)
        middle = len(ids) // 2
        rows = []
        for start, chunk in ((0, ids[:middle]), (middle, ids[middle:])):
            (hidden,) = self.run([self.prefill(cache, where, chunk, start)])
            rows.append(self.logits(hidden)[0].log_softmax(-1))
        difference = (torch.stack(rows) - expected[[middle - 1, -1]]).abs().max().item()
        if not difference <= PROBE_TOLERANCE:
            raise UserError(
                f"{_name(self.model)} cannot be run by the embedded engine: its log-probabilities differ by {difference:.2g} "
                "from its own forward pass (it changes attention or its logits in a way the engine does not know)"
            )


class _NotOurs(Exception):
    """A layer asks for something of attention that is not known here."""


def cached_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    attention_call: LayerCall | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every layer: [1, heads, rows, dim] in, [1, rows, heads, dim] out."""
    if attention_call is None:
        raise _NotOurs("its layers do not pass on what the model is called with")
    if attention_mask is not None:
        raise _NotOurs("it gives attention a mask of its own")
    wish = Wish(query.size(-1) ** -0.5 if scaling is None else scaling, sliding_window or None, softcap or None, s_aux)
    rows = (heads[0].transpose(0, 1) for heads in (query, key, value))
    return attention_call(module.layer_idx, wish, *rows)[None], None  # pyright: ignore


AttentionInterface.register(IMPLEMENTATION, cached_attention)


@torch.inference_mode()
def _own_logits(model: Any) -> Tensor:
    model.set_attn_implementation("eager")
    ids = torch.tensor([PROBE_IDS], device=model.device) % model.config.get_text_config().vocab_size
    return model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)


def _declares_window(config: Any) -> bool:
    """A probe is shorter than any window: one that came by a mask alone would not be missed in it."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None:
        return any(kind in ("sliding_attention", "chunked_attention") for kind in layer_types)
    window = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
    return bool(window) and getattr(config, "use_sliding_window", True) is not False


def _name(model: Any) -> str:
    return f"model type {model.config.model_type!r} ({type(model).__name__})"
