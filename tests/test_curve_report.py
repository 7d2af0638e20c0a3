"""The curves' figures and page say what they must, and the comparison with the other study is what it claims to be."""

import json
from html.parser import HTMLParser

import numpy as np
import pytest
from head_influence import files
from head_influence.curve_budgets import compare, plan, read_comparison, shares
from head_influence.curve_figures import draw_curves, head_title, line_chart, ranking, shown_heads, upstream_chart
from head_influence.curve_report import page, section
from head_influence.curve_table import CurveTable
from head_influence.drawing import start
from head_influence.summary import write_table
from head_influence.upstream import beside_upstream, upstream_of_layer, upstream_words

RATIOS = np.array([0, 0.05, 0.1, 0.5])
CHECKS = [{"number": 1, "what": "own scorer <&>", "value": 1e-7, "limit": "<= 1e-05 nats", "outcome": "passed"}]


def make_table(contexts=3, items=4, layers=3, heads=2, seed=0, gain=1.0):
    rng, n = np.random.default_rng(seed), contexts * items
    delta = 0.02 * rng.standard_normal((n, layers * heads, len(RATIOS)))
    delta[..., 1] = 0
    full = 2 + 0.1 * rng.random(n)
    used = np.broadcast_to((100 * RATIOS).astype(int), (contexts, layers * heads, len(RATIOS)))
    settings = {
        "scoring": {"fit": {"keys": "rms", "bias": "nnls", "values": "ridge"}},
        "reading": {"answers": "reference"},
    }
    kinds = ["softmax"] * layers + ["linear", "sliding"]
    return CurveTable(
        names=[f"L{i}H{h}" for i in range(layers) for h in range(heads)],
        layers=np.repeat(np.arange(layers), heads),
        kv_heads=np.tile(np.arange(heads), layers),
        ratios=RATIOS,
        baseline=0.05,
        samples=[f"c{i // items}/i{i % items}" for i in range(n)],
        context=np.repeat(np.arange(contexts), items),
        contexts=[f"c{i}" for i in range(contexts)],
        delta=delta,
        nll={"full": full, "baseline": full + 0.5 * gain, "none": full + gain},
        keys_used=used,
        mass_error=np.zeros(used.shape),
        output_error=np.full(used.shape, 0.25),
        attributes={"settings": json.dumps(settings), "cache_kinds": json.dumps(kinds)},
    )


