"""Single and joint removals of source heads, and what they do to the next layer's effective Q, K, V and retrieval.

Dimensions: H source heads, R recipient heads, T tokens, U different residual rows, V variants (removal masks that
each make a sequence). Removal masks are boolean, true = removed.
"""

from dataclasses import dataclass

import numpy as np

from head_influence import StudyError
from head_influence.influence import balanced, change_norms, js_divergence, relative

VECTORS = ("q", "k", "v")
SCENARIOS = ("weak", "strong", "random", "all")
BLOCK_ROWS = 1024  # rows of one feed-forward batch: bounds the memory of its inner activations


@dataclass
class Transition:
    """One text at one layer transition, ready for interventions.

    Attributes
    ----------
    source, recipient : DecoderLayer
    base : array (T, hidden)
        Residual stream after the source's token mixer, nothing removed.
    contribution : array (H, T, hidden)
    cos, sin : array (T, rotary) or None
    scaling : float
        Of the recipient's attention logits; unused where the recipient is linear.
    """

    source: object
    recipient: object
    base: np.ndarray
    contribution: np.ndarray
    cos: np.ndarray | None = None
    sin: np.ndarray | None = None
    scaling: float = 1.0

    @property
    def tokens(self):
        """Number of tokens."""
        return len(self.base)

    def intervened(self, masks):
        """Residual rows after removing heads.

        Parameters
        ----------
        masks : array of bool (T, V, H)

        Returns
        -------
        array (T, V, hidden)
        """
        return np.stack([self.intervened_at(t, masks[t]) for t in range(self.tokens)])

    def intervened_at(self, token, masks):
        """Residual rows (V, hidden) of one token under masks (V, H)."""
        rows = self.base[token] - masks.astype(np.float32) @ self.contribution[:, token]
        rows += 0.0  # -0 and 0 must have the same bytes
        return rows

    def recomputed(self, rows, token):
        """Recompute the rest of the source layer and the recipient's input norm.

        `rows` (U, hidden) in the order of their `token` (U,): a token's rows, its baseline among them, are in one
        batch, since the same row may differ in its last bits between batches.
        """
        bounds = [0, *np.flatnonzero(np.diff(token)) + 1, len(rows)]
        out, start = np.empty_like(rows), 0
        for end, after in zip(bounds[1:], [*bounds[2:], None], strict=True):
            if after is None or after - start > BLOCK_ROWS:
                out[start:end] = self.recipient.normed(self.source.finish(rows[start:end]))
                start = end
        return out

    def unchanged(self, same):
        """Where nothing that a vector or a softmax row depends on differs from the baseline, byte by byte.

        Parameters
        ----------
        same : array of bool (V, T)
            Where the variant's residual row is the baseline's.

        Returns
        -------
        vectors, rows : array of bool (V, T)
        """
        vectors = trailing(same, self.recipient.reach + 1)
        return vectors, trailing(same, self.recipient.window or self.tokens)


def trailing(same, width):
    """Whether all of the last `width` positions, the own included, are true: (V, T) to (V, T)."""
    counts = np.cumsum(np.pad(same, ((0, 0), (width, 0)), constant_values=True), axis=1)
    return counts[:, width:] - counts[:, :-width] == width


def number_rows(rows):
    """Number rows by their bytes.

    Parameters
    ----------
    rows : array (T, V, hidden)

    Returns
    -------
    number : array of int (T, V)
        Equal exactly where the rows of one token are equal byte by byte.
    unique : array (U, hidden)
        The different rows, token by token.
    token : array of int (U,)
    """
    number = np.empty(rows.shape[:2], int)
    first = []
    for t, variants in enumerate(rows):
        known = {}
        for v, row in enumerate(variants):
            key = row.tobytes()
            if key not in known:
                known[key] = len(first)
                first.append((t, v))
            number[t, v] = known[key]
    token, variant = np.array(first).T
    return number, rows[token, variant], token


