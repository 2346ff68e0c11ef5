from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import options
import pytest
import reference_model
import reference_parity
import reference_run

DATA = Path(__file__).parent / "data"
ORACLE, EXTRAS = DATA / "oracle_a.npz", DATA / "extras_a.npz"
# Beyond float32's bar of 1e-5 only what training itself amplifies is let pass; see N_SPREADS in the script.
ROUNDING = "rounding decides"


def bad(rows):
    return [str(row) for row in rows if row.is_bad]


def worst(rows, ending):
    """Difference of the only row whose quantity ends so."""
    (row,) = [row for row in rows if row.quantity.endswith(ending)]
    return row.difference


def rewrite(path, arrays, **changed):
    np.savez(path, **(arrays | {name.replace("__", "/"): value for name, value in changed.items()}))
    return path


def leaves_of(arrays, head):
    return {key.removeprefix(f"{head}/"): value for key, value in arrays.items() if key.startswith(f"{head}/")}


@pytest.fixture(scope="module")
def variants(oracle, base, tmp_path_factory):
    """A folder with a file for each shape, of all options by the second implementation; two sequences a batch."""
    folder = tmp_path_factory.mktemp("variants")
    for name, (config, changes, init) in options.files(base, leaves_of(oracle, "init")).items():
        reference_model.write_variants(folder / f"{name}.npz", config, changes, init, oracle["tokens"][:, :2])
    return folder


# ---- numbers of the reference itself


def test_oracle_in_float32():
    rows = reference_parity.check_file(ORACLE, float64=False)
    assert bad(rows) == []
    assert [row.quantity for row in rows if row.tolerance != 1e-5 or ROUNDING in row.note] == []
    leaves = ("w_e", "w_u", "w_ak", "w_ao", "w_aq", "w_av", "w_fi", "w_fo")
    steps = ("loss_avg", "loss_term_avg", "loss_mask_avg", "grad_norm", "loss_avg_f64")
    assert {row.quantity for row in rows} == {
        "logits0",
        *(f"{head}/{leaf}" for head in ("grads0", "params5", "params20") for leaf in leaves),
        *(f"step/{name}" for name in steps),
    }


def test_oracle_losses_in_float64():
    rows = reference_parity.check_file(ORACLE, float64=True)
    assert bad(rows) == []
    assert worst(rows, "step/loss_avg_f64") <= 1e-7


def test_float64_bar_is_not_widened_by_rounding(oracle, tmp_path):
    off = rewrite(tmp_path / "off.npz", oracle, **{"step/loss_avg_f64": oracle["step/loss_avg_f64"] + 2e-7})
    assert [row.split()[0] for row in bad(reference_parity.check_file(off, float64=True))] == ["step/loss_avg_f64"]


def test_extras():
    rows = reference_parity.check_file(EXTRAS, float64=False)
    assert bad(rows) == []
    with np.load(EXTRAS) as file:
        sown = {key.replace("_a/", "/") for key in file.files if key.startswith("sow_a/")}
    compared = {row.quantity for row in rows if row.tolerance is not None}
    assert compared == sown | {
        *("schedule/linear", "schedule/cosine", "loss_mask/out_eos1_pad1", "loss_mask/out_eos1_pad2"),
        *("rope/out_0", "rope/out_off", "eval/loss_term_avg", "eval/loss_mask_avg"),
        *("decode/forced_logits_sel", "decode/greedy_tokens"),
        *("sampler/nucleus0.8", "sampler/nucleus0.3", "sampler/topk5", "sampler/temp0.1"),
    }
    assert max(row.tolerance for row in rows if row.tolerance is not None) <= 1e-5


def test_extras_with_other_numbers_fail(tmp_path):
    with np.load(EXTRAS) as file:
        arrays = dict(file)
    (tmp_path / ORACLE.name).write_bytes(ORACLE.read_bytes())
    changed = ["schedule/cosine", "rope/out_off", "sow_a/aqr_l1_01", "sow_a/uu_w_fo_00", "eval_a/loss_term_avg"]
    others = {key: arrays[key] + 2e-5 for key in changed} | {
        "loss_mask/out_eos1_pad2": arrays["loss_mask/out_eos1_pad1"],
        "decode_a/forced_logits_sel": arrays["decode_a/forced_logits_sel"] + 2e-5,
        "decode_a/greedy_tokens": np.roll(arrays["decode_a/greedy_tokens"], 1, axis=0),
        "sampler/nucleus0.3": arrays["sampler/nucleus0.8"],
        "sampler/temp0.1": arrays["sampler/in"],
    }
    rows = reference_parity.check_file(rewrite(tmp_path / EXTRAS.name, arrays, **others), float64=False)
    assert {row.split()[0] for row in bad(rows)} == {key.replace("_a/", "/") for key in others}


# ---- options, by a second implementation that is held against the reference first