class Page(HTMLParser):
    """Text, sources and open tags of a page."""

    def __init__(self, text):
        super().__init__()
        self.words, self.sources, self.open = "", [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.sources += [value for name, value in attrs if name in ("src", "href")]
        if tag not in ("img", "meta"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words += data


def make_page(table, tmp_path, budgets=None):
    draw_curves(table, "a model", tmp_path, 60, budgets=budgets)
    found = Page(page(section(table, "a <model>", tmp_path, CHECKS, budgets), "title"))
    assert found.open == []
    assert found.sources and all(source.startswith("data:image/png;base64,") for source in found.sources)
    return found.words


def test_the_page_explains_sign_and_size(tmp_path):
    words = make_page(make_table(), tmp_path)
    assert "Negative means better than the baseline" in words
    assert "3 contexts, 12 scored items" in words
    assert "Left alone: sliding-window layers 4." in words
    assert "linear layers 3; they keep part of the article" in words
    assert "the model uses its context here" in words
    assert "a <model>" in words and "own scorer <&>" in words
    assert "not supported" not in words


def test_few_items_support_no_ranking(tmp_path):
    words = make_page(make_table(contexts=1, items=7), tmp_path)
    assert "Only 7 scored items: fewer than 8, so a ranking of heads is not supported." in words


@pytest.mark.parametrize("gain", [-1.0, 0.0])
def test_a_model_that_does_not_use_its_context_is_called_so(tmp_path, gain):
    words = make_page(make_table(gain=gain), tmp_path)
    assert "does not hold" in words
    assert "the curves mean little" in words


def test_one_item_is_enough_to_draw(tmp_path):
    assert "1 context, 1 scored item" in make_page(make_table(1, 1), tmp_path)


def chart_words(figure):
    return " ".join(text.get_text() for text in figure.findobj(match=lambda a: hasattr(a, "get_text")))


def test_the_chart_draws_the_half_it_did_not_choose_on():
    start()
    table = make_table()
    places, chosen, rule = shown_heads(table, None)
    assert len(places) == 3
    assert chosen.tolist() == (table.half == 1).tolist()
    figure = line_chart(table, "m")
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    for place in places:
        drawn = lines[head_title(table.names[place])].get_ydata()
        assert drawn == pytest.approx(table.mean(table.half == 1)[place])
        assert drawn[1] == 0
    words = chart_words(figure)
    assert "n = 3 contexts, 6 items" in words and "baseline 0.05" in words and "negative = better" in words
    assert "chosen on the other half" in words and rule in words


def test_spread_is_units_below_eight_and_a_band_from_eight_on():
    start()
    few, many = line_chart(make_table(7, 2), "m"), line_chart(make_table(8, 2), "m")
    assert "the 7 single contexts, too few for an interval" in chart_words(few)
    assert not few.axes[0].collections
    assert "± 1 standard error over 8 contexts" in chart_words(many)
    assert len(many.axes[0].collections) == 3
    assert "resampled contexts against all" in chart_words(ranking(make_table(8, 2), "m"))
    assert "too few to resample" in chart_words(ranking(make_table(7, 2), "m"))


def test_published_readings_are_marked_approximate():
    start()
    table = make_table()
    figure = line_chart(table, "m", ["L0H0", "L2H1"], {"L0H0": [[0, 0.01], [0.5, -0.02]]})
    assert "read off approximately" in chart_words(figure)
    assert {"Layer 0 Head 0", "Layer 2 Head 1"} <= {line.get_label() for line in figure.axes[0].lines}


def test_budgets_are_compared_on_held_out_items(tmp_path):
    table = make_table(2, 4)
    planned = plan(table, [0.05, 0.1])
    assert sum(shares(planned, 0).values()) == pytest.approx(1)
    assert list(shares(planned, 0)) == table.names
    schemes, paths, rng = list(planned["targets"][0]["ratios"]), [], np.random.default_rng(1)
    nll = rng.random((2, len(schemes), 8))
    for i in range(2):
        paths.append(tmp_path / f"{i}.nc")
        variables = {
            "scheme": (("scheme",), schemes, {}),
            "keys": (("target", "scheme", "head"), np.ones((2, len(schemes), 6), int), {}),
            "nll": (("target", "scheme", "item"), nll[:, :, 4 * i : 4 * i + 4], {}),
        }
        files.write(paths[-1], variables, {})
    rows = compare(table, planned, paths)
    uniform, first, second = (nll[1, schemes.index(s)] for s in ("uniform", "half0", "half1"))
    other = np.array([(second if i % 2 == 0 else first)[i] for i in range(8)])  # never the budget of its own half
    assert rows[1]["held_out"] == pytest.approx((uniform - other).mean())
    assert rows[1]["held_out_error"] == pytest.approx((uniform - other).std(ddof=1) / np.sqrt(8))
    write_table(tmp_path / "b.csv", rows)
    again = read_comparison(tmp_path / "b.csv")
    assert again[0]["target"] == 0.05
    assert again[1]["held_out"] == pytest.approx(rows[1]["held_out"], rel=1e-5)
    words = make_page(table, tmp_path / "figures", again)
    assert "it says nothing about other contexts" in words


@pytest.fixture
def singles(tmp_path):
    """Two texts, one layer of four query heads over two KV heads; the third query head always has the largest share."""
    paths, rng = [], np.random.default_rng(0)
    for i in range(2):
        relative = rng.random((4, 4, 5, 3))
        relative[3, 2] += 3
        paths.append(tmp_path / f"s{i}.nc")
        dims = ("component", "source_head", "query", "recipient_head")
        files.write(paths[-1], {"relative": (dims, relative, {}), "js": (dims[1:], relative[0], {})}, {"text": str(i)})
    return paths


def test_upstream_share_is_the_mean_over_the_group(singles):
    share, dominance = upstream_of_layer(singles, 2, 2)
    expected = []
    for path in singles:
        d = files.read(path, ["relative"])[0]["relative"][3, :, 2:]
        p = d / d.sum(axis=0)
        expected.append([4 * np.mean([p[0].mean(), p[1].mean()]), 4 * np.mean([p[2].mean(), p[3].mean()])])
    assert share == pytest.approx(np.mean(expected, axis=0))
    assert share.mean() == pytest.approx(1)
    assert dominance.tolist() == [0, 1]


def test_both_studies_are_lined_up_within_layers(singles):
    start()
    table = make_table()
    found = beside_upstream(table, {0: singles, 2: singles[::-1]}, 2)
    assert found["names"] == ["L0H0", "L0H1", "L2H0", "L2H1"]
    assert found["gain"][1] == pytest.approx(-table.mean()[1, -1])
    signs = [np.sign(-table.mean()[i + 1, -1] + table.mean()[i, -1]) for i in (0, 4)]
    assert found["within"]["gain and dominance"] == (pytest.approx(np.mean(signs)), 2)
    assert "too few for a correlation" in upstream_words(found)
    assert "too few for a correlation" in chart_words(upstream_chart(found, "m"))
    assert "mean over them" in upstream_words(found) and "no p-value" in upstream_words(found)
