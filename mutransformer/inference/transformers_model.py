"""The decoder as a transformers model, for shapes that no architecture of transformers has.

Importing this module registers it with `AutoConfig` and `AutoModelForCausalLM`. It is for loading, not for training.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from mutransformer.inference.weights import MODEL_TYPE, own_shape
from mutransformer.model.decoder import Decoder


class MutransformerConfig(PreTrainedConfig):
    """Shape and parametrization of a decoder.

    Args:
        settings: as `own_settings` gives them.
    """

    model_type = MODEL_TYPE

    def __init__(self, settings: dict[str, Any] | None = None, **other: Any) -> None:
        self.settings = settings or {}
        decoder = self.settings.get("decoder", {})
        for theirs, ours in {
            "vocab_size": "vocab_size",
            "hidden_size": "d_model",
            "num_hidden_layers": "n_layer",
            "max_position_embeddings": "sequence_len",
        }.items():
            setattr(self, theirs, decoder.get(ours))
        super().__init__(**{"use_cache": False, **other})


class MutransformerForCausalLM(PreTrainedModel, GenerationMixin):
    """A decoder behind the interface of transformers: no cache of keys and values, no padding.

    Shapes:
        input_ids [B, L] -> logits [B, L, V]
    """

    config_class = MutransformerConfig

    def __init__(self, config: MutransformerConfig) -> None:
        super().__init__(config)
        self.decoder = Decoder(*own_shape(config.settings))
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Does nothing: weights come from files."""

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **unread: Any
    ) -> CausalLMOutput:
        """Logits of the next token at every position.

        Raises:
            ValueError: a mask that leaves positions out.
        """
        if attention_mask is not None and not attention_mask.all():
            raise ValueError("this model does not read padded batches: give sequences of one length, or one at a time")
        return CausalLMOutput(logits=self.decoder(input_ids))  # type: ignore[arg-type]


AutoConfig.register(MODEL_TYPE, MutransformerConfig)
AutoModelForCausalLM.register(MutransformerConfig, MutransformerForCausalLM)
