"""PyTorch modules of the small GPT-2 and Llama that `train_shakespeare.py` trains.

The parameters have the names of Hugging Face's `GPT2LMHeadModel` and `LlamaForCausalLM`, so that
the state_dict of a model is the checkpoint. The output layer is tied to the token embedding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from shakespeare_card import INITIAL_DEVIATION, LAYER_NORM_EPSILON, RMS_NORM_EPSILON, ROPE_THETA
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

if TYPE_CHECKING:
    from train_shakespeare import Settings


class Module(nn.Module):
    """A part of a model, with the settings' dropout."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.head_size = settings.n_embd // settings.n_head
        self.dropout = nn.Dropout(settings.dropout)

    def heads(self, x: Tensor) -> Tensor:
        """(batch, length, width) → (batch, heads, length, head_size)."""
        return x.unflatten(-1, (-1, self.head_size)).transpose(1, 2)

    def mixed(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of heads, in (batch, length, width)."""
        dropout = self.dropout.p if self.training else 0.0
        out: Tensor = F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True
        )
        return out.transpose(1, 2).flatten(2)


def start_small(model: nn.Module, settings: Settings, names: tuple[str, ...]) -> None:
    """Scale the weights of these names, which end a residual branch, by the number of branches."""
    for name, parameter in model.named_parameters():
        if name.endswith(names):
            parameter.data.mul_((2 * settings.n_layer) ** -0.5)


# --- GPT-2


class Projection(nn.Module):
    """An affine map whose matrix is stored (in, out), as in GPT-2 checkpoints."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n_in, n_out) * INITIAL_DEVIATION)
        self.bias = nn.Parameter(torch.zeros(n_out))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.t(), self.bias)


class Attention(Module):
    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.c_attn = Projection(settings.n_embd, 3 * settings.n_embd)
        self.c_proj = Projection(settings.n_embd, settings.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = map(self.heads, self.c_attn(x).chunk(3, dim=2))
        out: Tensor = self.dropout(self.c_proj(self.mixed(query, key, value)))
        return out


class Mlp(Module):
    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.c_fc = Projection(settings.n_embd, 4 * settings.n_embd)
        self.c_proj = Projection(4 * settings.n_embd, settings.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dropout(self.c_proj(F.gelu(self.c_fc(x), approximate="tanh")))
        return out


class Block(nn.Module):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(settings.n_embd, eps=LAYER_NORM_EPSILON)
        self.attn = Attention(settings)
        self.ln_2 = nn.LayerNorm(settings.n_embd, eps=LAYER_NORM_EPSILON)
        self.mlp = Mlp(settings)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class Transformer(Module):
    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.wte = nn.Embedding(settings.vocab_size, settings.n_embd)
        self.wpe = nn.Embedding(settings.n_ctx, settings.n_embd)
        self.h = nn.ModuleList(Block(settings) for _ in range(settings.n_layer))
        self.ln_f = nn.LayerNorm(settings.n_embd, eps=LAYER_NORM_EPSILON)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.dropout(self.wte(ids) + self.wpe(positions))
        for block in self.h:
            x = block(x)
        out: Tensor = self.ln_f(x)
        return out


class GPT2(nn.Module):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.transformer = Transformer(settings)
        for embedding in (self.transformer.wte, self.transformer.wpe):
            nn.init.normal_(embedding.weight, std=INITIAL_DEVIATION)
        start_small(self, settings, ("c_proj.weight",))

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.transformer(ids), self.transformer.wte.weight)


# --- Llama: RMSNorm, RoPE on half-split pairs, grouped queries and a gated feed-forward


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
    """Rotate channels k and k + head_size / 2 of x (batch, heads, length, head_size)."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


class LlamaAttention(Module):
    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.group = settings.n_head // settings.n_kv_head
        narrow = settings.n_kv_head * self.head_size
        self.q_proj = linear(settings.n_embd, settings.n_embd)
        self.k_proj = linear(settings.n_embd, narrow)
        self.v_proj = linear(settings.n_embd, narrow)
        self.o_proj = linear(settings.n_embd, settings.n_embd)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        projections = self.q_proj, self.k_proj, self.v_proj
        query, key, value = (self.heads(layer(x)) for layer in projections)
        key = turned(key, cos, sin).repeat_interleave(self.group, dim=1)
        value = value.repeat_interleave(self.group, dim=1)
        mixed = self.mixed(turned(query, cos, sin), key, value)
        out: Tensor = self.dropout(self.o_proj(mixed))
        return out


class LlamaMlp(Module):
    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.gate_proj = linear(settings.n_embd, settings.n_ff)
        self.up_proj = linear(settings.n_embd, settings.n_ff)
        self.down_proj = linear(settings.n_ff, settings.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dropout(self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))
        return out


class Layer(nn.Module):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(settings.n_embd, eps=RMS_NORM_EPSILON)
        self.self_attn = LlamaAttention(settings)
        self.post_attention_layernorm = nn.RMSNorm(settings.n_embd, eps=RMS_NORM_EPSILON)
        self.mlp = LlamaMlp(settings)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(Module):
    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.embed_tokens = nn.Embedding(settings.vocab_size, settings.n_embd)
        self.layers = nn.ModuleList(Layer(settings) for _ in range(settings.n_layer))
        self.norm = nn.RMSNorm(settings.n_embd, eps=RMS_NORM_EPSILON)

    def forward(self, ids: Tensor) -> Tensor:
        cos, sin = turns(ids.shape[1], self.head_size, ids.device)
        x = self.dropout(self.embed_tokens(ids))
        for layer in self.layers:
            x = layer(x, cos, sin)
        out: Tensor = self.norm(x)
        return out


class Llama(nn.Module):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.model = Decoder(settings)
        nn.init.normal_(self.model.embed_tokens.weight, std=INITIAL_DEVIATION)
        start_small(self, settings, ("o_proj.weight", "down_proj.weight"))

    def forward(self, ids: Tensor) -> Tensor:
        weight: Any = self.model.embed_tokens.weight
        return F.linear(self.model(ids), weight)
