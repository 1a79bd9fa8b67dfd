"""How much KV memory there will be, and why: the plan that is printed at start and by `octavo inspect`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from octavo.attention.kv_format import KVFormat, KVGeometry, KVLayout
from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.model.architectures import DecoderConfig
from octavo.model.kv_scale_file import read_kv_scale_file
from octavo.model.plan import ModelPlan
from octavo.platforms import Platform, available_memory_bytes, total_memory_bytes
from octavo.quant.kv_scales import KV_SCALE_FILE, KVScales, holds_kv_scales, unit_kv_scales

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


def kv_layout(plan: ModelPlan, stored: Sequence[KVScales] | None = None) -> KVLayout:
    """How each layer's K and V are stored, by the settings and the checkpoint.

    `stored` are the checkpoint's scales; None: whether it has any is judged by its headers, which is enough to count bytes.
    Raises ConfigError or CheckpointError for settings that name no format, no layer, or scales that nobody uses.
    """
    settings, formats = plan.settings, plan.registry.kv_formats
    names = _names_by_layer(settings, plan.config.num_layers)
    kind_of = {name: choose_kv_format(name, formats, plan.kv_cache) for name in dict.fromkeys(names)}
    wanted = [kind_of[name] for name in names]
    uses_scales = any(kind.uses_scales for kind in wanted)
    given: Sequence[KVScales] = ()
    if settings.kv_scales is not None:
        given = _given_scales(settings.kv_scales, plan)
        if not uses_scales:
            raise ConfigError(
                f"--kv-scales {settings.kv_scales}: K and V are stored as {', '.join(sorted({k.name for k in wanted}))}, "
                "which uses no scales; leave the option out, or say --kv-cache-dtype fp8_e4m3"
            )
    stores = _holds_scales(plan) if stored is None else bool(stored)
    kinds = [kind if given or stores or not kind.uses_scales else _uncalibrated(kind, formats) for kind in wanted]
    for kind, other in dict.fromkeys(zip(wanted, kinds, strict=True)):
        if other is not kind:
            logger.warning(
                "K and V are stored as %s instead of %s: there are no calibrated scales. To have %s, make scales with "
                "`octavo quantize MODEL --kv-scales-only --out FILE` and say --kv-scales FILE, or --kv-scales unit for 1",
                *(other.name, kind.name, kind.name),
            )
    geometry = kv_geometry(plan.config, settings.block_size, plan.dtype)
    layout = KVLayout.of(kinds, geometry, given or stored or ())
    if stores and given:
        logger.info("the checkpoint's KV scales are not used: those of --kv-scales %s are", settings.kv_scales)
    elif stores and not uses_scales:
        logger.info("the checkpoint's KV scales are not needed: K and V are stored as %s", layout.name)
    return layout


def choose_kv_format(name: str, formats: Mapping[str, type[KVFormat]], stored: str | None = None) -> type[KVFormat]:
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
    return formats[name]


def _names_by_layer(settings: EngineConfig, num_layers: int) -> list[str]:
    """The name of each layer's format: that of the first entry of the map that holds the layer, else of the general setting."""
    names: dict[int, str] = {}
    for key, name in settings.kv_cache_dtype_map.items():
        layers: set[int] = set()
        for part in key.split(","):
            first, _, last = part.partition("-")
            layers |= set(range(num_layers) if part == "*" else range(int(first), int(last or first) + 1))
        if not layers or max(layers) >= num_layers:
            raise ConfigError(
                f"--kv-cache-dtype-map '{key}={name}': the model has layers 0 to {num_layers - 1}, and a range goes upwards"
            )
        if not layers - names.keys():
            raise ConfigError(f"--kv-cache-dtype-map '{key}={name}': earlier entries leave no layer for this one")
        names |= dict.fromkeys(layers - names.keys(), name)
    return [names.get(index, settings.kv_cache_dtype) for index in range(num_layers)]


def _given_scales(source: str, plan: ModelPlan) -> tuple[KVScales, ...]:
    """What --kv-scales says."""
    if source == "unit":
        return unit_kv_scales(plan.config.num_layers)
    return read_kv_scale_file(source, _attention_modules(plan), plan.config.kv_heads)


def _attention_modules(plan: ModelPlan) -> list[str]:
    return [plan.layer_names(index).attention for index in range(plan.config.num_layers)]


def _holds_scales(plan: ModelPlan) -> bool:
    """Whether the checkpoint has KV scales, by its headers: loading finds out whether they are good."""
    tensors = plan.checkpoint.without(plan.settings.ignore_tensors)
    modules = _attention_modules(plan)
    return any(holds_kv_scales(module, tensors) for module in modules) or bool(plan.checkpoint.json(KV_SCALE_FILE))


def _uncalibrated(kind: type[KVFormat], formats: Mapping[str, type[KVFormat]]) -> type[KVFormat]:
    """What takes the place of a format that has no scales."""
    if kind.without_scales is None or kind.without_scales not in formats:
        raise ConfigError(
            f"--kv-cache-dtype {kind.name}: there are no calibrated scales of K and V. Make some with `octavo quantize MODEL "
            "--kv-scales-only --out FILE` and say --kv-scales FILE, or insist on a scale of 1 with --kv-scales unit"
        )
    return formats[kind.without_scales]


def plan_kv(
    config: EngineConfig, decoder: DecoderConfig, layout: KVLayout, platform: Platform, weight_bytes: int
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
    per_block = layout.bytes_per_block()
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
    return KVPlan(layout.name, per_block, config.block_size, num_blocks, max_model_len, reason)


_DEFAULT_SWAP_BYTES = 4 * 2**30


def plan_host_blocks(config: EngineConfig, bytes_per_block: int, platform: Platform) -> int:
    """Blocks of host memory for swapping. Raises ConfigError where more are asked for than the host can hold."""
    if config.preemption_mode == "recompute":
        return 0
    if config.swap_space is None:
        wanted = platform.device == "cuda" or config.preemption_mode == "swap"
        return int(wanted) * min(_DEFAULT_SWAP_BYTES, available_memory_bytes() // 4) // bytes_per_block
    num_bytes = int(config.swap_space * 2**30)
    if num_bytes > (total := total_memory_bytes()):
        raise ConfigError(f"--swap-space {config.swap_space:g} GiB: the host has {total / 2**30:,.1f} GiB of memory")
    if 0 < num_bytes < bytes_per_block:
        raise ConfigError(
            f"--swap-space {config.swap_space:g} GiB holds not one block: that takes {bytes_per_block / 2**20:.2f} MiB"
        )
    return num_bytes // bytes_per_block


def free_bytes(platform: Platform) -> int:
    """Bytes of memory that this process may still allocate on the device."""
    if platform.supposed_bytes is not None:
        return platform.supposed_bytes
    if platform.device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    return available_memory_bytes()


def _total_bytes(platform: Platform) -> int:
    if platform.supposed_bytes is not None:
        return platform.supposed_bytes
    return int(torch.cuda.mem_get_info()[1]) if platform.device == "cuda" else total_memory_bytes()
