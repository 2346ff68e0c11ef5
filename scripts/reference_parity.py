"""Runs the package on numbers recorded from lucaslingle/mu_transformer (main at 8c38b29) and compares the two.

    python scripts/reference_parity.py FILE.npz [--float64]

Prints a table (quantity, largest absolute difference, tolerance). Three kinds of file, told apart by what is in them:

- one run: `config_json`, `tokens` [batches, B, T], `init/W`, and any of `logits0`, `grads0/W`, `step/loss_avg` and its
  like, `params<n>/W` (after n batches);
- many variants of a run: `base_json`, `variants_json` (name -> changed keys), shared `init/W` and `tokens`, and for a
  variant any of `NAME/loss_avg`, `NAME/grad0_l2/W`, `NAME/params<n>_stat/W` = [l2, sum, first 8 values], and
  `NAME/init/W` where its shape is not the shared one's;
- extras, extras_X.npz, with weights and config from oracle_X.npz beside it: `schedule/*`, `loss_mask/*`, `rope/*`,
  `sow_X/*`, `eval_X/*`, `decode_X/*`, `sampler/*`.

W is a parameter by the reference's name, in its layout; reference_run.py maps names, layouts and settings to ours. A
key that a config lacks has the reference's default, a leaf that `init/` lacks the package's own initialization.

Exit code: 0 all within tolerance, 1 not, 2 the file is of no use (one line says why).
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
import zipfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from reference_run import LEAVES, MAPPING, TAPS, Arrays, Case, Mistake, Record, loss_mask, make_case, map_config, run

from mutransformer.errors import EXIT_USER_ERROR, ConfigError
from mutransformer.inference.decoding import generate, read_prompts
from mutransformer.inference.sampling import Sampling, distribution
from mutransformer.model.config import DecoderConfig
from mutransformer.model.rotary import rotary_table, rotate
from mutransformer.training.schedule import ScheduleConfig, schedule_factor

# ---- comparison -----------------------------------------------------------------------------------------------------

BAR = 1e-5  # float32, absolute: the reference's own float32 is up to 2e-6 off its float64
BAR_F64 = 1e-7  # float64 on both sides
BAR_BF16 = 2.0**-7  # relative: a bfloat16 is up to 2^-9 off, and the reference rounds softmax, norms and loss to it too
# Training amplifies rounding: relu's kink decides on a rounded sign, Adam and Lion turn a gradient that is zero but for
# rounding into a whole step. So where float32 numbers differ by more than the bar, the package also runs from weights
# that are off by about what float32 arithmetic loses in some steps; twice the most that this moves is no difference of
# the packages. Such rows say so. Early steps gain nothing: a step's loss is held to what has moved up to that step.
N_SPREADS = 2
# the file's precision -> by how much the weights are off, relative; a run in that precision for each
NEARBY = {"32-true": 3 * (2.0**-23, 2.0**-22, 2.0**-21, 2.0**-20), "bf16-mixed": 3 * (2.0**-9, 2.0**-8)}


NOT_COVERED = "not covered yet"


@dataclass(frozen=True)
class Row:
    """A line of the table; where tolerance is None the file has numbers that nothing is compared with."""

    quantity: str
    difference: float = 0.0
    tolerance: float | None = None
    note: str = ""

    @property
    def is_bad(self) -> bool:
        return self.tolerance is not None and not self.difference <= self.tolerance

    @property
    def badness(self) -> float:
        """Difference over tolerance, infinite for NaN: which of several rows is the worst."""
        ratio = self.difference / max(self.tolerance or 0.0, 1e-300)
        return np.inf if np.isnan(ratio) else ratio

    def __str__(self) -> str:
        if self.tolerance is None:
            return f"{self.quantity:<36}{'':>10}{'':>10}  {self.note}"
        verdict = "FAIL" if self.is_bad else "ok"
        return f"{self.quantity:<36}{self.difference:>10.1e}{self.tolerance:>10.1e}  {verdict} {self.note}".rstrip()


def check(quantity: str, ours: Any, theirs: Any, tolerance: Any = BAR, note: str = "") -> Row:
    """The worst entry's row, by difference over tolerance; NaN is worst."""
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    if ours.shape != theirs.shape:
        raise Mistake(f"{quantity}: the file has shape {theirs.shape}, the package computes {ours.shape}")
    difference, tolerance = np.broadcast_arrays(np.abs(ours - theirs), tolerance)
    worst = np.argmax(difference / np.maximum(tolerance, 1e-300))
    return Row(quantity, float(difference.flat[worst]), float(tolerance.flat[worst]), note)


