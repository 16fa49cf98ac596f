"""Recipes: what the shipped ones give, how rules are ordered and limited, and that a part of one is never lost."""

import hashlib
import json
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.recipe_sizes import CSV, RELEASE, markdown, sizes
from bench.recipe_sizes import main as write_sizes
from bench.recipe_sizes import tensors_without_data as uncached_tensors
from m3_convert import recipe as recipe_module
from m3_convert.checkpoint import load_checkpoint
from m3_convert.config import ModelConfig
from m3_convert.execute import convert
from m3_convert.layer_range import parse_layers
from m3_convert.plan import plan_conversion, plan_tensors
from m3_convert.precision import FALLBACKS, TypeChoice, always_f32, choose, is_index_projection
from m3_convert.recipe import parse_recipe, recipe_names, shipped_recipe
from m3_runtime.errors import InputError
from m3_runtime.quantize import TensorType, row_bytes

tensors_without_data = cache(uncached_tensors)
README = Path(__file__).parents[2] / "README.md"
DOWN = "blk.1.ffn_down_exps.weight"

# Shapes that a recipe must fit: the release, the paper's model, one without dense layers, one with a single MoE layer.
SHAPES = {
    "release": RELEASE,
    "paper": replace(RELEASE, n_layer=41, hidden=3072),
    "no dense layer": replace(RELEASE, n_layer=2, n_dense=0),
    "one MoE layer": replace(RELEASE, n_layer=4, n_dense=3),
}

# Type by kind of tensor: experts gate and up, experts down in the first layers and in the others, what is small or only
# looked up (attention k and v, dense layers, embeddings), and all the rest.
SHIPPED = {
    "q8_0": ("Q8_0", "Q8_0", "Q8_0", "Q8_0", "Q8_0"),
    "q6_k": ("Q6_K", "Q8_0", "Q6_K", "Q8_0", "Q8_0"),
    "q5_k_m": ("Q5_K", "Q6_K", "Q6_K", "Q8_0", "Q8_0"),
    "q4_k_m": ("Q4_K", "Q5_K", "Q5_K", "Q8_0", "Q6_K"),
    "q4_k_s": ("Q4_K", "Q5_K", "Q4_K", "Q8_0", "Q6_K"),
    "q3_k_m": ("Q3_K", "Q4_K", "Q4_K", "Q8_0", "Q6_K"),
    "q2_k": ("Q2_K", "Q3_K", "Q3_K", "Q8_0", "Q6_K"),
    "iq4_xs": ("IQ4_XS", "Q5_K", "IQ4_XS", "Q8_0", "Q6_K"),
    "iq3_xxs": ("IQ3_XXS", "IQ3_S", "IQ3_S", "Q8_0", "Q6_K"),
    "iq2_xxs": ("IQ2_XXS", "IQ2_S", "IQ2_XS", "Q8_0", "Q6_K"),
    "iq1_m": ("IQ1_M", "IQ2_XS", "IQ2_XXS", "Q8_0", "Q6_K"),
    "mxfp4_moe": ("MXFP4", "MXFP4", "MXFP4", "Q8_0", "Q8_0"),
}


def recipe(*rules: str, default: str = "bf16") -> bytes:
    """A recipe of rules written as "tensors = ..., type = ..." with commas for line ends."""
    tables = "".join("[[rule]]\n" + rule.replace("; ", "\n") + "\n" for rule in rules)
    return f'{tables}[default]\ntype = "{default}"\n'.encode()


def planned(content: bytes, *rules: str, shape: ModelConfig = RELEASE) -> dict[str, str]:
    """Type name by tensor name."""
    choice = replace(choose(rules=rules), recipe=parse_recipe(content, "mine"))
    return {t.name: t.type.name for t in plan_tensors(tensors_without_data(shape), choice)[0]}


# ------------------------------------------------------------------------------------------------ the shipped ones


