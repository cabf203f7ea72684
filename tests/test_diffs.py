"""What a stranger's diff is read as, what of it is kept, and what is refused. The diffs are git's own where git makes them."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kvmatrix import diffs
from kvmatrix.diffs import Diff, FileChange, package_changes, read_diff, render
from kvmatrix.errors import KvmatrixError, PatchError, UsageError

PATH = "vllm/v1/x.py"
BEFORE = "def f():\n" + "".join(f"    line{i} = {i}\n" for i in range(20))
AFTER = BEFORE.replace("line9 = 9\n", "line9 = 'nine'\n")
PLAIN = f"""\
diff --git a/{PATH} b/{PATH}
index 1111111..2222222 100644
--- a/{PATH}
+++ b/{PATH}
@@ -10,3 +10,4 @@ def f():
     line8 = 8
-    line9 = 9
+    line9 = 'nine'
+    more = 1
     line10 = 10
"""


class Repository:
    """A git repository with a package, and the diffs of what is done to it."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "repository"
        self.root.mkdir()
        self.git("init", "-q")
        for path in (PATH, "vllm/v1/y.py", "tests/test_x.py"):
            self.write(path, BEFORE)
        self.write("docs/guide.md", "words\n")
        self.commit("before")

    def git(self, *arguments: str, **changes: str) -> bytes:
        env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")} | changes
        env |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
        who = ["-c", "user.name=Jörg Müller", "-c", "user.email=j@example.org"]
        command = ["git", *who, *arguments]
        return subprocess.run(command, cwd=self.root, env=env, check=True, capture_output=True, timeout=30).stdout

    def write(self, path: str, text: str | bytes) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text.encode() if isinstance(text, str) else text)

    def commit(self, message: str) -> None:
        self.git("add", "-A")
        self.git("commit", "-q", "-m", message)

    def diff(self, *arguments: str) -> bytes:
        self.git("add", "-A")
        return self.git("diff", "--cached", *arguments)


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


@pytest.fixture
def read(tmp_path: Path) -> Callable[[str | bytes], Diff]:
    """Reads text as a diff file."""

    def read_text(text: str | bytes) -> Diff:
        file = tmp_path / "my.diff"
        file.write_bytes(text.encode() if isinstance(text, str) else text)
        return read_diff(file)

    return read_text


@pytest.fixture
def refused(read: Callable[[str | bytes], Diff]) -> Callable[..., str]:
    """The one line with which text is refused, on reading or on choosing what to keep."""

    def message(text: str | bytes, kind: type[KvmatrixError] = PatchError) -> str:
        with pytest.raises(kind) as caught:
            package_changes(read(text))
        assert "my.diff" in str(caught.value)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    return message


def kept(diff: Diff) -> list[str]:
    return [change.path for change in package_changes(diff)[0]]


def applied(text: str | bytes, folder: Path, files: dict[str, str]) -> dict[str, str]:
    """What git makes of ``files`` with the diff."""
    work = folder / "apply"
    for path, content in files.items():
        (work / path).parent.mkdir(parents=True, exist_ok=True)
        (work / path).write_bytes(content.encode())
    data = text.encode() if isinstance(text, str) else text
    env = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder), "GIT_CONFIG_GLOBAL": os.devnull}
    subprocess.run(["git", "apply", "--whitespace=nowarn", "-"], cwd=work, env=env, input=data, check=True, timeout=30)
    return {path: (work / path).read_bytes().decode() for path in files}


# --- what is read -----------------------------------------------------------------------------------------------------


def test_a_plain_diff(read: Callable[[str], Diff]) -> None:
    diff = read(PLAIN)
    assert diff.data == PLAIN.encode()
    assert diff.sha256 == hashlib.sha256(PLAIN.encode()).hexdigest()
    assert (diff.subject, diff.author) == (None, None)
    (change,) = diff.changes
    assert (change.old, change.new, change.kind) == (PATH, PATH, "modify")
    assert (change.binary, change.symlink, change.submodule) == (False, False, False)
    (hunk,) = change.hunks
    assert (hunk.old_start, hunk.old_count, hunk.new_start, hunk.new_count) == (10, 3, 10, 4)
    assert hunk.header == "@@ -10,3 +10,4 @@"
    assert "".join(hunk.lines) == PLAIN.split("def f():\n")[1]


