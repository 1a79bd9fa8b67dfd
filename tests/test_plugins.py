"""Discovery: what a plugin may bring, how each kind of failure is told, and that no failure touches another plugin.

Plugins here are real distributions: a module and a .dist-info folder on sys.path. See cases V44 and V45: a plugin that fails
or is shadowed must never be skipped without a word.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from structured_support import ToyCompiler, ToyParser

from octavo import (
    Command,
    DecoderConfig,
    NoKernelError,
    Platform,
    PluginError,
    QuantConfig,
    Registry,
    discover,
    hookimpl,
)
from octavo.attention.kv_format import PlainKV
from octavo.attention.reference import ReferenceAttention
from octavo.engine.in_process import InProcessExecutor
from octavo.engine.step_graph import EagerStep
from octavo.hookspecs import API_VERSION
from octavo.model.architectures import ARCHITECTURES
from octavo.model.checkpoint import SafetensorsReader
from octavo.model.ops import TorchOps
from octavo.plugins import installed_entry_points
from octavo.quant.linear import DenseMethod, LinearRequest, ReferenceMethod, select_linear
from octavo.quant.quantizer import RoundToNearest
from octavo.quant.weight import FLOAT, LinearLayer, QuantizedWeight, WeightSpec

PLATFORM = Platform("cpu", "x86_64", frozenset(), 1)
REQUEST = LinearRequest("layer", FLOAT, 8, 8, False, torch.float32, PLATFORM)
HOOKS = 14
llama = ARCHITECTURES["LlamaForCausalLM"]

GOOD = """
from octavo import hookimpl

octavo_api = (1, 0)

@hookimpl
def octavo_linear_methods(platform):
    from octavo.quant.linear import DenseMethod

    class Good(DenseMethod):
        name = "good"

    return [Good]
"""


class Site:
    """A folder on sys.path into which a test installs distributions; only they, and core, are discovered."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.names = folder, ["core"]

    def install(
        self,
        name: str,
        content: str | object = GOOD,
        *,
        distribution: str = "",
        version: str = "1.0",
        folder: Path | None = None,
    ) -> None:
        """Installs a plugin: the source of a module, or an object that the entry point is to yield."""
        folder = folder or self.folder
        distribution = distribution or f"dist-{name}"
        module = f"toy_{distribution}_{name}".replace("-", "_")
        if isinstance(content, str):
            (folder / f"{module}.py").write_text(content)
            target = module
        else:
            sys.modules[module] = ModuleType(module)
            sys.modules[module].plugin = content  # type: ignore[attr-defined]
            target = f"{module}:plugin"
        self.register(name, target, distribution, version, folder)

    def register(self, name: str, target: str, distribution: str, version: str, folder: Path | None = None) -> Path:
        """Writes the metadata of a distribution with one entry point; returns their folder."""
        info = (folder or self.folder) / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[octavo]\n{name} = {target}\n")
        self.names.append(name)
        return info

    def discover(self, **options: Any) -> Registry:
        points = [point for point in installed_entry_points() if point.name in self.names]
        return discover(PLATFORM, entry_points=points, **options)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.syspath_prepend(tmp_path)
    yield Site(tmp_path)
    for module in [name for name in sys.modules if name.startswith("toy_")]:
        del sys.modules[module]


def kernels(registry: Registry) -> set[str]:
    return {method.name for method in registry.linear_methods}


def plugin(registry: Registry, name: str) -> Any:
    return next(p for p in registry.plugins if p.name == name)


# --- what a plugin may bring


class ToyMethod(DenseMethod):
    name = "toy"


class ToyFormat(QuantConfig):
    name = "toy"
    method_names = ("toy-by-another-name",)
    suffixes = ("qweight",)

    def spec_for(self, layer: LinearLayer, stored: Mapping[str, Any]) -> WeightSpec | None:
        return None

    def canonicalise(self, layer: LinearLayer, tensors: Mapping[str, torch.Tensor]) -> QuantizedWeight:
        raise NotImplementedError

    def serialise(self, layer: LinearLayer, weight: QuantizedWeight) -> dict[str, torch.Tensor]:
        raise NotImplementedError


