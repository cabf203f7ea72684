"""Patches made from diffs and from edited copies, and checked; with git itself, on made-up installs."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import AFTER, BEFORE, META, OLD, ONE_LINE, OTHER, PATH, PIN, Bench, refused, sha256

from kvmatrix.arms import apply_patch, load_patch
from kvmatrix.config import Project
from kvmatrix.envs import PinEnv
from kvmatrix.errors import InstallChangedError, UsageError
from kvmatrix.patch_files import Meta, check_name
from kvmatrix.patch_tools import check_patch, new_patch

# --- import -----------------------------------------------------------------------------------------------------------


def test_a_diff_becomes_a_patch_that_runs(bench: Bench) -> None:
    before = bench.state()
    files = {PATH: (BEFORE, AFTER), OTHER: (BEFORE, ONE_LINE), "tests/test_x.py": ("", "x = 1\n")}
    diff = bench.diff(files, "My_Fix.v2.patch", "From: A B <a@b>\nSubject: [PATCH 1/2] Fix the thing\n\n")
    result = bench.take(diff)
    assert (result.name, result.folder) == ("my-fix-v2", bench.patches / "my-fix-v2")
    assert result.sha256 == sha256(diff.read_bytes())
    assert result.pins == (PIN, OLD)
    assert [r.status for r in result.results] == ["applied", "applied"]
    assert [s.path for s in result.skipped] == ["tests/test_x.py"]
    assert result.written
    patch = load_patch(result.folder)
    assert (patch.title, patch.author) == ("Fix the thing", "A B")
    assert diff.name in patch.what
    assert result.sha256 in patch.what
    assert "tests/test_x.py" in patch.what
    for pin in (PIN, OLD):
        assert patch.pins[pin].files[0].pre_sha256 == sha256(BEFORE)
        assert bench.patched("my-fix-v2", pin) == AFTER
        assert bench.patched("my-fix-v2", pin, OTHER) == ONE_LINE
    assert bench.state() == before


def test_what_each_pin_makes_of_a_diff(bench: Bench) -> None:
    moved = BEFORE.replace("class Thing", "x = 1\n\n\nclass Thing")
    sites = {"moved": moved, "has": AFTER, "other": "x = 1\n", "none": None, "broken": BEFORE + "if:\n"}
    for pin, text in sites.items():
        bench.sites[pin] = bench.folder / pin
        if text is not None:
            bench.install(pin, text)
    result = bench.take()
    status = {r.pin: r.status for r in result.results}
    assert [status.pop(pin) for pin in (PIN, OLD, "moved", "has")] == ["applied", "applied", "applied", "already applied"]
    assert status == {"other": "does not apply", "none": "target missing", "broken": "does not compile"}
    lines = {r.pin: r.line for r in result.results}
    assert lines["has"] == "this pin has the change already"
    assert "patch failed: vllm/v1/x.py:1" in lines["other"]
    assert lines["none"] == f"vLLM none has no {PATH}"
    assert "line 21" in lines["broken"]
    assert set(load_patch(result.folder).pins) == {PIN, OLD, "moved"}


def test_a_diff_that_applies_nowhere(bench: Bench) -> None:
    bench.install(PIN, AFTER)
    bench.install(OLD, "x = 1\n")
    text = refused(bench.take)
    assert f"applies to no pin: {PIN}: this pin has the change already; {OLD}: error: patch failed" in text
    assert not bench.patches.exists()


def test_a_diff_that_changes_nothing(bench: Bench) -> None:
    diff = bench.diff({PATH: (BEFORE, ONE_LINE)})
    bench.write(diff, diff.read_text(encoding="utf-8").replace("+        return 2 * i", "+        return i"))
    assert f"leaves {PATH} unchanged" in refused(lambda: bench.take(diff))


def test_a_series_that_changes_a_file_twice(bench: Bench) -> None:
    first = bench.diff({PATH: (BEFORE, AFTER)}, "1.patch").read_bytes()
    second = bench.diff({PATH: (AFTER, AFTER + "\n\nend = 1\n")}, "2.patch").read_bytes()
    result = bench.take(bench.write(bench.folder / "both.patch", first + second))
    assert bench.patched(result.name, PIN) == AFTER + "\n\nend = 1\n"
    assert len(load_patch(result.folder).pins[PIN].files) == 1


def test_code_of_a_diff_is_not_run(bench: Bench, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    evil = f"# coding: utf-8\nopen({str(tmp_path / 'ran')!r}, 'w')\nprint('ran')\nx = '\\d'\n"
    bench.take(bench.diff({PATH: (BEFORE, evil + BEFORE)}))
    assert not (tmp_path / "ran").exists()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("bad", ["x = (\n", "x = '\0'\n", f"x = {'(' * 300}{')' * 300}\n", "# coding: nothing-real\n"])
def test_a_diff_whose_result_does_not_compile(bench: Bench, bad: str) -> None:
    diff = bench.diff({PATH: (BEFORE, "x = 1\n" + BEFORE)})
    bench.write(diff, diff.read_text(encoding="utf-8").replace("+x = 1\n", f"+{bad}"))
    assert f"gives a {PATH} that does not compile" in refused(lambda: bench.take(diff))


def test_the_same_diff_again(bench: Bench) -> None:
    first = bench.take()
    before = bench.written()
    again = bench.take()
    assert (first.written, again.written) == (True, False)
    assert again == replace(first, written=False)
    assert bench.written() == before


def test_the_same_diff_with_another_pin(bench: Bench) -> None:
    new = bench.sites.pop(PIN)
    bench.take()
    before = (bench.patches / "my-fix/patch.toml").read_text(encoding="utf-8")
    bench.sites[PIN] = new
    assert bench.take().written
    assert (bench.patches / "my-fix/patch.toml").read_text(encoding="utf-8").startswith(before)
    assert set(load_patch(bench.patches / "my-fix").pins) == {PIN, OLD}


def test_the_same_diff_on_an_install_that_was_changed(bench: Bench) -> None:
    bench.take()
    bench.install(PIN, BEFORE + "# edited\n")
    assert PIN in refused(bench.take, InstallChangedError)


def test_another_diff_of_that_name(bench: Bench) -> None:
    bench.take()
    before = bench.written()
    other = bench.diff({PATH: (BEFORE, ONE_LINE)})
    assert "holds another diff of that name" in refused(lambda: bench.take(other), UsageError)
    assert bench.written() == before
    assert bench.take(other, "other").name == "other"
    del bench.sites[OLD]
    bench.take(other, replace_other=True)
    assert bench.patched("my-fix", PIN) == ONE_LINE
    assert sorted(p.name for p in (bench.patches / "my-fix").iterdir()) == [f"{PIN}.patch", "patch.toml"]


def test_an_import_that_was_cut_off_is_done_again(bench: Bench) -> None:
    bench.write(bench.patches / "my-fix" / f"{PIN}.patch", "half")
    bench.take()
    assert bench.patched("my-fix", PIN) == AFTER


@pytest.mark.parametrize(
    ("stem", "name"),
    [("0001-Fix-Lookup", "0001-fix-lookup"), ("prüf_it  (1)", "pruf-it-1"), ("x" * 90, "x" * 60), ("--a--", "a")],
)
def test_names_from_files(bench: Bench, stem: str, name: str) -> None:
    assert bench.take(bench.diff({PATH: (BEFORE, AFTER)}, f"{stem}.diff")).name == name


@pytest.mark.parametrize("stem", ["stock", "Stock", "日本", "---"])
def test_files_that_give_no_name(bench: Bench, stem: str) -> None:
    diff = bench.diff({PATH: (BEFORE, AFTER)}, f"{stem}.diff")
    assert "gives no name" in refused(lambda: bench.take(diff), UsageError)
    assert bench.take(diff, "given").name == "given"


@pytest.mark.parametrize("name", ["stock", "", "-a", "A", "a_b", "a/b", "..", "a b", "x" * 61, "a\n"])
def test_names_that_a_patch_cannot_have(bench: Bench, name: str) -> None:
    refused(lambda: check_name(name), UsageError)
    refused(lambda: bench.take(name=name), UsageError)
    refused(lambda: bench.new(name=name), UsageError)


def test_a_name_that_is_taken(bench: Bench) -> None:
    assert "'my-fix' already" in refused(lambda: bench.take(taken={"my-fix"}), UsageError)


def test_an_import_without_pins(bench: Bench) -> None:
    bench.sites.clear()
    assert "--pin" in refused(bench.take, UsageError)


def test_an_import_that_is_refused_leaves_nothing(bench: Bench) -> None:
    diff = bench.diff({"tests/x.py": (BEFORE, AFTER)})
    assert "nothing inside the vllm package" in refused(lambda: bench.take(diff))
    assert "is not a file" in refused(lambda: bench.take(bench.folder / "none.diff"), UsageError)
    assert not bench.patches.exists()


# --- new --------------------------------------------------------------------------------------------------------------


def test_a_new_patch(bench: Bench) -> None:
    before = bench.state()
    file = bench.edit(AFTER)
    made = new_patch("fix", PIN, bench.sites[PIN], [file], bench.patches, META)
    assert (made.name, made.pin, made.patch_file, made.created) == ("fix", PIN, bench.patches / "fix" / f"{PIN}.patch", True)
    (hashes,) = made.files
    assert (hashes.path, hashes.pre_sha256, hashes.post_sha256) == (PATH, sha256(BEFORE), sha256(AFTER))
    text = made.patch_file.read_text(encoding="utf-8")
    assert text.startswith(f"diff --git a/{PATH} b/{PATH}\nindex ")
    assert text.split(f"+++ b/{PATH}\n")[1] == (
        "@@ -1,2 +1,3 @@\n from vllm.config import (\n+    Another,\n     First,\n"
        "@@ -14,3 +15,3 @@\n     def step(self, i):\n-        return i\n+        return i + len(self.groups)\n \n"
    )
    patch = load_patch(bench.patches / "fix")
    assert patch.model_dump(exclude={"pins"}) == {
        "title": "A title",
        "what": "What it does.",
        "why": "Why it is right.",
        "upstream": "none",
        "remove_when": "never",
        "author": "somebody",
        "keeps": "aligned",
    }
    assert bench.patched("fix", PIN) == AFTER
    assert bench.state() == before
    assert sorted(p.name for p in (bench.patches / "fix").iterdir()) == [f"{PIN}.patch", "patch.toml"]


def test_long_words_are_written_over_several_lines(bench: Bench) -> None:
    odd = 'One "quoted" \\ line.\nAnother: """ and ünïcode.'
    bench.new(meta=replace(META, what=odd, why="word " * 30, title='A "title" \\'))
    patch = load_patch(bench.patches / "fix")
    assert (patch.what, patch.why, patch.title) == (odd + "\n", ("word " * 30).strip() + "\n", 'A "title" \\')
    assert '\nwhy = """\nword' in (bench.patches / "fix/patch.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize("inner", ["", "vllm"], ids=["around", "package-itself"])
def test_a_tree_may_hold_more(bench: Bench, inner: str) -> None:
    """Unchanged files, compiled ones, and what lies beside the package."""
    bench.edit(AFTER)
    bench.edit(BEFORE, OTHER)
    bench.edit("x", "setup.py")
    bench.edit("x", "vllm/v1/__pycache__/x.cpython-311.pyc")
    made = new_patch("fix", PIN, bench.sites[PIN], bench.tree / inner, bench.patches, META)
    assert [f.path for f in made.files] == [PATH]


def test_two_files_and_one_without_a_last_line_feed(bench: Bench) -> None:
    bench.edit(ONE_LINE + "# end", OTHER)
    bench.new()
    assert [f.path for f in load_patch(bench.patches / "fix").pins[PIN].files] == [PATH, OTHER]
    assert bench.patched("fix", PIN, OTHER) == ONE_LINE + "# end"


def test_files_of_a_checkout(bench: Bench) -> None:
    """Where the repository's own folder has the package's name too."""
    file = bench.write(bench.folder / "vllm" / PATH, AFTER)
    assert new_patch("fix", PIN, bench.sites[PIN], [file], bench.patches, META).files[0].path == PATH


def test_nothing_that_was_changed(bench: Bench) -> None:
    file = bench.edit(BEFORE)
    assert "no .py file that differs from vLLM 2.0.0" in refused(lambda: bench.new(BEFORE))
    call = lambda: new_patch("fix", PIN, bench.sites[PIN], [file], bench.patches, META)  # noqa: E731
    assert f"{PATH} is the same as in vLLM 2.0.0" in refused(call)
    assert not bench.patches.exists()


@pytest.mark.parametrize(
    ("path", "text", "reason"),
    [
        (PATH, BEFORE + "if\n", f"the edited {PATH} does not compile: invalid syntax"),
        (PATH, BEFORE + "x = '\0'\n", f"the edited {PATH} does not compile"),
        (PATH, BEFORE.replace("\n", "\r\n"), f"{PATH} has CRLF line ends"),
        ("vllm/v1/new.py", "x = 1\n", "vLLM 2.0.0 has no vllm/v1/new.py"),
    ],
    ids=["syntax", "null-byte", "crlf", "new-file"],
)
def test_edits_that_no_patch_can_have(bench: Bench, path: str, text: str, reason: str) -> None:
    file = bench.edit(text, path)
    for edited in (bench.tree, [file]):
        assert reason in refused(lambda e=edited: new_patch("fix", PIN, bench.sites[PIN], e, bench.patches, META))
    assert not bench.patches.exists()


def test_files_that_are_named_wrongly(bench: Bench) -> None:
    def call(*files: Path) -> Callable[[], object]:
        return lambda: new_patch("fix", PIN, bench.sites[PIN], files, bench.patches, META)

    loose, file = bench.write(bench.folder / "x.py", AFTER), bench.edit(AFTER)
    text = bench.edit("words", "vllm/words.txt")
    bench.install(PIN, "word", "vllm/words.txt")
    assert "lies under no folder vllm" in refused(call(loose))
    assert "not a .py file" in refused(call(text))
    assert "is not a file" in refused(call(bench.tree / "none.py"), UsageError)
    assert "named twice" in refused(call(file, file), UsageError)
    assert "no edited file" in refused(call(), UsageError)
    (bench.folder / "empty").mkdir()
    empty = lambda: new_patch("fix", PIN, bench.sites[PIN], bench.folder / "empty", bench.patches, META)  # noqa: E731
    assert "has no folder vllm" in refused(empty, UsageError)


def test_another_pin_is_added_to_what_is_there(bench: Bench) -> None:
    bench.new()
    file = bench.patches / "fix/patch.toml"
    text = "# A comment.\n" + file.read_text(encoding="utf-8").replace('title = "A', "title   =   'A").replace(
        'itle"', "itle' # x"
    )
    bench.write(file, text)
    old, edited = "# old\n" + BEFORE, "# old\n" + ONE_LINE
    bench.install(OLD, old)
    bench.new(edited, OLD, meta=None)
    added = file.read_text(encoding="utf-8").removeprefix(text)
    assert added == (
        f'\n[pins."{OLD}"]\npatch = "{OLD}.patch"\n\n[[pins."{OLD}".files]]\npath = "{PATH}"\n'
        f'pre_sha256 = "{sha256(old)}"\npost_sha256 = "{sha256(edited)}"\n'
    )
    assert bench.patched("fix", PIN) == AFTER
    assert bench.patched("fix", OLD) == edited


def test_a_pins_entry_is_overwritten_only_by_force(bench: Bench) -> None:
    bench.new(pin=OLD)
    bench.new(meta=None)
    bench.new("# top\n" + AFTER, OLD, meta=None, force=True)
    before = bench.written()
    assert "--force" in refused(lambda: bench.new(ONE_LINE, meta=None), UsageError)
    assert bench.written() == before
    bench.new(ONE_LINE, meta=None, force=True)
    assert bench.patched("fix", PIN) == ONE_LINE
    assert bench.patched("fix", OLD) == "# top\n" + AFTER
    assert list(load_patch(bench.patches / "fix").pins) == [OLD, PIN]


def test_the_words_of_a_patch(bench: Bench) -> None:
    assert "is new: say its title" in refused(lambda: bench.new(meta=None), UsageError)
    assert "its why is empty" in refused(lambda: bench.new(meta=replace(META, why=" ")), UsageError)
    bench.new()
    assert "has another title" in refused(lambda: bench.new(pin=OLD, meta=replace(META, title="B")), UsageError)
    bench.new(pin=OLD, meta=META)


def test_a_patch_toml_that_is_damaged(bench: Bench) -> None:
    bench.write(bench.patches / "fix/patch.toml", "title = ")
    assert "not valid TOML" in refused(lambda: bench.new())


def test_the_users_git_settings_do_not_matter(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do a repository around the temporary folder, and its or the user's attributes."""
    expected = bench.new().read_bytes()
    home = tmp_path / "home"
    bench.write(
        home / ".gitconfig", "[diff]\n\talgorithm = patience\n\tcontext = 9\n\tnoprefix = true\n[core]\n\tabbrev = 20\n"
    )
    bench.write(home / ".config/git/attributes", "*.py binary\n")
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True, timeout=30)
    bench.write(tmp_path / ".gitattributes", "*.py binary\n")
    bench.write(tmp_path / ".git/info/attributes", "*.py binary\n")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / ".config"))
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", "false")
    assert bench.new(force=True).read_bytes() == expected


