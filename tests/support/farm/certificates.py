"""Certificates of an authority of the test's own, by openssl."""

import asyncio
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class Authority:
    """An authority whose certificate is `ca`, and which makes certificates of others in its directory."""

    def __init__(self, directory: Path) -> None:
        if (openssl := shutil.which("openssl")) is None:
            pytest.skip("openssl is not installed")
        self._openssl, self._directory = openssl, directory
        # Python 3.13 accepts an authority only if its certificate says that it may sign others.
        self.ca, self._key = self._made(
            "authority", ("basicConstraints=critical,CA:TRUE", "keyUsage=critical,keyCertSign")
        )

    def pair(self, name: str) -> dict[str, Path]:
        """The certificate of this common name, and its key; the certificate also names 127.0.0.1."""
        extensions = ("basicConstraints=critical,CA:FALSE", "subjectAltName=IP:127.0.0.1")
        cert, key = self._made(name, extensions, "-CA", str(self.ca), "-CAkey", str(self._key))
        return {"cert": cert, "key": key}

    def _made(self, name: str, extensions: tuple[str, ...], *more: str) -> tuple[Path, Path]:
        cert, key = (self._directory / f"{name}.{kind}" for kind in ("pem", "key"))
        words = ["req", "-x509", "-nodes", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2"]
        words += ["-subj", f"/CN={name}", "-keyout", str(key), "-out", str(cert), *more]
        words += [word for extension in extensions for word in ("-addext", extension)]
        subprocess.run([self._openssl, *words], check=True, capture_output=True)
        return cert, key


@contextmanager
def behind_tls(path: str, authority: Authority) -> Iterator[str]:
    """A port that passes what comes on to the socket at `path`, for peers with certificates of the authority."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority.ca)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(*authority.pair("storage").values())
    context.set_alpn_protocols(["h2"])
    loop = asyncio.new_event_loop()

    async def pass_on(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            target.write(data)
            await target.drain()
        target.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        source, target = await asyncio.open_unix_connection(path)
        await asyncio.gather(pass_on(reader, target), pass_on(source, writer), return_exceptions=True)

    server = loop.run_until_complete(asyncio.start_server(serve, "127.0.0.1", 0, ssl=context))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        server.close()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