def test_second_implementation_gives_the_references_numbers(oracle, base):
    init = reference_model.starting_leaves(base, leaves_of(oracle, "init"))
    numbers = reference_model.train(base, init, oracle["tokens"])
    assert np.abs(numbers["loss_avg"] - oracle["step/loss_avg"]).max() < 1e-5
    for head in ("grads0", "params5", "params20"):
        for leaf in init:
            assert np.abs(numbers[f"{head}/{leaf}"] - oracle[f"{head}/{leaf}"]).max() < 1e-5, f"{head}/{leaf}"


@pytest.mark.parametrize("name", ["plain", "swiglu", "one_kv_head"])
def test_every_option(variants, name):
    rows = reference_parity.check_file(variants / f"{name}.npz", float64=False)
    assert bad(rows) == []
    names = {"plain": options.PLAIN, "swiglu": options.SWIGLU, "one_kv_head": options.ONE_KV_HEAD}[name]
    heads = ("loss_avg", "loss_avg_f64", "grad0_l2", "params5_stat", "params20_stat")
    assert [row.quantity for row in rows] == [f"{variant}/{head}" for variant in names for head in heads]
    # float32 suffices for most: were rounding to decide on many, it would hide a difference
    decided = {row.quantity for row in rows if ROUNDING in row.note}
    assert len(decided) <= len(rows) / 10
    assert not any(quantity.endswith("grad0_l2") for quantity in decided)


@pytest.mark.parametrize("name", ["plain", "swiglu", "one_kv_head"])
def test_every_option_in_float64(variants, name):
    """Rounding has no say here: losses of all steps within 1e-7."""
    rows = reference_parity.check_file(variants / f"{name}.npz", float64=True)
    assert bad(rows) == []
    assert {row.tolerance for row in rows if row.quantity.endswith("/loss_avg_f64")} == {1e-7}


def test_every_option_matters(variants):
    """Take a variant's keys away one at a time: the comparison fails for each."""
    passed = []
    for file in ("plain", "swiglu", "one_kv_head"):
        arrays = reference_parity.read(variants / f"{file}.npz")
        for variant, changed in json.loads(str(arrays["variants_json"])).items():
            expected = {"loss_avg": arrays[f"{variant}/loss_avg"]}
            for key in changed:
                less = {variant: {name: value for name, value in changed.items() if name != key}}
                case = reference_parity.variant_case(arrays | {"variants_json": json.dumps(less)}, variant)
                record = reference_run.run(case, "32-true")
                if not bad(reference_parity.compare(expected, record, "32-true", lambda record=record: [record])):
                    passed.append((variant, key))
    assert passed == []


def test_bfloat16_is_near_and_its_tolerance_still_tells_runs_apart(oracle, tmp_path):
    config = json.loads(str(oracle["config_json"])) | {"dtype": "bfloat16"}
    arrays = {key: array for key, array in oracle.items() if not key.startswith(("params20", "step"))}
    arrays |= {"tokens": oracle["tokens"][:5], "step/loss_avg": oracle["step/loss_avg"][:5]}
    near = rewrite(tmp_path / "near.npz", arrays, config_json=json.dumps(config))
    assert bad(reference_parity.check_file(near, float64=False)) == []
    far = rewrite(tmp_path / "far.npz", arrays, config_json=json.dumps(config | {"lr_base": 0.04}))
    assert {row.split("/")[0] for row in bad(reference_parity.check_file(far, float64=False))} == {"params5", "step"}


# ---- the mapping


def test_mapping_has_every_key_of_the_reference_with_its_default(base):
    default = json.loads((DATA / "base_config.json").read_text())
    without_effect = [key for keys in reference_run.NO_EFFECT.values() for key in keys.split()]
    of_tokenizer = {"bos_token_id", "eos_token_id", "pad_token_id"}
    assert sorted([*reference_run.MAPPING, *without_effect]) == sorted([*default, *of_tokenizer])
    mapped = {key: value for key, (value, _) in reference_run.MAPPING.items() if key not in of_tokenizer}
    assert mapped == {key: default[key] for key in mapped}


def test_leaves_return_from_our_layout(oracle, base):
    init = leaves_of(oracle, "init")
    case = reference_run.make_case(base, init, oracle["tokens"])
    returned = reference_run.to_reference(dict(case.module().decoder.named_parameters()))
    assert sorted(returned) == sorted(init)
    for leaf, array in init.items():
        assert np.array_equal(returned[leaf], array), leaf


# ---- the command


