"""The report and the explorer: every number recomputed another way, everything escaped, and read in a real browser."""

import base64
import csv
import html
import json
import os
import re
import shutil
import subprocess
import warnings
import zlib
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from head_influence import StudyError, explorer, ledger, markup, report
from head_influence.catalogue import FIGURES, title
from small_studies import FIRST_QUERY, HOSTILE, TEXTS, reported, study

SUMMARIES = [("hybrid", True, 3), ("llama_zero", False, 3), ("hybrid_odd", False, 2), ("llama", False, 9)]
LEVELS = {"q05": 0.05, "q25": 0.25, "q50": 0.5, "q75": 0.75, "q95": 0.95}


class Raw:
    """A run's raw files, read with xarray, and every number of a summary computed from them."""

    def __init__(self, folder):
        self.folder = folder
        self.table = xr.open_dataset(folder / "concentration.nc").load()
        kinds = zip(self.table["source_kind"].values, self.table["recipient_kind"].values, strict=True)
        self.kinds = [f"{source} to {recipient}" for source, recipient in kinds]
        self.texts = self.table["text"].values.tolist()
        self.cache = {}

    def opened(self, kind, text, j):
        """The primary queries of a raw file."""
        if (kind, text, j) not in self.cache:
            with xr.open_dataset(self.folder / kind / text / f"L{j:02d}.nc") as data:
                self.cache[kind, text, j] = data.isel(query=slice(FIRST_QUERY, None)).load()
        return self.cache[kind, text, j]

    def members(self, row):
        if row["group"] == "transition":
            return [int(row["member"])]
        return [j for j, kind in enumerate(self.kinds) if kind == row["member"]]

    def observations(self, row):
        """The observations of a row by text, each an array without missing ones."""
        texts = []
        for text in self.texts:
            parts = [self.values(row, text, j) for j in self.members(row)]
            values = np.concatenate([p.ravel() for p in parts])
            texts.append(values[np.isfinite(values)])
        return texts

    def values(self, row, text, j):
        component, quantity, scenario = row["component"], row["quantity"], row["scenario"]
        if not scenario:
            here = self.table.sel(text=text, component=component, transition=j)[quantity]
            return here.isel(query=slice(FIRST_QUERY, None)).values
        data = self.opened("joint", text, j)

        def effect(which):
            found = data["js"] if component == "js" else data["relative"].sel(component=component)
            return found.sel(scenario=which).values

        if quantity == "effect":
            return effect(scenario)
        if quantity == "effect_over_all":
            return divided(effect(scenario), effect("all"))
        if quantity == "effect_over_sum":
            sums = data["sum_of_singles_js"] if component == "js" else data["sum_of_singles"].sel(component=component)
            return divided(effect(scenario), sums.sel(scenario=scenario).values)
        additive = data["additive"].sel(vector=component, scenario=scenario).values
        if quantity == "effect_over_additive":
            return divided(effect(scenario), additive, 1e-6)
        assert quantity == "interaction_over_additive"
        return divided(data["interaction"].sel(vector=component, scenario=scenario).values, additive, 1e-6)

    def shares(self, text, j, component):
        data = self.opened("single", text, j)
        d = data["js"] if component == "js" else data["relative"].sel(component=component)
        total = d.sum("source_head", skipna=False)
        return (d / total.where(total > 0)).transpose("source_head", "query", "recipient_head").values

    def identity(self, row):
        j, component, quantity, statistic = int(row["member"]), row["component"], row["quantity"], row["statistic"]
        shares = [self.shares(text, j, component) for text in self.texts]
        shares = [p[:, np.isfinite(p[0])] if "modal" in quantity and "part" not in quantity else p for p in shares]
        heads = len(shares[0])
        if quantity == "overlap of random halves":
            sets = [set(c) for c in combinations(range(heads), heads // 2)]
            return np.mean([len(a & b) / len(a | b) for a, b in product(sets, sets)])
        if quantity.startswith("variance"):
            return self.variance(shares, quantity.removeprefix("variance "))
        if quantity in ("modal head", "modal share", "own modal share"):
            often = np.array([[(p.argmax(axis=0) == h).mean() for h in range(heads)] for p in shares])
            if quantity == "own modal share":
                return spread_of(often.max(axis=1))[statistic]
            modal = often.mean(axis=0).argmax()
            found = {"value": often.mean(axis=0)[modal]} | spread_of(often[:, modal])
            return modal if quantity == "modal head" else found[statistic]
        if quantity.startswith("constant part"):
            known = [p[:, np.isfinite(p[0])] for p in shares]
            often = np.mean([[(p.argmax(axis=0) == h).mean() for h in range(heads)] for p in known], axis=0)
            return np.mean([self.constant(text, j, often.argmax()) for text in self.texts])
        return self.overlap(shares, quantity)

    def constant(self, text, j, head):
        with xr.open_dataset(self.folder / "single" / text / f"L{j:02d}.nc") as data:
            cache = data.attrs["baseline"]
        with xr.open_dataset(cache) as data:
            written = data["contribution"].values[head, FIRST_QUERY:].astype(float)
        return np.square(written.mean(axis=0)).sum() / np.square(written).sum(axis=1).mean()

    def variance(self, shares, part):
        y = [p - 1 / len(p) for p in shares]
        total = np.mean([np.square(x).sum(axis=0).mean() for x in y])
        head = np.mean([x.mean(axis=(1, 2)) for x in y], axis=0)
        if part == "head":
            return np.square(head).sum() / total
        if part == "head x text":
            return np.mean([np.square(x.mean(axis=(1, 2)) - head).sum() for x in y]) / total
        if part == "head x token":
            spread = [np.square(x.mean(axis=2) - x.mean(axis=(1, 2))[:, None]).sum(axis=0).mean() for x in y]
            return np.mean(spread) / total
        recipient = np.mean([x.mean(axis=1) for x in y], axis=0)
        return np.square(recipient - head[:, None]).sum(axis=0).mean() / total

    def overlap(self, shares, between):
        strong = []
        for p in shares:
            half = len(p) // 2
            rank = np.array([sorted(range(len(p)), key=lambda h: (p[(h, *at)], h)) for at in np.ndindex(p.shape[1:])])
            strong.append([set(order[len(p) - half :]) for order in rank])
        size = [p.shape[1:] for p in shares]

        def at(x, t, r):
            return strong[x][t * size[x][1] + r]

        def jaccard(a, b):
            return len(a & b) / len(a | b)

        if between == "neighbouring tokens":
            values = [
                [jaccard(at(x, t, r), at(x, t + 1, r)) for t in range(n - 1) for r in range(m)]
                for x, (n, m) in enumerate(size)
            ]
        elif between == "recipient heads":
            values = [
                [jaccard(at(x, t, r), at(x, t, s)) for t in range(n) for r in range(m) for s in range(r)]
                for x, (n, m) in enumerate(size)
            ]
        else:
            values = [
                [
                    jaccard(at(x, t, r), at(y, t, r))
                    for t in range(min(size[x][0], size[y][0]))
                    for r in range(size[x][1])
                ]
                for x in range(len(size))
                for y in range(x)
            ]
        return np.mean([np.mean(v) for v in values])

    def number(self, row):
        if not row["scenario"] and row["quantity"] not in self.table:
            return self.identity(row)
        statistic = row["statistic"]
        if statistic == "of averaged influences":
            return self.averaged(row)
        texts = self.observations(row)
        if statistic == "n":
            return sum(map(len, texts))
        if statistic in LEVELS:
            return np.quantile(np.concatenate(texts), LEVELS[statistic])
        medians = [np.median(values) for values in texts if values.size]
        return spread_of(medians)[statistic]

    def averaged(self, row):
        means = []
        for text in self.texts:
            data = self.opened("single", text, int(row["member"]))
            d = data["js"] if row["component"] == "js" else data["relative"].sel(component=row["component"])
            means.append(d.mean(["query", "recipient_head"]).values)
        p = np.mean(means, axis=0) / np.mean(means, axis=0).sum()
        return 1 / np.square(p).sum() / len(p)


def spread_of(values):
    """Below eight texts their range; from eight on the middle 95 % of the mean of 2,000 resamplings of the texts."""
    values = np.array(values, float)
    if len(values) < 8:
        return {"centre": values.mean(), "low": values.min(), "high": values.max()}
    rows = np.random.default_rng(0).integers(len(values), size=(2000, len(values)))
    means = sorted(np.mean([values[i] for i in row]) for row in rows)
    return {"centre": values.mean(), "low": np.quantile(means, 0.025), "high": np.quantile(means, 0.975)}


def divided(numerator, denominator, least=0.0):
    out = np.full(numerator.shape, np.nan)
    for at in np.ndindex(out.shape):
        if denominator[at] > least:
            out[at] = numerator[at] / denominator[at]
    return out


def summary_rows(folder):
    with (folder / "tables" / "summary.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(("name", "controls", "count"), SUMMARIES)
def test_every_number_of_the_summary_from_the_raw_files(name, controls, count):
    folder, runs = reported(name, controls, count)
    raw = {run: Raw(folder.parent / run) for run, _ in runs}
    rows = summary_rows(folder)
    assert len(rows) > 100
    for row in rows:
        expected = raw[row["run"]].number(row)
        assert float(row["value"]) == pytest.approx(expected, rel=2e-5, abs=1e-7), row


@pytest.mark.parametrize(("name", "controls", "count"), SUMMARIES)
def test_the_page_prints_the_numbers_of_its_list(name, controls, count):
    folder, _ = reported(name, controls, count)
    page = (folder / "report.html").read_text(encoding="utf-8")
    rows = summary_rows(folder)
    printed = re.findall(r'<b data-n="(\d+)">([^<]*)</b>', page)
    assert {int(i) for i, _ in printed} == set(range(len(rows)))
    for i, text in printed:
        assert text == rows[int(i)]["shown"] == ledger.shown(typed(rows[int(i)])), rows[int(i)]
    section = page[page.index('<section id="summary">') : page.index('<section id="not-claimed">')]
    assert "%" in section


def typed(row):
    """A number with the type that decides how it is shown."""
    return int(row["value"]) if row["statistic"] == "n" or row["quantity"] == "modal head" else float(row["value"])


def test_the_questions_of_a_reader_are_answered():
    folder, runs = reported("hybrid")
    page = text_of(folder / "report.html")
    medians = Raw(folder).table["n_eff_fraction"].sel(component="qkv").isel(query=slice(FIRST_QUERY, None))
    lowest = int(medians.median(["text", "query", "recipient_head"]).values.argmin())
    assert f"of 4 transitions is that of transition {lowest} " in page
    for _, control in runs[1:]:
        assert f"{control} weights" in page
    assert "Does the same head dominate across tokens?" in page
    assert "For the strong half, where it may be said: linear to softmax" in page
    assert "What is not claimed" in page and "no statement here is about other texts" in page
    assert page.count("support no statement about other texts") > 10  # the summary and every pooled figure
    assert "p-value" in page and "p <" not in page
    assert "Not audited." in page


def text_of(path):
    page = re.sub(r"<(script|style)\b.*?</\1>", " ", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    return html.unescape(" ".join(re.sub(r"<[^>]+>", " ", page).split())).replace(" ,", ",")


@pytest.mark.parametrize("page", ["report.html", "explorer.html"])
def test_pages_are_self_contained_and_escape_what_is_not_theirs(page):
    folder, _ = reported("hybrid")
    content = (folder / page).read_text(encoding="utf-8")
    assert HOSTILE not in content
    assert "<model>" not in content
    for address in re.findall(r'(?:src|href)="([^"]*)"', content):
        assert address.startswith(("#", "data:image/svg+xml;base64,", "tables/", "explorer.html", "report.html")), (
            address
        )
    assert "http://" not in re.sub(r"http://www\.w3\.org/\S+", "", content) and "https://" not in content
    assert "@import" not in content and "url(" not in content


@pytest.mark.parametrize(("name", "count"), [("llama_one_head", 1), ("llama_zero", 1), ("hybrid_one_head", 2)])
def test_unusual_studies_make_a_report_without_a_warning(name, count, capfd):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        folder, _ = reported(name, False, count)
    page = text_of(folder / "report.html")
    assert "nan" not in page.lower().split()
    assert f"{count} text{'s' if count > 1 else ''} support" in page
    assert "no control of learned structure was run" in page
    assert ("nothing to compare" in page) is ("one_head" in name)
    assert capfd.readouterr() == ("", "")


def test_audit_and_forward_pass_are_shown(tmp_path):
    folder, runs = study("hybrid", False, 1)
    reported("hybrid", False, 1)
    item = {"group": "recomputed", "name": "a <check>", "value": 1.5e-6, "limit": 1e-4, "checks": 6, "where": "x"}
    audit = {"study": "hybrid", "items": [item], "sample": [{}] * 6, "seed": 3, "whole_forward": True}
    (tmp_path / "audit.json").write_text(json.dumps(audit))
    (tmp_path / "forward.json").write_text(json.dumps({"text": "x", "controls": {"control_logits": [2e-7, 1e-4]}}))
    shutil.copytree(folder / "figures", tmp_path / "figures")
    (tmp_path / "curves.html").write_text("")
    report.write_report(
        folder.parent, runs, tmp_path / "report.html", {}, tmp_path / "audit.json", tmp_path / "forward.json"
    )
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "a &lt;check&gt;" in page and "1.5e-06" in page and "Not audited" not in page
    assert "2e-07" in page and 'href="curves.html"' in page


def test_mean_replacement_is_shown_and_is_no_control(tmp_path):
    folder, runs = study("hybrid")
    reported("hybrid")
    shutil.copytree(folder / "figures", tmp_path / "figures")
    report.write_report(folder.parent, [runs[0], (runs[1][0], "mean")], tmp_path / "report.html", {})
    page = text_of(tmp_path / "report.html")
    assert "is not the removal that defines the study" in page
    assert "No control was run" in page and "below all controls" not in page


def test_a_missing_figure_is_one_line(tmp_path):
    folder, runs = study("hybrid", False, 1)
    with pytest.raises(StudyError, match=r"distributions\.svg: cannot be read"):
        report.write_report(folder.parent, runs, tmp_path / "report.html", {})


def test_shown_numbers():
    shown = {1234: "1,234", 0.3176: "0.318", 1.0: "1.00", 12.34: "12.3", -0.25: "−0.250", 0.0: "0", 2e-6: "2.00e−06"}
    shown |= {0.00056: "0.0006", float("nan"): "–", 1e-33: "0"}
    assert {value: ledger.shown(value) for value in shown} == shown


def test_cells_sort_by_their_first_number():
    assert markup.sort_key("<b>−1.50e−06</b> (2–3)") == "-1.50e-06"
    assert markup.sort_key("1,600") == "1600"
    assert markup.sort_key("below all") == "below all"


def test_explorer_holds_the_raw_effects():
    folder, _ = reported("hybrid")
    content = (folder / "explorer.html").read_text(encoding="utf-8")
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', content, re.DOTALL)[1])
    assert data["texts"][0]["tokens"][:4] == ["The", " ", "$a$", "</script>"]
    for x, (text, *_) in enumerate(TEXTS[:3]):
        block = data["blocks"][f"{x}/1"]
        heads, tokens, recipients = block["shape"]
        content = zlib.decompress(base64.b64decode(block["data"]))
        size = 5 * heads * tokens * recipients
        steps = np.frombuffer(content, "<u2", size).reshape(5, heads, tokens, recipients)
        totals = np.frombuffer(content, "<f4", 5 * tokens * recipients, 2 * size).reshape(5, tokens, recipients)
        bits = np.unpackbits(np.frombuffer(content, np.uint8, offset=2 * size + totals.nbytes), bitorder="little")
        with xr.open_dataset(folder / "single" / text / "L01.nc") as single:
            d = np.concatenate([single["relative"].values, single["js"].values[None]])
        total = d.sum(axis=1)
        assert totals == pytest.approx(total, rel=1e-6, nan_ok=True)
        p = d / np.where(total > 0, total, np.nan)[:, None]
        assert steps / 65535 == pytest.approx(np.nan_to_num(p), abs=1 / 65535)
        assert ((steps > 0) == (np.nan_to_num(p) > 0)).all()
        with xr.open_dataset(folder / "joint" / text / "L01.nc") as joint:
            removed = joint["removed"].values[:3]
        assert bits[: removed.size].reshape(removed.shape).tolist() == removed.tolist()


def test_a_study_too_large_to_embed_says_so_and_has_the_summary(tmp_path):
    folder, _ = study("hybrid")
    explorer.write_explorer(folder.parent, folder.name, tmp_path / "explorer.html", limit=1000)
    page = text_of(tmp_path / "explorer.html")
    assert "are not embedded" in page
    median = Raw(folder).table["n_eff_fraction"].sel(component="qkv", transition=0).isel(query=slice(FIRST_QUERY, None))
    assert ledger.shown(float(np.nanmedian(median))) in page


# What the browser does on its own: errors are caught from the first line on, and the findings stand in a last element.
CATCH = "<script>window.faults = []; addEventListener('error', e => faults.push(String(e.message)));"
CATCH += "addEventListener('unhandledrejection', e => faults.push(String(e.reason)));"
CATCH += "for (const k of ['error', 'warn']) { console[k] = (...a) => faults.push(a.join(' ')); }</script>"
SAY = "const say = x => { const p = document.createElement('pre'); p.id = 'found'; p.textContent = JSON.stringify(x);"
SAY += "document.body.append(p); };"


def chromium():
    """The browser; CI installs it."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        if os.environ.get("CI"):
            pytest.fail("chromium is not installed")
        pytest.skip("chromium is not installed")
    return found


def in_browser(page, code, tmp_path, width=1200, fragment=""):
    """Open a copy of `page` with `code` at its end; return what the code gave to `say`."""
    content = page.read_text(encoding="utf-8")
    content = content.replace("<head>", f"<head>{CATCH}", 1).replace("</body>", f"<script>{SAY}{code}</script></body>")
    copy = tmp_path / "page.html"
    copy.write_text(content, encoding="utf-8")
    command = [
        chromium(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},900", "--virtual-time-budget=20000",
        "--dump-dom", f"file://{copy}{fragment}",
    ]  # fmt: skip
    dom = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout
    return json.loads(html.unescape(re.search(r'<pre id="found">(.*?)</pre>', dom, re.DOTALL)[1]))


REPORT_CODE = """
addEventListener("load", () => setTimeout(() => {
  const seen = i => [i.alt, i.complete && i.naturalWidth > 0, i.getBoundingClientRect().width];
  const images = [...document.images].map(seen), table = document.getElementById("by-transition");
  const order = () => [...table.tBodies[0].rows].map(r => r.cells[4].dataset.v);
  const button = table.tHead.rows[0].cells[4].querySelector("button");
  button.click(); const up = order(), rising = button.closest("th").getAttribute("aria-sort");
  button.click(); const down = order();
  document.querySelectorAll("details").forEach(d => { d.open = true; });
  const broad = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  say({ faults, images, up, down, rising, broad, anchors: [...document.querySelectorAll("nav a[href^='#']")]
    .every(a => document.querySelector(a.getAttribute("href"))) });
}, 300));
"""


@pytest.mark.parametrize("width", [1300, 500])
def test_report_in_a_browser(width, tmp_path):
    folder, _ = reported("hybrid")
    found = in_browser(folder / "report.html", REPORT_CODE, tmp_path, width)
    assert found["faults"] == []
    assert [alt for alt, *_ in found["images"]] == [title(name) for name in FIGURES]
    assert all(visible and shown > 400 for _, visible, shown in found["images"])
    up = [float(v) for v in found["up"]]
    assert len(set(up)) > 1 and up == sorted(up) and found["rising"] == "ascending"
    assert [float(v) for v in found["down"]] == up[::-1]
    assert found["broad"] <= 0  # the page itself never scrolls sideways
    assert found["anchors"]


EXPLORER_CODE = """
addEventListener("load", () => setTimeout(async () => {
  const heat = document.getElementById("heat"), cells = () => [...heat.querySelectorAll("rect[data-q]:not(.set)")];
  const first = { cells: cells().length, title: document.getElementById("token-title").textContent,
    text: [...heat.querySelectorAll("text[data-q]")].map(t => t.textContent),
    bars: [...document.querySelectorAll("#bars span")].map(s => s.textContent),
    framed: heat.querySelectorAll(".set").length };
  cells().find(c => c.dataset.q === "6").dispatchEvent(new PointerEvent("pointermove", { bubbles: true }));
  const hovered = document.getElementById("token-title").textContent;
  heat.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight", bubbles: true }));
  const moved = document.getElementById("token-title").textContent;
  const pick = (id, value) => {
    const select = document.getElementById(id);
    select.value = value;
    select.dispatchEvent(new Event("change"));
  };
  pick("set", 1);
  const framed = heat.querySelectorAll(".set").length;
  pick("component", 4); pick("transition", 0);
  await new Promise(done => setTimeout(done, 300));
  say({ faults, first, hovered, moved, framed, status: document.getElementById("status").textContent });
}, 600));
"""


@pytest.mark.parametrize("width", [1300, 500])
def test_explorer_in_a_browser(width, tmp_path):
    folder, _ = reported("hybrid")
    where = "#text=0&transition=1&component=3&recipient=1&token=5"
    found = in_browser(folder / "explorer.html", EXPLORER_CODE, tmp_path, width, where)
    assert found["faults"] == []
    with xr.open_dataset(folder / "single" / "first" / "L01.nc") as single:
        d = single["relative"].sel(component="qkv").values[:, :, 1]
        strong = (
            xr.open_dataset(folder / "joint" / "first" / "L01.nc")["removed"].sel(scenario="strong").values[:, :, 1]
        )
    first = found["first"]
    assert first["cells"] == d.size
    assert first["text"][:8] == ["The", "␣", "$a$", "</script>", "↵", "雾", "雾", "∅"]
    assert first["title"] == "Token 5: 雾"
    percent = [f"{100 * p:.1f} %" for p in d[:, 5] / d[:, 5].sum()]
    assert first["bars"][5::3] == percent  # four headings, then head, share, sets of every head
    assert (found["hovered"], found["moved"]) == ("Token 6: 雾", "Token 7: ∅")
    assert (first["framed"], found["framed"]) == (0, strong.sum())
    assert "linear" in found["status"] and "JS does not exist" in found["status"]


def test_captions_and_templates_change_the_version_of_the_words(monkeypatch, tmp_path):
    from head_influence import catalogue

    before = catalogue.words_version()
    for part in ("head_influence/templates", "report"):
        shutil.copytree(Path(catalogue.__file__).parents[1] / part, tmp_path / part)
    monkeypatch.setattr(catalogue, "__file__", str(tmp_path / "head_influence" / "catalogue.py"))
    assert catalogue.words_version() == before
    with (tmp_path / "report" / "joint.rst").open("a", encoding="utf-8") as file:
        file.write("More.\n")
    assert catalogue.words_version() != before
