"""vLLM on a CPU, offline, in one process."""

from __future__ import annotations

from collections.abc import Sequence

import timing


def main() -> None:
    options = timing.options()
    from vllm import LLM, SamplingParams

    caching = any(work.startswith("context") for work in options["works"])
    llm = LLM(options["model"], enable_prefix_caching=caching, enforce_eager=True, **options["settings"])

    def generate(batch: Sequence[list[int]], max_tokens: int) -> None:
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=max_tokens, detokenize=True)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in batch], params, use_tqdm=False)
        for output in outputs:
            assert len(output.outputs[0].token_ids) == max_tokens

    timing.report(timing.measure(generate, options))


if __name__ == "__main__":
    main()
