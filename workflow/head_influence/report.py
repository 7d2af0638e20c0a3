"""The report: one self-contained page made from the findings of a study and its controls."""

import base64
import json
from html import escape
from pathlib import Path
from string import Template

from head_influence import PROTOCOL, StudyError, __version__
from head_influence.catalogue import FIGURES
from head_influence.distributions import present
from head_influence.ledger import shown
from head_influence.markup import paragraphs, plain_table, table
from head_influence.provenance import environment
from head_influence.statements import CELLS, summary
from head_influence.summary import comparisons, load_runs, write_table
from head_influence.tables import FILES

TEMPLATES = Path(__file__).parent / "templates"
CAPTIONS = Path(__file__).parents[1] / "report"
SHOWN_HEADS = 0.01  # heads that dominate less often are in the CSV table only


def template(name):
    """Text of a template."""
    return (TEMPLATES / name).read_text(encoding="utf-8")


def count(number, word):
    """A number and its noun."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def embedded(path):
    """A figure as a data address."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise StudyError(f"{path}: cannot be read ({error}); run the figures again") from error
    return f"data:image/svg+xml;base64,{base64.b64encode(data).decode()}"


def figures_part(folder, captions=CAPTIONS):
    """All figures with their captions, by category."""
    out, last = [], None
    for name, (_, category, title) in FIGURES.items():
        if category != last:
            out.append(f"<h3>{escape(category)}</h3>")
        last = category
        caption = paragraphs((captions / f"{name}.rst").read_text(encoding="utf-8"))
        source = embedded(Path(folder) / f"{name}.svg")
        out.append(
            f'<figure id="figure-{name}"><img src="{source}" alt="{escape(title)}">'
            f"<figcaption>{caption}</figcaption></figure>"
        )
    return "\n".join(out)


def overview(runs):
    """What was studied: texts, transitions, observations."""
    study = runs[0]
    texts, kinds = study.texts, study.kinds
    of_kinds = ", ".join(f"{kinds.count(kind)} {kind}" for kind in present(kinds))
    counts = study.found["transition_observations"].sum(axis=0)
    rows = [
        [CELLS[str(c)], *(f"{int(n):,}" for n in counts[i]), f"{int(study.identity['under_floor'][:, :, i].sum()):,}"]
        for i, c in enumerate(study.found["component"])
    ]
    listed = [
        [escape(text), escape(str(language)), str(int(tokens))]
        for text, language, tokens in zip(texts, study.identity["language"], study.identity["tokens"], strict=True)
    ]
    first = study.attributes["first_query"]
    size = f"{count(len(texts), 'text')}, {count(len(kinds), 'transition')} ({escape(of_kinds)})"
    return (
        f"<p>{size}. Results are over "
        f"query tokens from position {first} on. An observation is one text, transition, query token and recipient "
        "head.</p>"
        f'<p class="limit">{count(len(texts), "text")} support{"s" if len(texts) == 1 else ""} no statement about '
        "other texts. This holds for every pooled number and figure on this page.</p>"
        "<p>N<sub>eff</sub>/H is the effective number of source heads over their number H: 1 if all heads have the "
        "same influence, 1/H if one head has all of it. Lower is more concentrated.</p>"
        + table(["component", "defined", "undefined", "small total", "baseline norm under 1e−12"], rows,
                "Number of observations. Undefined: the total influence is exactly zero. Where there is no softmax "
                "recipient, JS is absent and not counted.", "observations")
        + f"<details><summary>Texts</summary>{table(['text', 'language', 'tokens'], listed, '', 'texts')}</details>"
    )  # fmt: skip


def middle(values):
    """Median with quartiles."""
    return f"{shown(float(values[2]))} ({shown(float(values[1]))}–{shown(float(values[3]))})"


