"""The wheel holds configurations and claims, and works from any folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_wheel_carries_conf_and_experiments(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)], check=True)
    (wheel,) = tmp_path.glob("clozelab-*.whl")
    installed, elsewhere = tmp_path / "installed", tmp_path / "elsewhere"
    elsewhere.mkdir()
    subprocess.run([*pip, "install", "--no-deps", "--target", str(installed), str(wheel)], check=True)

    def run(*arguments: str) -> str:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=elsewhere,
            env=os.environ | {"PYTHONPATH": str(installed)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    assert run("-c", "import clozelab; print(clozelab.__file__)").startswith(str(installed))
    listed = run("-m", "clozelab.cli", "claims")
    assert "sop-vs-nsp" in listed
    assert "static-vs-dynamic-masking" in listed
    code = (
        "from clozelab.claims.schema import resolve_claim\n"
        "from clozelab.running.claim_run import make_plan\n"
        "from pathlib import Path\n"
        "print(len(make_plan(resolve_claim('sop-vs-nsp'), 'smoke', Path('runs')).cells))\n"
        "import hydra_plugins.clozelab_local.launcher as launcher; print(launcher.__file__)\n"
    )
    cells, launcher = run("-c", code).split()
    assert int(cells) == 6
    assert launcher.startswith(str(installed))
