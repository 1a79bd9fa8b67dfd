"""One sequence on its way through the engine. The scheduler owns it and is alone in changing it. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING

from octavo.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.engine.grammar import GrammarState


class Status(IntEnum):
    """What a request is doing. Those that are SWAPPED wait as well, but what they computed lies on the host."""

    WAITING = 0
    SWAPPED = 1
    RUNNING = 2
    FINISHED = 3


class Request:
    """A sequence: its tokens so far, its blocks, and how many tokens' K and V the blocks hold.

    `token_ids` is the prompt followed by the output. `num_computed_tokens` of them are in the KV cache; the request lacks
    the rest. `limit_tokens` is the most tokens it may ever have; `end_token_ids` end it once `min_tokens` are out.

    Entry i of `block_ids` holds tokens i * block_size and on. The first `num_dropped_blocks` have left the sliding window and
    were given back: their entries are 0, a valid id whose contents belong to somebody else.
    """

    __slots__ = (
        "arrival",
        "bad_word_ids",
        "block_ids",
        "cache_node",
        "cache_root",
        "end_token_ids",
        "finish_reason",
        "first_scheduled_time",
        "grammar",
        "hit_evictions",
        "hits",
        "host_block_ids",
        "limit_tokens",
        "min_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_dropped_blocks",
        "num_pending_forks",
        "num_preemptions",
        "num_prompt_tokens",
        "num_published_blocks",
        "overtook",
        "params",
        "parent_id",
        "priority",
        "request_id",
        "seed",
        "sequence_index",
        "shares_last_block",
        "status",
        "stop_reason",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        limit_tokens: int = 1 << 62,
        end_token_ids: frozenset[int] = frozenset(),
        bad_word_ids: Sequence[Sequence[int]] = (),
        seed: int = 0,
        cache_root: object = None,
        grammar: GrammarState | None = None,
    ) -> None:
        self.request_id = request_id
        self.parent_id = request_id
        self.sequence_index = 0
        self.params = params
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.min_tokens = params.min_tokens
        self.limit_tokens = limit_tokens
        self.end_token_ids = end_token_ids
        self.arrival = 0  # order of arrival, set by the scheduler
        self.priority = priority
        self.grammar = grammar  # what the output must be, and how far it is; brought up to `token_ids` before each use
        self.bad_word_ids = bad_word_ids  # token sequences that may not be completed
        self.seed = seed  # random numbers are a function of (seed, position, sequence_index): no state to rewind
        self.status = Status.WAITING
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.num_pending_forks = params.n - 1
        self.num_preemptions = 0
        self.num_computed_tokens = 0
        self.num_cached_tokens: int | None = None  # prefix hit at first admission
        self.first_scheduled_time: float | None = None  # of time.monotonic(), at first admission
        self.block_ids: list[int] = []
        self.num_dropped_blocks = 0
        self.host_block_ids: list[int] = []  # of a swapped request: those behind the dropped ones, as far as computed
        self.overtook = False  # admitted before an earlier one that did not fit
        self.shares_last_block = False  # a fork may hold the same, partly filled, last block
        self.cache_root = cache_root  # requests with different roots never share blocks
        self.cache_node: object = cache_root  # prefix chain of the blocks published so far
        self.num_published_blocks = 0
        self.hits: list[int] = []  # prefix found while waiting; see BlockPool.find_prefix
        self.hit_evictions = -1

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def held_block_ids(self) -> list[int]:
        """The blocks that the request has a reference to."""
        return self.block_ids[self.num_dropped_blocks :]

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    def fork(self, index: int) -> Request:
        """Sequence `index` of this request: same tokens and KV so far, its own random numbers. Blocks are not yet shared."""
        child = Request(
            f"{self.parent_id}:{index}",
            self.token_ids,
            self.params,
            priority=self.priority,
            limit_tokens=self.limit_tokens,
            end_token_ids=self.end_token_ids,
            bad_word_ids=self.bad_word_ids,
            seed=self.seed,
            cache_root=self.cache_root,
            grammar=None if self.grammar is None else self.grammar.fork(),
        )
        child.parent_id = self.parent_id
        child.arrival = self.arrival
        child.sequence_index = index
        child.num_pending_forks = 0
        child.num_prompt_tokens = self.num_prompt_tokens
        child.num_computed_tokens = self.num_computed_tokens
        child.num_dropped_blocks = self.num_dropped_blocks
        child.num_cached_tokens = self.num_cached_tokens
        child.first_scheduled_time = self.first_scheduled_time
        child.cache_node = self.cache_node
        child.num_published_blocks = self.num_published_blocks
        return child

    def __repr__(self) -> str:
        computed = f"{self.num_computed_tokens}/{len(self.token_ids)}"
        return f"Request({self.request_id}, {self.status.name}, {computed} tokens, {len(self.block_ids)} blocks)"
