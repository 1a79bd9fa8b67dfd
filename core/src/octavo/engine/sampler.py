"""Chooses the next token of each row of logits, as SamplingParams asks. It decides nothing about ends or stops.

Nothing is remembered between calls: a row's outcome is a function of its logits and its request alone, bit for bit,
whoever its neighbours are. So every operation works within rows, never over several of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from octavo.engine.request import Request
from octavo.engine.step import TokenLogprobs
from octavo.errors import RequestError

_BLOCK = 64  # tokens; vocabularies are searched by the peaks of such blocks, as reductions are faster than searches
_FIRST_WIDTH = 64  # likeliest tokens looked at first; nearly always enough for top_k, top_p, min_p or logprobs
_ROWS_AT_ONCE = 16  # what these need stays in the cache, and a long prompt takes no more memory than a short one
_MAX_TEMPERATURE = 1e38  # beyond float32 a forbidden token's -inf / inf would be NaN
_64_BITS = (1 << 64) - 1


def uniform(seed: int, position: int, sequence_index: int) -> float:
    """The random number in [0, 1) of one token of one sequence: always the same, whatever was drawn before.

    `position` is the number of tokens before the new one. Of each argument the low 64 bits are taken in, by a step of
    SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).
    """
    state = 0
    for word in (seed, position, sequence_index):
        state = ((state ^ word) + 0x9E3779B97F4A7C15) & _64_BITS
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _64_BITS
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _64_BITS
        state ^= state >> 31
    return (state >> 11) * 2.0**-53


@dataclass(slots=True)
class SampledRows:
    """What was chosen, row for row.

    `token_ids[row]`: the request's token, then the first tokens of its pending forks; none if `errors` has the row.
    `logprobs[row]`: for each token, None unless asked for; the first entry's logprob adds to `cumulative_logprob`.
    """

    token_ids: list[list[int]]
    logprobs: list[list[TokenLogprobs] | None]
    errors: dict[int, str] = field(default_factory=dict)


class Sampler:
    """Samples from logits over a vocabulary of `vocab_size` tokens.

    Token ids in requests are validated elsewhere; one outside the vocabulary that gets here is an error of its row.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def sample(self, logits: Tensor, requests: Sequence[Request]) -> SampledRows:
        """Chooses one token for each row and one more for each pending fork of its request, by the same distribution.

        logits (rows, vocab_size): any float type, never written to. Row i belongs to `requests[i]`.
        """
        raw = logits = _in_blocks(logits)
        likeliest = _likeliest(raw)
        errors = {row: "the model's logits are not finite" for row, token in enumerate(likeliest) if token < 0}
        if altered := [row for row, request in enumerate(requests) if row not in errors and _alters(request)]:
            logits = raw.clone()
            for row in altered:
                try:
                    self._alter(logits[row], requests[row])
                except RequestError as error:
                    errors[row] = str(error)
            likeliest = _likeliest(logits)
            errors = {row: "the sampling parameters leave no token" for row in altered if likeliest[row] < 0} | errors
        token_ids = [
            [] if row in errors else [token] * (1 + request.num_pending_forks)
            for row, (token, request) in enumerate(zip(likeliest, requests, strict=True))
        ]
        drawn = [row for row, request in enumerate(requests) if row not in errors and not request.params.greedy]
        for start in range(0, len(drawn), _ROWS_AT_ONCE):
            rows = drawn[start : start + _ROWS_AT_ONCE]
            for row, tokens in zip(rows, _draw(_rows(logits, rows), [requests[row] for row in rows]), strict=True):
                token_ids[row] = tokens
        return SampledRows(token_ids, self._logprobs(raw, token_ids, requests), errors)

    def prompt_logprobs(self, logits: Tensor, next_token_ids: Sequence[int], count: int) -> list[TokenLogprobs]:
        """The logprobs of the token that follows each position, and of the `count` likeliest there (-1: all).

        logits (positions, vocab_size), any float type. Logits that are NaN give logprobs that are NaN.
        """
        self._index(next_token_ids, logits.device)  # checks them
        return self._token_logprobs(logits, list(enumerate(next_token_ids)), count)

    def _index(self, token_ids: Iterable[int], device: torch.device) -> Tensor:
        """Token ids as an index. Raises RequestError for one that would reach another token's logit or none."""
        ids = list(token_ids)
        for token_id in (min(ids, default=0), max(ids, default=0)):
            if not 0 <= token_id < self.vocab_size:
                raise RequestError(f"token id {token_id} is outside the model's vocabulary of {self.vocab_size} tokens")
        return torch.tensor(ids, dtype=torch.int64, device=device)

    def _alter(self, row: Tensor, request: Request) -> None:
        """Applies to `row` (vocab,) in place, in the documented order, what comes before the temperature."""
        params, output = request.params, request.output_token_ids
        early_ends = request.end_token_ids
        if request.grammar is not None:
            allowed = torch.from_numpy(request.grammar.allowed(request, self.vocab_size)).to(row.device)
            row[: self.vocab_size].masked_fill_(~allowed, -torch.inf)
            early_ends -= request.grammar.end_token_ids  # those are possible where nothing else is
        if params.allowed_token_ids is not None:
            allowed = self._index(params.allowed_token_ids, row.device)
            row[torch.ones_like(row, dtype=torch.bool).index_fill_(0, allowed, False)] = -torch.inf
        forbidden = list(early_ends) if len(output) < request.min_tokens else []
        for *start, last in filter(None, request.bad_word_ids):
            if output[len(output) - len(start) :] == start:
                forbidden.append(last)
        row[self._index(forbidden, row.device)] = -torch.inf
        if params.logit_bias:
            bias = [max(-100.0, min(100.0, value)) for value in params.logit_bias.values()]
            row[self._index(params.logit_bias, row.device)] += row.new_tensor(bias)
        if params.repetition_penalty != 1:
            seen = self._index(set(request.token_ids), row.device)
            values, penalty = row[seen], params.repetition_penalty
            row[seen] = torch.where(values > 0, values / penalty, values * penalty)
        if params.frequency_penalty or params.presence_penalty:
            counts = Counter(output)
            penalties = [params.frequency_penalty * count + params.presence_penalty for count in counts.values()]
            row[self._index(counts, row.device)] -= row.new_tensor(penalties)

    def _logprobs(
        self, raw: Tensor, token_ids: list[list[int]], requests: Sequence[Request]
    ) -> list[list[TokenLogprobs] | None]:
        """The logprobs of the rows that ask for them; one pass for all that ask for as many."""
        counts = {row: count for row, request in enumerate(requests) if (count := request.params.logprobs) is not None}
        found: dict[int, list[TokenLogprobs]] = {row: [] for row in counts}
        for count in set(counts.values()):
            picks = [(row, token) for row in counts if counts[row] == count for token in token_ids[row]]
            for (row, _), logprobs in zip(picks, self._token_logprobs(raw, picks, count), strict=True):
                found[row].append(logprobs)
        return [found.get(row) for row in range(len(requests))]

    def _token_logprobs(self, logits: Tensor, picks: Sequence[tuple[int, int]], count: int) -> list[TokenLogprobs]:
        """For each (row, token) that token's logprob and rank in the row, and the `count` likeliest of the row."""
        count = self.vocab_size if count < 0 else min(count, self.vocab_size)
        result = []
        for start in range(0, len(picks), _ROWS_AT_ONCE):
            rows, tokens = zip(*picks[start : start + _ROWS_AT_ONCE], strict=True)
            part, chosen = _in_blocks(logits[list(rows)]), torch.tensor(tokens, device=logits.device)[:, None]
            ranks = 1 + (part > part.gather(1, chosen)).sum(-1)
            top = _likeliest_first(part, count)
            logprobs = torch.log_softmax(part, -1)
            own, others = logprobs.gather(1, chosen)[:, 0].tolist(), logprobs.gather(1, top).tolist()
            first = zip(tokens, own, ranks.tolist(), strict=True)
            for entry, likeliest, values in zip(first, top.tolist(), others, strict=True):
                result.append(TokenLogprobs([entry, *zip(likeliest, values, range(1, count + 1), strict=True)]))
        return result