def test_what_git_writes_comes_back(repository: Repository, read: Callable[[bytes], Diff], tmp_path: Path) -> None:
    """Several files and hunks, no line feed at a file's end, characters that some split lines at, lines of pluses."""
    odd = "a = 1  \n\x0cb = '\u2028'\r\n\n++ b/x\n-- a/x\nlast"
    repository.write("vllm/odd.py", odd)
    repository.write("vllm/empty.py", "")
    repository.commit("odd")
    new = {PATH: "top\n" + AFTER + "end\n", "vllm/v1/y.py": "", "vllm/odd.py": odd.replace("a = 1", "a = 2") + "er"}
    new |= {"vllm/empty.py": "full\n"}
    for path, text in new.items():
        repository.write(path, text)
    changes, skipped = package_changes(read(repository.diff()))
    assert skipped == ()
    assert {c.kind for c in changes} == {"modify"}
    before = {PATH: BEFORE, "vllm/v1/y.py": BEFORE, "vllm/odd.py": odd, "vllm/empty.py": ""}
    assert applied(render(changes), tmp_path, before) == new


def test_mail_of_format_patch(repository: Repository, read: Callable[[bytes], Diff], tmp_path: Path) -> None:
    quoted = "Prüfe the prefix, in a subject that is longer than one line of a mail's head may be at the very most\n\n"
    quoted += "@@ -1 +1 @@ is no hunk here\n+++ nor a file\n--- neither\nBinary files do not differ\n"
    repository.write(PATH, AFTER)
    repository.commit(quoted)
    repository.write(PATH, AFTER.replace("line3 = 3", "line3 = 'three'"))
    repository.write("tests/test_x.py", AFTER)
    repository.commit("Second")
    diff = read(repository.git("format-patch", "--stdout", "HEAD~2"))
    assert (
        diff.subject == "Prüfe the prefix, in a subject that is longer than one line of a mail's head may be at the very most"
    )
    assert diff.author == "Jörg Müller"
    assert kept(diff) == [PATH, PATH]
    changes, skipped = package_changes(diff)
    assert [s.path for s in skipped] == ["tests/test_x.py"]
    result = applied(render(changes), tmp_path, {PATH: BEFORE})
    assert result[PATH] == AFTER.replace("line3 = 3", "line3 = 'three'")


@pytest.mark.parametrize(
    ("head", "subject", "author"),
    [
        ("Subject: [PATCH] Fix it\nFrom: A B <a@b>\n\n", "Fix it", "A B"),
        ("From: a@b\nSubject: [RFC PATCH v3 2/7] [Core] Fix it\n\n", "[Core] Fix it", "a@b"),
        ("Subject: =?nonsense?q?x?=\n\n", "=?nonsense?q?x?=", None),
        ("Subject: [PATCH]\n\n", None, None),
        ("Subject: two\x1b[31m colours\n\n", "two [31m colours", None),
        ("commit 1234567\nAuthor: A B <a@b>\n\n    Subject: not a mail\n\n", None, None),
    ],
    ids=["plain", "series", "unknown-charset", "empty", "control-characters", "git-show"],
)
def test_subjects(read: Callable[[str], Diff], head: str, subject: str | None, author: str | None) -> None:
    diff = read(head + PLAIN)
    assert (diff.subject, diff.author) == (subject, author)
    assert kept(diff) == [PATH]


@pytest.mark.parametrize("options", [[], ["--no-prefix"], ["--src-prefix=i/", "--dst-prefix=w/"], ["-U0"], ["--full-index"]])
def test_prefixes_and_formats(repository: Repository, read: Callable[[bytes], Diff], options: list[str]) -> None:
    repository.write(PATH, AFTER)
    changes, _ = package_changes(read(repository.diff(*options)))
    assert render(changes).startswith(f"diff --git a/{PATH} b/{PATH}\n--- a/{PATH}\n+++ b/{PATH}\n@@ -")


def test_a_diff_without_gits_headers(read: Callable[[str], Diff]) -> None:
    text = PLAIN.split("100644\n")[1].replace(f"b/{PATH}", f"b/{PATH}\t2026-01-01 00:00:00")
    assert render(package_changes(read(text))[0]).endswith(PLAIN.split(" def f():")[1])


