"""What products cost whose rows do not depend on one another (`octavo.product`), beside torch's own, on a CPU.

All products of a decoder with the shape of SmolLM2-135M, whose head shares the embedding, for a step of so many tokens (the
head multiplies 16 rows at most). Weights are distinct, so that they come from memory as in a model. Both ways alternate and
the least of many runs counts, since other work on the machine only ever adds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from octavo.product import row_product

SHAPES, HEAD = ((576, 960), (576, 576), (576, 3072), (1536, 576)), (576, 49152)
TOKENS = (1, 2, 4, 8, 16, 64, 256, 512)


@torch.inference_mode()
def measure(num_layers: int, repeats: int, dtype: torch.dtype) -> dict[int, tuple[float, float]]:
    """Milliseconds of torch's own products and of independent ones, by tokens."""
    stored = [torch.randn(n, k).to(dtype) for _ in range(num_layers) for k, n in SHAPES]
    turned = [weight.t().contiguous() for weight in stored]
    head = torch.randn(HEAD[1], HEAD[0]).to(dtype)
    inputs = {size: torch.randn(max(TOKENS), size).to(dtype) for size in {k for k, _ in SHAPES}}

    def own(tokens: int) -> None:
        for weight in stored:
            F.linear(inputs[weight.shape[1]][:tokens], weight)
        F.linear(inputs[HEAD[0]][: min(tokens, 16)], head)

    def independent(tokens: int) -> None:
        for weight in turned:
            row_product(inputs[weight.shape[0]][:tokens], weight)
        row_product(inputs[HEAD[0]][: min(tokens, 16)], head.t())

    return {tokens: (least(own, tokens, repeats), least(independent, tokens, repeats)) for tokens in TOKENS}


def least(function: Callable[[int], None], tokens: int, repeats: int) -> float:
    times = []
    for _ in range(1 + repeats):  # the first finds out which tiles agree
        start = time.perf_counter()
        function(tokens)
        times.append(time.perf_counter() - start)
    return min(times[1:]) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=5, help="runs in a row (5)")
    parser.add_argument("--rounds", type=int, default=3, help="times that both ways take turns (3)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--threads", type=int, help="torch's threads")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    rounds = [measure(options.layers, options.repeats, getattr(torch, options.dtype)) for _ in range(options.rounds)]
    best = {tokens: tuple(min(r[tokens][way] for r in rounds) for way in (0, 1)) for tokens in TOKENS}
    if options.json:
        print(json.dumps({"threads": torch.get_num_threads(), "milliseconds": best}))
        return
    print(
        f"{options.dtype}, {torch.get_num_threads()} thread(s), ms a step\n{'tokens':>8}{'torch':>10}{'rows':>10}{'ratio':>8}"
    )
    for tokens, (own, independent) in best.items():
        print(f"{tokens:>8}{own:>10.1f}{independent:>10.1f}{independent / own:>8.2f}")


if __name__ == "__main__":
    main()
