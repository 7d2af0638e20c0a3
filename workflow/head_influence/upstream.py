"""A KV head's influence on the next layer, from the concentration study, beside what its cache does for answers."""

import numpy as np

from head_influence.concentration import COMPONENTS, shares
from head_influence.curve_table import ENOUGH, spearman
from head_influence.identity import read_influence

COMPONENT = "qkv"


def upstream_of_layer(paths, first_query, kv_heads):
    """Influence of one softmax layer's KV heads on the next layer's Q, K, V.

    Parameters
    ----------
    paths : list of path
        The layer's single removals, by text.
    first_query : int
        First query of the primary observations.
    kv_heads : int

    Returns
    -------
    share, dominance : array (kv_heads,)
        Mean over the group's query heads of their mean share p, as a multiple of 1/H; how often one of the group's
        query heads has the largest share. Every text has the same weight.
    """
    share, dominance = [], []
    for path in paths:
        influence, _, _ = read_influence(path, first_query)
        p = shares(influence[COMPONENTS.index(COMPONENT)])
        p = p[:, np.isfinite(p[0])]
        if not p.size:
            continue
        heads, groups = len(p), len(p) // kv_heads
        share.append(heads * p.mean(axis=1).reshape(kv_heads, groups).mean(axis=1))
        winners = np.bincount(p.argmax(axis=0) // groups, minlength=kv_heads)
        dominance.append(winners / winners.sum())
    if not share:
        return np.full(kv_heads, np.nan), np.full(kv_heads, np.nan)
    return np.mean(share, axis=0), np.mean(dominance, axis=0)


def beside_upstream(table, singles, first_query):
    """Line up curves and upstream influence of every head whose layer has a next one.

    Parameters
    ----------
    table : CurveTable
    singles : dict
        Layer to its single files, by text.
    first_query : int

    Returns
    -------
    dict
        names, layers, "delta(0)", "gain", "share", "dominance": lists of the same length; within: quantity and measure
        to the mean over layers of the rank correlation within a layer, and the number of layers.
    """
    mean, rows = table.mean(), []
    counts = {layer: int((table.layers == layer).sum()) for layer in np.unique(table.layers)}
    for layer, paths in singles.items():
        if layer not in counts or sorted(table.kv_heads[table.layers == layer]) != list(range(counts[layer])):
            continue  # a share of the layer needs all its heads
        share, dominance = upstream_of_layer(paths, first_query, counts[layer])
        for i in np.flatnonzero(table.layers == layer):
            h = int(table.kv_heads[i])
            rows.append((table.names[i], int(layer), mean[i, 0], -mean[i, -1], share[h], dominance[h]))
    columns = ("names", "layers", "delta(0)", "gain", "share", "dominance")
    out = {name: [row[k] for row in rows] for k, name in enumerate(columns)}
    out["within"] = {
        f"{y} and {x}": _within(out["layers"], np.array(out[x]), np.array(out[y]))
        for y in ("delta(0)", "gain")
        for x in ("share", "dominance")
    }
    return out


def _within(layers, x, y):
    layers = np.array(layers)
    found = [spearman(x[layers == i], y[layers == i]) for i in np.unique(layers) if (layers == i).sum() > 1]
    found = [r for r in found if np.isfinite(r)]
    return (float(np.mean(found)), len(found)) if found else (float("nan"), 0)


def upstream_words(found):
    """Return the report's paragraph on the relation, as HTML."""
    if len(found["names"]) < ENOUGH:
        items = f"<p>{len(found['names'])} heads: too few for a correlation.</p>"
    else:
        rows = (
            f"<li>{name}: {r:.2f}, mean of {n} layer{'s' if n != 1 else ''}</li>"
            for name, (r, n) in found["within"].items()
        )
        items = f"<ul>{''.join(rows)}</ul>"
    return (
        "<p>Both studies ran on this model. Upstream influence: what removing a head's contribution does to the next "
        "layer's queries, keys and values (share among the layer's heads; how often the head has the largest share). "
        "It says nothing about answers; a curve says nothing about the next layer. A KV head stands for its whole "
        "group of query heads: its share is the mean over them, and it dominates when any of them does. The texts of "
        "the two studies differ. Heads of different layers are not comparable in their shares, so the numbers are "
        "rank correlations within a layer, averaged; with two or three heads a layer's own is coarse, and no p-value "
        f"is given.</p>{items}"
    )