def test_which_there_are() -> None:
    assert set(recipe_names()) == set(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_shipped_recipe_fits_every_shape(shape: str, name: str) -> None:
    tensors, _ = plan_tensors(tensors_without_data(SHAPES[shape]), TypeChoice(recipe=shipped_recipe(name)))
    assert not [t.note for t in tensors if t.note]
    assert {t.type.name for t in tensors if always_f32(t.name) or is_index_projection(t.name)} == {"F32"}


@pytest.mark.parametrize("name", SHIPPED)
def test_the_types_of_a_shipped_recipe(make_folder, small, name: str) -> None:
    spec = replace(small, layers=5, hidden=256, inter=256, shared_inter=256, dense_inter=256, head_dim=64, rotary=32)
    plan = plan_conversion(load_checkpoint(make_folder(spec)), choose(name))
    found = {t.name: t.type.name for t in plan.tensors}
    gate_up, down_first, down, small_ones, rest = SHIPPED[name]
    for layer in (1, 2, 3, 4):
        assert found.pop(f"blk.{layer}.ffn_gate_exps.weight") == found.pop(f"blk.{layer}.ffn_up_exps.weight") == gate_up
        expected = down_first if layer in (1, 2) else down
        assert found.pop(f"blk.{layer}.ffn_down_exps.weight") == expected
    for layer in range(5):
        assert found.pop(f"blk.{layer}.attn_k.weight") == found.pop(f"blk.{layer}.attn_v.weight") == small_ones
    assert {
        found.pop(n) for n in ("token_embd.weight", *(f"blk.0.ffn_{k}.weight" for k in ("gate", "up", "down")))
    } == {small_ones}
    others = {n: t for n, t in found.items() if not (always_f32(n) or is_index_projection(n))}
    assert {"output.weight", "blk.0.attn_q.weight", "blk.0.attn_output.weight", "blk.4.ffn_down_shexp.weight"} <= set(
        others
    )
    assert set(others.values()) == {rest}
    assert {found[n] for n in set(found) - set(others)} == {"F32"}
    file_type = gguf.LlamaFileType(plan.file_type).name
    assert file_type == f"MOSTLY_{name.upper()}"


@pytest.mark.parametrize("name", SHIPPED)
def test_where_the_bits_go(name: str) -> None:
    def bits(type_name: str) -> float:
        return row_bytes(TensorType[type_name], 256) / 32

    gate_up, down_first, down, small_ones, rest = map(bits, SHIPPED[name])
    assert gate_up <= down <= down_first <= rest <= small_ones
    if name not in ("q8_0", "mxfp4_moe"):
        assert gate_up < down_first and gate_up < rest


def test_the_committed_sizes_are_those_of_the_recipes(tmp_path, capsys) -> None:
    write_sizes([str(tmp_path / "sizes.csv")])
    assert (tmp_path / "sizes.csv").read_text() == CSV.read_text()
    table = capsys.readouterr().out
    assert table.strip() == markdown(sizes())
    assert table in README.read_text()


# ------------------------------------------------------------------------------------------------ order


PATTERNS = (
    "*_exps.weight",
    "blk.1.*_exps.weight",
    "blk.?.attn_[kv].weight",
    "blk.*.ffn_down*",
    "*.attn_q.weight",
    "out*t.weight",
)
TYPES = ("q8_0", "q4_k", "f16", "iq2_s")
RULES = st.lists(st.tuples(st.sampled_from(PATTERNS), st.sampled_from(TYPES)), max_size=6)
TINY = tensors_without_data(replace(RELEASE, n_layer=4, n_dense=1, n_expert=2))


@given(RULES, RULES)
def test_the_first_match_decides_and_rule_options_come_before_the_recipe(options, in_recipe) -> None:
    content = recipe(*(f'tensors = "{p}"; type = "{t}"' for p, t in in_recipe))
    choice = TypeChoice(
        recipe=parse_recipe(content, "mine"), rules=choose(rules=[f"{p}={t}" for p, t in options]).rules
    )
    for tensor in plan_tensors(TINY, choice)[0]:
        if always_f32(tensor.name) or is_index_projection(tensor.name):
            assert tensor.type is TensorType.F32
            continue
        expected = next((t for p, t in [*options, *in_recipe] if fnmatchcase(tensor.name, p)), "bf16")
        assert tensor.type.name == expected.upper()


def test_a_rule_equal_to_the_default_is_honored() -> None:
    found = planned(
        recipe(f'tensors = "{DOWN}"; type = "q6_k"', 'tensors = "blk.*_exps.weight"; type = "q4_k"', default="q6_k"),
        shape=SHAPES["no dense layer"],
    )
    assert found[DOWN] == found["output.weight"] == "Q6_K" and found["blk.0.ffn_down_exps.weight"] == "Q4_K"


def test_a_rule_of_a_recipe_that_decides_nothing_is_reported() -> None:
    content = recipe('tensors = "*_exps.weight"; type = "q4_k"', 'tensors = "blk.*.ffn_up_exps.weight"; type = "q6_k"')
    choice = TypeChoice(recipe=parse_recipe(content, "mine"))
    assert plan_tensors(TINY, choice)[1] == [
        "recipe mine, line 4 decides nothing: earlier rules decide all that it matches"
    ]
    # A --rule that takes everything from the recipe does what it is for.
    assert plan_tensors(TINY, replace(choose("q4_k_m"), rules=choose(rules=["*_exps.weight=q8_0"]).rules))[1] == []


def test_auto_as_default() -> None:
    assert planned(recipe('tensors = "*_exps.weight"; type = "q4_k"', default="AUTO"))["output.weight"] == "BF16"


# ------------------------------------------------------------------------------------------------ layers and experts


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("7", [7]),
        ("3-5", [3, 4, 5]),
        ("57-", [57, 58, 59]),
        ("first 1/8", range(3, 11)),
        ("last 1/8", range(52, 60)),
        ("first 2/57, last 1/57", [3, 4, 59]),
        ("first 1/1", range(3, 60)),
        ("4,  6-7", [4, 6, 7]),
    ],
)
def test_layers(text: str, expected) -> None:
    found = planned(recipe(f'tensors = "blk.*.ffn_down_exps.weight"; layers = "{text}"; type = "q4_k"'))
    assert [int(n.split(".")[1]) for n, t in found.items() if t == "Q4_K"] == list(expected)


