"""A decoder-only transformer that can be cut into stages, sharded and checkpointed layer by layer."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from launcher.errors import ConfigError

INIT_STD = 0.02
"""Standard deviation of the initial weights; the projections into the residual stream have less, as in GPT-2 (Radford
et al. 2019, section 2.3)."""


class GPT(nn.Module):
    """Pre-norm decoder with RMSNorm, rotary positions, SwiGLU and no biases.

    The plain model is `head(layers(embed(input_ids)))`, and what flows between the layers is one tensor
    [rows, T, hidden_size]: positions are worked out in each layer from T, so that no buffer has to travel, be restored
    or survive an initialisation on the meta device. Rows are filled up at the right, which a causal model doesn't see.

    Sources: RMSNorm, Zhang and Sennrich 2019; rotary positions, Su et al. 2021, equation 34; SwiGLU, Shazeer 2020,
    equation 6.

    Args:
        hidden_size: width of the residual stream.
        num_layers: how many layers.
        num_heads: attention heads; each is hidden_size / num_heads wide.
        intermediate_size: width of the gated MLP.
        vocab_size: token ids are in [0, vocab_size).
        max_length: longest input in tokens.
        dropout: probability of dropping an element after the embedding and in each residual branch.
        tie_head: the head multiplies by the embedding's own tensor.
        dtype: name of the parameters' type, such as `float64`; None: torch's default.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        num_layers: int,
        num_heads: int,
        intermediate_size: int,
        vocab_size: int = 257,
        max_length: int = 512,
        dropout: float = 0.0,
        tie_head: bool = True,
        dtype: str | None = None,
    ) -> None:
        super().__init__()
        parameter_dtype = _parameter_dtype(dtype)
        _check_sizes(
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            intermediate_size=intermediate_size,
            vocab_size=vocab_size,
            max_length=max_length,
        )
        if not 0.0 <= dropout < 1.0:
            raise ConfigError("model.dropout", dropout, "must be a probability from 0 to below 1")
        self.max_length = max_length
        self.token_embedding = nn.Embedding(vocab_size, hidden_size, dtype=parameter_dtype)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(
            Layer(hidden_size, num_heads, intermediate_size, dropout, parameter_dtype) for _ in range(num_layers)
        )
        self.final_norm = nn.RMSNorm(hidden_size, dtype=parameter_dtype)
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False, dtype=parameter_dtype)
        if tie_head:
            self.lm_head.weight = self.token_embedding.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws every parameter of the model again, in a fixed order, from torch's global generator alone."""
        nn.init.normal_(self.token_embedding.weight, std=INIT_STD)
        for layer in self.layers:
            assert isinstance(layer, Layer)
            layer.reset_parameters(residual_std=INIT_STD / math.sqrt(2 * len(self.layers)))
        nn.init.ones_(self.final_norm.weight)
        if self.lm_head.weight is not self.token_embedding.weight:
            nn.init.normal_(self.lm_head.weight, std=INIT_STD)

    def embed(self, input_ids: Tensor) -> Tensor:
        """Hidden states [rows, T, hidden_size] of `input_ids` [rows, T].

        Raises:
            ValueError: T is above max_length.
        """
        length = input_ids.shape[1]
        if length > self.max_length:
            raise ValueError(f"an input of {length} tokens is longer than model.max_length={self.max_length}")
        hidden: Tensor = self.dropout(self.token_embedding(input_ids))
        return hidden

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [rows, T, vocab_size] of hidden states [rows, T, hidden_size]."""
        logits: Tensor = self.lm_head(self.final_norm(hidden))
        return logits

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits [rows, T, vocab_size]; those at position t are of the token after `input_ids[:, t]`."""
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


class Layer(nn.Module):
    """Causal self-attention and a gated MLP, each normed before and added to what came in: hidden -> hidden."""

    def __init__(
        self, hidden_size: int, num_heads: int, intermediate_size: int, dropout: float, dtype: torch.dtype | None
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.RMSNorm(hidden_size, dtype=dtype)
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size, bias=False, dtype=dtype)
        self.attention_output = nn.Linear(hidden_size, hidden_size, bias=False, dtype=dtype)
        self.mlp_norm = nn.RMSNorm(hidden_size, dtype=dtype)
        self.gate_and_up = nn.Linear(hidden_size, 2 * intermediate_size, bias=False, dtype=dtype)
        self.down = nn.Linear(intermediate_size, hidden_size, bias=False, dtype=dtype)
        self.dropout = nn.Dropout(dropout)

    def reset_parameters(self, residual_std: float = INIT_STD) -> None:
        """Draws the layer's parameters again; `residual_std` is for the two projections into the residual stream."""
        for norm in (self.attention_norm, self.mlp_norm):
            nn.init.ones_(norm.weight)
        for linear in (self.query_key_value, self.gate_and_up):
            nn.init.normal_(linear.weight, std=INIT_STD)
        for linear in (self.attention_output, self.down):
            nn.init.normal_(linear.weight, std=residual_std)

    def forward(self, hidden: Tensor) -> Tensor:
        """[rows, T, hidden_size] -> the same shape."""
        hidden = hidden + self.dropout(self._attention(self.attention_norm(hidden)))
        gate, up = self.gate_and_up(self.mlp_norm(hidden)).chunk(2, dim=-1)
        output: Tensor = hidden + self.dropout(self.down(F.silu(gate) * up))
        return output

    def _attention(self, normed: Tensor) -> Tensor:
        rows, length, _ = normed.shape
        projected = self.query_key_value(normed).view(rows, length, 3, self.num_heads, -1)
        query_key, value = projected.split((2, 1), dim=2)
        cos, sin = rotary_tables(length, projected.shape[-1], projected.dtype, projected.device)
        query, key = rotate(query_key, cos[:, None, None], sin[:, None, None]).unbind(2)
        mixed = F.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.squeeze(2).transpose(1, 2), is_causal=True
        )
        output: Tensor = self.attention_output(mixed.transpose(1, 2).reshape(rows, length, -1))
        return output


def rotary_tables(length: int, head_size: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and signed sine of the angle by which each coordinate turns at each position, both [length, head_size].

    Coordinates i and i + head_size / 2 are a pair with one angle; the first of them takes the sine's negative.
    """
    # Half precision can't count positions; the angles are worked out in at least float32 and rounded once.
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    pairs = torch.arange(head_size // 2, device=device, dtype=exact)
    frequencies = torch.pow(10_000.0, -2.0 * pairs / head_size)
    angles = torch.outer(torch.arange(length, device=device, dtype=exact), frequencies)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns each pair of coordinates of `heads` [..., head_size] by the tables, which broadcast to its shape."""
    partners = heads.roll(heads.shape[-1] // 2, dims=-1)
    return torch.addcmul(heads * cos, partners, sin)


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError(f"model.{name}", size, "must be at least 1")
    hidden_size, num_heads = sizes["hidden_size"], sizes["num_heads"]
    if hidden_size % (2 * num_heads):
        problem = (
            f"each head needs an even width: model.hidden_size={hidden_size} must be a multiple of {2 * num_heads}"
        )
        raise ConfigError("model.num_heads", num_heads, problem)


def _parameter_dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError("model.dtype", name, "must name a floating type of torch, such as float32 or float64")
    return dtype