def test_a_byte_order_mark_does_not_matter(read: Callable[[bytes], Diff]) -> None:
    assert kept(read(b"\xef\xbb\xbf" + PLAIN.encode())) == [PATH]


def test_rendering_drops_everything_but_the_change(read: Callable[[str], Diff]) -> None:
    head, body = PLAIN.split("index 1111111..2222222 100644\n")
    text = render(package_changes(read("Some words\n\n" + PLAIN + "-- \n2.39.5\n\n"))[0])
    assert text == (head + body).replace(" def f():", "")


# --- what is kept -----------------------------------------------------------------------------------------------------


def test_what_lies_outside_is_left_out_by_name(repository: Repository, read: Callable[[bytes], Diff]) -> None:
    outside = ["tests/test_x.py", "docs/guide.md", "csrc/a.cu", ".github/ci.yml", "setup.py", "x/vllm/y.py"]
    for path in outside:
        repository.write(path, "other\n")
    repository.write("docs/picture.png", b"\0\1\2")
    repository.write("vllm/v1/README.md", "words\n")
    repository.write(PATH, AFTER)
    (repository.root / "docs/link").symlink_to("guide.md")
    repository.git("mv", "vllm/v1/y.py", "vllm/v1/z.py")
    repository.git("mv", "vllm/v1/z.py", "vllm/v1/y.py")
    changes, skipped = package_changes(read(repository.diff("--binary")))
    assert [c.path for c in changes] == [PATH]
    reasons = {s.path: s.reason for s in skipped}
    assert set(reasons) == {*outside, "docs/picture.png", "docs/link", "vllm/v1/README.md"}
    assert all(reasons.values())
    assert "pin's own build" in reasons["csrc/a.cu"]
    assert "binary" in reasons["docs/picture.png"]
    assert reasons["x/vllm/y.py"] == "outside the vllm package"


def test_quoted_paths(repository: Repository, read: Callable[[bytes], Diff], tmp_path: Path) -> None:
    repository.write("vllm/prüf.py", BEFORE)
    repository.commit("quoted")
    repository.write("vllm/prüf.py", AFTER)
    repository.write('tests/a "b".py', "x\n")
    data = repository.diff()
    assert b"\\303\\274" in data
    changes, skipped = package_changes(read(data))
    assert [s.path for s in skipped] == ['tests/a "b".py']
    assert applied(render(changes), tmp_path, {"vllm/prüf.py": BEFORE}) == {"vllm/prüf.py": AFTER}


def test_nothing_inside_the_package(repository: Repository, refused: Callable[..., str]) -> None:
    repository.write("tests/test_x.py", AFTER)
    assert "changes nothing inside the vllm package: only tests/test_x.py" in refused(repository.diff())
    for n in range(4):
        repository.write(f"docs/{n}.md", "x\n")
    assert refused(repository.diff()).endswith("docs/0.md, docs/1.md, docs/2.md and 2 more")


def add(repository: Repository) -> None:
    repository.write("vllm/v1/new.py", "x = 1\n")


def remove(repository: Repository) -> None:
    (repository.root / PATH).unlink()


def rename(repository: Repository) -> None:
    repository.git("mv", PATH, "vllm/v1/moved.py")


def rename_out(repository: Repository) -> None:
    repository.git("mv", PATH, "tests/moved.py")


def copy(repository: Repository) -> None:
    repository.write("vllm/v1/copied.py", BEFORE)


def mode(repository: Repository) -> None:
    (repository.root / PATH).chmod(0o755)


def mode_and_text(repository: Repository) -> None:
    repository.write(PATH, AFTER)
    mode(repository)


def symlink(repository: Repository) -> None:
    (repository.root / "vllm/v1/link.py").symlink_to("x.py")


def to_symlink(repository: Repository) -> None:
    remove(repository)
    (repository.root / PATH).symlink_to("y.py")


def submodule(repository: Repository) -> None:
    head = repository.git("rev-parse", "HEAD").decode().strip()
    repository.git("update-index", "--add", "--cacheinfo", f"160000,{head},vllm/sub")
    (repository.root / "vllm/sub").mkdir()


def binary(repository: Repository) -> None:
    repository.write(PATH, b"\0" + AFTER.encode())


def data_file(repository: Repository) -> None:
    repository.write("vllm/config.json", "{}\n")
    repository.commit("data")
    repository.write("vllm/config.json", '{"a": 1}\n')