def single_removals(transition):
    """Remove each source head at all tokens, one head at a time.

    Returns
    -------
    dict of arrays
        relative (4, H, T, R) for q, k, v, qkv; absolute (3, H, T, R); baseline_norm (3, T, R); js (H, T, R), NaN for
        linear recipients; change_q, change_k, change_v (H, T, distinct heads, D), float32: the change vectors;
        controls: name to (value, limit), of section 9 of the methods.
    """
    recipient, heads, tokens = transition.recipient, len(transition.contribution), transition.tokens
    # Two more variants are controls: a synthetic head that writes nothing, and a removal of nothing at all
    # that is kept apart from the baseline although its bytes are the same.
    with_zero = Transition(
        **transition.__dict__
        | {"contribution": np.concatenate([transition.contribution, np.zeros_like(transition.contribution[:1])])}
    )
    masks = np.zeros((tokens, heads + 3, heads + 1), bool)
    masks[:, np.arange(heads + 1), np.arange(heads + 1)] = True
    zero, null, base = heads, heads + 1, heads + 2
    rows = with_zero.intervened(masks)
    number, unique, token = number_rows(np.delete(rows, null, axis=1))
    number = np.insert(number, null, number[:, -1], axis=1)
    order = np.argsort(np.concatenate([token, np.arange(tokens)]), kind="stable")
    place = np.argsort(order)
    sequence = place[number]
    sequence[:, null] = place[len(unique) :]
    all_rows = np.concatenate([unique, rows[:, null]])[order]
    normed = transition.recomputed(all_rows, np.concatenate([token, np.arange(tokens)])[order])
    parts = recipient.project(normed)
    del normed

    def vectors(variant):
        gathered = {c: part[sequence[None, :, variant]] for c, part in parts.items()}
        return {c: x[0] for c, x in recipient.effective(gathered, transition.cos, transition.sin).items()}

    same_vectors, same_rows = transition.unchanged((number == number[:, base:]).T)
    same_vectors[null] = same_rows[null] = False
    reference = vectors(base)
    softmax = recipient.kind == "softmax"
    retrieval = _retrieval(transition, reference) if softmax else None
    absolute = np.empty((3, heads + 2, tokens, recipient.heads))
    js = np.full((heads + 2, tokens, recipient.heads), np.nan)
    changes = {c: np.empty((heads, *x.shape), np.float32) for c, x in reference.items()}
    for v in range(heads + 2):
        changed = vectors(v)
        for i, c in enumerate(VECTORS):
            change, size = change_norms(changed[c], reference[c])
            size[same_vectors[v]] = 0
            absolute[i, v] = recipient.slots(size)
            if v < heads:
                changes[c][v] = np.where(same_vectors[v][:, None, None], 0, change)
        if softmax:
            divergence = js_divergence(_retrieval(transition, changed), retrieval)
            js[v] = np.where(same_rows[v], 0, divergence).T
    norms = np.stack([recipient.slots(np.linalg.norm(reference[c].astype(np.float64), axis=-1)) for c in VECTORS])
    fractions = relative(absolute, norms[:, None])
    fractions = np.concatenate([fractions, balanced(fractions)[None]])
    finite = np.isfinite(fractions).all() and (not softmax or np.isfinite(js).all())
    return {
        "relative": fractions[:, :heads],
        "absolute": absolute[:, :heads],
        "baseline_norm": norms,
        "js": clipped_js(js[:heads]),
        **{f"change_{c}": x for c, x in changes.items()},
        "controls": {
            "null mask": (max(fractions[:, null].max(), np.nan_to_num(js[null]).max()), 1e-6),
            "zeroed head": (max(fractions[:, zero].max(), np.nan_to_num(js[zero]).max()), 0.0),
            "effects not finite": (float(not finite), 0.0),
        },
    }


def _retrieval(transition, vectors):
    """Softmax rows (R, T, T) of one sequence's effective Q and K."""
    return transition.recipient.retrieval(vectors["q"][None], vectors["k"][None], transition.scaling)[0]


def clipped_js(js):
    """Clip to [0, ln 2]; more than 1e-9 outside is a fault, not rounding."""
    if np.nanmin(js, initial=0) < -1e-9 or np.nanmax(js, initial=0) > np.log(2) + 1e-9:
        raise StudyError("Jensen-Shannon divergence outside [0, ln 2]")
    return np.clip(js, 0, np.log(2))


def joint_masks(qkv, random_seed, sample_index, source_index):
    """Choose the sets that are removed together, per query token and recipient head.

    Parameters
    ----------
    qkv : array (H, T, R)
        Balanced relative change of each single removal.
    random_seed, sample_index, source_index : int
        Seed of the random sets: random_seed + 100 * sample_index + source_index.

    Returns
    -------
    array of bool (4, H, T, R): weak, strong, random, all
    """
    heads, tokens, recipients = qkv.shape
    half = heads // 2
    order = qkv.argsort(axis=0, kind="stable")
    rng = np.random.default_rng(random_seed + 100 * sample_index + source_index)
    drawn = rng.random((tokens, recipients, heads)).argsort(axis=-1, kind="stable")[..., :half]
    masks = np.zeros((4, heads, tokens, recipients), bool)
    np.put_along_axis(masks[0], order[:half], True, axis=0)
    np.put_along_axis(masks[1], order[heads - half :], True, axis=0)
    np.put_along_axis(masks[2], drawn.transpose(2, 0, 1), True, axis=0)
    masks[3] = True
    return masks


