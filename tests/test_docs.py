"""What the documents say is compared with the code: formulas, settings, generated pages, links and command lines."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
import operator
import re
import runpy
import shlex
from pathlib import Path
from typing import get_args

import mup
import pytest
import torch
from lightning.pytorch import Trainer

from mutransformer.cli import COMMANDS, main
from mutransformer.cli.config_files import in_order_of_precedence
from mutransformer.errors import ConfigError
from mutransformer.inference import stock
from mutransformer.inference.export import SHARD_BYTES, TOLERANCE
from mutransformer.inference.sampling import Sampling
from mutransformer.model.config import Activation, DecoderConfig
from mutransformer.mup.config import OptimizerConfig, ParametrizationConfig, RoleMultipliers
from mutransformer.mup.roles import Role
from mutransformer.training.optimizer import param_groups
from mutransformer.training.schedule import ScheduleConfig, schedule_factor
from mutransformer.xla.strategy import SPMDStrategy

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PARAMETRIZATION, COMING_FROM, CONFIGURATION, SAMPLING = (
    ROOT / "docs" / name for name in ("parametrization.md", "coming-from.md", "configuration.md", "sampling.md")
)
each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)


# ---- reading Markdown -----------------------------------------------------------------------------------------------


def tables(path):
    """The tables of a document; a row is a {column: cell}."""
    found = []
    for block in re.findall(r"(?:^\|.*\|\n)+", path.read_text(), flags=re.MULTILINE):
        header, rule, *rows = ([cell.strip() for cell in line[1:-1].split(" | ")] for line in block.splitlines())
        assert set(rule) == {"---"}, f"{path.name}: the second line of a table is {rule}"
        found.append([dict(zip(header, row, strict=True)) for row in rows])
    return found


def table(path, *columns):
    """The table of the document that begins with these columns; there must be one."""
    (found,) = (rows for rows in tables(path) if tuple(rows[0])[: len(columns)] == columns)
    return found


def code(text):
    """What stands in backticks."""
    return re.findall(r"`([^`]+)`", text)


def fenced(path, *languages):
    """The lines of each fenced block of these languages."""
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [text.splitlines() for language, text in blocks if language in languages]


def prose(path):
    """The document without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)


def command_lines(path, program):
    """The words of each line of a fenced block that runs `program`, comments left out."""
    lines = (line.removeprefix("$ ") for block in fenced(path, "bash", "console") for line in block)
    return [shlex.split(line, comments=True) for line in lines if line.startswith(f"{program} ")]


