"""Finding plugins: load each entry point on its own, call each hook once, check what comes back, return a `Registry`.

pluggy is the door, not the dispatcher: after `discover` nobody calls a hook but `octavo_select_linear`. A plugin that fails,
at any of these points, becomes a `PluginFailure` with its reason and traceback; the others are not affected, and errors that
a missing plugin may explain quote the failure. The registry is an argument of everything that needs it, never a global.
"""

from __future__ import annotations

import inspect
import logging
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module, metadata
from importlib.metadata import EntryPoint
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pluggy

from octavo import hookspecs
from octavo.errors import PluginError

if TYPE_CHECKING:
    from octavo.attention.backend import AttentionBackend
    from octavo.attention.kv_format import KVFormat
    from octavo.command import Command
    from octavo.engine.executor import Executor
    from octavo.engine.grammar import GrammarCompiler
    from octavo.engine.step_graph import StepGraph
    from octavo.model.architectures import DecoderConfig
    from octavo.model.checkpoint import CheckpointReader
    from octavo.model.ops import FusedOps
    from octavo.platforms import Platform
    from octavo.quant.config import QuantConfig
    from octavo.quant.linear import LinearMethod, SelectHook
    from octavo.quant.quantizer import Quantizer
    from octavo.server.tools.parser import ToolParser

GROUP = "octavo"
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PluginInfo:
    """A plugin as found: `state` is "loaded", "disabled" or "failed"; `reason` and `trace` say why it failed."""

    name: str
    distribution: str
    version: str
    hooks: tuple[str, ...] = ()
    state: str = "loaded"
    reason: str = ""
    trace: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.distribution} {self.version})"


@dataclass(frozen=True)
class Registry:
    """All that installed plugins contribute, checked and frozen; values with an owner are keyed by name."""

    platform: Platform
    plugins: tuple[PluginInfo, ...] = ()
    checkpoint_readers: tuple[type[CheckpointReader], ...] = ()
    architectures: Mapping[str, Callable[[dict[str, Any]], DecoderConfig]] = field(default_factory=dict)
    quant_configs: Mapping[str, type[QuantConfig]] = field(default_factory=dict)
    linear_methods: tuple[type[LinearMethod], ...] = ()
    attention_backends: tuple[type[AttentionBackend], ...] = ()
    kv_formats: Mapping[str, type[KVFormat]] = field(default_factory=dict)
    fused_ops: tuple[type[FusedOps], ...] = ()
    step_graphs: tuple[type[StepGraph], ...] = ()
    grammar_compilers: Mapping[str, type[GrammarCompiler]] = field(default_factory=dict)
    tool_parsers: Mapping[str, type[ToolParser]] = field(default_factory=dict)
    executors: Mapping[str, type[Executor]] = field(default_factory=dict)
    quantizers: Mapping[str, type[Quantizer]] = field(default_factory=dict)
    commands: Mapping[str, type[Command]] = field(default_factory=dict)
    select_linear: SelectHook | None = None

    @property
    def failures(self) -> tuple[PluginInfo, ...]:
        return tuple(p for p in self.plugins if p.state == "failed")

    def failure_notes(self) -> list[str]:
        """One sentence for each plugin that is missing: for errors that it may explain."""
        notes = [f"plugin {p} failed to load: {p.reason}" for p in self.failures]
        return notes + [f"plugin {p} is disabled" for p in self.plugins if p.state == "disabled"]

    def contributed_by(self, plugin: str) -> dict[str, list[type]]:
        """The classes that one plugin brought, by hook name; raises PluginError if there is no such loaded plugin."""
        info = next((p for p in self.plugins if p.name == plugin), None)
        if info is None:
            found = ", ".join(str(p) for p in self.plugins) or "none"
            raise PluginError(f"no plugin '{plugin}' is installed; found: {found}")
        if info.state != "loaded":
            raise PluginError(f"plugin {info} is {info.state}: {info.reason or 'asked for by a setting'}\n{info.trace}")
        return dict(self._contributions.get(plugin, {}))

    _contributions: Mapping[str, Mapping[str, list[type]]] = field(default_factory=dict, repr=False)


def installed_entry_points() -> list[EntryPoint]:
    """Entry points of the group `octavo`, core first, then by name; of two distributions of one name, the first on the path."""
    return sorted(metadata.entry_points(group=GROUP), key=lambda point: (point.name != "core", point.name))


def discover(
    platform: Platform,
    *,
    disable: Sequence[str] = (),
    strict: bool = False,
    required: Sequence[str] = (),
    entry_points: Iterable[EntryPoint] | None = None,
    only: Collection[str] | None = None,
) -> Registry:
    """Loads all plugins and asks each for its contributions; `only` names the hooks to call, where not all are wanted.

    Raises PluginError for a plugin that is `required` but missing, disabled or failed; with `strict`, for any failure; for an
    unknown name in `disable`; and for two plugins that own one name.
    """
    points = installed_entry_points() if entry_points is None else list(entry_points)
    if unknown := set(disable) - {p.name for p in points}:
        found = ", ".join(p.name for p in points)
        raise PluginError(f"cannot disable unknown plugin(s) {', '.join(sorted(unknown))}; installed: {found}")
    loader = _Loader(platform, only)
    for point in points:
        loader.load(point, disabled=point.name in disable)
    registry = loader.registry()
    for name in required:
        registry.contributed_by(name)
    for failure in registry.failures:
        logger.warning("plugin %s failed and is left out: %s", failure, failure.reason)
    if strict and registry.failures:
        details = "\n".join(f"{p}: {p.reason}\n{p.trace}" for p in registry.failures)
        raise PluginError(f"--strict-plugins: {len(registry.failures)} plugin(s) failed\n{details}")
    return registry


