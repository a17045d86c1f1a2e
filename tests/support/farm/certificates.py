"""Certificates of an authority of the test's own, by openssl."""

import shutil
import subprocess
from pathlib import Path

import pytest


class Authority:
    """An authority whose certificate is `ca`, and which makes certificates of others in its directory."""

    def __init__(self, directory: Path) -> None:
        if (openssl := shutil.which("openssl")) is None:
            pytest.skip("openssl is not installed")
        self._openssl, self._directory = openssl, directory
        self.ca, self._key = self._made("authority", "basicConstraints=critical,CA:TRUE")

    def pair(self, name: str) -> dict[str, Path]:
        """The certificate of this common name, and its key; the certificate also names 127.0.0.1."""
        cert, key = self._made(name, "subjectAltName=IP:127.0.0.1", "-CA", str(self.ca), "-CAkey", str(self._key))
        return {"cert": cert, "key": key}

    def _made(self, name: str, extension: str, *more: str) -> tuple[Path, Path]:
        cert, key = (self._directory / f"{name}.{kind}" for kind in ("pem", "key"))
        words = ["req", "-x509", "-nodes", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2"]
        words += ["-subj", f"/CN={name}", "-addext", extension, "-keyout", str(key), "-out", str(cert), *more]
        subprocess.run([self._openssl, *words], check=True, capture_output=True)
        return cert, key