def run_main(capsys, *arguments):
    code = reference_parity.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(
    ("variant", "key", "value"),
    [("swiglu", "lr_base", 0.04), ("swiglu", "d_base", 64), ("swiglu_abs", "qk_scale", 0.063)],
)
def test_a_changed_key_fails(variants, tmp_path, capsys, variant, key, value):
    arrays = reference_parity.read(variants / "swiglu.npz")
    changed = {variant: options.SWIGLU[variant]}
    code, out, _ = run_main(capsys, rewrite(tmp_path / "same.npz", arrays, variants_json=json.dumps(changed)))
    assert (code, out.count("FAIL")) == (0, 0)
    changed[variant] = changed[variant] | {key: value}
    code, out, _ = run_main(capsys, rewrite(tmp_path / "changed.npz", arrays, variants_json=json.dumps(changed)))
    assert (code, "FAIL" in out) == (1, True)


def test_a_variant_that_cannot_run_fails_and_the_others_are_still_compared(variants, tmp_path, capsys):
    arrays = reference_parity.read(variants / "swiglu.npz")
    name = next(iter(options.SWIGLU))
    both = {"odd": options.SWIGLU[name] | {"ff_act_name": "relu"}, name: options.SWIGLU[name]}
    copied = {f"odd/{key}": array for key, array in reference_parity.under(arrays, f"{name}/").items()}
    both_file = rewrite(tmp_path / "both.npz", arrays | copied, variants_json=json.dumps(both))
    code, out, _ = run_main(capsys, both_file)
    assert code == 1 and "init/w_fi: shape" in out
    assert f"{name}/loss_avg" in out and out.count("FAIL") == 1
    own = {"odd/init/w_fi": arrays["init/w_fi"][..., : arrays["init/w_fi"].shape[-1] // 2]}
    code, out, _ = run_main(
        capsys, rewrite(tmp_path / "own.npz", arrays | copied | own, variants_json=json.dumps(both))
    )
    assert "init/w_fi" not in out and "odd/loss_avg" in out  # runs with the leaf of its own, to other numbers
    assert code == 1


def mistakes(oracle):
    config = json.loads(str(oracle["config_json"]))

    def with_config(**changed):
        return oracle | {"config_json": json.dumps(config | changed)}

    variant = {key: value for key, value in oracle.items() if key == "tokens" or key.startswith("init/")}
    variant |= {"base_json": json.dumps(config), "variants_json": json.dumps({"a": {}})}
    lacking = {key: value for key, value in oracle.items() if key != "tokens"}
    return {
        "unknown key": (with_config(lr_bsae=1.0), "'lr_bsae'"),
        "unknown value": (with_config(optim_name="sgd"), "optim_name='sgd'"),
        "unknown activation": (with_config(ff_act_name="glu"), "ff_act_name='glu'"),
        "wrong type": (with_config(n_layer="2"), "n_layer='2'"),
        "no multiple": (with_config(d_base=128), "d_base=128"),
        "our own rule": (with_config(d_head=24), "model.decoder.d_model=64"),
        "shape": (with_config(ff_act_name="swiglu"), "init/w_fi: shape (2, 64, 256)"),
        "tokens": (with_config(sequence_len=16), "tokens: shape (20, 8, 32)"),
        "tokens' range": (oracle | {"tokens": oracle["tokens"] + 1}, "tokens: 2 to 97"),
        "unknown leaf": (oracle | {"init/w_x": oracle["init/w_e"]}, "init/w_x"),
        "quantity's shape": (oracle | {"step/loss_avg": oracle["step/loss_avg"][:3]}, "shape (3,)"),
        "too many batches": (oracle | {"params21/w_e": oracle["params20/w_e"]}, "params21/w_e"),
        "lacks tokens": (lacking, "tokens"),
        "not JSON": (oracle | {"config_json": "{"}, "not JSON"),
        "no numbers": (variant, "variant 'a'"),
        "another file": ({"x": np.zeros(3)}, "config_json"),
    }


def test_mistakes_are_one_line_and_exit_2(oracle, tmp_path, capsys):
    for name, (arrays, said) in mistakes(oracle).items():
        code, out, err = run_main(capsys, rewrite(tmp_path / "mistake.npz", arrays))
        assert (code, out, err.count("\n")) == (2, "", 1), f"{name}: {err}"
        assert said in err, name


def test_files_that_are_none(tmp_path, capsys):
    (tmp_path / "text.npz").write_text("no archive")
    np.save(tmp_path / "array.npy", np.zeros(3))
    extras = tmp_path / EXTRAS.name  # without the run's file beside it
    extras.write_bytes(EXTRAS.read_bytes())
    for file, said in (
        (tmp_path / "absent.npz", "no such file"),
        (tmp_path, "not readable"),
        (tmp_path / "text.npz", "not readable"),
        (tmp_path / "array.npy", "not readable"),
        (extras, "oracle_a.npz"),
    ):
        code, out, err = run_main(capsys, file)
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert said in err


def test_help(capsys):
    with pytest.raises(SystemExit) as ended:
        reference_parity.main(["--help"])
    assert ended.value.code == 0
    assert "--float64" in capsys.readouterr().out
