"""The small Llama that `train_shakespeare.py --architecture llama` trains.

RMSNorm, RoPE on half-split pairs, grouped queries and a gated feed-forward, without biases. The
parameters have the names of Hugging Face's `LlamaForCausalLM`, so that its state is the checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from shakespeare_card import INITIAL_DEVIATION, RMS_NORM_EPSILON, ROPE_THETA
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

if TYPE_CHECKING:
    from train_shakespeare import Settings


def linear(n_in: int, n_out: int) -> nn.Linear:
    layer = nn.Linear(n_in, n_out, bias=False)
    nn.init.normal_(layer.weight, std=INITIAL_DEVIATION)
    return layer


def turns(length: int, head_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cos and sin of RoPE's angles, (length, head_size / 2) each, in fp32."""
    pairs = torch.arange(0, head_size, 2, device=device, dtype=torch.float32)
    frequencies = ROPE_THETA ** (-pairs / head_size)
    angles = torch.arange(length, device=device)[:, None] * frequencies
    return angles.cos(), angles.sin()


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn channels k and k + head_size / 2 of x (batch, heads, length, head_size)."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.heads, self.kv_heads = settings.n_head, settings.n_kv_head
        self.head_size = settings.n_embd // settings.n_head
        self.dropout = settings.dropout
        narrow = self.kv_heads * self.head_size
        self.q_proj = linear(settings.n_embd, settings.n_embd)
        self.k_proj = linear(settings.n_embd, narrow)
        self.v_proj = linear(settings.n_embd, narrow)
        self.o_proj = linear(settings.n_embd, settings.n_embd)
        self.resid_dropout = nn.Dropout(settings.dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        group = self.heads // self.kv_heads
        key = turned(key, cos, sin).repeat_interleave(group, dim=1)
        value = value.repeat_interleave(group, dim=1)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(
            turned(query, cos, sin), key, value, dropout_p=dropout, is_causal=True
        )
        out: Tensor = self.resid_dropout(self.o_proj(mixed.transpose(1, 2).flatten(2)))
        return out


class Mlp(nn.Module):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.gate_proj = linear(settings.n_embd, settings.n_ff)
        self.up_proj = linear(settings.n_embd, settings.n_ff)
        self.down_proj = linear(settings.n_ff, settings.n_embd)
        self.dropout = nn.Dropout(settings.dropout)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dropout(self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))
        return out


class Layer(nn.Module):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(settings.n_embd, eps=RMS_NORM_EPSILON)
        self.self_attn = Attention(settings)
        self.post_attention_layernorm = nn.RMSNorm(settings.n_embd, eps=RMS_NORM_EPSILON)
        self.mlp = Mlp(settings)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.head_size = settings.n_embd // settings.n_head
        self.embed_tokens = nn.Embedding(settings.vocab_size, settings.n_embd)
        self.drop = nn.Dropout(settings.dropout)
        self.layers = nn.ModuleList(Layer(settings) for _ in range(settings.n_layer))
        self.norm = nn.RMSNorm(settings.n_embd, eps=RMS_NORM_EPSILON)

    def forward(self, ids: Tensor) -> Tensor:
        cos, sin = turns(ids.shape[1], self.head_size, ids.device)
        x = self.drop(self.embed_tokens(ids))
        for layer in self.layers:
            x = layer(x, cos, sin)
        out: Tensor = self.norm(x)
        return out


class Llama(nn.Module):
    """Llama with its output layer tied to ``embed_tokens``."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.model = Decoder(settings)
        nn.init.normal_(self.model.embed_tokens.weight, std=INITIAL_DEVIATION)
        residual_scale = (2 * settings.n_layer) ** -0.5
        for name, parameter in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.data.mul_(residual_scale)

    def forward(self, ids: Tensor) -> Tensor:
        weight: Any = self.model.embed_tokens.weight
        return F.linear(self.model(ids), weight)