class _Loader:
    def __init__(self, platform: Platform, only: Collection[str] | None = None) -> None:
        self.platform, self.only = platform, only
        self.manager = pluggy.PluginManager(GROUP)
        self.manager.add_hookspecs(hookspecs)
        self.specs = [name for name in vars(hookspecs) if name.startswith("octavo_")]
        self.plugins: list[PluginInfo] = []
        self.contributions: dict[str, dict[str, Any]] = {}

    def load(self, point: EntryPoint, disabled: bool) -> None:
        info = partial(PluginInfo, point.name, *_distribution(point))
        if disabled:
            self.plugins.append(info(state="disabled"))
            return
        if (owner := next((p for p in self.plugins if p.name == point.name), None)) is not None:
            reason = f"{owner} has the same name: uninstall one of the two distributions"
            self.plugins.append(info(state="failed", reason=reason))
            return
        try:
            plugin = point.load()
            if inspect.isclass(plugin):
                plugin = plugin()
            _check_api(plugin)
            if (other := self.manager.get_name(plugin)) is not None:
                raise PluginError(f"is the same object as plugin '{other}'")
            self.manager.register(plugin, name=point.name)
            hooks = self._hooks_of(plugin)
            wanted = [hook for hook in hooks if self.only is None or hook in self.only]
            self.contributions[point.name] = {hook: self._call(point.name, hook) for hook in wanted}
            self.plugins.append(info(hooks=hooks))
        except (Exception, SystemExit) as error:
            if self.manager.has_plugin(point.name):
                self.manager.unregister(name=point.name)
            reason = str(error) if isinstance(error, PluginError) else f"{type(error).__name__}: {error}"
            self.plugins.append(info(state="failed", reason=reason, trace=traceback.format_exc()))

    def _hooks_of(self, plugin: object) -> tuple[str, ...]:
        hooks = [caller.name for caller in self.manager.get_hookcallers(plugin) or []]
        if unknown := [name for name in hooks if name not in self.specs]:
            raise PluginError(f"fills unknown hook(s) {', '.join(unknown)}; known: {', '.join(self.specs)}")
        if unmarked := [n for n in self.specs if n not in hooks and inspect.isroutine(getattr(plugin, n, None))]:
            raise PluginError(f"defines {', '.join(unmarked)} without marking it with @octavo.hookimpl")
        if not hooks:
            raise PluginError("fills no hook: mark functions named after a hook with @octavo.hookimpl")
        return tuple(sorted(hooks))

    def _call(self, plugin: str, hook: str) -> Any:
        """One plugin's answer to one hook, checked."""
        if hook == "octavo_select_linear":
            return None
        others = [p for name, p in self.manager.list_name_plugin() if name != plugin and p is not None]
        caller = self.manager.subset_hook_caller(hook, others)
        arguments = {"platform": self.platform} if "platform" in (caller.spec.argnames if caller.spec else ()) else {}
        (result,) = caller(**arguments) or (None,)
        if hook == "octavo_architectures":
            if not isinstance(result, Mapping) or not all(callable(v) for v in result.values()):
                raise PluginError(f"{hook} must return a mapping of names to functions, got {result!r}")
            return result
        if not isinstance(result, Sequence) or isinstance(result, str):
            raise PluginError(f"{hook} must return a sequence of classes, got {result!r}")
        for item in result:
            _check_class(item, _contract(hook), hook)
        return list(result)

    def registry(self) -> Registry:
        def many(hook: str) -> tuple[Any, ...]:
            return tuple(c for by_hook in self.contributions.values() for c in by_hook.get(hook, ()))

        has_selector = any("octavo_select_linear" in p.hooks for p in self.plugins)
        return Registry(
            platform=self.platform,
            plugins=tuple(self.plugins),
            checkpoint_readers=many("octavo_checkpoint_readers"),
            architectures=self._owned("octavo_architectures"),
            quant_configs=self._owned("octavo_quant_configs"),
            linear_methods=many("octavo_linear_methods"),
            attention_backends=many("octavo_attention_backends"),
            kv_formats=self._owned("octavo_kv_formats"),
            fused_ops=many("octavo_fused_ops"),
            step_graphs=many("octavo_step_graphs"),
            grammar_compilers=self._owned("octavo_grammar_compilers"),
            tool_parsers=self._owned("octavo_tool_parsers"),
            executors=self._owned("octavo_executors"),
            quantizers=self._owned("octavo_quantizers"),
            commands=self._owned("octavo_commands"),
            select_linear=self._select_linear if has_selector else None,
            _contributions=MappingProxyType(self.contributions),
        )

    def _owned(self, hook: str) -> Mapping[str, Any]:
        """Contributions keyed by their names, each of which has one owner."""
        values: dict[str, Any] = {}
        owners: dict[str, PluginInfo] = {}
        for info in self.plugins:
            given = self.contributions[info.name].get(hook, ()) if info.state == "loaded" else ()
            pairs = given.items() if isinstance(given, Mapping) else [(n, c) for c in given for n in _names_of(c)]
            for name, value in pairs:
                if name in owners:
                    raise PluginError(
                        f"{hook}: '{name}' is claimed by {owners[name]} and by {info}; "
                        f"disable one with --disable-plugins {info.name}"
                    )
                values[name], owners[name] = value, info
        return MappingProxyType(values)

    def _select_linear(self, request: Any, candidates: Sequence[type[LinearMethod]]) -> type[LinearMethod] | None:
        try:
            choice = self.manager.hook.octavo_select_linear(request=request, candidates=list(candidates))
        except Exception as error:
            owners = ", ".join(str(p) for p in self.plugins if "octavo_select_linear" in p.hooks)
            raise PluginError(
                f"octavo_select_linear, filled by {owners}, failed on {request.layer}: {type(error).__name__}: {error}"
            ) from error
        if choice is not None and choice not in candidates:
            raise PluginError(f"octavo_select_linear chose {choice!r} for {request.layer}, which is not a candidate")
        return choice  # type: ignore[no-any-return]


