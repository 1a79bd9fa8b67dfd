"""Generates English with the demo model, quantises it with AWQ, compares the two, and chats with the result."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

from octavo import LLM, SamplingParams
from octavo.cli import main as octavo

QUESTIONS = ("What is the capital of France?", "Why is the sky blue?", "Write one sentence about books.")
CALIBRATION = ("--num-samples", "4", "--max-length", "256")


def main() -> int:
    model = Path(sys.argv[1])
    chat(model, QUESTIONS)
    quantised = model.with_name(f"{model.name}-awq")
    shutil.rmtree(quantised, ignore_errors=True)
    command = ["quantize", str(model), "--method", "awq", "--group-size", "64", *CALIBRATION, "--out", str(quantised)]
    print(f"$ octavo {' '.join(command)}")
    if code := octavo(command):
        return code
    print()
    if code := octavo(["eval", str(model), str(quantised), "--windows", "2", "--window", "512"]):
        return code
    print()
    chat(quantised, QUESTIONS[:1])
    return octavo(["inspect", str(quantised)])


def chat(model: Path, questions: tuple[str, ...]) -> None:
    start = time.monotonic()
    with LLM(str(model)) as llm:
        print(f"{model.name} loaded in {time.monotonic() - start:.1f} s\n")
        for question in questions:
            print(f"> {question}")
            prompt = {"prompt_token_ids": llm.tokenizer.chat([{"role": "user", "content": question}])}
            for delta in llm.stream(prompt, SamplingParams(temperature=0, max_tokens=64)):
                print(delta.text, end="", flush=True)
            print("\n")


if __name__ == "__main__":
    sys.exit(main())
