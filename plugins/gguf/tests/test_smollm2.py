"""The demo model straight from its GGUF file, against transformers' own loader and tokenizer of such files."""

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from torch import Tensor

from octavo import LLM, LinearLayer, SamplingParams
from octavo_gguf.config import GGUFConfig
from octavo_gguf.header import read_header
from octavo_gguf.reader import GGUFReader

pytestmark = pytest.mark.slow

TEXTS = [
    "The capital of France is Paris, and 2024 was a leap year.",
    "  two spaces\n\n\tand a tab; don't, it's  spaced   oddly  12  ",
    "naïve café, Grüße, Ελληνικά, русский, עברית, العربية, हिन्दी, ไทย, 中文, 日本語, 한국어",
    "👩‍👩‍👧‍👦 🦊🇪🇺 e\u0301 \u200b\ufeff \u2028 ﬁ ½ №",
    "<|im_start|>user\nhello<|im_end|>\n<|endoftext|><repo_name>",
    "def f(x):\n    return x**2  # 3.14159 0x1F\n",
    "",
]
PROSE = [TEXTS[0], "The capital of France is", "Once upon a time, in a village by the sea,"]
CHAT = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def reader(demo_gguf: Path) -> GGUFReader:
    return GGUFReader(demo_gguf)


@pytest.fixture(scope="module")
def theirs(demo_gguf: Path) -> Any:
    """The model as transformers loads it from the same file, dequantised to fp32."""
    from transformers import LlamaForCausalLM
    from transformers.utils import logging as verbosity

    verbosity.disable_progress_bar()
    return LlamaForCausalLM.from_pretrained(demo_gguf.parent, gguf_file=demo_gguf.name, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def their_tokenizer(demo_gguf: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(demo_gguf.parent, gguf_file=demo_gguf.name)


@pytest.fixture(scope="module")
def llm(demo_gguf: Path) -> LLM:
    return LLM(str(demo_gguf), dtype="float32", num_blocks_override=32, max_model_len=256)


def test_the_header_is_what_the_packages_reader_reads(demo_gguf: Path) -> None:
    ours, package = read_header(demo_gguf), gguf.GGUFReader(demo_gguf)
    for key, field in package.fields.items():
        if not key.startswith("GGUF."):
            value = field.contents()
            assert ours.metadata[key] == (pytest.approx(value, rel=1e-7) if isinstance(value, float) else value)
    assert [(t.name, t.start, t.num_bytes) for t in ours.tensors] == [
        (t.name, t.data_offset, t.n_bytes) for t in package.tensors
    ]


def test_the_configuration_is_the_one_that_transformers_makes(reader: GGUFReader, theirs: Any) -> None:
    ours, other = reader.config(), theirs.config.to_dict()
    same = """hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim vocab_size
        max_position_embeddings rope_parameters hidden_act attention_bias mlp_bias tie_word_embeddings model_type
        bos_token_id eos_token_id"""
    assert {key: ours[key] for key in same.split()} == {key: other[key] for key in same.split()}
    assert ours["rms_norm_eps"] == 1e-5
    assert np.float32(ours["rms_norm_eps"]) == np.float32(other["rms_norm_eps"])


def test_every_weight_is_the_one_that_transformers_makes(reader: GGUFReader, theirs: Any) -> None:
    state, config = theirs.state_dict(), GGUFConfig()
    for name, info in reader.tensors.items():
        module, _, suffix = name.rpartition(".")
        expected, data = state[f"{module}.weight"], reader.read(name)
        if suffix != "weight":
            layer = LinearLayer(module, expected.shape[1], expected.shape[0])
            assert config.spec_for(layer, {suffix: info}) is not None
            data = config.canonicalise(layer, {suffix: data}).dequantize()
        torch.testing.assert_close(data, expected, rtol=0, atol=5e-7)  # two units of the largest minima
    stored = {f"{name.rpartition('.')[0]}.weight" for name in reader.tensors}
    assert set(state) - stored == {"lm_head.weight"}  # the embedding


def test_logits_are_those_of_transformers(
    llm: LLM, theirs: Any, their_tokenizer: Any, all_logits: Callable[..., Tensor]
) -> None:
    exact = copy.deepcopy(theirs).double()
    for text in PROSE:
        ids = their_tokenizer(text, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            expected = exact(ids).logits[0]
        # their own fp32 logits are 4e-6 to 6e-6 of the largest logit away from these
        assert (all_logits(llm, ids[0].tolist()) - expected).abs().max() < 1e-5 * expected.abs().max()


def test_greedy_tokens_are_those_of_transformers(llm: LLM, theirs: Any, their_tokenizer: Any) -> None:
    for prompt in PROSE[1:]:
        inputs = their_tokenizer(prompt, return_tensors="pt")
        expected = theirs.generate(**inputs, do_sample=False, max_new_tokens=8)[0, inputs["input_ids"].shape[1] :]
        (output,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
        assert output.outputs[0].token_ids == expected.tolist()


def test_the_chat_answer(llm: LLM) -> None:
    (output,) = llm.chat(CHAT, SamplingParams(temperature=0, max_tokens=32))
    assert output.outputs[0].text == "The capital of France is Paris."
    assert output.outputs[0].finish_reason == "stop"


def test_the_tokenizer_is_the_one_that_transformers_makes(
    reader: GGUFReader, their_tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        ours = reader.tokenizer()
    assert caplog.text == ""
    pieces = ours.backend_tokenizer.pre_tokenizer.pre_tokenize_str("in 2024")
    assert [text for text, _ in pieces] == ["in", "Ġ", "2", "0", "2", "4"]
    their_tokenizer = copy.deepcopy(their_tokenizer)
    cut = their_tokenizer.backend_tokenizer.pre_tokenizer
    digits = pre_tokenizers.Digits(
        individual_digits=True
    )  # what the model was trained with and transformers does not know
    their_tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, cut])
    for text in TEXTS:
        for add in (False, True):
            assert ours.encode(text, add_special_tokens=add) == their_tokenizer.encode(text, add_special_tokens=add)
        assert ours.decode(ours.encode(text)) == their_tokenizer.decode(their_tokenizer.encode(text))
    assert ours.encode("<|im_end|>") == [ours.eos_token_id] == [2]
    assert ours.special_tokens_map == their_tokenizer.special_tokens_map
    assert ours.get_added_vocab() == their_tokenizer.get_added_vocab()
    for generate in (False, True):
        options = {"tokenize": False, "add_generation_prompt": generate}
        assert ours.apply_chat_template(CHAT, **options) == their_tokenizer.apply_chat_template(CHAT, **options)


def test_a_long_text_is_cut_as_transformers_cuts_it(reader: GGUFReader, their_tokenizer: Any, shared: Path) -> None:
    text = (shared / "text" / "wikitext2-test.txt").read_text()[:200_000]
    assert reader.tokenizer().encode(text) == their_tokenizer.encode(text)
