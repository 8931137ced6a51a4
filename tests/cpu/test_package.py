"""The package as a whole: cheap to import, found by torch, public names real, imports in one direction only."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import moe_compile

PACKAGE = Path(moe_compile.__file__).parent
HEAVY = {"triton", "flashinfer", "sympy", "transformers"}

# Left never imports right; a stage imports no other stage. `backend` alone joins the stages. Names without a file yet
# are the design's.
LEVELS = [
    {"verdict", "options", "journal", "hardware", "bench", "capturable", "clock", "inplace", "progress"},
    {"prepare"},
    {"activation", "nodes", "spec", "work"},
    {"operands"},
    {"reference", "formats", "cost"},
    {"canonical", "writes", "kernels", "algebra"},
    {"rules", "providers", "replay"},
    {"recognize", "plan", "workload", "tune", "lower", "ops", "cache", "agree", "verify"},
    {"choose"},
    {"tables", "breaks"},
    {"overlooked"},
    {"explain", "dump", "report", "trace"},
    {"backend"},
    {"demo", "inventory", "outlook", "pretrained", "peers", "suite", "contest", "standing", "calibrate", "crossovers"},
    {"cli", "__init__", "__main__"},
]
LEVEL = {name: i for i, names in enumerate(LEVELS) for name in names}
STAGES = {"recognize", "plan", "workload", "tune", "lower"}
FORBIDDEN = {
    "rules": {"providers", "cost"},
    "providers": {"torch.fx", "options"},
    "kernels": {"torch.fx", "options"},
    "cost": {"torch"},
    "explain": {"recognize", "plan", "lower", "ops", "rules", "providers"},
    "dump": {"recognize", "plan", "lower", "ops", "rules", "providers"},
}


def member(path: Path) -> str:
    """The top-level file or folder of the package that `path` belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> set[tuple[str, bool]]:
    """(what is imported, whether at module level): members of ours by name, and outside modules by dotted name."""
    here = ("moe_compile", *path.relative_to(PACKAGE).parts[:-1])
    found: set[tuple[str, bool]] = set()

    def visit(node: ast.AST, top: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.Import):
                found.update((alias.name, top) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = here[: len(here) - child.level + 1] if child.level else ()
                module = ".".join(base + ((child.module,) if child.module else ()))
                found.update((f"{module}.{alias.name}", top) for alias in child.names)
            visit(child, top and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))

    visit(ast.parse(path.read_text()), True)
    return {(name.removeprefix("moe_compile."), top) for name, top in found}


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_one_way(path):
    me = member(path)
    assert me in LEVEL, f"{me} has no place in the import order: add it to LEVELS (and to docs/pipeline.md)"
    for name, top in imports(path):
        other = name.split(".")[0]
        if other not in LEVEL or other == me:
            continue
        # explain runs the backend by a late import: it can't be read from the journal
        if (me, other, top) == ("explain", "backend", False):
            continue
        assert LEVEL[other] <= LEVEL[me], f"{me} imports {other}, which is to its right"
        assert not (me in STAGES and other in STAGES), f"stage {me} imports stage {other}: only backend joins stages"
    for banned in FORBIDDEN.get(me, ()):
        offenders = [name for name, _ in imports(path) if name == banned or name.startswith(banned + ".")]
        assert not offenders, f"{me} must not import {banned}: {offenders}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_are_short_and_say_what_they_are(path):
    text = path.read_text()
    assert ast.get_docstring(ast.parse(text)), "no opening paragraph"
    assert text.count("\n") <= 400  # the aim is 300; past 400 it is two things


def test_a_wheel_has_what_is_no_code_of_python():
    listed = re.search(r"^moe_compile = (\[.*\])$", (PACKAGE.parent / "pyproject.toml").read_text(), re.MULTILINE)
    others = [p for p in PACKAGE.rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc")]
    assert sorted(str(p.relative_to(PACKAGE)) for p in others) == sorted(json.loads(listed[1]))


def test_only_options_reads_the_environment():
    readers = [p.name for p in FILES if "os.environ" in p.read_text() or "getenv" in p.read_text()]
    assert readers == ["options.py"]


def probe(code: str) -> dict:
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return json.loads(out.stdout.splitlines()[-1])


def test_import_is_light():
    found = probe(
        "import torch, sys, time, json\n"
        "before = set(sys.modules); start = time.perf_counter()\n"
        "import moe_compile\n"
        "seconds = time.perf_counter() - start\n"
        "print(json.dumps({'seconds': seconds, 'new': sorted(set(sys.modules) - before)}))"
    )
    assert not HEAVY & {name.split(".")[0] for name in found["new"]}
    assert found["seconds"] < 0.05


def test_the_parts_a_reader_uses_are_light_too():
    found = probe(
        "import torch, sys, json\n"
        "before = set(sys.modules)\n"
        "from moe_compile import explain, debug, Report, MoESpec\n"
        "import moe_compile.cli\n"
        "print(json.dumps({'new': sorted(set(sys.modules) - before)}))"
    )
    assert not HEAVY & {name.split(".")[0] for name in found["new"]}


def test_torch_finds_the_backend_without_an_import_of_ours():
    found = probe(
        "import sys, json, torch\n"
        "names = torch._dynamo.list_backends()\n"
        "print(json.dumps({'moe': 'moe' in names, 'imported': 'moe_compile.backend' in sys.modules}))"
    )
    assert found == {"moe": True, "imported": False}


def test_public_names_exist():
    for name in moe_compile.__all__:
        assert getattr(moe_compile, name) is not None
        assert name in dir(moe_compile)
    assert moe_compile.__version__.count(".") == 2
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        moe_compile.nothing  # noqa: B018


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_links_of_the_pages_outside_docs_lead_somewhere(name):
    """Those in docs/ are checked when the documentation is built."""
    root = PACKAGE.parent
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", (root / name).read_text())
    assert targets
    assert [t for t in targets if not t.startswith("http") and not (root / t).exists()] == []