class ToyAttention(ReferenceAttention):
    name = "toy"


class ToyKV(PlainKV):
    name = "toy"
    other_names = ("toy8",)


class ToyOps(TorchOps):
    name = "toy"


class ToyStep(EagerStep):
    name = "toy"


class ToyReader(SafetensorsReader):
    name = "toy"


class ToyExecutor(InProcessExecutor):
    name = "toy"


class ToyQuantizer(RoundToNearest):
    name = "toy"


class ToyCommand(Command):
    name = "toy"
    help = "Say what it was told."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("word", help="What to say.")

    def run(self, options: argparse.Namespace) -> int:
        print(f"toy says {options.word}")
        return 3


class Everything:
    """A plugin that fills every hook and counts the calls."""

    octavo_api = API_VERSION

    def __init__(self) -> None:
        self.calls: list[str] = []

    @hookimpl
    def octavo_checkpoint_readers(self) -> Sequence[type]:
        self.calls.append("readers")
        return [ToyReader]

    @hookimpl
    def octavo_architectures(self) -> Mapping[str, Any]:
        self.calls.append("architectures")
        return {"ToyForCausalLM": llama}

    @hookimpl
    def octavo_quant_configs(self) -> Sequence[type]:
        self.calls.append("formats")
        return [ToyFormat]

    @hookimpl
    def octavo_linear_methods(self, platform: Platform) -> Sequence[type]:
        self.calls.append(f"linear on {platform.device}")
        return (ToyMethod,)

    @hookimpl
    def octavo_select_linear(self, request: LinearRequest, candidates: Sequence[type]) -> type:
        self.calls.append(f"select for {request.layer}")
        return candidates[-1]

    @hookimpl
    def octavo_attention_backends(self, platform: Platform) -> Sequence[type]:
        self.calls.append(f"attention on {platform.device}")
        return [ToyAttention]

    @hookimpl
    def octavo_kv_formats(self, platform: Platform) -> Sequence[type]:
        self.calls.append(f"kv on {platform.device}")
        return [ToyKV]

    @hookimpl
    def octavo_fused_ops(self) -> Sequence[type]:  # a hook may leave out arguments that it does not need
        self.calls.append("ops")
        return [ToyOps]

    @hookimpl
    def octavo_step_graphs(self, platform: Platform) -> Sequence[type]:
        self.calls.append(f"graphs on {platform.device}")
        return [ToyStep]

    @hookimpl
    def octavo_grammar_compilers(self) -> Sequence[type]:
        self.calls.append("grammars")
        return [ToyCompiler]

    @hookimpl
    def octavo_tool_parsers(self) -> Sequence[type]:
        self.calls.append("tools")
        return [ToyParser]

    @hookimpl
    def octavo_executors(self) -> Sequence[type]:
        self.calls.append("executors")
        return [ToyExecutor]

    @hookimpl
    def octavo_quantizers(self) -> Sequence[type]:
        self.calls.append("quantizers")
        return [ToyQuantizer]

    @hookimpl
    def octavo_commands(self) -> Sequence[type]:
        self.calls.append("commands")
        return [ToyCommand]


