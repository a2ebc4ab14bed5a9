"""The verdict island knows nothing of training: no import of it reaches torch, hydra, lightning or wandb."""

import ast
import subprocess
import sys
import time
from pathlib import Path

import pytest

import clozelab

PACKAGE = Path(clozelab.__file__).parent
FORBIDDEN = ("torch", "hydra", "pytorch_lightning", "lightning", "wandb", "transformers", "datasets", "tokenizers")
ISLAND = sorted(["clozelab.records", *(f"clozelab.claims.{file.stem}" for file in (PACKAGE / "claims").glob("*.py"))])


def _file(module: str) -> Path | None:
    path = PACKAGE.parent.joinpath(*module.split("."))
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file()), None)


def _imports(module: str) -> set[str]:
    """Every module that a module's text imports, wherever in the file the import stands."""
    file = _file(module)
    assert file is not None, module
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            target = ".".join([*base, *([node.module] if node.module else [])])
            found |= {target, *(f"{target}.{alias.name}" for alias in node.names)}
    return found


def _reachable(start: str) -> dict[str, str]:
    """Module -> the module that imports it, for everything reached through clozelab's own files."""
    reached, queue = {start: start}, [start]
    while queue:
        module = queue.pop()
        for name in _imports(module):
            parents = [".".join(name.split(".")[:k]) for k in range(1, name.count(".") + 2)]
            for target in parents:
                if target not in reached:
                    reached[target] = module
                    if target.startswith("clozelab") and _file(target):
                        queue.append(target)
    return reached


def test_the_walk_sees_imports():
    assert "clozelab.records" in _reachable("clozelab.claims.guard")
    assert "hydra" in _reachable("clozelab.options")


@pytest.mark.parametrize("module", ISLAND)
def test_no_import_leads_off_the_island(module):
    reached = _reachable(module)
    bridges = {name: reached[name] for name in FORBIDDEN if name in reached}
    assert not bridges, f"{module} reaches {bridges}"


def test_the_island_works_with_the_training_libraries_blocked():
    code = f"""
import importlib, sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {FORBIDDEN!r}:
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Block())
for module in {ISLAND!r}:
    importlib.import_module(module)
from clozelab.claims.schema import find_claims
from clozelab.claims.verdict import judge, verdict_text
for claim in find_claims():
    for scale in claim.scales:
        assert verdict_text(judge(claim, [], scale))
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_listing_claims_is_cheap():
    code = """
import sys, time
from clozelab.claims.schema import find_claims
assert find_claims()
heavy = {"numpy", "scipy", "matplotlib", "jinja2", "omegaconf"} & set(sys.modules)
assert not heavy, heavy
print(time.process_time())
"""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert float(done.stdout) < 0.5, f"{done.stdout} s of CPU in {time.perf_counter() - start} s"
