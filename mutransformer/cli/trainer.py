"""Lightning's Trainer with the commands that are ours: a method each, whose arguments are the command's options."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger

from mutransformer.cli.describe import print_plan
from mutransformer.data.datamodule import TextDataModule
from mutransformer.data.listing import describe_caches
from mutransformer.errors import CheckFailed, ConfigError
from mutransformer.training.module import compute_dtype
from mutransformer.training.throughput import MfuConvention
from mutransformer.verify.search import DEFAULT_SPACE, Space

# commands that need no device of their own: they train nothing, or make a Trainer for each of many runs
WITHOUT_TRAINER = ("describe", "prepare", "list_caches", "coordcheck", "transfer", "sample", "export", "plan")
NEED_CHECKPOINT = ("validate", "test", "sample", "export")
METHODS = {"data": "list_caches"}  # command -> method, where a section of the config has the command's name


class RunTrainer(Trainer):
    """Lightning's Trainer with more commands."""

    resolve: Callable[..., dict[str, Any]]
    study_loggers: Sequence[Logger]

    @classmethod
    def without_engine(cls, resolve: Callable[..., dict[str, Any]], loggers: Sequence[Logger]) -> RunTrainer:
        """One that only carries the commands of WITHOUT_TRAINER.

        Args:
            resolve: (more command line...) -> the settings as plain values.
            loggers: of trainer.logger; a transfer study logs its results, not each of its runs.
        """
        trainer = cls.__new__(cls)
        trainer.resolve, trainer.study_loggers = resolve, loggers
        return trainer

    def fit(  # type: ignore[override]
        self,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        ckpt_path: str | None = None,
        weights_only: bool | None = None,
        resume: Literal["auto"] | None = None,
        profile_steps: str | None = None,
        mfu_convention: MfuConvention = "causal",
    ) -> None:
        """Train.

        Args:
            model: to train.
            train_dataloaders: where there is no datamodule.
            val_dataloaders: where there is no datamodule.
            datamodule: the data.
            ckpt_path: checkpoint to go on from, in a new run folder.
            weights_only: as in torch.load.
            resume: `auto`: go on from the last checkpoint of the newest run of the same configuration in
                trainer.default_root_dir, in its run folder; where there is none, start anew.
            profile_steps: first:last, steps of which a trace for ui.perfetto.dev is written to the run folder.
            mfu_convention: attention that counts in mfu and tflops_per_s: `causal`, what the mask leaves; `palm`, all.
        """
        super().fit(model, train_dataloaders, val_dataloaders, datamodule, ckpt_path, weights_only)

    def validate(  # type: ignore[override]
        self, model: Any, datamodule: TextDataModule, ckpt_path: str | None = None, limit: int | None = None
    ) -> Any:
        """Measure the validation loss of a checkpoint.

        Args:
            ckpt_path: checkpoint to measure.
            limit: measure the first so many windows (data.sequence_len tokens each) of the split; null: all of it.
        """
        _limit_evaluation(datamodule, limit)
        return super().validate(model, datamodule=datamodule, ckpt_path=ckpt_path)

    def test(  # type: ignore[override]
        self, model: Any, datamodule: TextDataModule, ckpt_path: str | None = None, limit: int | None = None
    ) -> Any:
        """Measure the test loss of a checkpoint.

        Args:
            ckpt_path: checkpoint to measure.
            limit: measure the first so many windows (data.sequence_len tokens each) of the split; null: all of it.
        """
        _limit_evaluation(datamodule, limit)
        return super().test(model, datamodule=datamodule, ckpt_path=ckpt_path)

    def bench(
        self,
        model: Any,
        datamodule: Any,
        warmup: int = 5,
        steps: int = 20,
        synthetic: bool = False,
        mfu_convention: MfuConvention = "causal",
        format: Literal["table", "json"] = "table",
    ) -> None:
        """Time the training step of a configuration: seconds, tokens/s, MFU, compilations, memory; keeps nothing.

        Args:
            warmup: steps before those that are timed; the first compiles.
            steps: steps that are timed, each waited for.
            synthetic: random tokens instead of the configuration's data.
            mfu_convention: attention that counts in MFU: `causal`, what the mask leaves; `palm`, all.
            format: `table` for people, `json` for programs.
        """
        from mutransformer.cli.bench import bench, table

        result = bench(
            self, model, datamodule, warmup=warmup, steps=steps, synthetic=synthetic, convention=mfu_convention
        )
        print(json.dumps(result, indent=2) if format == "json" else table(result))

    def describe(self, model: Any, datamodule: Any, format: Literal["table", "json", "csv"] = "table") -> None:
        """Print one row a parameter: role, shape, initialization, learning rate, decay; makes no weights.

        Args:
            format: `table` for people, `json` or `csv` for programs.
        """
        print_plan(model.plan, format)

    def prepare(self, model: Any, datamodule: TextDataModule) -> None:
        """Fill the token cache of all splits without training; after an interruption it goes on where it was."""
        for folder, manifest in datamodule.prepare():
            n_documents, n_tokens = manifest.total("n_documents"), manifest.total("n_tokens")
            print(f"{folder}: {n_documents:,} documents, {n_tokens:,} tokens ({', '.join(manifest.splits)})")

    def list_caches(self, model: Any, datamodule: TextDataModule, verify: bool = False) -> None:
        """List the caches in data.cache, and why this configuration does not use one.

        Args:
            verify: compare the hash of every file with what was written.
        """
        for line in describe_caches(datamodule.cache, datamodule.requests(), verify=verify):
            print(line)

    def coordcheck(
        self,
        model: Any,
        datamodule: Any,
        widths: list[int] = [64, 128, 256, 512, 1024],  # noqa: B006  # read by jsonargparse as the option's default
        seeds: list[int] = [1, 2, 3],  # noqa: B006
        norms: list[Literal["l2", "max"]] = [],  # noqa: B006
        steps: int = 10,
        same_batch: bool = True,
        control: bool = True,
        out: str = "runs/coordcheck",
    ) -> None:
        """Train a few steps at several widths, and judge whether every tensor keeps its size.

        Args:
            widths: values of model.decoder.d_model; d_head stays, so they are multiples of it.
            seeds: of the initialization and of the order of the data; intervals are over these.
            norms: what is recorded of each tensor besides the mean of the absolute values, on which the verdict is.
            steps: optimizer steps of each run.
            same_batch: train on one batch again and again, so that changes of activations are recorded too.
            control: also run the standard parametrization, which must fail.
            out: folder of the results.
        """
        from mutransformer.verify.coordcheck import coordcheck_of_settings, report

        verdict = coordcheck_of_settings(
            self.resolve(),
            widths=widths,
            n_steps=steps,
            seeds=seeds,
            norms=norms,
            same_batch=same_batch,
            control=control,
            out=out,
        )
        print(report(verdict))
        print(f"{out}: coordcheck.csv, coordcheck.png, verdict.json")
        if not verdict.passed:
            raise CheckFailed(f"{verdict}; see {out}/verdict.json")

    def transfer(
        self,
        model: Any,
        datamodule: Any,
        widths: list[int] = [32, 64, 128, 256],  # noqa: B006  # read by jsonargparse as the option's default
        log2_learning_rates: list[float] = [-10, -9, -8, -7, -6, -5, -4],  # noqa: B006
        seeds: list[int] = [1, 2, 3],  # noqa: B006
        axis: str | None = None,
        compare: str | None = "sp",
        jobs: int = 1,
        shard: str = "1/1",
        search: int = 0,
        search_space: dict[str, list[float]] = DEFAULT_SPACE,
        out: str = "runs/transfer",
    ) -> None:
        """Sweep the learning rate at several widths, and judge whether the best one stays where it is.

        Args:
            widths: values of model.decoder.d_model; d_head stays, so they are multiples of it.
            log2_learning_rates: exponents of two, equally spaced.
            seeds: of the initialization and of the order of the data; three or more give intervals.
            axis: one more setting and its values, as in model.decoder.n_layer=2,4,8.
            compare: the control: `sp`, the standard parametrization, or a changed setting as in
                model.parametrization.depth_rule=none; null: none.
            jobs: runs side by side, each on its share of the cores.
            shard: i/n, to run every n-th point from the i-th: one of n machines.
            search: how many sets of constants to draw at the narrowest width; the best goes to best.yaml and is run at
                every width, instead of the grid; 0: no search.
            search_space: setting -> [lowest, highest] of what is drawn.
            out: folder of the study; points that are there already are not run again.
        """
        from mutransformer.verify.settings import standard, value_at
        from mutransformer.verify.study import search as run_search
        from mutransformer.verify.study import transfer as run_transfer
        from mutransformer.verify.transfer import Grid

        settings = self.resolve()
        parsed_axis = None
        if axis is not None:
            key, texts = _key_and_value("axis", axis, "write model.decoder.n_layer=2,4,8")
            parsed_axis = (key, [value_at(self.resolve(f"--{key}={text}"), key) for text in texts.split(",")])
        control = None
        if compare == "sp":
            control = ("sp", standard(settings))
        elif compare is not None:
            key, text = _key_and_value("compare", compare, "write sp, or model.parametrization.depth_rule=none")
            control = (compare.removeprefix("model.parametrization."), self.resolve(f"--{key}={text}"))
        grid = Grid(
            widths=widths, log2_learning_rates=log2_learning_rates, seeds=seeds, axis=parsed_axis, control=control
        )
        for name, value, least in (("jobs", jobs, 1), ("search", search, 0)):
            if value < least:
                raise ConfigError(name, value, f"must be at least {least}", f"use {least}")
        options = {"n_jobs": jobs, "shard": _shard(shard), "loggers": self.study_loggers}
        if not out:
            raise ConfigError("out", out, "names no folder", "use runs/transfer")
        if search and axis is not None:
            raise ConfigError("axis", axis, "is not read by a search", "name the setting in search_space")
        if search:
            space = Space(bounds=search_space)
            for key, bounds in search_space.items():
                self.resolve(*(f"--{key}={bound}" for bound in bounds))
            verdict = run_search(settings, space, grid, search, Path(out), **options)
        else:
            verdict = run_transfer(settings, grid, Path(out), **options)
        if verdict is not None and not verdict.passed:
            raise CheckFailed(f"{verdict}; see {out}/verdict.json")

    def plan(
        self,
        model: Any,
        datamodule: TextDataModule,
        topology: str = "v5e:4x4",
        mesh_rows: int | None = None,
        mesh_cols: int | None = None,
        shard_vocab: bool | None = None,
        analytic: bool = False,
        search: bool = False,
        effort: Literal["full", "fast"] = "full",
        json: bool = False,
        topologies: bool = False,
        compiler_python: str | None = None,
    ) -> None:
        """Experimental: does a run fit a TPU slice, with which collectives, and what would a step take at best?

        The real step is traced without weights and compiled for the slice, which need not be there.

        Args:
            topology: slice, as in v5e:16x16 or v5litepod-256.
            mesh_rows: devices on axis X, -1 for what mesh_cols leaves; null: trainer.strategy's.
            mesh_cols: devices on axis Y, -1 for what mesh_rows leaves; null: trainer.strategy's.
            shard_vocab: also cut embedding and unembedding over X by the vocabulary; null: trainer.strategy's.
            analytic: by arithmetic alone, in a second, without the compiler.
            search: try all meshes, rematerialization policies and micro-batches, and compile the best few.
            effort: the compiler's; `fast` takes a third of the time and may be off by 15 percent.
            json: print JSON.
            topologies: print the slices that are known, and nothing else.
            compiler_python: a Python that has the extra `plan`; null: MUTRANSFORMER_PLAN_PYTHON, or this one.
        """
        from mutransformer.verify.capacity_command import plan_command
        from mutransformer.xla.slices import topologies_table

        if topologies:
            print(topologies_table())
            return
        plan_command(
            model,
            tokens_per_batch=datamodule.tokens_per_batch,
            trainer=self.resolve()["trainer"],
            topology=topology,
            within_documents=not datamodule.attend_across_documents,
            mesh_rows=mesh_rows,
            mesh_cols=mesh_cols,
            shard_vocab=shard_vocab,
            analytic=analytic,
            search=search,
            effort=effort,
            as_json=json,
            compiler_python=compiler_python,
        )

    def sample(
        self,
        model: Any,
        datamodule: TextDataModule,
        ckpt_path: str | None = None,
        prompt: str = "",
        prompts: str = "",
        from_validation: int = 0,
        prompt_tokens: int = 32,
        samples: int = 1,
        max_tokens: int = 256,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
        batch_size: int = 8,
        format: Literal["text", "jsonl"] = "text",
    ) -> None:
        """Print how a trained model goes on with prompts, token by token; the filters apply in the order given here.

        Args:
            ckpt_path: checkpoint; it also says which tokenizer.
            prompt: text to go on with; without any prompt the text is made from nothing.
            prompts: file with a prompt a line.
            from_validation: how many documents of the validation split to take the beginnings of as prompts.
            prompt_tokens: length of these beginnings.
            samples: texts for each prompt.
            max_tokens: most tokens of a text; it ends earlier where the model ends the document.
            temperature: logits are divided by it; 0: always the likeliest token.
            top_k: draw from this many of the likeliest tokens; 0: all.
            top_p: draw from the likeliest tokens that together have this probability, above 0; 1: all.
            min_p: draw from tokens at least this times as likely as the likeliest; 0: all.
            seed: of the draws; a text depends on it and on its prompt, not on what else is asked for.
            batch_size: texts that are made side by side.
            format: `text` as it comes, or `jsonl`: an object a line.
        """
        from mutransformer.inference import session
        from mutransformer.inference.sampling import Sampling
        from mutransformer.inference.weights import load_module

        trainer = self.resolve()["trainer"]
        device = session.device_of(trainer["accelerator"])
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        sources = {"prompt": prompt, "prompts": prompts, "from_validation": from_validation}
        chosen = session.read_prompts(datamodule, **sources, prompt_tokens=prompt_tokens)
        # cast once: the same bits as casting at each use, as nothing here changes a weight
        decoder = load_module(str(ckpt_path)).decoder.to(device, compute_dtype(trainer["precision"]))
        session.sample(
            decoder,
            datamodule.tokenizer,
            chosen,
            sampling,
            stop_token=datamodule.separator,
            n_samples=samples,
            max_tokens=max_tokens,
            seed=seed,
            batch_size=batch_size,
            as_json=format == "jsonl",
        )

    def export(
        self,
        model: Any,
        datamodule: TextDataModule,
        ckpt_path: str | None = None,
        out: str = "",
        format: Literal["hf", "safetensors"] = "hf",
        verify: bool = True,
    ) -> None:
        """Write a trained model as a folder for transformers, or as plain tensors; the folder is whole or not there.

        Args:
            ckpt_path: checkpoint.
            out: the folder to make; not there yet, or empty.
            format: `hf`: with the multipliers folded into the weights of an architecture that transformers has, where
                one fits, else in a class that this package registers; `safetensors`: our tensors by name.
            verify: read the folder back and compare; with `hf` by logits.
        """
        from mutransformer.inference.export import describe, export
        from mutransformer.inference.weights import load_module

        module = load_module(str(ckpt_path))
        exported = export(
            module, out, format=format, tokenizer=datamodule.tokenizer, separator=datamodule.separator, verify=verify
        )
        print(describe(exported, out))


def _limit_evaluation(datamodule: TextDataModule, limit: int | None) -> None:
    if limit is not None and limit < 1:
        raise ConfigError("limit", limit, "must be at least 1", "leave it out for the whole split")
    datamodule.evaluation_windows = limit


def _key_and_value(option: str, text: str, remedy: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals and value):
        raise ConfigError(option, text, "is not a setting with a value", remedy)
    return key.removeprefix("--"), value


def _shard(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not (index.isdigit() and count.isdigit() and 1 <= int(index) <= int(count)):
        raise ConfigError("shard", text, "must be i/n with i from 1 to n", "write 1/4")
    return int(index), int(count)
