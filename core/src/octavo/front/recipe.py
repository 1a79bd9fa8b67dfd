"""Which method quantises which layer, and with what options: a recipe, from YAML or from a few flags.

rules:                            # the first whose pattern matches a layer counts; layers without one stay
  - layers: "*.down_proj"
    method: keep
  - layers: ["layers.0.*", "lm_head"]
    method: gptq
    bits: 8
  - method: awq                   # no pattern: all linears of the decoder layers
    group_size: 64
to: gptq                          # the format; by default the methods' own
kv_scales: tensor                 # or head: calibrated scales of an fp8 KV cache
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from octavo.config import describe
from octavo.errors import ConfigError
from octavo.model.plan import ModelPlan
from octavo.plugins import Registry
from octavo.quant.quantizer import Quantizer, QuantizerOptions
from octavo.quant.weight import LinearLayer

KEEP = "keep"


class Rule(BaseModel):
    """One rule: which layers, which method. Further keys are the method's options."""

    model_config = ConfigDict(frozen=True, extra="allow")

    layers: tuple[str, ...] = ()
    method: str
    smooth: float | None = Field(None, ge=0, le=1)
    """SmoothQuant's alpha: moves that share of the inputs' range into the weights before the method sees them."""

    @field_validator("layers", mode="before")
    @classmethod
    def _one_or_many(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @property
    def options(self) -> dict[str, Any]:
        """What the method is told."""
        return dict(self.model_extra or {})

    def matches(self, names: Sequence[str]) -> bool:
        """Whether a layer of these names is meant."""
        if not self.layers:
            return any(name.startswith("layers.") for name in names)
        return any(fnmatchcase(name, pattern) for pattern in self.layers for name in names)


class Recipe(BaseModel):
    """What is to be made of a model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rules: tuple[Rule, ...] = Field(min_length=1)
    to: str | None = None
    kv_scales: Literal["tensor", "head"] | None = None

    @classmethod
    def load(cls, content: object, where: str) -> Recipe:
        """Reads a recipe; raises ConfigError that names the place and what is wrong there."""
        if not isinstance(content, Mapping):
            raise ConfigError(f"{where}: expected 'rules:' with a list of rules, found {type(content).__name__}")
        try:
            return cls.model_validate(dict(content))
        except ValidationError as error:
            raise ConfigError(f"{where}: {describe(error, 'key')}") from None


def read_recipe(file: str) -> Recipe:
    """A recipe from a YAML file."""
    import yaml

    try:
        content = yaml.safe_load(Path(file).expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--recipe {file}: cannot read the file: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"--recipe {file}: not YAML: {error}") from None
    return Recipe.load(content, f"--recipe {file}")


def method_named(name: str, registry: Registry) -> type[Quantizer]:
    """The quantizer of a name; raises ConfigError that lists what is installed."""
    if name not in registry.quantizers:
        known = ", ".join(sorted({KEEP, *registry.quantizers}))
        notes = "".join(f"; {note}" for note in registry.failure_notes())
        raise ConfigError(f"no method '{name}' is installed; there is: {known}{notes}")
    return registry.quantizers[name]


def options_of(kind: type[Quantizer], values: Mapping[str, Any]) -> QuantizerOptions:
    """A method's options; raises ConfigError that names the method and the option."""
    try:
        return kind.Options(**values)
    except ValidationError as error:
        known = ", ".join(kind.Options.model_fields)
        raise ConfigError(f"method {kind.name}: {describe(error, 'option')}; its options: {known}") from None


@dataclass(frozen=True, slots=True)
class Assignment:
    """A recipe applied to a model: for each layer that is quantised its quantizer, the number of its rule, and SmoothQuant's
    alpha if its input is smoothed.
    """

    quantizers: Mapping[LinearLayer, Quantizer]
    rules: Mapping[LinearLayer, int]
    smooth: Mapping[LinearLayer, float]
    target: str

    @classmethod
    def of(cls, recipe: Recipe, plan: ModelPlan, bits: Mapping[LinearLayer, int] | None = None) -> Assignment:
        """Raises ConfigError for patterns that match nothing, unknown methods and options, and where no layer is left.

        `bits` replaces the rules' own for single layers.
        """
        layers = [layer for group in plan.groups for layer in group.layers]
        if plan.head is None:
            layers.append(plan.tied_head)
        names = {layer: _names(layer, plan) for layer in layers}
        for rule in recipe.rules:
            for pattern in rule.layers:
                if not any(fnmatchcase(name, pattern) for known in names.values() for name in known):
                    raise ConfigError(f"recipe: no layer matches '{pattern}'; a layer is called {layers[0].name}, say")
        rules: dict[LinearLayer, int] = {}
        for layer in layers:
            number = next((n for n, rule in enumerate(recipe.rules) if rule.matches(names[layer])), None)
            if number is not None and recipe.rules[number].method != KEEP:
                rules[layer] = number
        quantizers: dict[LinearLayer, Quantizer] = {}
        smooth: dict[LinearLayer, float] = {}
        targets: dict[str, str] = {}
        for number in dict.fromkeys(rules.values()):
            rule, members = recipe.rules[number], [layer for layer, other in rules.items() if other == number]
            kind = method_named(rule.method, plan.registry)
            targets.setdefault(kind.target, kind.name)
            if rule.smooth is not None:
                smooth |= dict.fromkeys(members, rule.smooth)
            widths = {layer: (bits or {}).get(layer) for layer in members}
            for width in dict.fromkeys(widths.values()):
                options = rule.options if width is None else {**rule.options, "bits": width}
                quantizer = kind(options_of(kind, options), members)
                quantizers |= {layer: quantizer for layer in members if widths[layer] == width}
        if not quantizers:
            raise ConfigError("recipe: not one layer is to be quantised")
        if recipe.to is None and len(targets) > 1:
            found = ", ".join(f"{target} ({method})" for target, method in targets.items())
            raise ConfigError(f"recipe: the methods write different formats, {found}: say which one, with to: or --to")
        in_order = {layer: quantizers[layer] for layer in layers if layer in quantizers}
        return cls(in_order, rules, smooth, recipe.to or next(iter(targets)))


def _names(layer: LinearLayer, plan: ModelPlan) -> tuple[str, str]:
    """A layer's names that patterns may mean: in full, and as in a model that is not part of another."""
    short = "lm_head" if layer in (plan.head, plan.tied_head) else layer.name.removeprefix(plan.prefix)
    return layer.name, short


def describe_options(kind: type[Quantizer]) -> list[tuple[str, str, str]]:
    """(name, default, help) of each option of a method."""
    return [
        (name, str(field.default), " ".join((field.description or "").split()))
        for name, field in kind.Options.model_fields.items()
    ]
