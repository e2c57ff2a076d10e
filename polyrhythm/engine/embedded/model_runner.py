"""The forward pass of a Llama-like model over the shared-prompt cache; `module_runner` has that of any other.

Llama, Qwen2 and Qwen3 are one architecture with or without biases and query/key norms. Their layers are run here
directly on the weights of the transformers module, packed for the CPU; `refresh` packs again what was loaded into it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyrhythm.devices import choose_device
from polyrhythm.engine.embedded.attention import attend, merge
from polyrhythm.engine.embedded.batch import DecodeBatch, padded_rows, prompt_rows
from polyrhythm.engine.embedded.decoding import Heads, LayerAttention, Rotation, decoding_for
from polyrhythm.engine.embedded.kv_cache import KvCache, KvRange
from polyrhythm.engine.embedded.module_runner import ModuleRunner
from polyrhythm.engine.embedded.projection import Projection
from polyrhythm.errors import UserError
from polyrhythm.kernels.elementwise import can_be_fused, rms_norm
from polyrhythm.models import why_not_generated

PACKED_MODEL_TYPES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True)
class Layer:
    """The weights of one decoder layer."""

    input_norm: Tensor
    qkv: Projection
    qk_norm: Tensor | None
    output: Projection
    mlp_norm: Tensor
    gate: Projection
    up: Projection
    down: Projection


@dataclass(frozen=True)
class Part:
    """Rows of a pass: they share its matrix products with other parts; their attention is their own."""

    token_ids: Tensor
    attention: LayerAttention
    kept: slice
    """The rows whose hidden states are wanted."""


class ModelRunner:
    """A model in fp32 on one device; every method runs without gradients on the calling thread."""

    def __init__(self, model: Any, *, context_length: int = 0):
        self.model = model
        self.device = model.device
        config = self.model.config
        self.context_length = min(context_length or config.max_position_embeddings, config.max_position_embeddings)
        self.vocab_size: int = config.vocab_size
        decoder = self.model.model
        attention = decoder.layers[0].self_attn
        self._heads = Heads(
            config.num_attention_heads, config.num_key_value_heads, attention.head_dim, attention.scaling
        )
        self._decoding = decoding_for(self._heads, self.device)
        self._norm_epsilon: float = config.rms_norm_eps
        self._norm_epsilon_tensor = torch.tensor(config.rms_norm_eps, device=self.device)
        self._norm_is_fused = can_be_fused(decoder.norm.weight, config.hidden_size)
        self.layers = [_layer(module, self._heads) for module in decoder.layers]
        self._embedding: Tensor = decoder.embed_tokens.weight
        self._final_norm: Tensor = decoder.norm.weight
        self._head = Projection(self.model.lm_head.weight)
        self._projections = [
            projection
            for layer in self.layers
            for projection in (layer.qkv, layer.output, layer.gate, layer.up, layer.down)
        ] + [self._head]
        positions = torch.arange(self.context_length, device=self.device)
        cos, sin = decoder.rotary_emb(self._embedding[:1].unsqueeze(0), positions.unsqueeze(0))
        self._cos, self._sin = cos[0, :, None].clone(), sin[0, :, None].clone()
        self._sin[..., : self._heads.dim // 2] *= -1

    def new_cache(self, num_slots: int) -> KvCache:
        return KvCache(len(self.layers), num_slots, self._heads.num_kv_heads, self._heads.dim, self.device)

    @property
    def kv_bytes_per_token(self) -> int:
        return len(self.layers) * 2 * self._heads.num_kv_heads * self._heads.dim * 4

    def prefill(self, cache: KvCache, where: KvRange, token_ids: list[int], start: int) -> Part:
        """Prompt tokens from position `start` on, whose keys and values are kept; its result is the last one's [1, dim]."""
        num_tokens = len(token_ids)
        rows = prompt_rows(
            token_ids, start, where,
            context_length=self.context_length, padding_slot=cache.padding_slot, device=self.device,
        )  # fmt: skip

        earlier_keys, earlier_values = cache.prompt(where, start)

        rotation, heads = self._rotation(rows.positions), self._heads

        def attention(layer: int, queries_and_keys: Tensor, values: Tensor) -> Tensor:
            queries, keys = rotation(queries_and_keys).split((heads.num_heads, heads.num_kv_heads), 1)
            cache.write(layer, rows.slots, keys, values)
            queries, keys, values = (part.transpose(0, 1).unsqueeze(0) for part in (queries, keys, values))
            attended = attend(queries, keys, values, scale=heads.scale, causal=True)
            output = attended[0]
            if start:
                earlier = attend(queries, earlier_keys[layer], earlier_values[layer], scale=heads.scale, causal=False)
                output = merge(attended, earlier)
            return output[0].transpose(0, 1).flatten(1)

        return Part(rows.token_ids, attention, slice(num_tokens - 1, num_tokens))

    def decode(self, cache: KvCache, batch: DecodeBatch) -> Part:
        """One token of every running completion; its result is all rows [rows, dim]."""
        attention = self._decoding(cache, batch, self._rotation(batch.positions))
        return Part(batch.token_ids, attention, slice(batch.num_padded_rows))

    @torch.inference_mode()
    def run(self, parts: Sequence[Part]) -> list[Tensor]:
        """Take all parts through the layers in one pass; the hidden states that each asked for.

        A row's bits do not depend on the other rows of a matrix product, so parts do not depend on one another; they are
        attended in order, so a part may read what an earlier one has just written to the cache.
        """
        if len(parts) == 1:
            (part,) = parts
            return [self._trunk(part.token_ids, part.attention)[part.kept]]
        sizes = [len(part.token_ids) for part in parts]

        def attention(layer: int, queries_and_keys: Tensor, values: Tensor) -> Tensor:
            pieces = zip(parts, queries_and_keys.split(sizes), values.split(sizes), strict=True)
            return torch.cat([part.attention(layer, *piece) for part, *piece in pieces])

        token_ids = torch.cat([part.token_ids for part in parts])
        hidden = self._trunk(token_ids, attention).split(sizes)
        return [rows[part.kept] for rows, part in zip(hidden, parts, strict=True)]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states; the number of rows is padded, callers read those they gave."""
        padding = padded_rows(len(hidden)) - len(hidden)
        return self._head(F.pad(hidden, (0, 0, 0, padding)) if padding else hidden)

    def refresh(self) -> None:
        """The module's weights have changed: bring what is derived from them up to date."""
        for projection in self._projections:
            projection.refresh()
        for layer, module in zip(self.layers, self.model.model.layers, strict=True):
            if layer.qk_norm is not None:
                layer.qk_norm.copy_(_qk_norm(module.self_attn, self._heads))

    def _trunk(self, token_ids: Tensor, attention: LayerAttention) -> Tensor:
        hidden = F.embedding(token_ids, self._embedding)
        num_queries, num_keys = self._heads.num_heads, self._heads.num_kv_heads
        for index, layer in enumerate(self.layers):
            joined = layer.qkv(self._norm(hidden, layer.input_norm)).unflatten(1, (-1, self._heads.dim))
            queries_and_keys, values = joined.split((num_queries + num_keys, num_keys), 1)
            if layer.qk_norm is not None:
                queries_and_keys = self._norm(queries_and_keys, layer.qk_norm)
            hidden = layer.output.plus(attention(index, queries_and_keys, values), hidden)
            normed = self._norm(hidden, layer.mlp_norm)
            hidden = layer.down.plus(layer.up.times(normed, layer.gate.silu(normed)), hidden)
        return self._norm(hidden, self._final_norm)

    def _rotation(self, positions: Tensor) -> Rotation:
        return Rotation(self._cos[positions], self._sin[positions])

    def _norm(self, values: Tensor, weight: Tensor) -> Tensor:
        if weight.dim() == 1 and self._norm_is_fused:
            return rms_norm(values, weight, self._norm_epsilon)[0]
        length = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
        inverse = torch.addcmul(self._norm_epsilon_tensor, length, length, value=1 / values.shape[-1]).rsqrt_()
        return values.mul(inverse).mul_(weight)