def _alters(request: Request) -> bool:
    """Whether anything changes this request's logits before the temperature does."""
    params = request.params
    added = (params.logit_bias, params.frequency_penalty, params.presence_penalty, params.repetition_penalty != 1)
    masked = (
        request.grammar is not None,
        params.allowed_token_ids is not None,
        request.bad_word_ids,
        request.num_output_tokens < request.min_tokens,
    )
    return any(added) or any(masked)


def _draw(logits: Tensor, requests: Sequence[Request]) -> list[list[int]]:
    """Draws by inverting the cumulative distribution; each row of logits (rows, vocab) has a finite maximum."""
    vocab = logits.shape[1]
    most = max(1 + request.num_pending_forks for request in requests)
    settings = [_draw_settings(request, vocab, most) for request in requests]
    table = torch.tensor(settings, dtype=torch.float64, device=logits.device)
    # the peak goes first, else a small temperature would divide it into infinity
    shares = torch.softmax((logits - logits.amax(-1, keepdim=True)).div_(table[:, :1].float()), -1)
    tokens = torch.empty(len(requests), most, dtype=torch.int64, device=logits.device)
    narrowed = [row for row, (_, k, p, m, *_) in enumerate(settings) if k < vocab or p < 1 or m > 0]
    if wide := sorted(set(range(len(requests))).difference(narrowed)):
        tokens[wide] = _draw_from_all(_rows(shares, wide), table[wide, 4:])
    if narrowed:
        ids, certain = _ranked(_rows(logits, narrowed), min(_FIRST_WIDTH, vocab))
        tokens[narrowed], left = _draw_from_ranked(ids, _rows(shares, narrowed), _rows(table, narrowed))
        for row, decided in zip(narrowed, (left <= certain)[:, 0].tolist(), strict=True):
            if not decided:
                one = slice(row, row + 1)
                ids = _all_that_may_be_left(logits[one], shares[one], settings[row])
                tokens[one], _ = _draw_from_ranked(ids, shares[one], table[one])
    return [row[: 1 + request.num_pending_forks] for row, request in zip(tokens.tolist(), requests, strict=True)]


