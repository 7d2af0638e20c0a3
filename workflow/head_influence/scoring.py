"""Log perplexity of answers when the context's cache is compacted: new tokens against what each layer kept.

Everything but the attention over the cache is the model's own modules. Rows of a batch are variants of the cache, all
tokens of a row are one item's question and answer.
"""

from dataclasses import dataclass, field

import torch
from transformers import DynamicCache

from head_influence.models import embed, fill_final_norm, fill_layer, head_weight
from head_influence.prefill import causal, curve_model, run_layer

BATCH_TOKENS = 2048  # rows x tokens that go through a layer at once
LOGITS = 1 << 23  # logits held at once


@dataclass(frozen=True)
class HeadCache:
    """One KV head's cache: keys, values (entries, d) and bias (entries,) that is added to the scaled logits."""

    keys: torch.Tensor
    values: torch.Tensor
    bias: torch.Tensor


@dataclass(frozen=True)
class SoftmaxCache:
    """A softmax layer's cache: one `HeadCache` per KV head, and per batch row the one head that differs there."""

    heads: list
    differs: dict = field(default_factory=dict)  # row -> (kv_head, HeadCache)

    def attention(self, query, key, value, scaling, window):
        """See `prefill.run_layer`."""
        groups = query.shape[1] // key.shape[1]
        out = torch.empty_like(query)
        later = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool).triu(1)
        for head, cache in enumerate(self.heads):
            own = slice(head * groups, (head + 1) * groups)
            rows = {row: c for row, (h, c) in self.differs.items() if h == head}
            live = query[:, own], key[:, head, None], value[:, head, None]
            same = [row for row in range(len(query)) if row not in rows]
            if not rows:
                out[:, own] = _attend(*live, cache, scaling, later)
                continue
            for row in same:  # row by row, so that equal caches give equal bits
                out[row, own] = _attend(*(x[row : row + 1] for x in live), cache, scaling, later)[0]
            for row, other in rows.items():
                out[row, own] = _attend(*(x[row : row + 1] for x in live), other, scaling, later)[0]
        return out.transpose(1, 2)

    def rows(self, chosen):
        """The cache for a batch of only the rows `chosen`."""
        places = {row: i for i, row in enumerate(chosen)}
        return SoftmaxCache(self.heads, {places[r]: x for r, x in self.differs.items() if r in places})


@dataclass(frozen=True)
class SlidingCache:
    """A sliding-window layer's last keys and values (kv_heads, entries, d); it is the same for every row."""

    keys: torch.Tensor
    values: torch.Tensor

    def attention(self, query, key, value, scaling, window):
        """See `prefill.run_layer`."""
        key, value = (
            torch.cat((before.expand(len(query), *before.shape), x), 2)
            for before, x in ((self.keys, key), (self.values, value))
        )
        return causal(query, key, value, scaling, window)

    def rows(self, chosen):
        """The same for any rows."""
        return self


@dataclass(frozen=True)
class LinearCache:
    """A linear layer's state after the whole context: convolution (channels, kernel), recurrent (heads, d, d)."""

    conv: torch.Tensor
    recurrent: torch.Tensor
    attention = None

    def rows(self, chosen):
        """The same for any rows."""
        return self

    def state(self, config, index, rows):
        """Return a transformers cache in which every row has its own copy of the state."""
        cache = DynamicCache(config=config)
        layer = cache.layers[index]
        layer.update_conv_state(self.conv.expand(rows, *self.conv.shape).contiguous())
        layer.update_recurrent_state(self.recurrent.expand(rows, *self.recurrent.shape).contiguous())
        return cache


def _attend(query, key, value, cache, scaling, later):
    """Attention of new tokens (rows, group, n, d) to one head's cache and causally to each other."""
    past = query @ cache.keys.T * scaling + cache.bias
    live = (query @ key.transpose(-1, -2) * scaling).masked_fill(later, -torch.inf)
    weights = torch.cat((past, live), -1).softmax(-1)
    entries = len(cache.keys)
    return weights[..., :entries] @ cache.values + weights[..., entries:] @ value


class Scorer:
    """Runs new tokens through the layers of a model, one layer's weights in memory at a time.

    Parameters
    ----------
    checkpoint : Checkpoint
    length : int
        Tokens of the context; the first new token has this position.
    """

    def __init__(self, checkpoint, length):
        self.checkpoint, self.length = checkpoint, length
        self.model = curve_model(checkpoint)
        self.layers = len(self.model.model.layers)
        self._head = None

    def embed(self, item):
        """Embeddings (tokens, hidden) of an item's new tokens."""
        return embed(self.checkpoint, item.live)[0]

    def load(self, index):
        """Read a layer's weights."""
        fill_layer(self.model, self.checkpoint, index)

    def release(self, index):
        """Forget a layer's weights."""
        self.model.model.layers[index].to("meta")

    def step(self, index, hidden, cache):
        """One layer: hidden (rows, tokens, hidden) before it to hidden after it."""
        state = cache.state(self.model.config, index, len(hidden)) if isinstance(cache, LinearCache) else None
        return run_layer(self.model, index, hidden, self.length, cache.attention, state)

    def nll(self, item, hidden):
        """Mean negative log probability (rows,) of an item's answer tokens, in nats; float64 from float32 logits."""
        if self._head is None:
            fill_final_norm(self.model, self.checkpoint)
            self._head = torch.from_numpy(head_weight(self.checkpoint)).T
        places = torch.tensor(item.predicting)
        with torch.no_grad():
            rows = self.model.model.norm(hidden[:, places]).flatten(0, 1)
            targets = torch.tensor(item.targets).repeat(len(hidden))
            step = max(1, LOGITS // self._head.shape[1])
            parts = []
            for begin in range(0, len(rows), step):
                logits = (rows[begin : begin + step] @ self._head).double()
                wanted = logits.gather(1, targets[begin : begin + step, None])[:, 0]
                parts.append(logits.logsumexp(1) - wanted)
        return torch.cat(parts).view(len(hidden), -1).mean(1).numpy()


def batches(rows, tokens):
    """Split rows 1 .. `rows` - 1 into batches of bounded size, row 0 (the baseline) in front of each."""
    size = max(1, BATCH_TOKENS // tokens - 1)
    return [[0, *range(begin, min(rows, begin + size))] for begin in range(1, rows, size)] or [[0]]


def score(scorer, first, hidden, caches, rows, items):
    """Score every row from layer `first` on.

    Parameters
    ----------
    scorer : Scorer
    first : int
        The layer at which to start.
    hidden : list of tensor (tokens, hidden)
        Per item the residual stream that enters layer `first`, the same for all rows.
    caches : callable
        Layer index to its cache; layers are asked for in order, once each.
    rows : int
        Number of variants; row 0 is the baseline.
    items : list of TokenItem

    Returns
    -------
    difference : array (items, rows)
        Row minus row 0 of the same batch, in nats.
    zero : array (items,)
        Row 0 of the first batch.
    """
    work = [
        (i, chosen, h.expand(len(chosen), *h.shape))
        for i, h in enumerate(hidden)
        for chosen in batches(rows, len(items[i].live))
    ]
    for index in range(first, scorer.layers):
        scorer.load(index)
        cache = caches(index)
        work = [(i, chosen, scorer.step(index, h, cache.rows(chosen))) for i, chosen, h in work]
        scorer.release(index)
    difference, zero = torch.zeros(len(items), rows).double().numpy(), [None] * len(items)
    for i, chosen, h in work:
        nll = scorer.nll(items[i], h)
        difference[i, chosen] = nll - nll[0]
        zero[i] = nll[0] if zero[i] is None else zero[i]
    return difference, zero
