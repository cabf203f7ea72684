"""Patches ported between pins; with git itself, on made-up installs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from conftest import AFTER, BEFORE, OLD, ONE_LINE, OTHER, PATH, PIN, Bench, refused, sha256

from kvmatrix import patch_files
from kvmatrix.arms import load_patch
from kvmatrix.errors import InstallChangedError, UsageError
from kvmatrix.patch_port import PortConflictError, refresh_patch
from kvmatrix.patch_tools import import_patch, new_patch


def test_a_port_to_a_pin_with_the_same_file(bench: Bench) -> None:
    text = bench.new(pin=OLD).read_bytes()
    ported = bench.refresh()
    assert (ported.name, ported.from_pin, ported.to_pin, ported.method) == ("fix", OLD, PIN, "apply")
    assert [(h.old_line, h.new_line, h.state) for h in ported.hunks] == [(1, 1, "clean"), (14, 14, "clean")]
    assert ported.uncertain == ()
    assert ported.patch_file == bench.patches / "fix" / f"{PIN}.patch"
    assert ported.patch_file.read_bytes() == text
    assert bench.patched("fix", PIN) == AFTER


def test_a_port_whose_hunks_move(bench: Bench) -> None:
    bench.new(pin=OLD)
    toml = (bench.patches / "fix/patch.toml").read_text(encoding="utf-8")
    newer = "# one\n# two\n" + BEFORE.replace("    def step", "    def more(self):\n        return 1\n\n    def step")
    bench.install(PIN, newer)
    ported = bench.refresh()
    assert [(h.old_line, h.new_line, h.state) for h in ported.hunks] == [(1, 3, "moved"), (14, 19, "moved")]
    assert ported.uncertain == (
        f"{PATH}: hunk at line 1 moved to line 3 (+2)",
        f"{PATH}: hunk at line 14 moved to line 19 (+5)",
    )
    assert "@@ -3,2 +3,3 @@\n" in ported.patch_file.read_text(encoding="utf-8")
    assert (bench.patches / "fix/patch.toml").read_text(encoding="utf-8").startswith(toml)
    assert bench.patched("fix", PIN) == newer.replace("    First", "    Another,\n    First").replace(
        "return i\n", "return i + len(self.groups)\n"
    )


def test_a_port_where_git_needs_the_old_file(bench: Bench) -> None:
    """With three lines of context: apply misses one of them, the three-way merge knows that the new pin changed it."""
    diff = bench.diff({PATH: (BEFORE, ONE_LINE)}, "fix.diff")
    import_patch(diff, {OLD: bench.sites[OLD]}, bench.patches)
    newer = BEFORE.replace("return total", "return -total")
    bench.install(PIN, newer)
    ported = bench.refresh()
    assert ported.method == "merge"
    assert [h.state for h in ported.hunks] == ["clean"]
    assert ported.uncertain == ()
    assert bench.patched("fix", PIN) == newer.replace("return i\n", "return 2 * i\n")


def test_functions_that_differ_are_named(bench: Bench) -> None:
    bench.new(AFTER.replace("total = 0", "total = 1"), OLD)
    bench.install(PIN, BEFORE.replace("return total", "return -total"))
    ported = bench.refresh()
    differ = [line for line in ported.uncertain if "differs between" in line]
    assert differ == [f"{PATH}: Thing.size is changed by the patch, and differs between vLLM {OLD} and {PIN}"]


def test_functions_that_are_gone_are_named(bench: Bench) -> None:
    bench.new(ONE_LINE, OLD)
    bench.install(PIN, BEFORE.replace("class Thing", "class Gadget"))
    ported = bench.refresh()
    assert f"{PATH}: Thing.step is changed by the patch, and vLLM {PIN} has no such function" in ported.uncertain


def test_names_that_the_new_pin_lacks(bench: Bench) -> None:
    """The port applies and compiles; it would fail only when the line runs."""
    bench.new(pin=OLD)
    bench.install(PIN, BEFORE.replace("self.groups", "self.parts"))
    ported = bench.refresh()
    assert ported.method == "apply"
    assert [h.state for h in ported.hunks] == ["clean", "clean"]
    assert ported.uncertain == (f"{PATH}: the patch uses groups, which vLLM {PIN}'s file does not have",)


def test_what_a_compiler_would_warn_of_is_no_fault(bench: Bench) -> None:
    for pin in (OLD, PIN):
        bench.install(pin, BEFORE + "pattern = '\\d'\n")
    bench.new(AFTER + "pattern = '\\d'\n", OLD)
    assert bench.refresh().uncertain == ()


def test_a_hunk_that_the_new_pin_has_already(bench: Bench) -> None:
    bench.new(pin=OLD)
    newer = BEFORE.replace("    First,\n", "    Another,\n    First,\n")
    bench.install(PIN, newer)
    ported = bench.refresh()
    assert ported.method == "merge"
    assert [h.state for h in ported.hunks] == ["already there", "moved"]
    assert ported.uncertain[0] == f"{PATH}: hunk at line 1 is in the new pin already, left out"
    assert bench.patched("fix", PIN) == AFTER


def test_a_change_that_the_new_pin_has_already(bench: Bench) -> None:
    bench.new(pin=OLD)
    bench.install(PIN, AFTER)
    before = bench.written()
    assert "has the change of 'fix' already" in refused(bench.refresh)
    assert bench.written() == before


def test_a_file_that_has_the_change_already_is_left_out(bench: Bench) -> None:
    bench.edit(ONE_LINE, OTHER)
    bench.new(pin=OLD)
    bench.install(PIN, ONE_LINE, OTHER)
    ported = bench.refresh()
    assert [f.path for f in load_patch(bench.patches / "fix").pins[PIN].files] == [PATH]
    assert f"{OTHER}: hunk at line 14 is in the new pin already, left out" in ported.uncertain


def test_a_port_that_conflicts(bench: Bench) -> None:
    bench.edit(BEFORE + "end = 1\n", OTHER)
    bench.new(pin=OLD)
    before = bench.written()
    bench.install(PIN, "# top\n" + BEFORE.replace("return i\n", "return i - 1\n"))
    with pytest.raises(PortConflictError) as caught:
        bench.refresh()
    error = caught.value
    assert [(h.path, h.state, h.new_line) for h in error.hunks] == [
        (PATH, "moved", 2),
        (PATH, "conflict", None),
        (OTHER, "clean", 19),
    ]
    assert error.hunks[1].line == f"{PATH}: hunk at line 14 conflicts"
    text = (error.written / PATH).read_text(encoding="utf-8")
    lines = text.splitlines()
    first, last = lines.index(f"<<<<<<< vLLM {PIN}") + 1, lines.index(f">>>>>>> fix on vLLM {OLD}") + 1
    assert f"{error.written / PATH} lines {first}-{last}, then run" in str(error)
    assert "    Another,\n" in text
    assert (error.written / OTHER).read_text(encoding="utf-8") == BEFORE + "end = 1\n"
    assert error.written.parent == bench.folder / "scratch"
    assert bench.written() == before
    # As the message says: resolved there, it makes the pin's file.
    resolved = "\n".join([*lines[: first - 1], "        return i - 1 + len(self.groups)", *lines[last:]]) + "\n"
    bench.write(error.written / PATH, resolved)
    new_patch("fix", PIN, bench.sites[PIN], error.written, bench.patches)
    assert bench.patched("fix", PIN) == resolved
    with pytest.raises(PortConflictError) as again:
        bench.refresh(force=True)
    assert again.value.written != error.written


def test_a_place_that_git_mistakes(bench: Bench) -> None:
    """The context fits at two places, and in the new pin the wrong one is where the right one was."""
    body = "        first = 1\n        return first\n\n"
    text = f"class A:\n    def f(self):\n{body}    def g(self):\n{body}"
    bench.install(OLD, text)
    longer = body.replace("return", "first += 1\n        return")
    changed = f"class A:\n    def f(self):\n{body}    def g(self):\n{longer}"
    bench.new(changed, OLD)
    newer = text.replace("class A:\n", "class A:\n    x = 1\n    y = 2\n    z = 3\n\n")
    bench.install(PIN, newer)
    ported = bench.refresh()
    assert ported.method == "merge"
    assert any("git's apply puts the patch elsewhere" in line for line in ported.uncertain)
    assert bench.patched("fix", PIN) == changed.replace("class A:\n", "class A:\n    x = 1\n    y = 2\n    z = 3\n\n")
    assert [(h.old_line, h.new_line) for h in ported.hunks] == [(7, 11)]


def test_an_imported_series_can_be_ported(bench: Bench) -> None:
    """Its second mail counts lines from the first one's result."""
    first = bench.diff({PATH: (BEFORE, "# a\n# b\n" + BEFORE)}, "1.patch").read_bytes()
    second = bench.diff({PATH: ("# a\n# b\n" + BEFORE, "# a\n# b\n" + ONE_LINE)}, "2.patch").read_bytes()
    series = bench.write(bench.folder / "fix.patch", first + second)
    import_patch(series, {OLD: bench.sites[OLD]}, bench.patches)
    bench.install(PIN, BEFORE.replace("        self.done = True\n", ""))
    ported = bench.refresh()
    assert [(h.old_line, h.state) for h in ported.hunks] == [(1, "clean"), (14, "clean")]
    assert bench.patched("fix", PIN).startswith("# a\n# b\nfrom")


