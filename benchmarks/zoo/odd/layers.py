"""Layers of torch.nn and torch.nn.utils that are not often seen in a pipeline."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, rnn

from benchmarks.zoo.odd.common import (
    CLASSES,
    LENGTH,
    WIDTH,
    WORDS,
    Net,
    odd,
    pictures,
    sequences,
    square,
    tokens,
)
from benchmarks.zoo.subject import Batch, integers


@odd()
class BatchNormMlp(Net):
    """Batch norm over one value a row and channel."""

    def begin(self) -> None:
        self.norm = nn.BatchNorm1d(16)

    def inside(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)


@odd()
class BatchNormCumulative(Net):
    """Batch norm with momentum=None, which divides by how many batches it has seen."""

    def begin(self) -> None:
        self.norm = nn.BatchNorm1d(16, momentum=None)

    def inside(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)


@odd()
class BatchNormWithoutStatistics(Net):
    """Batch norm without running statistics and without weights."""

    def begin(self) -> None:
        self.norm = nn.BatchNorm1d(16, affine=False, track_running_stats=False)

    def inside(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)


@odd()
class FrozenBatchNorm(Net):
    """Batch norm that stays in evaluation while the rest trains."""

    def begin(self) -> None:
        self.norm = nn.BatchNorm1d(16)

    def train(self, mode: bool = True) -> FrozenBatchNorm:
        super().train(mode)
        self.norm.eval()
        return self

    def inside(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)


@odd()
class OldWeightNorm(Net):
    """weight_norm as it was before parametrizations."""

    def begin(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self.first = nn.utils.weight_norm(self.first)


@odd()
class WeightNorm(Net):
    """weight_norm by parametrization."""

    def begin(self) -> None:
        self.first = parametrizations.weight_norm(self.first)


@odd()
class SpectralNorm(Net):
    """Spectral norm by parametrization: a power iteration in buffers."""

    def begin(self) -> None:
        self.first = parametrizations.spectral_norm(self.first)


@odd()
class OldSpectralNorm(Net):
    """Spectral norm as it was before parametrizations: a hook before forward."""

    def begin(self) -> None:
        self.first = nn.utils.spectral_norm(self.first)


@odd()
class Orthogonal(Net):
    """A weight that is kept orthogonal."""

    def begin(self) -> None:
        self.first = parametrizations.orthogonal(self.first)


@odd()
class Pruned(Net):
    """A pruned layer: the weight is a product of a parameter and a mask."""

    def begin(self) -> None:
        from torch.nn.utils import prune

        prune.l1_unstructured(self.first, "weight", 0.5)


@odd(sequences)
class PackedSequences(nn.Module):
    """Packs rows of unequal length for an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, 16, batch_first=True)
        self.out = nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Rows of LENGTH and LENGTH - 2 in turn."""
        lengths = torch.tensor([LENGTH - 2 * (row % 2) for row in range(x.shape[0])])
        packed = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        hidden, _ = self.lstm(packed)
        padded, _ = rnn.pad_packed_sequence(hidden, batch_first=True, total_length=LENGTH)
        return self.out(padded)


def sequences_and_lengths(rows: int) -> Batch:
    """As `sequences`, and lengths [b] in 1 to LENGTH."""
    lengths = integers(low=1, below=LENGTH + 1, seed=2)
    return {**sequences(rows), "lengths": lengths[:rows].clone()}


@odd(sequences_and_lengths, square)
class PackedByLengths(nn.Module):
    """Packs rows for a GRU of two directions by lengths of the batch, unsorted."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 16)
        self.gru = nn.GRU(16, 8, 2, batch_first=True, bidirectional=True)
        self.out = nn.Linear(16, WIDTH)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """x [b, LENGTH, WIDTH] -> the same."""
        packed = rnn.pack_padded_sequence(self.up(x).tanh(), lengths, True, enforce_sorted=False)
        hidden, last = self.gru(packed)
        padded, _ = rnn.pad_packed_sequence(hidden, batch_first=True, total_length=x.shape[1])
        return self.out(padded) + last.mean()


@odd(sequences)
class GruBothWays(nn.Module):
    """A bidirectional GRU of two layers, with a projection behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, 8, 2, batch_first=True, bidirectional=True)
        self.out = nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[b, LENGTH, WIDTH]"""
        return self.out(self.gru(x)[0])


@odd(sequences)
class LstmCell(nn.Module):
    """A loop over the words by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(WIDTH, 16)
        self.out = nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[b, LENGTH, WIDTH]"""
        state, found = None, []
        for k in range(x.shape[1]):
            state = self.cell(x[:, k], state)
            found.append(self.out(state[0]))
        return torch.stack(found, 1)


@odd(sequences)
class LstmProjected(nn.Module):
    """An LSTM with proj_size."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, 16, 2, batch_first=True, proj_size=WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[b, LENGTH, WIDTH]"""
        return self.lstm(x)[0]


@odd(sequences)
class Transformer(nn.Module):
    """nn.Transformer, encoder and decoder, with a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Transformer(WIDTH, 2, 2, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """[b, LENGTH, WIDTH]"""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.net(x, x.flip(1), tgt_mask=mask, tgt_is_causal=True)


@odd(sequences)
class EncoderNormFirst(nn.Module):
    """nn.TransformerEncoder with the norms first and a padding mask."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True, norm_first=True)
        self.net = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        """[b, LENGTH, WIDTH]"""
        padding = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
        padding[:, -1] = True
        return self.net(x, src_key_padding_mask=padding)