def joint_removals(transition, masks, single):
    """Remove sets of source heads, one coherent sequence for each scenario and recipient head.

    Parameters
    ----------
    masks : array of bool (4, H, T, R)
        From `joint_masks`; the last, `all`, is true everywhere and is computed once for all recipient heads.
    single : dict
        Result of `single_removals` (relative, js, baseline_norm, change_q, change_k, change_v).

    Returns
    -------
    dict of arrays
        relative, sum_of_singles (4, 4, T, R) for q, k, v, qkv by scenario; absolute, additive, interaction
        (3, 4, T, R); js, sum_of_singles_js (4, T, R), NaN for linear recipients.
    """
    recipient = transition.recipient
    scenarios, heads, tokens, recipients = masks.shape
    softmax = recipient.kind == "softmax"
    wanted = np.concatenate(
        [
            masks[:3].transpose(2, 0, 3, 1).reshape(tokens, 3 * recipients, heads),
            np.broadcast_to([[True], [False]], (tokens, 2, heads)),
        ],
        axis=1,
    )  # every recipient head's weak, strong, random; then all, the same for every recipient head; then none
    number, normed = _each_mask_once(transition, wanted)
    base = number[:, -1:]
    absolute = np.empty((3, scenarios, tokens, recipients))
    additive, interaction = np.empty_like(absolute), np.empty_like(absolute)
    js = np.full((scenarios, tokens, recipients), np.nan)
    for r in range(recipients):
        columns = [r, recipients + r, 2 * recipients + r, 3 * recipients, 3 * recipients + 1]
        own = number[:, columns].T
        same_vectors, same_rows = transition.unchanged((own == base[:, 0])[:scenarios])
        rows, sequence = np.unique(own, return_inverse=True)
        parts = recipient.project(normed[rows], head=r)
        sequence = sequence.reshape(own.shape)
        gathered = {c: part[sequence] for c, part in parts.items()}
        vectors = recipient.effective(gathered, transition.cos, transition.sin, head=r)
        chosen = masks[:, :, :, r].astype(np.float64)
        for i, c in enumerate(VECTORS):
            x = vectors[c][:, :, 0]
            change, size = change_norms(x[:scenarios], x[scenarios])
            change[same_vectors] = size[same_vectors] = 0
            singles = single[f"change_{c}"]
            singles = singles[:, :, r // (recipients // singles.shape[2])]
            total = np.einsum("sht,htd->std", chosen, singles)
            absolute[i, :, :, r] = size
            additive[i, :, :, r] = np.linalg.norm(total, axis=-1)
            interaction[i, :, :, r] = np.linalg.norm(change - total, axis=-1)
        if softmax:
            rows = recipient.retrieval(vectors["q"], vectors["k"], transition.scaling)[:, 0]
            divergence = js_divergence(rows[:scenarios], rows[scenarios])
            js[:, :, r] = np.where(same_rows, 0, divergence)
    norms = single["baseline_norm"][:, None]
    fractions = relative(absolute, norms)
    return {
        "relative": np.concatenate([fractions, balanced(fractions)[None]]),
        "absolute": absolute,
        "js": clipped_js(js),
        "sum_of_singles": np.einsum("shtr,chtr->cstr", masks, single["relative"]),
        "sum_of_singles_js": np.einsum("shtr,htr->str", masks, single["js"]),
        "additive": relative(additive, norms),
        "interaction": relative(interaction, norms),
    }


def _each_mask_once(transition, masks):
    """Recompute every different (token, mask) once.

    Parameters
    ----------
    masks : array of bool (T, V, H)

    Returns
    -------
    number : array of int (T, V)
        Which row of `normed` a token has under a mask; equal where the residual rows are equal byte by byte.
    normed : array (U, hidden)
    """
    packed = np.packbits(masks, axis=-1)
    number = np.empty(masks.shape[:2], int)
    kept, token, count = [], [], 0
    for t in range(len(masks)):
        _, first, inverse = np.unique(packed[t], axis=0, return_index=True, return_inverse=True)
        rows = transition.intervened_at(t, masks[t, first])
        local, unique, _ = number_rows(rows[None])
        number[t] = count + local[0][inverse.reshape(-1)]
        kept.append(unique)
        token += [t] * len(unique)
        count += len(unique)
    return number, transition.recomputed(np.concatenate(kept), np.array(token))


def check_masks(masks):
    """Count faults: weak and strong sets are disjoint, half of the heads each, complementary for even H."""
    heads = masks.shape[1]
    weak, strong = masks[0], masks[1]
    sizes = [masks[s].sum(axis=0) != (heads if s == 3 else heads // 2) for s in range(4)]
    gap = (weak | strong).sum(axis=0) != 2 * (heads // 2)
    return int(sum(x.sum() for x in sizes) + (weak & strong).sum() + gap.sum())