def load_runner(model_dir: Path, *, context_length: int = 0) -> "ModelRunner | ModuleRunner":
    """The model of a folder in fp32, by packed layers if they are of the kind known here, else by its own modules."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(model_dir)
    except (OSError, ValueError) as error:
        raise UserError(f"model folder {model_dir} cannot be read: {str(error).splitlines()[0]}") from error
    if why := why_not_generated(config.to_dict()):
        raise UserError(f"the model in {model_dir} {why}")
    loaded: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model = loaded.to(choose_device()).eval().requires_grad_(False)
    runner = ModelRunner if has_packed_layers(config) else ModuleRunner
    return runner(model, context_length=context_length)


def has_packed_layers(config: Any) -> bool:
    """Whether `ModelRunner` computes what the model does."""
    layer_types = getattr(config, "layer_types", None) or []
    return (
        config.model_type in PACKED_MODEL_TYPES
        and config.hidden_act == "silu"
        and all(kind == "full_attention" for kind in layer_types)
    )


def _layer(module: Any, heads: Heads) -> Layer:
    attention, mlp = module.self_attn, module.mlp
    has_norm = hasattr(attention, "q_norm")
    return Layer(
        input_norm=module.input_layernorm.weight,
        qkv=Projection(*_join_linears(attention.q_proj, attention.k_proj, attention.v_proj)),
        qk_norm=_qk_norm(attention, heads) if has_norm else None,
        output=Projection(attention.o_proj.weight, attention.o_proj.bias),
        mlp_norm=module.post_attention_layernorm.weight,
        gate=Projection(mlp.gate_proj.weight, mlp.gate_proj.bias),
        up=Projection(mlp.up_proj.weight, mlp.up_proj.bias),
        down=Projection(mlp.down_proj.weight, mlp.down_proj.bias),
    )


def _qk_norm(attention: Any, heads: Heads) -> Tensor:
    """The norm weights of all query and key heads [heads, dim]: one operation then serves both."""
    queries, keys = attention.q_norm.weight, attention.k_norm.weight
    return torch.cat((queries.expand(heads.num_heads, -1), keys.expand(heads.num_kv_heads, -1)))


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
