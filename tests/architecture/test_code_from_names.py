"""Names become code in one module, `plait.config.trust`; every other place that could run something is listed here.

The list says why a place is there. A new place is a mistake, or needs a line with its reason.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "src" / "plait"
ONE_PLACE = "config/trust.py"

OWN_FILE = "a configuration of MMEngine is a Python file that the user names"
CLOSED = "an Unpickler whose find_class knows a closed list of names"
OWN_PROCESS = "bytes from this job's own processes, through a pipe or process group"
ALLOWED = {
    ("lazy.py", "import_module"): "names of Plait's own modules, from the tables in its packages",
    ("torch_internals.py", "import_module"): "modules of torch, from a table in that file",
    ("cli/torch_facts.py", "import_module"): "packages from a table beside it, for `plait doctor`",
    ("models/hf.py", "find_spec"): "a module of transformers, by a model type that transformers has",
    ("frontends/accelerate/utils/imports.py", "find_spec"): "whether packages that are written there are installed",
    ("testing/loaded.py", "import_module"): "modules of torch and of Plait, from a list in that file",
    ("launch/probe.py", "find_spec"): "where the file of a top-level module is; finding it runs nothing",
    ("frontends/mmengine/config.py", "exec"): OWN_FILE,
    ("frontends/mmengine/config.py", "compile"): OWN_FILE,
    ("data/images.py", "Unpickler"): CLOSED,
    ("checkpoint/convert/dcp.py", "Unpickler"): CLOSED,
    ("checkpoint/convert/files.py", "Unpickler"): CLOSED,
    ("plan/gate.py", "pickle.loads"): OWN_PROCESS,
    ("distributed/pipeline_parallel.py", "pickle.loads"): OWN_PROCESS,
    ("testing/ranks.py", "torch.load without weights_only=True"): OWN_PROCESS,
    ("config/yaml_io.py", "yaml.load"): "with a SafeLoader",
    ("models/hf.py", "trust_remote_code"): "what `transformers_code` gave",
    ("posttrain/data/template.py", "trust_remote_code"): "what `transformers_code` gave",
    ("posttrain/data/template.py", "Environment"): "takes a template apart into tokens; renders nothing",
}

RUNS_NAMES = {
    "__import__", "exec", "eval", "compile", "run_path", "run_module", "spec_from_file_location", "resolve_name",
    "module_from_spec", "entry_points", "load_dataset", "system", "popen", "Environment", "SandboxedEnvironment",
}  # fmt: skip
"""Functions that run what they are given, or what a name in it says."""
MODULES = {
    "pickle": {"load", "loads", "Unpickler"},
    "yaml": {"load", "load_all", "unsafe_load", "full_load"},
    "torch": {"load"},
    "joblib": {"load"},
    "shelve": {"open"},
    "marshal": {"load", "loads"},
    "dill": {"load", "loads"},
    "cloudpickle": {"load", "loads"},
}


def is_constant(node: ast.expr) -> bool:
    """A literal, or a name inside this package: `f"{__name__}.trainer"`, `f"plait.models.{family}"`."""
    if isinstance(node, ast.JoinedStr):
        first = node.values[0]
        if isinstance(first, ast.FormattedValue):
            return isinstance(first.value, ast.Name) and first.value.id == "__name__"
        return isinstance(first, ast.Constant) and str(first.value).startswith("plait.")
    return isinstance(node, ast.Constant)


def dangers(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """What could run something: the name of the construct, and its line."""
    names = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    names |= {
        alias.asname: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.asname is not None
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield from (("Unpickler", node.lineno) for base in node.bases if ast.unparse(base).endswith("Unpickler"))
        if not isinstance(node, ast.Call):
            continue
        words = {word.arg: word.value for word in node.keywords}
        called = ast.unparse(node.func)
        first, dot, rest = called.partition(".")
        called = f"{names.get(first, first)}{dot}{rest}"
        owner, _, last = called.rpartition(".")
        if "trust_remote_code" in words or "allow_pickle" in words:
            yield ("trust_remote_code" if "trust_remote_code" in words else "allow_pickle"), node.lineno
        elif last == "from_pretrained" or (last == "from_config" and owner == "auto"):
            yield "transformers without trust_remote_code", node.lineno
        if isinstance(words.get("shell"), ast.Constant) and words["shell"].value is not False:  # type: ignore[attr-defined]
            yield "shell=True", node.lineno
        if owner == "torch" and last == "load":
            safe = words.get("weights_only")
            if not (isinstance(safe, ast.Constant) and safe.value is True):
                yield "torch.load without weights_only=True", node.lineno
        elif last in MODULES.get(owner, ()):
            yield f"{owner}.{last}", node.lineno
        elif last in {"import_module", "find_spec"}:
            if not (node.args and is_constant(node.args[0])):
                yield last, node.lineno
        elif last in RUNS_NAMES and (owner in {"", "os", "builtins", "jinja2", "jinja2.sandbox", "datasets"} or
                                     "importlib" in owner or "runpy" in owner or "pkgutil" in owner):  # fmt: skip
            yield last, node.lineno


def found_in(path: Path) -> list[tuple[str, int]]:
    return list(dangers(ast.parse(path.read_text(encoding="utf-8"))))


def test_names_become_code_in_one_module_alone() -> None:
    offenders, used = [], set()
    for path in sorted(ROOT.rglob("*.py")):
        place = path.relative_to(ROOT).as_posix()
        for construct, line in found_in(path):
            if (place, construct) in ALLOWED:
                used.add((place, construct))
            elif place != ONE_PLACE:
                offenders.append(f"{place}:{line}: {construct}")
    assert offenders == []
    assert set(ALLOWED) - used == set(), "an exception that nothing needs any more"


@pytest.mark.parametrize(
    ("code", "construct"),
    [
        ("from importlib import import_module\nimport_module(name)", "import_module"),
        ("import importlib\nimportlib.import_module(f'{name}.x')", "import_module"),
        ("__import__(name)", "__import__"),
        ("exec(text)", "exec"),
        ("eval(text)", "eval"),
        ("import importlib.util\nimportlib.util.spec_from_file_location('a', path)", "spec_from_file_location"),
        ("import runpy\nrunpy.run_path(path)", "run_path"),
        ("import os\nos.system(text)", "system"),
        ("import torch\ntorch.load(path)", "torch.load without weights_only=True"),
        ("import torch\ntorch.load(path, weights_only=False)", "torch.load without weights_only=True"),
        ("import pickle\npickle.load(file)", "pickle.load"),
        ("import pickle as p\np.load(file)", "pickle.load"),
        ("from pickle import loads\nloads(data)", "pickle.loads"),
        ("import pickle\nclass Mine(pickle.Unpickler): ...", "Unpickler"),
        ("import yaml\nyaml.load(text, Loader)", "yaml.load"),
        ("import numpy as np\nnp.load(path, allow_pickle=True)", "allow_pickle"),
        ("import subprocess\nsubprocess.run(text, shell=True)", "shell=True"),
        ("AutoConfig.from_pretrained(path)", "transformers without trust_remote_code"),
        ("AutoConfig.from_pretrained(path, trust_remote_code=True)", "trust_remote_code"),
        ("from jinja2 import Environment\nEnvironment()", "Environment"),
        ("from importlib.metadata import entry_points\nentry_points(group='x')", "entry_points"),
        ("from datasets import load_dataset\nload_dataset(path)", "load_dataset"),
    ],
)
def test_the_search_finds(code: str, construct: str) -> None:
    assert construct in [found for found, _ in dangers(ast.parse(code))]


def test_the_search_leaves_constants_and_methods_alone() -> None:
    code = (
        "from importlib import import_module\nimport re, subprocess, torch, yaml\n"
        "import_module('deepspeed'); import_module(f'{__name__}.x'); re.compile(text); module.compile(); model.eval()\n"
        "yaml.safe_load(text); torch.load(path, weights_only=True); subprocess.run(words)"
    )
    assert list(dangers(ast.parse(code))) == []
