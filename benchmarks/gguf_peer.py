"""The same GGUF file in llama.cpp and in octavo: greedy texts, and perplexity by llama.cpp's protocol.

    python benchmarks/gguf_peer.py MODEL.gguf TEXT --llama-simple PATH --llama-perplexity PATH

`llama-perplexity` cuts the text into chunks of n_ctx tokens and scores the second half of each, without the first token of that
half; where the file asks for a token that begins texts, it replaces the first of each chunk. octavo does the same here, with
float activations and with those quantised to int8 (llama.cpp's own way). `llama-simple` continues prompts greedily.
"""

from __future__ import annotations

import argparse
import math
import re
import subprocess
import sys
import tempfile
from itertools import takewhile
from pathlib import Path

from octavo import LLM, SamplingParams

PROMPTS = (
    "The history of printing begins",
    "def fibonacci(n):\n",
    "Once upon a time, in a village by the sea,",
    "Water boils at a lower temperature on a mountain because",
    "1, 2, 3, 4, 5,",
    "Dear Sir or Madam,\n\nI am writing to",
)


def octavo_perplexity(llm: LLM, text: str, chunks: int, size: int) -> float:
    """exp of the mean negative log likelihood of each chunk's last size / 2 - 1 tokens."""
    first = size // 2
    tokens = llm.tokenizer.encode(text)
    begins = tokens[0] if tokens[0] != llm.tokenizer.encode_plain(text[:100])[0] else None
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    total = 0.0
    for i in range(chunks):
        part = tokens[i * size : (i + 1) * size]
        if len(part) < size:
            sys.exit(f"the text has only {len(tokens) // size} chunks of {size} tokens")
        part = part if begins is None else [begins, *part[1:]]
        (output,) = llm.generate({"prompt_token_ids": part}, params, use_tqdm=False)
        assert output.prompt_logprobs is not None
        for token, found in zip(part[first + 1 :], output.prompt_logprobs[first + 1 :], strict=True):
            assert found is not None
            total -= found[token].logprob
    return math.exp(total / (chunks * (size - first - 1)))


def peer_perplexity(program: Path, options: argparse.Namespace, text: str) -> float:
    with tempfile.NamedTemporaryFile(
        "w", suffix=".txt", newline="\n"
    ) as file:  # it would read other line ends as they are
        file.write(text)
        file.flush()
        return _peer_perplexity(program, options, file.name)


def _peer_perplexity(program: Path, options: argparse.Namespace, file: str) -> float:
    command = [program, "-m", options.model, "-f", file, "-c", str(options.size)]
    run = subprocess.run([*command, "--chunks", str(options.chunks)], capture_output=True, text=True)
    found = re.search(r"Final estimate: PPL = ([\d.]+)", run.stdout + run.stderr)
    if found is None:
        sys.exit(f"{program} printed no perplexity:\n{run.stderr[-2000:]}")
    return float(found[1])


def peer_text(program: Path, options: argparse.Namespace, prompt: str) -> str:
    command = [program, "-m", options.model, "-n", str(options.tokens), prompt]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return run.stdout.removesuffix("\n").removeprefix("<|im_start|>")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="GGUF file")
    parser.add_argument("text", type=Path, help="file with the text, such as wikitext2-test.txt")
    parser.add_argument("--llama-simple", type=Path, required=True)
    parser.add_argument("--llama-perplexity", type=Path, required=True)
    parser.add_argument("--chunks", type=int, default=16, help="chunks to score (16)")
    parser.add_argument("--size", type=int, default=512, help="tokens a chunk (512)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to continue each prompt by (64)")
    options = parser.parse_args()
    text = options.text.read_text()
    theirs = [peer_text(options.llama_simple, options, prompt) for prompt in PROMPTS]
    print(f"perplexity of {options.chunks} chunks of {options.size}; greedy texts of {options.tokens} tokens")
    print(f"{'llama.cpp':24} perplexity {peer_perplexity(options.llama_perplexity, options, text):.4f}")
    for activations in ("int8", "auto", "float"):
        llm = LLM(options.model, cpu_activations=activations, max_model_len=2048, max_num_seqs=8)
        value = octavo_perplexity(llm, text, options.chunks, options.size)
        params = SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True, skip_special_tokens=False)
        ours = [
            prompt + out.outputs[0].text
            for prompt, out in zip(PROMPTS, llm.generate(list(PROMPTS), params, use_tqdm=False), strict=True)
        ]
        llm.shutdown()
        print(f"{'octavo, ' + activations + ' activations':24} perplexity {value:.4f}")
        for prompt, mine, other in zip(PROMPTS, ours, theirs, strict=True):
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(mine, other, strict=False))) - len(
                prompt
            )
            whole = max(len(mine), len(other)) - len(prompt)
            print(
                f"    {prompt.splitlines()[0][:40]:42} "
                + ("equal" if mine == other else f"equal for {same} of {whole} characters")
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
