"""The HTML report: its structure, its numbers, hostile text. `test_report_page_browser.py` opens it."""

import json
import re
from collections import Counter
from fnmatch import fnmatch
from html.parser import HTMLParser
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from tomllib import loads

import pytest
from jinja2 import UndefinedError

import sample_report
from m3_convert.notation import curly, decimal, fit_for_html, percent, share, visible_token
from m3_convert.report_page import render_page, write_page
from m3_runtime.errors import InputError
from sample_report import REPORTS

VOID = {"meta", "br", "img", "link", "input", "hr"}
SECTIONS = ["numbers", "agreement", "cost", "output", "origin", "queries", "files", "run", "not-tested"]


class Page(HTMLParser):
    """The elements of a page with their attributes and texts; fails on a tag that is not closed where it must be."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements = [], []
        self.feed(text)
        self.close()
        assert not self.open, [e["tag"] for e in self.open]

    def handle_starttag(self, tag, attributes):
        names = [name for name, _ in attributes]
        assert len(names) == len(set(names)), f"{tag} has an attribute twice: {names}"
        element = {"tag": tag, "attributes": dict(attributes), "text": "", "in": [e["tag"] for e in self.open]}
        self.elements.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag, attributes):
        assert "svg" in [e["tag"] for e in self.open], f"<{tag}/> outside of SVG"
        self.handle_starttag(tag, attributes)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open and self.open[-1]["tag"] == tag, f"</{tag}> closes <{self.open[-1]['tag']}>"
        self.open.pop()

    def handle_data(self, data):
        for element in self.open:
            element["text"] += data

    def all(self, tag, **attributes):
        wanted = {name.strip("_"): value for name, value in attributes.items()}
        return [
            e for e in self.elements if e["tag"] == tag and all(e["attributes"].get(k) == v for k, v in wanted.items())
        ]

    def one(self, tag, **attributes):
        (found,) = self.all(tag, **attributes)
        return found

    def within(self, section):
        """The elements of a section, in order."""
        start = self.elements.index(self.one("section", id=section))
        after = next((n for n in range(start + 1, len(self.elements)) if self.elements[n]["tag"] == "section"), None)
        return self.elements[start:after]

    def rows(self, label):
        """Texts of the cells of the table in the box of this name, row by row."""
        start = self.elements.index(self.one("div", aria_label=None, **{"aria-label": label})) + 1
        rows = []
        for element in self.elements[start:]:
            if element["tag"] in ("div", "section", "figure", "footer"):
                break
            if element["tag"] == "tr":
                rows.append([])
            elif element["tag"] in ("th", "td"):
                rows[-1].append(" ".join(element["text"].split()))
        return rows


@pytest.fixture(scope="module")
def pages() -> dict[str, Page]:
    return {name: Page(render_page(make())) for name, make in REPORTS.items()}


def squeeze(text):
    return " ".join(fit_for_html(text).split())


# ------------------------------------------------------------------------------------------------ structure


@pytest.mark.parametrize("name", REPORTS)
def test_structure(pages, name):
    page = pages[name]
    assert page.one("html")["attributes"]["lang"] == "en"
    (title,) = [e for e in page.all("title") if e["in"] == ["html", "head"]]
    assert title["text"].strip() and page.one("h1")["text"].strip()
    for landmark in ("header", "main", "footer", "nav"):
        page.one(landmark)
    ids = Counter(e["attributes"]["id"] for e in page.elements if "id" in e["attributes"])
    assert set(ids.values()) == {1}
    assert {a["attributes"]["href"] for a in page.all("a")} == {
        f"#{e['attributes']['id']}" for e in page.all("section")
    }
    for section in page.all("section"):
        assert section["attributes"]["aria-labelledby"] in ids
    for header in page.all("th"):
        assert header["attributes"]["scope"] in ("row", "col")
    for svg in page.all("svg"):
        hidden, role = svg["attributes"].get("aria-hidden"), svg["attributes"].get("role")
        assert hidden == "true" or (role == "img" and svg["attributes"]["aria-label"])
    levels = [int(e["tag"][1]) for e in page.elements if re.fullmatch("h[1-6]", e["tag"])]
    assert levels[0] == 1 and all(b <= a + 1 for a, b in pairwise(levels))


@pytest.mark.parametrize("name", REPORTS)
def test_nothing_comes_from_elsewhere(pages, name):
    page = pages[name]
    forbidden = {"script", "img", "link", "iframe", "object", "embed", "base", "form", "image", "use"}
    assert not forbidden & {e["tag"] for e in page.elements}
    for element in page.elements:
        names = element["attributes"].keys()
        assert not [n for n in names if n.startswith("on") or n in ("src", "srcset", "action", "xlink:href")]
        assert element["attributes"].get("href", "#").startswith("#")
        assert "url(" not in element["attributes"].get("style", "")
    style = page.one("style")["text"]
    assert "url(" not in style and "@import" not in style
    policy = page.one("meta", http_equiv=None, **{"http-equiv": "Content-Security-Policy"})["attributes"]["content"]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"


@pytest.mark.parametrize(
    ("name", "absent"),
    [
        ("full", []),
        ("release", []),
        ("hostile", []),
        ("minimal", ["output", "origin", "queries"]),
        ("all_equal", ["queries"]),
        ("dense_candidate", ["cost", "origin", "queries"]),
    ],
)
def test_sections(pages, name, absent):
    ids = [e["attributes"]["id"] for e in pages[name].all("section")]
    assert ids == [section for section in SECTIONS if section not in absent]


def test_page_of_the_release_is_small():
    assert len(render_page(sample_report.release()).encode()) < 1_000_000


def test_templates_are_part_of_the_package():
    project = Path(__file__).parents[2] / "pyproject.toml"
    patterns = loads(project.read_text())["tool"]["setuptools"]["package-data"]["m3_convert"]
    folder = files("m3_convert") / "templates"
    names = [entry.name for entry in folder.iterdir()]
    assert {"page.html.jinja", "charts.jinja", "tables.jinja", "style.css"} <= set(names)
    for name in names:
        assert any(fnmatch(f"templates/{name}", pattern) for pattern in patterns), name


# ------------------------------------------------------------------------------------------------ numbers


def test_verdict(pages):
    report, page = sample_report.full(), pages["full"]
    header = page.one("header")["text"]
    assert page.one("h1")["text"] + " " + page.one("p", class_="cause")["text"] == curly(report["verdict"]["text"])
    assert "Fell short" in header and all(curly(text) in header for text in report["verdict"]["evidence"])
    assert "little of that comes from the selection" in header
    assert "Passed" in pages["all_equal"].one("header")["text"]
    assert "no threshold" in pages["minimal"].one("header")["text"]


def test_key_numbers_are_those_of_the_report(pages):
    report, o = sample_report.full(), sample_report.full()["overall"]
    logits = report["logits"]
    shown = [(float(e["attributes"]["value"]), e["text"]) for e in pages["full"].all("data")]
    assert shown == [
        (o["worst"]["overlap_mean"], share(o["worst"]["overlap_mean"])),
        (o["overlap_mean"], share(o["overlap_mean"])),
        (o["changed"], percent(o["changed"] / report["tested"]["lists"])),
        (o["flips"]["near_ties"], percent(o["flips"]["near_ties"])),
        (o["mass_lost"]["worst"]["mean"], percent(o["mass_lost"]["worst"]["mean"])),
        (logits["candidate"]["kld"]["mean"], decimal(logits["candidate"]["kld"]["mean"])),
        (logits["candidate"]["top1"], percent(logits["candidate"]["top1"])),
        (logits["candidate"]["perplexity"], "14.243"),
    ]


def test_thresholds(pages):
    def judged(page):
        return re.findall(r"--[a-z-]+ [0-9.]+: \w+", " ".join(e["text"] for e in page.all("dd")))

    assert judged(pages["full"]) == ["--min-overlap 0.99: missed", "--max-mass-lost 0.05: met"]
    assert judged(pages["minimal"]) == []


@pytest.mark.parametrize("name", ["full", "release", "all_equal"])
def test_numbers_of_all_heads(pages, name):
    report = REPORTS[name]()
    rows = pages[name].rows("All layers and heads in numbers")
    heads = [(layer, head) for layer in report["layers"] for head in layer["heads"]]
    assert len(rows) == 1 + len(heads)
    for row, (layer, head) in zip(rows[1:], heads, strict=True):
        deviation = max(layer["index_deviation"]["queries"][head["head"]], layer["index_deviation"]["keys"])
        assert row == [
            str(layer["layer"]),
            str(head["head"]),
            share(head["overlap_mean"]),
            share(head["overlap_min"]),
            "\u2013" if head["overlap_min_position"] is None else f"{head['overlap_min_position']:,}",
            f"{head['equal']:,}",
            f"{head['ties']:,}",
            f"{head['changed']:,}",
            f"{head['blocks_lost']:,}",
            "\u2013" if head["first_changed"] is None else f"{head['first_changed']:,}",
            percent(head["mass_lost"]["mean"]),
            percent(head["mass_lost"]["max"]),
            "\u2013" if head["mass_lost"]["max_position"] is None else f"{head['mass_lost']['max_position']:,}",
            percent(deviation),
        ]


def test_infinite_deviation_has_no_number():
    report = sample_report.full()
    report["layers"][0]["index_deviation"]["keys"] = None
    rows = Page(render_page(report)).rows("All layers and heads in numbers")
    assert [row[-1] for row in rows[1:3]] == ["\u2013", "\u2013"] and "\u2013" not in rows[3][-1]


def test_output_and_attribution_tables(pages):
    report = sample_report.full()
    candidate = report["logits"]["candidate"]
    kld = candidate["kld"]
    row = pages["full"].rows("Output of both models")[2]
    assert row == [
        "candidate",
        "14.243",
        *(decimal(kld[key]) for key in ("mean", "median", "p99", "max")),
        f"{kld['max_position']:,}",
        percent(candidate["top1"]),
    ]
    rows = pages["full"].rows("Groups of tensors restored one at a time")
    for row, group in zip(rows[2:], report["attribution"]["groups"], strict=True):
        assert row[:2] == [group["group"], ", ".join(group["types"])]
        assert row[4:] == [
            share(group["overlap_mean"]),
            share(group["worst_overlap"]),
            percent(group["mass_lost"]),
            decimal(group["kld"]),
        ]


def test_files_settings_and_what_was_not_tested(pages):
    report, page = sample_report.full(), pages["full"]
    text = " ".join(page.one("section", id="files")["text"].split())
    for side in ("reference", "candidate"):
        for value in (report[side]["path"], report[side]["sha256"], f"of {report[side]['hash_of']}"):
            assert value in text
    rows = {row[0]: row[1:] for row in page.rows("Types by group of tensors")}
    assert rows["experts"] == ["BF16 7.2 MB", "Q4_K 2.4 MB, Q5_K 1.2 MB"]
    run = page.one("section", id="run")["text"]
    for value in (
        report["text"]["sha256"],
        "K/V Q8_0",
        "avx2",
        "498.3 MB at the peak",
        "1:23 min",
        "0.1.0",
        "Python 3.12.4",
        "NumPy 2.3.1",
        "e6" * 32,
    ):
        assert value in run
    assert [e["text"] for e in page.within("not-tested") if e["tag"] == "li"] == report["not_tested"]
    assert "not taken" in pages["minimal"].one("section", id="files")["text"]


def test_queries(pages):
    report = sample_report.full()
    items = [e for e in pages["full"].within("queries") if e["tag"] == "li" and "ol" in e["in"]]
    assert len(items) == 10
    for query, item in zip(report["worst"], items, strict=True):
        text = " ".join(item["text"].split())
        assert f"Layer {query['layer']}, head {query['head']}, position {query['position']:,}" in text
        assert f"{percent(query['mass_lost'])} of the attention of query head {query['query_head']} lost" in text
        assert f"Reference reads {', '.join(map(str, query['reference_blocks']))}." in text
        assert f"Candidate reads {', '.join(map(str, query['candidate_blocks']))}." in text
        assert squeeze(query["text_before"]) in text and squeeze(query["text_after"]) in text
        for block in (*query["lost"], *query["gained"]):
            assert squeeze(block["text"]) in text
    tokens = [e["text"] for e in pages["full"].all("mark")]
    assert tokens == [visible_token(query["token"]) for query in report["worst"]]
    assert "⏎" in tokens
    table = pages["full"].rows("Blocks that only one side reads, layer 4, position 4065")
    (lost,), (gained,) = report["worst"][0]["lost"], report["worst"][0]["gained"]
    assert table[1:] == [
        ["reference", squeeze(lost["text"]), str(lost["block"]), "512 to 639", "41.700", "0.420", "41.0%"],
        ["candidate", squeeze(gained["text"]), str(gained["block"]), "3,840 to 3,967", "39.900", "\u2013", "\u2013"],
    ]
    infinite = report["worst"][4]
    assert infinite["lost"][0]["margin"] is None
    label = f"Blocks that only one side reads, layer {infinite['layer']}, position {infinite['position']}"
    assert pages["full"].rows(label)[1][5] == "∞"


@pytest.mark.parametrize("name", ["full", "release"])
def test_heat_map_shows_the_worst_head_of_each_cell(pages, name):
    report = REPORTS[name]()
    titles = [e["text"] for e in pages[name].within("agreement") if e["tag"] == "title" and "positions" in e["text"]]
    expected = []
    for layer in report["layers"]:
        for n, bucket in enumerate(report["buckets"]):
            head = min(layer["heads"], key=lambda head: head["histogram"]["overlap_mean"][n])
            expected.append(
                f"Layer {layer['layer']}, positions {bucket['first']:,} to {bucket['last']:,}, head {head['head']}: "
                f"overlap {share(head['histogram']['overlap_mean'][n])}, lowest list "
                f"{share(head['histogram']['overlap_min'][n])}, attention lost "
                f"{percent(head['histogram']['mass_lost'][n])}"
            )
    assert titles == expected


def test_shades_are_in_order_of_brightness(pages):
    """So that they can be told apart in gray, and by eyes that see other colors."""
    style = pages["full"].one("style")["text"]
    schemes = [re.findall(r"--s\d: #(\w{6})", block) for block in re.findall(r":root \{(.*?)\}", style, re.S)]
    assert [len(shades) for shades in schemes] == [8, 8]
    for shades, sign in zip(schemes, (-1, 1), strict=True):
        brightness = [
            sum(w * int(s[k : k + 2], 16) for w, k in ((0.2126, 0), (0.7152, 2), (0.0722, 4))) for s in shades
        ]
        steps = [sign * (b - a) for a, b in pairwise(brightness[1:])]
        assert min(steps) > 12, brightness


# ------------------------------------------------------------------------------------------------ hostile text


def test_hostile_text_is_text(pages):
    report, page = sample_report.hostile(), pages["hostile"]
    tags = {e["tag"] for e in page.elements}
    assert tags == {e["tag"] for e in pages["full"].elements}
    assert page.one("h1")["text"] == report["verdict"]["text"]
    evidence = [e["text"] for e in page.elements if e["tag"] == "li" and e["in"][-2:] == ["header", "ul"]]
    assert [squeeze(text) for text in evidence] == [squeeze(text) for text in report["verdict"]["evidence"]]
    items = [e for e in page.within("queries") if e["tag"] == "li" and "ol" in e["in"]]
    for query, item in zip(report["worst"], items, strict=True):
        assert squeeze(query["text_before"]) in " ".join(item["text"].split())


@pytest.mark.parametrize("name", REPORTS)
def test_page_has_no_character_that_html_forbids(name):
    text = render_page(REPORTS[name]())
    assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe]", text)
    text.encode()


# ------------------------------------------------------------------------------------------------ file


def test_write_page(tmp_path):
    report = sample_report.full()
    before = json.dumps(report)
    target = tmp_path / "out.html"
    target.write_text("old")
    write_page(report, target)
    assert target.read_text(encoding="utf-8") == render_page(report)
    assert json.dumps(report) == before
    assert [p.name for p in tmp_path.iterdir()] == ["out.html"]


def test_a_page_that_cannot_be_written(tmp_path):
    report, target = sample_report.full(), tmp_path / "missing" / "out.html"
    with pytest.raises(InputError) as error:
        write_page(report, target)
    assert str(target) in str(error.value) and "\n" not in str(error.value)
    folder = tmp_path / "out.html"
    folder.mkdir()
    with pytest.raises(InputError, match=r"out\.html: the report cannot be written"):
        write_page(report, folder)
    assert [p.name for p in tmp_path.iterdir()] == ["out.html"]


def test_a_report_of_another_kind_leaves_no_page(tmp_path):
    report = sample_report.full()
    del report["program"]
    (tmp_path / "out.html").write_text("old")
    with pytest.raises(UndefinedError):
        write_page(report, tmp_path / "out.html")
    assert [p.read_text() for p in tmp_path.iterdir()] == ["old"]
