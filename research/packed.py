"""The finished runs of an experiment as one file, the same bytes each time: python -m research.packed FOLDER FILE.zip

A ZIP archive, so that ``unzip`` reads it: names in order, no times, no owners. Text is compressed by bzip2, whose
output depends on no version; ``.npz`` files are compressed already, and stored. No member is more than a file name.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

from attemper import InputError
from attemper.files import replacement

RUNS = (".json", ".npz")
RESULTS = "results.json"
"""In a folder of runs, what they came to: no run."""
STORED = ".npz"


def pack(folder: Path, file: Path) -> int:
    """Writes the runs of ``folder`` into ``file``, whole or not at all; how many they are.

    Raises:
        InputError: the folder has no runs.
    """
    found = sorted(path for path in folder.glob("*") if path.suffix in RUNS and path.name != RESULTS)
    if not found:
        raise InputError(f"research: there are no runs in {str(folder)!r} to pack.")
    with replacement(file) as part, zipfile.ZipFile(part, "w") as archive:
        for path in found:
            member = zipfile.ZipInfo(path.name)
            member.create_system, member.external_attr = 3, 0o644 << 16
            member.compress_type = zipfile.ZIP_STORED if path.suffix == STORED else zipfile.ZIP_BZIP2
            archive.writestr(member, path.read_bytes())
    return len(found)


def unpack(file: Path, folder: Path) -> int:
    """Puts those runs of ``file`` into ``folder`` that it does not have; how many they are.

    Raises:
        InputError: the file is no packed file of runs, or the folder cannot be written.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            members = [name for name in archive.namelist() if not (folder / name).exists()]
            foreign = [name for name in members if Path(name).name != name or Path(name).suffix not in RUNS]
            if foreign:
                raise ValueError(f"{foreign[0]!r} is no file of a run")
            folder.mkdir(parents=True, exist_ok=True)
            for name in members:
                with replacement(folder / name) as part:
                    part.write_bytes(archive.read(name))
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise InputError(f"research: the runs of {str(file)!r} cannot be put into {str(folder)!r}: {error}.") from error
    return len(members)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m research.packed FOLDER FILE.zip")
    print(f"{pack(Path(sys.argv[1]), Path(sys.argv[2]))} runs packed into {sys.argv[2]}")
