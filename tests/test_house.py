"""House rules, found by globbing: a new plugin, module or README is checked without an edit here."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import octavo
from octavo.testing import tiny_model

ROOT = Path(__file__).parents[1]
CORE = ROOT / "core" / "src" / "octavo"
PLUGINS = sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))
PACKAGES = [*PLUGINS, ROOT / "examples" / "third_party_plugin"]
SOURCES = os.pathsep.join(str(folder / "src") for folder in (ROOT / "core", *PACKAGES))
READMES = [ROOT / "README.md", ROOT / "core" / "README.md", *(package / "README.md" for package in PACKAGES)]

# Imports go down this list, never sideways between members of one line: octavo.quant never imports octavo.attention.
LAYERS = (
    ("errors", "hookspecs"),
    ("config", "platforms", "product"),
    ("command",),
    ("quant", "attention"),
    ("plugins",),
    ("model",),
    ("engine",),
    ("front",),
    ("server",),
    ("cli",),
    ("entrypoints",),
)
LEVEL = {module: level for level, modules in enumerate(LAYERS) for module in modules}
DOORS = ("__init__", "plugins", "builtin")  # they reach every contract, but lazily
MAX_SOURCE_LINES, MAX_TEST_LINES = 400, 600
MAX_CORE_LINES = 14_650


def python_files(*folders: Path) -> list[Path]:
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def imported(path: Path, lazy: bool = True) -> Iterator[str]:
    """Modules that a file imports when it runs; those in functions only with `lazy`, those for type checkers never."""
    waiting: list[ast.AST] = [ast.parse(path.read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            waiting += node.orelse
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not lazy:
            continue
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if node.module == "octavo":
                homes = octavo._HOME_OF
                yield from (
                    homes.get(a.name, f"octavo.{a.name}" if module_named(a.name) else "octavo") for a in node.names
                )
            else:
                yield node.module or ""
        else:
            waiting += ast.iter_child_nodes(node)


def python(*arguments: str, cwd: Path | None = None) -> str:
    """What a fresh interpreter prints that finds all packages of this repository."""
    environment = {**os.environ, "PYTHONPATH": SOURCES}
    run = subprocess.run([sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


def module_named(name: str) -> bool:
    return (CORE / name).is_dir() or (CORE / f"{name}.py").is_file()


def project(folder: Path) -> dict:
    return tomllib.loads((folder / "pyproject.toml").read_text())["project"]


def tracked_files() -> list[Path]:
    """Files of the repository: those git knows or would add; without git, all but what tools leave behind."""
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        return [path for name in run.stdout.split("\0") if name and (path := ROOT / name).is_file()]
    except (OSError, subprocess.CalledProcessError):
        left_behind = re.compile(r"/(\.(?!ci\b)[^/]+|__pycache__|build|dist|[^/]+\.egg-info)/")
        return [p for p in ROOT.rglob("*") if p.is_file() and not left_behind.search(f"/{p.relative_to(ROOT)}")]


# --- shape of the source


def test_imports_go_one_way() -> None:
    wrong = []
    for path in python_files(CORE):
        top = path.relative_to(CORE).parts[0].removesuffix(".py")
        if top == "testing" or top in DOORS:
            continue
        for module in imported(path):
            target = module.split(".")[1] if module.startswith("octavo.") else None
            if target is None or target == top or (target == "testing" and top == "front"):
                continue
            if LEVEL.get(target, len(LAYERS)) >= LEVEL[top]:
                wrong.append(f"{path.relative_to(CORE)} imports {module}")
    assert not wrong


def test_every_module_of_core_has_its_layer() -> None:
    tops = {path.relative_to(CORE).parts[0].removesuffix(".py") for path in python_files(CORE)}
    assert tops - LEVEL.keys() - set(DOORS) == {"testing"}


def test_doors_and_kit_are_not_imported_from_below() -> None:
    for path in python_files(CORE):
        if CORE / "testing" not in path.parents:
            early = [module for module in imported(path, lazy=False) if module.startswith("octavo.testing")]
            assert not early, f"{path} imports the kit, which needs pytest, when it is loaded"
    for door in DOORS:
        below = {module for module in imported(CORE / f"{door}.py", lazy=False) if module.startswith("octavo.")}
        assert below <= {"octavo.hookspecs", "octavo.errors"}, f"{door}.py loads {below} for everybody"


@pytest.mark.parametrize(
    ("code", "forbidden"),
    [
        ("import octavo", {"torch", "numpy", "transformers", "pydantic", "pluggy", "pytest", "rich"}),
        (
            "from octavo.cli import build_parser; build_parser().format_help()",
            {"torch", "transformers", "pytest", "numpy"},
        ),
        (
            "import octavo.engine.scheduler, octavo.engine.blocks, octavo.engine.request, octavo.engine.step, "
            "octavo.engine.sampling_params",
            {"torch", "numpy", "transformers"},
        ),
        *(
            (f"import {next(iter(project(p)['entry-points']['octavo'].values()))}", {"torch", "numpy"})
            for p in PACKAGES
        ),
    ],
)
def test_importing_is_cheap(code: str, forbidden: set[str]) -> None:
    output = python("-c", f"import sys; {code}; print(*sorted({forbidden} & set(sys.modules)))")
    assert output.split() == [], f"{code} also imports {output}"


def test_plugins_import_octavo_and_nothing_behind_it() -> None:
    wrong = []
    for package in PACKAGES:
        own = {path.name for path in (package / "src").iterdir()}
        for path in python_files(package):
            tree = ast.parse(path.read_text())
            modules = [n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
            modules += [alias.name for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names]
            for module in modules:
                top = module.partition(".")[0]
                private = top == "octavo" and module not in ("octavo", "octavo.testing")
                if private or (top.startswith("octavo_") and top not in own):
                    wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert not wrong


def test_files_are_short() -> None:
    sources = python_files(ROOT / "core", *(package / "src" for package in PACKAGES), ROOT / "benchmarks")
    tests = python_files(ROOT / "tests", *(package / "tests" for package in PACKAGES))
    limits = [(path, MAX_SOURCE_LINES) for path in sources] + [(path, MAX_TEST_LINES) for path in tests]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) - limit for path, limit in limits}
    assert not {name: f"{excess} lines too long" for name, excess in lengths.items() if excess > 0}


def test_core_stays_small() -> None:
    """A ratchet: lower it when core shrinks; raise it only together with a reason in core/DESIGN.md."""
    files = [path for path in python_files(CORE) if CORE / "testing" not in path.parents]
    assert sum(code_lines(path) for path in files) <= MAX_CORE_LINES


def code_lines(path: Path) -> int:
    """Lines without blank ones, comments and docstrings: what is written to explain costs nothing."""
    text = path.read_text()
    documented: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            documented |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines = enumerate(text.splitlines(), 1)
    return sum(n not in documented and bool(line.strip()) and not line.lstrip().startswith("#") for n, line in lines)


def test_module_names_say_something() -> None:
    empty = {"manager", "managers", "util", "utils", "base", "common", "helpers", "misc"}
    named = [path for path in python_files(ROOT / "core", ROOT / "plugins", ROOT / "examples") if path.stem in empty]
    assert not named


def test_no_file_knows_one_machine_or_one_registry() -> None:
    machine = re.compile(rb"(?<![\w./-])/(?:work|root|home|Users|opt)/\w")
    registry = re.compile(
        rb"(?i)\b(?:pypi|pythonhosted|huggingface|hf|anaconda|docker|ghcr|quay|npmjs|crates)\.(?:org|co|com|io)\b"
    )
    private = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY|\bhf_[A-Za-z]{30}|\bghp_[A-Za-z0-9]{30}")
    wrong = []
    for path in tracked_files():
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            if machine.search(line) or registry.search(line) or private.search(line):
                wrong.append(f"{path.relative_to(ROOT)}:{number}: {line[:100]!r}")
    assert not wrong


# --- public names and hooks


def test_public_names_resolve_and_are_documented() -> None:
    undocumented = []
    for name in octavo.__all__:
        value = getattr(octavo, name)
        if inspect.isclass(value) or inspect.isroutine(value):
            text = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
            if not text or text.startswith(f"{name}("):  # dataclass writes that one
                undocumented.append(name)
    assert not undocumented


def test_type_checkers_see_the_public_names() -> None:
    (block,) = [node for node in ast.parse((CORE / "__init__.py").read_text()).body if isinstance(node, ast.If)]
    seen = {alias.asname: node.module for node in block.body for alias in node.names}  # type: ignore[attr-defined]
    assert seen == octavo._HOME_OF
    assert octavo.__all__ == sorted(seen)


def hook_signatures() -> dict[str, str]:
    """Each hook's signature as hookspecs.py writes it, on one line."""
    functions = [n for n in ast.parse((CORE / "hookspecs.py").read_text()).body if isinstance(n, ast.FunctionDef)]
    return {
        f.name: f"{f.name}({ast.unparse(f.args)}) -> {ast.unparse(f.returns)}"
        for f in functions
        if f.returns is not None
    }