def tables_part(runs, names):
    """The most asked-for tables, folded, and links to all tables as files."""
    study = runs[0]
    components = [str(c) for c in study.found["component"]]
    measures = ("n_eff_fraction", "concentration", "n_eff", "top1", "top25", "top50", "bottom25", "n90", "total")
    rows = []
    for j, kind in enumerate(study.kinds):
        for c in components:
            defined, undefined, small = map(int, study.observations("transition", c)[j])
            if defined + undefined:
                values = [middle(study.distribution("transition", c, m)[j]) for m in measures]
                rows.append([str(j), kind, CELLS[c], f"{defined:,}", f"{undefined:,}", f"{small:,}", *values])
    columns = ["transition", "kind", "component", "defined", "undefined", "small total", *measures]
    note = "Medians with quartiles over observations."
    out = [folded("All measures by transition", table(columns, rows, note, "all-measures"))]
    rows = []
    for j, kind in enumerate(study.kinds):
        for h in range(int(study.found["source_heads"][j])):
            often = study.identity["dominance"][j, components.index("qkv"), h]
            if often >= SHOWN_HEADS:
                change = study.identity["head_change"][j, components.index("qkv"), h]
                part = study.identity["constant_part"][j, :, h]
                spread = "–".join(shown(float(x)) for x in dict.fromkeys([part.min(), part.max()]))
                rows.append([str(j), kind, str(h), shown(float(often)), middle(change), spread])
    columns = ["transition", "kind", "source head", "frequency as dominant", "relative change: median (quartiles)",
               "constant part of its contribution, single texts"]  # fmt: skip
    note = f"Q, K, V together; heads that dominate at least {SHOWN_HEADS:.0%} of observations; all heads: heads.csv."
    out.append(folded("Source heads", table(columns, rows, note, "heads")))
    rows = []
    scenarios = [str(s) for s in study.found["scenario"]]
    quantities = ("effect", "sum_of_singles", "effect_over_sum", "effect_over_all", "effect_over_random",
                  "interaction_over_additive")  # fmt: skip
    for k, kind in enumerate(present(study.kinds)):
        for c in components:
            for s in scenarios:
                n = int(study.joint_observations("kind", c, s, "effect")[k])
                if n:
                    values = [middle(study.joint("kind", c, s, q)[k]) for q in quantities]
                    rows.append([kind, CELLS[c], s, f"{n:,}", *values])
    columns = ["kind", "component", "removed", "n", "effect", "sum of singles", "effect / sum of singles",
               "effect / all", "effect / random", "departure / additive"]  # fmt: skip
    note = "Medians with quartiles over observations; a dash where a ratio has no denominator or the quantity does not "
    note += "exist. The departure may be called synergy or cancellation only for softmax recipients and for all heads."
    out.append(folded("Joint removals by kind", table(columns, rows, note, "joint-kinds")))
    links = ", ".join(f'<a href="tables/{name}.csv">{name}.csv</a>' for name in names)
    out.append(f"<p>All numbers as files beside this page: {links}; the same for each control in its own folder.</p>")
    return "".join(out)


def folded(title, content):
    """Content behind a heading that opens it."""
    return f'<details><summary>{title}</summary><div class="tall">{content}</div></details>'


def checks_part(runs, audit, whole_forward):
    """Controls of the measurement, and the audit."""
    rows = [
        [escape(run.label), escape(name.replace("_", " ")), f"{worst:.3g}", f"{limit:.3g}", f"{n:,}"]
        for run in runs
        for name, (worst, limit, n) in json.loads(run.attributes["controls"]).items()
    ]
    note = "Every control passed, or there would be no report: the study stops at one that fails."
    out = [table(["run", "control", "largest value", "limit", "checks"], rows, note, "controls")]
    if whole_forward is None:
        out.append(
            "<p>The comparison of the layer-by-layer pass with the whole model’s own forward pass was not made.</p>"
        )
    else:
        rows = [
            [escape(name.removeprefix("control_").replace("_", " ")), f"{value:.3g}", f"{limit:.3g}"]
            for name, (value, limit) in whole_forward["controls"].items()
        ]
        note = "Layer-by-layer pass of the first text against the whole model’s own forward pass."
        out.append(table(["control", "largest value", "limit"], rows, note, "whole-forward"))
    if audit is None:
        return (
            "".join(out) + "<p><strong>Not audited.</strong> No independent recomputation is part of this report.</p>"
        )
    rows = [
        [escape(str(item["group"])), escape(str(item["name"])), f"{item['value']:.3g}", f"{item['limit']:.3g}",
         f"{item.get('checks', 1):,}"] for item in audit["items"]
    ]  # fmt: skip
    sample = len(audit.get("sample", []))
    seed = escape(str(audit.get("seed")))
    note = f"Audit of {escape(str(audit['study']))}: {sample} removals, chosen with seed {seed}, "
    note += "were recomputed through the whole real model; every file was looked at again."
    return "".join(out) + table(["group", "check", "largest value", "limit", "checks"], rows, note, "audit")