def anchors(path):
    """The anchors that GitHub gives the headings of a document."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


# ---- formulas -------------------------------------------------------------------------------------------------------

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}


def evaluate(formula, symbols):
    """The value of a formula such as `M^-1/2`, `lr * m_out / m` or `m_N^(a - 1)`; an exponent may be a fraction."""

    def value(node):
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return symbols[node.id]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.BinOp):
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "cos":
            return math.cos(*map(value, node.args))
        raise ValueError(f"{formula!r} holds {ast.unparse(node)!r}")

    return value(ast.parse(re.sub(r"\^(-?\d+/\d+)", r"^(\1)", formula).replace("^", "**"), mode="eval").body)


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        ("0", 0),
        ("M^-1/2", 0.25),
        ("m * M^-1", 0.125),
        ("lr * m_out / m", 7.5),
        ("m^-a", 0.125),
        ("m^(a - 1)", 4),
        ("1 + cos(pi)", 0),
    ],
)
def test_formulas_are_read_as_a_reader_would(formula, expected):
    assert evaluate(formula, {"M": 16, "lr": 5.0, "m_out": 3, "m": 2, "a": 3, "pi": math.pi}) == expected


@pytest.mark.parametrize(("formula", "error"), [("abs(1)", ValueError), ("m.real", ValueError), ("unknown", KeyError)])
def test_a_formula_with_anything_else_is_refused(formula, error):
    with pytest.raises(error):
        evaluate(formula, {"m": 1})


# ---- docs/parametrization.md ----------------------------------------------------------------------------------------

# Width multiple 3. The feed-forward is 4 times as wide as the model, 2 times at the base width: its multiple is 6.
M, K, F, LR, EPS, WD = 96, 16, 384, 0.01, 1e-8, 1e-4
BASE = {"d_base": 32, "ff_multiple_base": 2.0}
ALL_TENSORS = {
    "d_model": M,
    "d_head": K,
    "n_layer": 6,
    "ff_multiple": 4.0,
    "activation": "swiglu",
    "norm_gains": "vector",
    "embedding_norm": True,
    "qk_norm": True,
    "projection_biases": True,
}
SYMBOLS = {"M": M, "HK": M, "K": K, "F": F, "m": 3, "m_F": 6, "lr": LR, "eps": EPS, "wd": WD}
# what m_out is for the tensors of the roles whose rules speak of it
FAN_OUT = {
    "m": (
        "b_query",
        "b_attention_out",
        "b_ff_out",
        "gain_attention",
        "gain_feedforward",
        "gain_embedding",
        "gain_final",
    ),
    "m_F": ("b_ff_in", "b_ff_gate"),
    "m_kv": ("w_key", "w_value", "b_key", "b_value"),
    "1": ("b_unembedding", "gain_query", "gain_key"),
}
ADAM_LIKE = ("adamw", "lion")
# column -> the field of a plan's row, the rule sets and the algorithms that it holds for
COLUMNS = {
    "init std, mup": ("init_std", ("mup", "mup_absolute"), ADAM_LIKE),
    "init std, sp": ("init_std", ("sp",), (*ADAM_LIKE, "sgd")),
    "forward, mup": ("forward_multiplier", ("mup",), (*ADAM_LIKE, "sgd")),
    "LR, mup": ("lr", ("mup",), ADAM_LIKE),
    "LR, mup_absolute": ("lr", ("mup_absolute",), ADAM_LIKE),
    "LR, sp": ("lr", ("sp",), (*ADAM_LIKE, "sgd")),
    "LR, mup, SGD": ("lr", ("mup",), ("sgd",)),
    "eps, mup": ("eps", ("mup",), ("adamw",)),
    "decay": ("weight_decay", ("mup", "mup_absolute", "sp"), ADAM_LIKE),
}
ROLE_TABLE = table(PARAMETRIZATION, "role", "init std, mup")
# the plan can be made: no dash
TAKES = {"mup": "LR, mup", "mup_absolute": "LR, mup_absolute", "sp": "LR, sp"}


def plan_of(rules="mup", algorithm="adamw", n_kv_head=None, tie_embeddings=False, scale_eps=True, **parametrization):
    decoder = DecoderConfig(**ALL_TENSORS, n_kv_head=n_kv_head, tie_embeddings=tie_embeddings)
    optimizer = OptimizerConfig(algorithm=algorithm, learning_rate=LR, eps=EPS, weight_decay=WD, scale_eps=scale_eps)
    return decoder.plan(ParametrizationConfig(**{"rules": rules, **BASE, **parametrization}), optimizer)


def roles_and_form(line):
    """The roles that a line of the table is about, and the form of the unembedding it is in."""
    words = code(line["role"])
    return (words[:-1], words[-1]) if "form" in line["role"] else (words, "A")


def symbols_of(name, n_kv_head):
    """The symbols' values for one tensor; one key/value head does not grow with width, several do."""
    symbol = {tensor: symbol for symbol, names in FAN_OUT.items() for tensor in names}.get(name)
    if symbol is None:
        return SYMBOLS
    return {**SYMBOLS, "m_out": {"m": 3, "m_F": 6, "m_kv": 1 if n_kv_head == 1 else 3, "1": 1}[symbol]}


def test_the_role_table_has_every_role_and_every_column():
    listed = [role for line in ROLE_TABLE for role in roles_and_form(line)[0]]
    assert sorted(listed) == sorted([*(role.value for role in Role), "unembedding"])  # in two forms
    assert list(ROLE_TABLE[0]) == ["role", *COLUMNS]


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("line", ROLE_TABLE, ids=lambda line: line["role"])
def test_a_formula_of_the_role_table_is_what_the_plan_has(line, column):
    roles, form = roles_and_form(line)
    field, rule_sets, algorithms = COLUMNS[column]
    cases = [
        (rules, algorithm, n_kv_head)
        for rules in rule_sets
        for algorithm in algorithms
        for n_kv_head in (None, 2, 1)
        if line[TAKES[rules]] != "-"
    ]
    compared = set()
    for rules, algorithm, n_kv_head in cases:
        rows = plan_of(rules, algorithm, n_kv_head, unembedding_form=form).rows
        for row in (row for row in rows if row.role in roles):
            expected = evaluate(*code(line[column]), symbols_of(row.name, n_kv_head))
            assert getattr(row, field) == pytest.approx(expected, rel=1e-12), f"{row.name}, {rules}, {algorithm}"
            compared.add(row.role)
    assert compared == (set(roles) if cases else set())