@given(st.lists(st.integers(0, 200), min_size=1, unique=True), st.integers(1, 9), st.integers(1, 9))
def test_shares_are_rounded_up_and_never_empty(numbers: list[int], above: int, below: int) -> None:
    above, below, layers = min(above, below), max(above, below), sorted(numbers)
    n = -(-len(layers) * above // below)
    assert parse_layers(f"first {above}/{below}").select(layers) == frozenset(layers[:n])
    assert parse_layers(f"last {above}/{below}").select(layers) == frozenset(layers[-n:])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "5-3",
        "-3",
        "first",
        "first 1/0",
        "last 9/8",
        "first 0/8",
        "3 - 5",
        "3,,4",
        "1/8",
        "\u0663",
        "9" * 5000,
        f"first 1/{'9' * 5000}",
    ],
)
def test_layers_that_are_no_range(text: str) -> None:
    with pytest.raises(InputError, match=r"expected parts such as"):
        parse_layers(text)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ('tensors = "blk.60.*_exps.weight"', "no tensor of this model matches 'blk.60.*_exps.weight'"),
        ('tensors = "*_exps.weight"; layers = "0-2"', r"none in layers 0-2 \(the layers that have it: 3-59\)"),
        ('tensors = "*_exps.weight"; layers = "5, 60-"', "none in layers 60-"),
        ('tensors = "output.weight"; layers = "0-"', r"the layers that have it: none"),
        ('tensors = "*_exps.weight"; experts = "0-63"', "experts 0-63: expected all of them, 0-127: GGUF has one type"),
        ('tensors = "*_exps.weight"; experts = "0-255"', "expected all of them, 0-127"),
        ('tensors = "output.weight"; experts = "0-127"', "no tensor of stacked experts of this model matches"),
        ('tensors = "*"', "matches tensors that are always F32"),
        ('tensors = "blk.*.indexer.k_proj.weight"', "blk.3.indexer.k_proj.weight Q4_K.*need --allow-lossy-indexer"),
    ],
)
def test_rules_that_cannot_be_honored_name_recipe_and_line(rule: str, message: str) -> None:
    with pytest.raises(InputError, match=f"^recipe mine, line 4: .*{message}"):
        planned(recipe('tensors = "output.weight"; type = "q8_0"', f'{rule}; type = "q4_k"'))


def test_all_experts_by_number() -> None:
    found = planned(recipe('tensors = "blk.*.ffn_down*"; experts = "0-127"; type = "q4_k"'))
    assert {n.split(".", 2)[2] for n, t in found.items() if t == "Q4_K"} == {"ffn_down_exps.weight"}


# ------------------------------------------------------------------------------------------------ the text

