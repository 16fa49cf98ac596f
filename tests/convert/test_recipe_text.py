"""Recipes that a search writes are recipes."""

from m3_convert.layer_range import parse_layers
from m3_convert.recipe import parse_recipe
from m3_convert.recipe_text import FoundTensor, layers_text, recipe_text
from m3_runtime.quantize import TensorType as T


def found(name, type_, more=0, fixed=False):
    return FoundTensor(name, type_, 1000, more, T.Q4_K, fixed)


TENSORS = [
    found("output.weight", T.Q6_K, 400),
    *[found(f"blk.{n}.ffn_down_exps.weight", T.Q5_K if n in (3, 4, 7) else T.Q4_K) for n in range(3, 10)],
    found("blk.0.attn_q.weight", T.Q8_0, 500, fixed=True),
]


def text():
    return recipe_text(["Found for a test."], TENSORS, lambda some: f"gain of {len(some)}" if len(some) > 1 else "")


def test_a_written_recipe_reads_as_what_was_found():
    recipe = parse_recipe(text().encode(), "found")
    rules = [(rule.pattern, str(rule.layers or ""), rule.type, rule.why) for rule in recipe.rules]
    assert rules == [
        ("output.weight", "", T.Q6_K, ""),
        ("blk.*.ffn_down_exps.weight", "3-4, 7", T.Q5_K, "gain of 3"),
        ("blk.*.ffn_down_exps.weight", "", T.Q4_K, "gain of 4"),
        ("blk.*.attn_q.weight", "", T.Q8_0, "asked for with --rule"),
    ]
    assert recipe.default is T.Q4_K and recipe.file_type is None


def test_lines_say_bytes_beside_those_before():
    lines = text().splitlines()
    assert lines[0] == "# Found for a test."
    assert "# 1.0 kB, 400 bytes more than with Q4_K before" in lines
    assert "# 3.0 kB, as Q4_K was before" in lines


def test_layers():
    assert [layers_text(n) for n in ([0], [3, 4, 5], [0, 2, 3, 9])] == ["0", "3-5", "0, 2-3, 9"]
    assert parse_layers(layers_text([0, 2, 3, 9])).select(range(12)) == {0, 2, 3, 9}
