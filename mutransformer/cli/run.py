"""The Lightning side of the command line: one parser for a subcommand, links between settings, the run folder.

Imported by `cli.main` only once a subcommand is to run, as it pulls in torch and Lightning.
"""

from __future__ import annotations

import logging
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, cast

import yaml
from jsonargparse import ArgumentError, Namespace
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.callbacks import Callback, Checkpoint, ProgressBar, TQDMProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from mutransformer.cli.config_files import given_keys, in_order_of_precedence
from mutransformer.cli.describe import row_values
from mutransformer.cli.from_checkpoint import resume, take_settings
from mutransformer.cli.parse_errors import from_message
from mutransformer.cli.report import (
    fit_summary,
    loss_line,
    model_card,
    record_evaluation,
    run_folder_of,
    warn,
    write_whole,
)
from mutransformer.cli.trainer import METHODS, NEED_CHECKPOINT, WITHOUT_TRAINER, RunTrainer
from mutransformer.data.datamodule import TextDataModule
from mutransformer.errors import ConfigError
from mutransformer.inference.initial import Initializer
from mutransformer.inference.weights import open_weights
from mutransformer.training.callbacks import DetectNonFinite, LossPlot, StopOnSignal
from mutransformer.training.checkpoint import (
    AtomicCheckpointIO,
    BackgroundCheckpointIO,
    checkpoints_in,
    load_plain,
    require_writable,
)
from mutransformer.training.engine import STRATEGY_CLASS, engine_options, mode_of
from mutransformer.training.module import (
    LINKED_SETTINGS,
    NOT_FOR_TRAINER,
    DecoderModule,
    compute_dtype,
)
from mutransformer.training.profile import ProfileSteps
from mutransformer.training.run_checkpoint import RunCheckpoint
from mutransformer.training.run_folder import Resumed, RunLogger
from mutransformer.training.run_metrics import Metrics
from mutransformer.training.wandb_run import WandbId, WandbRun

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

# command -> what the Trainer calls its split
EVALUATE = {"validate": "val", "test": "test"}

# where files are made that are renamed, linked or grow, which an object store cannot do
LOCAL_FOLDERS = ("trainer.default_root_dir", "out")

# short forms of arguments
WANDB_CLASS = f"{WandbRun.__module__}.{WandbRun.__name__}"
ALIASES = {
    "--verify": "--verify=true",
    "--synthetic": "--synthetic=true",
    "--trainer.logger=wandb": f"--trainer.logger={WANDB_CLASS}",
}