def odd_name(repository: Repository) -> None:
    repository.write("vllm/a b.py", BEFORE)
    repository.commit("odd")
    repository.write("vllm/a b.py", AFTER)


@pytest.mark.parametrize(
    ("change", "options", "reason"),
    [
        (add, [], "adds vllm/v1/new.py"),
        (remove, [], f"deletes {PATH}"),
        (rename, ["-M"], f"renames {PATH} to vllm/v1/moved.py"),
        (rename_out, ["-M"], f"renames {PATH} to tests/moved.py"),
        (copy, ["-C", "--find-copies-harder"], "to vllm/v1/copied.py"),
        (mode, [], f"mode of {PATH} from 100644 to 100755"),
        (mode_and_text, [], f"mode of {PATH} from 100644 to 100755"),
        (symlink, [], "symbolic link, vllm/v1/link.py"),
        (to_symlink, [], f"deletes {PATH}"),
        (submodule, [], "submodule, vllm/sub"),
        (binary, [], f"binary file {PATH}"),
        (binary, ["--binary"], f"binary file {PATH}"),
        (data_file, [], "changes vllm/config.json"),
        (odd_name, [], "changes vllm/a b.py"),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_what_a_patch_cannot_carry(
    repository: Repository, refused: Callable[..., str], change: Callable[[Repository], None], options: list[str], reason: str
) -> None:
    """Refused although another file could be kept: half of a change is not what its author proposes."""
    change(repository)
    repository.write("vllm/v1/y.py", AFTER)
    assert reason in refused(repository.diff(*options))


@pytest.mark.parametrize(
    "path",
    [
        "../evil.py",
        "vllm/../evil.py",
        "vllm/v1/../../evil.py",
        "/etc/evil.py",
        "vllm/./x.py",
        "vllm//x.py",
        "vllm\\x.py",
        "C:/x.py",
        "tests/../../x.py",
        "~/../x.py",
    ],
)
@pytest.mark.parametrize("headers", [True, False], ids=["git", "plain"])
def test_paths_that_leave_the_tree(refused: Callable[..., str], path: str, headers: bool) -> None:
    text = PLAIN.replace(PATH, path)
    text = PLAIN + (text if headers else text.split("100644\n")[1])
    assert "only plain paths inside the repository" in refused(text)


def test_a_quoted_path_that_leaves_the_tree(refused: Callable[..., str]) -> None:
    text = PLAIN.replace(f"a/{PATH}", '"a/vllm/\\056\\056/x.py"').replace(f"b/{PATH}", '"b/vllm/\\056\\056/x.py"')
    assert "'vllm/../x.py', which leaves its tree" in refused(text)


# --- what is damaged --------------------------------------------------------------------------------------------------

BODY = "     line8 = 8\n"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is empty"),
        (" \n\n", "is empty"),
        ("<!DOCTYPE html>\n<p>404</p>\n", "holds no diff"),
        ("\n".join(PLAIN.splitlines()[:-1]) + "\n", "shorter than its header"),
        ("\n".join(PLAIN.splitlines()[:5]) + "\n", "shorter than its header"),
        (PLAIN.replace("-10,3 +10,4", "-10,4 +10,5"), "shorter than its header"),
        (PLAIN.replace("-10,3 +10,4", "-10,4 +10,5") + "-- \n2.39.5\n", "its header says"),
        (PLAIN.replace("-10,3 +10,4", "-10,2 +10,3"), "line 10 is behind the end of its hunk"),
        (PLAIN.replace("-10,3 +10,4", "-10,3 +10,2"), "longer than its header"),
        (PLAIN.replace("-10,3 +10,4", "-10,2 +10,3") + PLAIN, "line 10 is behind the end of its hunk"),
        (PLAIN + "\n+    extra = 1\n", "line 12 is behind the end of its hunk"),
        (PLAIN.replace(BODY, "line8 = 8\n"), "its header says"),
        (PLAIN.split(f"+++ b/{PATH}\n")[1], "belongs to no file"),
        (PLAIN.replace(f"+++ b/{PATH}", "+++ b/vllm/v1/other.py"), "does not go with"),
        (PLAIN.replace("-10,3 +10,4", f"-{'9' * 5000},3 +10,4"), "is damaged"),
        (PLAIN.split("@@")[0] + "@@ -1,0 +1,0 @@\n", "a hunk has no lines"),
        (PLAIN.split("---")[0], f"names {PATH} but has no change of it"),
        (PLAIN.replace("\n", "\r\n"), "CRLF"),
        (PLAIN.encode("utf-16"), "UTF-16"),
        (PLAIN.encode().replace(b"nine", b"n\xefne"), f"not UTF-8 text: byte {PLAIN.index('nine') + 1} is 0xef"),
        (f"\x1b[1mdiff --git a/{PATH} b/{PATH}\x1b[m\n" + PLAIN, "--no-color"),
        (f"diff --cc {PATH}\nindex 1,2..3\n--- a/{PATH}\n+++ b/{PATH}\n@@@ -1 -1 +1 @@@\n++x\n", "combined diff"),
        ("From: a@b\nContent-Transfer-Encoding: base64\n\nZGlmZg==\n", "encoded body"),
    ],
    ids=[
        *("nothing", "blank", "web-page", "cut-by-a-line", "cut-in-a-hunk", "counts-too-large", "counts-too-large-in-mail"),
        *("counts-too-small", "new-count-too-small", "counts-too-small-then-more", "line-behind-a-blank", "lost-sign"),
        *("no-file", "other-file", "huge-number", "empty-hunk", "no-hunks", "crlf", "utf-16", "latin-1", "colours"),
        *("merge", "encoded-mail"),
    ],
)
def test_what_cannot_be_read(refused: Callable[..., str], text: str | bytes, reason: str) -> None:
    assert reason in refused(text)


