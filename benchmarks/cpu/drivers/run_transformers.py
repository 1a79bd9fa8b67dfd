"""transformers on torch, eager, as a script that needs no more would use it."""

from __future__ import annotations

from collections.abc import Sequence

import timing


def main() -> None:
    options = timing.options()
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(options["threads"])
    model = AutoModelForCausalLM.from_pretrained(options["model"], dtype=getattr(torch, options["settings"]["dtype"]))

    def generate(batch: Sequence[list[int]], max_tokens: int) -> None:
        ids = torch.tensor(batch)
        limits = {"max_new_tokens": max_tokens, "min_new_tokens": max_tokens}
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, do_sample=False, eos_token_id=None, pad_token_id=0, **limits)
        assert out.shape[1] == ids.shape[1] + max_tokens

    with torch.inference_mode():
        timing.report(timing.measure(generate, options))


if __name__ == "__main__":
    main()