# command -> options that say yes by themselves there; `--search` is a number to another
FLAGS: dict[str, tuple[str, ...]] = {
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
        **{name: {"model", "datamodule"} for name in ("validate", "test", "bench", *WITHOUT_TRAINER)},
    }

    def __init__(self, subcommand: str, args: list[str]) -> None:
        _quiet_libraries()
        self._only = subcommand = METHODS.get(subcommand, subcommand)
        flags = FLAGS.get(subcommand, ())
        self._args = args = [f"{arg}=true" if arg in flags else arg for arg in args]
        self._given = given_keys(args)
        self._resumed: Resumed | None = None
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
        return [self._only, *_in_full(args)]

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
        for name in LOCAL_FOLDERS:
            if "://" in (folder := section.get(name) or ""):
                rule = "must be a local folder: only checkpoint.dirpath and data.cache may be gs://..."
                raise ConfigError(name, folder, rule, "give a path on this machine")
        if section.get("init_from") == "":
            raise ConfigError("init_from", "", "names no weights", "give a folder or a .ckpt file, or leave it out")
        if self._only in EVALUATE:
            self._check_limits(section)
        if self._only == "bench":
            for name, least in (("warmup", 0), ("steps", 1)):
                if section[name] < least:
                    raise ConfigError(name, section[name], f"must be at least {least}", f"use {least or 5}")

    def _check_limits(self, section: Namespace) -> None:
        """A config's limit on validation is for the validations of a fit: here it is --limit, or the whole split."""
        name = f"trainer.limit_{EVALUATE[self._only]}_batches"
        if any(arg.partition("=")[0] == f"--{name}" for arg in self._args):
            rule = "depends on the batch size, and is for training"
            raise ConfigError(name, section[name], rule, "use --limit, a number of windows")
        section[name] = 1.0

    def _parse_ckpt_path(self) -> None:
        """With a checkpoint, its model and data settings hold; Lightning's own would override in silence."""
        section = self._section(self.config)
        if section.get("resume"):
            self._resumed = resume(section)
            section.resume = None  # config.yaml is that of a run which begins
        command, ckpt_path = self.config.subcommand, section.get("ckpt_path")
        if not ckpt_path and (ckpt_path == "" or command in NEED_CHECKPOINT):
            raise ConfigError("ckpt_path", ckpt_path, "names no weights", "give the path of a checkpoint")
        if ckpt_path:
            take_settings(section, self._given, {target: source for source, target, _ in LINKS}, command)

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
        convention = config.get("mfu_convention", "causal")
        self.metrics, self.checkpoint, self.stop = Metrics(convention), checkpoint, StopOnSignal(checkpoint)
        self.wandb = [logger for logger in _as_list(trainer.logger) if isinstance(logger, WandbRun)]
        callbacks: list[Callback] = [self.metrics, self.stop, *map(WandbId, self.wandb)]
        loggers = _as_list(trainer.logger)
        if trainer.enable_progress_bar is not False and not _has_progress_bar(trainer.callbacks):
            callbacks.append(TQDMProgressBar())
        if self.subcommand == "fit":
            callbacks.append(LossPlot())
            if config.profile_steps is not None:
                callbacks.append(ProfileSteps(config.profile_steps, trainer.max_steps))
            if config.detect_nan:
                callbacks.append(DetectNonFinite(checkpoint))
            loggers = [_run_folder_logger(trainer.default_root_dir, self._resumed), *loggers]
        elif self.subcommand == "bench":
            from mutransformer.cli.bench import StepClock

            callbacks, loggers = [StepClock(), self.stop], []
            trainer.update(Namespace(max_steps=config.warmup + config.steps, limit_val_batches=0))
            trainer.update(Namespace(enable_progress_bar=False))
        trainer["callbacks"] = [*_as_list(trainer.callbacks), *callbacks]
        trainer["plugins"] = [*_as_list(trainer.plugins), *_checkpoint_io(trainer.plugins, checkpoint)]
        trainer["logger"] = loggers or False
        try:
            made = cast(Any, super().instantiate_trainer())
        except (MisconfigurationException, ValueError, TypeError) as error:
            raise _trainer_error(error) from error
        if self.subcommand == "bench":  # keeps nothing
            made.callbacks = [callback for callback in made.callbacks if not isinstance(callback, Checkpoint)]
        return made

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
        if self.trainer.world_size > 1 and hasattr(self.trainer.strategy, "n_devices") and not self.checkpoint.dirpath:
            rule = "each host has its part of a checkpoint, and the run folder is this host's"
            remedy = "give a folder that all hosts see, as gs://bucket/run"
            raise ConfigError("checkpoint.dirpath", None, rule, remedy)
        dirpath, ckpt_path = self.checkpoint.dirpath, self._section(self.config).ckpt_path
        if dirpath and not ckpt_path and checkpoints_in(dirpath):
            rule = "holds checkpoints of another run, which this one would remove"
            raise ConfigError("checkpoint.dirpath", dirpath, rule, "give another folder, or --resume auto to go on")
        if dirpath:
            require_writable("checkpoint.dirpath", dirpath)
        self.datamodule.setup("fit")
        self.datamodule.train_dataloader()
        if not self.trainer.is_global_zero:
            return
        self.folder = Path(str(self.trainer.log_dir))
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self.folder / "config.yaml", self._config_text())
        for warning in self.model.plan.warnings:
            warn(warning)
        n_tokens = self.datamodule.tokens_per_batch
        print(f"{self.model.plan.count:,} parameters, {n_tokens:,} tokens a step, into {self.folder}")
        print(f"on {mode_of(self.trainer, self.model.compile_decoder)}")
        self._start_wandb(self.folder, self._resumed.wandb_id if self._resumed else None)

    def _config_text(self) -> str:
        """All settings; of the command's own options only what it went on from, so that other commands read it too."""
        tree = yaml.safe_load(
            self._parser(self.subcommand).dump(self._section(self.config), skip_none=False, skip_link_targets=True)
        )
        own = set(self._subcommand_method_arguments[self._only])
        kept = {name: value for name, value in tree.items() if name not in own or (name == "ckpt_path" and value)}
        return yaml.safe_dump(kept, sort_keys=False)

    def _start_wandb(self, folder: Path, run_id: str | None) -> None:
        rows = [row_values(row) for row in self.model.plan.rows]
        for logger in self.wandb:
            logger.start(folder, run_id, self.config_dump, rows)

    def after_fit(self) -> None:
        """Writes the model card, says what came out and what to do next."""
        if not self.trainer.is_global_zero:
            return
        run = (self.trainer, self.metrics, self.checkpoint, self.folder)
        if self.checkpoint.last_path is not None:
            card = model_card(*run, module=self.model, config=self.config_dump, args=[self._only, *self._args])
            write_whole(self.folder / "README.md", card)
        print(fit_summary(*run))

    def _before_evaluation(self) -> None:
        path = str(self._section(self.config).ckpt_path)
        saved = load_plain(path, tensors=False)
        self.metrics.evaluated_step = saved["global_step"]
        folder = Path(run_folder_of(path) if "://" not in path else self.trainer.default_root_dir)
        self._start_wandb(folder, saved.get("callbacks", {}).get("WandbId", {}).get("id"))

    before_validate = before_test = _before_evaluation

    def after_validate(self) -> None:
        self._after_evaluation("val", "validation")

    def after_test(self) -> None:
        self._after_evaluation("test", "test")

    def _after_evaluation(self, prefix: str, split: str) -> None:
        """Prints what was measured, and adds it to the run folder's list."""
        last, section = self.metrics.last, self._section(self.config)
        row = {name.removeprefix(f"{prefix}_"): value for name, value in last.items()}
        n_targets = int(row.pop("targets"))
        if not self.trainer.is_global_zero:
            return
        print(f"\n{loss_line(self.trainer, f'{split} loss', row['loss'], split)}, over {n_targets:,} tokens")
        row = {"step": self.metrics.evaluated_step, "n_targets": n_targets, **row}
        print(record_evaluation(str(section.ckpt_path), self._only, row))


