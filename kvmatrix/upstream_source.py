"""The checkout of vLLM whose tests are run: what it is, and what lies around its tests so that they run unchanged.

Nothing of it is copied. The tests are seen through a folder of links that has the checkout's ``tests`` but not its ``vllm``, so
that ``import tests`` is the checkout's and ``import vllm`` the installed one's.
"""

from __future__ import annotations

import ast
import email
import hashlib
import importlib.metadata
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvmatrix import installers
from kvmatrix.errors import EnvironmentBuildError, PatchError, UsageError
from kvmatrix.git import git

FOLDER = "tests/v1/simple_kv_offload"
"""vLLM's own tests of the connector."""
SETTINGS = ("pyproject.toml", "pytest.ini")
"""Where a checkout has pytest's settings; only links to them are made."""
PYTEST_PARTS = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")
CONFTEST_NEEDS = {
    "tblib": "tblib==3.1.0 --hash=sha256:670bb4582578134b3d81a84afa1b016128b429f3d48e6cbbaecc9d15675e984e",
}
"""What vLLM's tests/conftest.py imports and vLLM does not need: all that is ever installed for a checkout, and by hash."""

MODEL = "facebook/opt-125m"
MODEL_CONFIG: dict[str, Any] = {
    "model_type": "opt",
    "architectures": ["OPTForCausalLM"],
    "vocab_size": 50272,
    "hidden_size": 768,
    "word_embed_proj_dim": 768,
    "ffn_dim": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 2048,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
    "torch_dtype": "float16",
}
"""The tests name this model for its sizes alone: they make no engine of it, so there are no weights and no tokenizer."""


@dataclass(frozen=True)
class Source:
    """A checkout. ``targets`` are files or the folder that are run, relative to ``root``."""

    root: Path
    targets: tuple[str, ...]
    commit: str | None
    changed: bool
    """Whether git sees changes below ``tests``."""
    tree_sha256: str
    """Over path and content of every Python file below ``tests``."""
    version: str | None = None
    """The release whose tests these are, unchanged: by a source distribution's own word or by the commit's tag."""

    @property
    def identity(self) -> str:
        """The commit, or where that does not say it all the digest of the tests."""
        return self.commit if self.commit and not self.changed else f"tests:{self.tree_sha256}"

    def facts(self) -> dict[str, Any]:
        return {
            "commit": self.commit,
            "changed": self.changed,
            "tests_sha256": self.tree_sha256,
            "version": self.version,
            "targets": list(self.targets),
        }

    def file_sha256(self, name: str) -> str:
        """sha256 of a test file as it is now; empty where there is none (a test that another file defines)."""
        try:
            return hashlib.sha256((self.root / name).read_bytes()).hexdigest()
        except OSError:
            return ""


def open_source(path: Path, files: Sequence[str]) -> Source:
    """The checkout at ``path``; ``files`` (under ``FOLDER`` or relative to the checkout) narrow what is run.

    Raises:
        UsageError: it is no checkout with tests of the connector, or one of ``files`` is not in it.
    """
    root = path.expanduser().resolve()
    if not root.is_dir():
        raise UsageError(f"--source {path}: no such folder; give the folder of a vLLM checkout")
    if not (root / FOLDER).is_dir():
        raise UsageError(
            f"--source {path} has no {FOLDER}: give the folder of a vLLM checkout, of a release with this connector"
        )
    targets = tuple(dict.fromkeys(_target(root, name) for name in files)) or (FOLDER,)
    commit, changed = _git_state(root)
    version = None if changed else _version(root, commit)
    return Source(root, targets, commit, changed, _tree_sha256(root / "tests"), version)


def _target(root: Path, name: str) -> str:
    for candidate in (root / FOLDER / name, root / name, Path(name)):
        found = candidate.resolve()
        if found.is_file() and found.is_relative_to(root / "tests"):
            return str(found.relative_to(root))
    known = ", ".join(sorted(p.name for p in (root / FOLDER).glob("test_*.py")))
    raise UsageError(f"--test {name}: no such file in {FOLDER}: it has {known or 'none'}")


def _git_state(root: Path) -> tuple[str | None, bool]:
    """Commit of the checkout, and whether anything below its tests differs from it; None where git does not know it."""
    try:
        head = git(["rev-parse", "HEAD"], root)
        if head.returncode:
            return None, False
        state = git(["status", "--porcelain", "--", "tests"], root)
    except PatchError:  # no git, or too slow a one: the digest says what the tests are
        return None, False
    return head.stdout.decode().strip(), bool(state.returncode or state.stdout.strip())


