"""Commands that only look must not import what trains: checked by what is imported, not by the clock."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "pytorch_lightning", "hydra", "wandb", "datasets", "transformers", "scipy", "matplotlib", "numpy")


@pytest.mark.parametrize(
    "arguments", [["--help"], ["claims"], ["run", "--help"], ["cost", "--help"], ["export", "--help"]]
)
def test_looking_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        "from clozelab.cli import main\n"
        "try:\n"
        f"    main({arguments!r})\n"
        "except SystemExit:\n"
        "    pass\n"
        f"print('HEAVY', [name for name in {HEAVY!r} if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().splitlines()[-1] == "HEAVY []"
