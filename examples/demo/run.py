"""Generates English from three prompts with the demo model, then shows what ran."""

from __future__ import annotations

import sys
import time

from octavo import LLM, SamplingParams
from octavo.cli import main as octavo


def main() -> int:
    (model,) = sys.argv[1:]
    start = time.monotonic()
    llm = LLM(model)
    print(f"loaded in {time.monotonic() - start:.1f} s\n")
    for question in ("What is the capital of France?", "Why is the sky blue?", "Write one sentence about books."):
        print(f"> {question}")
        prompt = {"prompt_token_ids": llm.tokenizer.chat([{"role": "user", "content": question}])}
        for delta in llm.stream(prompt, SamplingParams(temperature=0, max_tokens=64)):
            print(delta.text, end="", flush=True)
        print("\n")
    return octavo(["inspect", model])


if __name__ == "__main__":
    sys.exit(main())
