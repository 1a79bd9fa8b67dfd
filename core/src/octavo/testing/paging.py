"""Sequences laid out in a hostile pool: every slot that nobody wrote holds NaN, and block tables are shuffled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octavo.attention.backend import AttentionBatch, AttentionLayer, LayerKV
from octavo.attention.kv_format import PagedKV


@dataclass(frozen=True, slots=True)
class PagedSequence:
    """One request of a batch. `key` and `value` (seq_len, kv_heads, head_dim), `query` (query_len, heads, head_dim)."""

    key: Tensor
    value: Tensor
    query: Tensor
    blocks: tuple[int, ...]

    @property
    def seq_len(self) -> int:
        return self.key.shape[0]

    @property
    def query_len(self) -> int:
        return self.query.shape[0]


@dataclass(frozen=True, slots=True)
class Pool:
    """Sequences and the number of blocks that they were laid out in; most blocks belong to nobody."""

    sequences: tuple[PagedSequence, ...]
    num_blocks: int
    block_size: int

    def queries(self) -> Tensor:
        """(tokens, heads, head_dim)"""
        return torch.cat([s.query for s in self.sequences])

    def slots(self, sequence: PagedSequence) -> Tensor:
        """(seq_len,) int64: where each token of a sequence lies."""
        positions = torch.arange(sequence.seq_len)
        blocks = torch.tensor(sequence.blocks)[positions // self.block_size]
        return blocks * self.block_size + positions % self.block_size

    def batch(self, device: str, seed: int = 0, window: int | None = None) -> AttentionBatch:
        """The step that computes all queries. Tables end in ids of blocks that are not the request's.

        Where all layers have a sliding `window`, they start with such ids too: what left it was given back.
        """
        generator = torch.Generator().manual_seed(seed)
        query_lens, seq_lens = ([getattr(s, name) for s in self.sequences] for name in ("query_len", "seq_len"))
        width = max(len(s.blocks) for s in self.sequences) + 2
        tables = torch.empty(len(self.sequences), width, dtype=torch.int32)
        for row, sequence in enumerate(self.sequences):
            foreign = sorted(set(range(self.num_blocks)) - set(sequence.blocks))
            picked = torch.randint(0, len(foreign), (width,), generator=generator)
            tables[row] = torch.tensor(foreign, dtype=torch.int32)[picked]
            first = (
                0 if window is None else max(0, sequence.seq_len - sequence.query_len - window + 1) // self.block_size
            )
            tables[row, first : len(sequence.blocks)] = torch.tensor(sequence.blocks[first:], dtype=torch.int32)
        starts = torch.tensor([0, *query_lens]).cumsum(0)
        batch = AttentionBatch(
            query_start_loc=starts.to(torch.int32),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            block_tables=tables,
            slot_mapping=torch.cat([self.slots(s)[s.seq_len - s.query_len :] for s in self.sequences]),
            prompt_lens=torch.tensor(seq_lens, dtype=torch.int32),
            query_lens_list=query_lens,
            seq_lens_list=seq_lens,
            block_size=self.block_size,
        )
        names = ("query_start_loc", "seq_lens", "block_tables", "slot_mapping", "prompt_lens")
        return replace(batch, **{name: getattr(batch, name).to(device) for name in names})

    def blocks(self, dtype: torch.dtype, device: str, unwritten: float = float("nan")) -> LayerKV:
        """All sequences in storage of `dtype`, every other slot `unwritten`. int8 comes with a scale per token and head."""
        kv_heads, head_dim = self.sequences[0].key.shape[1:]
        shape = (self.num_blocks, kv_heads, self.block_size)
        tensors = []
        for side in ("key", "value"):
            plain = torch.full((*shape, head_dim), unwritten)
            for sequence in self.sequences:
                slots = self.slots(sequence)
                plain[slots // self.block_size, :, slots % self.block_size] = getattr(sequence, side)
            tensors.append(plain)
        if dtype != torch.int8:
            return LayerKV(*(t.to(device, dtype) for t in tensors))
        scales = [t.abs().amax(-1) / 127 for t in tensors]
        codes = [
            (t / s[..., None]).nan_to_num(nan=99.0).round().to(device, dtype)
            for t, s in zip(tensors, scales, strict=True)
        ]
        return LayerKV(*codes, *(s.to(device) for s in scales))


def lay_out(
    rows: Sequence[tuple[int, int]],
    layer: AttentionLayer,
    block_size: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    forks: bool = False,
    seed: int = 0,
) -> Pool:
    """Random sequences of (query_len, seq_len) tokens, their values representable in the types they are stored in.

    With `forks`, each sequence after the first starts with the first one's tokens and shares its blocks as far as both go,
    a partly filled last one included.
    """
    generator = torch.Generator().manual_seed(seed)
    needed = sum(-(-seq_len // block_size) for _, seq_len in rows)
    free = torch.randperm(2 * needed + 5, generator=generator).tolist()
    sequences: list[PagedSequence] = []
    for query_len, seq_len in rows:
        key, value = (
            _stored(torch.randn(seq_len, layer.kv_heads, layer.head_dim, generator=generator) + shift, kv_dtype)
            for shift in (0.0, 1.0)
        )
        query = torch.randn(query_len, layer.heads, layer.head_dim, generator=generator).to(dtype)
        blocks = [free.pop() for _ in range(-(-seq_len // block_size))]
        if forks and sequences:
            parent = sequences[0]
            whole = seq_len if seq_len <= parent.seq_len else parent.seq_len // block_size * block_size
            shared = -(-whole // block_size)
            key[:whole], value[:whole] = parent.key[:whole], parent.value[:whole]
            blocks[:shared] = parent.blocks[:shared]
        sequences.append(PagedSequence(key, value, query, tuple(blocks)))
    return Pool(tuple(sequences), 2 * needed + 5, block_size)


def _stored(values: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 values that survive being stored as `dtype`."""
    if dtype != torch.int8:
        return values.to(dtype).float()
    scale = values.abs().amax(-1, keepdim=True) / 127
    return (values / scale).round() * scale


def hostile(kv: PagedKV, block_ids: Sequence[int], *, host: bool = False) -> None:
    """Fills whole blocks with NaN, in every tensor that can hold one: what nobody wrote must not be read.

    With `host`, the ids are those of host blocks.
    """
    ids = torch.tensor(list(block_ids), dtype=torch.long)
    for layer in kv.host_layers if host else kv.layers:
        for tensor in layer.tensors:
            if tensor.dtype.is_floating_point and len(ids):
                tensor[ids.to(tensor.device)] = torch.full_like(tensor[:1], float("nan")).expand(
                    len(ids), *tensor.shape[1:]
                )