def test_a_dash_in_the_role_table_is_refused():
    refused = [(roles_and_form(line)[1], rules) for line in ROLE_TABLE for rules in TAKES if line[TAKES[rules]] == "-"]
    assert refused == [("B", "mup_absolute")]
    with pytest.raises(ConfigError, match="unembedding_form"):
        plan_of("mup_absolute", unembedding_form="B")


@pytest.mark.parametrize("form", ["A", "B"])
@pytest.mark.parametrize("rules", ["mup", "mup_absolute", "sp"])
def test_eps_gets_the_factor_of_the_learning_rate_where_it_is_scaled(rules, form):
    form = "A" if rules == "mup_absolute" else form
    for row in plan_of(rules, unembedding_form=form, scale_eps=True).rows:
        assert row.eps / EPS == pytest.approx(row.lr / LR, rel=1e-12), row.name
    assert {row.eps for row in plan_of(rules, unembedding_form=form, scale_eps=False).rows} == {EPS}


@pytest.mark.parametrize("rules", ["mup_absolute", "sp"])
def test_forward_multipliers_are_one_outside_mup(rules):
    assert {row.forward_multiplier for row in plan_of(rules).rows} == {1}


def test_gains_start_at_one_and_all_else_around_zero():
    assert {(row.role == "gain", row.init_mean) for row in plan_of().rows} == {(True, 1), (False, 0)}


def test_a_tied_embedding_has_the_row_of_the_embedding():
    tied, untied = (
        next(row for row in plan_of(tie_embeddings=is_tied).rows if row.role == "embedding")
        for is_tied in (True, False)
    )
    assert tied == untied


@pytest.mark.parametrize("line", table(PARAMETRIZATION, "quantity", "setting"), ids=lambda line: line["setting"])
def test_a_scalar_of_the_forward_pass_is_what_the_plan_has(line):
    settings = dict(setting.split("=") for setting in code(line["setting"]))
    if "tie_embeddings" in settings:
        settings["tie_embeddings"] = settings["tie_embeddings"] == "true"
    (quantity,), (formula,) = code(line["quantity"]), code(line["value"])
    plan = plan_of(**{"n_base_layer": 2, "depth_alpha": 0.75, **settings})
    assert getattr(plan, quantity) == pytest.approx(evaluate(formula, {**SYMBOLS, "m_N": 3, "a": 0.75}), rel=1e-12)


@pytest.mark.parametrize("alpha", [0.5, 0.75, 1])
@pytest.mark.parametrize("line", table(PARAMETRIZATION, "depth_rule"), ids=lambda line: line["depth_rule"])
def test_a_factor_of_the_depth_table_is_what_the_plan_has(line, alpha):
    (depth_rule,) = code(line["depth_rule"])
    residual, lr, eps = (
        evaluate(*code(line[column]), {"m_N": 3, "a": alpha})
        for column in ("residual branch", "LR in blocks", "eps in blocks")
    )
    plan, flat = (
        plan_of(depth_rule=rule, depth_alpha=alpha, n_base_layer=2, scale_eps=False) for rule in (depth_rule, "none")
    )
    assert plan.residual_multiplier / flat.residual_multiplier == pytest.approx(residual, rel=1e-12)
    for row, at_base in zip(plan.rows, flat.rows, strict=True):
        factors = (lr, eps) if row.axes[0] == "layers" else (1, 1)
        assert (row.lr / at_base.lr, row.eps / at_base.eps) == pytest.approx(factors, rel=1e-12), row.name