def _in_full(args: list[str]) -> list[str]:
    """The command line without short forms."""
    pairs = pairwise(["", *args])
    return [WANDB_CLASS if pair == ("--trainer.logger", "wandb") else ALIASES.get(pair[1], pair[1]) for pair in pairs]


def _quiet_libraries() -> None:
    """Keeps the terminal for what this run does: Lightning's and torch_xla's start-up notices are no news."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger().addFilter(lambda record: "PJRT_DEVICE" not in record.getMessage())


def _run_folder_logger(root: str, resumed: Resumed | None) -> RunLogger:
    """The logger that owns the run folder, `root/version_n`; refuses a root that cannot be written to."""
    require_writable("trainer.default_root_dir", root)
    if resumed is None or resumed.run_folder is None:
        return RunLogger(root)
    return RunLogger(root, int(resumed.run_folder.name.removeprefix("version_")), resumed.step)


def _checkpoint_io(plugins: Any, checkpoint: RunCheckpoint) -> list[CheckpointIO]:
    """What writes checkpoints, unless the user brings another."""
    if any(isinstance(plugin, CheckpointIO) for plugin in _as_list(plugins)):
        return []
    return [BackgroundCheckpointIO(AtomicCheckpointIO()) if checkpoint.save_async else AtomicCheckpointIO()]


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
