"""How much KV memory there will be, and why: the plan that is printed at start and by `octavo inspect`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from octavo.attention.kv_format import KVFormat, KVGeometry
from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.model.architectures import DecoderConfig
from octavo.platforms import Platform, available_memory_bytes, total_memory_bytes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KVPlan:
    """Blocks of KV memory and the longest sequence they and the model admit."""

    format: str
    bytes_per_block: int
    block_size: int
    num_blocks: int
    max_model_len: int
    reason: str  # what bounded num_blocks

    @property
    def bytes_per_token(self) -> float:
        return self.bytes_per_block / self.block_size

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block

    @property
    def capacity_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def longest_tokens(self) -> int:
        """Longest prompt plus output that one request can have."""
        return min(self.max_model_len, self.capacity_tokens)

    def __str__(self) -> str:
        return (
            f"KV memory: {self.num_blocks:,} blocks of {self.block_size} tokens = {self.capacity_tokens:,} tokens, "
            f"{self.num_bytes / 2**20:,.0f} MiB as {self.format} ({self.bytes_per_token:,.0f} bytes a token; "
            f"{self.reason}); longest request {self.longest_tokens:,} tokens"
        )


def kv_geometry(decoder: DecoderConfig, block_size: int, dtype: torch.dtype) -> KVGeometry:
    return KVGeometry(decoder.num_layers, decoder.kv_heads, decoder.head_dim, block_size, dtype)


def choose_kv_format(
    name: str, formats: Mapping[str, type[KVFormat]], geometry: KVGeometry, stored: str | None = None
) -> KVFormat:
    """The KV format of a name; raises ConfigError that lists the installed ones.

    "auto" follows what the checkpoint was calibrated for (`stored`). Where nothing stores fp8, K and V stay as computed, which
    is told: it takes more memory and loses nothing. What is not fp8 must be served as it is or decided by the user.
    """
    if name == "auto" and stored is not None:
        if stored not in formats and not stored.startswith("fp8"):
            raise ConfigError(
                f"the checkpoint asks for a KV cache in {stored}, which no installed plugin stores; installed: "
                f"{', '.join(sorted(formats))}. To keep K and V unquantised, say --kv-cache-dtype float32 or bfloat16"
            )
        if stored not in formats:
            logger.warning(
                "the checkpoint asks for a KV cache in %s, which no plugin stores: it stays unquantised", stored
            )
        name = stored if stored in formats else name
    if name not in formats:
        raise ConfigError(f"--kv-cache-dtype {name}: no such format; installed: {', '.join(sorted(formats))}")
    return formats[name](geometry)


def plan_kv(
    config: EngineConfig, decoder: DecoderConfig, kv_format: KVFormat, platform: Platform, weight_bytes: int
) -> KVPlan:
    """Divides the memory that is left. `weight_bytes` are weights not yet loaded, 0 once they are.

    Never plans more than `max_num_seqs` sequences of full length could use. Raises ConfigError where not one block fits,
    where more are asked for than the machine can hold, or where the model is asked for more positions than it has.
    """
    limit = decoder.max_positions
    max_model_len = config.max_model_len or limit
    if max_model_len > limit:
        raise ConfigError(
            f"--max-model-len {max_model_len} exceeds the {limit} positions of the model (max_position_embeddings in "
            f"config.json); use {limit} or less, or a checkpoint with rope scaling"
        )
    per_block = kv_format.bytes_per_block()
    useful = config.max_num_seqs * -(-max_model_len // config.block_size)
    if config.num_blocks_override is not None:
        num_blocks, reason = config.num_blocks_override, "--num-blocks-override"
    elif config.kv_cache_memory_bytes is not None:
        num_blocks, reason = config.kv_cache_memory_bytes // per_block, "--kv-cache-memory-bytes"
    else:
        free = max(free_bytes(platform) - weight_bytes, 0)
        share = config.kv_cache_memory_utilization
        num_blocks = int(free * share) // per_block
        reason = f"{share:.0%} of {free / 2**30:.1f} GiB left"
    if config.num_blocks_override is None and num_blocks > useful:
        num_blocks, reason = useful, f"{config.max_num_seqs} sequences of {max_model_len} tokens"
    if num_blocks < 1:
        raise ConfigError(
            f"no memory for KV blocks: one takes {per_block / 2**20:.1f} MiB ({reason}); raise --kv-cache-memory-bytes, "
            "use a smaller --block-size or --kv-cache-dtype, or a smaller model"
        )
    if num_blocks * per_block > (total := _total_bytes(platform)):
        raise ConfigError(
            f"{num_blocks:,} KV blocks ({reason}) take {num_blocks * per_block / 2**30:,.1f} GiB, but the machine has "
            f"{total / 2**30:,.1f} GiB of memory; ask for fewer"
        )
    return KVPlan(kv_format.name, per_block, config.block_size, num_blocks, max_model_len, reason)


def free_bytes(platform: Platform) -> int:
    """Bytes of memory that this process may still allocate on the device."""
    if platform.device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    return available_memory_bytes()


def _total_bytes(platform: Platform) -> int:
    return int(torch.cuda.mem_get_info()[1]) if platform.device == "cuda" else total_memory_bytes()