def settings_part(runs, settings):
    """Settings, model and versions."""
    study = runs[0]
    named = [("study", study.name), ("model", study.attributes.get("model", "")),
             ("revision", study.attributes.get("revision", "") or "none"),
             ("fingerprint of the checkpoint", study.attributes.get("fingerprint", "")),
             ("definition of the measurement", f"version {PROTOCOL}"), ("program", f"version {__version__}"),
             ("code of the findings", study.attributes.get("code", "")),
             *environment().items()]  # fmt: skip
    dump = json.dumps(settings, indent=1, ensure_ascii=False)
    return f"{plain_table(named)}<details><summary>All settings</summary><pre>{escape(dump)}</pre></details>"


def read_optional(path):
    """Content of a JSON file, or None where there is no such file."""
    if path is None or not Path(path).is_file():
        return None
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise StudyError(f"{path}: not valid JSON ({error})") from None


def write_report(folder, runs, output, settings, audit=None, whole_forward=None):
    """Write the report and the tables of what it says.

    Parameters
    ----------
    folder : path
        The results folder.
    runs : list of (name, control)
        The study first.
    output : path
        report.html; figures/ and tables/ are beside it.
    settings : dict
        The merged settings, to be shown.
    audit, whole_forward : path, optional
        JSON files; the page says so if they are absent.
    """
    output = Path(output)
    runs = load_runs(folder, runs)
    study = runs[0]
    parts, numbers = summary(runs)
    write_table(output.parent / "tables" / "summary.csv", numbers)
    write_table(output.parent / "tables" / "comparison.csv", comparisons(runs))
    others = [run.label for run in runs[1:]]
    lead = f"Study {study.name} of {study.attributes.get('model', 'a model')}"
    lead += f", beside {', '.join(others)}." if others else "; no control of learned structure was run."
    if any(run.control == "mean" for run in runs):
        lead += " Mean replacement is not the removal that defines the study; it is shown beside it and is no control."
    pages = {
        "explorer.html": "Explorer",
        "curves.html": "Head influence curves",
        "curve_upstream.html": "Curves beside upstream influence",
    }
    links = "".join(
        f'<li><a href="{name}">{text}</a></li>'
        for name, text in pages.items()
        if name == "explorer.html" or (output.parent / name).is_file()
    )
    body = "".join(f'<h3 id="{name}">{heading}</h3>{"".join(content)}' for name, heading, content in parts)
    texts = count(len(study.texts), "text")
    page = Template(template("report.html")).substitute(
        study=escape(study.name), css=template("report.css"), script=template("report.js"), lead=escape(lead),
        links=links, overview=overview(runs), summary=body,
        limits=Template(template("limits.html")).substitute(texts=texts),
        figures=figures_part(output.parent / "figures"),
        tables=tables_part(runs, [*FILES, "comparison", "summary"]),
        checks=checks_part(runs, read_optional(audit), read_optional(whole_forward)),
        methods=template("methods.html"), settings=settings_part(runs, settings),
    )  # fmt: skip
    try:
        output.write_text(page, encoding="utf-8")
    except OSError as error:
        raise StudyError(f"{output}: cannot be written ({error})") from error