def test_no_git(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    diff = bench.diff({PATH: (BEFORE, AFTER)})
    monkeypatch.setenv("PATH", str(bench.folder / "nothing-here"))
    assert "git is not installed" in refused(lambda: bench.take(diff))
    assert "git is not installed" in refused(lambda: bench.new())


def test_the_projects_own_patch_comes_out_again(project: Project, pin_env: PinEnv, tmp_path: Path) -> None:
    """Byte for byte, from the edited file alone."""
    name, pin, site = project.matrix.defaults.patches[0], pin_env.pin.version, pin_env.site_packages
    patch = load_patch(project.patches / name)
    text = (project.patches / name / patch.pins[pin].patch).read_bytes()
    apply_patch(text, patch.pins[pin].files, site, tmp_path / "tree", Path(name))
    meta = Meta(**patch.model_dump(exclude={"pins", "keeps"}))
    made = new_patch(name, pin, site, tmp_path / "tree", tmp_path / "patches", meta)
    assert made.patch_file.read_bytes() == text
    assert made.files == patch.pins[pin].files
    assert load_patch(tmp_path / "patches" / name).model_dump(exclude={"pins"}) == patch.model_dump(exclude={"pins"})
    assert [c.status for c in check_patch(tmp_path / "patches", name, {pin: site})] == ["ok"]


# --- check ------------------------------------------------------------------------------------------------------------


def test_a_patch_that_is_right(bench: Bench) -> None:
    bench.new()
    bench.new(pin=OLD, meta=None)
    before = bench.written(), bench.state()
    checks = check_patch(bench.patches, "fix", {PIN: bench.sites[PIN], "3.0.0": bench.folder})
    assert [(c.pin, c.status) for c in checks] == [(PIN, "ok"), (OLD, "no environment")]
    assert "1 file with the recorded sha256" in checks[0].line
    assert OLD in checks[1].line
    assert (bench.written(), bench.state()) == before


def spoil_patch(bench: Bench) -> None:
    file = bench.patches / "fix" / f"{PIN}.patch"
    bench.write(file, file.read_text(encoding="utf-8").replace("len(self.groups)", "len(self.group)"))


def spoil_context(bench: Bench) -> None:
    file = bench.patches / "fix" / f"{PIN}.patch"
    bench.write(file, file.read_text(encoding="utf-8").replace(" def step", " def stop"))


def remove_patch(bench: Bench) -> None:
    (bench.patches / "fix" / f"{PIN}.patch").unlink()


def spoil_syntax(bench: Bench) -> None:
    folder = bench.patches / "fix"
    broken = AFTER.replace("len(self.groups)", "len(self.groups")
    file, toml = folder / f"{PIN}.patch", folder / "patch.toml"
    bench.write(file, file.read_text(encoding="utf-8").replace("len(self.groups)", "len(self.groups"))
    bench.write(toml, toml.read_text(encoding="utf-8").replace(sha256(AFTER), sha256(broken)))


def change_install(bench: Bench) -> None:
    bench.install(PIN, BEFORE + "# edited\n")


@pytest.mark.parametrize(
    ("damage", "status", "line"),
    [
        (spoil_patch, "broken", "patch.toml says"),
        (spoil_context, "broken", "does not apply"),
        (spoil_syntax, "broken", "does not compile"),
        (remove_patch, "broken", "is missing"),
        (change_install, "install changed", "the install was changed"),
    ],
)
def test_a_patch_that_is_not_right(bench: Bench, damage: Callable[[Bench], None], status: str, line: str) -> None:
    bench.install(OLD, "# old\n" + BEFORE)
    bench.new("# old\n" + AFTER, OLD)
    bench.new(meta=None)
    damage(bench)
    checks = check_patch(bench.patches, "fix", bench.sites)
    assert [(c.pin, c.status) for c in checks] == [(OLD, "ok"), (PIN, status)]
    assert line in checks[1].line
    assert "\n" not in checks[1].line


def test_checking_what_is_not_there(bench: Bench) -> None:
    bench.new()
    assert "unknown patch 'none'" in refused(lambda: check_patch(bench.patches, "none", bench.sites), UsageError)
