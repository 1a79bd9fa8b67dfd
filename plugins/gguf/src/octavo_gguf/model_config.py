"""From GGUF metadata to what config.json would say. Keys: the GGUF specification and llama.cpp's convert_hf_to_gguf.py."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from octavo import CheckpointError
from octavo_gguf.header import StoredTensor
from octavo_gguf.names import ARCHITECTURES, PLAIN_TYPES
from octavo_gguf.rope import llama3_parameters

logger = logging.getLogger(__name__)

_MODEL_TYPES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
# Keys that change what the model computes and that octavo's decoder does not know; a value of 0 or 1 means without.
_REFUSED = (
    "expert_count",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attention.scale",
    "logit_scale",
    "embedding_scale",
    "residual_scale",
    "final_logit_softcapping",
    "attn_logit_softcapping",
    "nextn_predict_layers",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_log_multiplier",
    "rope.scaling.yarn_ext_factor",
    "rope.scaling.yarn_attn_factor",
)
_HARMLESS = frozenset(
    [
        "attention.layer_norm_epsilon",  # of norms that these architectures do not have
        "expert_used_count",
        "rope.scaling.finetuned",
        "rope.scaling.original_context_length",  # read where positions are stretched
        "tensor_data_layout",
        "vocab_size",
    ]
)
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


class ModelConfig:
    """Reads one file's metadata; raises CheckpointError that names file and key."""

    def __init__(self, file: str, metadata: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> None:
        self._file, self._metadata, self._tensors = file, metadata, tensors
        found = metadata.get("general.architecture")
        if found not in ARCHITECTURES:
            raise CheckpointError(
                f"the file holds a model of architecture {found!r}, which is not read from GGUF",
                file=file,
                expected=f"general.architecture one of {', '.join(ARCHITECTURES)}",
            )
        self.architecture: str = found
        self._asked_for: set[str] = set()

    @property
    def num_layers(self) -> int:
        """Bounded by the tensors, so that a wrong number makes no work."""
        return self._whole("block_count", most=len(self._tensors))

    @property
    def heads(self) -> tuple[int, int]:
        """Attention heads, and those of keys and values."""
        heads = self._whole("attention.head_count")
        return heads, self._whole("attention.head_count_kv", heads)

    def as_dict(self, rope_factors: list[float] | None) -> dict[str, Any]:
        """config.json's content. `rope_factors` is the data of the tensor rope_freqs.weight, where there is one."""
        self._refuse_what_is_not_computed()
        name = ARCHITECTURES[self.architecture][1]
        (heads, kv_heads), hidden_size = self.heads, self._whole("embedding_length")
        positions, head_dim = self._whole("context_length"), self._head_dim(hidden_size, heads)
        config: dict[str, Any] = {
            "architectures": [name],
            "model_type": _MODEL_TYPES[name],
            "hidden_size": hidden_size,
            "intermediate_size": self._whole("feed_forward_length"),
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "vocab_size": self._vocab_size(),
            "max_position_embeddings": positions,
            "hidden_act": "silu",
            "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon"),
            "rope_parameters": self._rope(positions, head_dim, rope_factors),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "dtype": self._dtype(),
        }
        config |= self._window(positions) | self._biases() | self._token_ids()
        if any(tensor.type not in PLAIN_TYPES for tensor in self._tensors.values()):
            config["quantization_config"] = {"quant_method": "gguf"}
        own = {key.partition(".")[2] for key in self._metadata if key.startswith(f"{self.architecture}.")}
        if unread := sorted(own - self._asked_for - _HARMLESS):
            logger.warning("%s: keys of the model that are not understood: %s", self._file, ", ".join(unread))
        return config

    # --- parts

    def _refuse_what_is_not_computed(self) -> None:
        for key in _REFUSED:
            if (value := self._get(key)) not in (None, 0, 1):
                raise self._bad(key, "no such thing in the model: octavo's decoder does not compute it", value)
        if self._get("attention.causal", True) is not True:
            raise self._bad("attention.causal", "true, as for every model that generates", False)
        if unread := [name for name in self._tensors if name.startswith("rope_factors")]:
            raise CheckpointError(
                "positions are stretched in a way that is not computed", file=self._file, tensor=unread[0]
            )

    def _head_dim(self, hidden_size: int, heads: int) -> int:
        head_dim = self._whole("attention.key_length", hidden_size // heads)
        if self._get("attention.key_length") is None and hidden_size % heads:
            raise self._bad("embedding_length", f"a multiple of the {heads} attention heads", hidden_size)
        for key in ("attention.value_length", "rope.dimension_count"):
            if (other := self._whole(key, head_dim)) != head_dim:
                raise self._bad(key, f"{head_dim}, the size of a head: other sizes are not computed", other)
        return head_dim

    def _vocab_size(self) -> int:
        embedding = self._tensors.get("token_embd.weight")
        if embedding is None:
            raise CheckpointError("the file holds no embedding", file=self._file, tensor="token_embd.weight")
        tokens = self._metadata.get("tokenizer.ggml.tokens")
        if isinstance(tokens, list) and len(tokens) > embedding.shape[0]:
            raise CheckpointError(
                "the tokenizer has more tokens than the embedding rows",
                file=self._file,
                tensor=embedding.name,
                expected=f"{len(tokens)} rows at least",
                found=embedding.shape[0],
            )
        return embedding.shape[0]

    def _rope(self, positions: int, head_dim: int, factors: list[float] | None) -> dict[str, Any]:
        parameters: dict[str, Any] = {"rope_theta": self._number("rope.freq_base", 10000.0), "rope_type": "default"}
        old = self._get("rope.scale_linear")
        kind = self._get("rope.scaling.type", "none" if old is None else "linear")
        if factors is not None:
            if kind != "none":
                raise self._bad("rope.scaling.type", "none beside the tensor rope_freqs.weight", kind)
            original = self._whole("rope.scaling.original_context_length", 0, least=0)
            return parameters | llama3_parameters(
                factors, parameters["rope_theta"], head_dim, positions, original, self._file
            )
        if kind == "none":
            return parameters
        if kind not in ("linear", "yarn"):
            raise self._bad("rope.scaling.type", "none, linear or yarn", kind)
        factor = self._number("rope.scaling.factor", old)
        if kind == "yarn":
            original = self._whole("rope.scaling.original_context_length", positions)
            parameters["original_max_position_embeddings"] = original
            for name in ("beta_fast", "beta_slow"):
                if self._get(f"rope.scaling.yarn_{name}") is not None:
                    parameters[name] = self._number(f"rope.scaling.yarn_{name}")
        return parameters | {"rope_type": kind, "factor": factor}

    def _window(self, positions: int) -> dict[str, Any]:
        """A sliding window, where it is shorter than what the model can see anyway."""
        window = self._whole("attention.sliding_window", positions)
        if window >= positions:
            return {}
        if self.architecture != "llama":
            # llama.cpp writes neither the layers that it is for nor whether it is used, and computes none
            raise self._bad(
                "attention.sliding_window", f"none for {self.architecture}, or {positions} and more", window
            )
        return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}

    def _biases(self) -> dict[str, bool]:
        def stored(*names: str) -> bool:
            return all(f"blk.0.{name}.bias" in self._tensors for name in names)

        if self.architecture == "qwen2":
            return {}
        attention = stored("attn_q", "attn_k", "attn_v", "attn_output")
        return {"attention_bias": attention, "mlp_bias": stored("ffn_gate", "ffn_up", "ffn_down")}

    def _token_ids(self) -> dict[str, Any]:
        """Ids of special tokens; several ends of text or turn become a list."""
        ends: list[int] = []
        for key in _END_KEYS:
            if (end := self._metadata.get(f"tokenizer.ggml.{key}")) is not None and end not in ends:
                ends.append(end)
        bos, pad = (self._metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "padding"))
        return {
            "bos_token_id": bos,
            "eos_token_id": ends if len(ends) > 1 else next(iter(ends), None),
            "pad_token_id": pad,
        }

    def _dtype(self) -> str:
        """The 16-bit type that the file uses, else float32; bfloat16, which overflows least, where all matrices are blocks."""
        matrices = {tensor.type.name for tensor in self._tensors.values() if len(tensor.shape) > 1}
        stored = [
            name for kind, name in (("BF16", "bfloat16"), ("F16", "float16"), ("F32", "float32")) if kind in matrices
        ]
        return stored[0] if stored else "bfloat16"

    # --- reading single keys

    def _get(self, key: str, default: Any = None) -> Any:
        self._asked_for.add(key)
        value = self._metadata.get(f"{self.architecture}.{key}")
        if isinstance(value, list):  # one number a layer
            if not value or any(other != value[0] for other in value):
                raise self._bad(key, "the same for all layers", value[:8])
            value = value[0]
        return default if value is None else value

    def _whole(self, key: str, default: int | None = None, least: int = 1, most: int = 2**31 - 1) -> int:
        value = self._get(key, default)
        if type(value) is not int or not least <= value <= most:
            raise self._bad(key, f"a whole number from {least} to {most}", value)
        return value

    def _number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise self._bad(key, "a number above 0", value)
        return float(value)

    def _bad(self, key: str, expected: str, found: object) -> CheckpointError:
        return CheckpointError(
            f"the metadata has an unusable value for '{self.architecture}.{key}'",
            file=self._file,
            expected=expected,
            found="nothing" if found is None else repr(found),
        )
