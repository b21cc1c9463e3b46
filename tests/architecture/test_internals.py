"""What is private of torch and transformers stands in one adapter each, and each adapter says all that it touches."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from plait import torch_internals, transformers_internals

ROOT = Path(__file__).parents[2] / "src" / "plait"
ADAPTERS = {"torch_internals.py", "transformers_internals.py"}
SOURCES = [path for path in sorted(ROOT.rglob("*.py")) if path.name not in ADAPTERS]
PACKAGES = {"torch", "transformers"}
OF_EVERY_MODULE = {"_parameters", "_buffers", "_modules"}
OF_OTHERS = {
    *("_asdict", "_fields", "_replace"),  # named tuples
    *("_actions", "_ArgumentGroup"),  # argparse
    "_exit",  # os
    "_getframe",  # sys
    "_hp_mapping",  # DeepSpeed's parameters
    "_z3_leaf",  # DeepSpeed's modules
}
BY_NAME = {"getattr", "setattr", "hasattr", "delattr", "replaced", "import_module", "find_spec"}
PRIVATE_PATH = re.compile(r"(torch|transformers)(\.\w+)*\._[a-zA-Z]\w*(\.\w+)*")


@cache
def trees() -> dict[Path, ast.AST]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}


def is_private(name: str) -> bool:
    return re.match(r"_[a-zA-Z]", name) is not None and name not in OF_EVERY_MODULE


@cache
def touched() -> set[str]:
    """The private names that the adapters touch."""
    paths = [each.path for each in (*torch_internals.NAMES.values(), *torch_internals.ATTRIBUTES)]
    names = {path.rpartition(".")[2] for path in (*paths, *transformers_internals.ATTRIBUTES)}
    return {name for name in names if is_private(name)}


def defined(sources: list[ast.AST]) -> set[str]:
    """Private names that Plait itself gives to something."""
    found: set[str] = set()
    for node in (node for tree in sources for node in ast.walk(tree)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            found.add(node.attr)
    return found


def root_of(node: ast.expr) -> str:
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def imports(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Line, full path and local name of what is imported from torch and transformers."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES:
            for each in node.names:
                yield node.lineno, f"{node.module}.{each.name}", each.asname or each.name
        elif isinstance(node, ast.Import):
            for each in node.names:
                if each.name.split(".")[0] in PACKAGES:
                    yield node.lineno, each.name, each.asname or each.name.split(".")[0]


def private_uses(tree: ast.AST, own: set[str]) -> Iterator[tuple[int, str]]:
    roots = set()
    for line, path, name in imports(tree):
        roots.add(name)
        if any(map(is_private, path.split("."))):
            yield line, path
    strangers = touched()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in OF_OTHERS:
            ours = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            theirs = root_of(node) in roots or node.attr in strangers or node.attr not in own
            if theirs and not ours:
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in strangers:
            yield node.lineno, repr(node.value)
        elif isinstance(node, ast.Call) and (getattr(node.func, "attr", getattr(node.func, "id", "")) in BY_NAME):
            for word in node.args[:2]:
                name = str(word.value) if isinstance(word, ast.Constant) else ""
                if PRIVATE_PATH.fullmatch(name) or (is_private(name) and name not in own | OF_OTHERS):
                    yield node.lineno, ast.unparse(node)


def test_nothing_private_of_torch_or_transformers_is_used_outside_of_the_adapters() -> None:
    own = defined([*trees().values()])
    offenders = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path, tree in trees().items()
        for line, what in private_uses(tree, own)
    ]
    assert offenders == [], "put it into plait/torch_internals.py or plait/transformers_internals.py"


@pytest.mark.parametrize(
    "source",
    [
        "from torch.utils._pytree import tree_map",
        "from torch.nn.modules.batchnorm import _BatchNorm",
        "import torch._inductor.config as inductor",
        "import torch\ntorch._foreach_add_([], [])",
        "import torch\naten = torch.ops.aten\naten._to_copy",
        "from torch import nn\nnn.Module._apply",
        "def f(state): state._state_ctx.all_states",
        "def f(module): getattr(module, '_compiled_call_impl')",
        "def f(tensor): return tensor.untyped_storage()._cdata",
        "def f(tensor): return tensor._version",
        "from transformers.trainer import _is_peft_model",
        "def f(model): return model._no_split_modules",
        "def f(thing): return thing._nobody_defines_this",
        "def f(thing): return getattr(thing, '_nobody_defines_this', None)",
        "from importlib import import_module\nimport_module('torch._dynamo.config')",
    ],
)
def test_the_rule_finds(source: str) -> None:
    assert list(private_uses(ast.parse(source), own={"_version", "_apply"}))


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.optim.AdamW",
        "def f(module): return module._parameters",
        "def f(pair): return pair._asdict()",
        "class A:\n    def f(self, other): return self._x, other._x",
        "def f(module): return module.__class__",
    ],
)
def test_the_rule_leaves_alone(source: str) -> None:
    assert not list(private_uses(ast.parse(source), own={"_x"}))


def members() -> set[str]:
    """The names without an underscore that the adapter touches in private classes, and that are nowhere public."""
    paths = [each.path.split(".") for each in torch_internals.ATTRIBUTES]
    names = {path[-1] for path in paths if not is_private(path[-1]) and any(map(is_private, path))}
    return names - {"unshard", "reshard"}  # of `FSDPModule`, too


def test_members_of_private_classes_are_used_in_the_adapter_only() -> None:
    theirs = members()
    offenders = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in theirs
    ]
    assert {"post_backward", "fsdp_params", "is_unsharded"} <= theirs
    assert offenders == []


@pytest.mark.parametrize("adapter", sorted(ADAPTERS))
def test_an_adapter_lists_what_it_touches(adapter: str) -> None:
    tree = ast.parse((ROOT / adapter).read_text(encoding="utf-8"))
    paths = [each.path for each in (*torch_internals.NAMES.values(), *torch_internals.ATTRIBUTES)]
    listed = {part for path in (*paths, *transformers_internals.ATTRIBUTES) for part in path.split(".")}
    listed |= defined([tree]) | {"_ZN3c104impl26device_guard_impl_registryE", "_ZTVN2at18CUDAHooksInterfaceE"}
    listed |= {"_ZN2at6detail12getCUDAHooksEv"}
    missing = []
    for node in ast.walk(tree):
        asks = isinstance(node, ast.Call) and ast.unparse(node.func) in ("_get", "_set", "_set_meanwhile", "_get_later")
        names = [node.attr] if isinstance(node, ast.Attribute) and is_private(node.attr) else []
        for word in (*(node.args if asks else ()), node):  # type: ignore[attr-defined]
            if isinstance(word, ast.Constant) and isinstance(word.value, str):
                name = word.value.rpartition(".")[2]
                names += [name] if name.isidentifier() and (asks or is_private(word.value)) else []
        missing += [f"{node.lineno}: {name}" for name in names if name not in listed]  # type: ignore[attr-defined]
    assert missing == []


def test_the_releases_that_the_adapters_and_the_pages_name_are_the_same() -> None:
    page = (ROOT.parents[1] / "docs" / "versions.md").read_text(encoding="utf-8")
    assert all(f"| {release}" in page for release in torch_internals.CHECKED)
    assert all(f"| {release}" in page for release in transformers_internals.CHECKED)


# ---- [Note: one question about fake tensors], `plait/fake_tensors.py`

ASKS_A_TENSOR = {"has_values", "FakeTensor", "FakeTensorMode", "active_fake_mode", "detect_fake_mode", "is_fake"}
MAY_ASK_A_TENSOR = {
    *("fake_tensors.py", "torch_internals.py"),
    "distributed/fake.py",  # makes the fake world
    "plan/recorder.py",  # looks at it from outside
}
MAY_ASK_A_WORLD = {
    "distributed/fake.py",
    *("engine/update.py", "engine/offload.py", "engine/prepare.py"),
    *("distributed/offload/streams.py", "distributed/offload/params.py", "optim/offload.py"),
}


def fake_questions(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """What asks a tensor or its world whether it is fake, and the line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from ((each.name, node.lineno) for each in node.names if each.name in ASKS_A_TENSOR)
        elif isinstance(node, ast.Attribute) and node.attr in ASKS_A_TENSOR | {"fake", "fake_mode"}:
            yield node.attr, node.lineno
        elif isinstance(node, ast.Constant) and node.value in ("fake_mode", "FakeTensor"):
            yield str(node.value), node.lineno


def test_training_code_asks_in_one_place_whether_tensors_are_fake() -> None:
    offenders = []
    for path, tree in trees().items():
        name = path.relative_to(ROOT).as_posix()
        for word, line in fake_questions(tree):
            if name not in (MAY_ASK_A_WORLD if word == "fake" else MAY_ASK_A_TENSOR):
                offenders.append(f"{name}:{line}: {word}")
    assert offenders == [], "put a stand-in beside the code that needs values: plait.fake_tensors.on_fake_tensors"


@pytest.mark.parametrize(
    "source",
    [
        "from plait.torch_internals import has_values",
        "from plait import torch_internals\ntorch_internals.has_values",
        "def f(world): return world.fake",
        "def f(x): return type(x).__name__ == 'FakeTensor'",
        "def f(x): return hasattr(x, 'fake_mode')",
        "from torch._guards import detect_fake_mode",
    ],
)
def test_the_rule_finds_questions_about_fake_tensors(source: str) -> None:
    assert list(fake_questions(ast.parse(source)))
