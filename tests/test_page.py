"""What the page shows: the view of the engine behind it, the routes, the page's own rules, and the page in a browser."""

from __future__ import annotations

import base64
import hashlib
import random
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from browser_support import CHROMIUM, Browser
from server_support import Running, running_server, wait_for
from support import scripted_llm

from octavo import LLM, SamplingParams
from octavo.engine.blocks import CACHED, FREE, SHARED, USED, BlockPool
from octavo.engine.request import Request
from octavo.engine.view import batch_view, block_holders, block_map, block_runs
from octavo.server.operators import page
from octavo.testing import tiny_model

END = 257
LONG = tuple(range(10, 50))
in_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed: the page is not tried in a browser")


def expand(runs: list[Any]) -> list[tuple[int, ...]]:
    return [tuple(counts) for length, *counts in runs for _ in range(length)]


def states(pool: BlockPool) -> list[int]:
    """Each block's state as the map tells it."""
    return [counts.index(1) for counts in expand(block_map(pool, pool.num_blocks).runs)]


def request_of(tokens: range | tuple[int, ...], name: str = "r") -> Request:
    return Request(name, list(tokens), SamplingParams())


# --- the map of blocks


def test_a_block_is_free_then_used_then_shared_then_cached() -> None:
    pool = BlockPool(6, 4)
    assert states(pool) == [FREE] * 6
    request = request_of(range(10))
    request.block_ids = pool.allocate(3)
    assert states(pool) == [USED, USED, USED, FREE, FREE, FREE]
    request.num_computed_tokens = 10
    pool.publish(request)
    pool.share([0])
    assert states(pool) == [SHARED, USED, USED, FREE, FREE, FREE]
    pool.free(request.block_ids)
    assert states(pool) == [USED, CACHED, FREE, FREE, FREE, FREE]
    pool.share([1])
    pool.free([0])
    assert states(pool) == [CACHED, USED, FREE, FREE, FREE, FREE]
    pool.reset_prefix_cache()
    assert states(pool) == [FREE, USED, FREE, FREE, FREE, FREE]
    assert block_map(pool, 6).runs == [(1, 1, 0, 0, 0), (1, 0, 0, 1, 0), (4, 1, 0, 0, 0)]


def test_a_cached_block_that_is_taken_for_other_use_is_used() -> None:
    pool = BlockPool(2, 4)
    request = request_of(range(8))
    request.block_ids, request.num_computed_tokens = pool.allocate(2), 8
    pool.publish(request)
    pool.free(request.block_ids)
    assert states(pool) == [CACHED, CACHED]
    pool.allocate(1)
    assert sorted(states(pool)) == [CACHED, USED]