DEFAULT = '[default]\ntype = "q8_0"\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"\[default\] is missing"),
        ("default = 3", r"\[default\] is missing"),
        ("[default]", "line 1: type is missing"),
        ('[default]\ntype = "q9"', "line 1: type 'q9' is not known, .* or auto"),
        ("[default", "not TOML"),
        (b"\xff", "expected UTF-8, found byte 255 at 0"),
        ("x = " + "9" * 5000, "not TOML"),
        ("x = " + "[" * 5000 + "]" * 5000, "not TOML"),
        (
            DEFAULT + f'[[rule]]\ntensors = "*"\ntype = "q8_0"\nexperts = "0-{"9" * 5000}"',
            "line 3: experts '0-9+': exp",
        ),
        (DEFAULT + f'[[rule]]\ntensors = "{"[" * 1001}"\ntype = "q8_0"', "line 3: pattern: expected at most 1000 char"),
        (DEFAULT + "x = 1", "line 1: key 'x' is not known, expected one of type, why"),
        ("x = 1\n" + DEFAULT, "key 'x' is not known, expected one of file_type, rule, default"),
        ('file_type = "Q9"\n' + DEFAULT, "file_type 'Q9': expected one of llama.cpp's names"),
        ("file_type = 15\n" + DEFAULT, "file_type: expected a string, found 15"),
        ('rule = [{tensors = "*", type = "q8_0"}]\n' + DEFAULT, r"expected every rule as a \[\[rule\]\] table"),
        (DEFAULT + 'why = """\n[[rule]]\n"""', r"expected every rule as a \[\[rule\]\] table"),
        (DEFAULT + "[[rule]]\n", "line 3: tensors is missing"),
        (DEFAULT + '[[rule]]\ntensors = "*"', "line 3: type is missing"),
        (DEFAULT + '[[rule]]\ntensors = 1\ntype = "q8_0"', "line 3: tensors: expected a string, found 1"),
        (DEFAULT + '[[rule]]\ntensors = ""\ntype = "q8_0"', "line 3: tensors: expected a string, found ''"),
        (DEFAULT + '[[rule]]\ntensors = "*"\ntype = "q9"', "line 3: type 'q9' is not known"),
        (DEFAULT + '[[rule]]\ntensor = "*"\ntype = "q8_0"', "line 3: key 'tensor' is not known"),
        (DEFAULT + '[[rule]]\ntensors = "*"\ntype = "q8_0"\nlayers = 3', "line 3: layers: expected a string, found 3"),
        (DEFAULT + '[[rule]]\ntensors = "*"\ntype = "q8_0"\nlayers = "a"', "line 3: layers 'a': expected parts"),
        (DEFAULT + '[[rule]]\ntensors = "*"\ntype = "q8_0"\nexperts = "3"', "line 3: experts '3': expected a range"),
    ],
)
def test_broken_recipes(content: str | bytes, message: str) -> None:
    with pytest.raises(InputError, match=f"^recipe mine.*{message}") as caught:
        parse_recipe(content if isinstance(content, bytes) else content.encode(), "mine")
    assert "\n" not in str(caught.value)


def test_a_recipe_that_is_another_kind_of_file(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(recipe_module, "MAX_BYTES", 10)
    (tmp_path / "x.toml").write_bytes(bytes(11))
    with pytest.raises(InputError, match="expected a recipe of at most 10 bytes"):
        recipe_module.read_recipe(tmp_path / "x.toml")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[default", ": not TOML: "),
        (b"\xff", ": expected UTF-8, found byte 255"),
        (b'[default]\ntype = "q9"', ", line 1: type 'q9' is not known"),
        (recipe('tensors = "x"; type = "q4_k"'), ", line 1: no tensor of this model matches 'x'"),
        (b'file_type = "Q9"\n' + recipe(), ": file_type 'Q9': expected one of"),
    ],
)
def test_messages_give_the_path_of_a_recipe(make_folder, m3_convert, tmp_path, content: bytes, message: str) -> None:
    (path := tmp_path / "of mine.toml").write_bytes(content)
    outcome = m3_convert(make_folder(), "--recipe", path, "--dry-run")
    assert outcome.code == 2 and outcome.error.startswith(f"m3-convert: recipe {path}{message}")


