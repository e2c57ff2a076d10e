"""The forward pass of a transformers causal language model over the shared-prompt cache.

Llama, Qwen2 and Qwen3 are one architecture with or without biases and query/key norms. Their layers are run here
directly on the weights of the transformers module: query, key and value projections become one matrix product, gate and
up another. The module's own parameters are views of the joined matrices, so weights loaded into it are in use at once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyrhythm.engine.attention import attend, merge, merge_rows
from polyrhythm.engine.batch import DecodeBatch, padded_rows
from polyrhythm.engine.kv_cache import KvCache, KvRange
from polyrhythm.errors import UserError

SUPPORTED_MODEL_TYPES = ("llama", "qwen2", "qwen3")
# Matrix kernels for fewer rows than this round differently, so no product is ever done with fewer.
_MIN_QUERIES = 16

LayerAttention = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Layer:
    """The weights of one decoder layer, joined where they are multiplied with the same input."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


class ModelRunner:
    """A model in fp32 on one device; every method runs without gradients on the calling thread."""

    def __init__(self, model_dir: Path, *, context_length: int = 0):
        self.model = _load(model_dir)
        self.device = self.model.device
        config = self.model.config
        self.context_length = min(context_length or config.max_position_embeddings, config.max_position_embeddings)
        self.vocab_size: int = config.vocab_size
        self.num_heads: int = config.num_attention_heads
        self.num_kv_heads: int = config.num_key_value_heads
        decoder = self.model.model
        self.head_dim: int = decoder.layers[0].self_attn.head_dim
        self._norm_eps: float = config.rms_norm_eps
        self._scale: float = decoder.layers[0].self_attn.scaling
        self.layers = [_joined(layer) for layer in decoder.layers]
        self._embedding: Tensor = decoder.embed_tokens.weight
        self._final_norm: Tensor = decoder.norm.weight
        self._head: Tensor = self.model.lm_head.weight
        positions = torch.arange(self.context_length, device=self.device)
        cos, sin = decoder.rotary_emb(self._embedding[:1].unsqueeze(0), positions.unsqueeze(0))
        half = self.head_dim // 2
        self._cos, self._sin = cos[0, :, None, :half].clone(), sin[0, :, None, :half].clone()

    def new_cache(self, num_slots: int) -> KvCache:
        return KvCache(len(self.layers), num_slots, self.num_kv_heads, self.head_dim, self.device)

    @property
    def kv_bytes_per_token(self) -> int:
        return len(self.layers) * 2 * self.num_kv_heads * self.head_dim * 4

    @torch.inference_mode()
    def prefill(self, cache: KvCache, where: KvRange, token_ids: list[int], start: int) -> Tensor:
        """Run prompt tokens from position `start` on and keep their keys and values; the last hidden state [1, dim]."""
        num_tokens = len(token_ids)
        num_rows = padded_rows(num_tokens)
        padding = num_rows - num_tokens
        ids = torch.tensor(token_ids + [0] * padding, device=self.device)
        positions = torch.arange(start, start + num_rows, device=self.device).clamp_(max=self.context_length - 1)
        slots = torch.arange(where.start + start, where.start + start + num_rows, device=self.device)
        slots[num_tokens:] = cache.padding_slot

        def attention(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            cache.write(layer, slots, keys, values)
            queries, keys, values = (part.transpose(0, 1).unsqueeze(0) for part in (queries, keys, values))
            attended = attend(queries, keys, values, scale=self._scale, causal=True)
            output = attended[0]
            if start:
                earlier = cache.prompt(layer, where, start)
                output = merge(attended, attend(queries, *earlier, scale=self._scale, causal=False))
            return output[0].transpose(0, 1).reshape(num_rows, -1)

        return self._trunk(ids, positions, attention)[num_tokens - 1 : num_tokens]

    @torch.inference_mode()
    def decode(self, cache: KvCache, batch: DecodeBatch) -> Tensor:
        """Run one token of every running completion; the hidden states [rows, dim]."""
        num_rows = batch.num_padded_rows
        repeats = self.num_heads // self.num_kv_heads
        window = -(-_MIN_QUERIES // repeats)
        output = torch.zeros(num_rows, self.num_kv_heads, repeats, self.head_dim, device=self.device)

        def attention(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            cache.write(layer, batch.slots, keys, values)
            folded = queries.unflatten(1, (self.num_kv_heads, repeats)).transpose(0, 1).contiguous()
            prompt_parts, own_parts = [], []
            for span in batch.spans:
                first = min(span.first_row, max(num_rows - window, 0))
                last = max(span.last_row, first + window)
                prompt = attend(
                    folded[:, first:last].flatten(1, 2).unsqueeze(0),
                    *cache.prompt(layer, span.where, span.where.prompt_length),
                    scale=self._scale,
                    causal=False,
                )
                mine = slice(span.first_row - first, span.last_row - first)
                prompt_parts.append([part[0].unflatten(1, (-1, repeats)).transpose(0, 1)[mine] for part in prompt])
                own = attend(
                    folded[:, span.first_row : span.last_row].transpose(0, 1),
                    *cache.strips(layer, span.where, span.num_rows, span.own_length),
                    scale=self._scale,
                    causal=False,
                )
                own_parts.append(own)
            merge_rows(own_parts, prompt_parts, out=output[: batch.num_rows])
            return output.flatten(1)

        return self._trunk(batch.token_ids, batch.positions, attention)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states; the number of rows is padded, callers read those they gave."""
        padding = padded_rows(len(hidden)) - len(hidden)
        return F.linear(F.pad(hidden, (0, 0, 0, padding)) if padding else hidden, self._head)

    def _trunk(self, token_ids: Tensor, positions: Tensor, attention: LayerAttention) -> Tensor:
        hidden = F.embedding(token_ids, self._embedding)
        cos, sin = self._cos[positions], self._sin[positions]
        num_queries, num_keys = self.num_heads, self.num_kv_heads
        for index, layer in enumerate(self.layers):
            joined = F.linear(self._norm(hidden, layer.input_norm), layer.qkv, layer.qkv_bias)
            queries, keys, values = joined.unflatten(1, (-1, self.head_dim)).split((num_queries, num_keys, num_keys), 1)
            if layer.query_norm is not None and layer.key_norm is not None:
                queries, keys = self._norm(queries, layer.query_norm), self._norm(keys, layer.key_norm)
            attended = attention(index, _rotated(queries, cos, sin), _rotated(keys, cos, sin), values)
            hidden = hidden + F.linear(attended, layer.output, layer.output_bias)
            gate, up = F.linear(self._norm(hidden, layer.mlp_norm), layer.gate_up, layer.gate_up_bias).chunk(2, 1)
            hidden = hidden + F.linear(F.silu(gate) * up, layer.down, layer.down_bias)
        return self._norm(hidden, self._final_norm)

    def _norm(self, values: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(values, weight.shape, weight, self._norm_eps)


def _rotated(values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of [rows, heads, dim], in the half-split order of the Llama family."""
    first, second = values.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _load(model_dir: Path) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(model_dir)
    except (OSError, ValueError) as error:
        raise UserError(f"model folder {model_dir} cannot be read: {str(error).splitlines()[0]}") from error
    _check_supported(config)
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    return model.to(device).eval().requires_grad_(False)


def _check_supported(config: Any) -> None:
    model_type = config.model_type
    if model_type not in SUPPORTED_MODEL_TYPES:
        supported = ", ".join(SUPPORTED_MODEL_TYPES)
        raise UserError(f"model type {model_type!r} is not supported by the embedded engine: it runs {supported}")
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or []):
        raise UserError(f"this {model_type} model has sliding windows, which the embedded engine does not run")
    if config.hidden_act != "silu":
        raise UserError(f"activation {config.hidden_act!r} is not supported by the embedded engine: it runs silu")
    rope_type = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope_type in ("dynamic", "longrope"):
        raise UserError(f"rope type {rope_type!r} depends on the prompt: the embedded engine does not run it")


def _joined(layer: Any) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    qkv, qkv_bias = _join_linears(attention.q_proj, attention.k_proj, attention.v_proj)
    gate_up, gate_up_bias = _join_linears(mlp.gate_proj, mlp.up_proj)
    return Layer(
        input_norm=layer.input_layernorm.weight,
        qkv=qkv,
        qkv_bias=qkv_bias,
        query_norm=attention.q_norm.weight if hasattr(attention, "q_norm") else None,
        key_norm=attention.k_norm.weight if hasattr(attention, "k_norm") else None,
        output=attention.o_proj.weight,
        output_bias=attention.o_proj.bias,
        mlp_norm=layer.post_attention_layernorm.weight,
        gate_up=gate_up,
        gate_up_bias=gate_up_bias,
        down=mlp.down_proj.weight,
        down_bias=mlp.down_proj.bias,
    )


def _join_linears(*linears: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """One weight and bias for all of them; their own parameters become views of it."""
    weight = torch.cat([linear.weight.data for linear in linears])
    bias = torch.cat([linear.bias.data for linear in linears]) if linears[0].bias is not None else None
    start = 0
    for linear in linears:
        end = start + linear.out_features
        linear.weight.data = weight[start:end]
        if bias is not None:
            linear.bias.data = bias[start:end]
        start = end
    return weight, bias