def computed(record: Record, quantity: str) -> tuple[np.ndarray, str] | None:
    """What the package has for a key of the file: the whole array, and what the file holds of it (see `view`).

    Returns:
        None for a quantity that is not known here.
    """
    head, _, leaf = quantity.removeprefix("step/").partition("/")
    loss, mask_mean = np.array(record.loss), np.array(record.mask_mean)
    whole = {"loss_avg": loss, "loss_avg_f64": loss, "loss_term_avg": loss * mask_mean, "loss_mask_avg": mask_mean}
    whole |= {"grad_norm": np.array(record.grad_norm), "logits0": record.logits0}
    if head in whole:
        return whole[head], "entries" if head == "logits0" else "series"
    leaves, how = record.grads0, {"grads0": "entries", "grad0_l2": "l2"}.get(head)
    if match := re.fullmatch(r"params(\d+)(_stat)?", head):
        leaves, how = record.params.get(int(match[1]), {}), "stat" if match[2] else "entries"
    if how is not None and leaf not in leaves:
        raise Mistake(f"{quantity}: this run has no such leaf, or fewer batches")
    return None if how is None else (leaves[leaf], how)


def view(x: np.ndarray, how: str) -> np.ndarray:
    """What a file holds of an array: its entries (a series: of steps), its l2 norm, or [l2, sum, first 8 values]."""
    x = x.astype(np.float64)
    l2 = np.linalg.norm(x)
    return {"entries": x, "series": x, "l2": l2, "stat": np.array([l2, x.sum(), *x.flat[:8]])}[how]


def size(x: np.ndarray, how: str) -> np.ndarray:
    """How far an error x of an array may move each part of its view.

    An error's norm bounds what the l2 norm moves by; it is the size of a sum of independent errors, too.
    """
    largest, l2 = np.abs(x).max(), np.linalg.norm(x)
    stat = np.array([l2, max(l2, np.abs(x.sum())), *[largest] * min(8, x.size)])
    return {"entries": largest, "series": np.maximum.accumulate(np.abs(x)), "l2": l2, "stat": stat}[how]


def tolerance_of(quantity: str, x: np.ndarray, how: str, precision: str) -> Any:
    """Tolerance of each part of the view."""
    if precision == "bf16-mixed":
        return BAR_BF16 * size(x, how)
    if precision == "64-true" and quantity.endswith("_f64"):
        return BAR_F64
    if how == "l2":  # of gradients, which may be small: relative, down to what rounding leaves of a gradient of zero
        return BAR * size(x, how) + 1e-7
    return BAR * np.maximum(size(x, how), 1) if how == "stat" else BAR


def compare(expected: Arrays, record: Record, precision: str, nearby: Callable[[], list[Record]]) -> list[Row]:
    """A row for each quantity of the file; `nearby` runs the same from weights that rounding cannot tell from these."""
    rows = []
    for quantity, theirs in expected.items():
        if (found := computed(record, quantity)) is None:
            rows.append(Row(quantity, note=NOT_COVERED))
            continue
        x, how = found
        tolerance = tolerance_of(quantity, x, how, precision)
        row = check(quantity, view(x, how), theirs, tolerance)
        if row.is_bad and tolerance is not BAR_F64:
            spread = np.max([size(x - computed(other, quantity)[0], how) for other in nearby()], axis=0)
            row = check(quantity, view(x, how), theirs, np.maximum(tolerance, N_SPREADS * spread))
            row = replace(row, note="more than rounding does" if row.is_bad else "rounding decides")
        rows.append(row)
    return rows


def run_nearby(case: Case, keep: Collection[int]) -> list[Record]:
    """The run again in the file's precision, each time from slightly other weights."""
    precision = case.settings["run"]["precision"]
    records, rng = [], np.random.default_rng(0)
    for scale in NEARBY[precision]:
        init = {leaf: array * (1 + scale * rng.uniform(-1, 1, array.shape)) for leaf, array in case.init.items()}
        records.append(run(replace(case, init=init), precision, keep))
    return records


def check_run(case: Case, expected: Arrays, float64: bool) -> list[Row]:
    """Runs a case and compares it with `expected`, by quantity."""
    precision = "64-true" if float64 else case.settings["run"]["precision"]
    keep = {int(match[1]) for key in expected if (match := re.match(r"params(\d+)", key))}
    nearby = lru_cache(lambda: run_nearby(case, keep))
    return compare(expected, run(case, precision, keep), precision, nearby)


