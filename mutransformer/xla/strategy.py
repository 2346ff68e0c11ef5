"""Lightning's strategy for torch_xla's SPMD: one process a host, one logical device, a mesh of all chips behind it.

Lightning has none for its Trainer (XLA by spawned processes, and FSDP in Fabric alone). A step's graph ends in one
place, after the whole of `training_step` or `validation_step`; what is read of it later is a transfer.
"""

from __future__ import annotations

import atexit
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, cast

import lightning.pytorch as pl
import torch
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_only
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only
from torchmetrics import Metric

from mutransformer.errors import ConfigError
from mutransformer.model.attention import attending_with
from mutransformer.model.axes import marking
from mutransformer.model.decoder import Decoder
from mutransformer.xla import flash, runtime, sharding, shards
from mutransformer.xla.mesh import MeshShape
from mutransformer.xla.precision import CastAtUse
from mutransformer.xla.scan import choose_layers
from mutransformer.xla.sharding import Sharding, ShardingError, Spec, specs_of_state
from mutransformer.xla.watch import CompilationWatch


class SPMDStrategy(Strategy):
    """Shards a decoder over a mesh of XLA devices, rows X by columns Y, as GSPMD's "2D finalized".

    Args:
        mesh_rows: devices on axis X, over which batches and, as in FSDP, weights are cut; -1: what mesh_cols leaves.
        mesh_cols: devices on axis Y, over which heads and features are cut; -1: what mesh_rows leaves.
        shard_vocab: also cut embedding and unembedding over X by the vocabulary.
        flash_attention: use torch_xla's Pallas kernel for causal softmax attention, not where attention stays within
            documents; on TPU, with jax.
        compilation_cache: folder that keeps compiled graphs for later runs, on TPU; null: none.
    """

    strategy_name = "xla_spmd"

    def __init__(
        self,
        mesh_rows: int = -1,
        mesh_cols: int = 1,
        shard_vocab: bool = False,
        flash_attention: bool = False,
        compilation_cache: str | None = None,
        **lightning: Any,
    ) -> None:
        super().__init__(**lightning)
        self.mesh_rows = mesh_rows
        self.mesh_cols = mesh_cols
        self.shard_vocab = shard_vocab
        self.flash_attention = flash_attention
        self.compilation_cache = compilation_cache
        self.watch = CompilationWatch()
        self._sharding: Sharding | None = None
        self._specs: dict[str, Spec] = {}
        self._marks = ExitStack()
        self._is_checked = False
        self._n_evaluation_rows = 0
        self._folder: Any = None  # of shards, that the run is restored from

    # the environment

    @property
    def sharding(self) -> Sharding:
        """The mesh and its table; starts the client."""
        if self._sharding is None:
            n_devices = runtime.start()
            if self.compilation_cache is not None:
                runtime.keep_compiled(self.compilation_cache)
            shape = MeshShape.of(self.mesh_rows, self.mesh_cols, n_devices, xr.process_count())
            self._sharding = Sharding(shape, self.shard_vocab)
            rank_zero_only.rank = self.global_rank
        return self._sharding

    def setup_environment(self) -> None:
        assert self.sharding  # before Lightning touches the device
        super().setup_environment()

    @property
    def precision_plugin(self) -> Precision:
        return self._precision_plugin or CastAtUse("32-true")

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = None if plugin is None else CastAtUse(str(plugin.precision))

    @property
    def root_device(self) -> torch.device:
        """The host, for what Lightning logs and decides: on the device it would add to the graphs of the steps."""
        return torch.device("cpu")

    @property
    def global_rank(self) -> int:
        return xr.process_index()

    @property
    def world_size(self) -> int:
        return xr.process_count()

    @property
    def local_rank(self) -> int:
        return 0

    @property
    def node_rank(self) -> int:
        return self.global_rank

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    @property
    def n_devices(self) -> int:
        return self.sharding.shape.n_devices

    def compilations(self) -> list[float]:
        """Seconds of each compilation so far in this process."""
        return runtime.compilations()

    @property
    def is_distributed(self) -> bool:
        return self.world_size > 1

    # between hosts: tensors are whole to every process, so only barriers and small objects are exchanged

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Over hosts, on the host: no graph is made for it."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        if self.world_size == 1:
            return tensor.cpu()
        _process_group()
        value, name = tensor.cpu().clone(), str(reduce_op).rpartition(".")[2].lower()
        operation = {"max": "MAX", "min": "MIN"}.get(name, "SUM")
        torch.distributed.all_reduce(value, getattr(torch.distributed.ReduceOp, operation))
        return value / self.world_size if name in ("mean", "avg") else value

    def all_gather(self, tensor: torch.Tensor, group: Any | None = None, sync_grads: bool = False) -> torch.Tensor:
        if self.world_size == 1:
            return tensor
        _process_group()
        gathered = [torch.empty_like(tensor, device="cpu") for _ in range(self.world_size)]
        torch.distributed.all_gather(gathered, tensor.cpu())
        return torch.stack(gathered)

    def barrier(self, name: str | None = None) -> None:
        if self.world_size > 1:
            _process_group()
            torch.distributed.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if self.world_size == 1:
            return obj
        _process_group()
        objects = [obj]
        torch.distributed.broadcast_object_list(objects, src)
        return objects[0]

    # model and optimizer

    def check(self, config: Any, n_rows: int, n_parts: int = 1) -> None:
        """Raises ConfigError where a model or a batch does not fit the mesh.

        Args:
            config: the decoder's.
            n_rows: sequences in the batch of all hosts.
            n_parts: micro-batches that it is split into.
        """
        self.sharding.shape.check_model(config, self.shard_vocab)
        self.sharding.shape.check_batch(n_rows, n_parts)
        if self.flash_attention:
            flash.check_available(config)

    @property
    def _module(self) -> pl.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def decoder(self) -> Decoder:
        """The decoder of the module.

        Raises:
            ConfigError: the module has none.
        """
        for module in self._module.modules():
            if isinstance(module, Decoder):
                return module
        raise ConfigError(
            "trainer.strategy", self.strategy_name, "shards a mutransformer decoder", "use it with a DecoderModule"
        )

    def model_to_device(self) -> None:
        """Moves the module to the device and cuts its parameters by the table."""
        decoder = self.decoder
        self.sharding.shape.check_model(decoder.config, self.shard_vocab)
        names = [name for name, _ in decoder.named_parameters()]
        decoder.to(runtime.device())  # makes new Parameters
        if [name for name, _ in decoder.named_parameters()] != names:
            raise ShardingError(f"parameters changed in the move to the device: {names}")
        for name, parameter in decoder.named_parameters():
            self._specs[name] = self.sharding.spec(parameter, decoder.axes[name])
            self.sharding.shard(parameter.data, self._specs[name])
        if getattr(self._module, "compile_decoder", False):
            raise ConfigError("model.compile", True, "is not for XLA, which compiles by itself", "use false")
        self._marks.callback(setattr, decoder, "run_layers", decoder.run_layers)
        choose_layers(decoder)

    def setup(self, trainer: pl.Trainer) -> None:
        self._marks.close()
        self.optimizers, self._specs, self._is_checked, self._n_evaluation_rows = [], {}, False, 0
        self._marks.enter_context(marking(self.sharding.mark))
        if self.flash_attention:
            flash.check_available(self.decoder.config)
            self._marks.enter_context(attending_with(flash.FlashAttention(self.sharding)))
        sharding.activate(self.sharding)
        self._marks.callback(sharding.activate, None)
        if self.world_size > 1:  # every process has the sums of all
            for module in self._module.modules():
                if isinstance(module, Metric):
                    module.distributed_available_fn = lambda: False
        self.model_to_device()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            self._shard_optimizers()
        runtime.sync(wait=True)
        self.check_sharding()

    def _shard_optimizers(self) -> None:
        """Moves and cuts the optimizer's buffers as their parameters; checks that it has exactly the plan's."""
        names = {id(parameter): name for name, parameter in self.decoder.named_parameters()}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if names.get(id(parameter)) != group["name"]:
                        raise ShardingError(f"group {group['name']!r} does not hold the parameter of that name")
            for parameter, state in optimizer.state.items():
                for name, value in state.items():
                    if name != "step" and isinstance(value, torch.Tensor):
                        state[name] = value.to(runtime.device())
                for name, spec in specs_of_state(parameter, self._specs[names[id(parameter)]], state).items():
                    self.sharding.shard(state[name], spec)

    def check_sharding(self) -> None:
        """Raises ShardingError where a parameter or a buffer is not cut as the table says; reads the buffers."""
        names = {}
        for name, parameter in self.decoder.named_parameters():
            names[id(parameter)] = name
            self.sharding.check(name, parameter.data, self._specs[name])
        for optimizer in self.optimizers:
            for parameter, state in optimizer.state.items():
                name = names[id(parameter)]
                for buffer, spec in specs_of_state(parameter, self._specs[name], state).items():
                    self.sharding.check(f"{name}.{buffer}", state[buffer], spec)

    # steps

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Sends each device its rows of the batch."""

        def send(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device.type == "xla":
                return tensor
            self.sharding.shape.check_batch(len(tensor) * self.world_size)
            is_split = self.world_size > 1  # then over all devices first, as torch_xla asks for
            rows = ("X", "Y") if is_split else "X"
            spec = xs.ShardingSpec(self.sharding.mesh, (rows, *(None,) * (tensor.dim() - 1)), minibatch=is_split)
            return cast(list[torch.Tensor], xm.send_cpu_data_to_device([tensor], runtime.device(), spec))[0]

        if self._module.trainer.evaluating and isinstance(batch, Mapping):
            batch = self._filled(batch)
        return tree_map_only(torch.Tensor, send, batch)

    def _filled(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A batch of evaluation with as many rows as the first one, so that all have one graph; a mask takes out those
        that were added."""
        n_rows, length = batch["tokens"].shape
        unit = self.sharding.shape.unit // self.world_size
        n_full = self._n_evaluation_rows = max(self._n_evaluation_rows, -(-n_rows // unit) * unit)
        filled = {"mask": torch.ones(n_rows, length - 1, dtype=torch.bool), **batch}
        rows = torch.arange(n_full).clamp(max=n_rows - 1)
        filled = {name: tensor[rows] for name, tensor in filled.items()}
        filled["mask"] = filled["mask"] * (torch.arange(n_full) < n_rows)[:, None]
        return filled

    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        out = super().training_step(batch, *args, **kwargs)
        self._end_step("training", batch, out)
        if not self._is_checked:
            runtime.sync(wait=True)
            self.check_sharding()
            self.sharding.check_marks(self.watch.first_graph("training"))
            self._is_checked = True
        return out

    def validation_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        out = super().validation_step(batch, *args, **kwargs)
        self._end_step("validation", batch, out)
        return out

    def test_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        out = super().test_step(batch, *args, **kwargs)
        self._end_step("test", batch, out)
        return out

    def _end_step(self, kind: str, batch: Any, out: Any) -> None:
        results = out.values() if isinstance(out, Mapping) else ()
        tensors = [*self.decoder.parameters(), *(value for value in results if isinstance(value, torch.Tensor))]
        self.watch.step(kind, batch, tensors, runtime.sync)

    # checkpoints: each host keeps to its own shards, see xla/shards.py

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return _on_host(super().lightning_module_state_dict())

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return _on_host(super().optimizer_state(optimizer))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        if self.world_size > 1:
            _process_group()
        self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)
        if self.world_size > 1:  # what hosts say to each other must not mix with what they say of a later step
            getattr(self.checkpoint_io, "wait", lambda: None)()

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True  # into tensors that are cut already

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """All but the tensors of a folder of shards, which are read part by part when they are asked for."""
        self._folder = checkpoint_path if shards.is_sharded(checkpoint_path) else None
        if self._folder is not None:
            return shards.load(self._folder, into={})
        return super().load_checkpoint(checkpoint_path, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        saved, own = checkpoint["state_dict"], self._module.state_dict()
        if saved.keys() != own.keys():
            raise ShardingError(f"the checkpoint's weights and the model's differ: {sorted(saved.keys() ^ own.keys())}")
        parameters = dict(self._module.named_parameters())
        self._fill(checkpoint, {("state_dict", name): parameters[name] for name in own})

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        tensors: dict[tuple[str | int, ...], torch.Tensor] = {}
        for i, (optimizer, saved) in enumerate(zip(self.optimizers, checkpoint["optimizer_states"], strict=True)):
            buffers = {parameter: dict(state) for parameter, state in optimizer.state.items()}
            numbers = {
                index: {name: value if name == "step" else None for name, value in state.items()}
                for index, state in saved["state"].items()
            }
            optimizer.load_state_dict({**saved, "state": numbers})
            for index, (parameter, state) in enumerate(buffers.items()):
                for name, buffer in state.items():
                    if name != "step":
                        optimizer.state[parameter][name] = buffer
                        tensors["optimizer_states", i, "state", index, name] = buffer
        self._fill(checkpoint, tensors)
        self.check_sharding()

    def _fill(self, checkpoint: Mapping[str, Any], tensors: Mapping[tuple[str | int, ...], torch.Tensor]) -> None:
        """Puts what a checkpoint has into tensors on the device: path in the checkpoint -> tensor."""
        runtime.sync(wait=True)
        parts = {shards.key_of(keys): sharding.empty_parts(tensor) for keys, tensor in tensors.items()}
        if self._folder is not None:
            shards.load(self._folder, into=parts)
        else:
            for keys in tensors:
                whole: Any = checkpoint
                for key in keys:
                    whole = whole[key]
                parts[shards.key_of(keys)].take_from(whole)
        for keys, tensor in tensors.items():
            sharding.fill(tensor, parts[shards.key_of(keys)])

    def teardown(self) -> None:
        # Lightning's own would bring all weights and the optimizer's state to this host's memory
        self._marks.close()
        self.precision_plugin.teardown()
        self.checkpoint_io.teardown()


def _on_host(tree: Any) -> Any:
    """The same tree with this host's parts in place of tensors on the device."""
    runtime.sync(wait=True)
    return tree_map_only(
        torch.Tensor, lambda tensor: sharding.fetch(tensor.data) if tensor.device.type == "xla" else tensor, tree
    )


def _process_group() -> None:
    """Starts gloo between the hosts, once."""
    if not torch.distributed.is_initialized():
        import torch_xla.distributed.xla_backend  # noqa: F401  # registers the init method

        torch.distributed.init_process_group("gloo", init_method="xla://")
        # its threads must not outlive the interpreter, which would end with SIGABRT in place of its exit code
        atexit.register(torch.distributed.destroy_process_group)
