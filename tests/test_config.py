"""``matrix.toml``: what it holds is validated, and what is wrong is said in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from kvmatrix.config import LEVELS, Geometry, Project, find_project, load_matrix
from kvmatrix.errors import DeviceError, UsageError


@pytest.fixture
def text(project: Project) -> str:
    return (project.root / "matrix.toml").read_text(encoding="utf-8")


def refused(folder: Path, text: str | bytes) -> str:
    path = folder / "matrix.toml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(UsageError) as caught:
        load_matrix(path)
    message = str(caught.value)
    assert message.startswith("matrix.toml")
    assert "\n" not in message
    return message


def replaced(text: str, old: str, new: str) -> str:
    assert old in text
    return text.replace(old, new, 1)


def test_the_projects_matrix_loads(project: Project) -> None:
    matrix = project.matrix
    pin = matrix.pin(matrix.defaults.pin, matrix.defaults.device)
    assert (project.root / pin.lock).is_file()
    assert (project.patches / matrix.defaults.patches[0] / "patch.toml").is_file()
    assert {b for g in matrix.geometries for b in g.backends} == {b for p in matrix.pins for b in p.backends}


def test_an_unknown_pin_names_what_is_known(project: Project) -> None:
    with pytest.raises(UsageError, match=r"'0\.1\.0'.*matrix\.toml has .*0\.32\.0 \(host\)"):
        project.matrix.pin("0.1.0", "host")


def test_a_device_without_a_pin(project: Project) -> None:
    with pytest.raises(DeviceError, match="cuda"):
        project.matrix.pin("0.32.0", "cuda")


def test_an_unknown_key_at_the_top(tmp_path: Path, text: str) -> None:
    assert "surprise" in refused(tmp_path, "surprise = 1\n" + text)


def test_an_unknown_key_inside(tmp_path: Path, text: str) -> None:
    assert "budgets.job" in refused(tmp_path, replaced(text, "jobs = 2", "job = 2"))


def test_text_that_is_no_toml(tmp_path: Path, text: str) -> None:
    assert "not valid TOML" in refused(tmp_path, replaced(text, "[defaults]", "[defaults"))


def test_bytes_that_are_no_text(tmp_path: Path, text: str) -> None:
    refused(tmp_path, text.encode() + b"# \xff\xfe\n")


def test_a_file_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not found"):
        load_matrix(tmp_path / "matrix.toml")


def test_another_schema(tmp_path: Path, text: str) -> None:
    assert "schema" in refused(tmp_path, replaced(text, "schema = 1", "schema = 2"))


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("prefix = 32", "prefix = 33", "a multiple of block"),
        ("prefix = 32", "prefix = 128", "not misaligned"),
        ("prompt = 161", "prompt = 64", "leaves nothing"),
        ("block = 32", "block = 0", "greater than 0"),
        ("block = 32", "block = -32", "greater than 0"),
        ('backends = ["CPU_ATTN"]', 'backends = ["CPU_ATTEN"]', "CPU_ATTEN"),
    ],
    ids=["odd-prefix", "aligned-prefix", "short-prompt", "zero-block", "negative-block", "misspelt-backend"],
)
def test_a_bad_geometry(tmp_path: Path, text: str, old: str, new: str, what: str) -> None:
    geometry = text.index("[[geometries]]")
    assert what in refused(tmp_path, text[:geometry] + replaced(text[geometry:], old, new))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"layers": "csf"}, "pattern"),
        ({"layers": "cdf", "prefix": 256, "prompt": 417}, "boundary of chunk 256"),
        ({"layers": "ccf", "prefix": 128, "prompt": 417}, "boundary of chunk 128"),
        ({"layers": "cdf", "prefix": 128, "prompt": 417}, ""),
        ({"layers": "sf", "prefix": 128, "prompt": 417}, ""),
        ({"layers": "cc"}, ""),
        ({"chunk": 120}, ""),
        ({"chunk": 32}, ""),
    ],
)
def test_what_a_geometry_may_ask(change: dict[str, object], what: str) -> None:
    """A prefix must be misaligned for some chunk size where it can be, which in chunks of one block it cannot; what vLLM alone
    can refuse may be asked."""
    asked = {"backends": ["CPU_ATTN"], "block": 32, "chunk": 128, "prompt": 161, "prefix": 32} | change
    if not what:
        assert Geometry.model_validate(asked).layers == change.get("layers", "")
        return
    with pytest.raises(ValidationError, match=what):
        Geometry.model_validate(asked)


def test_two_geometries_that_would_share_their_cells_ids(tmp_path: Path, text: str) -> None:
    """Its mode is one of the first geometry's, and a level is not in an id: its rows would replace the first one's."""
    extra = '[[geometries]]\nmodes = ["eager"]\nbackends = ["CPU_ATTN"]\nblock = 32\nchunk = 128\nprompt = 161\nprefix = 32\n\n'
    start = text.index("[[geometries]]")
    told = refused(tmp_path, text[:start] + extra + text[start:])
    assert "two geometries have backend CPU_ATTN, block 32, chunk 128, prompt 161, prefix 32" in told


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("chunks = [8] }", "chunks = [10] }", "multiple of block 4"),
        ('name = "two-sizes", chunks = [8, 12]', 'name = "one-size", chunks = [8, 12]', "the same name"),
        ("programs = 50", "programs = 0", "programs"),
    ],
)
def test_a_stateful_test_that_cannot_be(tmp_path: Path, text: str, old: str, new: str, what: str) -> None:
    start = text.index("[scheduler.stateful]")
    assert what in refused(tmp_path, text[:start] + replaced(text[start:], old, new))


def test_two_pins_of_one_version_and_device(tmp_path: Path, text: str) -> None:
    start, end = text.index("[[pins]]"), text.index("# A geometry")
    assert "two pins" in refused(tmp_path, text[:end] + text[start:end] + text[end:])


def test_an_extended_pin_is_not_the_default(tmp_path: Path, text: str) -> None:
    assert "extended" in refused(
        tmp_path, replaced(text, 'device = "host"\ndistribution', 'device = "host"\nextended = true\ndistribution')
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('mode = ["eager", "compiled"]', 'mode = ["fast"]'),
        ('layers = "cf" ', 'layers = "cx" '),
        ("max_logprob_error = 0.005", "max_logprob_error = 0"),
        ("cell_timeout_s = 300", 'cell_timeout_s = "long"'),
        ("blocks = 7", "blocks = 1"),
        ('device = "host"', 'device = "tpu"'),
    ],
)
def test_a_value_that_does_not_validate(tmp_path: Path, text: str, old: str, new: str) -> None:
    refused(tmp_path, replaced(text, old, new))


def test_the_project_is_found_upward(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "matrix.toml").write_text(text, encoding="utf-8")
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    assert find_project(inner).root == tmp_path.resolve()
    monkeypatch.chdir(inner)
    assert find_project().root == tmp_path.resolve()


def test_no_project(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no matrix\.toml"):
        find_project(tmp_path)


def test_variables_name_the_root_and_the_home(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "matrix.toml").write_text(text, encoding="utf-8")
    monkeypatch.setenv("KVMATRIX_ROOT", str(tmp_path))
    monkeypatch.delenv("KVMATRIX_HOME", raising=False)
    found = find_project(Path("/"))
    assert found.root == tmp_path.resolve()
    assert found.home == tmp_path.resolve() / ".kvmatrix"
    monkeypatch.setenv("KVMATRIX_HOME", str(tmp_path / "elsewhere"))
    assert found.home == (tmp_path / "elsewhere").resolve()


def test_the_full_group_past_the_last(tmp_path: Path, text: str) -> None:
    assert "full_at 9 is past the last of 3 groups" in refused(tmp_path, replaced(text, "full_at = 2 }", "full_at = 9 }"))


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("windows = [2]", "windows = [1]", "to two tokens at least"),
        ('name = "full"\n', 'name = "one-size"\n', "two sweeps have the same name"),
        ("windows = [2], periods", "chunks = [8], periods", "must not be summed up"),
        ('residencies = ["every-subset"]', 'residencies = ["some"]', "residencies"),
        ("chunks = [32]\nperiods = 4", "chunks = [32, 64]\nperiods = 4", "the class of a hit is told by one chunk size"),
        ("quick_programs = 20", "quick_programs = 0", "quick_programs"),
    ],
)
def test_a_sweep_that_cannot_be(tmp_path: Path, text: str, old: str, new: str, what: str) -> None:
    start = text.index("[[scheduler.classes]]")
    assert what in refused(tmp_path, text[:start] + replaced(text[start:], old, new))


def test_what_a_level_has(project: Project) -> None:
    names = {level: [s.name for s in project.matrix.at_level(level).scheduler.sweeps] for level in LEVELS}
    assert "one-size" in names["quick"]
    assert "block-128" not in names["default"]
    assert names["full"] == [s.name for s in project.matrix.scheduler.sweeps]
    assert project.matrix.at_level("full") == project.matrix


def test_a_control_has_no_chunks(project: Project) -> None:
    assert [s.name for s in project.matrix.scheduler.sweeps if s.is_control] == ["full", "sliding", "sliding-tiny"]