def _version(root: Path, commit: str | None) -> str | None:
    """The release that a checkout is, None where neither a tag of its commit nor its metadata says so."""
    if commit is not None:
        try:
            tag = git(["describe", "--tags", "--exact-match", "HEAD"], root)
        except PatchError:
            return None
        name = tag.stdout.decode().strip()
        return name[1:] if not tag.returncode and name.startswith("v") else None
    try:
        metadata = email.message_from_bytes((root / "PKG-INFO").read_bytes())
    except OSError:
        return None
    return metadata["Version"] if metadata["Name"] == "vllm" else None


def _tree_sha256(tests: Path) -> str:
    total = hashlib.sha256()
    for path in sorted(tests.rglob("*.py")):
        if path.is_file():
            total.update(f"{path.relative_to(tests)}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()


def make_view(source: Source, folder: Path) -> str:
    """Fill ``folder`` with links to the checkout's tests and pytest settings; the settings' file name comes back."""
    folder.mkdir(parents=True)
    (folder / "tests").symlink_to(source.root / "tests")
    for name in SETTINGS:
        if (source.root / name).is_file():
            (folder / name).symlink_to(source.root / name)
            return name
    (folder / SETTINGS[-1]).write_text("[pytest]\n", encoding="utf-8")
    return SETTINGS[-1]


def make_hub(folder: Path) -> dict[str, str]:
    """A Hugging Face cache that knows ``MODEL``'s configuration and nothing else; the variables that name it come back."""
    revision = hashlib.sha256(json.dumps(MODEL_CONFIG, sort_keys=True).encode()).hexdigest()[:40]
    model = folder / "hub" / f"models--{MODEL.replace('/', '--')}"
    snapshot = model / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(MODEL_CONFIG, indent=1) + "\n", encoding="utf-8")
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(revision, encoding="utf-8")
    hub = str(folder / "hub")
    return {"HF_HOME": str(folder), "HF_HUB_CACHE": hub, "HUGGINGFACE_HUB_CACHE": hub, "HF_HUB_OFFLINE": "1"}


def link_pytest(folder: Path) -> Path:
    """``folder`` with links to the orchestrator's own pytest, which is pure Python: nothing goes into the environment."""
    folder.mkdir(parents=True)
    for name in PYTEST_PARTS:
        distribution = importlib.metadata.distribution(name)
        tops = {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}
        for top in sorted(tops):
            (folder / top).symlink_to(Path(str(distribution.locate_file(top))).resolve())
    return folder


def conftest_needs(source: Source, site_packages: Path) -> list[str]:
    """Names of ``CONFTEST_NEEDS`` that the checkout's conftest imports and the environment lacks."""
    try:
        tree = ast.parse((source.root / "tests" / "conftest.py").read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []  # pytest says what is wrong with it
    imported = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    imported |= {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    names = {name.partition(".")[0] for name in imported}
    return sorted(n for n in CONFTEST_NEEDS if n in names and not (site_packages / n).is_dir())


def install_needs(names: Sequence[str], tools: Path, timeout_s: float) -> list[Path]:
    """Folders under ``tools`` that hold the named modules, each installed once, by hash.

    Raises:
        EnvironmentBuildError: one could not be had.
    """
    return [_install(CONFTEST_NEEDS[name], tools / CONFTEST_NEEDS[name].partition(" ")[0], timeout_s) for name in names]


def _install(requirement: str, target: Path, timeout_s: float) -> Path:
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    installer = installers.choose()
    with tempfile.TemporaryDirectory(prefix=".installing-", dir=target.parent) as work:
        wanted, filled = Path(work) / "requirements.txt", Path(work) / "filled"
        wanted.write_text(requirement + "\n", encoding="utf-8")
        command = installer.install(Path(sys.executable))
        command += ["--no-deps", "--require-hashes", "--only-binary", ":all:", "--target", str(filled), "-r", str(wanted)]
        try:
            done = subprocess.run(
                command, env=installer.environ(), capture_output=True, text=True, timeout=timeout_s, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as e:
            raise EnvironmentBuildError(f"{target.name}, which vLLM's conftest imports, could not be installed: {e}") from e
        if done.returncode:
            why = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no reason given")
            raise EnvironmentBuildError(f"{target.name}, which vLLM's conftest imports, could not be installed: {why.strip()}")
        if not target.is_dir():
            filled.rename(target)
    return target
