"""A model that says what a test tells it to, but only if the paged memory gives back every token that was ever computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from octavo.attention.backend import AttentionLayer, LayerKV
from octavo.attention.kv_format import AttentionStep

_DIGITS = 8  # a number is kept as base-8 digits, which every storage type holds exactly, 8-bit ones included
_HEAD_DIM = 16


class ScriptedModel:
    """Answers each prompt of `scripts` with its output, then with `end_token_id`: the interface of `Decoder`.

    K holds the token ids and V the positions. Each step reads a request's whole history back through its block table and
    fails with AssertionError where it is not a prompt of the scripts, followed by its output: a block that was shared,
    copied, freed or read at the wrong time shows at once. Logits are 100 for the forced token and about 0 for the others.
    """

    attention_layers = (AttentionLayer(index=0, heads=1, kv_heads=1, head_dim=_HEAD_DIM, scale=1.0),)

    def __init__(
        self, scripts: Mapping[tuple[int, ...], Sequence[int]], vocab_size: int = 288, end_token_id: int = 257
    ) -> None:
        self.scripts = {tuple(prompt): tuple(output) for prompt, output in scripts.items()}
        self.vocab_size, self.end_token_id = vocab_size, end_token_id

    def __call__(self, token_ids: Tensor, positions: Tensor, attention: AttentionStep) -> Tensor:
        return self.forward(token_ids, positions, attention)

    def forward(self, token_ids: Tensor, positions: Tensor, attention: AttentionStep) -> Tensor:
        """token_ids and positions (tokens,) -> (tokens, 1): the token that each position forces next."""
        (layer,), kv, batch = self.attention_layers, attention.kv.layers[0], attention.batch
        dtype = attention.kv.layout.formats[0].geometry.dtype
        key, value = (_to_digits(numbers)[:, None].to(dtype) for numbers in (token_ids, positions))
        attention.kv.layout.formats[0].write(layer, kv, key, value, batch.slot_mapping)
        forced: list[int] = []
        for row, (query_len, seq_len) in enumerate(zip(batch.query_lens_list, batch.seq_lens_list, strict=True)):
            blocks = batch.block_tables[row, : -(-seq_len // batch.block_size)].long()
            history = self._history(attention.kv.layout.formats[0].decode(layer, kv, blocks), seq_len, row)
            script = self._script(history, int(batch.prompt_lens[row]))
            forced += [self._next(script, position) for position in range(seq_len - query_len + 1, seq_len + 1)]
        return torch.tensor(forced, dtype=torch.float32, device=token_ids.device)[:, None]

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden (rows, 1) -> (rows, vocab_size) fp32. Tokens that are not forced rank by id, lowest first."""
        ranks = torch.arange(self.vocab_size, device=hidden.device) * -(2.0**-12)
        logits = ranks.repeat(len(hidden), 1)
        logits[torch.arange(len(hidden)), hidden[:, 0].long()] = 100.0
        return logits

    def _history(self, blocks: LayerKV, seq_len: int, row: int) -> tuple[int, ...]:
        """The tokens of a request, as the paged memory has them."""
        tokens, positions = (
            _from_digits(side.transpose(1, 2).flatten(0, 1)[:seq_len, 0]) for side in (blocks.key, blocks.value)
        )
        wrong = [p for p in range(seq_len) if positions[p] != p or tokens[p] is None]
        assert not wrong, (
            f"row {row} of the batch: position {wrong[0]} of {seq_len} was never written or belongs to another request: "
            f"it holds token {tokens[wrong[0]]} of position {positions[wrong[0]]}"
        )
        return tuple(token for token in tokens if token is not None)

    def _script(self, history: tuple[int, ...], prompt_len: int) -> tuple[int, ...]:
        """The prompt and output that a history belongs to."""
        for prompt, output in self.scripts.items():
            script = prompt + output
            script += (self.end_token_id,) * (len(history) - len(script))
            if len(prompt) == prompt_len and script[: len(history)] == history:
                return script
        raise AssertionError(
            f"no script has a prompt of {prompt_len} tokens and goes on as the paged memory does: {history}; "
            f"prompts are {list(self.scripts)}"
        )

    def _next(self, script: tuple[int, ...], position: int) -> int:
        return script[position] if position < len(script) else self.end_token_id


def _to_digits(numbers: Tensor) -> Tensor:
    """Integers (n,) as digits (n, 16), fp32."""
    shifts = 3 * torch.arange(_HEAD_DIM, device=numbers.device)
    return ((numbers[:, None] >> shifts) % _DIGITS).float()


def _from_digits(digits: Tensor) -> list[int | None]:
    """The integers of (n, 16) digits; None where they are none."""
    wide = digits.double()
    clean = torch.isfinite(wide).all(1)
    rounded = wide.nan_to_num().round()
    numbers = (rounded * 8.0 ** torch.arange(_HEAD_DIM, device=digits.device)).sum(1)
    clean &= (rounded >= 0).all(1) & (rounded < _DIGITS).all(1)
    return [int(number) if good else None for number, good in zip(numbers.tolist(), clean.tolist(), strict=True)]
