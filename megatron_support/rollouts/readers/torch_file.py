"""``.pt`` files of plain values and tensors, loaded so that nothing in them can run or take more memory than the file.

``torch.load(weights_only=True)`` runs no code of the file. Before it, the zip container is checked (no compression,
which real files do not use and bombs do; checksums) and the pickle's opcodes are scanned, without executing them, for
anything but plain containers and tensors. Tensors are mapped from the file, so a claimed size reserves nothing.
"""

from __future__ import annotations

import pickletools
import zipfile
from pathlib import Path
from typing import Any

import torch

from megatron_support.errors import RolloutError

_GLOBALS = frozenset(
    {"torch._utils _rebuild_tensor_v2", "collections OrderedDict"}
    | {f"torch {name}Storage" for name in ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Char")}
    | {f"torch {name}Storage" for name in ("Byte", "Bool")}
)
_BUILDING = frozenset({"STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4", "PERSID"})

REMEDY = "save plain lists, numbers, strings and tensors with torch.save"


def load(path: Path) -> Any:
    """What the file holds: dicts, lists, numbers, strings and tensors.

    Raises:
        RolloutError: it is no such file, is damaged, or names anything that would have to be imported.
    """
    _check_container(path)
    try:
        return torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    except Exception as error:  # noqa: BLE001  a hostile pickle can make the unpickler raise anything
        raise RolloutError(f"{path}: cannot read it ({_first_line(error)}); {REMEDY}") from None


def plain(path: Path, value: Any, name: str) -> Any:
    """A tensor as nested lists; anything else as it is.

    Raises:
        RolloutError: the tensor claims more numbers than the file has bytes.
    """
    if not isinstance(value, torch.Tensor):
        return value
    if value.layout != torch.strided or value.numel() * value.element_size() > path.stat().st_size:
        raise RolloutError(
            f"{path}: {name}: claims {value.numel()} numbers, more than the file holds; write the file again"
        )
    return value.tolist()


def is_pickle(path: Path) -> bool:
    """Whether the file begins as a bare pickle does (protocol 2 or later)."""
    try:
        with path.open("rb") as file:
            start = file.read(2)
    except OSError:
        return False
    return len(start) == 2 and start[0] == 0x80 and 2 <= start[1] <= 5


def _check_container(path: Path) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            _check_entries(path, archive)
            pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            if len(pickles) != 1:
                raise RolloutError(f"{path}: must hold one data.pkl, got {len(pickles)}; {REMEDY}")
            _check_opcodes(path, archive.read(pickles[0]))
    except zipfile.BadZipFile as error:
        raise RolloutError(f"{path}: no file of torch.save, or damaged ({error}); {REMEDY}") from None
    except OSError as error:
        raise RolloutError(f"{path}: cannot read it ({error}); give a readable file of torch.save") from None
    except (NotImplementedError, EOFError, UnicodeDecodeError, RuntimeError, ValueError) as error:
        if isinstance(error, RolloutError):
            raise
        raise RolloutError(f"{path}: damaged ({_first_line(error)}); {REMEDY}") from None


def _check_entries(path: Path, archive: zipfile.ZipFile) -> None:
    size = path.stat().st_size
    total = 0
    for entry in archive.infolist():
        total += entry.file_size
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size or total > size:
            raise RolloutError(
                f"{path}: {entry.filename}: must be stored uncompressed, {entry.file_size} bytes are claimed in "
                f"{entry.compress_size}; {REMEDY}"
            )
    damaged = archive.testzip()
    if damaged is not None:
        raise RolloutError(f"{path}: {damaged}: its checksum is wrong, the file is damaged; copy or write it again")


def _check_opcodes(path: Path, content: bytes) -> None:
    for opcode, argument, position in pickletools.genops(content):
        named = argument if opcode.name == "GLOBAL" else opcode.name
        if opcode.name in _BUILDING or (opcode.name == "GLOBAL" and argument not in _GLOBALS):
            raise RolloutError(
                f"{path}: data.pkl byte {position}: holds {named!r}, which is neither a plain value nor a tensor; "
                f"{REMEDY}"
            )


def _first_line(error: Exception) -> str:
    """Its name and the reason: torch's own advice, to load the file as a pickle, is not passed on."""
    lines = str(error).rpartition("WeightsUnpickler error:")[2].strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