def _names_of(contribution: type) -> list[str]:
    extra = getattr(contribution, "other_names", ()) or getattr(contribution, "method_names", ())
    return [contribution.name, *extra]  # type: ignore[attr-defined]


def _distribution(point: EntryPoint) -> tuple[str, str]:
    """Name and version of the distribution that brings an entry point; unreadable metadata must not stop the others."""
    try:
        return (point.dist.metadata["Name"], point.dist.version) if point.dist else ("unknown", "?")
    except Exception:
        return "unknown", "?"


def _check_api(plugin: object) -> None:
    declared = getattr(plugin, "octavo_api", None)
    ours = hookspecs.API_VERSION
    if declared is None:
        raise PluginError(f"does not declare octavo_api; add `octavo_api = {ours}` to {plugin!r}")
    if not (isinstance(declared, tuple) and len(declared) == 2 and all(isinstance(n, int) for n in declared)):
        raise PluginError(f"octavo_api must be a pair of integers such as {ours}, found {declared!r}")
    major, minor = declared
    if major not in (ours[0], ours[0] - 1) or (major == ours[0] and minor > ours[1]):
        raise PluginError(
            f"needs plugin API {major}.{minor}, this octavo offers {ours[0]}.{ours[1]}: "
            f"install an octavo that offers {major}.{minor}, or a version of the plugin for {ours[0]}.x"
        )


def _check_class(item: Any, contract: type, hook: str) -> None:
    """Raises PluginError unless `item` is a complete class of the contract."""
    if not (inspect.isclass(item) and issubclass(item, contract)):
        raise PluginError(f"{hook} must return subclasses of octavo.{contract.__name__}, got {item!r}")
    required = [name for name in contract.__annotations__ if not name.startswith("_")]
    if missing := [name for name in required if not hasattr(item, name)]:
        raise PluginError(f"{hook}: {item.__name__} lacks {', '.join(missing)}")
    static = {name: inspect.getattr_static(item, name) for name in dir(contract)}
    if abstract := [name for name, value in static.items() if getattr(value, "__isabstractmethod__", False)]:
        raise PluginError(f"{hook}: {item.__name__} does not implement {', '.join(abstract)}")
    name, rank = getattr(item, "name", None), getattr(item, "rank", 0)
    if not (isinstance(name, str) and name and name == name.lower()):
        raise PluginError(f"{hook}: {item.__name__}.name must be a string of lower-case letters, found {name!r}")
    if not isinstance(rank, int):
        raise PluginError(f"{hook}: {item.__name__}.rank must be an integer, found {rank!r}")


def _contract(hook: str) -> type:
    """The class that a hook's contributions derive from; only its own module is imported."""
    module, _, name = _CONTRACTS[hook].rpartition(".")
    return getattr(import_module(f"octavo.{module}"), name)  # type: ignore[no-any-return]


_CONTRACTS = {
    "octavo_checkpoint_readers": "model.checkpoint.CheckpointReader",
    "octavo_quant_configs": "quant.config.QuantConfig",
    "octavo_linear_methods": "quant.linear.LinearMethod",
    "octavo_attention_backends": "attention.backend.AttentionBackend",
    "octavo_kv_formats": "attention.kv_format.KVFormat",
    "octavo_fused_ops": "model.ops.FusedOps",
    "octavo_step_graphs": "engine.step_graph.StepGraph",
    "octavo_grammar_compilers": "engine.grammar.GrammarCompiler",
    "octavo_tool_parsers": "server.tools.parser.ToolParser",
    "octavo_executors": "engine.executor.Executor",
    "octavo_quantizers": "quant.quantizer.Quantizer",
    "octavo_commands": "command.Command",
}