def test_every_hook_is_documented_with_its_signature() -> None:
    readme = (ROOT / "README.md").read_text().replace(r"\|", "|")
    assert [signature for signature in hook_signatures().values() if f"`{signature}`" not in readme] == []
    known = {name.removeprefix("octavo_") for name in hook_signatures()}
    assert {name for name in re.findall(r"`octavo_(\w+)\(", readme)} == known, "the README shows hooks that are none"


def test_every_hook_is_exercised() -> None:
    tests = [
        p for p in python_files(ROOT / "tests", *(package / "tests" for package in PLUGINS)) if p != Path(__file__)
    ]
    text = "\n".join(path.read_text() for path in tests)
    assert [name for name in hook_signatures() if not re.search(rf"\b{name}\b", text)] == []


# --- packages


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_a_plugin_is_complete(package: Path) -> None:
    assert (package / "README.md").read_text().strip(), "README.md: what, limits, measured speed, how verified"
    modules = [path for path in (package / "src").iterdir() if path.is_dir() and path.name.startswith("octavo_")]
    assert len(modules) == 1
    assert (modules[0] / "py.typed").is_file()
    points = project(package).get("entry-points", {}).get("octavo", {})
    assert len(points) == 1, "one plugin has exactly one entry point in the group octavo"
    assert next(iter(points.values())).partition(":")[0].partition(".")[0] == modules[0].name
    trees = [ast.parse(path.read_text()) for path in python_files(package / "tests")]
    bases = [
        ast.unparse(b) for t in trees for node in ast.walk(t) if isinstance(node, ast.ClassDef) for b in node.bases
    ]
    assert any(base.endswith("Suite") for base in bases), "no test class derives from a suite of octavo.testing"