def test_every_cut_is_noticed_or_harmless(repository: Repository, read: Callable[[bytes], Diff], tmp_path: Path) -> None:
    """A diff that is cut between two hunks is a smaller diff; any other cut is refused."""
    repository.write(PATH, "top\n" + AFTER)
    repository.write("vllm/v1/y.py", AFTER + "end")
    lines = repository.diff("-U1").splitlines(keepends=True)
    whole = render(package_changes(read(b"".join(lines)))[0])
    good = 0
    for end in range(1, len(lines)):
        try:
            part = render(package_changes(read(b"".join(lines[:end])))[0])
        except PatchError:
            continue
        good += 1
        assert whole.startswith(part.removesuffix("\n"))
        assert lines[end].startswith((b"@@", b"diff", b"\\"))
    assert good == 4


def test_damage_of_any_kind_ends_in_one_line(read: Callable[[bytes], Diff]) -> None:
    """Bytes changed, dropped and doubled at random: what is not refused still renders."""
    whole = (PLAIN * 2).encode()
    dice = random.Random(7)
    for _ in range(400):
        data = bytearray(whole)
        for _ in range(dice.randint(1, 4)):
            start = dice.randrange(len(data))
            end = start + dice.randint(0, 12)
            data[start:end] = dice.choice(
                [b"", b"\n", b" ", b"-", b"+", b"@@", b'"', b"\\", b"/", b"0", bytes(data[start:end]) * 2]
            )
        outcome = rendered_or_refused(read, bytes(data))
        assert outcome.startswith("diff --git a/vllm/") or "\n" not in outcome


def rendered_or_refused(read: Callable[[bytes], Diff], data: bytes) -> str:
    try:
        return render(package_changes(read(data))[0])
    except KvmatrixError as e:
        return str(e)


def test_a_diff_that_is_too_large(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diffs, "MAX_BYTES", len(PLAIN))
    assert "larger than" in refused(PLAIN + "\n")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / "none.diff", tmp_path):
        with pytest.raises(UsageError, match="is not a file"):
            read_diff(path)


def test_a_long_diff(read: Callable[[str], Diff]) -> None:
    body = "".join(f"+    line{n} = {n}\n" for n in range(60_000))
    text = PLAIN.split("@@")[0] + f"@@ -1,0 +2,60000 @@\n{body}"
    assert len(text) > 1_000_000
    assert read(text).changes[0].hunks[0].new_count == 60_000


def test_changes_know_where_they_lie() -> None:
    def inside(old: str | None, new: str | None) -> bool:
        return FileChange(old, new, "modify").inside

    assert inside("vllm/x.py", "vllm/x.py")
    assert inside("a.py", "vllm/x.py")
    assert inside("vllm", None)
    assert not inside("vllm_x/x.py", "tests/vllm/x.py")
