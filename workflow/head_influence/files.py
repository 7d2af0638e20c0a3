"""netCDF files: written whole or not at all, read whole or refused.

A file gets its final name only after its data and a completion mark, a hash over everything in it, have reached the
disk.
"""

import glob
import hashlib
import json
import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path

import netCDF4
import numpy as np

from head_influence import PROTOCOL, StudyError, __version__

MARK = "complete_sha256"
KEPT = "nothing half-written was kept; put that right and run the same command again"
PACKAGES = ("numpy", "netCDF4", "torch", "transformers", "tokenizers", "xarray")


def loaded_packages():
    """Versions of the packages that this process has loaded, and of Python."""
    found = {name: sys.modules[name].__version__ for name in PACKAGES if name in sys.modules}
    return {"python": sys.version.split()[0]} | found


def content_hash(data, values=None):
    """Hash the names, types, shapes, bytes and attributes of a dataset, without the completion mark.

    The variables' values, which have to be read for it, are added to the dict `values` where one is given.
    """
    digest = hashlib.sha256()

    def attributes(thing):
        for key in sorted(thing.ncattrs()):
            if key != MARK:
                digest.update(f"{key}={np.asarray(thing.getncattr(key)).tolist()!r};".encode())

    attributes(data)
    for name in sorted(data.variables):
        variable = data.variables[name]
        variable.set_auto_maskandscale(False)
        found = variable[...]
        digest.update(f"{name}:{variable.dimensions}:{variable.shape}:{variable.dtype}".encode())
        attributes(variable)
        digest.update("\0".join(found.ravel()).encode() if variable.dtype is str else np.ascontiguousarray(found))
        if values is not None:
            values[name] = found
    for name in sorted(data.groups):  # none of this study's files has any
        digest.update(f"{name}/".encode())
    return digest.hexdigest()


def write(path, variables, attributes):
    """Write a netCDF4 file atomically.

    Parameters
    ----------
    path : path
        Final name; its folder is made. A temporary file beside it is renamed onto it at the very end.
    variables : dict
        Name to (dims, values, attributes); attributes should give long_name and units. A variable named like its only
        dimension is a coordinate. Values are numeric arrays or lists of strings.
    attributes : dict
        Global attributes; what is not a number or string is stored as JSON. Versions are added.

    Raises
    ------
    StudyError
        If the disk is full or the folder cannot be written; nothing is left under the final name then, or what was.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep(path)
        with netCDF4.Dataset(temporary, "w", format="NETCDF4") as data:
            _set_attributes(
                data,
                {"Conventions": "CF-1.10", "protocol": PROTOCOL, "version": __version__, "packages": loaded_packages()}
                | attributes,
            )
            _fill(data, variables)
            data.sync()
            data.setncattr(MARK, content_hash(data))
        temporary.chmod(0o644)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, RuntimeError) as error:
        raise StudyError(f"{path}: cannot be written ({_reason(error, path)}); {KEPT}") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _sweep(path):
    """Remove what writers of `path` that were killed have left."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
        try:
            os.kill(int(left.name.split(".")[-2]), 0)
        except (ProcessLookupError, ValueError):
            left.unlink(missing_ok=True)
        except PermissionError:  # it lives, as another user's
            continue


def _reason(error, path):
    """Say what is behind an error of the HDF5 library, which does not tell a full disk from a broken one."""
    with suppress(OSError):
        if shutil.disk_usage(path.parent).free < 1 << 20:
            return "the disk is full"
    return str(error)


def _set_attributes(thing, attributes):
    for key, value in attributes.items():
        plain = (
            value if isinstance(value, (str, int, float, np.ndarray, np.generic)) else json.dumps(value, sort_keys=True)
        )
        thing.setncattr(key, int(plain) if isinstance(plain, bool) else plain)


def _fill(data, variables):
    for name, (dims, values, attributes) in variables.items():
        values = np.asarray(values)
        text = values.dtype.kind in "UO"
        for dim, size in zip(dims, values.shape, strict=True):
            if dim not in data.dimensions:
                data.createDimension(dim, size)
        kind = "i1" if values.dtype == bool else str if text else values.dtype
        variable = data.createVariable(name, kind, dims)
        variable[...] = values.astype(object) if text else values.astype("i1") if values.dtype == bool else values
        _set_attributes(variable, attributes)


def read(path, names=None, optional=()):
    """Read a file that `write` made.

    Parameters
    ----------
    path : path
    names : sequence of str, optional
        Only these variables; all otherwise.
    optional : sequence of str
        Further variables, left out where the file has none of that name.

    Returns
    -------
    variables, attributes : dict, dict

    Raises
    ------
    StudyError
        If the file is absent, unreadable, without its completion mark, or any byte of it has changed since.
    """
    found = {}
    try:
        with netCDF4.Dataset(Path(path)) as data:
            mark = data.getncattr(MARK) if MARK in data.ncattrs() else None
            if mark is None or mark != content_hash(data, found):
                fault = "no completion mark" if mark is None else "content differs from its checksum"
                raise StudyError(f"{path}: {fault}; delete the file and run the same command again")
            attributes = {key: data.getncattr(key) for key in data.ncattrs()}
            wanted = found if names is None else [*names, *(name for name in optional if name in found)]
            return {name: found[name] for name in wanted}, attributes
    except (OSError, RuntimeError, KeyError, IndexError, AttributeError) as error:
        raise StudyError(
            f"{path}: not a complete netCDF file of this study ({error}); "
            "delete the file and run the same command again"
        ) from error