def test_every_hook_reaches_the_registry(site: Site) -> None:
    toy = Everything()
    site.install("toy", toy, version="2.3")
    registry = site.discover()
    found = plugin(registry, "toy")
    assert (found.distribution, found.version, found.state) == ("dist-toy", "2.3", "loaded")
    assert str(found) == "toy (dist-toy 2.3)"
    assert len(found.hooks) == HOOKS
    assert ToyReader in registry.checkpoint_readers
    assert registry.architectures["ToyForCausalLM"] is llama
    assert registry.quant_configs["toy"] is registry.quant_configs["toy-by-another-name"] is ToyFormat
    assert ToyMethod in registry.linear_methods
    assert ToyAttention in registry.attention_backends
    assert registry.kv_formats["toy"] is registry.kv_formats["toy8"] is ToyKV
    assert ToyOps in registry.fused_ops
    assert ToyStep in registry.step_graphs
    assert registry.grammar_compilers["toy"] is ToyCompiler
    assert registry.tool_parsers["toy"] is ToyParser
    assert registry.executors["toy"] is ToyExecutor
    assert registry.quantizers["toy"] is ToyQuantizer
    assert registry.commands["toy"] is ToyCommand
    assert registry.select_linear is not None
    assert sorted(toy.calls) == sorted(set(toy.calls)), "a hook was called twice"
    assert len(toy.calls) == HOOKS - 1, "octavo_select_linear is called for a layer, not before"
    assert registry.contributed_by("toy")["octavo_kv_formats"] == [ToyKV]


def test_core_comes_first_and_through_the_same_door(site: Site) -> None:
    site.install("aaa")
    registry = site.discover(strict=True)
    assert [p.name for p in registry.plugins] == ["core", "aaa"]
    assert {"dense", "reference", "good"} <= kernels(registry)
    assert registry.select_linear is None


def test_an_entry_point_may_name_a_class(site: Site) -> None:
    site.install("toy", Everything)
    assert plugin(site.discover(), "toy").state == "loaded"


def test_the_previous_api_is_accepted(site: Site) -> None:
    site.install("old", GOOD.replace("(1, 0)", f"({API_VERSION[0] - 1}, 7)"))
    assert plugin(site.discover(), "old").state == "loaded"


def test_the_registry_cannot_be_changed(site: Site) -> None:
    registry = site.discover()
    with pytest.raises(TypeError):
        registry.quant_configs["mine"] = ToyFormat  # type: ignore[index]
    with pytest.raises(AttributeError):
        registry.linear_methods = ()  # type: ignore[misc]


# --- octavo_select_linear


class Selector:
    octavo_api = API_VERSION
    choice: Any = None

    @hookimpl
    def octavo_select_linear(self, request: LinearRequest, candidates: Sequence[type]) -> Any:
        if isinstance(self.choice, Exception):
            raise self.choice
        return self.choice


def test_a_selector_replaces_ranks(site: Site) -> None:
    selector = Selector()
    site.install("tuner", selector)
    registry = site.discover()
    methods = [DenseMethod, ReferenceMethod]
    assert select_linear(REQUEST, methods, hook=registry.select_linear).method is DenseMethod
    selector.choice = ReferenceMethod
    assert select_linear(REQUEST, methods, hook=registry.select_linear).method is ReferenceMethod


def test_a_selector_may_pick_candidates_only(site: Site) -> None:
    selector = Selector()
    selector.choice = ToyMethod
    site.install("tuner", selector)
    with pytest.raises(PluginError, match="not a candidate"):
        select_linear(REQUEST, [DenseMethod, ReferenceMethod], hook=site.discover().select_linear)


def test_a_selector_that_raises_is_named(site: Site) -> None:
    selector = Selector()
    selector.choice = ZeroDivisionError("no timings")
    site.install("tuner", selector)
    with pytest.raises(PluginError, match=r"tuner \(dist-tuner 1.0\), failed on layer: ZeroDivisionError: no timings"):
        select_linear(REQUEST, [DenseMethod], hook=site.discover().select_linear)


def test_a_failed_plugin_leaves_no_selector_behind(site: Site) -> None:
    class Broken(Selector):
        choice = ToyMethod

        @hookimpl
        def octavo_linear_methods(self, platform: Platform) -> Any:
            raise RuntimeError

    site.install("broken", Broken)
    site.install("tuner", Selector)
    registry = site.discover()
    assert plugin(registry, "broken").state == "failed"
    assert select_linear(REQUEST, [DenseMethod], hook=registry.select_linear).method is DenseMethod