@pytest.mark.parametrize("line", table(PARAMETRIZATION, "decay", "`d`"), ids=lambda line: line["decay"])
def test_a_form_of_weight_decay_is_what_the_optimizer_gets(line):
    (decay,), (taken_off,), (given,) = (code(cell) for cell in line.values())
    optimizer = OptimizerConfig(learning_rate=LR, weight_decay=WD, decay=decay)
    parametrization = ParametrizationConfig(**BASE, weight_decay_multiplier=RoleMultipliers())
    plan = DecoderConfig(**ALL_TENSORS).plan(parametrization, optimizer)
    parameters = [(row.name, torch.nn.Parameter(torch.zeros(1))) for row in plan.rows]
    for group, row in zip(param_groups(parameters, plan, optimizer), plan.rows, strict=True):
        symbols = {"wd": WD, "lr_g": row.lr}
        assert group["weight_decay"] == pytest.approx(evaluate(given, symbols), rel=1e-12)
        assert group["lr"] * group["weight_decay"] == pytest.approx(evaluate(taken_off, symbols), rel=1e-12)
        assert row.decay_per_step == pytest.approx(evaluate(taken_off, symbols), rel=1e-12)


@pytest.mark.parametrize("line", table(PARAMETRIZATION, "kind", "`s(t)`"), ids=lambda line: line["kind"])
def test_a_schedule_is_what_its_equation_says(line):
    (kind,), (factor,), (share,) = (code(cell) for cell in line.values())
    (warmup,) = re.findall(r"^ {4}s\(t\) = (.+)$", PARAMETRIZATION.read_text(), flags=re.MULTILINE)
    symbols = {"W": 10, "N": 100, "D": 20, "z0": 0.125, "z1": 0.25, "pi": math.pi}
    config = ScheduleConfig(
        kind=kind,
        warmup_steps=10,
        total_steps=100,
        decay_steps=20 if kind == "wsd" else None,
        start_fraction=0.125,
        end_fraction=0.25,
    )
    for t in range(120):
        u = min(max(evaluate(share, {**symbols, "t": t}), 0), 1)
        expected = evaluate(warmup if t < 10 else factor, {**symbols, "t": t, "u": u})
        assert schedule_factor(t, config) == pytest.approx(expected, rel=1e-12), t


# ---- docs/configuration.md ------------------------------------------------------------------------------------------


def test_the_configuration_reference_is_what_the_code_generates():
    generated = runpy.run_path(str(ROOT / "scripts" / "generate_reference.py"))["reference"]()
    assert CONFIGURATION.read_text() == generated, "run `make docs`"


def settings():
    """Dotted keys of all settings."""
    listed = {key for rows in tables(CONFIGURATION) for row in rows for key in code(row.get("key", ""))}
    decay = {key.replace("lr_multiplier", "weight_decay_multiplier") for key in listed}
    strategy = {f"trainer.strategy.{name}" for name in inspect.signature(SPMDStrategy).parameters}
    return listed | decay | strategy | {f"trainer.{name}" for name in inspect.signature(Trainer).parameters}


@each_document
def test_a_setting_that_a_document_names_exists(document):
    key = r"(model|data|trainer|checkpoint)(\.(?!py$)\w+)+"
    named = {word for word in code(prose(document)) if re.fullmatch(key, word)}
    prefixes = {key[: match.start()] for key in settings() for match in re.finditer(r"\.|$", key)}
    assert named <= prefixes


# ---- docs/coming-from.md --------------------------------------------------------------------------------------------

REFERENCE_KEYS = """
    attn_act_name d_base d_head d_model dtype e_norm ff_act_name ff_multiple force_download grad_acc_steps
    grad_clip hfds_buffer_size hfds_config hfds_datacol hfds_identifier hftr_tokenizer_instance
    hftr_tokenizer_name is_sweep kv_mqa lr_base lr_schedule_name n_ds_shard n_eval_step n_finetune_step n_layer
    n_mesh_cols n_mesh_rows n_pretrain_step n_print_step n_save_step n_warmup_step no_checkpoint norm_eps
    norm_gains norm_gains_type optim_beta1 optim_beta2 optim_eps optim_name optim_rule param_dtype proj_biases
    q_init qk_norm qk_scale r_init rotary_base sampling_max_len sampling_method sampling_nucleus
    sampling_prompt_len sampling_temp sampling_topk sequence_len sow_intermediates sow_param_info
    tokens_per_global_batch u_init use_eps_scaling use_iwd wd
"""


def test_every_key_of_the_reference_has_one_line():
    rows = table(COMING_FROM, "reference", "default", "here")
    assert sorted(key for row in rows for key in code(row["reference"])) == re.findall(r"\w+", REFERENCE_KEYS)


