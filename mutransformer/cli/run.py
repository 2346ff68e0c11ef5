"""The Lightning side of the command line: one parser for a subcommand, links between settings, the run folder.

Imported by `cli.main` only once a subcommand is to run, as it pulls in torch and Lightning.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from pathlib import Path
from typing import Any, ClassVar, cast

import yaml
from jsonargparse import ArgumentError, Namespace
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, ProgressBar, TQDMProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from mutransformer.cli.config_files import flatten, given_keys, in_order_of_precedence
from mutransformer.cli.parse_errors import from_message
from mutransformer.cli.trainer import METHODS, NEED_CHECKPOINT, WITHOUT_TRAINER, RunTrainer
from mutransformer.data.datamodule import TextDataModule
from mutransformer.errors import ConfigError
from mutransformer.inference.initial import Initializer
from mutransformer.inference.weights import open_weights
from mutransformer.training.callbacks import (
    DetectNonFinite,
    LossPlot,
    Metrics,
    RunCheckpoint,
    StopOnSignal,
    bits_per_byte,
)
from mutransformer.training.checkpoint import AtomicCheckpointIO, load_plain
from mutransformer.training.engine import STRATEGY_CLASS, engine_options
from mutransformer.training.module import (
    HOW_LAYERS_RUN,
    LINKED_SETTINGS,
    NOT_FOR_TRAINER,
    DecoderModule,
    compute_dtype,
)

# (set by the user, follows from it, how)
LINKS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("data.vocab_size", "model.decoder.vocab_size", {"apply_on": "instantiate"}),
    *(
        (source, target, {"compute_fn": int} if source == "seed_everything" else {})
        for source, target in LINKED_SETTINGS.items()
    ),
)

# an abbreviated option would escape the check of what was given against a checkpoint
PARSER_OPTIONS = {"exit_on_error": False, "allow_abbrev": False}

TRAINER_DEFAULTS = {
    "max_steps": 1000,
    "num_sanity_val_steps": 0,
    "check_val_every_n_epoch": None,  # validation by optimizer steps, whatever the length of an epoch
    "val_check_interval": 200,
    "enable_model_summary": False,
    "default_root_dir": "runs",
}

# settings that a resumed run may change: they do not change what the weights mean, nor the tokens
FREE_TO_CHANGE = (
    "model.schedule.total_steps",
    "model.n_micro_batch",
    "model.compile",
    "model.seed",
    "data.cache",
    *(f"model.decoder.{name}" for name in HOW_LAYERS_RUN),
)


# command -> options that say yes by themselves
FLAGS: dict[str, tuple[str, ...]] = {
    "list_caches": ("--verify",),
    "plan": ("--analytic", "--search", "--json", "--topologies", "--shard_vocab"),
}


class RunCLI(LightningCLI):
    """Parses one subcommand, wires data, model and trainer, runs it.

    Args:
        subcommand: the one to build a parser for; the others would cost seconds.
        args: command line after the subcommand.
    """

    COMMANDS: ClassVar[dict[str, set[str]]] = {
        "fit": {"model", "train_dataloaders", "val_dataloaders", "datamodule", "weights_only"},
        "validate": {"model", "dataloaders", "datamodule", "weights_only"},
        "test": {"model", "dataloaders", "datamodule", "weights_only"},
        **{name: {"model", "datamodule"} for name in WITHOUT_TRAINER},
    }

    def __init__(self, subcommand: str, args: list[str]) -> None:
        _quiet_libraries()
        self._only = subcommand = METHODS.get(subcommand, subcommand)
        flags = FLAGS.get(subcommand, ())
        self._args = args = [f"{arg}=true" if arg in flags else arg for arg in args]
        self._given = given_keys(args)
        super().__init__(
            DecoderModule,
            TextDataModule,
            trainer_class=RunTrainer,
            trainer_defaults=TRAINER_DEFAULTS,
            seed_everything_default=1,
            parser_kwargs={**PARSER_OPTIONS, subcommand: dict(PARSER_OPTIONS)},
            save_config_callback=None,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            args=self._command_line(),
        )

    def _command_line(self, *more: str) -> list[str]:
        args = in_order_of_precedence([*self._args, *more])
        # one strategy has settings that are ours: with these it need not be named
        strategy = {key for key in self._given if f"{key}.".startswith("trainer.strategy.")}
        if strategy and not strategy & {"trainer.strategy", "trainer.strategy.class_path"}:
            args = [f"--trainer.strategy={STRATEGY_CLASS}", *args]
        return [self._only, *args]

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        return {self._only: self.COMMANDS[self._only]}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_lightning_class_args(RunCheckpoint, "checkpoint")
        parser.add_argument("--base", type=str | None, help="In a file: another it is laid over, relative to it.")
        parser.add_argument(
            "--detect_nan", type=bool, default=True, help="Stop at the first loss or gradient that is not finite."
        )
        parser.add_argument(
            "--init_from",
            type=str | None,
            help="Weights that `fit` begins with instead of drawing them, whatever their multipliers: a checkpoint, a "
            "folder of `export`, or one of a Llama-like model of transformers. A run that resumes does not read it.",
        )
        for source, target, how in LINKS:
            parser.link_arguments(source, target, **how)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        try:
            super().parse_arguments(parser, args)
        except ArgumentError as error:
            raise from_message(str(error), self._known_keys()) from error
        section = self._section(self.config)
        section.base = None  # its values are in the config now
        seed, interval = section.seed_everything, section.trainer.val_check_interval
        if isinstance(seed, bool) or not 0 <= seed < 2**32:
            raise ConfigError("seed_everything", seed, "must be a whole number from 0 to 2^32 - 1", "use 1")
        if interval is not None and not interval > 0:
            rule = "must be above zero"
            raise ConfigError("trainer.val_check_interval", interval, rule, "use 200, or trainer.limit_val_batches=0")

    def _parse_ckpt_path(self) -> None:
        """With a checkpoint, its model and data settings hold; one that was given and differs is an error.

        Lightning's own would override in silence what was typed.
        """
        section = self._section(self.config)
        command, ckpt_path = self.config.subcommand, section.get("ckpt_path")
        if not ckpt_path and (ckpt_path == "" or command in NEED_CHECKPOINT):
            raise ConfigError("ckpt_path", ckpt_path, "names no weights", "give the path of a checkpoint")
        if not ckpt_path or "://" in str(ckpt_path):
            return
        saved = load_plain(ckpt_path)["mutransformer"]["config"]
        sources = {target: source for source, target, _ in LINKS}
        for key, value in flatten({name: saved.get(name, {}) for name in ("model", "data")}).items():
            source = sources.get(key, key)
            if key not in section:
                continue
            if not any(f"{source}.".startswith(f"{name}.") for name in self._given):
                section[key] = section[source] = value
            elif section[key] != value and key not in FREE_TO_CHANGE and (key.startswith("model.") or command == "fit"):
                rule = f"checkpoint {ckpt_path} has {value!r}"
                raise ConfigError(source, section[key], rule, f"use {value!r}, or leave it out")

    def resolve(self, *more: str) -> dict[str, Any]:
        """The settings as plain values, after more command line.

        Raises:
            ConfigError: as for what the user typed.
        """
        try:
            parsed = self.parser.parse_args(self._command_line(*more))
        except ArgumentError as error:
            raise from_message(str(error), self._known_keys()) from error
        text = self._parser(self._only).dump(parsed[self._only], skip_none=False, skip_link_targets=False)
        return yaml.safe_load(text)

    def _known_keys(self) -> Any:
        return self._parser(self._only).get_defaults(skip_validation=True).keys()

    def _section(self, config: Namespace) -> Namespace:
        return config[config.subcommand]

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        if self.subcommand in WITHOUT_TRAINER:
            loggers = self._section(cast(Namespace, self.config_init)).trainer.logger
            return RunTrainer.without_engine(self.resolve, _as_list(loggers))
        config = self._section(cast(Namespace, self.config_init))
        trainer, checkpoint = config.trainer, config.checkpoint
        compute_dtype(trainer.precision)
        for name, value in engine_options(trainer.accelerator, trainer.strategy).items():
            trainer[name] = value
        for name in NOT_FOR_TRAINER:
            trainer.pop(name)
        self._dump_config()
        self.model.run_config = yaml.safe_load(yaml.safe_dump(self.config_dump))
        if trainer.gradient_clip_algorithm not in (None, "norm"):
            algorithm = trainer.gradient_clip_algorithm
            raise ConfigError(
                "trainer.gradient_clip_algorithm", algorithm, "only the global norm is clipped", "use norm"
            )
        self.metrics, self.checkpoint, self.stop = Metrics(), checkpoint, StopOnSignal(checkpoint)
        callbacks: list[Callback] = [self.metrics, self.stop]
        if trainer.enable_progress_bar is not False and not _has_progress_bar(trainer.callbacks):
            callbacks.append(TQDMProgressBar())
        if self.subcommand == "fit":
            callbacks.append(LossPlot())
            if config.detect_nan:
                callbacks.append(DetectNonFinite(checkpoint))
            loggers = [_run_folder_logger(trainer.default_root_dir)]
        else:
            loggers = []
        trainer["callbacks"] = [*_as_list(trainer.callbacks), *callbacks]
        trainer["plugins"] = [*_as_list(trainer.plugins), AtomicCheckpointIO()]
        trainer["logger"] = [*loggers, *_as_list(trainer.logger)] or False
        try:
            return super().instantiate_trainer()
        except (MisconfigurationException, ValueError, TypeError) as error:
            raise _trainer_error(error) from error

    def _run_subcommand(self, subcommand: str) -> None:
        stop = StopOnSignal(RunCheckpoint()) if subcommand in WITHOUT_TRAINER else self.stop
        try:
            with stop.handling():
                super()._run_subcommand(subcommand)
        except MisconfigurationException as error:
            raise _trainer_error(error) from error

    def before_fit(self) -> None:
        """Reads the data, then makes the run folder with its `config.yaml`, complete and re-runnable."""
        n_rows, n_parts = self.datamodule.tokens_per_batch // self.datamodule.sequence_len, self.model.n_micro_batch
        if n_parts > n_rows:
            rule = f"a batch has {n_rows} sequences to split"
            raise ConfigError("trainer.accumulate_grad_batches", n_parts, rule, f"use {n_rows}")
        if check := getattr(self.trainer.strategy, "check", None):
            check(self.model.config["decoder"], n_rows, n_parts)
        config = self._section(self.config)
        if config.init_from and not config.get("ckpt_path"):
            weights = open_weights(config.init_from)
            self.model.initializer = Initializer(weights, self.model.config["decoder"], self.model.plan)
        self.datamodule.setup("fit")
        self.datamodule.train_dataloader()
        folder = Path(str(self.trainer.log_dir))
        folder.mkdir(parents=True, exist_ok=True)
        parser = self._parser(self.subcommand)
        text = parser.dump(self._section(self.config), skip_none=False, skip_link_targets=True)
        (folder / "config.yaml").write_text(text)
        for warning in self.model.plan.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        n_tokens = self.datamodule.tokens_per_batch
        print(f"{self.model.plan.count:,} parameters, {n_tokens:,} tokens a step, into {folder}")

    def after_fit(self) -> None:
        """Says what came out and what to do next."""
        print(fit_summary(self.trainer, self.metrics, self.checkpoint))

    def after_validate(self) -> None:
        print(f"\n{loss_line(self.trainer, 'validation loss', self.metrics.last.get('val_loss'))}")

    def after_test(self) -> None:
        print(f"\n{loss_line(self.trainer, 'test loss', self.metrics.last.get('test_loss'), 'test')}")


def loss_line(trainer: Trainer, name: str, loss: float | None, split: str = "validation") -> str:
    """A loss in nats a token and, where the data can tell its bytes, in bits a byte."""
    if loss is None:
        return f"{name}: not measured in this run"
    bits = bits_per_byte(trainer, loss, split)
    return f"{name}: {loss:.4f} nats a token" + ("" if bits is None else f", {bits:.4f} bits a byte")


def fit_summary(trainer: Trainer, metrics: Metrics, checkpoint: RunCheckpoint) -> str:
    """The last lines of a fit: losses in nats and bits a byte, speed, files, the next command."""
    last, lines = metrics.last, [""]
    if checkpoint.last_path is None:
        lines.append("no step was made: the run was complete, or its limits leave no room for one")
    else:
        lines += [
            loss_line(trainer, "train loss", last.get("train_loss"), "train"),
            loss_line(trainer, "validation loss", last.get("val_loss")),
            f"speed: {metrics.tokens_per_s:,.0f} tokens/s",
            f"data: {cast(Any, trainer).datamodule.epoch_summary()}",
            *([watch.summary()] if (watch := getattr(trainer.strategy, "watch", None)) else []),
            f"run folder: {trainer.log_dir} (metrics.csv, config.yaml, loss.png)",
            f"checkpoint: {checkpoint.last_path}",
            f"next: mutransformer validate --ckpt_path {checkpoint.last_path}",
        ]
    return "\n".join(lines)


def _quiet_libraries() -> None:
    """Keeps the terminal for what this run does: Lightning's and torch_xla's start-up notices are no news."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger().addFilter(lambda record: "PJRT_DEVICE" not in record.getMessage())


def _run_folder_logger(root: str) -> CSVLogger:
    """The logger that owns the run folder, `root/version_n`; refuses a root that cannot be written to."""
    try:
        Path(root).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            pass
    except OSError as error:
        raise ConfigError(
            "trainer.default_root_dir", root, f"cannot be written to ({error.strerror})", "give a folder of yours"
        ) from error
    return CSVLogger(root, name=None, flush_logs_every_n_steps=1)


def _trainer_error(error: Exception) -> ConfigError:
    if isinstance(error, ConfigError):
        return error
    return ConfigError("trainer", ..., " ".join(str(error).split()), "see `mutransformer COMMAND --help`")


def _as_list(value: Any) -> list[Any]:
    """None, True and False give nothing; one item a list of it."""
    if value is None or isinstance(value, bool):
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _has_progress_bar(callbacks: Any) -> bool:
    return any(isinstance(callback, ProgressBar) for callback in _as_list(callbacks))
