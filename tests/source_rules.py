"""Rules that the source text must obey. Each takes a path relative to the repository and the text.

Each returns what it found, as `path:line: what`.
"""

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 59

PACKAGE = "fsdp_strategy"
# Layer -> what it may import of the package. Files at the package's top may import everything.
LAYERS = {
    "engine": {"engine"},
    "checkpoint": {"checkpoint", "engine"},
    "insight": {"insight", "engine"},
}
LIGHTNING = {"lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning"}
RIVAL = re.compile(r"torch\.distributed\.(fsdp|_composable\.(fsdp|fully_shard))(\.|$)")
COLLECTIVES = re.compile(
    r"torch\.distributed\.("
    r"(distributed_c10d\.)?("
    r"(all_gather|reduce_scatter|all_reduce|reduce|broadcast|all_to_all|gather|scatter)(_\w+)?"
    r"|isend|irecv|send|recv|batch_isend_irecv|P2POp|(monitored_)?barrier|\w+_object(_list)?)"
    r"|(_functional_collectives|nn\.functional)\.\w+)"
)
GROUPS = re.compile(
    r"torch\.distributed\.((distributed_c10d|device_mesh)\.)?"
    r"(new_group|new_subgroups\w*|split_group|shrink_group|init_process_group|init_device_mesh|DeviceMesh(\.\w+)?)"
)
STREAMS = re.compile(r"torch\.(cuda\.(\w*Stream\w*|Event|\w*stream)|(accelerator\.)?\w*[sS]tream|Event)")


@dataclass(frozen=True)
class Name:
    """A dotted name as the text means it: `dist.all_reduce` is `torch.distributed.all_reduce`."""

    dotted: str
    line: int
    imported: bool = False
    called: bool = False


Rule = Callable[[str, str], list[str]]


def uses_no_rival(path: str, source: str) -> list[str]:
    """torch's own FSDP is imported by benchmarks only, to race against it."""
    if path.startswith("benchmarks/"):
        return []
    return _found(path, [name for name in _names(path, ast.parse(source)) if RIVAL.match(name.dotted)])


def lightning_stays_at_the_top(path: str, source: str) -> list[str]:
    """The layers below the package's top files know torch only."""
    if _layer(path) is None:
        return []
    names = _names(path, ast.parse(source))
    return _found(path, [name for name in names if name.imported and name.dotted.split(".")[0] in LIGHTNING])


def arrows_go_down(path: str, source: str) -> list[str]:
    """A layer imports itself and the layers below it, never the package's top."""
    layer = _layer(path)
    if layer is None:
        return []
    allowed = "|".join(LAYERS.get(layer, {layer, "engine"}))
    upward = re.compile(rf"{PACKAGE}(?!\.({allowed})\b)(\.|$)")
    names = _names(path, ast.parse(source))
    return _found(path, [name for name in names if name.imported and upward.match(name.dotted)])


def collectives_are_in_one_file(path: str, source: str) -> list[str]:
    """Only `engine/collectives.py` calls torch.distributed operations."""
    if _layer(path) is None or path == f"{PACKAGE}/engine/collectives.py":
        return []
    return _found(path, [name for name in _names(path, ast.parse(source)) if COLLECTIVES.fullmatch(name.dotted)])


def groups_are_made_in_one_file(path: str, source: str) -> list[str]:
    """Only `engine/mesh.py` creates groups and meshes. Others may name the types."""
    if _layer(path) is None or path == f"{PACKAGE}/engine/mesh.py":
        return []
    called = [name for name in _names(path, ast.parse(source)) if name.called]
    return _found(path, [name for name in called if GROUPS.fullmatch(name.dotted)])


def streams_are_in_one_file(path: str, source: str) -> list[str]:
    """Only `engine/streams.py` touches device streams and events."""
    if _layer(path) is None or path == f"{PACKAGE}/engine/streams.py":
        return []
    return _found(path, [name for name in _names(path, ast.parse(source)) if STREAMS.fullmatch(name.dotted)])


def files_are_short(path: str, source: str) -> list[str]:
    """A file has at most 400 lines."""
    lines = len(source.splitlines())
    return [f"{path}: {lines} lines, at most {MAX_FILE_LINES}"] if lines > MAX_FILE_LINES else []


def functions_are_short(path: str, source: str) -> list[str]:
    """A function has fewer than 60 lines, decorators aside."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                found.append(f"{path}:{node.lineno}: `{node.name}` has {lines} lines, at most {MAX_FUNCTION_LINES}")
    return found


RULES: tuple[Rule, ...] = (
    uses_no_rival,
    lightning_stays_at_the_top,
    arrows_go_down,
    collectives_are_in_one_file,
    groups_are_made_in_one_file,
    streams_are_in_one_file,
    files_are_short,
    functions_are_short,
)


def _found(path: str, names: list[Name]) -> list[str]:
    return [f"{path}:{name.line}: {name.dotted}" for name in names]


def _layer(path: str) -> str | None:
    """The folder under the package, None for files at its top or outside."""
    parts = PurePosixPath(path).parts
    return parts[1] if len(parts) > 2 and parts[0] == PACKAGE else None


def _names(path: str, tree: ast.Module) -> list[Name]:
    """All imports, and all uses of imported names, in full."""
    imports = list(_imports(path, tree))
    known = {local: name.dotted for local, name in imports}
    return [*(name for _, name in imports), *_loaded_by_text(tree), *_uses(tree, known)]


def _imports(path: str, tree: ast.Module) -> Iterator[tuple[str, Name]]:
    """Pairs of the local name and what it stands for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                yield alias.asname or top, Name(alias.name if alias.asname else top, node.lineno)
                yield "", Name(alias.name, node.lineno, imported=True)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(path, node)
            for alias in node.names:
                dotted = base if alias.name == "*" else f"{base}.{alias.name}"
                yield alias.asname or alias.name, Name(dotted, node.lineno, imported=True)


def _absolute(path: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parents = PurePosixPath(path).parts[: -node.level]
    return ".".join([*parents, *([node.module] if node.module else [])])


def _uses(tree: ast.Module, known: dict[str, str]) -> Iterator[Name]:
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    parts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name | ast.Call) and id(node) not in parts:
            dotted = _resolve(node, known)
            if dotted:
                yield Name(dotted, node.lineno, called=id(node) in called)


def _resolve(node: ast.expr, known: dict[str, str]) -> str | None:
    """`d.x.y` with `d` known, and `getattr(d.x, "y")` alike. None for everything that was not imported."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Attribute):
        base, attribute = _resolve(node.value, known), node.attr
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
        base, attribute = _resolve(node.args[0], known), getattr(node.args[1], "value", "")
    else:
        return None
    return f"{base}.{attribute}" if base else None


def _loaded_by_text(tree: ast.Module) -> Iterator[Name]:
    """Modules named in `import_module("…")` and `__import__("…")`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and re.search(r"(^|\.)(import_module|__import__)$", ast.unparse(node.func)):
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant):
                    yield Name(str(argument.value), node.lineno, imported=True)
