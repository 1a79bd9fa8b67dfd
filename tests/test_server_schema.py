"""Requests made from our own OpenAPI schema, right and wrong ones, find no 500; and clients of other projects work."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_support import Running, running_server

from octavo.testing import tiny_model


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tiny_model(tmp_path_factory.mktemp("schema") / "tiny", max_position_embeddings=64)
    with running_server(folder) as running:
        yield running


def test_the_schema_lists_what_is_served(server: Running) -> None:
    schema = server.get("/openapi.json").json()
    assert {"/v1/models", "/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/health"} <= set(
        schema["paths"]
    )
    fields = schema["components"]["schemas"]["ChatRequest"]["properties"]
    assert {"messages", "n", "stop", "seed", "logprobs", "top_logprobs", "logit_bias", "min_p", "cache_salt"} <= set(
        fields
    )


def schemathesis(server: Running, cases: int, phases: str) -> int:
    """Runs the tool on every endpoint, so many random cases each; returns how many cases there were, all without a 5xx."""
    pytest.importorskip("schemathesis")
    schema = server.get("/openapi.json").json()
    for kind in schema["components"]["schemas"].values():
        if "model" in kind.get("properties", {}):  # else most random requests end at a model that is not there
            kind["properties"]["model"] = {"enum": ["tiny"]}
    folder = Path(server.llm.config.model).parent
    (folder / "openapi.json").write_text(json.dumps(schema))
    script = "import sys; from schemathesis.cli import schemathesis; sys.argv[0] = 'st'; schemathesis()"
    command = [sys.executable, "-c", script, "run", "openapi.json", "--url", server.url]
    command += ["--checks", "not_a_server_error", "--max-examples", str(cases), "--phases", phases]
    command += ["--seed", "1", "--request-timeout", "60", "--suppress-health-check", "all"]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "NO_COLOR": "1"}, cwd=folder)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-3000:]
    found = re.search(r"(\d+) generated, (\d+) passed", run.stdout)
    assert found is not None, run.stdout[-3000:]
    return int(found[1])


def test_no_server_error_in_some_cases(server: Running) -> None:
    assert schemathesis(server, 5, "fuzzing") > 50


@pytest.mark.slow
def test_no_server_error_in_two_thousand_cases(server: Running) -> None:
    assert schemathesis(server, 60, "examples,coverage,fuzzing") >= 2000


def test_langchain_holds_a_conversation(server: Running) -> None:
    langchain = pytest.importorskip("langchain_openai")
    model = langchain.ChatOpenAI(
        base_url=f"{server.url}/v1", api_key="none", model="tiny", temperature=0, max_tokens=4, max_retries=0
    )
    first = model.invoke([("human", "hi")])
    assert first.usage_metadata["output_tokens"] <= 4
    assert first.response_metadata["finish_reason"] in ("length", "stop")
    streamed = list(model.stream([("system", "x"), ("human", "hi")]))
    assert "".join(piece.content for piece in streamed) == model.invoke([("system", "x"), ("human", "hi")]).content


def test_litellm_completes(server: Running) -> None:
    pytest.importorskip("litellm")
    script = (
        "import litellm; r = litellm.completion(model='openai/tiny', api_base=URL, api_key='none', max_tokens=4, "
        "messages=[{'role': 'user', 'content': 'hi'}]); print('tokens', r.usage.completion_tokens)"
    ).replace("URL", repr(f"{server.url}/v1"))
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=environment)
    assert "tokens" in run.stdout, run.stderr[-2000:]