def test_a_name_that_is_not_utf_8_is_what_is_wrong(make_folder, m3_convert, m3_imatrix, tmp_path) -> None:
    folder, bad = make_folder(), f"{tmp_path}/a\udcff.toml"
    Path(bad).write_bytes(recipe())
    (text := tmp_path / "text").write_text("Some words to read. " * 20)
    assert m3_imatrix(folder, tmp_path / "i", "--text", text, "--context", 64).code == 0
    for option, what, name in (("--recipe", "recipe", bad), ("--imatrix", "importance matrix", f"{tmp_path}/i\udcff")):
        if not Path(name).exists():
            (tmp_path / "i").rename(name)
        outcome = m3_convert(folder, tmp_path / "out.gguf", option, name)
        assert outcome.code == 2 and len(outcome.err.splitlines()) == 1
        assert f"?: the name of the {what} is written into the file: expected UTF-8, found" in (
            outcome.error.replace(".toml", "")
        )
    text.rename(bad_text := f"{tmp_path}/t\udcff")
    outcome = m3_imatrix(folder, tmp_path / "j", "--text", bad_text)
    assert outcome.code == 2 and "t?: the name of the text is written into the file" in outcome.error


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_explain_names_recipe_line_and_reason(make_folder, m3_convert, tmp_path, end: str) -> None:
    lines = ["# two", "# lines", '[[rule]]  # "x"', f'tensors = "{DOWN}"', 'type = "f16"', 'why = "because"']
    lines += [" [[ rule ]]", 'tensors = "blk.*_exps.weight"', 'layers = "last 1/2"', 'experts = "0-3"', 'type = "q8_0"']
    lines += ["[default]", 'type = "bf16"', 'why = "the rest"']
    (tmp_path / "mine.toml").write_bytes(end.join(lines).encode())

    def explain(name: str, *options: str) -> str:
        return m3_convert(folder, "--recipe", tmp_path / "mine.toml", "--explain", name, *options).out.splitlines()[0]

    folder, mine = make_folder(), f"recipe {tmp_path / 'mine.toml'}"
    assert explain(DOWN) == f"{DOWN}: F16 by {mine}, line 3: {DOWN} = F16 (because)"
    name = "blk.2.ffn_up_exps.weight"
    by = f"{mine}, line 7: blk.*_exps.weight, layers last 1/2, experts 0-3 = Q8_0"
    assert explain(name) == f"{name}: Q8_0 by {by}"
    assert explain("output.weight").endswith("BF16 by " + f"{mine}, line 12: default = BF16 (the rest)")
    assert explain(DOWN, "--rule", f"{DOWN}=bf16").endswith(f"BF16 by --rule '{DOWN}=BF16'")
    assert explain("blk.1.indexer.k_proj.weight").endswith("F32 by the default for index projections")


@pytest.mark.parametrize("name", SHIPPED)
def test_lines_of_the_shipped_recipes(name: str) -> None:
    shipped = shipped_recipe(name)
    lines = shipped.text.splitlines()
    assert all(lines[rule.line - 1] == "[[rule]]" and rule.why for rule in shipped.rules)
    assert f"line {lines.index('[default]') + 1}: default = " in shipped.default_reason


# ------------------------------------------------------------------------------------------------ fallback types


@pytest.mark.parametrize("type_", TensorType)
def test_fallbacks_have_smaller_blocks_and_no_fewer_bits(type_: TensorType) -> None:
    if type_.block_size == 256:
        other = FALLBACKS[type_]
        assert other.block_size == 32 and row_bytes(other, 256) > row_bytes(type_, 256)
        assert not other.needs_importance
    else:
        assert type_ not in FALLBACKS


@pytest.mark.parametrize(
    ("columns", "wanted", "found"),
    [(96, "q4_k", "Q4_1"), (96, "q6_k", "Q8_0"), (96, "iq1_m", "IQ4_NL"), (40, "q5_k", "F16"), (40, "mxfp4", "F16")],
)
def test_a_fallback_is_in_the_plan_and_an_error_under_strict(
    make_folder, m3_convert, small, columns: int, wanted: str, found: str
) -> None:
    folder = make_folder(replace(small, inter=columns, shared_inter=columns))
    options = ("--rule", f"blk.*.ffn_down_exps.weight={wanted}", "--dry-run")
    outcome = m3_convert(folder, *options, "--json")
    note = f"{found} instead of {wanted.upper()}: rows of {columns} are not a multiple of "
    tensors = {t["name"]: t for t in outcome.json["tensors"]}
    assert tensors[DOWN]["type"] == found and tensors[DOWN]["note"].startswith(note)
    assert f"2 tensors fall back, the first: {DOWN}: {note}" in outcome.err
    outcome = m3_convert(folder, *options, "--strict")
    assert outcome.code == 2 and f"--strict: 2 tensors would fall back: {DOWN}: {note}" in outcome.error
    assert m3_convert(folder, "--dry-run", "--strict").code == 0


# ------------------------------------------------------------------------------------------------ importance


