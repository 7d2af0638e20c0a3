"""netCDF files: whole or not there, and nothing else is accepted."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import netCDF4
import numpy as np
import pytest
from head_influence import StudyError, files
from head_influence.json_files import write_json

RNG = np.random.default_rng(0)
VALUES = RNG.standard_normal((40, 30)).astype(np.float32)
VARIABLES = {
    "component": (("component",), ["q", "k", "注"], {"long_name": "component"}),
    "relative": (("query", "head"), VALUES, {"long_name": "change", "units": "1"}),
    "removed": (("query", "head"), VALUES > 0, {"long_name": "removed", "units": "1"}),
    "js": (("query",), np.full(40, np.nan), {"long_name": "divergence", "units": "nat"}),
}
ATTRIBUTES = {"study": "s", "layer": 3, "settings": {"b": 1, "a": [2]}, "control_null_mask": [0.0, 1e-6]}


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "folder" / "L00.nc"
    files.write(path, VARIABLES, ATTRIBUTES)
    return path


def assert_refused(path, match="delete the file and run the same command again"):
    """Reading is refused with one line that names the file."""
    with pytest.raises(StudyError, match=match) as caught:
        files.read(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def same(path):
    """Whether a file reads as what was written."""
    found, _ = files.read(path)
    return all(np.array_equal(found[n], v, equal_nan=n == "js") for n, (_, v, _) in VARIABLES.items())


def test_everything_comes_back(written):
    found, attributes = files.read(written)
    assert set(found) == set(VARIABLES)
    assert (found["relative"] == VALUES).all()
    assert found["relative"].dtype == np.float32
    assert (found["removed"] == (VALUES > 0)).all()
    assert found["component"].tolist() == ["q", "k", "注"]
    assert np.isnan(found["js"]).all()
    assert attributes["layer"] == 3
    assert attributes["control_null_mask"] is not None
    assert json.loads(attributes["settings"]) == {"a": [2], "b": 1}
    assert attributes["protocol"]
    assert json.loads(attributes["packages"])["numpy"] == np.__version__
    with netCDF4.Dataset(written) as data:
        assert data["relative"].units == "1"
        assert data["relative"].dimensions == ("query", "head")


def test_some_variables(written):
    assert list(files.read(written, ["js"], optional=["removed", "absent"])[0]) == ["js", "removed"]


def test_equal_content_has_an_equal_mark(tmp_path):
    marks = []
    for name in "ab":
        files.write(tmp_path / name, VARIABLES, ATTRIBUTES)
        marks.append(files.read(tmp_path / name)[1][files.MARK])
    assert marks[0] == marks[1]


def test_nothing_else_is_left_beside_it(written):
    assert [p.name for p in written.parent.iterdir()] == ["L00.nc"]
    assert written.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("part", [0, 0.01, 0.5, 0.9, 0.999])
def test_truncated(written, part):
    content = written.read_bytes()
    written.write_bytes(content[: int(part * len(content))])
    assert_refused(written)


@pytest.mark.parametrize("part", [0, 0.3, 0.9])
def test_zero_filled(written, part):
    content = written.read_bytes()
    kept = int(part * len(content))
    written.write_bytes(content[:kept] + bytes(len(content) - kept))
    assert_refused(written)


@pytest.mark.parametrize(
    "content", [b"", b"not a netCDF file\n", b"CDF\x01" + bytes(200), b"\x89HDF\r\n\x1a\n" + bytes(600)]
)
def test_foreign_file(tmp_path, content):
    path = tmp_path / "L00.nc"
    path.write_bytes(content)
    assert_refused(path)


def test_foreign_netcdf(tmp_path):
    path = tmp_path / "L00.nc"
    with netCDF4.Dataset(path, "w") as data:
        data.createDimension("n", 3)
        data.createVariable("relative", "f4", ("n",))[:] = [1, 2, 3]
    assert_refused(path, "no completion mark")


def test_absent_file_and_folder(tmp_path):
    assert_refused(tmp_path / "absent.nc")
    (tmp_path / "L00.nc").mkdir()
    assert_refused(tmp_path / "L00.nc")


def test_absent_variable(written):
    with pytest.raises(StudyError, match="not a complete netCDF file"):
        files.read(written, ["absent"])


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["relative"].__setitem__((3, 4), 0.5),
        lambda d: d["relative"].__setitem__((3, 4), np.nextafter(VALUES[3, 4], np.float32(9))),
        lambda d: d["removed"].__setitem__((0, 0), 1 - d["removed"][0, 0]),
        lambda d: d["component"].__setitem__(1, "v"),
        lambda d: d["js"].__setitem__(0, 0.0),
        lambda d: d.setncattr("layer", 4),
        lambda d: d.setncattr("added", "x"),
        lambda d: d.delncattr("study"),
        lambda d: d["relative"].setncattr("units", "percent"),
        lambda d: d.renameVariable("js", "sj"),
        lambda d: d.createVariable("extra", "f4", ("query",)),
        lambda d: d.createGroup("extra"),
        lambda d: d.setncattr(files.MARK, "0" * 64),
    ],
)
def test_one_change_is_noticed(written, change):
    with netCDF4.Dataset(written, "a") as data:
        data.set_auto_maskandscale(False)
        change(data)
    assert_refused(written)


def test_no_byte_can_change_what_is_read(written):
    """Any byte of the file: reading is refused, or gives what was written (unused bytes of the format)."""
    content, chosen, noticed = written.read_bytes(), random.Random(1), 0
    for place in chosen.sample(range(len(content)), 150):
        changed = bytearray(content)
        changed[place] ^= 0xFF
        written.write_bytes(changed)
        try:
            assert same(written), place
        except StudyError:
            noticed += 1
    assert noticed > 20
    written.write_bytes(content)
    assert same(written)


WRITER = """
import sys
import numpy as np
from head_influence import files
path = sys.argv[1]
values = np.random.default_rng(1).standard_normal((2000, 4000))
print("ready", flush=True)
files.write(path, {"x": (("a", "b"), values, {})}, {"study": "new"})
"""


def start_writer(path):
    environment = os.environ | {"PYTHONPATH": str(Path(files.__file__).parents[1])}
    return subprocess.Popen([sys.executable, "-c", WRITER, path], env=environment, stdout=subprocess.PIPE)


@pytest.mark.parametrize("earlier", [False, True], ids=["nothing before", "an earlier file"])
@pytest.mark.parametrize("wait_for", [1, 8 << 20, 50 << 20])
def test_killed_while_writing(tmp_path, wait_for, earlier):
    path = tmp_path / "L00.nc"
    if earlier:
        files.write(path, VARIABLES, ATTRIBUTES)
    process = start_writer(path)
    deadline = time.monotonic() + 30
    while process.poll() is None and time.monotonic() < deadline:
        if sum(p.stat().st_size for p in tmp_path.glob(".*.part")) >= wait_for:
            break
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "it finished before it could be killed"
    if earlier:
        assert same(path)
    else:
        assert not path.exists()
    left = list(tmp_path.glob(".*.part"))
    assert len(left) == 1
    assert_refused(left[0])
    files.write(path, VARIABLES, ATTRIBUTES)
    assert same(path)


def test_two_writers_of_the_same_file(tmp_path):
    path = tmp_path / "L00.nc"
    writers = [start_writer(path) for _ in range(2)]
    assert [w.wait(60) for w in writers] == [0, 0]
    assert files.read(path)[0]["x"].shape == (2000, 4000)
    assert [p.name for p in tmp_path.iterdir()] == ["L00.nc"]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of one megabyte; yields its folder and a function that makes it read-only."""
    place = tmp_path / "disk"
    place.mkdir()
    found = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], capture_output=True, check=False)
    if found.returncode:
        pytest.skip(f"no file system can be mounted here: {found.stderr.decode().strip()}")
    yield place, lambda: subprocess.run(["mount", "-o", "remount,ro", place], check=True)
    subprocess.run(["umount", place], check=True)


