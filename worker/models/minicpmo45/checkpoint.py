"""The files of a checkpoint: found, looked over by their headers, read tensor by tensor.

Everything that can be known without reading weights (a missing or short shard, a wrong format, a
tensor's shape) is known before the first weight is read, since reading them takes minutes.
"""

from __future__ import annotations

import errno
import json
import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shared.errors import ModelLoadError

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
WANTED_FILES = ["*.json", "*.jinja", "*.txt", "*.safetensors", "assets/*"]
"""What is downloaded of a repository: no code."""

FLOATS = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
"""The format's names of the types that weights may have."""
MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""


def find_folder(model_path: str) -> Path:
    """Return the checkpoint's folder; a Hugging Face id is downloaded, or taken from its cache.

    Raises:
        ModelLoadError: no such folder, or the download failed.
    """
    path = Path(model_path).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ModelLoadError(f"model.model_path {model_path} is a file, expected a folder")
    if not HUB_NAME.fullmatch(model_path):
        raise ModelLoadError(
            f"model.model_path {model_path} does not exist; expected the folder of MiniCPM-o 4.5 "
            "or a Hugging Face id such as openbmb/MiniCPM-o-4_5"
        )
    try:
        return Path(snapshot_download(model_path, allow_patterns=WANTED_FILES))
    except LocalEntryNotFoundError as error:
        raise ModelLoadError(
            f"model.model_path {model_path} is no folder here, and the Hugging Face Hub cannot "
            "be reached to download it; check the path or the network"
        ) from error
    except Exception as error:
        reason = explain(error) if isinstance(error, OSError) else first_line(error)
        raise ModelLoadError(
            f"model.model_path {model_path} is no folder here, and its download from the Hugging "
            f"Face Hub failed: {reason}"
        ) from error


def explain(error: OSError) -> str:
    """Return one sentence about a failed file operation."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full; free some space, or set HF_HOME to another disk"
    if error.strerror is None:
        return first_line(error)
    return f"{error.strerror}: {error.filename}" if error.filename else error.strerror


def read_text(path: Path) -> str:
    """Return a text file of the checkpoint. Raises ModelLoadError."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ModelLoadError(
            f"{path} does not exist; is {path.parent} a whole checkpoint of MiniCPM-o 4.5?"
        ) from error
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {explain(error)}") from error
    except UnicodeDecodeError as error:
        raise ModelLoadError(f"{path} is damaged: no UTF-8 text") from error


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object of the checkpoint. Raises ModelLoadError."""
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:  # also a number with thousands of digits
        raise ModelLoadError(f"{path} is damaged: no JSON ({error})") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} is no JSON object")
    return value


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a tensor is, as its file's header says."""

    path: Path
    dtype: str
    """The format's name, such as "BF16"."""
    shape: tuple[int, ...]

    @property
    def is_float(self) -> bool:
        return self.dtype in FLOATS.values()


def entry_of(path: Path, tensor: Tensor) -> Entry:
    """Describe a tensor that a file of another format holds."""
    return Entry(path, FLOATS.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape))


def checked(path: Path, name: str, tensor: Tensor) -> Tensor:
    """Return a tensor with values, which took one reduction on its device and no copy.

    Raises:
        ModelLoadError: a value is NaN or infinite; all that is computed with it would be.
    """
    # Of a tensor with NaN, both ends are NaN.
    if not bool(torch.stack(torch.aminmax(tensor)).isfinite().all()):
        raise ModelLoadError(f"{path}: {name} holds NaN or infinite values; download it again")
    return tensor


