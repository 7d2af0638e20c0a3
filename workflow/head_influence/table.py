"""The study's table of concentrations: every observation of every text and transition in one file."""

import numpy as np

from head_influence import files
from head_influence.concentration import COMPONENTS, of_transition
from head_influence.controls import ONE


def measure_concentration(singles, output, texts, small_total, attributes):
    """Aggregate: concentration of every observation of the study, read one single file at a time.

    Parameters
    ----------
    singles : list of list of path
        By text, then transition.
    texts : list of str
        Their ids.
    small_total : dict
        Limits "vectors" and "js" of the flag.
    """
    results, heads, kinds, floored, shape = {}, {}, {}, {}, [0, 0]
    for i, row in enumerate(singles):
        for j, path in enumerate(row):
            data, attrs = files.read(path, ["relative", "js"])
            found = of_transition(data["relative"], data["js"], small_total)
            results[i, j] = {n: x if x.dtype == np.int8 else x.astype(np.float32) for n, x in found.items()}
            results[i, j]["total"] = found["total"]
            heads[j], kinds[j] = data["js"].shape[0], (attrs["source_kind"], attrs["recipient_kind"])
            floored[i, j] = attrs["baseline_norms_under_floor"]
            shape = [max(a, b) for a, b in zip(shape, data["js"].shape[1:], strict=True)]
    first = results[0, 0]
    full = (len(singles), len(singles[0]), len(COMPONENTS), *shape)
    titles = {
        "total": "sum of the source heads' influences", "n_eff": "effective number of source heads",
        "n_eff_fraction": "effective number over number of source heads",
        "concentration": "0: all source heads alike, 1: one head alone", "top1": "share of the largest head",
        "top25": "share of the largest quarter of heads", "top50": "share of the larger half of heads",
        "bottom25": "share of the smallest quarter of heads", "n90": "heads that make up nine tenths",
        "undefined": "1 where the total is exactly zero; -1 where there is no observation",
        "small_total": "1 where a positive total is under the limit; -1 where there is no observation",
    }  # fmt: skip
    dims = ("text", "transition", "component", "query", "recipient_head")
    variables = {
        "text": (("text",), texts, {"long_name": "text id"}),
        "transition": (("transition",), np.arange(full[1]), {"long_name": "source layer", "units": ONE}),
        "component": (("component",), list(COMPONENTS), {"long_name": "component of the influence"}),
        "source_heads": (
            ("transition",), [heads[j] for j in range(full[1])], {"long_name": "number of source heads", "units": ONE}
        ),
        "source_kind": (("transition",), [kinds[j][0] for j in range(full[1])], {"long_name": "source layer's kind"}),
        "recipient_kind": (("transition",), [kinds[j][1] for j in range(full[1])], {"long_name": "recipient's kind"}),
        "baseline_norms_under_floor": (
            ("text", "transition"), [[floored[i, j] for j in range(full[1])] for i in range(full[0])],
            {"long_name": "baseline norms under 1e-12", "units": ONE},
        ),
    }  # fmt: skip
    for name, title in titles.items():
        flag = first[name].dtype == np.int8
        values = np.full(full, -1 if flag else np.nan, first[name].dtype)
        for (i, j), found in results.items():
            part = found.pop(name)  # what has its place in the table is not held twice
            values[i, j, :, : part.shape[1], : part.shape[2]] = part
        variables[name] = (dims, values, {"long_name": title, "units": ONE})
    files.write(output, variables, {"stage": "concentration"} | attributes)