@odd(sequences)
class AttentionWeights(nn.Module):
    """Multi-head attention whose weights are used."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.MultiheadAttention(WIDTH, 2, batch_first=True, add_bias_kv=True)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[b, LENGTH, WIDTH]"""
        found, weights = self.one(x, x, x)
        return self.out(found) * weights.sum(-1, keepdim=True)


@odd(tokens)
class Bags(nn.Module):
    """Embedding bags of three words each."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(WORDS, 16, mode="sum")
        self.out = nn.Linear(16, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        """[b, LENGTH, WORDS]"""
        around = torch.stack([x, x.roll(1, 1), x.roll(-1, 1)], -1)
        return self.out(self.bag(around.flatten(0, 1)).unflatten(0, x.shape)).tanh()


@odd(tokens)
class SparseEmbedding(nn.Module):
    """Embeddings whose gradients are sparse in plain PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16, sparse=True)
        self.out = nn.Linear(16, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        """[b, LENGTH, WORDS]"""
        return self.out(self.words(x).tanh())


@odd()
class BatchNormOfAll(Net):
    """SyncBatchNorm, as convert_sync_batchnorm makes it; and a question to torch.distributed."""

    def begin(self) -> None:
        self.norm = nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(16))

    def inside(self, hidden: Tensor) -> Tensor:
        hidden = self.norm(hidden)
        return hidden * 2 if torch.distributed.is_initialized() else hidden


@odd(tokens)
class PaddedEmbedding(nn.Module):
    """An embedding with padding_idx, max_norm is not used, and tied logits."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16, padding_idx=0)
        self.mix = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        """[b, LENGTH, WORDS]"""
        return self.mix(self.words(x)).tanh() @ self.words.weight.T


@odd(tokens)
class RenormedEmbedding(nn.Module):
    """An embedding with max_norm: forward changes the weight in place."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16, max_norm=1.0)
        self.out = nn.Linear(16, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        """[b, LENGTH, WORDS]"""
        return self.out(self.words(x).tanh())


@odd()
class Bilinear(Net):
    """A product of two inputs."""

    def begin(self) -> None:
        self.both = nn.Bilinear(16, 16, 16)

    def inside(self, hidden: Tensor) -> Tensor:
        return self.both(hidden, hidden.flip(-1))


@odd(pictures)
class Norms(nn.Sequential):
    """Group, instance, local response and RMS norms."""

    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU()),
            *(nn.Conv2d(8, 8, 3, padding=1), nn.InstanceNorm2d(8, affine=True), nn.ELU()),
            *(nn.LocalResponseNorm(2), nn.AdaptiveAvgPool2d(2), nn.Flatten()),
            *(nn.RMSNorm(32), nn.PReLU(), nn.Linear(32, CLASSES)),
        )

    def forward(self, x: Tensor) -> Tensor:
        """[b, CLASSES]"""
        return super().forward(x)


@odd(pictures)
class LazyLayers(nn.Module):
    """Lazy layers that a first call has made."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.LazyConv2d(8, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(CLASSES)
        )
        with torch.no_grad():
            self.net(torch.zeros(1, 3, 16, 16))

    def forward(self, x: Tensor) -> Tensor:
        """[b, CLASSES]"""
        return self.net(x)


@odd(pictures)
class Transposed(nn.Module):
    """Transposed and dilated convolutions, unpooling, pixel shuffle."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 8, 3, 2, padding=1)
        self.pool, self.unpool = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)
        self.up = nn.ConvTranspose2d(8, 12, 2, 2)
        self.shuffle = nn.PixelShuffle(2)
        self.out = nn.Conv2d(3, CLASSES, 3, dilation=2)

    def forward(self, x: Tensor) -> Tensor:
        """[b, CLASSES]"""
        hidden, places = self.pool(self.down(x))
        hidden = self.unpool(hidden.tanh(), places)
        return self.out(self.shuffle(self.up(hidden))).mean((2, 3))


@odd(sequences_and_lengths, square)
class Jagged(nn.Module):
    """Rows of unequal length as one nested tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.out = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """x [b, LENGTH, WIDTH] -> the same."""
        there = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
        ends = nn.functional.pad(lengths.cumsum(0), (1, 0))
        hidden = self.up(torch.nested.nested_tensor_from_jagged(x[there], ends)).relu()
        padded = hidden.to_padded_tensor(0.0, (x.shape[0], x.shape[1], 16))
        return self.out(padded)


@odd(sequences_and_lengths, square)
class BagsByOffsets(nn.Module):
    """An embedding bag over all words of the rows in one line, and where each row begins."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(WORDS, 16, mode="mean", include_last_offset=True)
        self.out = nn.Linear(16, WIDTH)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """x [b, LENGTH, WIDTH], of which words are made -> [b, 1, WIDTH]."""
        words = (x[..., 0].sigmoid() * WORDS).long()
        there = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
        ends = nn.functional.pad(lengths.cumsum(0), (1, 0))
        return self.out(self.bag(words[there], ends)).tanh()[:, None]
