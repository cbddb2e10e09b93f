"""The transformer of a published run as plain PyTorch: what a user would hand to `autopipe plan`.

tokens, labels [b, s] --> embedding --> layers x (norm, attention, norm, feed-forward) --> norm
                      --> head --> cross-entropy in fp32, a scalar
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.published.rows import Model, Run, Unsupported

DROPOUT = 0.1
"""As GPT-3 and Megatron-LM's examples have it."""


class Rotary(nn.Module):
    """Rotary positions (Su et al., 2021, arXiv:2104.09864): cos and sin of [s, head_dim]."""

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, seq: int) -> None:
        super().__init__()
        steps = torch.arange(0, head_dim, 2) / head_dim
        angles = torch.arange(seq)[:, None] / 10000.0**steps
        both = torch.cat([angles, angles], dim=1)
        self.register_buffer("cos", both.cos(), persistent=False)
        self.register_buffer("sin", both.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat([-second, first], dim=-1)
        return x * self.cos.to(x.dtype) + turned * self.sin.to(x.dtype)


class Attention(nn.Module):
    """Causal attention: in one kernel if `flash`, else as matmuls and a softmax."""

    mask: Tensor

    def __init__(self, model: Model, dropout: float, flash: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads = model.heads, model.kv_heads
        self.width, self.dropout, self.flash = int(model.head_dim), dropout, flash
        made = (model.heads + 2 * model.kv_heads) * self.width
        self.qkv = nn.Linear(model.hidden, made, bias=not model.llama)
        self.out = nn.Linear(model.heads * self.width, model.hidden, bias=not model.llama)
        self.rotary = Rotary(self.width, model.seq) if model.llama else nn.Identity()
        if not flash:
            later = torch.ones(model.seq, model.seq, dtype=torch.bool).triu(1)
            self.register_buffer("mask", later, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        kv, width = self.kv_heads, self.width
        parts = self.qkv(x).split([self.heads * width, kv * width, kv * width], dim=-1)
        q, k, v = (part.unflatten(-1, (-1, width)).transpose(1, 2) for part in parts)
        q, k = self.rotary(q), self.rotary(k)
        if kv != self.heads:
            k, v = (y.repeat_interleave(self.heads // kv, dim=1) for y in (k, v))
        dropout = self.dropout if self.training else 0.0
        if self.flash:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        else:
            scores = q @ k.transpose(-1, -2) / math.sqrt(width)
            weights = scores.masked_fill(self.mask, -1e4).softmax(dim=-1)
            y = F.dropout(weights, dropout) @ v
        return self.out(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Two matmuls and a GELU, or three and a SiLU (SwiGLU)."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        bias = not model.llama
        self.up = nn.Linear(model.hidden, model.ffn, bias=bias)
        self.gate = nn.Linear(model.hidden, model.ffn, bias=bias) if model.gated else None
        self.down = nn.Linear(model.ffn, model.hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        return self.down(F.gelu(up) if self.gate is None else F.silu(self.gate(x)) * up)


class RMSNorm(nn.Module):
    """Op by op and in fp32, as LLaMA's own code has it (facebookresearch/llama, llama/model.py):
    software without a kernel for it, and torch before 2.4."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        made = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return made.type_as(x) * self.weight


def norm_of(run: Run) -> type[nn.RMSNorm | RMSNorm | nn.LayerNorm]:
    """The kind of norm that a run's layers have."""
    if not run.model.llama:
        return nn.LayerNorm
    return nn.RMSNorm if run.software.fused else RMSNorm


class Layer(nn.Module):
    def __init__(self, run: Run, dropout: float) -> None:
        super().__init__()
        model, norm = run.model, norm_of(run)
        self.norm1, self.norm2 = norm(model.hidden), norm(model.hidden)
        self.attention = Attention(model, dropout, run.attention.startswith("flash"))
        self.feed_forward, self.dropout = FeedForward(model), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.feed_forward(self.norm2(x)))


class Transformer(nn.Module):
    """The model of a run, and its loss.

    Raises:
        Unsupported: its heads do not divide its width.
    """

    def __init__(self, run: Run) -> None:
        super().__init__()
        model, dropout = run.model, DROPOUT if run.dropout else 0.0
        if model.hidden % model.heads or model.heads % model.kv_heads:
            raise Unsupported(f"{model.heads} heads of a width of {model.hidden}")
        self.tokens = nn.Embedding(model.vocab, model.hidden)
        self.positions = None if model.llama else nn.Embedding(model.seq, model.hidden)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList([Layer(run, dropout) for _ in range(model.layers)])
        self.norm = norm_of(run)(model.hidden)
        self.head = nn.Linear(model.hidden, model.vocab, bias=False)
        if model.tied:
            self.head.weight = self.tokens.weight
        if run.pure:
            self.to(torch.bfloat16)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions.weight[: tokens.shape[1]]
        x = self.dropout(x)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
