"""Find the units of a model: which parameters are gathered, computed and freed together.

Nothing is allocated and nothing is changed here. The result lists every parameter once, with all the places (sites) of
the module tree that hold it.
"""

from __future__ import annotations

import fnmatch
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

UnitPredicate = Callable[[str, nn.Module], bool]
Pattern = str | type[nn.Module]  # class name, class path, FQN pattern; or the class
UnitPolicy = Pattern | Sequence[Pattern] | UnitPredicate

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)

# Blocks that hold less of the model than this stay in the root unit: a gather for a few rows costs more than it frees.
_MIN_SHARE = 1 / 16


@dataclass(slots=True)
class ParamSites:
    """One parameter and every place of the module tree that holds it; the first place gives the fqn."""

    fqn: str
    param: nn.Parameter
    sites: list[tuple[nn.Module, str]]


@dataclass(slots=True)
class UnitPlan:
    """A unit to be: the module whose forward uses it, and its parameters. The root unit has fqn ""."""

    fqn: str
    module: nn.Module
    params: list[ParamSites] = field(default_factory=list)

    @property
    def is_root(self) -> bool:
        """Whether this is the root unit."""
        return self.fqn == ""


def _num_params(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def _has_own_forward(module: nn.Module) -> bool:
    is_defined = "forward" in module.__dict__ or type(module).forward is not nn.Module.forward  # of its own: compiled
    return is_defined and not isinstance(module, _CONTAINERS)


def can_be_unit(module: nn.Module) -> bool:
    """Whether the module is called, so that hooks can gather what it holds."""
    return _has_own_forward(module) and not _is_read_by_its_parent(module)


def _is_block(module: nn.Module) -> bool:
    return _has_own_forward(module) and not isinstance(module, nn.Sequential) and _num_params(module) > 0


def _is_read_by_its_parent(module: nn.Module) -> bool:
    """Whether the parent uses the weights without calling the module, as `MultiheadAttention` does its `out_proj`."""
    return isinstance(module, NonDynamicallyQuantizableLinear)


def _find_repeated_blocks(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """Outermost modules of one class that stand at least twice in a list or sequence and hold a share of the model."""
    by_class: dict[type, list[tuple[str, nn.Module]]] = defaultdict(list)

    def visit(prefix: str, module: nn.Module) -> None:
        listed = isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
        classes: dict[type, int] = defaultdict(int)
        for child in module._modules.values():  # with repeats: one block listed twice is a repeated block
            if child is not None and _is_block(child):
                classes[type(child)] += 1
        for name, child in module.named_children():
            fqn = f"{prefix}{name}"
            if listed and classes.get(type(child), 0) >= 2:
                by_class[type(child)].append((fqn, child))
            else:
                visit(f"{fqn}.", child)

    visit("", root)
    total = _num_params(root)
    blocks = []
    for found in by_class.values():
        if sum(_num_params(module) for _, module in found) >= _MIN_SHARE * total:
            blocks += found
    return blocks


def _class_names(module: nn.Module) -> set[str]:
    cls = type(module)
    return {cls.__name__, f"{cls.__module__}.{cls.__qualname__}"}


def _is_named(fqn: str, module: nn.Module, pattern: Pattern) -> bool:
    if isinstance(pattern, type):
        return isinstance(module, pattern)
    return pattern in _class_names(module) or fnmatch.fnmatchcase(fqn, pattern)


def match_modules(
    root: nn.Module, patterns: Sequence[Pattern], argument: str = "units", fallback: str = "'auto'"
) -> list[tuple[str, nn.Module]]:
    """The modules below `root`, with their fqns, that classes, class names and paths, or FQN patterns name.

    Raises:
        ValueError: if a pattern matches nothing, naming the user's `argument` and a `fallback` for it.
    """
    named = [(fqn, module) for fqn, module in root.named_modules() if fqn]
    found = []
    for pattern in patterns:
        hits = [(fqn, module) for fqn, module in named if _is_named(fqn, module, pattern)]
        if not hits:
            classes = sorted({type(module).__name__ for _, module in named if _num_params(module)})
            raise ValueError(
                f"Expected `{argument}` to name a class or an FQN pattern of this model, got {pattern!r}, which "
                f"matches nothing. Classes with parameters: {', '.join(classes)}; FQNs look like "
                f"{', '.join(repr(fqn) for fqn, _ in named[:3])}. Use one of them, or {argument}={fallback}."
            )
        found += hits
    return list(dict(found).items())


def _match(root: nn.Module, policy: Sequence[Pattern] | UnitPredicate) -> list[tuple[str, nn.Module]]:
    if not isinstance(policy, Sequence):
        found = [(fqn, module) for fqn, module in root.named_modules() if fqn and policy(fqn, module)]
        if not found:
            raise ValueError("Expected `units` to select at least one module, got a predicate that selects none.")
    else:
        found = match_modules(root, policy)
    return [pair for pair in found if not _is_read_by_its_parent(pair[1])]


def _select(root: nn.Module, policy: UnitPolicy) -> list[tuple[str, nn.Module]]:
    if policy == "auto":
        return _find_repeated_blocks(root)
    selected = _match(root, [policy] if isinstance(policy, (str, type)) else policy)
    for fqn, module in selected:
        if not _has_own_forward(module):
            raise ValueError(
                f"Expected units to be modules with a forward, got `{fqn}` ({type(module).__name__}), which is only a "
                f"container. Select its children, for example {fqn + '.*'!r}."
            )
    # `torch.compile(module)` is a module around it; hooks inside would be traced.
    wrappers = {id(m._modules["_orig_mod"]): (fqn, m) for fqn, m in root.named_modules() if "_orig_mod" in m._modules}
    return [wrappers.get(id(module), (fqn, module)) for fqn, module in selected]


def _collect_sites(root: nn.Module) -> dict[int, tuple[ParamSites, list[str]]]:
    """Every parameter by id, with its sites and the fqn of the module at each site (also of shared modules)."""
    found: dict[int, tuple[ParamSites, list[str]]] = {}
    seen: set[tuple[int, str]] = set()
    for module_fqn, module in root.named_modules(remove_duplicate=False):
        for name, param in module._parameters.items():
            if param is None:
                continue
            fqn = f"{module_fqn}.{name}" if module_fqn else name
            entry = found.setdefault(id(param), (ParamSites(fqn, param, []), []))
            entry[1].append(module_fqn)
            if (id(module), name) not in seen:
                seen.add((id(module), name))
                entry[0].sites.append((module, name))
    return found


def _owners(module_fqn: str, modules: dict[str, nn.Module], units: dict[int, UnitPlan]) -> list[UnitPlan]:
    """The units around a module, outermost first, the root unit in front."""
    parts = module_fqn.split(".") if module_fqn else []
    chain = [units[id(modules[""])]]
    for end in range(1, len(parts) + 1):
        unit = units.get(id(modules[".".join(parts[:end])]))
        if unit is not None:
            chain.append(unit)
    return chain


def divide(root: nn.Module, selected: Mapping[str, nn.Module]) -> list[UnitPlan]:
    """The units, in the order of the module tree, where `selected` modules, by fqn, are units besides the root."""
    modules = dict(root.named_modules(remove_duplicate=False))
    units: dict[int, UnitPlan] = {id(root): UnitPlan("", root)}
    for fqn, module in selected.items():
        units.setdefault(id(module), UnitPlan(fqn, module))
    for sites, module_fqns in _collect_sites(root).values():
        common = _owners(module_fqns[0], modules, units)
        for module_fqn in module_fqns[1:]:
            other = {id(unit) for unit in _owners(module_fqn, modules, units)}
            common = [unit for unit in common if id(unit) in other]
        common[-1].params.append(sites)
    order = {id(module): position for position, module in enumerate(modules.values())}
    return sorted((unit for unit in units.values() if unit.params), key=lambda unit: order[id(unit.module)])


def select_units(root: nn.Module, policy: UnitPolicy = "auto") -> dict[str, nn.Module]:
    """The modules that are to be units besides the root, by fqn; see `find_units`."""
    return dict(_select(root, policy))


def find_units(root: nn.Module, policy: UnitPolicy = "auto") -> list[UnitPlan]:
    """Divide the parameters of `root` into units, in the order of the module tree; the root unit, if any, comes first.

    A parameter belongs to the innermost unit that contains every module holding it: tied parameters go to the lowest
    common owner, what lies in no unit to the root unit.

    Args:
        root: the whole model.
        policy: "auto" for the repeated blocks (children of one class in a ModuleList, ModuleDict or Sequential);
            classes, class names or paths and FQN patterns (`fnmatch`), one or several; or a predicate
            `(fqn, module) -> bool`.

    Raises:
        ValueError: if a name or the predicate matches nothing, or a match has no forward of its own.
    """
    return divide(root, select_units(root, policy))


def find_kept(plans: Sequence[UnitPlan], reshard_after_forward: bool | Mapping[str, bool]) -> set[str]:
    """The fqns of the units that stay unsharded from their forward to their backward.

    Raises:
        ValueError: if a pattern matches no unit.
    """
    fqns = [plan.fqn for plan in plans if not plan.is_root]  # the root unit always stays
    if isinstance(reshard_after_forward, bool):
        return set() if reshard_after_forward else set(fqns)
    kept: set[str] = set()
    for pattern, reshards in reshard_after_forward.items():
        hits = fnmatch.filter(fqns, pattern)
        if not hits:
            raise ValueError(
                f"Expected the patterns of `reshard_after_forward` to name units, got {pattern!r}, which matches none "
                f"of {', '.join(map(repr, fqns[:3]))}, ... Use fqns of units."
            )
        kept = kept - set(hits) if reshards else kept | set(hits)
    return kept