# ---- files ----------------------------------------------------------------------------------------------------------


def under(arrays: Arrays, prefix: str) -> Arrays:
    """The arrays whose key begins with the prefix, by the rest of the key."""
    return {key.removeprefix(prefix): array for key, array in arrays.items() if key.startswith(prefix)}


def read(path: Path) -> Arrays:
    """All arrays of an .npz file."""
    try:
        with np.load(path) as file:
            return {key: file[key] for key in file.files}
    except (OSError, ValueError, EOFError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        raise Mistake(f"not readable as .npz ({type(error).__name__})" if path.exists() else "no such file") from error


def settings(arrays: Arrays, key: str) -> dict[str, Any]:
    """What a file has as JSON."""
    try:
        return json.loads(str(arrays[key]))
    except KeyError:
        raise Mistake(f"the file lacks {key}") from None
    except json.JSONDecodeError as error:
        raise Mistake(f"{key} is not JSON: {error}") from error


def single_case(arrays: Arrays) -> Case:
    """The run of a file of one."""
    return make_case(settings(arrays, "config_json"), under(arrays, "init/"), arrays.get("tokens"))


def check_single(arrays: Arrays, float64: bool) -> list[Row]:
    """A file of one run."""
    inputs = ("config_json", "names_json", "tokens", "init/")
    expected = {key: array for key, array in arrays.items() if not key.startswith(inputs)}
    return check_run(single_case(arrays), expected, float64)


def variant_case(arrays: Arrays, name: str) -> Case:
    """A variant's run: base and changed keys, the shared leaves that it has, those of a changed init adapted."""
    base, changed = settings(arrays, "base_json"), settings(arrays, "variants_json")[name]
    config = {key: default for key, (default, _) in MAPPING.items()} | base | changed
    names = {spec.name for spec in DecoderConfig(**map_config(config)["decoder"]).tensors()}
    is_zero = {"w_aq": config["q_init"], "w_ao": config["r_init"], "w_fo": config["r_init"], "w_u": config["u_init"]}
    init = {
        leaf: array
        for leaf, array in (under(arrays, "init/") | under(arrays, f"{name}/init/")).items()
        if leaf not in LEAVES or (is_zero.get(leaf) != "zero" and not names.isdisjoint(LEAVES[leaf][1]))
    }
    is_own = f"{name}/init/w_u" in arrays
    if "w_u" in init and not is_own and config["u_init"] == "sp" != base.get("u_init", "mup"):
        init["w_u"] = init["w_u"] * config["d_model"] ** 0.5  # the file's is drawn for `mup`
    return make_case(config, init, arrays.get("tokens"))


def check_variants(arrays: Arrays, float64: bool) -> list[Row]:
    """A file of many variants: a row for each variant and kind of quantity, of its worst leaf."""
    rows = []
    for name in settings(arrays, "variants_json"):
        expected = {key: array for key, array in under(arrays, f"{name}/").items() if not key.startswith("init/")}
        if not expected:
            raise Mistake(f"variant {name!r}: the file has no numbers of it")
        try:
            checked = check_run(variant_case(arrays, name), expected, float64)
        except Mistake as mistake:  # of this variant alone: the others are still worth a look
            rows.append(Row(name, np.inf, 0.0, str(mistake)))
            continue
        worst: dict[str, Row] = {}
        for row in checked:
            head, _, leaf = row.quantity.partition("/")
            row = replace(row, quantity=f"{name}/{head}", note=f"{leaf} {row.note}".strip())
            if head not in worst or row.badness > worst[head].badness:
                worst[head] = row
        rows += worst.values()
    return rows


# ---- extras: each check takes its arrays, the run, the run's last weights as another case, and whether in float64 ----


def check_schedule(arrays: Arrays, case: Case, trained: Case, float64: bool) -> list[Row]:
    """KIND: the schedule by count of updates."""
    kinds = {kind: ScheduleConfig(**{**case.settings["schedule"], "kind": kind}) for kind in arrays}
    return [
        check(f"schedule/{kind}", [schedule_factor(i, kinds[kind]) for i in range(len(theirs))], theirs)
        for kind, theirs in arrays.items()
    ]


def check_loss_mask(arrays: Arrays, case: Case, trained: Case, float64: bool) -> list[Row]:
    """out_eos<i>_pad<j>: the mask of in."""
    ids = {key: [int(n) for n in re.findall(r"\d+", key)] for key in arrays if key != "in"}
    return [check(f"loss_mask/{key}", loss_mask(arrays["in"], *ids[key]), arrays[key], 0) for key in ids]


def check_rope(arrays: Arrays, case: Case, trained: Case, float64: bool) -> list[Row]:
    """out_0, out_off: in [2, H, T, K], rotated from positions 0, 0 and 3, 40 on."""
    rows = []
    x = torch.from_numpy(arrays["in"]).to(torch.float64 if float64 else torch.float32)
    for key, offsets in (("out_0", (0, 0)), ("out_off", (3, 40))):
        positions = torch.tensor(offsets)[:, None] + torch.arange(x.shape[2])
        table = rotary_table(positions, x.shape[3], case.settings["decoder"]["rotary_base"], x.dtype)
        rows.append(check(f"rope/{key}", rotate(x, table), arrays[key]))
    return rows


def check_sow(arrays: Arrays, case: Case, trained: Case, float64: bool) -> list[Row]:
    """Statistics of the first steps: TAP_l1_<layer> mean |.|, uu_W_<layer> mean |update| / (peak LR x schedule)."""
    n_steps = len(arrays["loss_avg"])
    case = replace(case, tokens=case.tokens[:n_steps])
    record = run(case, "64-true" if float64 else "32-true", n_tapped=n_steps)
    params = run(case, "64-true", keep=range(n_steps + 1)).params
    plan, schedule = case.module().plan, ScheduleConfig(**case.settings["schedule"])
    peak_lr = {row.name: row.lr for row in plan.rows}

    def update_size(old: np.ndarray, new: np.ndarray, s: float) -> float:
        # What float32 leaves of the package's update: the file's is a difference of float32 weights, of which the first
        # update is a few last bits, and its s is a float32 sum with 1 (1.00017e-4 for the first).
        weights, s_rounded = old.astype(np.float32), np.float32(s - 1) + np.float32(1)
        update = ((new - old) * (s_rounded / s)).astype(np.float32)
        return np.abs((weights + update) - weights).mean(dtype=np.float64) / s_rounded

    rows = []
    for key, theirs in arrays.items():
        if match := re.fullmatch(rf"({'|'.join(TAPS)})_l1_(\d+)", key):
            ours = [taps[TAPS[match[1]]][int(match[2])] for taps in record.taps]
        elif match := re.fullmatch(r"uu_([a-z]+_[a-z]+?)(_\d+)?", key):
            leaf, layer = match[1], int(match[2][1:]) if match[2] else ...
            lr = peak_lr[LEAVES[leaf][1][-1]]
            pairs = [(params[i][leaf][layer], params[i + 1][leaf][layer]) for i in range(n_steps)]
            ours = [update_size(*pair, schedule_factor(i, schedule)) / lr for i, pair in enumerate(pairs)]
        else:
            ours = [plan.count] * n_steps if key == "param_count_total" else (computed(record, key) or [None])[0]
        rows.append(Row(f"sow/{key}", note=NOT_COVERED) if ours is None else check(f"sow/{key}", ours, theirs))
    return rows


def check_eval(arrays: Arrays, case: Case, trained: Case, float64: bool) -> list[Row]:
    """The trained weights' loss on the first batch."""
    module, batch = trained.evaluator(float64), case.batch(case.tokens[0])
    ours = {"loss_term_avg": module.loss_sum(batch).item() / batch["mask"].numel()}
    ours["loss_mask_avg"] = batch["mask"].double().mean().item()
    return [check(f"eval/{key}", ours[key], theirs) for key, theirs in arrays.items()]


@torch.inference_mode()
def check_decode(arrays: Arrays, case: Case, trained: Case, float64: bool) -> list[Row]:
    """Continuations of prompts by the trained weights: with a cache, past its length a sliding window and oneself."""
    decoder, bos = trained.evaluator(float64).decoder, case.settings["run"]["bos"]
    pairs = zip(arrays["prompts"], arrays["prompt_lens"], strict=True)
    prompts = [[bos, *prompt[:length].tolist()] for prompt, length in pairs]
    n_token = arrays["greedy_tokens"].shape[1]
    events = generate(decoder, prompts, Sampling(temperature=0), [torch.Generator()] * len(prompts), max_tokens=n_token)
    greedy = np.zeros_like(arrays["greedy_tokens"])
    for i, event in enumerate(events):
        greedy[event.row, i // len(prompts)] = event.token
    _, cache = read_prompts(decoder, prompts)
    forced_BL = torch.from_numpy(arrays["forced_tokens"].astype(np.int64))
    logits = torch.stack([decoder(column_B[:, None], cache=cache)[:, 0] for column_B in forced_BL.T], dim=1)
    return [
        check("decode/forced_logits_sel", logits.numpy()[:, arrays["forced_sel"]], arrays["forced_logits_sel"]),
        check("decode/greedy_tokens", (greedy != arrays["greedy_tokens"]).sum(), 0, 0, note=f"{greedy.size} positions"),
        *(Row(f"decode/{key}", note=NOT_COVERED) for key in ("keep", "prefill_pos_ids")),
    ]


def check_sampler(arrays: Arrays, case: Case, trained: Case, float64: bool) -> list[Row]:
    """nucleus<p>, topk<k>, temp<t>: what the logits `in` leave to draw from, as probabilities."""
    logits_BV = torch.from_numpy(arrays["in"][:, 0])
    rows = []
    for key, theirs in arrays.items():
        if match := re.fullmatch(r"(nucleus|topk|temp)([\d.]+)", key):
            name = {"nucleus": "top_p", "topk": "top_k", "temp": "temperature"}[match[1]]
            weights_BV, ids_BV = distribution(logits_BV, Sampling(**{name: type(getattr(Sampling(), name))(match[2])}))
            ours = torch.zeros_like(weights_BV).scatter(1, ids_BV, weights_BV / weights_BV.sum(-1, keepdim=True))
            rows.append(check(f"sampler/{key}", ours, torch.from_numpy(theirs[:, 0]).softmax(-1)))
    return rows


EXTRAS: Mapping[str, Callable[[Arrays, Case, Case, bool], list[Row]]] = {
    "schedule": check_schedule,
    "loss_mask": check_loss_mask,
    "rope": check_rope,
    "sow": check_sow,
    "eval": check_eval,
    "decode": check_decode,
    "sampler": check_sampler,
}


def check_extras(path: Path, arrays: Arrays, float64: bool) -> list[Row]:
    """Facts of the reference beside a run's own numbers; the run is in oracle_X.npz for extras_X.npz."""
    suffix = path.stem.removeprefix("extras")
    oracle = path.with_name(f"oracle{suffix}.npz")
    try:
        single = read(oracle)
        case = single_case(single)
    except Mistake as error:
        raise Mistake(f"needs the run's file {oracle.name} beside it: {error}") from error
    trained = replace(case, init=under(single, f"params{len(case.tokens)}/"))
    rows = []
    for section in dict.fromkeys(key.partition("/")[0] for key in arrays):
        if (name := section.removesuffix(suffix)) not in EXTRAS:
            raise Mistake(f"unknown section {section!r}")
        rows += EXTRAS[name](under(arrays, f"{section}/"), case, trained, float64)
    return rows


def check_file(path: Path, float64: bool) -> list[Row]:
    """The table of any of the three kinds of file.

    Raises:
        Mistake, ConfigError: the file cannot be used.
    """
    arrays = read(path)
    if "variants_json" in arrays:
        return check_variants(arrays, float64)
    if "config_json" in arrays:
        return check_single(arrays, float64)
    if path.stem.startswith("extras_"):
        return check_extras(path, arrays, float64)
    raise Mistake("has neither config_json nor variants_json, and is not called extras_X.npz")


def main(arguments: list[str] | None = None) -> int:
    """Prints the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, metavar="FILE.npz", help="numbers of the reference")
    parser.add_argument("--float64", action="store_true", help="run in float64; float64 losses are held to 1e-7")
    options = parser.parse_args(arguments)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    torch.set_num_threads(1)  # the models are tiny: handing work to threads takes longer than the work
    try:
        rows = check_file(options.file, options.float64)
    except (Mistake, ConfigError) as error:
        print(f"{options.file}: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    print(f"{'quantity':<36}{'max diff':>10}{'tolerance':>10}")
    print(*rows, sep="\n")
    n_bad, n_open = sum(row.is_bad for row in rows), sum(row.tolerance is None for row in rows)
    print(f"{len(rows) - n_open} quantities compared, {n_bad} beyond tolerance, {n_open} {NOT_COVERED}")
    return int(n_bad > 0)


if __name__ == "__main__":
    sys.exit(main())
