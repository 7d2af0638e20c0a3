"""The audit's sample: removals chosen by a seed, made anew through the whole real model, held against the files."""

import numpy as np

from head_influence import files
from head_influence.invariants import FLOOR, SCENARIOS, VECTORS
from head_influence.recompute import effects

RELATIVE, ROOT_JS = (3e-5, 5e-4), (1e-5, 1e-3)  # tolerances, absolute and relative: above ten times float32 noise
SYSTEMATIC = 2e-4  # relative, of all recomputed values of a variable together


def choose(expected, kinds, heads, singles, joints, seed):
    """Choose the sample: every kind of recipient and every scenario in turn, the rest by chance.

    Parameters
    ----------
    kinds : list of str
        Per layer.
    heads : list of int
        Per layer.
    singles, joints : int
    seed : int

    Returns
    -------
    list of (str, int, str, int)
        Text, transition, "single" or a scenario, and the source head or the recipient head.
    """
    rng = np.random.default_rng(seed)
    recipients = sorted(set(kinds[1:]))
    chosen = []
    for n in range(singles + joints):
        k = n if n < singles else n - singles
        kind = recipients[k % len(recipients) if n < singles else (k + k // 4) % len(recipients)]
        layer = int(rng.choice([i for i in range(len(kinds) - 1) if kinds[i + 1] == kind]))
        text = expected.texts[rng.integers(len(expected.texts))][0].id
        what = "single" if n < singles else SCENARIOS[k % 4]
        chosen.append((text, layer, what, int(rng.integers(heads[layer if n < singles else layer + 1]))))
    return list(dict.fromkeys(chosen))


class Sample:
    """Comparison of stored with recomputed values; a variable's systematic error is that of all of them together."""

    def __init__(self, items):
        self.items, self.sums = items, {}

    def compare(self, name, where, found, expected, tolerance=RELATIVE, scale=None):
        """Differences in units of the tolerance, absolute + relative * `scale` (the expected value itself)."""
        found, expected = np.asarray(found, float), np.asarray(expected, float)
        scale = np.abs(expected) if scale is None else scale
        known = ~np.isnan(expected)
        if found.shape != expected.shape or (np.isnan(found) == known).any():
            self.items.add(f"{name}, in units of its tolerance", np.inf, 1, where)
            return
        error = (found - expected)[known]
        worst = np.max(np.abs(error) / (tolerance[0] + tolerance[1] * scale[known]), initial=0)
        self.items.add(f"{name}, in units of its tolerance", worst, 1, where)
        sums = np.array([error @ expected[known], expected[known] @ expected[known], np.abs(expected[known]).sum()])
        total, least = self.sums.get(name, (0, 0))
        self.sums[name] = total + sums, max(least, tolerance[0] / 10)

    def tensor(self, name, where, found, expected, tolerance=3e-5):
        """Values whose noise is that of the largest."""
        size = float(np.abs(expected).max()) or 1.0
        self.compare(name, where, found / size, expected / size, (tolerance, 0))

    def finish(self):
        """Add each variable's systematic error to the checks."""
        for name, ((error, square, size), floor) in self.sums.items():
            bound = SYSTEMATIC * square + floor * size
            value = abs(error) / bound if bound else 0.0
            where = f"all recomputed values, in units of {SYSTEMATIC} (relative)"
            self.items.add(f"{name}, systematic error", value, 1, where)


def check_sample(items, expected, caches, model, chosen, progress):
    """Recompute the chosen removals and compare all that the files say of them.

    For a joint removal every source head is also removed alone, since its set's singles enter its sums.
    """
    items.group = "recomputed"
    sample = Sample(items)
    for text, ids, _ in expected.texts:
        mine = [c for c in chosen if c[0] == text.id]
        if not mine:
            continue
        progress(f"recomputing {len(mine)} removals of text {text.id} through the whole model")
        layers = sorted({c[1] for c in mine})
        stored = {i: [files.read(expected.path(kind, text.id, i))[0] for kind in ("single", "joint")] for i in layers}
        runs = {}
        for _, layer, what, head in mine:
            heads, tokens = stored[layer][0]["js"].shape[:2]
            for h in [head] if what == "single" else range(heads):
                runs[layer, "single", h] = np.arange(heads) == np.full((tokens, 1), h)
            if what != "single":
                removed = stored[layer][1]["removed"][SCENARIOS.index(what)]
                runs[layer, what, head] = removed[:, :, head].T.astype(bool)
        baseline, changed, _ = model.observe(ids, [(key[0], mask) for key, mask in runs.items()])
        found = {key: effects(baseline[key[0] + 1], x) for key, x in zip(runs, changed, strict=True)}
        for layer, (single, joint) in stored.items():
            where = f"text {text.id}, transition {layer}"
            check_baseline(sample, where, files.read(caches[text.id, layer])[0], baseline, layer)
            own = {key[1:]: x for key, x in found.items() if key[0] == layer}
            for (what, head), x in own.items():
                if what == "single":
                    check_removal(
                        sample, "single", f"{where}, head {head}", single, (head, slice(None)), x, slice(None)
                    )
                    norm = np.maximum(x["norm"], FLOOR)
                    sample.compare(
                        "single baseline_norm", where, single["baseline_norm"] / norm, x["norm"] / norm, (5e-5, 0)
                    )
                else:
                    check_joint_sample(sample, f"{where}, {what}", joint, own, runs[layer, what, head], what, head)
    sample.finish()


def check_baseline(sample, where, stored, baseline, layer):
    """A transition's baseline cache."""
    source, recipient = baseline[layer], baseline[layer + 1]
    sample.tensor("baseline residual_in", where, stored["residual_in"], source["residual_in"], 1e-5)
    for name in ("contribution", "branch_out"):
        size = float(np.abs(source["branch_out"]).max()) or 1.0
        sample.compare(f"baseline {name}", where, stored[name] / size, source[name] / size, (3e-5, 0))
    softmax = ("retrieval", "cos", "sin") if recipient["kind"] == "softmax" else ()
    for name in (*VECTORS, *softmax):
        sample.tensor(f"baseline {name}", where, stored[name], recipient[name])


def check_removal(sample, kind, where, stored, at, x, recipient):
    """Effects of one removal: `at` picks them from the stored arrays, `recipient` from the recomputed ones."""
    norm = np.maximum(x["norm"], FLOOR)[..., recipient]
    before, after = at
    pick = (slice(None), before, slice(None), after)
    sample.compare(f"{kind} relative", where, stored["relative"][pick], x["relative"][..., recipient])
    absolute = stored["absolute"][pick] / norm, x["absolute"][..., recipient] / norm
    sample.compare(f"{kind} absolute", where, *absolute)
    js = (np.sqrt(y) for y in (stored["js"][before][:, after], x["js"][..., recipient]))
    sample.compare(f"{kind} root of js", where, *js, ROOT_JS)


def check_joint_sample(sample, where, stored, own, mask, what, r):
    """A joint removal, of which recipient head r is scored, beside the sums of its set's single removals."""
    s, joint = SCENARIOS.index(what), own[what, r]
    where = f"{where}, recipient head {r}"
    check_removal(sample, "joint", where, stored, (s, r), joint, r)
    norm = np.maximum(joint["norm"][..., r], FLOOR)
    heads = range(mask.shape[1])
    singles = {name: np.array([own["single", h][name][..., r] for h in heads]) for name in ("relative", "js")}
    sums = np.einsum("th,hct->ct", mask, singles["relative"])
    js = np.einsum("th,ht->t", mask, singles["js"])
    sample.compare("joint sum_of_singles", where, stored["sum_of_singles"][:, s, :, r], sums)
    root = (np.sqrt(x) for x in (stored["sum_of_singles_js"][s, :, r], js))
    sample.compare("joint root of sum_of_singles_js", where, *root, ROOT_JS)
    for i, c in enumerate(VECTORS):
        change = np.array([own["single", h]["change"][c][:, r] for h in heads])
        total = np.einsum("th,htd->td", mask, change)
        additive = np.sqrt((total**2).sum(-1)) / norm[i]
        interaction = np.sqrt(((joint["change"][c][:, r] - total) ** 2).sum(-1)) / norm[i]
        sample.compare("joint additive", where, stored["additive"][i, s, :, r], additive)
        scale = np.maximum(additive, joint["relative"][i, :, r])  # a difference of near equals
        sample.compare("joint interaction", where, stored["interaction"][i, s, :, r], interaction, (6e-5, 1e-3), scale)