def test_versions_go_in_lockstep() -> None:
    versions = {str(folder.relative_to(ROOT)): project(folder)["version"] for folder in (ROOT / "core", *PLUGINS)}
    assert set(versions.values()) == {octavo.__version__}, versions


# --- READMEs


def python_blocks(readme: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", readme.read_text(), re.DOTALL | re.MULTILINE)


def is_excerpt(block: str) -> bool:
    return block.startswith("# examples/")


@pytest.mark.parametrize("readme", [r for r in READMES if r.exists()], ids=lambda path: path.parent.name)
def test_readme_code_runs(readme: Path, tmp_path: Path) -> None:
    """All blocks of a README, one after the other; "path/to/model" is a tiny model."""
    blocks = [block for block in python_blocks(readme) if not is_excerpt(block)]
    if blocks:
        model = tiny_model(tmp_path / "model")
        script = tmp_path / "blocks.py"
        script.write_text("\n".join(blocks).replace("path/to/model", str(model)))
        python(str(script), cwd=tmp_path)


def test_readme_excerpts_are_what_the_files_say() -> None:
    """A block whose first line names a file shows whole pieces of it, with "# ..." between them."""
    excerpts = [block for readme in READMES if readme.exists() for block in python_blocks(readme) if is_excerpt(block)]
    assert excerpts
    for block in excerpts:
        first, _, rest = block.partition("\n")
        source = (ROOT / first.removeprefix("# ")).read_text()
        for piece in re.split(r"^ *# \.\.\.$", rest, flags=re.MULTILINE):
            assert piece.strip("\n") in source, f"README.md shows what {first} does not say:\n{piece}"


def test_readme_starts_with_two_commands() -> None:
    shell = re.search(r"^```sh\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    assert shell is not None
    assert [line.split("#")[0].strip() for line in shell.group(1).splitlines()] == ["make demo", "make test"]
    targets = (ROOT / "Makefile").read_text()
    assert all(f"\n{target}:" in targets for target in ("demo", "test", "lint", "bench"))
