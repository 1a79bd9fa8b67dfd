"""Bad folders, settings and requests: each is one error of the right class that names what is wrong; nothing else suffers."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import registry

from octavo import LLM, CheckpointError, ConfigError, EngineConfig, RequestError, SamplingParams
from octavo.cli import main
from octavo.testing import tiny_model


def load(folder: Path | str, **settings: object) -> LLM:
    return LLM(str(folder), registry=registry(), num_blocks_override=32, **settings)


# --- V46 and its kind: folders


def test_v46_path_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such model folder"):
        load(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="local folders only"):
        load("some-org/some-model")


def test_v46_file_instead_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file.txt").write_text("x")
    with pytest.raises(ConfigError, match="is a file"):
        load(tmp_path / "file.txt")


def test_v46_folder_without_anything(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no weights and no config\.json"):
        load(tmp_path)


def test_v46_folder_without_config(tmp_path: Path) -> None:
    (tiny_model(tmp_path) / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load(tmp_path)


def test_v46_trailing_slash(tmp_path: Path) -> None:
    load(f"{tiny_model(tmp_path)}/")


def test_v46_no_network_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("a connection was attempted")

    folder = tiny_model(tmp_path)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    load(folder).generate("hi", SamplingParams(max_tokens=2), use_tqdm=False)
    with pytest.raises(ConfigError):
        load(tmp_path / "nothing")


def test_config_that_is_not_json(tmp_path: Path) -> None:
    (tiny_model(tmp_path) / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="JSON"):
        load(tmp_path)


def test_unsupported_architecture_names_known_ones_and_the_hook(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path)
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["GPT9ForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    text = str(caught.value)
    assert all(word in text for word in ("GPT9ForCausalLM", "LlamaForCausalLM", "octavo_architectures"))


@pytest.mark.parametrize("keep", [0, 4, 100, -10])
def test_truncated_safetensors(tmp_path: Path, keep: int) -> None:
    file = tiny_model(tmp_path) / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load(tmp_path)


def test_q26_missing_shard(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, shards=3)
    assert load(folder).generate("hi", SamplingParams(max_tokens=1), use_tqdm=False)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model-00002-of-00003"):
        load(folder)


def test_q26_index_that_names_a_tensor_its_file_lacks(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, shards=2)
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["model.ghost.weight"] = "model-00001-of-00002.safetensors"
    file.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model\.ghost\.weight"):
        load(folder)


def test_index_that_points_outside(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, shards=2)
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["model.norm.weight"] = "../secret.safetensors"
    file.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="outside"):
        load(folder)


def test_q26_bin_checkpoints_equal_safetensors(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path)
    expected = load(folder).generate("hi", SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    found = load(folder).generate("hi", SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    assert found[0].outputs[0].token_ids == expected[0].outputs[0].token_ids


def test_q26_bin_with_code_in_it_is_refused(tmp_path: Path) -> None:
    import pickle

    class Bomb:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (tmp_path / "exploded",))

    folder = tiny_model(tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"x": Bomb()}))
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        load(folder)
    assert not (tmp_path / "exploded").exists()


def test_tensor_of_the_wrong_shape(tmp_path: Path) -> None:
    file = tiny_model(tmp_path) / "model.safetensors"
    stored = load_file(file)
    stored["model.layers.1.mlp.up_proj.weight"] = torch.zeros(128, 63)
    save_file(stored, file)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    assert all(part in str(caught.value) for part in ("model.layers.1.mlp.up_proj.weight", "(128, 64)", "(128, 63)"))


@pytest.mark.parametrize("kind", ["tokenizer.json missing", "tokenizer.json damaged"])
def test_tokenizer_problems(tmp_path: Path, kind: str) -> None:
    file = tiny_model(tmp_path) / "tokenizer.json"
    file.write_text("{}") if "damaged" in kind else file.unlink()
    with pytest.raises(CheckpointError, match="tokenizer"):
        load(tmp_path)


# --- settings


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_num_seqs": 0}, ["max_num_seqs"]),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, ["max_num_seqs", "max_num_batched_tokens", "64", "32"]),
        ({"dtype": "int4"}, ["dtype", "int4"]),
        ({"no_such_setting": 1}, ["no_such_setting"]),
        ({"max_model_len": 4096}, ["4096", "512"]),
        ({"kv_cache_dtype": "fp3"}, ["fp3", "auto"]),
        ({"attention_backend": "nope"}, ["nope", "reference"]),
        ({"distributed_executor_backend": "nope"}, ["nope", "uni"]),
        ({"tensor_parallel_size": 2}, ["2"]),
        ({"linear_kernels": "*=nope"}, ["nope", "reference", "dense"]),
        ({"linear_kernels": "nope"}, ["PATTERN=NAME"]),
        ({"disable_plugins": "nope"}, ["nope"]),
    ],
)
def test_settings_that_cannot_be_honoured(tmp_path: Path, settings: dict[str, object], words: list[str]) -> None:
    folder = tiny_model(tmp_path)
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the class is checked below
        LLM(str(folder), **settings)
    assert type(caught.value).__module__ == "octavo.errors", repr(caught.value)
    assert all(word in str(caught.value) for word in words)


def test_settings_come_from_four_places(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("model: from-file\nblock-size: 4\nmax_num_seqs: 1k\nseed: 1\n")
    environ = {"OCTAVO_BLOCK_SIZE": "8", "OCTAVO_SEED": "2", "OCTAVO_MAX_NUM_BATCHED_TOKENS": "2K"}
    config = EngineConfig.load({"seed": 3}, file, environ)
    assert (config.model, config.block_size, config.max_num_seqs, config.seed) == ("from-file", 8, 1000, 3)
    assert config.max_num_batched_tokens == 2048
    assert config.enable_prefix_caching, "the default"
    with pytest.raises(ConfigError, match="OCTAVO_BLOCK_SIZE"):
        EngineConfig.load({}, file, {"OCTAVO_BLOCK_SIZE": "many"})
    file.write_text("- not\n- settings\n")
    with pytest.raises(ConfigError, match="expected settings"):
        EngineConfig.load({}, file, {})


def test_errors_of_several_settings_name_all_origins(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("max-num-seqs: 64\nseed: 3\n")
    environ = {"OCTAVO_MAX_NUM_BATCHED_TOKENS": "32"}
    with pytest.raises(ConfigError) as caught:
        EngineConfig.load({"model": "m"}, file, environ)
    assert str(caught.value).splitlines()[1:] == [
        f"  max_num_seqs comes from file {file}",
        "  max_num_batched_tokens comes from environment variable OCTAVO_MAX_NUM_BATCHED_TOKENS",
    ]
    with pytest.raises(ConfigError) as caught:
        EngineConfig.load({"model": "m", "dtype": "'seed'", "no_such": 1}, file, {})
    assert str(caught.value).splitlines()[1:] == ["  dtype comes from argument", "  no_such comes from argument"]


def test_unknown_variables_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    environ = {"OCTAVO_BLOKSIZE": "8", "OCTAVO_DEMO_MODEL": "x", "OCTAVO_CPU_ISA": "y", "OTHER": "z"}
    assert EngineConfig.load({"model": "m"}, environ=environ).block_size == 16
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "OCTAVO_BLOKSIZE" in warning
    assert "OCTAVO_BLOCK_SIZE" in warning


@pytest.mark.parametrize(
    ("text", "number"), [("8k", 8000), ("8K", 8192), ("1M", 1 << 20), ("4GiB", 4 << 30), ("2.5k", 2500), ("17", 17)]
)
def test_human_numbers(text: str, number: int) -> None:
    assert EngineConfig(model="m", kv_cache_memory_bytes=text).kv_cache_memory_bytes == number


# --- requests

GOOD = "good"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return load(tiny_model(tmp_path_factory.mktemp("model")))


BAD_PROMPTS = {
    "empty text": ("", "empty"),
    "empty ids": ({"prompt_token_ids": []}, "empty"),
    "over the model's limit": ({"prompt_token_ids": [1] * 600}, "600.*512"),
    "id beyond the vocabulary": ({"prompt_token_ids": [1, 288]}, "288.*outside"),
    "negative id": ({"prompt_token_ids": [-1]}, "-1.*outside"),
    "huge id": ({"prompt_token_ids": [2**63]}, "outside"),
    "wrong dict": ({"text": "x"}, "prompt_token_ids"),
    "not text, not ids": ([1.5], "token ids"),
    "nothing": (None, "token ids"),
    "a number": (5, "token ids"),
    "bytes": (b"ab", "token ids"),
    "a list of nothing": ([None], "token ids"),
    "ids that are text": ({"prompt_token_ids": ["a"]}, "token ids"),
    "one text as ids": ({"prompt_token_ids": "abc"}, "token ids"),
    "no ids": ({"prompt_token_ids": None}, "token ids"),
    "ids that are fractions": ({"prompt_token_ids": [1.5, 2]}, "token ids"),
    "text that is a number": ({"prompt": 5}, "token ids"),
    "text that is nothing": ({"prompt": None}, "prompt_token_ids"),
    "half a surrogate pair": ("\ud83c", "cannot be tokenized"),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_bad_prompts(llm: LLM, name: str) -> None:
    prompt, words = BAD_PROMPTS[name]
    for prompts in ([GOOD, prompt], prompt):
        with pytest.raises(RequestError, match=words) as caught:
            llm.generate(prompts, SamplingParams(max_tokens=2), use_tqdm=False)
        assert caught.value.param == "prompt"
        assert not llm.engine.has_unfinished
    assert llm.generate(GOOD, SamplingParams(max_tokens=2), use_tqdm=False)[0].finished


BAD_PARAMS = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": 3, "temperature": 0}, "greedy"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"min_tokens": 5, "max_tokens": 3}, "min_tokens"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"stop": [""]}, "stop"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"top_logrpobs": 3}, "top_logrpobs"),
    ({"logit_bias": {1: float("inf")}}, "logit_bias"),
]


@pytest.mark.parametrize(("params", "word"), BAD_PARAMS)
def test_bad_sampling_parameters(params: dict[str, object], word: str) -> None:
    with pytest.raises(RequestError, match=word):
        SamplingParams(**params)


@pytest.mark.parametrize(
    ("params", "word"),
    [
        ({"logit_bias": {288: 1.0}}, "logit_bias.*288"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias.*-1"),
        ({"allowed_token_ids": [2**31]}, "allowed_token_ids"),
        ({"stop_token_ids": [288]}, "stop_token_ids"),
        ({"logprobs": 21}, "max_logprobs"),
        ({"prompt_logprobs": -1}, "max_logprobs"),
        ({"n": 129, "temperature": 1.0}, "129"),
        ({"n": 10**6, "temperature": 1.0}, "max_num_sequences_per_request"),
    ],
)
def test_parameters_that_this_model_cannot_serve(llm: LLM, params: dict[str, object], word: str) -> None:
    with pytest.raises(RequestError, match=word):
        llm.generate(GOOD, SamplingParams(**params), use_tqdm=False)
    assert not llm.engine.has_unfinished


@pytest.mark.parametrize("params", [{"max_tokens": 2}, 5, "greedy", [{}], [None], [SamplingParams(), 1]])
def test_sampling_parameters_that_are_none(llm: LLM, params: object) -> None:
    with pytest.raises(RequestError, match="SamplingParams") as caught:
        llm.generate([GOOD] * len(params) if isinstance(params, list) else GOOD, params, use_tqdm=False)
    assert caught.value.param == "sampling_params"
    assert not llm.engine.has_unfinished


def test_lists_of_different_length(llm: LLM) -> None:
    with pytest.raises(RequestError, match="2 prompts but 1"):
        llm.generate([GOOD, GOOD], [SamplingParams()])


def test_chat_without_template(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    llm = load(folder)
    with pytest.raises(RequestError, match="chat template"):
        llm.chat([{"role": "user", "content": "hi"}])
    assert llm.generate(GOOD, SamplingParams(max_tokens=2), use_tqdm=False)


# --- the command line: one screen, exit code 2, no traceback


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect", "/no/such/folder"],
        ["generate", "/no/such/folder", "--prompt", "x"],
        ["inspect"],
        ["inspect", "MODEL", "-q", "awq"],
        ["inspect", "MODEL", "--max-num-seqs", "0"],
        ["generate", "MODEL", "--prompt", "x", "--temperature", "-1"],
        ["generate", "MODEL", "--file", "/no/such/file"],
        ["generate", "MODEL", "--file", "LATIN1"],
        ["generate", "MODEL", "--prompt", "\udcff"],
        ["generate", "MODEL", "--prompt", "x", "--config", "LATIN1"],
        ["inspect", "x" * 5000],
        ["generate", "x/" * 2500, "--prompt", "x"],
        ["check-plugin", "nothing"],
        ["plugins", "--disable-plugins", "nothing"],
    ],
)
def test_command_line_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    places = {"MODEL": str(tiny_model(tmp_path)), "LATIN1": str(tmp_path / "latin1")}
    (tmp_path / "latin1").write_bytes(b"seed: 1 # caf\xe9\n")
    assert main([places.get(a, a) for a in arguments]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("octavo: ")
    assert "Traceback" not in shown.err
    assert len(shown.err.splitlines()) < 24


def test_stdin_that_is_not_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8"))
    assert main(["generate", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("octavo: stdin: cannot read prompts: ")


def test_bugs_are_told_apart(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.front.commands.plugins", lambda *_, **__: {}["lost"])
    assert main(["plugins"]) == 1
    shown = capsys.readouterr().err
    assert shown == "octavo: internal error: KeyError: 'lost'; run with --debug for the traceback\n"
    with pytest.raises(KeyError):
        main(["plugins", "--debug"])


def test_unknown_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["inspect", "m", "--no-such-flag"])
    assert caught.value.code == 2
    assert "--no-such-flag" in capsys.readouterr().err
