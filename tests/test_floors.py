"""The floors of the package: a file imports only from lower floors, or from its own package (files of the root: from their own floor)."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "kvstrata"
FLOORS = {
    "types": 0, "config": 0,
    "ops": 1, "tagging": 1, "policy": 1,
    "store": 2,
    "attend": 3, "turn": 3,
    "adapters": 4,
    "session": 5, "saving": 5, "allowance": 5, "metrics": 5, "calibrate": 5,
    "intent": 6, "eval": 6,
    "cli": 7, "cli_compare": 7, "options": 7, "terminal": 7, "__main__": 7,
}  # fmt: skip
FILES = sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")
MAX_LINES = 400


def part(module: str) -> str:
    """First name below the package: `kvstrata.ops.quant` -> `ops`."""
    return module.split(".")[1]


def imported(tree: ast.AST, module: str, is_package: bool) -> set[str]:
    """Every module of kvstrata that the source imports, at any depth and under TYPE_CHECKING too, as dotted names."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: len(module.split(".")) - node.level + is_package]
                base = ".".join([*parents, *filter(None, [node.module])])
            # `from kvstrata import ops` names a module in its list
            found |= {f"kvstrata.{a.name}" for a in node.names} if base == "kvstrata" else {base}
    return {name for name in found if name.startswith("kvstrata.")}


def breaches(source: str, module: str, is_package: bool = False) -> list[str]:
    own = part(module)
    above = []
    for name in sorted(imported(ast.parse(source), module, is_package)):
        other = part(name)
        if other == own:
            continue
        roots_of_one_floor = FLOORS[other] == FLOORS[own] and all((PACKAGE / f"{x}.py").exists() for x in (own, other))
        if FLOORS[other] >= FLOORS[own] and not roots_of_one_floor:
            above.append(f"{module} (F{FLOORS[own]}) imports {name} (F{FLOORS[other]})")
    return above


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_a_file_imports_only_from_lower_floors(path: Path) -> None:
    assert part(module_name(path)) in FLOORS, f"{path} stands on no floor: add it to FLOORS"
    assert breaches(path.read_text(), module_name(path), path.name == "__init__.py") == []


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_a_file_stays_small(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_LINES


def test_the_check_sees_a_breach() -> None:
    assert breaches("import kvstrata.store.arena", "kvstrata.ops.quant")
    assert breaches("def f():\n    from kvstrata import policy", "kvstrata.ops.quant")
    assert breaches("from ..store import arena", "kvstrata.ops.quant")
    assert breaches("from ..store import arena", "kvstrata.ops", is_package=False) == []  # leaves the package
    assert breaches("from . import frame\nfrom kvstrata.ops import quant\nfrom kvstrata.types import Tier", "kvstrata.ops.quant") == []
    assert breaches("from kvstrata.types import Tier", "kvstrata.config") == []


def test_importing_the_package_is_light() -> None:
    code = "import sys, kvstrata.types, kvstrata.config; print([m for m in ('torch', 'transformers', 'triton') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