def assert_unwritable(path, variables):
    with pytest.raises(StudyError, match=r"cannot be written .*nothing half-written was kept") as caught:
        files.write(path, variables, ATTRIBUTES)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_full_disk(small_disk):
    disk, _ = small_disk
    files.write(disk / "L00.nc", VARIABLES, ATTRIBUTES)
    big = {"x": (("n",), np.random.default_rng(0).random(400_000), {})}
    assert_unwritable(disk / "L01.nc", big)
    assert_unwritable(disk / "L00.nc", big)
    assert [p.name for p in disk.iterdir()] == ["L00.nc"]
    assert same(disk / "L00.nc")
    with pytest.raises(StudyError, match="cannot be written"):
        write_json(disk / "a.json", ["x" * 2_000_000])
    assert [p.name for p in disk.iterdir()] == ["L00.nc"]


def test_read_only_folder(small_disk):
    disk, make_read_only = small_disk
    files.write(disk / "L00.nc", VARIABLES, ATTRIBUTES)
    make_read_only()
    assert_unwritable(disk / "L00.nc", VARIABLES)
    assert_unwritable(disk / "sub" / "L00.nc", VARIABLES)
    assert same(disk / "L00.nc")


def test_name_of_a_file_where_a_folder_belongs(tmp_path):
    (tmp_path / "single").write_text("x")
    assert_unwritable(tmp_path / "single" / "L00.nc", VARIABLES)


def test_json_is_written_whole(tmp_path):
    path = tmp_path / "folder" / "a.json"
    write_json(path, {"注": [1, 2]})
    assert json.loads(path.read_text(encoding="utf-8")) == {"注": [1, 2]}
    assert [p.name for p in path.parent.iterdir()] == ["a.json"]