# --- failures: each is told, none touches the others


def hook(name: str, body: str, arguments: str = "") -> str:
    return f"from octavo import hookimpl\noctavo_api = (1, 0)\n@hookimpl\ndef {name}({arguments}):\n    {body}\n"


def linear(body: str) -> str:
    return hook("octavo_linear_methods", f"from octavo.quant.linear import DenseMethod, LinearMethod\n    {body}")


BROKEN = {
    "missing dependency": ("import toy_nowhere", "ModuleNotFoundError: No module named 'toy_nowhere'"),
    "syntax error": ("def", "SyntaxError"),
    "exits at import": ("raise SystemExit('no GPU')", "SystemExit: no GPU"),
    "raises in a hook": (hook("octavo_executors", "1 / 0"), "ZeroDivisionError: division by zero"),
    "exits in a hook": (hook("octavo_executors", "raise SystemExit(3)"), "SystemExit: 3"),
    "not an object with hooks": (5, "does not declare octavo_api; add `octavo_api = (1, 0)` to 5"),
    "none": (None, "does not declare octavo_api"),
    "a class that cannot be made": (type("Needy", (), {"__init__": lambda self, it: None}), "TypeError"),
    "no octavo_api": (GOOD.replace("octavo_api", "api"), "does not declare octavo_api; add `octavo_api = (1, 0)`"),
    "api as text": (GOOD.replace("(1, 0)", "'1.0'"), "must be a pair of integers such as (1, 0), found '1.0'"),
    "next minor api": (GOOD.replace("(1, 0)", "(1, 9)"), "needs plugin API 1.9, this octavo offers 1.0: install"),
    "next major api": (GOOD.replace("(1, 0)", "(2, 0)"), "needs plugin API 2.0, this octavo offers 1.0: install"),
    "too old api": (GOOD.replace("(1, 0)", "(-1, 0)"), "needs plugin API -1.0, this octavo offers 1.0"),
    "misspelled hook": (hook("octavo_linear_method", "return []"), "octavo_linear_method; known: octavo_checkpoint"),
    "no hook": ("octavo_api = (1, 0)", "fills no hook"),
    "hook without a mark": (GOOD + "def octavo_executors():\n    return []\n", "octavo_executors without marking it"),
    "unknown argument": (hook("octavo_executors", "return []", "model"), "PluginValidationError"),
    "returns nothing": (hook("octavo_executors", "pass"), "must return a sequence of classes, got None"),
    "returns text": (hook("octavo_executors", "return 'uni'"), "must return a sequence of classes, got 'uni'"),
    "returns a generator": (hook("octavo_executors", "yield 1"), "must return a sequence of classes, got <generator"),
    "returns one class": (linear("return DenseMethod"), "must return a sequence of classes, got <class"),
    "returns another class": (linear("return [int]"), "subclasses of octavo.LinearMethod, got <class 'int'>"),
    "returns an instance": (linear("return [5]"), "must return subclasses of octavo.LinearMethod, got 5"),
    "class without name": (linear("return [type('Mine', (LinearMethod,), {})]"), "Mine lacks name, rank"),
    "class with gaps": (linear("return [type('Mine', (LinearMethod,), dict(name='m', rank=1))]"), "implement __init__"),
    "upper case name": (
        linear("return [type('Mine', (DenseMethod,), dict(name='M'))]"),
        "lower-case letters, found 'M'",
    ),
    "no name": (linear("return [type('Mine', (DenseMethod,), dict(name=None))]"), "lower-case letters, found None"),
    "rank as text": (linear("return [type('Mine', (DenseMethod,), dict(rank='high'))]"), "an integer, found 'high'"),
    "architectures as list": (hook("octavo_architectures", "return []"), "must return a mapping of names to functions"),
    "architectures as text": (hook("octavo_architectures", "return {'A': 'b'}"), "a mapping of names to functions"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_v44_a_broken_plugin_is_told_and_left_out(site: Site, case: str, caplog: pytest.LogCaptureFixture) -> None:
    content, reason = BROKEN[case]
    site.install("broken", content, version="0.7")
    site.install("another")
    site.install("zebra", GOOD.replace('"good"', '"zebra"'))
    registry = site.discover()
    assert {p.name: p.state for p in registry.plugins} == {
        "core": "loaded",
        "another": "loaded",
        "broken": "failed",
        "zebra": "loaded",
    }
    assert {"dense", "good", "zebra"} <= kernels(registry)
    failure = registry.failures[0]
    assert reason in failure.reason
    assert failure.hooks == ()
    assert "Traceback" in failure.trace
    (note,) = registry.failure_notes()
    assert note == f"plugin broken (dist-broken 0.7) failed to load: {failure.reason}"
    assert "broken (dist-broken 0.7) failed" in caplog.text
    assert reason in caplog.text
    with pytest.raises(PluginError, match=r"(?s)broken \(dist-broken 0.7\) is failed: .*Traceback"):
        registry.contributed_by("broken")


def test_a_missing_attribute_is_told(site: Site) -> None:
    site.register("broken", "octavo.errors:nothing", "dist-broken", "1.0")
    assert "has no attribute 'nothing'" in site.discover().failures[0].reason


def test_v44_strict_makes_failures_fatal(site: Site) -> None:
    site.install("broken", "import toy_nowhere")
    with pytest.raises(PluginError, match=r"(?s)strict.*broken \(dist-broken 1.0\).*toy_nowhere.*Traceback"):
        site.discover(strict=True)


def test_v44_a_failed_plugin_is_fatal_where_it_is_required(site: Site) -> None:
    site.install("broken", "import toy_nowhere")
    with pytest.raises(PluginError, match=r"broken \(dist-broken 1.0\) is failed: ModuleNotFoundError"):
        site.discover(required=["broken"])


def test_a_missing_kernel_quotes_the_plugins_that_failed(site: Site) -> None:
    site.install("broken", "import toy_nowhere")
    notes = site.discover().failure_notes()
    with pytest.raises(NoKernelError, match=r"plugin broken \(dist-broken 1.0\) failed to load: ModuleNotFoundError"):
        select_linear(REQUEST, [], notes=notes)


# --- required, disabled


def test_v45_a_required_plugin_that_is_not_there_lists_what_is(site: Site) -> None:
    site.install("good", version="1.2")
    with pytest.raises(
        PluginError, match=r"no plugin 'god' is installed; found: core \(octavo .*good \(dist-good 1.2\)"
    ):
        site.discover(required=["god"])


def test_a_disabled_plugin_is_not_even_imported(site: Site) -> None:
    site.install("broken", "import toy_nowhere")
    site.install("good")
    registry = site.discover(disable=["broken"], strict=True)
    assert plugin(registry, "broken").state == "disabled"
    assert not registry.failures
    assert "good" in kernels(registry)
    assert registry.failure_notes() == ["plugin broken (dist-broken 1.0) is disabled"]


def test_disabling_an_unknown_plugin_is_an_error(site: Site) -> None:
    site.install("good")
    with pytest.raises(PluginError, match=r"cannot disable unknown plugin\(s\) god; installed: core, good"):
        site.discover(disable=["god"])


def test_a_required_plugin_may_not_be_disabled(site: Site) -> None:
    site.install("good")
    with pytest.raises(PluginError, match="is disabled: asked for by a setting"):
        site.discover(disable=["good"], required=["good"])


# --- names and metadata


def test_v45_stale_metadata_is_hidden_by_the_first_on_the_path(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = tmp_path / "newer"
    newer.mkdir()
    monkeypatch.syspath_prepend(newer)
    site.install("mine", "raise RuntimeError('stale')", distribution="dist-mine", version="9.0")
    site.install("mine", GOOD, distribution="Dist_Mine", version="1.5", folder=newer)
    registry = site.discover(strict=True)
    assert [(p.name, p.version) for p in registry.plugins][1:] == [("mine", "1.5")]


def test_metadata_that_cannot_be_read_stops_nobody(site: Site) -> None:
    site.install("good")
    info = site.register("left", "toy_left", "dist-left", "1.0")
    (info / "METADATA").unlink()
    registry = site.discover()
    assert plugin(registry, "good").state == "loaded"
    assert plugin(registry, "left").state == "failed"


def format_named(name: str, *others: str) -> object:
    mine = type("Mine", (ToyFormat,), {"name": name, "method_names": others})

    class Brings:
        octavo_api = API_VERSION

        @hookimpl
        def octavo_quant_configs(self) -> Sequence[type]:
            return [mine]

    return Brings


@pytest.mark.parametrize("others", [(), ("b", "shared")])
def test_two_owners_of_a_name_are_both_named(site: Site, others: tuple[str, ...]) -> None:
    site.install("one", format_named("shared"), version="1.1")
    site.install("two", format_named(*others or ("shared",)), version="2.2")
    message = r"'shared' is claimed by one \(dist-one 1.1\) and by two \(dist-two 2.2\).*--disable-plugins two"
    with pytest.raises(PluginError, match=message):
        site.discover()
    assert site.discover(disable=["two"]).quant_configs["shared"].name == "shared"


@pytest.mark.parametrize(
    ("hook_name", "value", "shared"),
    [
        ("octavo_kv_formats", [ToyKV], "toy"),
        ("octavo_grammar_compilers", [ToyCompiler], "toy"),
        ("octavo_tool_parsers", [ToyParser], "toy"),
        ("octavo_executors", [ToyExecutor], "toy"),
        ("octavo_quantizers", [ToyQuantizer], "toy"),
        ("octavo_commands", [ToyCommand], "toy"),
        ("octavo_architectures", {"LlamaForCausalLM": llama}, "LlamaForCausalLM"),
    ],
)
def test_a_name_has_one_owner_in_each_hook(site: Site, hook_name: str, value: Any, shared: str) -> None:
    def fill(self: object) -> Any:
        return value

    fill.__name__ = hook_name
    members = {"octavo_api": API_VERSION, hook_name: hookimpl(fill)}
    site.install("one", type("One", (), members))
    site.install("two", type("Two", (), members))
    with pytest.raises(PluginError, match=f"{hook_name}: '{shared}' is claimed by "):
        site.discover()


def test_two_distributions_with_a_plugin_of_one_name(site: Site) -> None:
    site.install("same", GOOD, distribution="dist-a", version="1.1")
    site.install("same", GOOD, distribution="dist-b", version="2.2")
    registry = site.discover()
    first, second = (p for p in registry.plugins if p.name == "same")
    assert (first.state, second.state) == ("loaded", "failed")
    assert second.reason == f"{first} has the same name: uninstall one of the two distributions"
    assert {first.distribution, second.distribution} == {"dist-a", "dist-b"}
    assert [m.name for m in registry.linear_methods].count("good") == 1
    assert registry.contributed_by("same")


def test_one_object_under_two_names(site: Site) -> None:
    toy = Everything()
    site.install("one", toy)
    site.install("two", toy)
    registry = site.discover()
    assert [(p.name, p.state) for p in registry.plugins][1:] == [("one", "loaded"), ("two", "failed")]
    assert registry.failures[0].reason == "is the same object as plugin 'one'"


def test_a_new_architecture_makes_a_decoder_config(site: Site) -> None:
    site.install("toy", Everything)
    config = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    config |= {"vocab_size": 32, "rms_norm_eps": 1e-6, "max_position_embeddings": 64}
    assert isinstance(site.discover().architectures["ToyForCausalLM"](config), DecoderConfig)