@pytest.mark.parametrize("name", ["iq1_s", "iq1_m", "iq2_xxs", "iq2_xs"])
def test_types_that_need_importance_are_refused_in_the_plan(
    make_folder, m3_convert, small, tmp_path, name: str
) -> None:
    folder = make_folder(replace(small, hidden=256))
    rule = ("--rule", f"blk.*.ffn_up_exps.weight={name}")
    for options in ((tmp_path / "out.gguf",), ("--dry-run",)):
        outcome = m3_convert(folder, *options, *rule)
        assert outcome.code == 2 and outcome.err.count("\n") == 1
        assert f"{name.upper()} needs an importance matrix: make one with m3-imatrix and give it as --imatrix FILE" in (
            outcome.error
        )
        assert "(2 tensors, the first blk.1.ffn_up_exps.weight)" in outcome.error
    assert not list(tmp_path.glob("out.gguf*"))
    assert m3_convert(folder, "--explain", "blk.1.ffn_up_exps.weight", *rule).code == 0


def test_writing_such_a_plan_is_refused_before_anything_is_written(make_folder, small, tmp_path) -> None:
    plan = plan_conversion(load_checkpoint(make_folder(replace(small, hidden=256))), choose("iq1_s"))
    with pytest.raises(InputError, match="IQ1_S needs an importance matrix"):
        convert(plan, [], tmp_path / "out.gguf")
    assert not list(tmp_path.glob("out.gguf*"))


def test_which_recipes_need_importance() -> None:
    mapped = tensors_without_data(RELEASE)
    needing = {n for n in SHIPPED if any(t.type.needs_importance for t in plan_tensors(mapped, choose(n))[0])}
    assert needing == {"iq2_xxs", "iq1_m"}


# ------------------------------------------------------------------------------------------------ in the file


def read(path: Path) -> dict[str, object]:
    return {f.name: f.contents() for f in gguf.GGUFReader(path).fields.values() if f.name.startswith("m3.")}


def test_the_recipe_is_in_the_file(make_folder, m3_convert, tmp_path) -> None:
    content = recipe(f'tensors = "{DOWN}"; type = "q8_0"; why = "ünicode"')
    (tmp_path / "my own.toml").write_bytes(content)
    rules = ("--rule", "output.weight=f16", "--rule", "token_embd.weight=q8_0")
    outcome = m3_convert(make_folder(), tmp_path / "out.gguf", "--recipe", tmp_path / "my own.toml", *rules)
    assert outcome.code == 0
    assert read(tmp_path / "out.gguf") == {
        "m3.recipe_name": "my own",
        "m3.recipe": content.decode(),
        "m3.recipe_sha256": hashlib.sha256(content).hexdigest(),
        "m3.rules": ["output.weight=F16", "token_embd.weight=Q8_0"],
    }
    found = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    assert (found[DOWN], found["output.weight"], found["token_embd.weight"]) == ("Q8_0", "F16", "Q8_0")


def test_a_shipped_recipe_and_a_plain_type_in_the_file(make_folder, m3_convert, tmp_path) -> None:
    folder = make_folder()
    assert m3_convert(folder, tmp_path / "a.gguf", "--type", "Q8_0").code == 0
    found, shipped = read(tmp_path / "a.gguf"), shipped_recipe("q8_0")
    assert (found["m3.recipe_name"], found["m3.recipe"]) == ("q8_0", shipped.text)
    assert found["m3.recipe_sha256"] == shipped.sha256 and len(found) == 3
    assert m3_convert(folder, tmp_path / "b.gguf", "--type", "q4_0").code == 0
    assert read(tmp_path / "b.gguf") == {}


def test_the_plan_as_json_names_the_recipe(make_folder, m3_convert) -> None:
    outcome = m3_convert(make_folder(), "--type", "q8_0", "--rule", "output.weight=f16", "--dry-run", "--json")
    plan = json.loads(outcome.out)
    assert (plan["type"], plan["recipe_sha256"]) == ("q8_0", shipped_recipe("q8_0").sha256)
    assert plan["rules"] == ["output.weight=F16"] and plan["lossy_indexer"] is False


@pytest.mark.parametrize(("head", "expected"), [("", 7), ('file_type = "IQ3_M"\n', 27), ('file_type = "f16"\n', 1)])
def test_the_file_type_of_ones_own_recipe(make_folder, tmp_path, head: str, expected: int) -> None:
    (tmp_path / "mine.toml").write_bytes(
        head.encode() + recipe('tensors = "*_exps.weight"; type = "f16"', default="q8_0")
    )
    plan = plan_conversion(load_checkpoint(make_folder()), choose(recipe=tmp_path / "mine.toml"))
    assert plan.file_type == expected