def test_ports_that_are_refused(bench: Bench) -> None:
    def call(from_pin: str = OLD, to_pin: str = PIN, name: str = "fix") -> Callable[[], object]:
        return lambda: refresh_patch(bench.patches, name, from_pin, to_pin, bench.sites[OLD], bench.sites[PIN])

    bench.new(pin=OLD)
    assert "unknown patch" in refused(call(name="none"), UsageError)
    assert "has no file for pin 3.0.0: it has 1.0.0" in refused(call("3.0.0"), UsageError)
    assert "has a file for pin 1.0.0 already" in refused(call(OLD, OLD), UsageError)
    (bench.sites[PIN] / PATH).unlink()
    assert f"vLLM {PIN} has no {PATH}" in refused(call())
    bench.install(PIN, BEFORE)
    bench.install(OLD, BEFORE + "# edited\n")
    assert "not the one that the patch was written for" in refused(call(), InstallChangedError)
    bench.install(OLD, BEFORE)
    file = bench.patches / "fix" / f"{OLD}.patch"
    bench.write(file, file.read_text(encoding="utf-8").replace("Another", "Different"))
    assert "gives another file than patch.toml says" in refused(call())
    assert sorted(bench.written()) == [f"fix/{OLD}.patch", "fix/patch.toml"]


def test_a_port_over_an_existing_file_needs_force(bench: Bench) -> None:
    bench.new(pin=OLD)
    bench.new(ONE_LINE, meta=None)
    assert "--force" in refused(bench.refresh, UsageError)
    assert bench.patched("fix", PIN) == ONE_LINE
    bench.refresh(force=True)
    assert load_patch(bench.patches / "fix").pins[PIN].files[0].post_sha256 == sha256(AFTER)


def test_a_port_that_does_not_compile(bench: Bench) -> None:
    bench.new(pin=OLD)
    bench.install(PIN, BEFORE + "def f(:\n")
    before = bench.written()
    assert f"ported to vLLM {PIN} gives a {PATH} that does not compile" in refused(bench.refresh)
    assert bench.written() == before


def test_a_toml_that_cannot_take_a_pin(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.new(pin=OLD)
    before = bench.written()
    monkeypatch.setattr(patch_files, "_with_pin", lambda toml, _pin, _files: toml + "\n[broken")
    assert "edit it by hand" in refused(bench.refresh)
    assert bench.written() == before