class CheckedTensors(Mapping[str, Tensor]):
    """The tensors of one file, each looked over when it is asked for."""

    def __init__(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        self._path, self._tensors = path, tensors

    def __getitem__(self, name: str) -> Tensor:
        """Raises KeyError, and ModelLoadError if a value is not finite."""
        return checked(self._path, name, self._tensors[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class TensorFiles(Mapping[str, Tensor]):
    """All tensors of a folder's safetensors files, each read when it is asked for.

    A tensor goes straight to the device, becomes `dtype` there and is looked over; nothing is
    kept.
    """

    def __init__(
        self,
        folder: Path,
        device: torch.device | str,
        dtype: torch.dtype,
        overlay: Path | None = None,
    ) -> None:
        """Read and check every header, no weights.

        Args:
            overlay: torch file whose tensors take the places of those of the same names.

        Raises:
            ModelLoadError: a file is missing, short or of another format.
        """
        self.entries = read_headers(folder)
        self._overlay: dict[str, Tensor] = {}
        if overlay is not None:
            self._overlay = read_torch(overlay)
            self.entries |= {name: entry_of(overlay, t) for name, t in self._overlay.items()}
        self._device, self._dtype = torch.device(device), dtype
        self._open: dict[Path, Any] = {}

    def __getitem__(self, name: str) -> Tensor:
        """Read one tensor.

        Raises:
            KeyError: there is none of that name.
            ModelLoadError: it cannot be read, or a value is not finite.
        """
        path = self.entries[name].path
        if name in self._overlay:  # copied: it may be a view of the file
            replaced = self._overlay[name].to(self._device, self._dtype, copy=True)
            return checked(path, name, replaced)
        try:
            if path not in self._open:
                self._open[path] = safe_open(path, "pt", device=str(self._device))
            tensor: Tensor = self._open[path].get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ModelLoadError(f"{path}: {name} cannot be read: {error}") from error
        return checked(path, name, tensor.to(self._dtype))

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


def read_headers(folder: Path) -> dict[str, Entry]:
    """Return what all weight files of a folder hold.

    An index names the files to use; without one, all `*.safetensors` of the folder are.

    Raises:
        ModelLoadError: a shard is missing, short or no safetensors file; a tensor is in none of
            them, or in two.
    """
    named = read_index(folder)
    paths = (
        sorted({folder / file for file in named.values()})
        if named is not None
        else sorted(folder.glob("*.safetensors"))
    )
    if not paths:
        raise ModelLoadError(f"{folder} holds no *.safetensors file; is the checkpoint whole?")
    missing = [path.name for path in paths if not path.exists()]
    if missing and named is None:
        raise ModelLoadError(
            f"{folder / missing[0]} is a link to a file that does not exist; download the "
            "checkpoint again"
        )
    if missing:
        raise ModelLoadError(
            f"{folder} lacks {', '.join(missing)}, named in its index; download the checkpoint "
            "again"
        )
    entries: dict[str, Entry] = {}
    for path in paths:
        for name, entry in read_header(path).items():
            if named is not None and named.get(name) != path.name:
                continue  # as the index says, another file's copy counts
            if name in entries:
                raise ModelLoadError(
                    f"{folder}: {name} is in {entries[name].path.name} and in {path.name}; "
                    "remove the file that does not belong to the checkpoint"
                )
            entries[name] = entry
    lost = sorted(set(named or ()) - set(entries))
    if lost:
        what = "1 tensor" if len(lost) == 1 else f"{len(lost)} tensors"
        first = f": {lost[0]}" if len(lost) == 1 else f", first {lost[0]}"
        raise ModelLoadError(
            f"{folder}: the index names {what} that no file holds{first}; download the checkpoint "
            "again"
        )
    return entries


def read_index(folder: Path) -> dict[str, str] | None:
    """Return tensor name -> file name of the folder's index, or None without one."""
    paths = sorted(folder.glob("*.safetensors.index.json"))
    usual = folder / "model.safetensors.index.json"
    if not paths:
        return None
    path = usual if usual in paths else paths[0]
    named = read_json(path).get("weight_map")
    if not isinstance(named, dict) or not named:
        raise ModelLoadError(f"{path} has no weight_map; download the checkpoint again")
    for file in named.values():
        if not isinstance(file, str) or Path(file).name != file:
            raise ModelLoadError(f"{path}: {file!r} is no name of a file in its folder")
    return named


def read_header(path: Path) -> dict[str, Entry]:
    """Return what one safetensors file holds.

    Raises:
        ModelLoadError: the file is short, or no safetensors file.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            n_header = int.from_bytes(start, "little")
            if start == b"version ":  # https://git-lfs.github.com/spec/v1
                raise ModelLoadError(
                    f"{path} is a Git LFS pointer, not the weights; fetch them with: git lfs pull"
                )
            if len(start) < 8 or not 2 <= n_header <= MAX_HEADER_BYTES:
                raise ModelLoadError(f"{path} is no safetensors file, or was cut short")
            header = json.loads(file.read(n_header))
        header.pop("__metadata__", None)
        entries = {
            name: Entry(path, entry["dtype"], tuple(entry["shape"]))
            for name, entry in header.items()
        }
        n_data = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {explain(error)}") from error
    except (ValueError, RecursionError, AttributeError, TypeError, KeyError, IndexError) as error:
        raise ModelLoadError(f"{path} is no safetensors file, or was cut short") from error
    if size != 8 + n_header + n_data:
        raise ModelLoadError(
            f"{path} has {size} bytes, its header asks for {8 + n_header + n_data}; it was cut "
            "short or damaged: download it again"
        )
    return entries


def read_torch(path: Path) -> dict[str, Tensor]:
    """Return the state dict in a torch file; no code in it is run.

    Raises:
        ModelLoadError: the file is missing, damaged, or no state dict.
    """
    if path.is_dir():
        raise ModelLoadError(f"{path} is a folder, expected a torch file")
    if not path.is_file():
        raise ModelLoadError(f"{path} does not exist")
    # torch's own texts are not passed on: they advise to run the code in the file.
    damaged = f"{path} is damaged or no file of plain tensors; download it again"
    try:
        # Files of the old form cannot be mapped.
        mapped = zipfile.is_zipfile(path)
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except OSError as error:
        if error.errno == errno.EINVAL:  # torch looked for a place outside of a short file
            raise ModelLoadError(damaged) from error
        raise ModelLoadError(f"{path} cannot be read: {explain(error)}") from error
    except Exception as error:
        raise ModelLoadError(damaged) from error
    if isinstance(loaded, Mapping) and isinstance(loaded.get("state_dict"), Mapping):
        loaded = loaded["state_dict"]
    if not isinstance(loaded, Mapping) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in loaded.items()
    ):
        raise ModelLoadError(f"{path} holds something else than named tensors")
    return dict(loaded)


def first_line(error: Exception) -> str:
    """Return what a library's error says, short enough for a sentence of ours."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
