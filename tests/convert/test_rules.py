"""Which rule decides the type of a tensor, and that none is passed over in silence."""

from dataclasses import replace

import pytest

from m3_convert.checkpoint import load_checkpoint
from m3_convert.plan import plan_conversion
from m3_convert.precision import TypeChoice, choose, source_precision
from m3_convert.rules import parse_rule
from m3_runtime.errors import InputError
from m3_runtime.quantize import TensorType

DOWN = "blk.1.ffn_down_exps.weight"


@pytest.fixture
def types(make_folder):
    """types(default, *rules) -> type names by tensor name."""
    checkpoint = load_checkpoint(make_folder())

    def call(default: str, *rules: str) -> dict[str, str]:
        plan = plan_conversion(checkpoint, choose(default, rules=rules))
        return {t.name: t.type.name for t in plan.tensors}

    return call


@pytest.mark.parametrize("default", ["f32", "F16", "bf16", "Q8_0", "auto", "AUTO"])
def test_what_is_always_f32(types, default: str) -> None:
    found = types(default)
    fixed = {n for n in found if "norm" in n or ".indexer." in n or "ffn_gate_inp" in n or "exp_probs_b" in n}
    assert len(fixed) == 3 * 4 + 2 * (4 + 2) + 1
    assert {found[n] for n in fixed} == {"F32"}
    expected = "BF16" if default.lower() == "auto" else default.upper()
    assert {found[n] for n in set(found) - fixed} == {expected}


def test_a_rule_that_matches_nothing(types) -> None:
    with pytest.raises(InputError, match=r"rule 'blk\.7\.\*=Q8_0': no tensor of this model matches 'blk\.7\.\*'"):
        types("bf16", "blk.7.*=q8_0")


def test_a_rule_that_equals_the_default_is_honored(types) -> None:
    found = types("bf16", f"{DOWN}=bf16", "blk.*.ffn_*_exps.weight=q8_0")
    assert found[DOWN] == "BF16"
    assert found["blk.2.ffn_down_exps.weight"] == "Q8_0"


def test_a_rule_over_an_unquantized_default(types) -> None:
    for default in ("f16", "f32", "auto"):
        assert types(default, f"{DOWN}=q8_0")[DOWN] == "Q8_0"


def test_of_two_rules_the_first_decides(types) -> None:
    assert types("bf16", f"{DOWN}=q8_0", "blk.*.ffn_down_exps.weight=f16")[DOWN] == "Q8_0"
    found = types("bf16", "blk.*.ffn_down_exps.weight=f16", f"{DOWN}=q8_0")
    assert found[DOWN] == found["blk.2.ffn_down_exps.weight"] == "F16"


def test_a_rule_in_the_shadow_of_others_is_reported(make_folder) -> None:
    rules = ["blk.*_exps.weight=q8_0", f"{DOWN}=f16", "*=f32"]
    plan = plan_conversion(load_checkpoint(make_folder()), choose(rules=rules))
    assert plan.warnings == (f"rule '{DOWN}=F16' decides nothing: earlier rules decide all that it matches",)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("blk.1.attn_norm.weight", r"blk\.1\.attn_norm\.weight \(norms\)"),
        ("*.ffn_gate_inp.weight", r"blk\.1\.ffn_gate_inp\.weight \(the router\), blk\.2\.ffn_gate_inp"),
        ("blk.1.exp_probs_b.bias", r"blk\.1\.exp_probs_b\.bias \(the router's bias\)"),
        ("blk.1.indexer.q_norm.weight", r"blk\.1\.indexer\.q_norm\.weight \(norms\)"),
        ("blk.1.*", r"and 3 more \(8 in all\)"),
    ],
)
def test_a_rule_that_would_touch_an_always_f32_tensor(types, pattern: str, names: str) -> None:
    with pytest.raises(InputError, match=f"matches tensors that are always F32: .*{names}"):
        types("bf16", f"{pattern}=q8_0")
    assert types("bf16", f"{pattern}=f32")


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("blk.0.attn_q.weight", "expected PATTERN=TYPE"),
        ("=q8_0", "expected PATTERN=TYPE"),
        ("output.weight=", "type '' is not known"),
        ("output.weight=q9", "type 'q9' is not known, expected one of f32, f16"),
        ("[" * 1001 + "=q8_0", r"'\[+\.\.\.': pattern: expected at most 1000 characters, found 1001"),
        ("[!\udcff]*exps*=q8_0", "pattern: expected UTF-8, found other bytes"),
    ],
)
def test_malformed_rules(rule: str, message: str) -> None:
    with pytest.raises(InputError, match=f"--rule .*{message}"):
        parse_rule(rule)


def test_unknown_default() -> None:
    with pytest.raises(InputError, match=r"--type: 'q4' is not known, expected auto, a recipe \(iq1_m, .*a type \(f32"):
        choose("q4")


def test_rows_that_a_block_does_not_divide_become_f16_and_are_listed(make_folder, small) -> None:
    folder = make_folder(replace(small, inter=40, shared_inter=40))
    plan = plan_conversion(load_checkpoint(folder), TypeChoice(TensorType.Q8_0))
    notes = {t.name: (t.type.name, t.note) for t in plan.tensors if t.note}
    assert set(notes) == {f"blk.{i}.ffn_down_{kind}.weight" for i in (1, 2) for kind in ("exps", "shexp")}
    assert set(notes.values()) == {("F16", "F16 instead of Q8_0: rows of 40 are not a multiple of 32")}
    choice = choose("bf16", rules=[f"{DOWN}=q8_0"])
    assert plan_conversion(load_checkpoint(folder), choice).tensor(DOWN).type is TensorType.F16


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        (["BF16"], "BF16"),
        (["F8_E4M3"], "BF16"),
        (["BF16", "F8_E4M3"], "BF16"),
        (["F16"], "F16"),
        (["F32"], "F32"),
        (["BF16", "F16"], "F32"),
        (["F16", "F8_E4M3"], "F32"),
        (["F32", "BF16"], "F32"),
    ],
)
def test_auto_holds_every_source_exactly(dtypes: list[str], expected: str) -> None:
    assert source_precision(dtypes).name == expected


def test_explain_names_the_rule(make_folder, m3_convert) -> None:
    folder = make_folder()
    rule = ("--rule", "blk.*.ffn_down_exps.weight=q8_0")
    assert m3_convert(folder, "--explain", DOWN, *rule).out.startswith(
        f"{DOWN}: Q8_0 by --rule 'blk.*.ffn_down_exps.weight=Q8_0'\n"
    )
    assert "BF16 by --type auto: the source's own precision" in m3_convert(folder, "--explain", "output.weight").out
    assert "F16 by --type f16" in m3_convert(folder, "--explain", "output.weight", "--type", "f16").out
    norm = m3_convert(folder, "--explain", "output_norm.weight", "--type", "q8_0").out
    assert "F32 by the fixed rule for norms" in norm and "+ 1 in float32" in norm
    assert m3_convert(folder, "--explain", DOWN, *rule, "--json").json["rule"].startswith("--rule")
    absent = m3_convert(folder, "--explain", "blk.9.attn_q.weight")
    assert absent.code == 2 and "blk.9.attn_q.weight: no such tensor" in absent.error