@pytest.mark.parametrize(
    ("num_blocks", "max_cells"), [(1, 1), (7, 3), (100, 100), (1000, 64), (1_000_000, 2000), (5, 8192)]
)
def test_cells_hold_all_blocks_in_order(num_blocks: int, max_cells: int) -> None:
    pool = BlockPool(num_blocks, 16)
    dice = random.Random(num_blocks)
    pool.states[:] = dice.choices(range(4), k=num_blocks)
    view = block_map(pool, max_cells)
    cells = expand(view.runs)
    assert len(cells) <= max_cells
    assert len(cells) == -(-num_blocks // view.blocks_per_cell)
    for i in {0, len(cells) // 2, len(cells) - 1}:
        part = pool.states[i * view.blocks_per_cell : (i + 1) * view.blocks_per_cell]
        assert cells[i] == tuple(part.count(state) for state in range(4))
    assert [sum(column) for column in zip(*cells, strict=True)] == [pool.states.count(state) for state in range(4)]


def test_an_even_pool_of_a_million_blocks_is_one_run() -> None:
    assert len(block_map(BlockPool(1 << 20, 16), 1024).runs) == 1
    assert block_map(BlockPool(0, 16), 10).runs == []


def test_holders_and_runs_of_blocks() -> None:
    first, second = request_of(range(8), "first"), request_of(range(8), "second")
    first.block_ids, second.block_ids = [3, 4, 5, 9], [3, 4, 0]
    second.host_block_ids = [7]
    assert [(h.request_id, h.num_blocks) for h in block_holders([first, second], 4, 9)] == [("first", 3), ("second", 1)]
    assert [h.request_id for h in block_holders([first, second], 0, 0)] == ["second"]
    assert [h.request_id for h in block_holders([first, second], 7, 7, host=True)] == ["second"]
    assert block_runs([first, second]) == [(0, 1), (3, 3), (9, 1)]
    assert block_runs([first, second], host=True) == [(7, 1)]
    second.num_dropped_blocks = 2  # entries of dropped blocks belong to somebody else
    assert [h.request_id for h in block_holders([first, second], 3, 3)] == ["first"]


# --- the routes


class Brake:
    """Holds forwards up, as a long step does: while it is on, each waits for a permit."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._on = self._waiting = False
        self._permits = self._passed = 0

    def pass_by(self) -> None:
        with self._change:
            self._waiting = True
            self._change.notify_all()
            assert self._change.wait_for(lambda: self._permits or not self._on, 60)
            self._waiting = False
            self._permits = max(self._permits - 1, 0)
            self._passed += 1

    def turn(self, on: bool) -> None:
        with self._change:
            self._on = on
            self._change.notify_all()

    def wait(self, passed: int = 0) -> None:
        """Returns once a forward waits, behind so many."""
        with self._change:
            assert self._change.wait_for(lambda: self._waiting and self._passed >= passed, 60)

    def let_one_pass(self) -> None:
        """Lets the forward that waits go, and waits for the next."""
        self.wait()
        with self._change:
            self._permits, passed = 1, self._passed
            self._change.notify_all()
        self.wait(passed + 1)


@contextmanager
def braked_server(
    tmp_path: Path, scripts: dict[tuple[int, ...], list[int]], **settings: Any
) -> Iterator[tuple[Running, Brake]]:
    llm, brake = scripted_llm(tmp_path, scripts, **settings), Brake()
    execute = llm.engine.executor.execute

    def slow(step: Any) -> Any:
        brake.pass_by()
        return execute(step)

    llm.engine.executor.execute = slow
    with running_server(llm) as server:
        brake.turn(on=True)
        try:
            yield server, brake
        finally:
            brake.turn(on=False)


def start(server: Running, *bodies: dict[str, Any]) -> list[threading.Thread]:
    """Sends completions from threads of their own."""
    defaults = {"temperature": 0, "max_tokens": 30, "ignore_eos": True}
    threads = [threading.Thread(target=server.post, args=("/v1/completions", defaults | body)) for body in bodies]
    for thread in threads:
        thread.start()
    return threads


def test_stats_answer_during_a_long_step(tmp_path: Path) -> None:
    scripts = {LONG: [200] * 400, (1, 2, 3): [201] * 400}
    settings = {"max_num_seqs": 2, "max_num_batched_tokens": 256, "scheduling_policy": "priority"}
    with braked_server(tmp_path, scripts, **settings) as (server, brake):
        threads = start(server, {"prompt": list(LONG)})
        brake.wait()
        stats = server.get("/v1/octavo/stats").json()
        assert [(r["phase"], r["num_computed_tokens"]) for r in stats["batch"]["running"]] == [("prefill", 0)]
        threads += start(server, {"prompt": [1, 2, 3]})
        wait_for(lambda: server.thread._commands.qsize() == 1)
        threads += start(server, {"prompt": [1, 2, 3], "max_tokens": 5, "priority": 3})
        wait_for(lambda: server.thread._commands.qsize() == 2)
        brake.let_one_pass()
        brake.let_one_pass()
        stats = server.get("/v1/octavo/stats?cells=64").json()
        running, waiting = stats["batch"]["running"], stats["batch"]["waiting"]
        assert sorted(r["num_prompt_tokens"] for r in running) == [3, 40]
        assert {r["phase"] for r in running} == {"decode"}
        assert [(w["phase"], w["num_prompt_tokens"], w["priority"], w["num_blocks"]) for w in waiting] == [
            ("waiting", 3, 3, 0)
        ]
        assert (stats["batch"]["decode_tokens"], stats["batch"]["prefill_tokens"]) == (2, 0)
        assert stats["engine"]["max_num_seqs"] == 2
        cells = expand(stats["blocks"]["device"]["runs"])
        used = sum(r["num_blocks"] for r in running)
        assert (len(cells), sum(c[2] for c in cells), sum(c[0] + c[1] for c in cells)) == (64, used, 64 - used)
        name = next(r["request_id"] for r in running if r["num_prompt_tokens"] == 40)
        runs = server.get("/v1/octavo/blocks", params={"request_id": name}).json()["device"]
        block = runs[0][0]
        found = server.get(f"/v1/octavo/blocks?first={block}").json()
        assert found == {"first": block, "last": block, "holders": [{"request_id": name, "num_blocks": 1}]}
        brake.turn(on=False)
        for thread in threads:
            thread.join(60)
        stats = server.get("/v1/octavo/stats").json()
        assert stats["batch"]["running"] == stats["batch"]["waiting"] == []
        assert stats["requests"]["finished"] == {"stop": 0, "length": 3, "abort": 0, "error": 0}
        assert stats["tokens"] == {"prompt": 46, "generation": 65}
        assert stats["latency"]["ttft_p50"] > 0


def test_shared_and_swapped_blocks_are_told(tmp_path: Path) -> None:
    settings = {"num_blocks_override": 14, "max_num_seqs": 8, "swap_space": 0.01, "preemption_mode": "swap"}
    llm = LLM(str(tiny_model(tmp_path)), **settings)
    for i in range(4):
        prompt = list(range(30 * i, 30 * i + 20))
        llm.engine.add_request(f"r{i}", prompt, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    scheduler = llm.engine.scheduler
    while not scheduler.num_swapped:
        llm.engine.step()
    view = batch_view(scheduler, 10)
    swapped = [w for w in view.waiting if w.phase == "swapped"]
    assert swapped
    assert sum(c[2] + c[3] for c in expand(block_map(scheduler.swap.host, 1000).runs)) == sum(
        w.num_blocks for w in swapped
    )
    (block, _), *_ = block_runs(scheduler.snapshot(), host=True)
    assert [h.request_id for h in block_holders(scheduler.snapshot(), block, block, host=True)] == [
        swapped[0].request_id
    ]
    llm.shutdown()


def test_history_comes_once_for_those_who_say_what_they_have(tmp_path: Path) -> None:
    with running_server(scripted_llm(tmp_path, {LONG: [200] * 40})) as server:
        server.post("/v1/completions", {"prompt": list(LONG), "max_tokens": 9, "temperature": 0})
        wait_for(lambda: server.get("/v1/octavo/stats").json()["history"]["time"] != [])
        history = server.get("/v1/octavo/stats").json()["history"]
        assert sum(history["generation_tokens"]) == 9
        assert sum(history["prompt_tokens"]) == 40
        assert len({len(column) for column in history.values()}) == 1
        later = server.get("/v1/octavo/stats", params={"since": history["time"][-1]}).json()["history"]
        assert sum(later["generation_tokens"]) == 0


@pytest.mark.usefixtures("core_kernels")
def test_the_kernel_table_is_the_models(tmp_path: Path) -> None:
    with running_server(tiny_model(tmp_path)) as server:
        table = server.get("/v1/octavo/kernels").json()
        linears = server.llm.engine.model_info.linears
        assert [entry["layer"] for entry in table["linears"]] == [report.layer for report in linears]
        assert sum(row["num_layers"] for row in table["rows"]) == len(linears)
        assert sum(row["num_bytes"] for row in table["rows"]) == sum(report.num_bytes for report in linears)
        assert {row["kernel"] for row in table["rows"]} == {"dense"}
        assert table["attention"]
        assert (table["dtype"], table["quantization"]) == ("float32", None)


@pytest.mark.parametrize(
    "path",
    ["stats?cells=0", "stats?cells=9000000", "stats?rows=-1", "stats?since=x", "blocks?first=-1", "blocks?last=no"],
)
def test_v47_wrong_questions_are_refused_in_the_envelope(tmp_path: Path, path: str) -> None:
    with running_server(scripted_llm(tmp_path, {LONG: [1]})) as server:
        answer = server.get(f"/v1/octavo/{path}")
        assert answer.status_code in (400, 422)
        assert set(answer.json()["error"]) >= {"message", "type", "param", "code"}


def test_no_range_of_blocks_is_too_wide(tmp_path: Path) -> None:
    with running_server(scripted_llm(tmp_path, {LONG: [1]})) as server:
        answer = server.get(f"/v1/octavo/blocks?first=0&last={10**15}")
        assert answer.json()["holders"] == []
        assert server.get("/v1/octavo/blocks?request_id=nobody").json() == {"device": [], "host": []}


def test_s07_the_page_is_open_and_what_it_shows_is_not(tmp_path: Path) -> None:
    with running_server(scripted_llm(tmp_path, {LONG: [1]}), api_key="secret") as server:
        assert server.get("/").status_code == 200
        for path in ("/metrics", "/v1/octavo/stats", "/v1/octavo/blocks", "/v1/octavo/kernels"):
            assert server.get(path).status_code == 401, path
            assert server.get(path, headers={"Authorization": "Bearer secret"}).status_code == 200, path
        assert "secret" not in server.get("/").text


# --- the page's own rules

TEXT = page()[0].decode()


class Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.labelled: list[bool] = []
        self.feed(TEXT)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self.labelled.append("label" in self.open)
        if tag not in ("meta", "link", "input", "br", "path"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self.open:
            while self.open.pop() != tag:
                pass


def test_the_policy_lets_nothing_in_from_outside(tmp_path: Path) -> None:
    with running_server(scripted_llm(tmp_path, {LONG: [1]})) as server:
        answer = server.get("/")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert policy["img-src"] == "data:"
    for tag in ("script", "style"):
        (body,) = re.findall(rf"<{tag}>(.*?)</{tag}>", answer.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_the_page_names_no_other_place() -> None:
    addresses = re.findall(r"\w+://[^\s'\"%)]+|[\"'(]//\w+", TEXT)
    assert set(addresses) <= {"http://www.w3.org/2000/svg"}, "the name of SVG is fetched by nobody"
    for tag, attributes in Elements().found:
        assert "src" not in attributes, f"{tag} fetches {attributes['src']}"
        target = attributes.get("href") or ""
        assert target == "" or target[0] == "#" or target.startswith("data:"), f"{tag} leads to {target}"
        blocked = [name for name in attributes if name == "style" or name.startswith("on")]
        assert not blocked, f"{tag} has {blocked}, which the policy forbids"
    for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "@import"):
        assert sink not in TEXT


def test_everything_has_a_name_for_those_who_cannot_see_it() -> None:
    elements = Elements()
    ids = [attributes["id"] for _, attributes in elements.found if "id" in attributes]
    assert len(ids) == len(set(ids))
    referred = {attributes.get("for") for tag, attributes in elements.found if tag == "label"}
    for (tag, attributes), inside in zip(elements.found, elements.labelled, strict=True):
        if tag in ("input", "select", "textarea"):
            assert inside or attributes.get("id") in referred, f"{tag} {attributes} has no label"
        for name in ("aria-labelledby", "aria-describedby"):
            assert name not in attributes or attributes[name] in ids
        if attributes.get("role") == "img":
            assert "aria-label" in attributes
    assert '<html lang="en">' in TEXT
    assert re.search(r'<meta name="viewport" content="width=device-width', TEXT)


def test_the_script_uses_what_there_is() -> None:
    ids = {attributes["id"] for _, attributes in Elements().found if "id" in attributes}
    used = set(re.findall(r"""\$\("([\w-]+)"\)""", TEXT)) | set(
        re.findall(r"""(?:setText|share|figure)\("([\w-]+)",""", TEXT)
    )
    assert used - ids == set()


# --- in a browser


@contextmanager
def shown(server: Running, **window: Any) -> Iterator[Browser]:
    with Browser(**window) as browser:
        browser.open(server.url + "/")
        yield browser
        assert [c for c in browser.complaints() if "401" not in c] == []
        assert all(address.startswith((server.url, "data:")) for address in browser.requested())


@pytest.fixture
def stories(tmp_path: Path) -> Iterator[Running]:
    with running_server(tiny_model(tmp_path), engine={"num_blocks_override": 300, "max_num_seqs": 4}) as server:
        yield server


def write(browser: Browser, text: str) -> None:
    browser.run("document.getElementById('prompt').focus()")
    browser.type(text)
    browser.press("Enter", 13, "\r")


@in_browser
def test_the_page_shows_the_server(stories: Running) -> None:
    with shown(stories) as browser:
        browser.wait("document.getElementById('state').textContent", lambda text: text == "live")
        assert (
            browser.wait("document.getElementById('model').textContent.trim()") == Path(stories.llm.config.model).name
        )
        assert browser.wait("document.querySelectorAll('#kernels tbody tr').length") >= 4
        assert browser.run("document.getElementById('k-free').textContent") == "300"
        assert browser.run("document.querySelectorAll('#charts canvas').length") == 4
        label = browser.run("document.getElementById('device').getAttribute('aria-label')")
        assert label == "Map of KV blocks: 300 free, 0 cached, 0 used, 0 shared"
        assert "running 0" in browser.run("document.querySelectorAll('#charts canvas')[1].getAttribute('aria-label')")


@in_browser
def test_chat_by_keyboard_then_stop(stories: Running) -> None:
    with shown(stories) as browser:
        browser.wait("document.getElementById('model').textContent.trim()")
        browser.run("document.querySelector('[data-name=max_tokens]').value = 8")
        write(browser, "Hello")
        facts = browser.wait(
            "document.querySelector('.turn.model .facts')?.textContent", lambda text: text and "tokens" in text
        )
        assert re.match(r"[1-8] tokens", facts), facts
        assert browser.run("document.getElementById('stop').disabled")
        browser.run("document.querySelector('[data-name=max_tokens]').value = 200")
        write(browser, "Go on")
        browser.wait("!document.getElementById('stop').disabled")
        browser.press("Escape", 27)
        browser.wait("document.getElementById('stop').disabled")
        wait_for(stories.idle)


@in_browser
def test_refusals_are_shown_in_the_chat(stories: Running) -> None:
    with shown(stories) as browser:
        browser.wait("document.getElementById('model').textContent.trim()")
        browser.run("document.querySelector('[data-name=temperature]').value = -1")
        write(browser, "Hello")
        assert "temperature" in browser.wait("document.querySelector('.turn.model .fault')?.textContent")
        assert browser.run("document.getElementById('send').disabled") is False
        assert ["400" in complaint for complaint in browser.complaints()] == [True]  # the browser's own
        browser.events = [event for event in browser.events if event.get("method") != "Log.entryAdded"]


@in_browser
def test_pointing_at_a_block_tells_who_holds_it(tmp_path: Path) -> None:
    scripts = {LONG: [200] * 400}
    with braked_server(tmp_path, scripts, max_num_batched_tokens=256) as (server, brake), shown(server) as browser:
        (thread,) = start(server, {"prompt": list(LONG)})
        brake.let_one_pass()
        request = server.llm.engine.scheduler.snapshot()[0]
        browser.wait(
            "document.querySelector('#requests tbody tr')?.textContent",
            lambda text: text and request.request_id in text,
        )
        browser.run("document.getElementById('device').focus()")
        browser.press("ArrowRight", 39)
        for _ in range(request.block_ids[0]):
            browser.press("ArrowRight", 39)
        wanted = f"Block {request.block_ids[0]}: used. Held by {request.request_id}"
        assert (
            browser.wait("document.getElementById('kv-detail').textContent", lambda text: "Held by" in text) == wanted
        )
        box = browser.run("(({left, top}) => [left, top])(document.getElementById('device').getBoundingClientRect())")
        browser.point(box[0] + 5, box[1] + 5)
        browser.wait("document.querySelector('.tip').textContent", lambda text: text.startswith("Block 0: "))
        brake.turn(on=False)
        thread.join(60)


@in_browser
@pytest.mark.parametrize(("width", "dark"), [(375, False), (800, True), (1600, False)])
def test_nothing_sticks_out_at_any_width_or_theme(stories: Running, width: int, dark: bool) -> None:
    with shown(stories, width=width, height=800, dark=dark) as browser:
        browser.wait("document.querySelectorAll('#kernels tbody tr').length")
        browser.wait("document.getElementById('device').width")
        assert browser.run("document.documentElement.scrollWidth") <= width
        background = browser.run("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", background))) < 200) is dark


@in_browser
def test_contrast_is_enough_in_both_themes(stories: Running) -> None:
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for dark in (False, True):
        with shown(stories, dark=dark) as browser:
            names = ("paper", "card", "ink", "muted", "accent", "on-accent", "bad")
            script = "(name) => getComputedStyle(document.documentElement).getPropertyValue('--' + name).trim()"
            colours = {name: browser.wait(f"({script})('{name}')") for name in names}
            pairs = [(text, ground) for text in ("ink", "muted", "bad") for ground in ("paper", "card")]
            for text, ground in [*pairs, ("on-accent", "accent")]:
                light, dim = sorted([luminance(colours[text]), luminance(colours[ground])], reverse=True)
                assert (light + 0.05) / (dim + 0.05) >= 4.5, f"{text} on {ground}, dark={dark}"


@in_browser
def test_s07_a_protected_server_is_asked_with_the_key(tmp_path: Path) -> None:
    with running_server(tiny_model(tmp_path), api_key="secret") as server, shown(server) as browser:
        browser.wait("document.getElementById('key-dialog').open")
        assert browser.run("document.activeElement.id") == "key"
        browser.type("secret")
        browser.press("Enter", 13, "\r")
        browser.wait("document.getElementById('state').textContent", lambda text: text == "live")
        browser.wait("document.querySelectorAll('#kernels tbody tr').length")
        assert browser.run("JSON.stringify(localStorage)").find("secret") == -1