@pytest.mark.parametrize("row", table(COMING_FROM, "reference", "default", "here"), ids=lambda row: row["reference"])
def test_a_key_of_the_reference_leads_to_a_setting_or_to_a_reason(row):
    assert set(code(row["here"])) <= settings()
    assert code(row["here"]) or (row["here"] == "-" and row["what to know"])


def test_the_table_of_mup_names_what_mup_has():
    words = {word.partition("(")[0] for row in table(COMING_FROM, "mup", "here") for word in code(row["mup"])}
    names = {word.rpartition(".")[2] for word in words}
    assert {"set_base_shapes", "MuReadout", "MuSharedReadout", "MuAdam", "MuAdamW", "MuSGD", "get_coord_data"} <= names
    elsewhere = {"get_coord_data", "plot_coord_data", "rescale_params", "infshape"}  # not importable from the package
    assert {name for name in names - elsewhere if not hasattr(mup, name)} == set()


# ---- docs/sampling.md -----------------------------------------------------------------------------------------------


def test_the_steps_of_sampling_are_the_fields_in_their_order():
    rows = table(SAMPLING, "step", "option", "what it does", "off")
    fields = {field.name: field.default for field in dataclasses.fields(Sampling)}
    assert {code(row["option"])[0]: float(row["off"]) for row in rows} == fields
    assert [code(row["option"])[0] for row in rows] == list(fields)


def test_the_architectures_of_an_export_are_those_of_the_table():
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    rows = table(SAMPLING, "`activation`", "`qk_norm`", "class in transformers")
    listed = {
        (row["`activation`"] == "`swiglu`", row["`qk_norm`"] == "`true`"): code(row["class in transformers"])[0]
        for row in rows
    }
    names = {key: MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind] for key, kind in stock.ARCHITECTURES.items()}
    assert listed == names
    (sentence,) = re.findall(r"and the activations (.+?)\. ", SAMPLING.read_text().replace("\n", " "))
    assert set(code(sentence)) == set(get_args(Activation)) - set(stock.ACTIVATIONS)


def test_the_tolerance_and_the_size_of_a_file_are_those_that_are_said():
    text = SAMPLING.read_text().replace("\n", " ")
    assert f"More than {TOLERANCE:.0e}".replace("e-04", "e-4") in text
    assert f"file of {SHARD_BYTES // 10**9} GB" in text


# ---- all documents --------------------------------------------------------------------------------------------------


@each_document
def test_a_link_leads_to_a_file_and_a_heading(document):
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", prose(document)) if "://" not in link]
    for link in links:
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        assert target.exists(), f"{document.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{document.name}: {link}"


@each_document
def test_a_source_file_that_a_document_names_exists(document):
    named = [word for word in code(prose(document)) if re.fullmatch(r"[\w/]+\.(py|yaml|toml)", word)]
    folders = (ROOT, ROOT / "mutransformer", *(ROOT / "mutransformer").iterdir())
    missing = {word for word in named if not any((folder / word).exists() for folder in folders)}
    assert missing <= {"config.yaml", "best.yaml"}  # in the folder of a run or a study


@each_document
def test_a_command_line_names_a_command_with_its_files_and_settings(document, monkeypatch):
    monkeypatch.chdir(ROOT)
    for program, command, *options in command_lines(document, "mutransformer"):
        assert program == "mutransformer"
        assert command in COMMANDS
        keys = [word for word in in_order_of_precedence(options) if word.startswith("--")]  # reads the files
        assert {key.removeprefix("--").partition("=")[0] for key in keys} - {"config"} <= settings()


@each_document
def test_a_make_target_that_a_document_names_exists(document):
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = {words[1] for words in command_lines(document, "make")}
    named |= set(re.findall(r"`make ([a-z-]+)", prose(document)))
    assert named <= targets


@each_document
def test_python_in_a_document_runs(document, capsys):
    for block in fenced(document, "python"):
        exec(compile("\n".join(block), str(document), "exec"), {})
        assert capsys.readouterr().out


def test_the_output_shown_of_describe_is_its_output(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    ((line, *shown),) = fenced(ROOT / "README.md", "console")
    assert main(shlex.split(line)[2:]) == 0
    printed = [text.split() for text in capsys.readouterr().out.splitlines()]
    for text in (text for text in shown if text != "..."):
        words = iter(next((words for words in printed if words[:1] == text.split()[:1]), ()))
        assert all(word in words for word in text.split()), text  # columns may be left out, not changed
