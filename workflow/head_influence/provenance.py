"""What a result was made from: the code's own version and the versions of the packages it ran on."""

import ast
import hashlib
import platform
from functools import cache
from importlib.metadata import version
from pathlib import Path

PACKAGE = Path(__file__).parent
SCRIPTS = PACKAGE.parent / "scripts"
PACKAGES = (
    "numpy",
    "netCDF4",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "xarray",
    "matplotlib",
    "snakemake",
)


@cache
def _module(name):
    """Hash of a module's code (without comments, docstrings and layout) and the modules of the library it imports."""
    script = name.startswith("scripts.")
    path = SCRIPTS / f"{name.removeprefix('scripts.')}.py" if script else _path(name)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node, clean=False):
            node.body = node.body[1:]
        if not script and isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE.name:
            base = node.module.partition(".")[2]
            inside = [f"{base}.{a.name}".strip(".") for a in node.names]
            imported |= {base, *(m for m in inside if _path(m).exists())}
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest(), frozenset(imported - {name})


def _path(name):
    """File of a module of the library: "" is the package itself."""
    folder = PACKAGE / name.replace(".", "/")
    return folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")


def closure(*names):
    """Modules of the library that `names` import, directly or not, the packages that these are in, and themselves."""
    known, todo = set(), set(names)
    while todo:
        name = todo.pop()
        known.add(name)
        package = set() if name.startswith("scripts.") else {name.rpartition(".")[0]}
        todo |= (_module(name)[1] | package) - known
    return sorted(known)


@cache
def code_version(*names):
    """Version of the code that a stage runs: a hash over the modules `names` and all they import from the library.

    Comments, docstrings and layout do not count; names are relative to the package ("trace", "families.llama"). A
    program's ("scripts.trace") counts as it is: what it imports has to be named.
    """
    digest = hashlib.sha256()
    for name in closure(*names):
        digest.update(f"{name}:{_module(name)[0]};".encode())
    return digest.hexdigest()[:16]


def environment():
    """Return the Python and package versions, as far as they are installed, without importing anything."""
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except ImportError:
            continue
    return found