def _draw_settings(request: Request, vocab: int, draws: int) -> list[float]:
    """Temperature, top_k, top_p, min_p, and the random numbers of as many draws."""
    params = request.params
    top_k = params.top_k if 0 < params.top_k < vocab else vocab
    numbers = [uniform(request.seed, request.num_tokens, request.sequence_index + index) for index in range(draws)]
    return [min(params.temperature, _MAX_TEMPERATURE), top_k, params.top_p, params.min_p, *numbers]


def _rows(tensor: Tensor, rows: list[int]) -> Tensor:
    """These rows, without a copy if they are all; `rows` is ascending and has no row twice."""
    return tensor if len(rows) == len(tensor) else tensor[rows]


def _in_blocks(logits: Tensor) -> Tensor:
    """logits (rows, vocab) in float32, the last block filled up with tokens that cannot be chosen."""
    missing = -logits.shape[1] % _BLOCK
    logits = logits.float().contiguous()
    return functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits


def _likeliest(logits: Tensor) -> list[int]:
    """Each row's likeliest token, of equal ones the first; -1 if that logit is not finite (NaN is the highest)."""
    blocks = logits.view(len(logits), logits.shape[1] // _BLOCK, _BLOCK)
    peaks = blocks.amax(-1)
    block = peaks.argmax(-1, keepdim=True)
    token = block * _BLOCK + blocks.take_along_dim(block[:, :, None], 1).argmax(-1)
    return torch.where(peaks.gather(1, block).isfinite(), token, -1)[:, 0].tolist()


def _ranked(logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The `width` likeliest tokens (rows, width), equal ones by id, and how many of them are certain (rows, 1).

    Not certain are those as likely as the last: there may be more of these, of which any were taken.
    """
    rows, vocab = logits.shape
    if width * _BLOCK * 2 <= vocab:
        # no token among the likeliest is outside the blocks with the highest peaks, as many blocks as tokens
        blocks = logits.view(rows, vocab // _BLOCK, _BLOCK)
        chosen = blocks.amax(-1).topk(width, sorted=False).indices
        near = blocks[torch.arange(rows, device=logits.device)[:, None], chosen].view(rows, -1)
        values, places = near.topk(width)
        ids = chosen.gather(1, places // _BLOCK) * _BLOCK + places % _BLOCK
    else:
        values, ids = logits.topk(width)
    certain = (values > values[:, -1:]).sum(-1, keepdim=True) if width < vocab else torch.full_like(ids[:, :1], width)
    ids, order = ids.sort(-1)
    order = values.gather(1, order).sort(dim=-1, descending=True, stable=True).indices
    return ids.gather(1, order), certain


def _likeliest_first(logits: Tensor, count: int, width: int = _FIRST_WIDTH) -> Tensor:
    """The `count` likeliest tokens (rows, count), equal ones by id."""
    width = min(max(width, 2 * count), logits.shape[1])
    ids, certain = _ranked(logits, width)
    return ids[:, :count] if bool((certain >= count).all()) else _likeliest_first(logits, count, 8 * width)


def _draw_from_all(shares: Tensor, numbers: Tensor) -> Tensor:
    """Draws (rows, draws): first a block, then a token of it, to sum no more than needed."""
    blocks = shares.view(len(shares), shares.shape[1] // _BLOCK, _BLOCK)
    ends = blocks.sum(-1).double().cumsum(-1)
    goal = numbers * ends[:, -1:]
    block = torch.searchsorted(ends, goal, right=True)
    start, end = functional.pad(ends, (1, 0)).gather(1, block), ends.gather(1, block)
    part = ((goal - start) / (end - start)).clamp(max=1 - 2.0**-53)
    within = blocks.take_along_dim(block[:, :, None], 1).double().cumsum(-1)
    place = torch.searchsorted(within, part[:, :, None] * within[:, :, -1:], right=True)
    return block * _BLOCK + place[:, :, 0]


def _draw_from_ranked(ids: Tensor, shares: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Draws (rows, draws) from what top_k, top_p and min_p leave of `ids`, likeliest first, and how many that is (rows, 1).

    `shares` (rows, vocab) are the probabilities of all tokens. If `ids` are not enough to tell, the number is above theirs.
    """
    (width, vocab), (_, top_k, top_p, min_p) = (ids.shape[1], shares.shape[1]), table[:, :4, None].unbind(1)
    share = shares.gather(1, ids).double()
    mass = share.cumsum(-1)
    # top_p is a part of what top_k leaves
    total = torch.where(top_k <= width, mass.gather(1, top_k.clamp(max=width).long() - 1), 1.0)
    kept = functional.pad(mass[:, :-1], (1, 0)) < torch.where(top_p < 1, top_p * total, torch.inf)
    kept &= (share > 0) & (share >= min_p * share[:, :1])
    kept &= torch.arange(width, device=ids.device) < top_k
    left = kept.sum(-1, keepdim=True)
    place = torch.searchsorted(mass, table[:, 4:] * mass.gather(1, left - 1), right=True)
    enough = (top_k <= width) | (top_k >= vocab)
    return ids.gather(1, torch.minimum(place, left - 1)), torch.where(enough, left, width + 1)


def _all_that_may_be_left(logits: Tensor, shares: Tensor, settings: Sequence[float]) -> Tensor:
    """All tokens (1, n) of one row that top_k, top_p and min_p may leave, likeliest first."""
    _, top_k, top_p, min_p, *_ = settings
    if top_k < logits.shape[1]:
        return _likeliest_first(logits, int(top_k))
    floor = min_p * float(shares.max())
    if top_p < 1:
        # lower the bar until what is above it is enough, a bit more than top_p as sums are not exact; or until what is
        # below cannot matter. At most 1 / bar tokens are above it, so few are sorted
        bar, enough = 2.0**-8, top_p + (1 - top_p) / 8
        while bar * logits.shape[1] > 1 - top_p and functional.threshold(shares, bar, 0.0).sum() < enough:
            bar /= 4
        floor = max(floor, bar)
    ids = (shares[0] >= floor).nonzero()[:, 0]
    return ids[logits[0, ids].sort(dim=-1, descending=True, stable=True).indices][None]
